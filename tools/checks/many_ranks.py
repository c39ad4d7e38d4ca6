"""Start many real ranks on this machine, and show which costs of a rank grow with the number of ranks.

    python -m tools.checks.many_ranks                        # 2, 8, 16 and 32 ranks, some minutes
    python -m tools.checks.many_ranks --ranks 2 4            # the smallest case
    python -m tools.checks.many_ranks --ranks 2 32 --profile # also the functions whose calls grow

Each number of ranks N trains a tiny model at ZeRO-1, with three lanes (batch rows) per rank:

    start       N ranks, 20 steps planned, an evaluation after step 5 and a checkpoint after step 10; one rank is killed
                after step 15, and the other ranks are ended as a launcher does it
    resume      N ranks continue from step 10 to step 20
    elastic     3/4 of the ranks continue to step 24

Ranks are processes of a forkserver that has imported everything, connected by gloo. 32 ranks share the cores of this
machine, so their clock times say little. The table shows the CPU seconds of one rank, all its threads together. With
the same work per rank they should hardly grow. The last column divides the largest number by that of the second
smallest number of ranks. `fullest` is the rank with the most CPU time, which is usually rank 0.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import multiprocessing.connection
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from txl_dist.config.load import configure
from txl_dist.console.formatting import format_table
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.distributed.rendezvous import free_port
from txl_dist.train.callbacks import Callback, SaveEnd, StepEnd, TrainStart, ValidationEnd

RANKS = (2, 8, 16, 32)
LANES_PER_RANK = 3
EVALUATED, SAVED, KILLED, RESUMED, LAST = 5, 10, 15, 20, 24
"""Steps of the run: its evaluation, its checkpoint, the loss of a rank, and the ends of the two continuations."""
WRITTEN = 12
"""Step at which the marks are written. Every rank has reached it when another rank is killed."""
JOB_LIMIT_S = 1800.0
"""Seconds after which a job that has not ended is given up."""
ROWS = ("start", "first step", "step", "evaluation", "save", "resume", "elastic resume", "end")


class Mark(NamedTuple):
    """Moment of a rank: an event, the step, the CPU seconds of the process, and the seconds of the clock."""

    event: str
    step: int
    cpu_s: float
    clock_s: float


class Recorder(Callback):
    """Callback that notes the CPU time of its rank at each event, and writes the notes to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.marks: list[Mark] = []
        self.note("begin", 0)

    def note(self, event: str, step: int) -> None:
        """Append a mark."""
        self.marks.append(Mark(event, step, time.process_time(), time.time()))

    def write(self) -> None:
        """Write all marks, and the host memory of this process alone in MiB."""
        own_mib = psutil.Process().memory_full_info().uss / 2**20
        self.file.write_text(json.dumps({"marks": self.marks, "own_mib": own_mib}), encoding="utf-8")

    def on_train_start(self, start: TrainStart) -> None:
        """Note the end of the start."""
        self.note("started", start.step)

    def on_step_end(self, end: StepEnd) -> None:
        """Note the end of a step."""
        self.note("step", end.step)
        if end.step == WRITTEN:
            self.write()

    def on_validation_end(self, end: ValidationEnd) -> None:
        """Note the end of an evaluation."""
        self.note("evaluated", end.step)

    def on_save(self, end: SaveEnd) -> None:
        """Note that a checkpoint is complete."""
        self.note("saved", end.step)


def run_rank(settings: dict[str, Any], file: Path, profiled: bool) -> None:
    """Train as one rank, whose place the environment gives, and write its marks. This runs in a forked process."""
    from txl_dist.train.start import pretrain

    recorder = Recorder(file)
    profile = cProfile.Profile(time.thread_time)
    if profiled:
        profile.enable()
    pretrain(configure(**settings), callbacks=[recorder])
    profile.disable()
    recorder.note("end", LAST)
    recorder.write()
    if profiled:
        profile.dump_stats(file.with_suffix(".prof"))


