"""Measure how long checkpoints stop a training run, and how fast they are written, verified and loaded.

    python -m tools.benchmarks.checkpoint [--ranks 2] [--rounds 5]       some minutes
    python -m tools.benchmarks.checkpoint --layers 1 --rounds 1          the smallest size, some seconds

A model of about 45 million parameters (over 500 MB with both moments) is trained on a CPU with ZeRO-1 in fp32. It is
saved as in the training loop, alternately asynchronously and synchronously in the same run. Each save gives these
figures:

    stall       time that the loop spends in `CheckpointManager.begin` and `CheckpointManager.finish`: probe, copy,
                commit and pruning; for a synchronous save also the writing
    committed   time from the beginning of the save to the rename of the checkpoint; an asynchronous save lets the
                training continue during this time
    step        milliseconds of a training step, without a running writer and with a running writer

The program then compares write + hash with `dd bs=16M conv=fsync` of as many bytes into the same folder. It also
measures the verification and the loading of a checkpoint from a warm page cache. Each rank is a process. The folder
(`--folder`) should be on the disk that the runs will use.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.multiprocessing.spawn import spawn

from tools.benchmarks.measuring import announced, positive
from txl_dist.artifacts import checkpoint_folder
from txl_dist.config.load import Config
from txl_dist.data.loader.corruption import CorruptionPolicy
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.distributed.collectives import RankInfo, StepFlags, barrier, distributed_context
from txl_dist.distributed.rendezvous import free_port
from txl_dist.train.batch import batch_maker, read_inputs
from txl_dist.train.callbacks import Callbacks
from txl_dist.train.checkpoint.engine_probe import check_probe, make_probe
from txl_dist.train.checkpoint.manager import CheckpointManager
from txl_dist.train.checkpoint.read import examine_together, load_checkpoint
from txl_dist.train.checkpoint.validate import read_state
from txl_dist.train.checkpoint.writer import AsyncWriter
from txl_dist.train.engine.zero import ZeroEngine
from txl_dist.train.monitoring.preemption import PreemptionRequests
from txl_dist.train.monitoring.stragglers import StepClock
from txl_dist.train.monitoring.watch import Watch
from txl_dist.train.report.loggers import MetricReporter
from txl_dist.train.run_plan import plan_run
from txl_dist.train.stability import Health
from txl_dist.train.state import RunContext, TrainState
from txl_dist.train.stepper import Stepper

MODES = ("asynchronous", "synchronous")
STEPS_BETWEEN = 3
NEVER = 10**9

Times = dict[str, list[float]]
"""Seconds of each round, by the name of the measured part."""


def config_of(folder: Path, *, mode: str, layers: int, ranks: int) -> Config:
    """Return the settings of the run for a mode of saving. A layer has 3.4 million parameters, and the vocabulary is
    the 256 bytes."""
    return Config.model_validate(
        {
            "run": {"dir": str(folder / mode)},
            "data": {"path": str(folder / "corpus"), "eval_split": ""},
            "model": {"num_layers": layers, "width": 512, "num_heads": 8, "head_width": 64, "ff_width": 2048},
            "train": {
                "num_lanes": ranks,
                "segment_len": 32,
                "memory_len": 32,
                "microbatch_lanes": 1,
                "max_steps": NEVER,
            },
            "checkpoint": {"every_steps": NEVER, "keep_last": 1, "asynchronous": mode == "asynchronous"},
            "metrics": {"tensorboard": False},
        }
    )


class Bench:
    """One rank of the benchmark: an engine that is trained, and one `CheckpointManager` per mode."""

    def __init__(self, folder: Path, ranks: RankInfo, *, layers: int) -> None:
        configs = {mode: config_of(folder, mode=mode, layers=layers, ranks=ranks.world_size) for mode in MODES}
        self.ranks, self.config = ranks, configs[MODES[0]]
        self.jobs = {mode: plan_run(config, ranks).stages[0].context for mode, config in configs.items()}
        self.job = self.jobs[MODES[0]]
        self.engine = self.new_engine()
        self.maker = batch_maker(self.engine.model, mask_documents=False)
        self.clock = StepClock(ranks.device, sees_forward=True)
        self.stepper = Stepper(
            self.engine,
            self.clock,
            ranks,
            self.job.plan,
            seed=self.config.run.seed,
            first_lane=self.job.lanes.start,
            scored_len=self.job.scored_len,
        )
        stream = self.job.corpora.begin
        empty = self.engine.empty_memory(num_lanes=1, memory_len=self.config.train.memory_len)
        self.state = TrainState(0, 0, Health(), stream, (empty,) * self.job.plan.num_microbatches)
        self.inputs = read_inputs(
            self.job.corpora.train,
            stream,
            lanes=self.job.lanes,
            segment_len=self.config.train.segment_len,
            microbatch_lanes=self.job.plan.microbatch_lanes,
            maker=self.maker,
            damage=CorruptionPolicy(),
            depth=self.config.data.prefetch_depth,
            device=ranks.device,
        )
        self.stops = PreemptionRequests()
        self.savings = {mode: self._saving(job) for mode, job in self.jobs.items()}
        self.written = False

    def new_engine(self) -> ZeroEngine:
        """Build an engine as at the start of a run."""
        return ZeroEngine(self.config, vocab_size=self.job.vocab_size, plan=self.job.plan, ranks=self.ranks)

    def _saving(self, job: RunContext) -> CheckpointManager:
        job.run_dir.mkdir(exist_ok=True)
        reporter = MetricReporter(job, start_step=0)
        silent: Any = SimpleNamespace(beat=lambda phase: None)
        saver = AsyncWriter(job, Watch(self.stops, silent, lock=None, nonce="bench"))
        return CheckpointManager(
            saver, self.engine, self.maker, reporter, newest=None, evaluated={}, callbacks=Callbacks(())
        )

    def step(self, saving: CheckpointManager | None = None) -> float:
        """Make one training step and return its seconds."""
        began = time.perf_counter()
        self.clock.begin()
        given = next(self.inputs)
        memories, decision = self.stepper(
            given,
            self.state.memories,
            step=self.state.step + 1,
            votes=StepFlags(written=saving is not None and saving.is_written),
        )
        self.engine.step(lr=1e-5, grad_norm=decision.grad_norm)
        self.written = decision.votes.written
        self.state = TrainState(self.state.step + 1, 0, Health(), given.stream, memories)
        return time.perf_counter() - began

    def probe(self) -> None:
        """Compute the checkpoint's probe (losses of fixed tokens). Each save begins with this computation."""
        lens = self.config.train.memory_per_layer(self.config.model.num_layers)
        make_probe(self.engine, self.maker, memory_lens=lens)

    def save(self, mode: str, times: Times) -> None:
        """Save once, and train until the checkpoint is committed. Append the measured seconds to `times`."""
        saving = self.savings[mode]
        times["step alone"] += [self.step() for _ in range(STEPS_BETWEEN)]
        times["probe"].append(seconds(self.probe))
        barrier()
        began = time.perf_counter()
        stall = seconds(lambda: saving.begin(self.state))
        self.written = mode == "synchronous"
        while not self.written:
            times["step with a writer"].append(self.step(saving))
        if mode == "asynchronous":
            commit = seconds(lambda: saving.finish(self.state.step))
            times["commit"].append(commit)
            stall += commit
        times[f"{mode}: stall"].append(stall)
        times[f"{mode}: committed"].append(time.perf_counter() - began)

    def load(self, folder: Path) -> None:
        """Load a checkpoint into the engine, as at the start of a resumed run."""
        load_checkpoint(read_state(folder), self.engine, self.job, stream=self.state.stream)


