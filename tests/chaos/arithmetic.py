"""Wrong numbers on one rank: all ranks skip the step and restore the memory, and a loss spike causes a rewind."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from functools import partial

from tests.chaos.lab import Case, Lab, Trial
from txl_dist.artifacts import checkpoint_folder
from txl_dist.train.checkpoint.memories import load_lane_memory

SPIKY = ("--guard.on_spike", "rewind", "--guard.spike_window", "8", "--guard.spike_patience", "2")


def not_finite(lab: Lab, *, kind: str, rank: int, stage: int = 1, is_killed: bool = False) -> Case:
    """NaN on one rank in one step: the same end, bit for bit, as a run that was told to skip that step; also if it is
    killed behind the checkpoint that follows."""
    words = ("--engine.zero_stage", str(stage))
    case, run = lab.case(f"nan: {kind}", stage=stage, fault=f"{kind}:{rank}:9"), lab.new_run(f"nan-{kind}")
    case.fault += ",slow:*:15,kill:0:17" if is_killed else ""
    with lab.start(run, *words, fault=case.fault) as job:
        case.exit_codes.append(job.wait())
        if not job.struck:
            case.problems.append("the fault never struck")
    lab.start_until_done(case, run, *words)
    lab.judge(case, run, lab.unbroken(*words, fault="skip:*:9"))
    memory = load_lane_memory(checkpoint_folder(run.dir, 12), lanes=range(4))
    if not all(bool(hidden_BMD.isfinite().all()) for hidden_BMD in memory.hidden):
        case.problems.append("a memory is not finite")
    skipped = run.records("train")[-1]["skipped_steps"]
    if skipped != 1 or case.exit_codes[-1] != [0, 0]:
        case.problems.append(f"{skipped} steps were skipped instead of 1; exit codes {case.exit_codes}")
    return lab.report(case)


def too_many(lab: Lab, *, num_allowed: int = 3) -> Case:
    """NaN in more steps in a row than allowed: a clear stop that names the documents of the batch."""
    case, run = lab.case("nan: too many in a row"), lab.new_run("nan-cap")
    case.fault = ",".join(f"nan:1:{step}" for step in range(9, 20))
    with lab.start(run, "--guard.max_consecutive_skips", str(num_allowed), fault=case.fault) as job:
        case.exit_codes.append(job.wait())
        text = job.text
    case.message_ok = (
        "error:" in text and re.search(r"\.tar of \S+, document \d+", text) is not None and "Traceback" not in text
    )
    if not case.message_ok:
        case.problems.append(f"the message does not name the documents: {text[-800:]}")
    if run.is_done or 0 in case.exit_codes[0]:
        case.problems.append(f"it did not stop: {case.exit_codes}")
    if run.last_step > 9 + num_allowed + 1:
        case.problems.append(f"it stopped only at step {run.last_step}")
    return lab.report(case)


SPIKES = ",".join(f"spike:*:{step}" for step in (15, 16))


def rewind(lab: Lab, *, is_killed: bool) -> Case:
    """Two spikes in a row: back to the last checkpoint, without their tokens; a kill afterwards changes nothing.

    Afterwards is behind the next checkpoint, which alone knows of the rewind: so it is written at once.
    """
    words = (*SPIKY, "--engine.zero_stage", "1", "--checkpoint.asynchronous", "False")
    unbroken = lab.unbroken(*words, fault=SPIKES)
    case, run = lab.case("spikes: rewind" + (", then kill -9" if is_killed else "")), lab.new_run("spikes")
    case.fault = SPIKES + (",slow:*:21" if is_killed else "")
    with lab.start(run, *words, fault=case.fault) as job:
        if is_killed:
            job.wait_for(lambda: any(point.kind == "slow" for point in job.struck))
            job.signal(signal.SIGKILL)
        case.exit_codes.append(job.wait())
        case.message_ok = re.search(r"rew|back to", job.text) is not None
    lab.start_until_done(case, run, *words)
    lab.judge(case, run, unbroken)
    if not case.message_ok:
        case.problems.append("the log does not tell of a rewind")
    return lab.report(case)


def crash_in_rewind(lab: Lab) -> Case:
    """kill -9 in the middle of a rewind: the run goes on from the checkpoint that it was going back to."""
    words = (*SPIKY, "--engine.zero_stage", "1")
    case, run = lab.case("spikes: kill -9 in a rewind", fault=f"{SPIKES},kill:0:12:load"), lab.new_run("spikes")
    with lab.start(run, *words, fault=case.fault) as job:
        case.exit_codes.append(job.wait())
        if job.struck[-1].phase != "load":
            case.problems.append("the kill never struck")
    lab.start_until_done(case, run, *words)
    lab.judge(case, run, lab.unbroken(*words), only_last=True)  # the spikes were ordered for the first start only
    return lab.report(case)


def flipped_replica(lab: Lab, *, rank: int, stage: int) -> Case:
    """A bit of one rank's parameters flips: found, and that rank named. At stage 0 within the interval; at stages 1 and
    2 every update gives out the weights anew, so only in the step that is checked."""
    fault = f"flip:{rank}:{9 if stage == 0 else 12}"
    case, run = lab.case("replicas: a flipped bit", ranks=4, stage=stage, fault=fault), lab.new_run("replicas")
    words = ("--guard.check_replicas_every_steps", "4", "--engine.zero_stage", str(stage))
    with lab.start(run, *words, ranks=4, fault=case.fault) as job:
        case.exit_codes.append(job.wait())
        text = job.text
    case.message_ok = re.search(rf"rank(s|\(s\))?:? \[?{rank}\b", text) is not None and "Traceback" not in text
    if not case.message_ok or 0 in case.exit_codes[0] or run.last_step > 12:
        case.problems.append(
            f"not found at step 12, or not named: {case.exit_codes}, step {run.last_step}: {text[-600:]}"
        )
    return lab.report(case)


def nan(lab: Lab) -> Iterator[Trial]:
    """NaN and infinity on either rank, at every stage."""
    for stage in (0, 1, 2, 3):
        yield partial(not_finite, lab, kind="nan", rank=1, stage=stage)
    yield partial(not_finite, lab, kind="nan", rank=0)
    yield partial(not_finite, lab, kind="nan", rank=0, is_killed=True)
    yield partial(not_finite, lab, kind="inf", rank=1)
    yield partial(too_many, lab)
    for stage in (0, 1, 2):
        yield partial(flipped_replica, lab, rank=2, stage=stage)


def spikes(lab: Lab) -> Iterator[Trial]:
    """Rewinding, left alone and killed afterwards."""
    for is_killed in (False, True):
        yield partial(rewind, lab, is_killed=is_killed)
    yield partial(crash_in_rewind, lab)
