"""`txl launch` shows all important lines of its processes, and no others. The launcher is a stand-in with the output of
DeepSpeed 0.19. Processes, pipes and terminals are real."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.terminal import Terminal
from txl_dist.launcher.launch import last_word
from txl_dist.launcher.output_filter import LineFilter, pattern_of_chatter

STAMP = "[2026-11-22 13:38:54,148]"
ROW = "['python', '-u', '-m', 'txl_dist', '--local_rank=1', 'train', 'c.toml']"
CHATTER = [
    f"{STAMP} [WARNING] [runner.py:214:fetch_hostfile] Unable to find hostfile, will proceed with training with local "
    "resources only.",
    f"{STAMP} [INFO] [runner.py:618:main] cmd = python -u -m deepspeed.launcher.launch --world_info=eyJsb2Nhb",
    f"{STAMP} [INFO] [launch.py:152:main] WORLD INFO DICT: {{'localhost': [0, 1]}}",
    f"{STAMP} [WARNING] [real_accelerator.py:213:get_accelerator] Setting accelerator to CPU. If you have GPU or other "
    "accelerator, we were unable to detect it.",
    f"node2: {STAMP} [INFO] [launch.py:285:main] Process 8786 exits successfully.",
    f"{STAMP} [ERROR] [launch.py:259:sigkill_handler] {ROW} exits with return code = 75",
    f"node2: {STAMP} [ERROR] [launch.py:259:sigkill_handler] {ROW} exits with return code = 2",
    "pdsh@node1: node2: ssh exited with exit code 75",
    "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
    "[rank0]:[W1122 13:39:15.123456789 socket.cpp:767] [c10d] The client socket cannot be initialized to connect to "
    "[localhost]:29500 (errno: 97 - Address family not supported by protocol).",
    "[W1122 13:39:15.123456789 socket.cpp:209] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
]
WHAT_MATTERS = [
    "Traceback (most recent call last):",
    '  File "txl_dist/train/loop.py", line 12, in run',
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "Fatal Python error: Segmentation fault",
    "terminate called after throwing an instance of 'c10::Error'",
    "free(): invalid pointer",
    f"{STAMP} [ERROR] [launch.py:259:sigkill_handler] {ROW} exits with return code = -9",
    f"{STAMP} [ERROR] [launch.py:259:sigkill_handler] {ROW} exits with return code = 1",
    f"{STAMP} [WARNING] [engine.py:12:step] Grad overflow",
    "pdsh@node1: node2: ssh exited with exit code 255",
    "node2: ssh: connect to host node2 port 22: Connection refused",
    "node2: Host key verification failed.",
    "Killed",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0",
    "[rank1]:[E1122 13:39:15.1 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout",
    "[W1122 13:39:15.1 socket.cpp:767] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 111 - "
    "Connection refused).",
    "13:38:46 I step 20/60  train  loss 5.9686",
    f"13:38:46 I a text about {STAMP} [INFO] [launch.py:1:main] logs",
    "",
]
TALKER = f"""#!{sys.executable}
import json, os, signal, sys
from pathlib import Path
lines = json.loads(Path("lines.json").read_text())
for line in lines["out"]:
    print(line, flush=True)
for line in lines["err"]:
    print(line, file=sys.stderr, flush=True)