def seconds(action: Callable[[], object]) -> float:
    """Run `action` and return its seconds."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def dd(folder: Path, *, num_bytes: int) -> float:
    """Write `num_bytes` zeros to the disk with `dd`, and return the seconds."""
    path = folder / "dd"
    block = 16 << 20
    command = ["dd", "if=/dev/zero", f"of={path}", f"bs={block}", f"count={-(-num_bytes // block)}", "conv=fsync"]
    duration = seconds(lambda: subprocess.run(command, check=True, capture_output=True))
    path.unlink()
    return duration


def work(rank: int, folder: Path, port: int, arguments: argparse.Namespace) -> None:
    """Run one rank: set its environment, join the other ranks and measure."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": arguments.ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in here.items()} | {"MASTER_ADDR": "127.0.0.1"}
    with distributed_context(timeout_s=600) as ranks:
        measure(folder, ranks, layers=arguments.layers, rounds=arguments.rounds)
    sys.stdout.flush()
    os._exit(0)  # the interpreter's teardown sometimes aborts in native threads


def measure(folder: Path, ranks: RankInfo, *, layers: int, rounds: int) -> None:
    """Measure all figures. Rank 0 prints them."""
    say: Callable[..., object] = print if ranks.is_rank0 else lambda *_, **__: None
    bench = Bench(folder, ranks, layers=layers)
    bench.save("asynchronous", first := new_times())  # allocates the copy in host memory
    bench.save("synchronous", new_times())
    checkpoint = checkpoint_folder(folder / "synchronous", bench.state.step)
    num_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors"))
    gib, parameters = num_bytes / 2**30, sum(p.numel() for p in bench.engine.model.parameters())
    say(f"{parameters:,} parameters, checkpoint of {num_bytes / 1e6:,.0f} MB, {ranks.world_size} ranks, ", end="")
    say(f"{ranks.num_threads} threads each; first save: stall {first['asynchronous: stall'][0]:.3f} s")

    times = new_times()
    numbers = range(rounds)
    for number in announced(numbers, what="round") if ranks.is_rank0 else numbers:
        for mode in MODES if number % 2 == 0 else MODES[::-1]:
            bench.save(mode, times)
        if ranks.is_rank0:
            times["dd"].append(dd(folder, num_bytes=num_bytes))
        barrier()
    if ranks.is_rank0:
        print_saves(times, gib)

    checkpoint = checkpoint_folder(folder / "synchronous", newest_step(folder / "synchronous"))
    verify = [seconds(lambda: examine_together(checkpoint, ranks)) for _ in range(rounds)]
    build = seconds(bench.new_engine)
    load = [seconds(lambda: bench.load(checkpoint)) for _ in range(rounds)]
    say(rate("verify", verify, gib), "|", rate("load", load, gib))
    probe = [
        seconds(lambda: check_probe(bench.engine, bench.maker, checkpoint, precision=bench.config.engine.precision))
        for _ in range(rounds)
    ]
    parts = (min(verify), build, min(load), min(probe))
    say(f"resume: verify + build the engine + load + probe = {' + '.join(f'{one:.2f}' for one in parts)} s")


