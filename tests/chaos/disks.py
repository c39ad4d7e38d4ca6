"""A full or failing disk during a save: the run continues, and the next save commits."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.chaos.lab import Case, Lab, Trial
from tests.chaos.runs import Run
from tests.chaos.stops import REQUESTS
from tests.helpers.job import Job

FULL_AT_THE_END = ",".join(["enospc:0:24:save-file"] * 30)
"""Every attempt of the last save, and more."""
PHASES = ("save-file", "save-file-half", "save-written", "save-manifest", "save-rename")


def failing_write(lab: Lab, *, kind: str, phase: str, rank: int, stage: int = 1) -> Case:
    """The file system fails once, in the save of step 12: nobody ends, nothing is left, the save of step 18 commits."""
    case, run = lab.case(f"disk: {kind}", stage=stage, fault=f"{kind}:{rank}:12:{phase}"), lab.new_run(f"disk-{kind}")
    words = ("--engine.zero_stage", str(stage))
    with lab.start(run, *words, fault=case.fault) as job:
        case.exit_codes.append(job.wait())
        if not job.struck:
            case.problems.append("the fault never struck")
    _check(case, run, missing=12)
    lab.judge(case, run, lab.unbroken(*words))
    return lab.report(case)


def full_disk(lab: Lab, *, stage: int = 1) -> Case:
    """A file system that fills up after the first checkpoint and has room again two saves later."""
    with small_disk(lab.folder / f"small-disk-{stage}", size_kib=2048) as disk:
        case, run = lab.case("disk: full", stage=stage, fault="slow:*:8,slow:*:20"), Run(disk / "run")
        run.log = lab.folder / f"full-disk-{stage}.log"  # outside, so that it can be read
        words = ("--engine.zero_stage", str(stage), "--checkpoint.keep_last", "1")
        ballast = disk / "ballast"
        with lab.start(run, *words, fault=case.fault) as job:
            job.wait_for(lambda: len(job.struck) >= 2)
            free = _fill(ballast)
            job.wait_for(lambda: len(job.struck) >= 4)
            case.message_ok = _names_path_and_need(job, run.dir)
            ballast.unlink()
            case.exit_codes.append(job.wait())
        if not case.message_ok:
            case.problems.append(f"the log does not name path and need ({free} bytes were free)")
        if run.checkpoints != [24]:
            case.problems.append(f"checkpoints {run.checkpoints} instead of the last one")
        if case.exit_codes != [[0, 0]]:
            case.problems.append(f"exit codes {case.exit_codes}: {job.text[-500:]}")
        unbroken = lab.unbroken(*words)
        lab.judge(case, run, unbroken)
    return lab.report(case)


def last_save(lab: Lab, *, kind: str) -> Case:
    """The disk is full at the end, and the save is tried for a quarter of an hour: who asks to stop is heard meanwhile,
    and the same command continues from the checkpoint before."""
    case, run = lab.case(f"disk: full at the end, {kind}", fault="enospc:0:24:save-file, always"), lab.new_run(kind)
    words = ("--engine.zero_stage", "1")
    with lab.start(run, *words, fault=FULL_AT_THE_END) as job:
        job.wait_for(lambda: "is not saved yet: the run tries again for up to 15 min" in job.text)
        asked_s = REQUESTS[kind](job, run)
        case.exit_codes.append(job.wait())
        case.detect_s = round(max(at for _, at in job.exits.values()) - asked_s, 2)
        case.message_ok = "The run then continues from step_000000018" in job.text
    if case.exit_codes != [[2, 2]] or not case.message_ok:
        case.problems.append(f"exit codes {case.exit_codes}: {job.text[-500:]}")
    lab.finish(case, run, *words)
    return lab.report(case)


def removed(lab: Lab, *, moment: str) -> Case:
    """The run directory goes away: every rank ends with one clear error, and nothing of it is rebuilt; where it was
    moved to, the run goes on."""
    case, run = lab.case(f"disk: run directory moved away, {moment}", fault=moment), lab.new_run("moved")
    words, away = ("--engine.zero_stage", "1"), run.dir.with_name(run.dir.name + "-away")
    with lab.start(run, *words, "--train.max_steps", "100000", fault=moment) as job:
        job.wait_for(lambda: bool(job.struck) and bool(run.checkpoints))
        run.dir.rename(away)
        case.exit_codes.append(job.wait())
        case.message_ok = job.text.count("was removed or moved during the run") == 1
    if case.exit_codes != [[2, 2]] or not case.message_ok or "Traceback" in job.text:
        case.problems.append(f"exit codes {case.exit_codes}: {job.text[-2000:]}")
    if run.dir.exists():
        case.problems.append(f"was rebuilt: {[path.name for path in run.dir.iterdir()]}")
    (away / "config.toml").unlink()  # as where only checkpoints are left
    moved, last = Run(away), max(Run(away).checkpoints)
    with lab.start(moved, *words, "--resume", "must", "--train.max_steps", str(last + 6)) as job:
        case.exit_codes.append(job.wait())
    if not moved.is_done or moved.checkpoints[-1] != last + 6:
        case.problems.append(f"did not go on from {last}: {job.text[-1000:]}")
    return lab.report(case)


def _check(case: Case, run: Run, *, missing: int) -> None:
    text = run.jobs[-1].text
    case.message_ok = re.search(rf"step_0*{missing}\b", text) is not None and "ordered by TXL_FAILPOINTS" in text
    if not case.message_ok:
        case.problems.append("the log does not name the checkpoint and the error")
    if case.exit_codes != [[0, 0]]:
        case.problems.append(f"exit codes {case.exit_codes}: {text[-500:]}")
    if 18 not in run.checkpoints or missing in run.checkpoints:
        case.problems.append(f"checkpoints {run.checkpoints}: that of step 18 should be there, not that of {missing}")


def _names_path_and_need(job: Job, folder: Path) -> bool:
    lines = [line for line in job.text.splitlines() if "step 12" in line and str(folder) in line]
    return any(re.search(r"needs [\d.,]+ \w?i?B", line) for line in lines)


def _fill(ballast: Path) -> int:
    """Write until nothing fits any more but a few log lines; returns the bytes left."""
    piece = 4096
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * piece)
        except OSError:
            pass
        file.truncate(max(0, file.tell() - 8 * piece))
    return 8 * piece


@contextmanager
def small_disk(folder: Path, *, size_kib: int) -> Iterator[Path]:
    """A file system of its own in memory. Raises CalledProcessError where mounting is not allowed."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def can_mount(folder: Path) -> bool:
    """Whether this machine lets us make a small disk."""
    try:
        with small_disk(folder / "probe-disk", size_kib=64):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def disk(lab: Lab) -> Iterator[Trial]:
    """Full disks, and errors at every phase of a save on either rank."""
    if can_mount(lab.folder):
        for stage in (1, 3):
            yield partial(full_disk, lab, stage=stage)
    for kind in ("enospc", "eio"):
        for phase in PHASES:
            yield partial(failing_write, lab, kind=kind, phase=phase, rank=0)
        for phase in ("save-file", "save-file-half"):
            yield partial(failing_write, lab, kind=kind, phase=phase, rank=1)
    yield partial(failing_write, lab, kind="enospc", phase="save-file-half", rank=1, stage=3)
    for request in REQUESTS:
        yield partial(last_save, lab, kind=request)
    for moment in ("slow:*:12:save-file", "slow:*:14:step"):
        yield partial(removed, lab, moment=moment)
