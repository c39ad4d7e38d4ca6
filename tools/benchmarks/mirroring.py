"""Measure what a mirror in object storage costs a training run, and how fast it uploads.

    python -m tools.benchmarks.mirroring                        some minutes, on an S3 server on the loopback
    python -m tools.benchmarks.mirroring --layers 1 --steps 4 --mib 1 --rounds 1 --runs 1   the smallest size

    share       time that the main thread spends in the mirror's code / time of the steps between the first and the last
    memory      peak resident memory of a step in the run with a mirror, minus that of the same run without one: the
                difference of the medians and of the largest over all steps but the first
    transfer    growth of resident memory during one upload, by the mirror's thread and by `s3fs.put`
    rate        bytes per second of the mirror's thread / bytes per second of `s3fs.put` on the same files: the fastest
                rounds, then the medians
    CPU         seconds of this process for one upload, all threads, in the cheapest rounds

A run is one process with one thread. It saves every second step, which is far more often than in practice. Each kind of
run is repeated, and the smaller memory counts. The two kinds of upload take turns after one round to warm up, and each
has its own connections to the same server. Their objects are removed between the rounds. The server is moto's, which
runs on the same machine, so both rates are those of the server and the processor. The extra `dev` has it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tools.benchmarks.measuring import Timing, milliseconds, peak_mib, positive, resident_peak_mib, speedup
from txl_dist.artifacts import CHECKPOINTS
from txl_dist.config.schema import CheckpointSection
from txl_dist.data.storage.bucket import Bucket
from txl_dist.io.files import sha256_of_file
from txl_dist.io.manifest import write_manifest
from txl_dist.train.checkpoint.mirror.uploads import Upload, Uploader

_MIB = 2**20


class RunCost(NamedTuple):
    """Cost of one run: seconds of its steps and of the mirror's code, and peak memory of each step but the first."""

    steps_s: float
    mirror_s: float
    peaks_mib: list[float]


def run_once(folder: Path, url: str, *, layers: int, steps: int) -> RunCost:
    """Train in this process, and return what it costs."""
    from txl_dist.data.prepare.run import prepare_corpus
    from txl_dist.train import start
    from txl_dist.train.callbacks import Callback, StepEnd
    from txl_dist.train.checkpoint.mirror.mirror import Mirror

    class Clock(Callback):
        """Times of the ends of the steps, and the peak memory since the step before."""

        def __init__(self) -> None:
            self.times_s: list[float] = []
            self.peaks_mib: list[float] = []

        def on_step_end(self, end: StepEnd) -> None:
            self.times_s.append(time.perf_counter())
            self.peaks_mib.append(resident_peak_mib())

    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 2000, encoding="utf-8")
    corpus = prepare_corpus(folder / "corpus", inputs=[text]).corpus
    opened: list[Mirror | None] = []
    module: Any = start
    mirror_of = module.mirror_of

    def remember(*arguments: Any, **options: Any) -> Mirror | None:
        opened.append(mirror_of(*arguments, **options))
        return opened[-1]

    module.mirror_of = remember
    clock = Clock()
    start.pretrain(
        {
            "run": {"dir": str(folder / "run")},
            "data": {"path": corpus.location, "eval_split": ""},
            "model": {"num_layers": layers, "width": 512, "num_heads": 8, "head_width": 64, "ff_width": 2048},
            "train": {
                "num_lanes": 4,
                "microbatch_lanes": 4,
                "segment_len": 64,
                "memory_len": 64,
                "max_steps": steps,
            },
            "checkpoint": {"every_steps": 2, "keep_last": 2, "mirror": url},
            "metrics": {"tensorboard": False},
        },
        callbacks=[clock],
    )
    mirror_s = sum(mirror.seconds for mirror in opened if mirror is not None)
    return RunCost(clock.times_s[-1] - clock.times_s[0], mirror_s, clock.peaks_mib[1:])


