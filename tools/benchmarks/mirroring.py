"""Measure what a mirror in object storage costs a training run, and how fast it uploads.

    python -m tools.benchmarks.mirroring                              some minutes, on an S3 server on the loopback
    python -m tools.benchmarks.mirroring --layers 1 --steps 4 --mib 1 --rounds 1     the smallest size, some seconds

    share       time that the main thread spends in the mirror's code / time of the steps between the first and the last
    memory      peak resident memory of the run with a mirror, minus that of the same run without one
    rate        bytes per second of the mirror's thread / bytes per second of `s3fs.put` on the same files

A run is one process with one thread. It saves every second step, which is far more often than in practice. The server
is moto's, which runs on the same machine, so both rates are those of the server and the processor. The extra `dev` has
it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.benchmarks.measuring import positive
from txl_dist.artifacts import CHECKPOINTS
from txl_dist.config.schema import CheckpointSection
from txl_dist.distributed.rendezvous import free_port
from txl_dist.io.files import sha256_of_file
from txl_dist.io.manifest import write_manifest

BUCKET = "bench"
_MIB = 2**20


@contextmanager
def s3_server() -> Iterator[Any]:
    """Start an S3 server with one bucket, and yield its file system. The variables of this process lead to it."""
    port = free_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
        "no_proxy": "127.0.0.1",
    }
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        from s3fs import S3FileSystem

        file_system = S3FileSystem(use_listings_cache=False)
        for _ in range(600):
            try:
                file_system.mkdir(BUCKET)
                break
            except Exception:  # noqa: BLE001  it does not listen yet
                time.sleep(0.2)
        yield file_system
    finally:
        server.kill()
        server.wait()


def run_once(folder: Path, url: str, *, layers: int, steps: int) -> dict[str, float]:
    """Train in this process, and return the seconds of the steps and of the mirror's code, and the peak memory."""
    from txl_dist.data.prepare.run import prepare_corpus
    from txl_dist.train import start
    from txl_dist.train.callbacks import Callback, StepEnd
    from txl_dist.train.checkpoint.mirror.mirror import Mirror

    class Clock(Callback):
        """Times of the ends of the steps."""

        def __init__(self) -> None:
            self.times_s: list[float] = []

        def on_step_end(self, end: StepEnd) -> None:
            self.times_s.append(time.perf_counter())

    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 2000, encoding="utf-8")
    corpus = prepare_corpus(folder / "corpus", inputs=[text]).corpus
    opened: list[Mirror | None] = []
    module: Any = start
    open_mirror = module.open_mirror

    def remember(*arguments: Any, **options: Any) -> Mirror | None:
        opened.append(open_mirror(*arguments, **options))
        return opened[-1]

    module.open_mirror = remember
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
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"steps_s": clock.times_s[-1] - clock.times_s[0], "mirror_s": mirror_s, "peak_mib": peak_mib}


def in_new_process(url: str, *, layers: int, steps: int) -> dict[str, float]:
    """Return the result of `run_once` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--one", url, "--folder", folder, "--layers", str(layers), "--steps", str(steps)]
        command = [sys.executable, "-m", "tools.benchmarks.mirroring", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return result


def rates(file_system: Any, folder: Path, *, mib: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return MiB per second of each round (by the mirror's thread, by s3fs), for two files of `mib` MiB."""
    from txl_dist.data.storage.bucket import Bucket
    from txl_dist.train.checkpoint.mirror.uploads import Upload, Uploader

    ours = []
    plain = []
    names = ("engine/00000.safetensors", "lanes/00000-00003.safetensors")
    for number in range(rounds):
        checkpoint = folder / CHECKPOINTS / f"step_{number + 1:09d}"
        files = {}
        for name in names:
            path = checkpoint / name
            path.parent.mkdir(parents=True)
            path.write_bytes(os.urandom(mib * _MIB))
            files[name] = {"bytes": mib * _MIB, "sha256": sha256_of_file(path)}
        write_manifest(checkpoint, files)
        bucket = Bucket(f"s3://{BUCKET}/rate")
        uploader = Uploader(bucket, CheckpointSection(), run_dir=folder, is_first=True, num_nodes=1)
        start_s = time.perf_counter()
        file_system.put(str(checkpoint), f"{BUCKET}/plain/{number}", recursive=True)
        plain.append(2 * mib / (time.perf_counter() - start_s))
        start_s = time.perf_counter()
        uploader.enqueue(Upload(checkpoint, names))
        while not uploader.is_idle:
            time.sleep(0.001)
        ours.append(2 * mib / (time.perf_counter() - start_s))
        uploader.close()
    return ours, plain


def main() -> None:
    """Measure, and print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=positive, default=6, help="layers of the model, of 3.4 million parameters each"
    )
    parser.add_argument("--steps", type=positive, default=30, help="steps of each run")
    parser.add_argument("--mib", type=positive, default=64, help="size of each of two files, in MiB")
    parser.add_argument("--rounds", type=positive, default=5, help="uploads of these files")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(run_once(options.folder, options.one, layers=options.layers, steps=options.steps)))
        return
    with s3_server() as file_system, tempfile.TemporaryDirectory() as folder:
        mirrored = in_new_process(f"s3://{BUCKET}/run", layers=options.layers, steps=options.steps)
        alone = in_new_process("", layers=options.layers, steps=options.steps)
        ours, plain = rates(file_system, Path(folder), mib=options.mib, rounds=options.rounds)
    share_pct = 100 * mirrored["mirror_s"] / mirrored["steps_s"]
    print(f"share   {share_pct:.3f} % of {mirrored['steps_s']:.1f} s ({1000 * mirrored['mirror_s']:.2f} ms)")
    print(f"memory  {mirrored['peak_mib'] - alone['peak_mib']:+.0f} MiB ({mirrored['peak_mib']:.0f} MiB in all)")
    ratios = [own / other for own, other in zip(ours, plain, strict=True)]
    print(
        f"rate    {statistics.median(ratios):.2f} of s3fs ({min(ratios):.2f} to {max(ratios):.2f}; "
        f"{statistics.median(ours):.0f} and {statistics.median(plain):.0f} MiB/s)"
    )


if __name__ == "__main__":
    main()
