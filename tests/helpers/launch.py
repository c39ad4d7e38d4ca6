"""The command line as a user starts it: `txl COMMAND`, training on several ranks, and the `deepspeed` launcher."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from tests.helpers import forked
from tests.helpers.job import Job
from txl_dist.distributed.rendezvous import free_port


def txl(*words: str, cwd: Path, timeout_s: int = 120) -> subprocess.CompletedProcess[str]:
    """Run `txl WORDS` to its end in a forked process."""
    return _run(forked.run_txl, *words, cwd=cwd, timeout_s=timeout_s)


def python(*words: str, cwd: Path, timeout_s: int = 300) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`, a program or a module, to its end in a forked process."""
    return _run(forked.run_python, *words, cwd=cwd, timeout_s=timeout_s)


def _run(function: Callable[..., None], *words: str, cwd: Path, timeout_s: int) -> subprocess.CompletedProcess[str]:
    with TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = forked.start(function, *words, variables=forked.environment(), cwd=cwd, out=out, err=err)
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(words, timeout_s)
        said = [path.read_text(encoding="utf-8") for path in (out, err)]
        return subprocess.CompletedProcess(words, process.exitcode, *said)


def train(*words: str, cwd: Path, ranks: int = 2, timeout_s: int = 300) -> None:
    """Train to the end on forked ranks. Raises AssertionError if a rank fails."""
    with Job("train", *words, log=cwd / "launcher.log", ranks=ranks, cwd=cwd) as job:
        assert job.wait(limit_s=timeout_s) == [0] * ranks, job.text[-4000:]


def start_training(*words: str, cwd: Path, ranks: int = 2) -> subprocess.Popen[str]:
    """Start `deepspeed --num_accelerators RANKS --module txl_dist train WORDS` in a new session."""
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", str(ranks)]
    command += ["--master_port", str(free_port()), "--module", "txl_dist", "train", *words]
    log = (cwd / "launcher.log").open("a", encoding="utf-8")
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=forked.environment(),
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill_everything(process: subprocess.Popen[str]) -> None:
    """Send SIGKILL to the launcher and to all its descendants."""
    parent = psutil.Process(process.pid)
    victims = [parent, *parent.children(recursive=True)]
    for victim in victims:
        victim.send_signal(signal.SIGKILL)
    psutil.wait_procs(victims, timeout=30)
    process.wait()


def wait_for(condition, *, timeout_s: float = 120, process: subprocess.Popen[str] | None = None) -> None:
    """Wait until `condition()` is true. Raises AssertionError if the process ends before."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert process is None or process.poll() is None, "the process ended early"
        assert time.monotonic() < end_s, "timed out"
        time.sleep(0.002)
