"""Strikes from outside at a job with recovery: at ranks inside a collective, spares and nodes, and while it recovers.

A rank that stops itself at a point of its step keeps the others inside a collective, until the strike lets it go on.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from tests.chaos.agents import (
    ON,
    STRUCK_AT,
    judge_events,
    note_left,
    process_named,
    processes_of,
    status_of,
)
from tests.chaos.lab import Case, Lab
from tests.chaos.runs import Run
from tests.helpers.job import Job

PATIENT = ("--recover.silent_s", "60")
"""No rank that a trial has stopped counts as frozen."""
IN_REGROUP = f"kill:1:{STRUCK_AT},slow:0:2:leave@2"
"""Rank 1 is lost, and the job recovers for two seconds."""
WAITING = ("--recover.on_loss", "wait")
NO_SPARE = f"kill:1:{STRUCK_AT},kill:0:0:spare@*"
"""Rank 1 is lost, and no spare can replace it."""
LIMIT_S = 12
"""--max-time of a job, in seconds."""
REQUESTS = ("SIGTERM to all", "SIGTERM to agent 1", "STOP file", "--max-time")


def struck(
    lab: Lab, name: str, strike: Callable[[Job, Run], list[int] | None], *words: str, fault: str = "", stage: int = 1,
) -> Case:  # fmt: skip
    """`strike` strikes the job from outside, and returns the ranks that are lost by that, or None for any."""
    words = (*ON, "--engine.zero_stage", str(stage), *words)
    case, run = lab.case(f"recovery: {name}", stage=stage, fault=fault), lab.new_run(name)
    with lab.start(run, *words, fault=fault) as job:
        wanted = strike(job, run)
        case.exit_codes.append(job.wait(limit_s=300))
    note_left(case, run)
    lab.judge(case, run, lab.unbroken(*words))
    if case.exit_codes != [[0, 0]]:
        case.problems.append(f"exit codes {case.exit_codes}")
    if wanted is not None and judge_events(case, run) != wanted:
        case.problems.append(f"not the ranks {wanted} were replaced")
    return lab.report(case)


def in_collective(lab: Lab, point: str, *, stage: int = 1, victim: int = 1) -> Case:
    """A rank dies inside a collective, while another one has stopped at a point of its step and has not entered it."""

    def strike(job: Job, run: Run) -> list[int]:
        job.wait_for(lambda: bool(job.struck) and _waits(job, victim))
        _signal(job, signal.SIGKILL, f"txl-rank-{victim}")
        _signal(job, signal.SIGCONT, f"txl-rank-{1 - victim}")
        return [victim]

    name = f"killed in a collective, others before {point}"
    return struck(lab, name, strike, *PATIENT, fault=f"stop:{1 - victim}:{STRUCK_AT}:{point}", stage=stage)


def spare_struck(lab: Lab, number: int, *, stage: int = 1) -> Case:
    """The spare dies or freezes when a rank is lost. Another spare is started, and replaces the rank."""

    def strike(job: Job, run: Run) -> list[int]:
        job.wait_for(lambda: bool(job.struck) and process_named(job, "txl-spare") is not None)
        _signal(job, number, "txl-spare")
        _signal(job, signal.SIGKILL, "txl-rank-1")
        _signal(job, signal.SIGCONT, "txl-rank-0")
        return [1]

    name = f"{signal.Signals(number).name} to the spare"
    return struck(lab, name, strike, *PATIENT, fault=f"stop:0:{STRUCK_AT}", stage=stage)


def thawed(lab: Lab, *, stage: int = 1, times: int = 8) -> Case:
    """A rank is stopped about as long as recovery waits, again and again, and then told to continue."""
    chance = random.Random(lab.seed)

    def strike(job: Job, run: Run) -> None:
        for _ in range(times):
            step = run.highest_step
            job.wait_for(lambda step=step: run.highest_step > step + 2)  # type: ignore[misc]
            frozen = process_named(job, f"txl-rank-{chance.randrange(2)}")
            if frozen is not None:
                with suppress(psutil.NoSuchProcess):
                    frozen.suspend()
                    time.sleep(0.8 + 0.8 * chance.random())
                    frozen.resume()

    words = ("--recover.silent_s", "1", "--train.max_steps", str(30 * times))
    return struck(lab, "frozen about as long as recovery waits", strike, *words, stage=stage)


def node_paused(lab: Lab, *, stage: int = 1) -> Case:
    """A node stops, and a spare node takes its rank. When the node continues, its processes end and write nothing."""
    words = (*ON, "--recover.copies", "partner", "--recover.spare_nodes", "1", "--recover.silent_s", "2")
    words = (*words, "--engine.zero_stage", str(stage), "--train.max_steps", "300")
    case, run = lab.case("recovery: paused node", stage=stage, fault="node 1 of 3"), lab.new_run("paused")
    with lab.start(run, *words, ranks=3, nodes=3) as job:
        job.wait_for(lambda: run.highest_step >= STRUCK_AT and "has joined the job" in job.text)
        job.wait_for(lambda: process_named(job, "txl-rank-1") is not None)
        old = processes_of(job, 1)
        job.lose_node(1)
        for process in old:
            process.suspend()
        job.wait_for(lambda: "rank 1 on" in job.text and "continues on" in job.text)
        step = run.highest_step
        job.wait_for(lambda: run.highest_step > step + 20)
        for process in reversed(old):  # the rank before its agent
            process.resume()
        job.wait_for(lambda: not any(map(_lives, old)))
        case.exit_codes.append(job.wait(limit_s=300))
    note_left(case, run)
    lab.judge(case, run, lab.unbroken(*words, ranks=3, nodes=3))
    if case.exit_codes != [[0, 76, 0]]:
        case.problems.append(f"exit codes {case.exit_codes}")
    if judge_events(case, run) != [1]:
        case.problems.append("not the rank of the node was replaced")
    return lab.report(case)


def asked_to_stop(lab: Lab, how: str, *, stage: int = 1, waits: bool = False) -> Case:
    """A request to stop while the job recovers: it ends with code 75 after a checkpoint, and the same command goes on.

    With `waits` it waits for a spare that never comes. Then it ends with code 76 and says why.
    """
    words = (*ON, *PATIENT, "--engine.zero_stage", str(stage), *(WAITING if waits else ()))
    words += ("--train.max_steps", "240")  # longer than the second in which a rank looks at the clock
    fault = NO_SPARE if waits else f"stop:0:{STRUCK_AT},slow:0:2:leave@2"
    case = lab.case(f"recovery: {how} while it {'waits' if waits else 'recovers'}", stage=stage, fault=fault)
    run = lab.new_run("asked")
    flags = ("--max-time", f"{LIMIT_S}s") if how == "--max-time" else ()
    with lab.start(run, *words, *flags, fault=fault) as job:
        if waits:
            job.wait_for(lambda: "the job waits for" in job.text)
        else:
            job.wait_for(lambda: bool(job.struck))
            while flags and time.time() < job.started_s + LIMIT_S - 0.7:
                time.sleep(0.01)
            _signal(job, signal.SIGKILL, "txl-rank-1")
            _signal(job, signal.SIGCONT, "txl-rank-0")
            job.wait_for(lambda: any(one.kind == "slow" for one in job.struck))
        if how == "STOP file":
            (run.dir / "STOP").touch()
        elif how != "--max-time":
            job.signal(signal.SIGTERM, rank=None if how == "SIGTERM to all" else 1)
        codes = job.wait(limit_s=120)
        case.exit_codes.append(codes)
        case.message_ok = ("it was asked to stop by" if waits else "stopped at step") in job.text
    note_left(case, run)
    if codes != ([76, 76] if waits else [75, 75]):
        case.problems.append(f"exit codes {codes}")
    if not case.message_ok:
        case.problems.append(f"the log does not say why it ended: {job.text[-800:]}")
    lab.finish(case, run, *words)
    return lab.report(case)


def agent_lost(lab: Lab, rank: int, *, stage: int = 1) -> Case:
    """An agent is killed while the job recovers: it ends with code 76 and says why, and the same command goes on."""
    words = (*ON, "--engine.zero_stage", str(stage))
    case, run = lab.case(f"recovery: agent {rank} killed", stage=stage, fault=IN_REGROUP), lab.new_run("agent")
    with lab.start(run, *words, fault=IN_REGROUP) as job:
        job.wait_for(lambda: len(job.struck) == 2)
        job.lose_node(rank)  # else the launcher would end the others
        os.kill(job.pids[rank], signal.SIGKILL)
        codes = job.wait(limit_s=60)
        case.exit_codes.append(codes)
        reason = "the agent of rank 1" if rank else "the connection to the agent of rank 0 was lost"
        case.message_ok = reason in job.text
    note_left(case, run)
    if sorted(codes) != [-9, 76]:
        case.problems.append(f"exit codes {codes}")
    if not case.message_ok:
        case.problems.append(f"the log does not say {reason!r}: {job.text[-800:]}")
    lab.finish(case, run, *words)
    return lab.report(case)


def busy(lab: Lab, *, minutes: float, processes: int = 20) -> Case:
    """Many busy processes beside a run: no rank counts as lost, with the limits as they are by default."""
    case, run = lab.case("recovery: busy machine", fault=f"{processes} processes, {minutes:g} min"), lab.new_run("busy")
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        with lab.start(run, *ON, "--train.max_steps", "1000000") as job:
            job.wait_for(lambda: run.highest_step > 0, limit_s=300)
            end_s = time.monotonic() + 60 * minutes
            job.wait_for(lambda: time.monotonic() > end_s or bool(job.exits), limit_s=60 * minutes + 60)
            job.signal(signal.SIGTERM)
            case.exit_codes.append(job.wait(limit_s=300))
            text = job.text
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    note_left(case, run)
    case.figures["steps"] = run.highest_step
    losses = [line for line in text.splitlines() if "was lost" in line or "was silent" in line]
    if losses or any(record["event"] == "recovered" for record in run.records("event")):
        case.problems.append(f"false verdicts: {losses}")
    if case.exit_codes != [[75, 75]]:
        case.problems.append(f"exit codes {case.exit_codes}")
    return lab.report(case)


def _waits(job: Job, rank: int) -> bool:
    """Whether a rank is inside a collective of the step in which another one has stopped, or of the next."""
    status = status_of(job, rank)
    return status.step >= STRUCK_AT and status.is_waiting


def _signal(job: Job, number: int, name: str) -> None:
    """Send a signal to the process of a job with this name."""
    process = process_named(job, name)
    assert process is not None, f"there is no {name}"
    process.send_signal(number)


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