print("a terminal of", os.get_terminal_size(2).columns if os.isatty(2) else 0, "columns", file=sys.stderr)
sys.stderr.write("no end of line")
sys.stderr.flush()
code = int(os.environ["MODE"])
if code == 0:
    Path("run/DONE").write_text("7")
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
WRAPPER = """
import sys
from pathlib import Path
from txl_dist.launcher.launch import launch_ranks
sys.exit(launch_ranks(sys.argv[2:], ["c.toml"], run_dir=Path("run"), verbose=sys.argv[1] == "True"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "bin/deepspeed").write_text(TALKER)
    (tmp_path / "bin/deepspeed").chmod(0o755)
    mixed = CHATTER + WHAT_MATTERS
    random.Random(1).shuffle(mixed)
    (tmp_path / "lines.json").write_text(json.dumps({"out": mixed, "err": mixed}))
    (tmp_path / "mixed").write_text("\n".join(mixed))
    return tmp_path


def launch(
    folder: Path, *flags: str, code: int, verbose: bool = False, stderr: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "MODE": str(code)}
    command = [sys.executable, "-c", WRAPPER, str(verbose), *flags]
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60, check=False
    )


def without_chatter(folder: Path) -> list[str]:
    return [line for line in (folder / "mixed").read_text().split("\n") if line not in CHATTER]


@pytest.mark.parametrize("line", CHATTER)
def test_a_line_of_chatter_is_known_in_any_pieces(line: str) -> None:
    for size in (1, 7, 10_000):
        strainer = LineFilter(pattern_of_chatter(wants_hostfile=False))
        text = f"before\n{line}\nbehind\n".encode()
        pieces = [strainer.feed(text[first : first + size]) for first in range(0, len(text), size)]
        assert b"".join(pieces) + strainer.flush() == b"before\nbehind\n"


@pytest.mark.parametrize("line", WHAT_MATTERS)
def test_what_matters_passes_byte_for_byte(line: str) -> None:
    strainer = LineFilter(pattern_of_chatter(wants_hostfile=False))
    assert strainer.feed(f"{line}\n".encode()) == f"{line}\n".encode()
    assert strainer.feed(line.encode()) + strainer.flush() == line.encode()


def test_a_line_whose_beginning_was_shown_is_shown_to_its_end() -> None:
    strainer = LineFilter(pattern_of_chatter(wants_hostfile=False))
    begin, end = CHATTER[1][:30].encode(), CHATTER[1][30:].encode()
    assert strainer.feed(begin) + strainer.flush() + strainer.feed(end + b"\n") == begin + end + b"\n"
    assert strainer.feed(CHATTER[1].encode() + b"\n") == b""
    bar = b"\rtraining 10%"
    assert strainer.feed(bar) + strainer.flush() == bar, "a progress bar has no ends of lines"


def test_a_hostfile_that_somebody_named_and_that_is_missing_is_no_chatter(folder: Path) -> None:
    line = CHATTER[0]
    assert LineFilter(pattern_of_chatter(wants_hostfile=True)).feed(f"{line}\n".encode()).decode() == f"{line}\n"
    assert line in launch(folder, "--hostfile=hosts", code=0).stdout
    assert line not in launch(folder, code=0).stdout


def test_only_chatter_is_missing_in_what_a_launch_prints_and_the_last_word_is_ours(folder: Path) -> None:
    process = launch(folder, code=75)
    assert process.returncode == 75
    expected = without_chatter(folder)
    assert process.stdout.split("\n")[:-1] == expected
    assert process.stderr.split("\n")[: len(expected)] == expected
    assert process.stderr.endswith(
        "a terminal of 0 columns\nno end of line\ntxl launch: stopped. The same command continues (exit code 75)\n"
    )
    assert "return code = 75" not in process.stdout + process.stderr


def test_verbose_shows_everything(folder: Path) -> None:
    process = launch(folder, code=75, verbose=True)
    assert process.stdout.rstrip("\n") == (folder / "mixed").read_text().rstrip("\n")
    assert process.stderr.startswith((folder / "mixed").read_text())


def test_a_run_that_is_done_has_nothing_added(folder: Path) -> None:
    process = launch(folder, code=0)
    assert process.returncode == 0
    assert process.stderr.endswith("a terminal of 0 columns\nno end of line\n")


def test_a_death_by_signal_is_told_with_its_name(folder: Path) -> None:
    process = launch(folder, code=-9)
    assert process.returncode == 76
    assert process.stderr.endswith("see `dmesg`. The same command continues from the last checkpoint (exit code 76)\n")


def test_the_ranks_write_to_a_terminal_as_wide_as_ours(folder: Path) -> None:
    with Terminal(columns=93) as terminal:
        process = launch(folder, code=75, stderr=terminal.device)
        shown = terminal.read().replace("\r\n", "\n")
    assert process.returncode == 75
    assert "a terminal of 93 columns\n" in shown
    assert shown.split("\n")[: len(without_chatter(folder))] == without_chatter(folder)


def test_a_terminal_that_is_made_wider_is_wider_for_the_ranks(folder: Path) -> None:
    (folder / "bin/deepspeed").write_text(
        f"#!{sys.executable}\nimport os, sys, time\nopen('up', 'w').close()\n"
        "while os.get_terminal_size(2).columns != 101: time.sleep(0.01)\n"
        "open('run/DONE', 'w').write('7')\n"
    )
    script = (
        "import os, signal, subprocess, sys, threading, time\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from txl_dist.launcher.launch import launch_ranks\n"
        "import termios\n"
        "def resize():\n"
        "    while not Path('up').exists(): time.sleep(0.01)\n"
        "    termios.tcsetwinsize(2, (24, 101))\n"
        "    os.kill(os.getpid(), signal.SIGWINCH)  # as the system tells the foreground of a terminal\n"
        "threading.Thread(target=resize, daemon=True).start()\n"
        "sys.exit(launch_ranks([], ['c.toml'], run_dir=Path('run')))\n"
    )
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    with Terminal(columns=80) as terminal:
        command = [sys.executable, "-c", script, str(Path(__file__).parents[3])]
        ended = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stderr=terminal.device,
            stdout=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("code", "launcher_code", "expected"),
    [
        (0, 0, ""),
        (2, 2, ""),
        (75, 1, "stopped. The same command continues"),
        (76, 76, "a rank hung or was lost. The same"),
        (76, 0, "the launcher ended before the run was done. The same"),
        (76, 139, "a rank died of SIGSEGV. The same"),
        (76, 247, "a rank died of SIGKILL. Host memory may have run out, see `dmesg`. The same"),
        (76, 255, "a node could not be reached any more, or a rank died of SIGHUP. The same"),
        (1, 1, "training failed. The reason is above"),
    ],
)
def test_the_last_word_says_what_became_of_the_run(code: int, launcher_code: int, expected: str) -> None:
    word = last_word(code, launcher_code=launcher_code, run_dir=Path("runs/a"))
    assert word.startswith(expected)
    assert bool(word) == bool(expected)


@pytest.mark.parametrize(
    ("launcher_code", "expected"),
    [
        (247, "the agent of a rank died of SIGKILL, so the launcher ended the job. Host memory may have run out"),
        (137, "a rank or its agent died of SIGKILL. Host memory may have run out"),
        (245, "the agent of a rank died of SIGSEGV, so the launcher ended the job. The same"),
        (76, "a rank or its agent hung or was lost, and was not replaced. The same"),
        (255, "a node could not be reached any more, or an agent died of SIGHUP. The same"),
    ],
)
def test_with_recovery_the_last_word_blames_no_rank_for_the_end_of_its_agent(launcher_code: int, expected: str) -> None:
    word = last_word(76, launcher_code=launcher_code, run_dir=Path("runs/a"), has_agents=True)
    assert word.startswith(expected)
    assert word.endswith("The same command continues from the last checkpoint")
