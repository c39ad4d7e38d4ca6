"""Random faults over time: a seeded Poisson schedule of mixed faults over minutes, with a restart after each fault.

The goodput is the share of trained steps that did not have to be repeated. The final state is compared with that of a
run of as many steps without faults. The learning rate is constant, so that the run can end at any step when the time is
over.
"""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.lab import Case, Lab, first_new_step
from tests.chaos.runs import Run
from tests.helpers.corpora import flip_bit
from tests.helpers.job import Job
from txl_dist.artifacts import list_checkpoints

EVERY_STEPS = 20
TIMEOUT_S = 4
WORDS = (
    *("--engine.zero_stage", "1", "--engine.timeout_s", str(TIMEOUT_S), "--engine.start_timeout_s", "60"),
    *("--checkpoint.every_steps", str(EVERY_STEPS)),
)
FOR_EVER = ("--train.max_steps", "10000000")
STEPS_PER_S = 25
"""About; only where faults that are ordered by step fall in time."""


def _to_all(number: int) -> Callable[[Job, Run, int], object]:
    return lambda job, run, rank: job.signal(number)


def _to_one(number: int) -> Callable[[Job, Run, int], object]:
    return lambda job, run, rank: job.signal(number, rank=rank)


def _rot(job: Job, run: Run, rank: int) -> None:
    """All die, and meanwhile a bit of the newest checkpoint flips: the one before it is needed."""
    job.signal(signal.SIGKILL)
    job.wait()
    if len(list_checkpoints(run.dir)) > 1:
        flip_bit(next((list_checkpoints(run.dir)[-1] / "lanes").iterdir()))


BLOWS: dict[str, Callable[[Job, Run, int], object]] = {
    "kill -9 of a rank": _to_one(signal.SIGKILL),
    "kill -9 of all ranks": _to_all(signal.SIGKILL),
    "SIGTERM to a rank": _to_one(signal.SIGTERM),
    "SIGUSR1 to a rank": _to_one(signal.SIGUSR1),
    "SIGSTOP of a rank": _to_one(signal.SIGSTOP),
    "kill -9 of all ranks and a flipped bit": _rot,
}
ORDERED = {"kill -9 in a save": "kill", "an exception": "raise", "a hang": "hang", "a full disk": "enospc"}
"""Faults that strike from inside: kind of TXL_FAILPOINTS."""
IN_A_WRITE = ("save-file", "save-file-half", "save-manifest", "save-rename")
IN_A_SAVE_ONLY = {
    "kill -9 in a save": (*IN_A_WRITE, "save-copied", "save-renamed", "prune-half"),
    "a full disk": IN_A_WRITE,
}
"""Where in a save they strike."""


@dataclass
class Tally:
    """What the faults cost, an entry each."""

    faults: list[str] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)
    detect_s: list[float] = field(default_factory=list)
    recover_s: list[float] = field(default_factory=list)


class Storm:
    """A run, struck again and again."""

    def __init__(self, lab: Lab, *, minutes: float, mean_s: float) -> None:
        self._mean_s = mean_s
        self.lab, self.run, self.tally = lab, lab.new_run("goodput"), Tally()
        self._generator, self._end_s = random.Random(lab.seed), time.time() + 60 * minutes

    @property
    def is_over(self) -> bool:
        """Whether the time has run out."""
        return time.time() >= self._end_s

    def start_and_strike(self) -> list[int]:
        """One start, struck once after an exponential time of training, or stopped at the end. Returns exit codes."""
        draw = self._generator
        name, rank, wait_s = draw.choice([*BLOWS, *ORDERED]), draw.randrange(2), draw.expovariate(1 / self._mean_s)
        fault = self._order(name, rank, step=self.run.last_step + 1 + int(wait_s * STEPS_PER_S))
        with self.lab.start(self.run, *WORDS, *FOR_EVER, fault=fault) as job:
            self._wait_for_progress(job)
            strike_s = time.time() + wait_s
            job.wait_for(
                lambda: self.is_over or bool(job.struck or job.exits or (not fault and time.time() > strike_s)),
                limit_s=600,
            )
            if self.is_over and not job.struck and not job.exits:
                job.signal(signal.SIGTERM)
                return job.wait()
            struck_s = time.time()
            if name in BLOWS:
                BLOWS[name](job, self.run, rank)
            elif name == "a full disk":  # it must go on; a signal ends this start
                step = self.run.last_step
                job.wait_for(lambda: self.is_over or self.run.last_step > step + EVERY_STEPS)
                job.signal(signal.SIGTERM)
            codes = job.wait()
            self.tally.faults.append(name)
            if name in ("SIGSTOP of a rank", "a hang") or name.startswith("kill -9 of a rank"):
                others = [at for who, (_, at) in job.exits.items() if who != rank]
                self.tally.detect_s.append(max(others) - struck_s)
            return codes

    def _order(self, name: str, rank: int, *, step: int) -> str:
        """The entry of TXL_FAILPOINTS, or nothing for a fault from outside; in a save, the next one from that step."""
        if name not in ORDERED:
            return ""
        if name not in IN_A_SAVE_ONLY:
            return f"{ORDERED[name]}:{rank}:{step}"
        phase = self._generator.choice(IN_A_SAVE_ONLY[name])
        writer = rank if phase in ("save-copied", "save-file", "save-file-half") else 0
        return f"{ORDERED[name]}:{writer}:{step + -step % EVERY_STEPS}:{phase}"

    def _wait_for_progress(self, job: Job) -> None:
        """Until a step is trained that never was before: what the fault before this start has cost."""
        old_lost = self.run.steps_lost
        new_s = first_new_step(job, self.run)
        if self.tally.faults and new_s:
            self.tally.steps_lost.append(self.run.steps_lost - old_lost)
            self.tally.recover_s.append(new_s - job.started_s)


def goodput(lab: Lab, *, minutes: float, mean_s: float = 10.0) -> Case:
    """Faults for so many minutes, on average one after `mean_s` of training."""
    case, storm, begun_s = lab.case("goodput"), Storm(lab, minutes=minutes, mean_s=mean_s), time.time()
    while not storm.is_over:
        case.exit_codes.append(storm.start_and_strike())
    run, tally = storm.run, storm.tally
    # One more than any start has trained: where the last one saved at its last step, nothing would be left to save, and
    # the checkpoint would be one of a run "for ever", not of this command.
    finish = (*WORDS, "--train.max_steps", str(run.highest_step + 1))
    with lab.start(run, *finish) as job:
        case.exit_codes.append(job.wait(limit_s=600))
    wall_s = time.time() - begun_s
    lab.judge(case, run, lab.unbroken(*finish))
    case.trials, case.fault = len(tally.faults), ", ".join(f"{n} x {name}" for name, n in Counter(tally.faults).items())
    num_trained = len(run.records("train"))
    case.figures = {
        "minutes": round(wall_s / 60, 1),
        "steps": run.last_step,
        "steps_not_repeated_pct": round(100 * run.last_step / num_trained, 2),
        **_middle_and_tail("steps_lost", tally.steps_lost),
        **_middle_and_tail("detect_s", tally.detect_s),
        **_middle_and_tail("recover_s", tally.recover_s),
    }
    return lab.report(case)


def _middle_and_tail(name: str, values: list[int] | list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    p95 = statistics.quantiles(values, n=20, method="inclusive")[-1]
    return {f"{name}_median": round(statistics.median(values), 2), f"{name}_p95": round(p95, 2)}
