"""Measure recovery inside the job: seconds from a strike to the next finished step, and goodput under strikes.

    python -m tools.benchmarks.measure_recovery [--stages 0 1 2 3] [--ranks 4] [--strikes 30] [--what kill]
    python -m tools.benchmarks.measure_recovery --every 20 --minutes 10 --how recover restart none
    python -m tools.benchmarks.measure_recovery --stages 1 --ranks 2 --strikes 1                the smallest size

The program starts `txl launch` on a small corpus and strikes its ranks at random moments, from outside. In the first
form it strikes again after each recovery, at a random moment of a step. The table gives the seconds between a strike
and the line that reports the first step of the new generation, and the steps that were made again. It shows how many
ranks were replaced although they were not struck, and standard error says why. The last rank is never struck. The table
shows by how much its number of sockets and its memory have grown: the most within a step, without the copies of states.

In the second form one rank is killed every `--every` seconds, and the table gives the share of the time in which new
steps were made. It runs on CPUs only. A job ends after 120 losses within an hour, so more strikes are refused.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import psutil

from tools.benchmarks.measure_ends import launched_ranks, prepare_corpus, start_launcher
from tools.benchmarks.measuring import announced, positive
from txl_dist.console.formatting import counted
from txl_dist.distributed.recovery.seat import read_seat
from txl_dist.distributed.recovery.verdicts import PER_HOUR
from txl_dist.report.recoveries import PHASES

SILENT_S = 3.0
SPARE_S = 10.0
"""Seconds for the spare to import everything. A rank that is lost earlier waits for it."""
WHAT = {
    "kill": "one rank is killed",
    "pair": "two ranks are killed at once",
    "again": "a second rank is killed 0.1 s later, during the recovery",
    "freeze": f"one rank is stopped by SIGSTOP (recover.silent_s = {SILENT_S:g})",
}
TWICE = ("pair", "again")
"""Kinds of strikes that lose two ranks."""
HOW = {
    "recover": "recovery inside the job",
    "restart": "the same command is started again",
    "none": "no rank is killed",
}

RECOVER = ["--recover.spares", "1", "--recover.silent_s", f"{SILENT_S:g}", "--recover.max_in_row", "10"]
LIMITS = ["--engine.timeout_s", "60"]
"""Settings of all runs. With the limit of `measure_ends`, 4 s, a rank on a busy machine counts as hung."""
STRIKES_HEAD = (
    "| stage | ranks | what | strikes | step, ms | median, s | 95 %, s | maximum, s | steps made again | "
    "others replaced | memory of a survivor, MiB | its sockets |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)
GOODPUT_HEAD = "| after a kill | kills | starts | new steps | steps made again | goodput |\n|---|---|---|---|---|---|"


class Recovery(NamedTuple):
    """One recovery as seen from outside."""

    seconds: float
    """Seconds from the strike to the report of the first step of the new generation."""
    steps_again: int
    """Finished steps that were made again."""
    why: str
    """Causes of the losses, and seconds by phase."""


class Metrics:
    """Follows metrics.jsonl of a run."""

    def __init__(self, run: Path) -> None:
        self._path = run / "metrics.jsonl"
        self._num_bytes = 0
        self.highest_step = 0
        self.steps_again = 0
        self.num_recovered = 0
        self.why = ""
        """Causes of the last losses, and seconds by phase of the recovery."""
        self.losses: list[str] = []
        """All losses so far, each with its rank, process and cause."""
        self.step_s: list[float] = []
        """Seconds of each step."""

    def read_on(self) -> None:
        """Read the lines that were written since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._num_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._num_bytes += len(whole) + len(newline)
        for line in whole.splitlines():
            try:
                self._take(json.loads(line))
            except ValueError:  # a rank was killed while it wrote the line
                continue

    def _take(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train":
            self.steps_again += record["step"] <= self.highest_step
            self.highest_step = max(self.highest_step, record["step"])
            self.step_s.append(record["step_ms"] / 1000)
        elif record.get("event") == "recovered":
            self.num_recovered += 1
            self.losses += record["why"].split("; ")
            self.why = f"{record['why']}: " + ", ".join(f"{name} {record[name]:.2f}" for name in PHASES)


def find_ranks(launcher: psutil.Process) -> list[psutil.Process]:
    """Return the processes that are ranks: children of agents that are no spare, and children of spares."""
    ranks = []
    for child in launcher.children(recursive=True):
        try:
            seat = read_seat(child.environ())
            if seat is not None and _num_ancestors_with_seat(child) == int(seat.is_spare):
                ranks.append(child)
        except psutil.Error:  # it has ended meanwhile
            continue
    return ranks


def _num_ancestors_with_seat(process: psutil.Process) -> int:
    """Return how many of a process's ancestors an agent has started, or a spare has forked."""
    count = 0
    parent = process.parent()
    while parent is not None and read_seat(parent.environ()) is not None:
        count += 1
        parent = parent.parent()
    return count


class Job:
    """A run under `txl launch`, with a spare, that is watched and struck."""

    def __init__(self, folder: Path, *words: str, run: Path, num_ranks: int) -> None:
        """Start the run and wait for its first step."""
        self.metrics = Metrics(run)
        self.struck: list[int] = []
        """Processes that were struck."""
        self._output = folder / "output"
        self._process = start_launcher(folder, run, *words, num_ranks=num_ranks)
        self.launcher = psutil.Process(self._process.pid)

    @property
    def has_ended(self) -> bool:
        """Whether the launcher has ended."""
        return self._process.poll() is not None

    def fail(self, why: str) -> NoReturn:
        """End the run and the program, and print the end of the run's output."""
        if not self.has_ended:
            self.end()
        sys.exit(f"{self._output.read_text(encoding='utf-8')[-8000:]}\n{why}")

    def wait_until(self, is_so: Callable[[], bool]) -> float:
        """Read metrics until a condition holds. Return the time. Exits the program if the job ends before."""
        while True:
            self.metrics.read_on()
            if is_so():
                return time.monotonic()
            if self.has_ended:
                self.fail("the job has ended")
            time.sleep(0.002)

    def wait_for_steps(self, count: int) -> float:
        """Wait until the run has made `count` new steps."""
        goal = self.metrics.highest_step + count
        return self.wait_until(lambda: self.metrics.highest_step >= goal)

    def end(self) -> None:
        """End the launcher and all processes that it has started."""
        children = self.launcher.children(recursive=True)
        self._process.terminate()
        self._process.wait()
        for child in psutil.wait_procs(children, timeout=5)[1]:
            child.kill()


def strike(job: Job, what: str, survivor: psutil.Process) -> Recovery:
    """Strike one or two ranks, but not `survivor`, and wait until the job has recovered."""
    metrics = job.metrics
    ranks = [rank for rank in find_ranks(job.launcher) if rank != survivor]
    num_victims = 2 if what in TWICE else 1
    if len(ranks) < num_victims:
        job.fail(f"only {len(ranks)} of the ranks to strike run")
    victims = random.sample(ranks, k=num_victims)
    metrics.read_on()
    before, again = metrics.num_recovered, metrics.steps_again
    start_s = time.monotonic()
    victims[0].send_signal(signal.SIGSTOP if what == "freeze" else signal.SIGKILL)
    if what == "again":
        time.sleep(0.1)
        start_s = time.monotonic()
    if num_victims == 2:
        victims[1].kill()
    end_s = job.wait_until(lambda: metrics.num_recovered > before)
    job.wait_for_steps(1)
    job.struck += [victim.pid for victim in victims]
    return Recovery(end_s - start_s, metrics.steps_again - again, metrics.why)


def not_struck(losses: Sequence[str], struck: Sequence[int]) -> list[str]:
    """Return the losses of ranks whose processes were not struck. A loss is named again if no step followed it."""
    return [loss for loss in dict.fromkeys(losses) if not any(f"(pid {pid})" in loss for pid in struck)]


def peak_memory_mib(job: Job, process: psutil.Process) -> float:
    """Return the most memory in MiB that a process has of its own during the next step, without shared memory.

    A step takes and returns hundreds of MiB in a model of 40 million weights, so one look compares different moments.
    """
    most = 0.0

    def step_is_finished() -> bool:
        nonlocal most
        info = process.memory_info()
        most = max(most, (info.rss - info.shared) / 2**20)
        return job.metrics.highest_step > first_step

    job.metrics.read_on()
    first_step = job.metrics.highest_step
    job.wait_until(step_is_finished)
    return most


def measure_strikes(folder: Path, what: str, stage: int, arguments: argparse.Namespace) -> str:
    """Strike a run `arguments.strikes` times. Return a row of the table."""
    run = folder / f"run-{stage}-{what}"
    words = ["--engine.zero_stage", str(stage), *LIMITS, *RECOVER, *arguments.settings]
    job = Job(folder, *words, run=run, num_ranks=arguments.ranks)
    job.wait_for_steps(5)
    time.sleep(SPARE_S)
    survivor = find_ranks(job.launcher)[-1]
    memory: list[float] = []
    sockets: list[int] = []
    recoveries = []
    for _ in range(arguments.strikes):
        time.sleep(0.5)
        job.wait_for_steps(1)
        time.sleep(random.random() * statistics.median(job.metrics.step_s))  # any moment of a step
        if not survivor.is_running():
            survivor = find_ranks(job.launcher)[-1]
            memory.clear()
            sockets.clear()
        try:
            recoveries.append(strike(job, what, survivor))
        except psutil.NoSuchProcess as gone:
            job.fail(f"process {gone.pid} had ended before it was struck, or the job has ended")
        with suppress(psutil.NoSuchProcess):  # it was replaced
            memory.append(peak_memory_mib(job, survivor))
            sockets.append(len(survivor.net_connections()))
    job.end()
    others = not_struck(job.metrics.losses, job.struck)
    for loss in others:
        print(f"replaced, but not struck: {loss}", file=sys.stderr)
    slowest = max(recoveries)
    print(f"slowest: {slowest.seconds:.2f} s: {slowest.why}", file=sys.stderr)
    times = sorted(recovery.seconds for recovery in recoveries)
    again = sum(recovery.steps_again for recovery in recoveries)
    step_ms = 1000 * statistics.median(job.metrics.step_s)
    columns = [
        f"{stage}",
        f"{arguments.ranks}",
        WHAT[what],
        f"{len(times)}",
        f"{step_ms:.0f}",
        f"{statistics.median(times):.2f}",
        f"{times[int(0.95 * (len(times) - 1))]:.2f}",
        f"{times[-1]:.2f}",
        f"{again}",
        f"{len(others)}",
        f"{memory[0]:.0f} to {memory[-1]:.0f}" if memory else "",
        f"{sockets[0]} to {sockets[-1]}" if sockets else "",
    ]
    return f"| {' | '.join(columns)} |"


def measure_goodput(folder: Path, how: str, arguments: argparse.Namespace) -> str:
    """Kill a rank every `arguments.every` seconds of `arguments.minutes`. Return a row of the table."""
    run = folder / f"run-{how}"
    words = ["--engine.zero_stage", str(arguments.stages[0]), "--checkpoint.every_steps", "100", *LIMITS]
    words += [*(RECOVER if how == "recover" else []), *arguments.settings]
    job = Job(folder, *words, run=run, num_ranks=arguments.ranks)
    job.wait_for_steps(1)
    metrics = job.metrics
    first_step = metrics.highest_step
    start_s = time.monotonic()
    next_s = start_s + arguments.every
    num_kills = num_starts = 0
    while time.monotonic() < start_s + 60 * arguments.minutes:
        time.sleep(0.02)
        metrics.read_on()
        if how != "none" and time.monotonic() > next_s and not job.has_ended:
            next_s += arguments.every
            ranks = find_ranks(job.launcher) if how == "recover" else launched_ranks(job.launcher)
            if ranks:
                random.choice(ranks).kill()
                num_kills += 1
        if job.has_ended:
            if how != "restart":
                job.fail("the job has ended")
            job = Job(folder, *words, run=run, num_ranks=arguments.ranks)
            job.metrics = metrics
            num_starts += 1
    wall_s = time.monotonic() - start_s
    metrics.read_on()
    job.end()
    num_steps = metrics.highest_step - first_step
    share = num_steps * statistics.median(metrics.step_s) / wall_s
    return f"| {HOW[how]} | {num_kills} | {num_starts} | {num_steps} | {metrics.steps_again} | {100 * share:.1f} % |"


def check_num_losses(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse more strikes on one run than a job survives within an hour."""
    if arguments.minutes:
        if "recover" in arguments.how and min(arguments.minutes, 60.0) * 60 > PER_HOUR * arguments.every:
            least = min(arguments.minutes, 60.0) * 60 / PER_HOUR
            parser.error(f"a job ends after {PER_HOUR} losses within an hour: type --every {least:g} or more")
        return
    each = max(2 if what in TWICE else 1 for what in arguments.what)
    if each * arguments.strikes > PER_HOUR:
        parser.error(
            f"a job ends after {PER_HOUR} losses within an hour: type --strikes {PER_HOUR // each} or fewer, because "
            f"one strike loses up to {counted(each, 'rank')}"
        )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3], help="ZeRO stages")
    parser.add_argument("--ranks", type=positive, default=4, help="ranks of each run, at least 2")
    parser.add_argument("--strikes", type=positive, default=30, help="strikes per run")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=["kill"], help="kinds of strikes")
    parser.add_argument("--every", type=float, default=20.0, metavar="S", help="seconds between two kills, for goodput")
    parser.add_argument("--minutes", type=float, default=0.0, metavar="MIN", help="measure goodput for so long")
    parser.add_argument("--how", nargs="+", choices=HOW, default=list(HOW), help="runs whose goodput is measured")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random moments and ranks")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="further settings of the run, after --")
    arguments = parser.parse_args()
    if arguments.ranks < 2:
        parser.error("--ranks must be at least 2: one rank is never struck")
    check_num_losses(parser, arguments)
    random.seed(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_corpus(folder)
        if arguments.minutes:
            print(GOODPUT_HEAD)
            for how in announced(arguments.how, what="goodput of"):
                row = measure_goodput(folder, how, arguments)
                print(row, flush=True)
            return
        print(STRIKES_HEAD)
        for stage in announced(arguments.stages, what="stage"):
            for what in arguments.what:
                print(measure_strikes(folder, what, stage, arguments), flush=True)


if __name__ == "__main__":
    main()
