"""Owns a run of the `deepspeed` launcher: signals arrive once, nothing stays behind, and the exit code is true.

By itself that launcher dies of a SIGTERM at once and leaves its ranks, exits 0 when its node launcher was killed, and
on SIGTERM kills ranks that need more than 30 s to save. So here it runs in a process group of its own:
    a signal      goes to the ranks of this node; if there are none here, RUN/STOP is made, which every rank obeys
    the end       what is left of the group gets the time to save, then SIGKILL
    our own death is a SIGTERM for the launcher, whose end the ranks notice, save and leave
    exit code     0 only if this start wrote RUN/DONE; 75 to be started again; 76 if a rank was lost; else as it was
    other nodes   an ssh that hears nothing of its node gives up, or a lost node would keep the launcher for ever
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from txl_dist.errors import HANG, REQUEUE, ConfigError
from txl_dist.train.processes import command_of, group_members, parent_of, process_id
from txl_dist.train.stopping import LAUNCHED_BY

NODE_LAUNCHER = "deepspeed.launcher.launch"
GRACE_S = 60.0
"""What ranks whose launcher has ended get to finish their step, save and leave."""
SSH_KEEP_ALIVE = "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
"""For pdsh: a node that is cut off ends its ssh after 15 to 20 s (exit code 255), instead of never."""
SSH_ARGUMENTS = "PDSH_SSH_ARGS_APPEND"
PR_SET_PDEATHSIG = 1


def launch(
    launcher_flags: Sequence[str],
    train_words: Sequence[str],
    *,
    run_dir: Path,
    grace_s: float = GRACE_S,
    seen_within_s: float = 0.0,
) -> int:
    """Run `deepspeed launcher_flags --module txl_dist train train_words` to its end. Returns the exit code.

    `seen_within_s`: how late a file that another node writes may show here.
    Main thread only. Raises ConfigError if there is no `deepspeed` program.
    """
    done_before = _stamp(run_dir / "DONE")
    command = ["deepspeed", *launcher_flags, "--module", "txl_dist", "train", *train_words]
    try:
        launcher = subprocess.Popen(
            command,
            env=os.environ | {LAUNCHED_BY: json.dumps(process_id()), SSH_ARGUMENTS: _ssh_arguments()},
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
    except FileNotFoundError as error:
        raise ConfigError(
            "there is no program `deepspeed` on PATH. Install deepspeed, or activate its environment."
        ) from error
    signals = _Forwarding(launcher.pid, run_dir / "STOP")
    try:
        code = launcher.wait()
        _end_group(launcher.pid, grace_s=grace_s)
    finally:
        signals.close()
    end_s = time.monotonic() + (seen_within_s if code == 0 else 0.0)
    while not (is_done := _stamp(run_dir / "DONE") not in (None, done_before)) and time.monotonic() < end_s:
        time.sleep(0.2)
    if signals.ended_launcher and code == 1 and not is_done:  # what the launcher of several nodes makes of a signal
        return REQUEUE
    return exit_code(code, is_done=is_done, sent=signals.sent)


def exit_code(code: int, *, is_done: bool, sent: set[int]) -> int:
    """What to exit with. `code`: the launcher's; `is_done`: this start wrote DONE; `sent`: signals passed to ranks."""
    if is_done:
        return 0
    died_by = code - 128 if 128 < code < 192 else 256 - code if code >= 192 else -code  # shell's way, sys.exit(-n)'s
    if died_by > 0 and died_by < 65:
        return REQUEUE if died_by in sent else HANG  # a rank that starts up dies of a stop signal: nothing is lost
    return code or HANG  # 0 without DONE: a launcher between us and the ranks was killed


class _Forwarding:
    """Passes stop signals on while it is open."""

    def __init__(self, group: int, stop_file: Path) -> None:
        self.sent: set[int] = set()
        self.ended_launcher = False
        """The launcher itself was stopped, before there was a run."""
        self._group, self._stop_file, self._made_stop_file = group, stop_file, False
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        self._before = {number: signal.signal(number, self._forward) for number in numbers}

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._made_stop_file:  # it stopped a run that has ended; the next must not meet it
            self._stop_file.unlink(missing_ok=True)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.sent.add(number)
        # Its first words: those of pdsh, whose children are no ranks, hold the whole command of the nodes.
        ranks = [pid for pid in group_members(self._group) if NODE_LAUNCHER in command_of(parent_of(pid))[:4]]
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if not ranks:
            with suppress(OSError):  # without the folder of the run nothing can be lost yet
                self._stop_file.touch()
                self._made_stop_file = True
                return
            self.ended_launcher = True
            with suppress(ProcessLookupError):
                os.killpg(self._group, number)


def _end_group(group: int, *, grace_s: float) -> None:
    """Wait for what the launcher left behind, which notices its end and leaves; kill what does not."""
    end_s = time.monotonic() + grace_s
    while group_members(group) and time.monotonic() < end_s:
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _stamp(path: Path) -> tuple[int, int] | None:
    """What changes when a file is written again; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def _ssh_arguments() -> str:
    """What a person has set comes first: ssh takes the first value of an option."""
    return f"{os.environ.get(SSH_ARGUMENTS, '')} {SSH_KEEP_ALIVE}".strip()


def _die_with_parent() -> Callable[[], None] | None:
    """For the child to run: the kernel sends it SIGTERM when we die. None where the system has no such thing."""
    try:
        prctl = ctypes.CDLL(None).prctl  # looked up here: the child may only do little
    except AttributeError:
        return None
    parent = os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # too late
            os._exit(1)

    return ask
