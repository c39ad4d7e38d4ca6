"""Runs the `deepspeed` launcher so that each signal arrives once, no process is left, and the exit code is right.

Without this module the launcher ends at once on SIGTERM and leaves its ranks running, or it kills ranks that need more
than 30 s to save. It also exits with 0 after its node launcher was killed. This module starts the launcher in a process
group of its own:
    signals       are passed to the ranks of this node. If this node has no rank, RUN/STOP is written to stop all
    end           processes that are left in the group get time to save, and then SIGKILL
    own death     makes the kernel send SIGTERM to the launcher. Then the ranks notice its end, save and exit
    output        useless lines of the launcher are removed (output_filter.py), and a last line says how the run ended
    exit code     0 if this start wrote RUN/DONE, 75 to start again, 76 if a rank was lost, else the launcher's code
    recovery      with `recover.spares` the launcher's child processes are agents. It ends the job when one is killed
    other nodes   ssh ends if its node does not respond, because the launcher would otherwise wait forever
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from txl_dist.artifacts import DONE, LOG, RECORDS, STOP
from txl_dist.console.echo import echo
from txl_dist.distributed.processes import command_of, group_members, parent_of, process_id
from txl_dist.errors import HANG, REQUEUE, ConfigError
from txl_dist.io.files import parse_object, read_bytes
from txl_dist.launcher.output_filter import Strained, pattern_of_chatter
from txl_dist.train.monitoring.preemption import LAUNCHED_BY

NODE_LAUNCHER = "deepspeed.launcher.launch"
GRACE_S = 60.0
"""Seconds for ranks to finish their step, save and exit after their launcher has ended."""
SSH_KEEP_ALIVE = "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
"""Options of ssh for pdsh. With them the ssh to an unreachable node ends after 15 to 20 s (exit code 255)."""
SSH_ARGUMENTS = "PDSH_SSH_ARGS_APPEND"
SSH_FAILED = 255
"""Exit code of ssh, and so of pdsh, if a node cannot be reached any more. A signal with number 1 gives it too."""
PR_SET_PDEATHSIG = 1


def launch_ranks(
    launcher_flags: Sequence[str],
    train_words: Sequence[str],
    *,
    run_dir: Path,
    grace_s: float = GRACE_S,
    seen_within_s: float = 0.0,
    verbose: bool = False,
    has_agents: bool = False,
) -> int:
    """Run `deepspeed launcher_flags --module txl_dist train train_words` to its end. Returns the exit code.

    Call this function in the main thread only. `grace_s` is the time in seconds in which ranks can save and exit after
    the launcher has ended. `seen_within_s` is the longest delay in seconds after which a file of another node is
    visible here. With `verbose` the launcher's output is not filtered. `has_agents` says whether the launcher's child
    processes are agents of ranks (`recover.spares`). Raises ConfigError if there is no `deepspeed` program.
    """
    if shutil.which("deepspeed") is None:
        raise ConfigError("there is no program `deepspeed` on PATH. Install deepspeed, or activate its environment.")
    done_before = _stamp(run_dir / DONE)
    records_before = _size(run_dir / RECORDS)
    wants_hostfile = any(flag.startswith(("-H", "--hostfile")) for flag in launcher_flags)
    if verbose:
        strained = None
    else:
        strained = Strained(pattern_of_chatter(wants_hostfile=wants_hostfile))
    # What a person has set comes first: ssh takes the first value of an option.
    ssh_arguments = f"{os.environ.get(SSH_ARGUMENTS, '')} {SSH_KEEP_ALIVE}".strip()
    launcher = subprocess.Popen(
        ["deepspeed", *launcher_flags, "--module", "txl_dist", "train", *train_words],
        env=os.environ | {LAUNCHED_BY: json.dumps(process_id()), SSH_ARGUMENTS: ssh_arguments},
        stdout=strained.stdout if strained else None,
        stderr=strained.stderr if strained else None,
        start_new_session=True,
        preexec_fn=_die_with_parent(),
    )
    signals = _Forwarding(launcher.pid, run_dir / STOP)
    try:
        if strained:
            strained.started()
        code = launcher.wait()
        _end_group(launcher.pid, grace_s=grace_s)
    finally:
        signals.close()
        if strained:
            strained.close()
    end_s = time.monotonic() + (seen_within_s if code == 0 else 0.0)
    while not (is_done := _stamp(run_dir / DONE) not in (None, done_before)) and time.monotonic() < end_s:
        time.sleep(0.2)
    if signals.ended_launcher and code == 1 and not is_done:  # what the launcher of several nodes makes of a signal
        code = REQUEUE
    if code == SSH_FAILED and _was_stopped(run_dir / RECORDS, since=records_before):
        code = REQUEUE  # a node was lost earlier, and the run has continued and saved without it
    result = exit_code(code, is_done=is_done, sent=signals.sent)
    word = last_word(result, launcher_code=code, run_dir=run_dir, has_agents=has_agents)
    if word:
        with suppress(OSError):  # a terminal that is gone
            echo(f"txl launch: {word} (exit code {result})", to=sys.stderr)
    return result


def exit_code(code: int, *, is_done: bool, sent: set[int]) -> int:
    """Return the exit code of `txl launch`.

    `code` is the exit code of the launcher. `is_done` says whether this start of the run wrote DONE. `sent` contains
    the signals that were passed to the ranks.
    """
    if is_done:
        return 0
    number = signal_of(code)
    if number in sent:
        return REQUEUE  # a rank that is still starting dies of a stop signal: nothing is lost
    if number:
        return HANG
    return code or HANG  # 0 without DONE: a launcher between this process and the ranks was killed


def signal_of(code: int) -> int:
    """Return the number of the signal that an exit code means, or 0 if it means no signal.

    The exit code can come from a shell, from sys.exit(-n) or from Python's subprocess.
    """
    if 128 < code < 192:
        number = code - 128
    elif code >= 192:
        number = 256 - code
    else:
        number = -code
    if 0 < number < 65:
        return number
    return 0


def last_word(code: int, *, launcher_code: int, run_dir: Path, has_agents: bool = False) -> str:
    """Return a text that says how a run ended.

    The text is empty if the run is done or its settings were refused, because a rank has then printed the outcome
    itself. `has_agents` says whether the launcher's child processes are agents of ranks.
    """
    remedy = "The same command continues"
    if code in (0, ConfigError.exit_code):
        return ""
    if code == REQUEUE:
        return f"stopped. {remedy}"
    if code != HANG:
        log = run_dir / LOG
        return "training failed. The reason is above" + (f", and the log of the run is {log}" if log.is_file() else "")
    number = signal_of(launcher_code)
    if launcher_code == SSH_FAILED:
        victim = "an agent" if has_agents else "a rank"
        cause = f"a node could not be reached any more, or {victim} died of SIGHUP"
    elif number:
        cause = _cause_of_signal(number, launcher_code=launcher_code, has_agents=has_agents)
    elif launcher_code == HANG and has_agents:
        cause = "a rank or its agent hung or was lost, and was not replaced"
    elif launcher_code == HANG:
        cause = "a rank hung or was lost"
    else:
        cause = "the launcher ended before the run was done"
    return f"{cause}. {remedy} from the last checkpoint"


def _cause_of_signal(number: int, *, launcher_code: int, has_agents: bool) -> str:
    """Return a text that says which process a signal has ended, for `last_word`.

    An agent exits with 128 plus the number of the signal that has ended its rank. DeepSpeed's node launcher passes that
    on, and makes 256 minus the number of a signal that has ended the agent itself.
    """
    if number in set(signal.Signals):
        name = signal.Signals(number).name
    else:
        name = f"signal {number}"
    if not has_agents:
        cause = f"a rank died of {name}"
    elif 128 < launcher_code < 192:
        cause = f"a rank or its agent died of {name}"
    else:
        cause = f"the agent of a rank died of {name}, so the launcher ended the job"
    if number == signal.SIGKILL:
        cause += ". Host memory may have run out, see `dmesg`"
    return cause


class _Forwarding:
    """Signal handlers that pass stop signals on to the ranks until `close` is called."""

    def __init__(self, group: int, stop_file: Path) -> None:
        self.sent: set[int] = set()
        """Signals that this process has received."""
        self.ended_launcher = False
        """True if a signal was sent to the launcher itself, because the run had not begun."""
        self._group = group
        self._stop_file = stop_file
        self._made_stop_file = False
        self._acknowledged: set[int] = set()
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        self._before = {number: signal.signal(number, self._forward) for number in numbers}

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._made_stop_file:  # it must not stop the next run
            self._stop_file.unlink(missing_ok=True)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.sent.add(number)
        # Its first words: those of pdsh, whose children are no ranks, hold the whole command of the nodes.
        ranks = [pid for pid in group_members(self._group) if NODE_LAUNCHER in command_of(parent_of(pid))[:4]]
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if ranks:
            self._acknowledge(number, "the run saves after the current step, then exits")
            return
        with suppress(OSError):  # without the folder of the run nothing can be lost yet
            self._stop_file.touch()
            self._made_stop_file = True
            self._acknowledge(number, f"{self._stop_file} asks the ranks to save and exit")
            return
        self.ended_launcher = True
        self._acknowledge(number, "the run had not begun, and ends now")
        with suppress(ProcessLookupError):
            os.killpg(self._group, number)

    def _acknowledge(self, number: int, what: str) -> None:
        """Print at once that a signal has arrived. Each kind of signal is printed only once."""
        if number in self._acknowledged:
            return
        self._acknowledged.add(number)
        with suppress(OSError, RuntimeError):  # no terminal; or this signal interrupts a write to it
            echo(f"txl launch: {signal.Signals(number).name}: {what}", to=sys.stderr)


def _end_group(group: int, *, grace_s: float) -> None:
    """Wait up to `grace_s` seconds for the ranks to exit after the launcher has ended. Then kill the processes that
    remain."""
    end_s = time.monotonic() + grace_s
    while group_members(group) and time.monotonic() < end_s:
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return (time, inode) of a file, or None if there is no file. Time and inode change when the file is written
    again."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def _size(path: Path) -> int:
    """Return the size of a file in bytes, or 0 if there is no file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _was_stopped(records: Path, *, since: int) -> bool:
    """Return whether the run has saved and stopped by a request, as the last event in its records says.

    Only records after the first `since` bytes count.
    """
    last = ""
    with suppress(OSError, ValueError):  # a line that is not complete ends the search
        for line in read_bytes(records)[since:].splitlines():
            record = parse_object(line)
            last = str(record["event"]) if record.get("kind") == "event" else last
    return last == "stopped"


def _die_with_parent() -> Callable[[], None] | None:
    """Return a function to call in a child process. It makes the kernel send SIGTERM to the child when this process
    dies.

    Returns None on a system without prctl.
    """
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
