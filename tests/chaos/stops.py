"""Requests to stop: every signal, the file and the time limit, during a step, an evaluation and a save. Signals are
also sent to the launchers, which do not always pass them on.

Each case checks the exit code 75, that no step is lost, that the checkpoint is committed within 10 s, and that all
processes end 5 s later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import psutil

from tests.chaos.agents import ON
from tests.chaos.lab import Case, Lab, Trial, paused
from tests.chaos.runs import Run
from tests.helpers.job import Job
from tests.helpers.launch import kill_everything, start_training, wait_for
from txl_dist.artifacts import checkpoint_folder

WORDS = ("--eval.every_steps", "6")
MOMENTS = {"training": "slow:*:9:step", "evaluation": "slow:0:12:evaluate", "save": "slow:0:12:save-file"}
"""Pauses in which the request comes."""
IN_RECOVERY = "kill:1:9,slow:0:2:leave@2"
"""A pause while ranks regroup, of a launcher whose ranks have recovery."""
COMMIT_LIMIT_S = 10.0
ORPHAN_LIMIT_S = 5.0
ORPHAN_IN_RECOVERY_S = 30.0
"""Agents wait for each other's ends, and the spare may still import."""


def _signal(number: int, rank: int) -> Callable[[Job, Run], float]:
    return lambda job, run: job.signal(number, rank=rank)


def _stop_file(job: Job, run: Run) -> float:
    (run.dir / "STOP").touch()
    return time.time()


REQUESTS: dict[str, Callable[[Job, Run], float]] = {
    "SIGTERM to rank 0": _signal(signal.SIGTERM, 0),
    "SIGTERM to rank 1": _signal(signal.SIGTERM, 1),
    "SIGTERM to all ranks": lambda job, run: job.signal(signal.SIGTERM),
    "SIGUSR1 to rank 1": _signal(signal.SIGUSR1, 1),
    "SIGINT to rank 0": _signal(signal.SIGINT, 0),
    "STOP file": _stop_file,
}


def request(lab: Lab, *, kind: str, moment: str, stage: int = 1) -> Case:
    """One request at one moment, to the ranks themselves."""
    asked_s, committed_s = [0.0], [0.0]

    def ask(job: Job, run: Run) -> None:
        paused(job)
        asked_s[0] = REQUESTS[kind](job, run)
        job.wait()
        committed_s[0] = _committed_s(run)

    name = f"signals: {kind}, in {moment}"
    case, _ = lab.survive(name, *WORDS, stage=stage, fault=MOMENTS[moment], during=ask)
    return lab.report(_judged(case, codes=[75, 75], commit_s=committed_s[0] - asked_s[0]))


def while_loading(lab: Lab) -> Case:
    """A request to a run that is just being resumed: it ends, and nothing is lost."""
    case, run = lab.case("signals: SIGTERM to rank 0, while loading", fault="slow:*:6:load"), lab.new_run("loading")
    words = ("--engine.zero_stage", "1")
    with lab.start(run, *words, fault="slow:*:8,kill:*:10") as job:
        job.wait()
    lost = run.last_step - 6
    with lab.start(run, *words, fault=case.fault) as job:
        paused(job)
        asked_s = job.signal(signal.SIGTERM, rank=0)
        case.exit_codes.append(job.wait())
        end_s = max(at for _, at in job.exits.values())
    lab.finish(case, run, *words)
    case.steps_lost -= lost  # to the kill before it
    return lab.report(_judged(case, codes=[75, 75], commit_s=end_s - asked_s))


def time_limit(lab: Lab, *, limit_s: int = 3) -> Case:
    """--max-time: counted from the start, kept to the length of a step and a save."""
    case, run = lab.case("signals: --max-time"), lab.new_run("max-time")
    words = ("--train.max_steps", "1000")
    with lab.start(run, *words, "--max-time", f"{limit_s}s") as job:
        case.exit_codes.append(job.wait())
    overrun_s = _committed_s(run) - job.started_s - limit_s
    stopped = run.last_step
    with lab.start(run, *words, "--max-time", f"{limit_s}s") as job:
        case.exit_codes.append(job.wait())
    case.steps_lost, case.bytes_left = run.steps_lost, run.bytes_left
    if run.last_step <= stopped:
        case.problems.append(f"the second start did not go on from step {stopped}")
    return lab.report(_judged(case, codes=[75, 75], commit_s=max(0.0, overrun_s)))


def _judged(case: Case, *, codes: list[int] | None, commit_s: float) -> Case:
    case.detect_s = round(commit_s, 2)
    if codes is not None and case.exit_codes[0] != codes:
        case.problems.append(f"exit codes {case.exit_codes[0]} instead of {codes}")
    if case.steps_lost:
        case.problems.append(f"{case.steps_lost} steps lost")
    if not 0 <= commit_s < COMMIT_LIMIT_S:
        case.problems.append(f"committed after {commit_s:.1f} s")
    return case


