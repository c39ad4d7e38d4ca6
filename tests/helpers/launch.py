"""The command line as a person starts it: `txl VERB` and the `deepspeed` launcher, in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}


def txl(*words: str, cwd: Path, timeout_s: int = 120) -> subprocess.CompletedProcess[str]:
    """Run `python -m txl_dist words` to its end."""
    command = [sys.executable, "-m", "txl_dist", *words]
    return subprocess.run(
        command, cwd=cwd, env=_environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )


def start_training(*words: str, cwd: Path, ranks: int = 2) -> subprocess.Popen[str]:
    """Start `deepspeed --num_accelerators ranks --module txl_dist train words` in a session of its own."""
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", str(ranks)]
    command += ["--master_port", str(_free_port()), "--module", "txl_dist", "train", *words]
    log = (cwd / "launcher.log").open("a", encoding="utf-8")
    return subprocess.Popen(
        command, cwd=cwd, env=_environment(), stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def train(*words: str, cwd: Path, ranks: int = 2, timeout_s: int = 300) -> None:
    """Train to the end; the run must leave DONE."""
    process = start_training(*words, cwd=cwd, ranks=ranks)
    code = process.wait(timeout=timeout_s)
    assert code == 0, (cwd / "launcher.log").read_text(encoding="utf-8")[-4000:]


def kill_everything(process: subprocess.Popen[str]) -> None:
    """kill -9 of the launcher and all it started, at once."""
    parent = psutil.Process(process.pid)
    victims = [parent, *parent.children(recursive=True)]
    for victim in victims:
        victim.send_signal(signal.SIGKILL)
    psutil.wait_procs(victims, timeout=30)
    process.wait()


def wait_for(condition, *, timeout_s: float = 120, process: subprocess.Popen[str] | None = None) -> None:
    """Poll until `condition()`; fail if the process ends first."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert process is None or process.poll() is None, "the process ended early"
        assert time.monotonic() < end_s, "timed out"
        time.sleep(0.002)


def _environment() -> dict[str, str]:
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items() if key not in ranks} | ENVIRONMENT


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
