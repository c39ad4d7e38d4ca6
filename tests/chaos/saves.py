"""Crashes during a save, and files that are damaged afterwards.

The points of the sweep are not listed here. A run with TXL_FAILPOINTS=trace names every point of a save on every rank,
and each point is a case.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import groupby

from tests.chaos.lab import Case, Lab, Trial, paused
from tests.chaos.runs import Run
from tests.helpers.corpora import flip_bit
from tests.helpers.job import Job
from txl_dist.artifacts import checkpoint_folder
from txl_dist.train.checkpoint.read import newest_checkpoint

SWEEP_STEP = 9
SWEEP = ("--train.max_steps", "12", "--checkpoint.every_steps", "3", "--checkpoint.keep_last", "2")
"""The save of step 9 writes, commits and removes the checkpoint of step 3."""
SHARES_PCT = (0, 1, 50, 99)


def crash_points(lab: Lab, *, stage: int) -> list[str]:
    """Every point of one save as an entry of TXL_FAILPOINTS that kills there; of the many in a file the middle one."""
    run, points = lab.new_run("trace"), []
    with lab.start(run, *SWEEP, "--engine.zero_stage", str(stage), fault=f"trace:*:{SWEEP_STEP}:*") as job:
        job.wait()
        struck = [point for point in job.struck if point.phase.startswith(("save", "prune"))]
    for rank in (0, 1):
        counts = Counter[str]()
        for phase, group in groupby(point.phase for point in struck if point.rank == rank):
            size = len(list(group))
            middle = (size + 1) // 2 if phase == "save-file-half" else size
            points.append(f"kill:{rank}:{SWEEP_STEP}:{phase}#{counts[phase] + middle}")
            counts[phase] += size
    return points


def crash_in_save(lab: Lab, *, stage: int, fault: str) -> Case:
    """kill -9 at one point of a save; never more is lost than the steps since the checkpoint before."""
    case, run = lab.survive("sweep", *SWEEP, stage=stage, fault=fault)
    if case.steps_lost > 6:
        case.problems.append(f"{case.steps_lost} steps lost, though one was saved every 3")
    if run.checkpoints[-2:] != [SWEEP_STEP, 12]:
        case.problems.append(f"checkpoints {run.checkpoints} are left instead of the last two")
    return lab.report(case)


ELSEWHERE = {
    "in a step": ("kill:1:10", ""),
    "between steps": ("kill:0:9:boundary", ""),
    "in the last evaluation": ("kill:1:12:evaluate", ""),
    "behind the last save": ("kill:0:12:saved", ""),
    "in the save of a stop": ("term:1:10:boundary,kill:0:11:save-file-half#2", ""),
    "while loading": ("slow:*:10,kill:*:12", "kill:0:9:load"),
    "in the next save too": ("kill:0:9:save-manifest", "kill:1:9:save-file-done"),
}
"""kill -9 at other points: the fault of the first start, and that of the second."""


def crash_elsewhere(lab: Lab, *, where: str, stage: int = 1) -> Case:
    """kill -9 outside a save that is due by the interval, or twice."""
    fault, again = ELSEWHERE[where]
    case, _ = lab.survive(f"crash {where}", *SWEEP, stage=stage, fault=fault, again=again)
    return lab.report(case)


def sweep(lab: Lab) -> Iterator[Trial]:
    """kill -9 at every point of a save, and at some others."""
    for where in ELSEWHERE:
        yield partial(crash_elsewhere, lab, where=where)
    for stage in (1, 3):
        points = crash_points(lab, stage=stage)
        assert len(points) > 20, f"too few points to be true: {points}"
        for fault in points:
            yield partial(crash_in_save, lab, stage=stage, fault=fault)


def verifier(lab: Lab, *, kind: str, num_flips: int = 100, stage: int = 1) -> Case:
    """Random bit flips (kind: bits), or every file cut short (cuts): each must be found, and the checkpoint before it
    be chosen. In process, with the function that a resuming job calls."""
    run = lab.unbroken("--engine.zero_stage", str(stage))
    newest, before = (checkpoint_folder(run.dir, step) for step in reversed(run.checkpoints[-2:]))
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    draw = random.Random(lab.seed)
    if kind == "bits":
        trials = [(draw.choice(files), draw.random()) for _ in range(num_flips)]
    else:
        trials = [(path, share / 100) for path in files for share in SHARES_PCT]
    case = lab.case(f"flips: {kind}", stage=stage)
    case.trials, case.message_ok = len(trials), True
    for path, where in trials:
        data = path.read_bytes()
        offset = int(where * len(data))
        flipped = bytes([data[offset] ^ 1 << draw.randrange(8)]) + data[offset + 1 :]
        path.write_bytes(data[:offset] + (flipped if kind == "bits" else b""))
        found, _, why = newest_checkpoint(run.dir)
        path.write_bytes(data)
        if found != before:
            case.problems.append(f"{path.name} at {where}: {found} was chosen")
        if not any(newest.name in line and path.name in line for line in why):
            case.message_ok = False
            case.problems.append(f"{path.name} at {where}: not named in {why}")
    return lab.report(case)


DAMAGES = ("engine/00001.safetensors", "lanes/00000-*.safetensors", "MANIFEST.json")


def damaged_folder(lab: Lab, *, pattern: str, stage: int = 1) -> Case:
    """The newest checkpoint of a killed run is damaged: it goes on from the one before, and saves that step again."""

    def damage(job: Job, run: Run) -> None:
        paused(job)
        job.wait_for(lambda: 18 in run.checkpoints)
        job.signal(signal.SIGKILL)
        job.wait()
        (victim,) = checkpoint_folder(run.dir, 18).glob(pattern)
        if "lanes" in pattern:
            victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
        else:
            flip_bit(victim)

    case, run = lab.survive(f"flips: {pattern}", stage=stage, fault="slow:*:20", during=damage)
    log = run.log.read_text(encoding="utf-8")
    case.message_ok = "damaged" in log and "step_000000018" in log and "step_000000012" in log
    aside = [path.name for path in (run.dir / "checkpoints").glob("*.damaged-*")]
    if not case.message_ok or aside != ["step_000000018.damaged-1"]:
        case.problems.append(f"not said, or not moved aside: {aside}")
    return lab.report(case)


def flips(lab: Lab) -> Iterator[Trial]:
    """Damage of every kind: found in process, survived by launched runs."""
    for stage in (1, 3):
        for kind in ("bits", "cuts"):
            yield partial(verifier, lab, kind=kind, stage=stage)
    for pattern in DAMAGES:
        yield partial(damaged_folder, lab, pattern=pattern)
