"""Two jobs that use the same run folder."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from functools import partial

from tests.chaos.lab import Case, Lab, Trial, paused
from tests.chaos.runs import Run
from tests.helpers.job import Job

REFUSAL_LIMIT_S = 2.0


def second_job(lab: Lab) -> Case:
    """A second job is refused, by name, while the first lives; the first does not notice."""
    refused: list[tuple[list[int], str, float]] = []

    def intrude(job: Job, run: Run) -> None:
        paused(job)
        with lab.start(run, "--engine.zero_stage", "1") as intruder:
            intruder.wait()
            waited_s = max(at for _, at in intruder.exits.values()) - intruder.started_s
            refused.append((intruder.codes, intruder.text, waited_s))
            named = str(job.pids[0]) in intruder.text
            refused[0] = (intruder.codes, "" if named else intruder.text, waited_s)

    pauses = ",".join(f"slow:*:{step}" for step in (9, 10))
    case, _ = lab.survive("lock: second job", fault=pauses, during=intrude)
    codes, unnamed, case.detect_s = refused[0]
    case.exit_codes.append(codes)
    case.message_ok = not unnamed
    if unnamed:
        case.problems.append(f"the refusal does not name the first job's process: {unnamed[-500:]}")
    if codes != [2, 2] or case.exit_codes[0] != [0, 0]:
        case.problems.append(
            f"exit codes {case.exit_codes}: the second job is to be refused, the first to be left alone"
        )
    if case.detect_s > REFUSAL_LIMIT_S + 1:  # its start included
        case.problems.append(f"refused only after {case.detect_s:.1f} s")
    return lab.report(case)


def takeover(lab: Lab) -> Case:
    """The lock of a killed job is taken over at once."""

    def kill(job: Job, run: Run) -> None:
        paused(job)
        job.signal(signal.SIGKILL)
        time.sleep(0.1)

    case, _ = lab.survive("lock: takeover", fault="slow:*:9", during=kill)
    if case.recover_s is None or case.recover_s > 20:
        case.problems.append(f"taken over after {case.recover_s} s")
    return lab.report(case)


def lock(lab: Lab) -> Iterator[Trial]:
    """Both."""
    yield partial(second_job, lab)
    yield partial(takeover, lab)