def _committed_s(run: Run) -> float:
    """When the newest checkpoint was renamed to its name, in seconds since the epoch."""
    return checkpoint_folder(run.dir, run.checkpoints[-1]).stat().st_ctime


def _started(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [psutil.Process(process.pid)]


def _launch_py(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [one for one in _all(process) if "deepspeed.launcher.launch" in one.cmdline()]


def _all(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [*_started(process), *psutil.Process(process.pid).children(recursive=True)]


LAUNCHERS: dict[str, Callable[[subprocess.Popen[str]], list[psutil.Process]]] = {
    "deepspeed": _started,
    "launch.py": _launch_py,
    "txl launch": _started,
    "every process of txl launch": _all,  # as a batch system does
}


def launcher(lab: Lab, *, kind: str, moment: str, number: int = signal.SIGTERM) -> Case:
    """A signal to a launcher; the ranks are real ones, started through it."""
    name = f"signals: {signal.Signals(number).name} to {kind}, in {moment}"
    case, run = lab.case(name, fault=MOMENTS.get(moment, IN_RECOVERY)), lab.new_run(name)
    run.log.touch()
    settings = WORDS if moment in MOMENTS else (*WORDS, *ON)
    words = (str(lab.config), "--run.dir", str(run.dir), *settings)
    with mock.patch.dict(os.environ, {"TXL_FAILPOINTS": case.fault}):
        process = _start(kind, words, cwd=run.log.parent / f"{run.dir.name}-launcher")
    family: list[psutil.Process] = []
    try:
        log = Path(run.log.parent / f"{run.dir.name}-launcher" / "launcher.log")
        wait_for(lambda: "TXL_FAILPOINTS slow" in log.read_text(encoding="utf-8"), process=process)
        family = psutil.Process(process.pid).children(recursive=True)
        asked_s = time.time()
        for one in LAUNCHERS[kind](process):
            one.send_signal(number)
        wait_for(lambda: _has_stopped(run) or not any(map(_lives, family)), timeout_s=60)
        limit_s = ORPHAN_LIMIT_S if moment in MOMENTS else ORPHAN_IN_RECOVERY_S
        _, left = psutil.wait_procs(family, timeout=limit_s)
        orphans = [one for one in left if _lives(one)]  # not those that only nobody has waited for
        case.exit_codes.append([process.wait(timeout=60)])
        if orphans:
            case.problems.append(f"still alive after {limit_s} s: {[str(one) for one in orphans]}")
    finally:
        if process.poll() is None:
            kill_everything(process)
        for one in filter(_lives, family):
            one.kill()
    if 0 in case.exit_codes[0] and (kind, number) != ("launch.py", signal.SIGKILL):  # DeepSpeed's own launcher does
        case.problems.append("a launcher that was stopped reports success")
    commit_s = _committed_s(run) - asked_s if run.checkpoints else -1.0
    lab.finish(case, run, *settings, "--engine.zero_stage", "1")
    is_ours = "txl launch" in kind and not (kind == "txl launch" and number == signal.SIGKILL)
    code = 75
    if moment not in MOMENTS:  # the spare may still import when it is needed, for which there is no limit here
        commit_s = min(commit_s, 0.0)
        if "while it waited for" in log.read_text(encoding="utf-8"):  # too long for the job, so it has saved nothing
            code, commit_s, case.steps_lost = 76, 0.0, 0
    return lab.report(_judged(case, codes=[code] if is_ours else None, commit_s=commit_s))


def _start(kind: str, words: tuple[str, ...], *, cwd: Path) -> subprocess.Popen[str]:
    cwd.mkdir()
    if "txl launch" not in kind:
        return start_training(*words, cwd=cwd)
    command = [sys.executable, "-m", "txl_dist", "launch", "--num_accelerators", "2", *words]
    with (
        (cwd / "launcher.log").open("w", encoding="utf-8") as log,
        mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}),
    ):
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def _has_stopped(run: Run) -> bool:
    """Whether the checkpoint of the stop is there: the newest, of the last step that was trained."""
    return bool(run.checkpoints) and run.checkpoints[-1] == run.last_step >= 9


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def signals(lab: Lab) -> Iterator[Trial]:
    """All requests at all moments."""
    for kind in REQUESTS:
        for moment in MOMENTS:
            yield partial(request, lab, kind=kind, moment=moment)
    yield partial(while_loading, lab)
    yield partial(time_limit, lab)
    for kind in LAUNCHERS:
        for moment in MOMENTS:
            yield partial(launcher, lab, kind=kind, moment=moment)
        if kind != "every process of txl launch":
            yield partial(launcher, lab, kind=kind, moment="training", number=signal.SIGKILL)
