"""Lost ranks are replaced inside the running job: the result is that of a run that nothing befell, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from tests.chaos.agents import ON, STRUCK_AT, judge_events, names_of, running_ranks
from tests.chaos.arithmetic import SPIKES, SPIKY
from tests.chaos.elastic import memories_went_on
from tests.chaos.hangs import FREEZES
from tests.chaos.lab import Case, Lab, Trial
from tests.chaos.stops import launcher
from tests.chaos.strikes import (
    NO_SPARE,
    REQUESTS,
    agent_lost,
    asked_to_stop,
    busy,
    in_collective,
    node_paused,
    spare_struck,
    thawed,
)
from tests.helpers import forked
from txl_dist.artifacts import SETTINGS, list_checkpoints, step_of
from txl_dist.config.load import load_config
from txl_dist.distributed.recovery.slot_file import HEAD_BYTES
from txl_dist.distributed.rendezvous import free_port
from txl_dist.errors import ConfigError
from txl_dist.report.records import read_history
from txl_dist.train.checkpoint.validate import checkpoint_problems
from txl_dist.train.monitoring.run_lock import RunLock

PARTNER = ("--recover.copies", "partner")
RARELY = ("--recover.copy_every", "4")
POINTS = ("step", "pass#2", "pass#3", "vote", "decided", "updating", "updated", "boundary", "half-stored", "stored")
"""Points of a step at which a rank is killed. `pass#2` is in the forward pass, and `pass#3` in the backward pass."""
SAVE_POINTS = ("save-begin", "save-copied", "save-file-half", "save-written", "save-manifest", "save-renamed", "saved")
"""Points of a save at which a rank is killed."""
ONLY_RANK_0 = ("save-manifest", "save-renamed")
"""Points of a save that only rank 0 reaches."""
REGROUP_POINTS = ("leave", "meet", "loaded")
"""Points of a recovery at which a rank is killed again."""
EMA = ("--optim.ema_decay", "0.9", "--eval.use_ema", "True", "--eval.every_steps", "6")
EVERY_STEP = ("--model.dropout", "0", "--model.attention_dropout", "0", "--checkpoint.every_steps", "1",
              "--checkpoint.keep_last", "1000", "--checkpoint.asynchronous", "False")  # fmt: skip
SAVED_AT = 12
SAMPLES = ("--metrics.sample_every_steps", "5", "--metrics.sample_len", "8")
PHASES = ("--train.phases", "until=0.5 num_lanes=8 segment_len=4 memory_len=8")
"""The first phase ends at step 12."""
XLNET = (
    *("--model.any_order", "True", "--model.share_biases", "False", "--train.objective", "permutation"),
    *("--train.segment_len", "24", "--train.reuse_len", "12", "--train.predicted_len", "5"),
)
STORMY = ("--engine.precision", "bf16", "--optim.name", "muon", "--optim.ema_decay", "0.9")
LAUNCHERS = ("txl launch", "deepspeed", "torchrun")
KEEP_BEST = ("--eval.every_steps", "5", "--checkpoint.keep_best", "True")
EVALUATED = ("--eval.every_steps", "5")
DEADLY_EVALUATION = "kill:1:10:evaluate@*"
"""The evaluation of step 10 always kills a rank. With rare copies the ranks finish this step again before it."""
IN_PROGRESS = {
    "validation": ("kill:0:12:evaluate#3", "--eval.every_steps", "6"),
    "validation with averaged weights": ("kill:1:12:evaluate", *EMA),
    "sample, before it is written": ("kill:0:10:sampled", *SAMPLES),
    "sample, on another rank": ("kill:1:10:sampled", *SAMPLES),
    "save beside later steps": ("slow:1:12:save-file,kill:0:13:decided",),
    "save beside later steps, by its writer": ("slow:0:12:save-file,kill:1:13:updated",),
    "save begun some steps before": ("slow:1:12:save-file,kill:0:15:decided",),
    "save at the end": ("kill:1:24:save-file-half",),
    "save that blocks": ("kill:1:12:save-file-half", "--checkpoint.asynchronous", "False"),
    "save of the best": ("kill:0:10:save-begin", *KEEP_BEST),
}
"""Work between two steps in which a rank is killed: fault and settings, by name."""
THREE_IN_ROW = f"kill:1:{STRUCK_AT}:decided,kill:0:{STRUCK_AT}:step@2,kill:1:3:loaded@3"
FOUR_IN_ROW = f"{THREE_IN_ROW},kill:0:4:meet@4"
"""Losses of different ranks at different points, without a finished step between them."""
FIRST_STEP = ("build", "step", "pass#3", "updating", "half-stored")
"""Points between the build of the engine and the end of the first step after a recovery."""
AGAIN = "spike:*:16:step@2"
"""Spikes come again after a recovery, because they are in the data."""
REWINDS = {
    "in it": (f"kill:1:12:load,{AGAIN}",),
    "in it, rank 0": (f"kill:0:12:load,{AGAIN}",),
    "in the first step after it": (f"kill:0:13:step#2,{AGAIN}",),
    "in the second step after it": ("kill:1:14:updated#2",),
    "before it": (f"kill:1:14:updated,spike:*:15:step@2,{AGAIN}",),
    "in it, then again": (f"kill:1:12:load,kill:0:12:load@2,{AGAIN},spike:*:16:step@3",),
}
"""Kills around a rewind to the checkpoint of step 12, by name."""
CARRIED = {
    "text of a phase, in a rewind": (f"kill:1:14:updated,spike:*:15:step@2,{AGAIN}", *SPIKY, *PHASES),
    "evaluations, made again after a rewind": ("kill:1:15:evaluate#10", *SPIKY, "--eval.every_steps", "15"),
    "logging interval, in a rewind": (
        *(f"kill:1:13:decided,spike:*:15:step@2,{AGAIN}", *SPIKY, "--metrics.log_every_steps", "7"),
    ),
}
"""What a replacement continues beside the state: kills with a rewind after or before them."""
KINDS_OF_RUNS = {
    "phases": (f"kill:1:{STRUCK_AT}:updated,kill:0:15:step@2", *PHASES),
    "phases, in the first step of one": ("kill:1:13:step", *PHASES),
    "phases, in the last save of one": ("kill:1:12:save-file-half", *PHASES, "--checkpoint.every_steps", "5"),
    "phases, in the last evaluation of one": ("kill:0:12:evaluate#3", *PHASES, "--eval.every_steps", "6"),
    "XLNet": (f"kill:1:{STRUCK_AT}:updated", *XLNET),
    "EMA": (f"kill:0:{STRUCK_AT}:half-stored", "--optim.ema_decay", "0.9"),
    "Muon": (f"kill:0:{STRUCK_AT}:updated", "--optim.name", "muon"),
    "bf16": (f"kill:1:{STRUCK_AT}:updated", "--engine.precision", "bf16"),
}
"""Kinds of runs whose ranks are killed: fault and settings, by name."""


def replaced(
    lab: Lab, fault: str, *settings: str, stage: int = 1, ranks: int = 2, both: str = "", nodes: int = 1
) -> Case:
    """The faults strike, the job goes on in the same processes, and ends as the unbroken run does.

    `both` strikes the run that is otherwise unbroken too.
    """
    words = (*ON, "--engine.zero_stage", str(stage), *settings)
    case, run = lab.case("recovery", stage=stage, ranks=ranks, fault=fault), lab.new_run("recovery")
    with lab.start(run, *words, ranks=ranks, fault=f"{fault},{both}", nodes=nodes) as job:
        case.exit_codes.append(job.wait(limit_s=300))
        struck = [strike for strike in job.struck if strike.kind in ("kill", "stop", "hang", "spin")]
    lab.judge(case, run, lab.unbroken(*words, ranks=ranks, fault=both, nodes=nodes))
    deadly = [one for one in fault.split(",") if one.startswith(("kill", "stop", "hang", "spin"))]
    if len(struck) < len(deadly):
        case.problems.append(f"only {struck} of {fault} struck")
    if case.exit_codes != [[0] * ranks]:
        case.problems.append(f"exit codes {case.exit_codes}")
    for checkpoint in list_checkpoints(run.dir):
        case.problems += checkpoint_problems(checkpoint)  # one in flight was finished, or dropped whole
    saved = [record["step"] for record in run.records("event") if record["event"] == "saved"]
    if KEEP_BEST[-2] in settings and STRUCK_AT not in saved:  # it was the best when the rank was lost
        case.problems.append(f"the best checkpoint is not among {saved}")
    recovered = [event for event in run.records("event") if event["event"] == "recovered"]
    save_every = load_config(run.dir / SETTINGS).checkpoint.every_steps
    for due in range(save_every, run.highest_step + 1, save_every):
        next_due = due + save_every
        is_late = any(event["step"] >= next_due for event in recovered)  # then the next save stands for it
        if not is_late and not any(due <= step < next_due for step in saved):  # else the loss has dropped it for good
            case.problems.append(f"the save of step {due} is not among {saved}")
    copy_every = int(RARELY[1]) if RARELY[0] in settings else 1
    lost = judge_events(case, run, copy_every=copy_every, most=1 if _is_stored_everywhere(deadly) else None)
    found = [event for event in run.records("event") if event.get("restored_from") == "copies"]
    if copy_every == 1 and len(found) < len(recovered):
        case.problems.append(f"the job continued from a checkpoint, though newer copies existed: {recovered}")
    ends_of_phases = [event["step"] for event in run.records("event") if event["event"] == "phase"]
    if len(set(ends_of_phases)) < len(ends_of_phases):
        case.problems.append(f"phases ended at steps {ends_of_phases}, one of them twice")
    if not both and any(event["step"] % copy_every for event in found):
        case.problems.append(f"copies were made after other steps than each {copy_every}th")
    if not both and case.steps_lost > copy_every * len(struck):
        case.problems.append(f"{case.steps_lost} steps were made again, though copies of later steps existed")
    if sorted(lost) != sorted(strike.rank for strike in struck):  # no other process has ended
        case.problems.append(f"the ranks {lost} were replaced")
    return lab.report(case)


def launched(lab: Lab, program: str, *, stage: int = 1) -> Case:
    """Under a real launcher killed ranks are replaced, the result is that of the unbroken run, no process is left."""
    fault = f"kill:1:{STRUCK_AT}:updated,kill:0:15:decided@2"
    words = (*ON, "--engine.zero_stage", str(stage))
    case, run = lab.case(f"recovery: {program}", stage=stage, fault=fault), lab.new_run("launched")
    folder = Path(sys.executable).parent
    command = {
        "txl launch": [str(folder / "txl"), "launch", "--num_accelerators", "2"],
        "deepspeed": [str(folder / "deepspeed"), "--num_accelerators", "2", "--module", "txl_dist", "train"],
        "torchrun": [str(folder / "torchrun"), "--nproc_per_node", "2", "-m", "txl_dist", "train"],
    }[program]
    if program != "txl launch":
        command[1:1] = ["--master_port", str(free_port())]
    ended = subprocess.run(
        [*command, str(lab.config), *words, "--run.dir", str(run.dir)],
        env=forked.environment() | {"TXL_FAILPOINTS": fault},
        cwd=lab.folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lab.judge(case, run, lab.unbroken(*words))
    if ended.returncode:
        case.problems.append(f"exit code {ended.returncode}: {ended.stderr[-500:]}")
    if sorted(judge_events(case, run)) != [0, 1]:
        case.problems.append("not the two ranks that were killed were replaced")
    left = [
        process.pid for process in psutil.process_iter(["cmdline"]) if str(run.dir) in (process.info["cmdline"] or ())
    ]
    if left:
        case.problems.append(f"the processes {left} are left")
    return lab.report(case)


def damaged(lab: Lab, *, stage: int = 1, both_copies: bool, saves: bool = True) -> Case:
    """The process of rank 1 dies, and all copies on its node are damaged: they come from the other node.

    With `both_copies` those are damaged too. Then all ranks continue from the checkpoint, in the same processes. Unless
    the run `saves`, they begin again.
    """
    fault = f"kill:1:{STRUCK_AT},slow:0:2:leave@2"
    words = (*ON, *PARTNER, "--engine.zero_stage", str(stage))
    if not saves:
        words += ("--checkpoint.every_steps", "0")
    case, run = lab.case("recovery: damaged", stage=stage, fault=fault), lab.new_run("damaged")
    with lab.start(run, *words, fault=fault, nodes=2) as job:
        job.wait_for(lambda: len(job.struck) == 2)
        _flip_bits(job.pids[1], "txl_slot")
        if both_copies:
            _flip_bits(job.pids[0], "txl_partner_1")
        case.exit_codes.append(job.wait(limit_s=120))
        case.message_ok = ("The run continues from a checkpoint" in job.text) == both_copies
    lab.judge(case, run, lab.unbroken(*words, nodes=2))
    if case.exit_codes != [[0, 0]]:
        case.problems.append(f"exit codes {case.exit_codes}")
    if (case.steps_lost > 0) != both_copies:
        case.problems.append(f"{case.steps_lost} steps were made again")
    if not case.message_ok:
        case.problems.append("the log does not say where the state came from")
    (event,) = (record for record in run.records("event") if record["event"] == "recovered")
    saved = "checkpoint" if saves else "start"
    wanted = (saved if both_copies else "copies", STRUCK_AT - event["step"])
    if (event["restored_from"], event["repeated_steps"]) != wanted:
        case.problems.append(f"the event is {event}")
    if [record["event"] for record in run.records("event")].count("start") != 1:
        case.problems.append("the job has started once, and the records say otherwise")
    if judge_events(case, run) != [1]:
        case.problems.append("another rank was lost")
    return lab.report(case)


def _flip_bits(agent: int, name: str) -> None:
    """Flip a bit of the values in each file in memory of an agent whose name begins with `name`."""
    files = {}  # by inode, because a file that is mapped has two descriptors
    for path in Path(f"/proc/{agent}/fd").iterdir():
        if os.readlink(path).startswith(f"/memfd:{name}") and path.stat().st_size > HEAD_BYTES:
            files[path.stat().st_ino] = path
    assert len(files) == 2, f"{len(files)} files {name}"
    for path in files.values():
        with path.open("r+b") as file:
            file.seek(HEAD_BYTES)
            byte = file.read(1)[0]
            file.seek(HEAD_BYTES)
            file.write(bytes([byte ^ 1]))


def shrunk(lab: Lab, *, lost: Sequence[int], left: int, stage: int = 1, then: str = "") -> Case:
    """Ranks of four are lost and no spare works: the job continues with fewer ranks in the same processes.

    `then` strikes after that.
    """
    fault = ",".join([*(f"kill:{rank}:{STRUCK_AT}" for rank in lost), "kill:0:0:spare@*", *filter(None, [then])])
    words = (*ON, "--recover.on_loss", "shrink", "--engine.zero_stage", str(stage), *EVERY_STEP)
    case, run = lab.case("recovery: shrink", stage=stage, ranks=4, fault=fault), lab.new_run("shrink")
    with lab.start(run, *words, ranks=4, fault=fault) as job:
        case.exit_codes.append(job.wait(limit_s=300))
    if case.exit_codes != [[0] * 4]:
        case.problems.append(f"exit codes {case.exit_codes}")
    if f"The job continues with {left} of" not in job.text:
        case.problems.append(f"the log does not say that {left} ranks are left")
    unbroken = lab.unbroken("--engine.zero_stage", str(stage), *EVERY_STEP, ranks=4)
    seen, wanted = (dict((one["step"], one["loss"]) for one in each.records("train")) for each in (run, unbroken))
    worst = max(abs(seen.get(step, 0.0) / loss - 1) for step, loss in wanted.items())
    case.figures["loss_difference"] = worst
    if worst > 1e-6:
        case.problems.append(f"a loss differs by {worst:.2g}, relative")
    if any(seen.get(step) != loss for step, loss in wanted.items() if step < STRUCK_AT):
        case.problems.append("a loss before the shrink differs")
    if not memories_went_on(run, STRUCK_AT - 1):
        case.problems.append("the memories after the shrink are not those from before")
    judge_events(case, run)
    return lab.report(case)


def node_lost(lab: Lab, *, stage: int = 1, per_node: int = 1) -> Case:
    """A node is lost with its memory. The spare node takes its ranks, with the state that the other node has kept.

    Before and after, each rank and each spare is one process of its name. The agents are forked here and have none.
    """
    # So many steps that the job still runs when the spare node has joined it, which takes a second.
    words = (*ON, *PARTNER, "--recover.spare_nodes", "1", "--engine.zero_stage", str(stage), "--train.max_steps", "600")
    case, run = lab.case("recovery: node", stage=stage, fault="node 1 of 3"), lab.new_run("node")
    ranks = 3 * per_node
    lost = range(per_node, 2 * per_node)
    with lab.start(run, *words, ranks=ranks, nodes=3) as job:
        job.wait_for(lambda: run.highest_step >= STRUCK_AT and "has joined the job" in job.text)
        wanted = sorted([f"txl-rank-{rank}" for rank in range(2 * per_node)] + ["txl-spare"] * 3)
        job.wait_for(lambda: names_of(job) == wanted)
        job.kill_node(*lost)
        wanted.remove("txl-spare")
        job.wait_for(lambda: names_of(job) == wanted)
        case.exit_codes.append(job.wait(limit_s=300))
        case.message_ok = "rank 1" in job.text and "continues on" in job.text
    lab.judge(case, run, lab.unbroken(*words, ranks=ranks, nodes=3))
    if case.steps_lost:
        case.problems.append(f"{case.steps_lost} finished steps were made again")
    if case.exit_codes != [[-9 if rank in lost else 0 for rank in range(ranks)]]:
        case.problems.append(f"exit codes {case.exit_codes}")
    if not case.message_ok:
        case.problems.append("the log does not say where the rank continues")
    judge_events(case, run)
    return lab.report(case)


def storm(lab: Lab, *more: str, kills: int, stage: int, ranks: int, steps: int = 0) -> Case:
    """Ranks are killed from outside at random moments, until there were so many kills."""
    chance = random.Random(lab.seed)
    settings = ("--train.max_steps", str(steps or 12 * kills), "--checkpoint.every_steps", "0")
    words = (*ON, "--engine.zero_stage", str(stage), *settings, *more)
    case, run = lab.case("recovery: storm", stage=stage, ranks=ranks, fault=f"{kills} kills"), lab.new_run("storm")
    victims = []
    with lab.start(run, *words, ranks=ranks) as job:
        for _ in range(kills):
            step = run.highest_step
            job.wait_for(lambda step=step: run.highest_step > step + 1 or bool(job.exits))  # type: ignore[misc]
            time.sleep(chance.random() * 0.3)
            ranks_now = running_ranks(job)
            if job.exits or not ranks_now:
                break
            victim = chance.choice(ranks_now)
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                victims.append(victim)
        case.exit_codes.append(job.wait(limit_s=1200))
    case.trials = len(victims)
    lab.judge(case, run, lab.unbroken(*words, ranks=ranks))
    if case.exit_codes != [[0] * ranks]:
        case.problems.append(f"exit codes {case.exit_codes}")
    judge_events(case, run)
    return lab.report(case)


def ended(lab: Lab, fault: str, *settings: str, reason: str, ranks: int = 2) -> Case:
    """A failure that would come again ends the job with code 76 and its reason. The same command then goes on."""
    words = (*ON, *settings)
    case, run = lab.case("recovery: end", ranks=ranks, fault=fault), lab.new_run("end")
    with lab.start(run, *words, ranks=ranks, fault=fault) as job:
        codes = job.wait(limit_s=120)
        case.exit_codes.append(codes)
        case.message_ok = reason in job.text
    if set(codes) != {76}:
        case.problems.append(f"exit codes {codes}")
    if not case.message_ok:
        case.problems.append(f"the log does not say {reason!r}")
    lab.finish(case, run, *words, ranks=ranks)
    return lab.report(case)


def recorded_once(lab: Lab) -> Case:
    """A sample that the records have is not made again. A checkpoint whose event is missing gets it. The report shows
    the later record of a repeated step."""
    fault = f"kill:1:{STRUCK_AT + 1}:vote,kill:0:{SAVED_AT}:save-renamed@2"
    case, run = lab.case("recovery: records", fault=fault), lab.new_run("records")
    with lab.start(run, *ON, *SAMPLES, "--metrics.norms_every_steps", "1", fault=fault) as job:
        case.exit_codes.append(job.wait(limit_s=120))
        if len(job.struck) < 2:
            case.problems.append(f"only {job.struck} of {fault} struck")
    samples = [record["step"] for record in run.records("sample")]
    if len(set(samples)) < len(samples):
        case.problems.append(f"samples of the steps {samples}")
    reported = read_history(run.dir).layers["step"].tolist()
    if reported != [*range(1, run.highest_step + 1)]:
        case.problems.append(f"the report has norms of the steps {reported}")
    saved = {record["step"] for record in run.records("event") if record["event"] == "saved"}
    if kept := {step_of(folder) for folder in list_checkpoints(run.dir)} - saved:
        case.problems.append(f"no event says that the checkpoints of {kept} were saved")
    return lab.report(case)


def stopped_and_struck(lab: Lab) -> Case:
    """Only rank 1 is asked to stop. All ranks agree, and it is lost in the last save: the job still stops."""
    fault = f"term:1:{STRUCK_AT}:step,kill:1:{STRUCK_AT + 1}:save-file-half"
    case, run = lab.case("recovery: stop and loss", fault=fault), lab.new_run("stop-and-loss")
    with lab.start(run, *ON, fault=fault) as job:
        case.exit_codes.append(job.wait(limit_s=120))
        if len(job.struck) < 2:
            case.problems.append(f"only {job.struck} of {fault} struck")
    if case.exit_codes != [[75, 75]]:
        case.problems.append(f"exit codes {case.exit_codes}")
    lab.finish(case, run, *ON)
    return lab.report(case)


def failed(lab: Lab, *, rank: int = 1) -> Case:
    """An exception of a rank itself ends the job, with its message and exit code on all ranks. None is replaced."""
    fault = f"raise:{rank}:{STRUCK_AT}"
    case, run = lab.case("recovery: own error", fault=fault), lab.new_run("failed")
    with lab.start(run, *ON, fault=fault) as job:
        case.exit_codes.append(job.wait(limit_s=120))
        if job.struck:
            case.detect_s = round(max(at for _, at in job.exits.values()) - job.struck[-1].time_s, 2)
        text = job.text
    noted = (run.dir / "log.txt").read_text(encoding="utf-8")
    case.message_ok = "RuntimeError: ordered by TXL_FAILPOINTS" in text and "ordered by TXL_FAILPOINTS" in noted
    if not case.message_ok:
        case.problems.append("the error is not in the log")
    if case.exit_codes != [[1, 1]]:
        case.problems.append(f"exit codes {case.exit_codes}")
    if "continues in the same job" in text:
        case.problems.append("a rank was replaced")
    lab.finish(case, run, *ON)
    return lab.report(case)


def locked(lab: Lab, fault: str) -> Case:
    """From the first loss to the end of the job, no other job gets the lock of the run directory for a moment."""
    case, run = lab.case("recovery: lock", fault=fault), lab.new_run("locked")
    intruder: list[RunLock] = []

    def is_over() -> bool:
        with suppress(ConfigError):
            lock = RunLock.acquire(run.dir)
            lock.release()
            if not run.is_done:  # the job releases the lock after it has written DONE
                intruder.append(lock)
        return run.is_done or bool(job.exits)

    with lab.start(run, *ON, fault=fault) as job:
        job.wait_for(lambda: bool(job.struck))
        job.wait_for(is_over, limit_s=300)
        case.exit_codes.append(job.wait(limit_s=120))
    if intruder:
        case.problems.append(f"another job got the lock {len(intruder)} times")
    if case.exit_codes != [[0, 0]]:
        case.problems.append(f"exit codes {case.exit_codes}")
    lab.judge(case, run, lab.unbroken(*ON))
    with suppress(ConfigError):
        RunLock.acquire(run.dir).release()
        return lab.report(case)
    case.problems.append("the lock was not released")
    return lab.report(case)


def stopped(lab: Lab, *, to_launcher: bool, stage: int = 1) -> Case:
    """SIGTERM while the job recovers: it recovers, saves and ends with code 75, and the same command goes on."""
    fault = f"kill:1:{STRUCK_AT},slow:0:2:leave@2"
    words = (*ON, "--engine.zero_stage", str(stage))
    case, run = lab.case("recovery: stop", stage=stage, fault=fault), lab.new_run("stop")
    with lab.start(run, *words, fault=fault) as job:
        job.wait_for(lambda: len(job.struck) == 2)
        job.signal(signal.SIGTERM, rank=None if to_launcher else 1)
        case.exit_codes.append(job.wait(limit_s=120))
    if case.exit_codes != [[75, 75]]:
        case.problems.append(f"exit codes {case.exit_codes}")
    lab.finish(case, run, *words)
    return lab.report(case)


def _is_stored_everywhere(faults: Sequence[str]) -> bool:
    """Whether all ranks have stored the step before the only fault: it comes after the decision of the step."""
    return len(faults) == 1 and faults[0].split(":")[-1] in ("decided", "updated")


def recovery(lab: Lab) -> Iterator[Trial]:
    """All directed cases, then a storm."""
    for stage in range(4):
        for ranks in (2, 4):
            for point in POINTS:
                for rank in sorted({0, 1, ranks - 1}):
                    yield partial(replaced, lab, f"kill:{rank}:{STRUCK_AT}:{point}", stage=stage, ranks=ranks)
        yield partial(replaced, lab, f"kill:0:{STRUCK_AT},kill:1:{STRUCK_AT}", stage=stage)
        yield partial(replaced, lab, f"kill:1:{STRUCK_AT},kill:2:{STRUCK_AT}", stage=stage, ranks=4)
        for point in REGROUP_POINTS:
            for rank in (0, 1):
                yield partial(replaced, lab, f"kill:1:{STRUCK_AT},kill:{rank}:2:{point}@2", stage=stage)
        for point in FIRST_STEP:
            fault = f"kill:1:{STRUCK_AT}:decided,kill:0:{0 if point == 'build' else STRUCK_AT}:{point}@2"
            yield partial(replaced, lab, fault, stage=stage)
        for point in ("step", "vote", "decided"):
            for victim in (0, 1):
                yield partial(in_collective, lab, point, stage=stage, victim=victim)
        for name in REWINDS:
            yield partial(replaced, lab, *REWINDS[name], *SPIKY, both=SPIKES, stage=stage)
        yield partial(replaced, lab, f"stop:1:{STRUCK_AT}", stage=stage)
        yield partial(storm, lab, kills=10, stage=stage, ranks=4)
    for point in SAVE_POINTS:
        for rank in (0,) if point in ONLY_RANK_0 else (0, 1):
            yield partial(replaced, lab, f"kill:{rank}:{SAVED_AT}:{point}")
            yield partial(
                replaced, lab, f"kill:{rank}:{SAVED_AT}:{point}", "--checkpoint.asynchronous", "False", stage=3
            )
    for stage in range(4):
        yield partial(storm, lab, *STORMY, *PHASES, kills=10, stage=stage, ranks=2)
    for program in LAUNCHERS:
        yield partial(launched, lab, program)
    yield partial(replaced, lab, f"kill:0:{STRUCK_AT}:decided", "--metrics.log_every_steps", "7")
    for words in CARRIED.values():
        yield partial(replaced, lab, *words, both=SPIKES)
    yield partial(stopped_and_struck, lab)
    yield partial(recorded_once, lab)
    for words in (*IN_PROGRESS.values(), *KINDS_OF_RUNS.values()):
        for stage in range(4):
            yield partial(replaced, lab, *words, stage=stage)
    for fault in (f"hang:1:{STRUCK_AT}", f"spin:0:{STRUCK_AT}"):
        yield partial(replaced, lab, fault, "--engine.timeout_s", "5")
    yield partial(replaced, lab, f"kill:1:{STRUCK_AT}:half-stored", both="skip:0:9", stage=2)
    for point in ("step", "half-stored", "stored", "sent"):
        for rank in (0, 1):
            yield partial(replaced, lab, f"kill:{rank}:{STRUCK_AT}:{point}", *PARTNER, stage=3, nodes=2)
    for words in ("phases", "bf16"):
        yield partial(replaced, lab, *KINDS_OF_RUNS[words], *RARELY)
    yield partial(replaced, lab, "kill:0:12:half-stored", "--optim.ema_decay", "0.9", *RARELY)
    yield partial(replaced, lab, *IN_PROGRESS["save of the best"], *RARELY)
    yield partial(replaced, lab, "kill:1:18:updated", *SPIKY, *RARELY, both=SPIKES)
    for stage in range(4):
        for fault in (f"kill:1:{STRUCK_AT}:updated", "kill:0:12:half-stored", f"kill:0:{STRUCK_AT},kill:1:11:step@2"):
            yield partial(replaced, lab, fault, *RARELY, *SAMPLES, "--eval.every_steps", "3", stage=stage)
        yield partial(replaced, lab, "kill:1:12:sent", *RARELY, *PARTNER, "--recover.partner_every", "2",
                      stage=stage, nodes=2)  # fmt: skip
    for rank in (0, 1):
        yield partial(locked, lab, f"kill:{rank}:{STRUCK_AT},slow:{1 - rank}:2:leave@2")
        yield partial(failed, lab, rank=rank)
    for stage in range(4):
        for both_copies in (False, True):
            yield partial(damaged, lab, stage=stage, both_copies=both_copies)
        yield partial(damaged, lab, stage=stage, both_copies=True, saves=False)
    for to_launcher in (False, True):
        yield partial(stopped, lab, to_launcher=to_launcher)
    for stage in range(4):
        yield partial(shrunk, lab, lost=[3], left=2, stage=stage)
        yield partial(shrunk, lab, lost=[0, 1, 2], left=1, stage=stage)
        yield partial(node_lost, lab, stage=stage, per_node=1 + stage % 2)
    yield partial(ended, lab, f"kill:1:{STRUCK_AT}:step@*", reason="The same happened before at this step")
    yield partial(ended, lab, "kill:1:11:step@*", *RARELY, reason="The same happened before at this step")
    yield partial(ended, lab, DEADLY_EVALUATION, *EVALUATED, *RARELY, reason="The same happened before at this step")
    yield partial(ended, lab, "kill:1:0:build#2@*", *PHASES, reason="The same happened before at this step")
    for kind in FREEZES:
        limits = () if kind == "stop" else ("--engine.timeout_s", "5", "--engine.start_timeout_s", "15")
        for asynchronous in ("True", "False"):
            words = ("--checkpoint.asynchronous", asynchronous, *limits)
            yield partial(replaced, lab, f"{kind}:1:{SAVED_AT}:save-file-half", *words)
        for point in REGROUP_POINTS:
            for rank in (0, 1):
                yield partial(replaced, lab, f"kill:1:{STRUCK_AT},{kind}:{rank}:2:{point}@2", *limits)
    yield partial(thawed, lab)
    yield partial(node_paused, lab)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        yield partial(spare_struck, lab, number)
    yield partial(ended, lab, NO_SPARE, reason="cannot be replaced, because the spares there have failed")
    yield partial(replaced, lab, THREE_IN_ROW)
    yield partial(ended, lab, FOUR_IN_ROW, reason="(recover.max_in_row=3)")
    for how in REQUESTS:
        for waits in (False, True):
            yield partial(asked_to_stop, lab, how, waits=waits)
    for rank in (0, 1):
        yield partial(agent_lost, lab, rank)
    for kind in ("deepspeed", "txl launch", "every process of txl launch"):
        for number in (signal.SIGTERM, signal.SIGKILL)[: 1 if "every" in kind else 2]:
            yield partial(launcher, lab, kind=kind, moment="recovery", number=number)


def endurance(lab: Lab) -> Iterator[Trial]:
    """Recovery for many minutes: storms of 100 kills, and a busy machine."""
    for stage in (0, 1, 2, 3):
        yield partial(storm, lab, kills=100, stage=stage, ranks=2)
    yield partial(busy, lab, minutes=10)
