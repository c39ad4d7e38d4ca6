"""Ranks that freeze or die: they are found in time and named, and no rank waits for a dead rank."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from functools import partial

from tests.chaos.lab import Case, Lab, Trial, paused
from tests.chaos.runs import Run
from tests.helpers.job import Job

TIMEOUT_S = 4
"""engine.timeout_s of these runs."""
SLACK_S = 5.0
DEATH_LIMIT_S = 10.0
HANG_CODE = 76
CAUSE = re.compile(r"rank \d+ on \S+ \(pid \d+\).* (was lost|has made no progress|has not answered)")
STEP_OF = {"step": 9, "save-file": 12}
FREEZES = ("stop", "hang", "spin")
WORDS = ("--engine.timeout_s", str(TIMEOUT_S), "--engine.start_timeout_s", "60")


def freeze(lab: Lab, *, kind: str, rank: int, ranks: int = 2, stage: int = 1, phase: str = "step") -> Case:
    """One rank makes no progress any more: all end with code 76 within the limit + 5 s, and the log names that rank."""
    fault = f"{kind}:{rank}:{STEP_OF[phase]}:{phase}"
    case, run = lab.survive(f"hangs: {kind}", *WORDS, stage=stage, ranks=ranks, fault=fault)
    struck_s = run.jobs[0].struck[0].time_s
    others_s = max(at for who, (_, at) in run.jobs[0].exits.items() if who != rank)
    case.detect_s = round(others_s - struck_s, 2)
    if case.detect_s > TIMEOUT_S + SLACK_S:
        case.problems.append(f"detected after {case.detect_s} s")
    if {code for who, code in enumerate(case.exit_codes[0]) if who != rank} != {HANG_CODE}:
        case.problems.append(f"exit codes {case.exit_codes[0]}")
    _check_cause(case, run, rank=rank)
    return lab.report(case)


def death(lab: Lab, *, rank: int, ranks: int = 2, stage: int = 1, phase: str = "step") -> Case:
    """kill -9 of one rank: the others leave by themselves within 10 s, and one line names the first cause."""

    def kill(job: Job, run: Run) -> None:
        paused(job)
        killed_s[0] = job.signal(signal.SIGKILL, rank=rank)

    killed_s = [0.0]
    name = f"hangs: kill -9 in {phase}"
    pause = f"slow:{rank}:{STEP_OF[phase]}:{phase}"
    case, run = lab.survive(name, *WORDS, stage=stage, ranks=ranks, fault=pause, during=kill)
    case.fault = pause.replace("slow", "kill")
    case.detect_s = round(max(at for _, at in run.jobs[0].exits.values()) - killed_s[0], 2)
    if case.detect_s > DEATH_LIMIT_S:
        case.problems.append(f"all down only after {case.detect_s} s")
    if any(code == -signal.SIGKILL for who, code in enumerate(case.exit_codes[0]) if who != rank):
        case.problems.append(f"a survivor had to be killed: {case.exit_codes[0]}")
    _check_cause(case, run, rank=rank)
    return lab.report(case)


def exception(lab: Lab, *, rank: int, ranks: int = 2, phase: str = "step") -> Case:
    """A rank fails by itself: it prints its error, once, and the others leave without a word."""
    fault = f"raise:{rank}:{STEP_OF[phase]}:{phase}"
    case, run = lab.survive("hangs: an exception", ranks=ranks, fault=fault)
    text = run.jobs[0].text
    case.message_ok = text.count("Traceback") == 1 and text.count("RuntimeError: ordered by TXL_FAILPOINTS") == 1
    if not case.message_ok or CAUSE.search(text):
        case.problems.append(f"not one traceback, or more than that: {text[-1500:]}")
    if case.detect_s is None or case.detect_s > DEATH_LIMIT_S:
        case.problems.append(f"all down only after {case.detect_s} s")
    if case.exit_codes[0][rank] in (0, 75, HANG_CODE):
        case.problems.append(f"exit codes {case.exit_codes[0]}")
    return lab.report(case)


def _check_cause(case: Case, run: Run, *, rank: int) -> None:
    """Exactly one line says who was lost or hangs, and it names the rank, the step and the phase."""
    causes = [line for line in run.jobs[0].text.splitlines() if CAUSE.search(line)]
    case.message_ok = len(causes) == 1 and re.search(rf"rank {rank} on .*step ([89]|1\d), ", causes[0]) is not None
    if not case.message_ok:
        case.problems.append(f"not one line that names rank {rank}: {causes}")
    if "Traceback" in run.jobs[0].text:
        case.problems.append("a traceback besides the first cause")


def hangs(lab: Lab) -> Iterator[Trial]:
    """Every way of freezing on every rank; every rank killed; 2 and 4 ranks, ZeRO 1 and 3."""
    for kind in FREEZES:
        for rank in (0, 1):
            yield partial(freeze, lab, kind=kind, rank=rank)
    yield partial(freeze, lab, kind="stop", rank=1, stage=3)
    yield partial(freeze, lab, kind="stop", rank=2, ranks=4)
    yield partial(freeze, lab, kind="hang", rank=1, phase="save-file")
    for stage in (1, 3):
        for rank in (0, 1):
            yield partial(death, lab, rank=rank, stage=stage)
    yield partial(death, lab, rank=3, ranks=4)
    for rank in (0, 1):
        yield partial(exception, lab, rank=rank)
    yield partial(death, lab, rank=1, phase="save-file")
