"""The behaviour of the quickstart script: what it keeps, and how it starts and ends the training. `txl` is a
stand-in."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = f"""#!/usr/bin/env bash
case "$*" in
    *device_count*) echo "$NUM_GPUS" ;;
    *torch.__version__* | *"-m pip "*) ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
TXL = f"""#!{sys.executable}
import os, signal, sys, time
from pathlib import Path
with open("calls", "a") as calls:
    print(os.environ.get("CUDA_VISIBLE_DEVICES", "-"), *sys.argv[1:], file=calls)
if sys.argv[1] not in ("train", "launch"):
    sys.exit(3 if sys.argv[1] == "evaluate" else 0)  # behind the training nothing is of interest here
mode = os.environ["MODE"]
if mode == "wait":
    told = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    Path("up").touch()
    end_s = time.monotonic() + 30
    while not told and time.monotonic() < end_s:
        time.sleep(0.01)
    time.sleep(0.3)  # saves
    Path("saved").touch()
    sys.exit(75 if told else 1)
if mode == "slow start":
    Path("up").touch()
    time.sleep(30)
if mode == "0":
    Path("runs/modern_quickstart").mkdir(parents=True)
    Path("runs/modern_quickstart/DONE").write_text("7")
    Path("runs/modern_quickstart/metrics.jsonl").write_text('{{"event": "start", "step": 0}}')
sys.exit(int(mode))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, text in (("python", PYTHON), ("txl", TXL)):
        (tmp_path / ".venv" / "bin" / name).write_text(text)
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    return tmp_path


def start(folder: Path, *, mode: str, num_gpus: int = 0, devices: str | None = None) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("VENV", "CUDA_VISIBLE_DEVICES")}
    environment |= {"MODE": mode, "NUM_GPUS": str(num_gpus), "PYTHON": sys.executable}
    environment |= {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    command = ["bash", str(folder / "launch/quickstart.sh"), "--train.max_steps", "7"]
    # Whoever runs the tests in the background may have SIGINT ignored, which a shell cannot undo.
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run(folder: Path, *, mode: str, num_gpus: int = 0, devices: str | None = None) -> tuple[int, str, list[str]]:
    """(exit code, what it said, the calls of txl)."""
    process = start(folder, mode=mode, num_gpus=num_gpus, devices=devices)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_script_stops_the_training_which_saves(folder: Path, number: signal.Signals) -> None:
    process = start(folder, mode="wait")
    wait_for(folder / "up", process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert (folder / "saved").exists(), "the script waited for it"
    assert output.endswith("asked to stop; the same command continues\n")


def test_a_signal_before_the_training_listens_loses_nothing(folder: Path) -> None:
    process = start(folder, mode="slow start")
    wait_for(folder / "up", process)
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 75


@pytest.mark.parametrize("code", [1, 2, 76])
def test_a_training_that_fails_ends_in_a_line_that_says_where_to_look(folder: Path, code: int) -> None:
    returned, output, calls = run(folder, mode=str(code))
    assert returned == code
    assert output.endswith("training did not finish; see the messages above and runs/modern_quickstart/log.txt\n")
    assert "launch" in calls[-1]


def test_a_corpus_that_is_there_is_not_prepared_again(folder: Path) -> None:
    _, _, calls = run(folder, mode="1")
    assert calls[0].startswith("- prepare stdlib")
    (folder / "calls").unlink()
    (folder / "data/stdlib").mkdir(parents=True)
    (folder / "data/stdlib/index.json").touch()
    _, output, calls = run(folder, mode="1")
    assert "it is there already; remove data/stdlib" in output
    assert [call.split()[1] for call in calls] == ["launch"]


@pytest.mark.parametrize(
    ("num_gpus", "devices", "call"),
    [
        (0, None, "- launch --num_accelerators 2"),
        (1, None, "- train"),
        (1, "MIG-1234", "MIG-1234 train"),
        (1, "3", "3 train"),
        (4, "3,1,2", "3,1 launch"),
        (8, None, "- launch --num_gpus 2"),
    ],
)
def test_the_training_gets_two_ranks_where_it_can(folder: Path, num_gpus: int, devices: str | None, call: str) -> None:
    _, _, calls = run(folder, mode="0", num_gpus=num_gpus, devices=devices)
    assert calls[1] == f"{call} configs/modern_quickstart.toml --train.max_steps 7"
    assert "evaluate" in calls[2], "behind a training that is done it goes on"


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, "the script ended early"
        assert time.monotonic() < end_s
        time.sleep(0.01)