def in_new_process(url: str, *, layers: int, steps: int) -> RunCost:
    """Return the result of `run_once` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--one", url, "--folder", folder, "--layers", str(layers), "--steps", str(steps)]
        command = [sys.executable, "-m", "tools.benchmarks.mirroring", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        return RunCost(*json.loads(done.stdout.splitlines()[-1]))


class Uploads:
    """Two ways to upload a checkpoint of two files: by the mirror's thread, and by `s3fs.put`."""

    def __init__(self, file_system: Any, url: str, folder: Path, *, mib: int) -> None:
        self._file_system = file_system
        self._url = url
        self._run_dir = folder
        self._checkpoint = folder / CHECKPOINTS / "step_000000001"
        self._names = ("engine/00000.safetensors", "lanes/00000-00003.safetensors")
        files = {}
        for name in self._names:
            path = self._checkpoint / name
            path.parent.mkdir(parents=True)
            path.write_bytes(os.urandom(mib * _MIB))
            files[name] = {"bytes": mib * _MIB, "sha256": sha256_of_file(path)}
        write_manifest(self._checkpoint, files)

    def by_mirror(self) -> None:
        """Upload by the mirror's thread, until it is idle."""
        bucket = Bucket(f"{self._url}/mirror")
        uploader = Uploader(bucket, CheckpointSection(), run_dir=self._run_dir, is_first=True, num_nodes=1)
        uploader.enqueue(Upload(self._checkpoint, self._names))
        while not uploader.is_idle:
            time.sleep(0.002)
        uploader.close()

    def by_s3fs(self) -> None:
        """Upload by s3fs."""
        self._file_system.put(str(self._checkpoint), f"{self._url}/plain", recursive=True)

    def remove(self) -> None:
        """Remove the uploaded objects."""
        for folder in self._file_system.ls(self._url, refresh=True):
            self._file_system.rm(folder, recursive=True)

    def memory(self) -> dict[str, float]:
        """Return the growth of resident memory in MiB of one upload in each way. Call it before `timings`."""
        growths = {}
        Bucket(f"{self._url}/small").write("a", b"")  # the first request of each makes its connection
        self._file_system.pipe_file(f"{self._url}/small/b", b"")
        for name, action in (("mirror", self.by_mirror), ("s3fs", self.by_s3fs)):
            growths[name] = peak_mib(action, runs=1)
            self.remove()
        return growths

    def timings(self, *, rounds: int) -> tuple[dict[str, Timing], dict[str, float]]:
        """Return the times of each way, and its smallest CPU seconds, over the rounds after one round to warm up."""
        actions = {"mirror": self.by_mirror, "s3fs": self.by_s3fs}
        times_ms: dict[str, list[float]] = {name: [] for name in actions}
        cpu_s: dict[str, list[float]] = {name: [] for name in actions}
        for number in range(rounds + 1):
            order = sorted(actions, reverse=number % 2 == 1)
            for name in order:
                begin_s = time.process_time()
                time_ms = milliseconds(actions[name])
                if number:
                    times_ms[name].append(time_ms)
                    cpu_s[name].append(time.process_time() - begin_s)
                self.remove()
        timings = {name: Timing(min(times), statistics.median(times)) for name, times in times_ms.items()}
        return timings, {name: min(seconds) for name, seconds in cpu_s.items()}


def main() -> None:
    """Measure, and print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=positive, default=6, help="layers of the model, of 3.4 million parameters each"
    )
    parser.add_argument("--steps", type=positive, default=30, help="steps of each run")
    parser.add_argument("--runs", type=positive, default=2, help="runs with a mirror, and runs without one")
    parser.add_argument("--mib", type=positive, default=64, help="size of each of two files, in MiB")
    parser.add_argument("--rounds", type=positive, default=8, help="timed uploads in each way")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(run_once(options.folder, options.one, layers=options.layers, steps=options.steps)))
        return
    # Test helpers are imported here, because an installed package has no tests.
    from tests.helpers.object_store import serve_objects

    with serve_objects() as store, tempfile.TemporaryDirectory() as folder:
        os.environ |= store.variables
        mirrored = []
        alone = []
        for number in range(options.runs):
            url = f"{store.url}/runs/{number}"
            mirrored.append(in_new_process(url, layers=options.layers, steps=options.steps))
            alone.append(in_new_process("", layers=options.layers, steps=options.steps))
        uploads = Uploads(store.file_system, f"{store.url}/rates", Path(folder), mib=options.mib)
        growths = uploads.memory()
        timings, cpu_s = uploads.timings(rounds=options.rounds)
    steps_s = sum(run.steps_s for run in mirrored)
    mirror_s = sum(run.mirror_s for run in mirrored)
    print(f"share     {100 * mirror_s / steps_s:.3f} % of {steps_s:.1f} s ({1000 * mirror_s:.2f} ms)")
    median_mib = [min(statistics.median(run.peaks_mib) for run in runs) for runs in (mirrored, alone)]
    most_mib = [min(max(run.peaks_mib) for run in runs) for runs in (mirrored, alone)]
    print(
        f"memory    {median_mib[0] - median_mib[1]:+.0f} MiB by the median step, {most_mib[0] - most_mib[1]:+.0f} MiB "
        f"by the largest ({most_mib[0]:.0f} MiB in all)"
    )
    print(f"transfer  {growths['mirror']:+.0f} MiB, s3fs {growths['s3fs']:+.0f} MiB")
    ratios = speedup(timings, "mirror", base="s3fs")
    mib_per_s = {name: 2 * options.mib / timing.min_ms * 1000 for name, timing in timings.items()}
    print(
        f"rate      {ratios.min_ms:.2f} of s3fs by the fastest rounds, {ratios.median_ms:.2f} by the medians "
        f"({mib_per_s['mirror']:.0f} and {mib_per_s['s3fs']:.0f} MiB/s)"
    )
    print(f"CPU       {cpu_s['mirror']:.3f} s, s3fs {cpu_s['s3fs']:.3f} s")


if __name__ == "__main__":
    main()