def print_saves(times: Times, gib: float) -> None:
    """Print the costs of the saves. `gib` is the size of a checkpoint in GiB."""
    for name in ("probe", "commit", "asynchronous: stall", "synchronous: stall", "asynchronous: committed", "dd"):
        print(line(name, times[name]))
    shares = [a / s for a, s in zip(times["asynchronous: stall"], times["synchronous: stall"], strict=True)]
    print(line("stall, asynchronous / synchronous", shares, unit=""))
    probe_s = statistics.median(times["probe"])
    write = [stall - probe_s for stall in times["synchronous: stall"]]
    print(rate("write + hash (synchronous stall less probe)", write, gib), "|", rate("dd", times["dd"], gib))
    for name in ("step alone", "step with a writer"):
        print(line(name, [1000 * one for one in times[name]], unit="ms"), f"of {len(times[name])} steps")


def new_times() -> Times:
    """Return an empty list for each measured part."""
    names = ["probe", "commit", "step alone", "step with a writer", "dd"]
    return {name: [] for name in (*names, *(f"{mode}: {what}" for mode in MODES for what in ("stall", "committed")))}


def newest_step(run_dir: Path) -> int:
    """Return the step of the run's last checkpoint."""
    return max(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").iterdir())


def line(name: str, values: Iterable[float], *, unit: str = "s") -> str:
    """Return a line with the name, and the minimum and the median of the values."""
    values = list(values)
    return f"{name:<34} min {min(values):8.3f}  median {statistics.median(values):8.3f} {unit}"


def rate(name: str, values: Iterable[float], gib: float) -> str:
    """Return a text with the best and the median rate in GiB/s, for values in seconds."""
    values = list(values)
    return f"{name}: {gib / min(values):.2f} GiB/s (median {gib / statistics.median(values):.2f})"


def main() -> None:
    """Prepare a corpus in a temporary folder, start the ranks and print what they measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, default=1, help="processes that train together")
    parser.add_argument(
        "--layers", type=positive, default=13, help="layers of the model, with 3.4 million parameters each"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="timed saves of each mode")
    parser.add_argument("--folder", type=Path, default=None, help="folder for the corpus and the checkpoints")
    arguments = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        folder = Path(scratch)
        (folder / "text.txt").write_text("".join(f"{number} times {number}\n" for number in range(20_000)))
        prepare_corpus(folder / "corpus", inputs=[folder / "text.txt"], kind="byte", valid_fraction=0.0)
        spawn(work, args=(folder, free_port(), arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