def settings_of(folder: Path, *, num_ranks: int) -> dict[str, dict[str, Any]]:
    """Return the settings of the run of so many ranks."""
    return {
        "run": {"dir": str(folder / f"run{num_ranks}")},
        "data": {"path": str(folder / "corpus")},
        "model": {"num_layers": 2, "width": 32, "num_heads": 2, "head_width": 16, "ff_width": 64},
        "optim": {"schedule": "constant"},
        "train": {
            "num_lanes": LANES_PER_RANK * num_ranks,
            "segment_len": 16,
            "memory_len": 16,
            "microbatch_lanes": 1,
            "max_steps": RESUMED,
        },
        "engine": {"zero_stage": 1, "num_threads": 1},
        "eval": {"every_steps": EVALUATED, "num_lanes": num_ranks, "max_tokens": 200 * num_ranks},
        "checkpoint": {"every_steps": SAVED, "asynchronous": False},
        "metrics": {"tensorboard": False},
    }


class Job(NamedTuple):
    """Result of one start: the marks of each rank by their event and step, and the seconds that the start took."""

    ranks: list[dict[tuple[str, int], Mark]]
    own_mib: list[float]
    clock_s: float


def start_job(
    settings: dict[str, Any], folder: Path, *, num_ranks: int, kills: bool = False, profiled: bool = False
) -> Job:
    """Run a job of so many ranks to its end, or with `kills` until its last rank is killed. Raises SystemExit if a rank
    fails."""
    # Test helpers are imported here, because an installed package has no tests.
    from tests.helpers.forked import environment, place, start

    folder.mkdir()
    port = free_port()
    fault = f"kill:{num_ranks - 1}:{KILLED}:boundary" if kills else ""
    begin_s = time.monotonic()
    processes: list[ForkServerProcess] = []
    for rank in range(num_ranks):
        variables = environment(**place(rank, num_ranks, port), TXL_FAILPOINTS=fault)
        log = folder / f"{rank}.log"
        file = folder / f"{rank}.json"
        processes.append(start(run_rank, settings, file, profiled, variables=variables, out=log))
    try:
        codes = end_codes(processes, may_fail=kills)
    finally:
        for process in processes:
            process.kill()
            process.join()
    clock_s = time.monotonic() - begin_s
    if not kills and any(codes):
        failed = [rank for rank, code in enumerate(codes) if code]
        raise SystemExit(f"rank {failed[0]} failed:\n{(folder / f'{failed[0]}.log').read_text(encoding='utf-8')}")
    marks = []
    own_mib = []
    for file in sorted(folder.glob("*.json")):
        written = json.loads(file.read_text(encoding="utf-8"))
        listed = [Mark(*values) for values in written["marks"]]
        marks.append({(mark.event, mark.step): mark for mark in listed})
        own_mib.append(written["own_mib"])
    return Job(marks, own_mib, clock_s)


def end_codes(processes: Sequence[ForkServerProcess], *, may_fail: bool) -> list[int]:
    """Wait until all ranks have ended, or until one has failed, and return the exit codes. A rank that still runs has
    the code 0."""
    end_s = time.monotonic() + JOB_LIMIT_S
    while True:
        living = [process.sentinel for process in processes if process.exitcode is None]
        if any(process.exitcode for process in processes) or not living:
            if may_fail:
                time.sleep(1.0)  # the launcher's grace
            return [process.exitcode or 0 for process in processes]
        if time.monotonic() > end_s:
            raise SystemExit(f"{len(living)} ranks did not end within {JOB_LIMIT_S:.0f} s")
        multiprocessing.connection.wait(living, timeout=1.0)


def between(job: Job, first: tuple[str, int], last: tuple[str, int]) -> list[float]:
    """Return the CPU seconds of each rank between two events (name, step)."""
    return [marks[last].cpu_s - marks[first].cpu_s for marks in job.ranks]


def step_seconds(job: Job, steps: range) -> list[float]:
    """Return the median CPU seconds of each rank for one of these steps."""
    medians = []
    for marks in job.ranks:
        cpu_s = [marks["step", step].cpu_s for step in steps]
        medians.append(statistics.median(after - before for before, after in itertools.pairwise(cpu_s)))
    return medians


def costs(first: Job, resumed: Job, elastic: Job) -> dict[str, list[float]]:
    """Return the CPU seconds of each rank by the name of the part. ROWS lists the parts."""
    plain = step_seconds(first, range(EVALUATED + 1, SAVED + 1))

    def beyond_a_step(step: int) -> list[float]:
        whole = between(first, ("step", step), ("step", step + 1))
        return [seconds - own for seconds, own in zip(whole, plain, strict=True)]

    return {
        "start": between(first, ("begin", 0), ("started", 0)),
        "first step": between(first, ("started", 0), ("step", 1)),
        "step": plain,
        "evaluation": beyond_a_step(EVALUATED),
        "save": between(first, ("step", SAVED), ("saved", SAVED)),
        "resume": between(resumed, ("begin", 0), ("started", SAVED)),
        "elastic resume": between(elastic, ("begin", 0), ("started", RESUMED)),
        "end": between(resumed, ("step", RESUMED), ("end", LAST)),
    }


def measure(folder: Path, *, num_ranks: int, profiled: bool) -> dict[str, Any]:
    """Run the three jobs of so many ranks, and return their costs, their clock times and the memory of a rank."""
    settings = settings_of(folder, num_ranks=num_ranks)
    place = folder / f"ranks{num_ranks}"
    place.mkdir()
    first = start_job(settings, place / "start", num_ranks=num_ranks, kills=True)
    resumed = start_job(settings, place / "resume", num_ranks=num_ranks, profiled=profiled)
    longer = settings | {"train": settings["train"] | {"max_steps": LAST}}
    elastic = start_job(longer, place / "elastic", num_ranks=max(1, 3 * num_ranks // 4))
    return {
        "ranks": num_ranks,
        "cpu_s": costs(first, resumed, elastic),
        "clock_s": {"start": first.clock_s, "resume": resumed.clock_s, "elastic": elastic.clock_s},
        "own_mib": max(resumed.own_mib),
    }


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table: for each part the CPU milliseconds of the mean and of the fullest rank."""
    rows = [["CPU ms of a rank", *(f"{result['ranks']} ranks, fullest" for result in results), "growth"]]
    for name in ROWS:
        means = [statistics.mean(result["cpu_s"][name]) for result in results]
        fullest = [max(result["cpu_s"][name]) for result in results]
        cells = [f"{1000 * mean:,.1f}, {1000 * most:,.1f}" for mean, most in zip(means, fullest, strict=True)]
        base = fullest[min(1, len(fullest) - 2)]
        growth = f"{fullest[-1] / base:.2f}" if base > 0 else "-"
        rows.append([name, *cells, growth])
    for name in ("start", "resume", "elastic"):
        rows.append([f"clock of job {name}, s", *(f"{result['clock_s'][name]:.1f}" for result in results), ""])
    rows.append(["own memory of a rank, MiB", *(f"{result['own_mib']:.0f}" for result in results), ""])
    return format_table(rows)


def functions_that_grow(fewest: Path, most: Path, *, num: int = 40) -> list[str]:
    """Return the functions whose own CPU time grew most between two profiles, with their numbers of calls."""
    before: Any = pstats.Stats(str(fewest))
    after: Any = pstats.Stats(str(most))
    grown = []
    for function, (_, calls, own_s, *_) in after.stats.items():
        _, calls_before, own_before_s, *_ = before.stats.get(function, (0, 0, 0.0))
        file, line, name = function
        grown.append((own_s - own_before_s, f"{calls_before:>7} -> {calls:>7} calls  {file}:{line} {name}"))
    grown.sort(reverse=True)
    return [f"{1000 * seconds:8.1f} ms  {text}" for seconds, text in grown[:num]]


def main() -> None:
    """Measure each number of ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=list(RANKS), help="numbers of ranks, in ascending order"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--profile", action="store_true", help="profile rank 0 of the resumed jobs, which costs time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        folder = Path(scratch)
        text = "".join(f"{number} times {number} is {number * number}\n" for number in range(20_000))
        (folder / "text.txt").write_text(text, encoding="utf-8")
        prepare_corpus(folder / "corpus", inputs=[folder / "text.txt"], kind="byte", valid_fraction=0.05)
        results = []
        for num_ranks in arguments.ranks:
            results.append(measure(folder, num_ranks=num_ranks, profiled=arguments.profile))
            print(f"{num_ranks} ranks: {results[-1]['clock_s']}", file=sys.stderr, flush=True)
        print("\n".join(table(results)))
        if arguments.json:
            arguments.json.write_text(json.dumps(results), encoding="utf-8")
        if arguments.profile:
            profiles = [folder / f"ranks{num_ranks}/resume/0.prof" for num_ranks in arguments.ranks]
            print("\n".join(functions_that_grow(profiles[0], profiles[-1])))


if __name__ == "__main__":
    main()
