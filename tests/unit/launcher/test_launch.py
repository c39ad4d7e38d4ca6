"""`txl launch` reports correctly about the training that it starts, and leaves no processes.

The launcher is a stand-in that behaves like the real one: `deepspeed` starts a node launcher, which starts ranks.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from txl_dist.cli.launch import NUMBERS, SWITCHES, TEXTS, TRAIN_FLAGS, run_launch
from txl_dist.cli.main import TrainArguments, main
from txl_dist.config.load import Config
from txl_dist.config.schema import TrainSection
from txl_dist.distributed.processes import process_id
from txl_dist.errors import HANG, REQUEUE, ConfigError
from txl_dist.launcher.launch import _was_stopped, exit_code, last_word, launch_ranks

DEEPSPEED = f"""#!{sys.executable}
import subprocess, sys
words = [sys.executable, __file__.replace("deepspeed", "node.py"), "deepspeed.launcher.launch", *sys.argv[1:]]
code = subprocess.call(words)
sys.exit(code if code > 0 else 0)  # as the real one: a node launcher that was killed looks like success
"""
NODE = """
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, __file__.replace("node.py", "rank.py"), str(rank)]) for rank in (0, 1)]
sys.exit(max(rank.wait() % 256 for rank in ranks))
"""
RANK = """
import os, signal, sys, time
from pathlib import Path
rank, folder = int(sys.argv[1]), Path.cwd()
told = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, _: told.append(signal.Signals(number).name))
(folder / f"pid-{rank}.tmp").write_text(str(os.getpid()))
(folder / f"pid-{rank}.tmp").rename(folder / f"pid-{rank}")
parent, mode = os.getppid(), os.environ.get("MODE", "wait")
if mode == "done" and rank == 0:
    (folder / "run/DONE").write_text("7")
if mode.isdigit():
    sys.exit(int(mode))
end_s = time.monotonic() + 30
while mode != "done" and not told and os.getppid() == parent and time.monotonic() < end_s:
    time.sleep(0.01)
time.sleep(0.3)  # a second signal would show
(folder / f"told-{rank}").write_text(" ".join(told))
sys.exit(0 if mode == "done" else 75)
"""
WRAPPER = """
import sys
from pathlib import Path
from txl_dist.launcher.launch import launch_ranks
print(launch_ranks([], ["c.toml"], run_dir=Path("run"), grace_s=float(sys.argv[1])))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    for name, text in (("deepspeed", DEEPSPEED), ("node.py", NODE), ("rank.py", RANK)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "run").mkdir()
    return tmp_path


def start(folder: Path, *, mode: str = "wait", grace_s: float = 20) -> subprocess.Popen[str]:
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "MODE": mode}
    command = [sys.executable, "-c", WRAPPER, str(grace_s)]
    with (folder / "errors.txt").open("w") as errors:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)


def result(process: subprocess.Popen[str]) -> int:
    output, _ = process.communicate(timeout=60)
    return int(output)


def pids(folder: Path) -> list[int]:
    files = [folder / "pid-0", folder / "pid-1"]
    wait_for(lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


def wait_for(condition) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_success_is_what_this_start_wrote(folder: Path) -> None:
    assert result(start(folder, mode="done")) == 0
    assert (folder / "run/DONE").exists()
    assert result(start(folder, mode="0")) == HANG, "that DONE is of the start before"
    assert result(start(folder, mode="2")) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_once(folder: Path, number: signal.Signals) -> None:
    process = start(folder)
    pids(folder)
    process.send_signal(number)
    said = f"txl launch: {number.name}: the run saves after the current step, then exits"
    wait_for(lambda: said in (folder / "errors.txt").read_text())
    assert result(process) == REQUEUE
    assert [(folder / f"told-{rank}").read_text() for rank in (0, 1)] == [number.name, number.name]
    assert not (folder / "run/STOP").exists()


def test_where_no_ranks_are_the_stop_file_is_made_and_taken_away(folder: Path) -> None:
    (folder / "bin/node.py").write_text(
        'import os, sys, time\nopen("up", "w").close()\n'
        'while not os.path.exists("run/STOP"): time.sleep(0.01)\nsys.exit(75)\n'
    )
    process = start(folder)
    wait_for((folder / "up").exists)
    process.terminate()
    said = "txl launch: SIGTERM: run/STOP asks the ranks to save and exit"
    wait_for(lambda: said in (folder / "errors.txt").read_text())
    assert result(process) == REQUEUE
    assert not (folder / "run/STOP").exists()


def stand_in(folder: Path, text: str, name: str = "deepspeed") -> None:
    (folder / "bin" / name).write_text(f"#!{sys.executable}\n{text}")
    (folder / "bin" / name).chmod(0o755)


def test_the_ssh_to_a_node_is_no_rank_and_gets_no_signal(folder: Path) -> None:
    """The words of pdsh hold those of the node launcher."""
    node = '"python", "-u", "-m", "deepspeed.launcher.launch"'
    stand_in(folder, f'import subprocess, sys\nsys.exit(subprocess.call(["pdsh", "-S", "-w", "a,b", {node}]))')
    stand_in(folder, 'import subprocess, sys\nsys.exit(subprocess.call(["ssh"]))', "pdsh")
    stand_in(
        folder,
        'import os, sys, time\nopen("up", "w").close()\n'
        'while not os.path.exists("run/STOP"): time.sleep(0.01)\ntime.sleep(0.3)\nopen("obeyed", "w")\nsys.exit(75)\n',
        "ssh",
    )
    process = start(folder)
    wait_for((folder / "up").exists)
    process.terminate()
    assert result(process) == REQUEUE
    assert (folder / "obeyed").exists()


def test_a_stop_before_there_is_a_run_loses_nothing(folder: Path) -> None:
    """The launcher of several nodes ends with 1 then."""
    (folder / "run").rmdir()
    stand_in(
        folder,
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda number, _: sys.exit(1))\n"
        'open("up", "w").close()\ntime.sleep(30)\n',
    )
    process = start(folder)
    wait_for((folder / "up").exists)
    process.terminate()
    assert result(process) == REQUEUE


def test_what_another_node_wrote_may_show_late(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    late = '["sh", "-c", "sleep 0.3; echo 7 > run/DONE"]'
    stand_in(folder, f"import subprocess\nsubprocess.Popen({late}, start_new_session=True)")
    assert launch_ranks([], ["c.toml"], run_dir=Path("run"), seen_within_s=20) == 0
    stand_in(folder, "")
    assert launch_ranks([], ["c.toml"], run_dir=Path("run"), seen_within_s=0.1) == HANG


def test_the_ssh_of_the_launcher_notices_a_node_that_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-o ServerAliveInterval=60")
    stand_in(folder, 'import os\nopen("seen", "w").write(os.environ["PDSH_SSH_ARGS_APPEND"])')
    launch_ranks([], ["c.toml"], run_dir=Path("run"))
    mine, ours, _ = (folder / "seen").read_text().split("-o ")[1:]
    assert (mine, ours) == ("ServerAliveInterval=60 ", "ServerAliveInterval=5 "), "ssh takes the first value"


def test_a_killed_node_launcher_is_no_success_and_its_ranks_may_save(folder: Path) -> None:
    process = start(folder)
    ranks = [process_id(pid) for pid in pids(folder)]
    os.kill(int(Path(f"/proc/{ranks[0].pid}/stat").read_text().split()[3]), signal.SIGKILL)
    assert result(process) == HANG
    assert (folder / "told-0").exists()
    assert not any(rank.lives() for rank in ranks)


def test_what_does_not_leave_by_itself_is_killed(folder: Path) -> None:
    process = start(folder, grace_s=0.5)
    ranks = [process_id(pid) for pid in pids(folder)]
    os.kill(ranks[1].pid, signal.SIGSTOP)
    os.kill(int(Path(f"/proc/{ranks[0].pid}/stat").read_text().split()[3]), signal.SIGKILL)
    assert result(process) == HANG
    wait_for(lambda: not any(rank.lives() for rank in ranks))


@pytest.mark.parametrize("is_early", [False, True])
def test_when_the_wrapper_is_killed_the_launcher_ends_and_the_ranks_notice(folder: Path, is_early: bool) -> None:
    (folder / "bin/rank.py").write_text(
        RANK.replace("os.getppid() == parent", "requests.reason == ''").replace(
            "import os",
            "from txl_dist.train.monitoring.preemption import PreemptionRequests\n"
            "requests = PreemptionRequests()\nimport os",
        )
    )
    if is_early:  # the launcher is gone when the ranks begin to look; only what they were told can help
        text = (folder / "bin/node.py").read_text()
        waits = (
            "import os, time\npid = os.getppid()\nopen('up', 'w').close()\nwhile os.getppid() == pid: time.sleep(0.01)"
        )
        (folder / "bin/node.py").write_text(waits + text)
    process = start(folder)
    if is_early:
        wait_for((folder / "up").exists)
        process.kill()
    ranks = [process_id(pid) for pid in pids(folder)]
    process.kill()
    process.wait()
    wait_for(lambda: not any(rank.lives() for rank in ranks))
    assert (folder / "told-0").read_text() == "", "no signal was needed"


@pytest.mark.parametrize(
    ("code", "sent", "expected"),
    [
        (0, set(), HANG),
        (75, set(), REQUEUE),
        (76, set(), HANG),
        (1, set(), 1),
        (2, {15}, 2),
        (247, set(), HANG),  # sys.exit(-9)
        (137, set(), HANG),  # the shell's way
        (-9, set(), HANG),
        (241, {15}, REQUEUE),
        (-15, {15}, REQUEUE),
        (-15, set(), HANG),
    ],
)
def test_exit_codes(code: int, sent: set[int], expected: int) -> None:
    assert exit_code(code, is_done=False, sent=sent) == expected
    assert exit_code(code, is_done=True, sent=sent) == 0


@pytest.mark.parametrize(
    ("lines", "was_stopped"),
    [
        (['{"kind": "event", "event": "stopped"}'], True),
        (['{"kind": "event", "event": "stopped"}', '{"kind": "train", "step": 3}', '{"kind": "ev'], True),
        (['{"kind": "event", "event": "stopped"}', '{"kind": "event", "event": "start"}'], False),
        ([], False),
    ],
)
def test_a_run_that_was_stopped_is_known_by_the_last_event_of_this_start(
    lines: list[str], was_stopped: bool, tmp_path: Path
) -> None:
    records, before = tmp_path / "metrics.jsonl", '{"kind": "event", "event": "stopped"}\n'
    assert not _was_stopped(records, since=0)
    records.write_text(before + "\n".join(lines), encoding="utf-8")
    assert _was_stopped(records, since=len(before)) is was_stopped


def test_words_before_the_configuration_are_the_launchers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = {}
    monkeypatch.setattr(
        "txl_dist.launcher.launch.launch_ranks", lambda flags, words, **rest: seen.update(locals()) or 75
    )
    monkeypatch.setattr("txl_dist.distributed.collectives.uses_gpu", lambda: False)
    monkeypatch.setenv("DS_ACCELERATOR", "")
    words = ["--num_accelerators", "2", "c.toml", "--train.max_steps", "7"]
    assert run_launch(words, read_settings=lambda *_: Config()) == 75
    assert seen["flags"][:-1] == ["--num_accelerators", "2", "--master_port"]
    assert seen["words"] == ["c.toml", "--train.max_steps", "7"]
    assert seen["rest"] == {"run_dir": Path(Config().run.dir), "verbose": False, "has_agents": False}
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    run_launch(["c.toml"], read_settings=lambda *_: Config())
    assert seen["flags"][:-1] == ["--num_accelerators", "1", "--master_port"]
    with pytest.raises(ConfigError, match=r"no argument ends in \.toml"):
        run_launch(["--num_gpus", "2"], read_settings=lambda *_: Config())
    assert run_launch(["--help"], read_settings=lambda *_: Config()) == 0


def test_the_launcher_of_agents_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        "txl_dist.launcher.launch.launch_ranks", lambda flags, words, **rest: seen.append(rest["has_agents"]) or 0
    )
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for spares in (0, 1):
        settings = Config.model_validate({"recover": {"spares": spares}})
        run_launch(["c.toml"], read_settings=lambda *_, settings=settings: settings)
    assert seen == [False, True]


def test_the_last_line_names_the_agent_that_was_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed's node launcher exits with 256 - 9 when one of its child processes was killed."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    stand_in(folder, "import sys\nsys.exit(-9)")
    assert launch_ranks([], ["c.toml"], run_dir=Path("run"), has_agents=True) == HANG
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("txl launch: the agent of a rank died of SIGKILL, so the launcher ended the job")
    assert last.endswith("The same command continues from the last checkpoint (exit code 76)")


def flags_of(monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[str]:
    """The launcher's own flags, as they come to it."""
    seen: list[list[str]] = []
    monkeypatch.setattr("txl_dist.launcher.launch.launch_ranks", lambda flags, words, **rest: seen.append(flags) or 0)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    run_launch([*flags, "c.toml"], read_settings=lambda *_: Config())
    return seen[0]


def test_the_ranks_of_one_machine_meet_at_a_port_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    *flags, name, port = flags_of(monkeypatch, "--num_accelerators", "2")
    assert (flags, name) == (["--num_accelerators", "2"], "--master_port")
    with socket.socket() as taken:
        taken.bind(("", int(port)))
        assert flags_of(monkeypatch)[-1] != port


@pytest.mark.parametrize(
    "flags",
    [
        ("--master_port", "7"),
        ("--master_port=7",),
        ("-H", "hosts"),
        ("-Hhosts",),
        ("--hostfile", "hosts"),
        ("--hostfile=hosts",),
    ],
)
def test_a_port_that_is_named_or_that_other_machines_must_know_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    monkeypatch.chdir(tmp_path)
    assert flags_of(monkeypatch, *flags) == list(flags)


def test_the_hostfile_that_the_launcher_reads_unasked_counts_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    monkeypatch.setattr("txl_dist.cli.launch.DEFAULT_HOSTFILE", str(tmp_path / "hosts"))
    assert flags_of(monkeypatch, "--num_gpus", "1") == ["--num_gpus", "1"]


def test_the_launcher_has_the_flags_that_are_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own parser, of the installed DeepSpeed, is asked."""
    from deepspeed.launcher import runner

    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda parser, args=None: parsers.append(parser))
    runner.parse_args([])
    own = {name: action.nargs == 0 for action in parsers[0]._actions for name in action.option_strings}
    ours = {name: False for names in (*NUMBERS, *TEXTS) for name in names.split()}
    ours |= {name: True for names in SWITCHES for name in names.split()}
    assert ours == own


def test_the_flags_that_belong_behind_the_configuration_are_those_of_train() -> None:
    flags = {field.name for field in fields(TrainArguments)} - {"config", "settings"}
    assert set(TRAIN_FLAGS) == flags


@pytest.mark.parametrize(("ranks", "is_warned"), [("2", False), ("100", True)])
def test_far_more_ranks_than_cores_get_a_word_and_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ranks: str, is_warned: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("txl_dist.launcher.launch.launch_ranks", lambda *words, **rest: 0)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    settings = Config(train=TrainSection(num_lanes=int(ranks), microbatch_lanes=1))
    assert run_launch(["--num_accelerators", ranks, "c.toml"], read_settings=lambda *_: settings) == 0
    assert ("100 ranks share 2 CPU cores" in capsys.readouterr().err) == is_warned


def test_where_other_machines_run_the_ranks_the_corpora_are_not_looked_for_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    (tmp_path / "c.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("txl_dist.launcher.launch.launch_ranks", lambda *words, **rest: 7)
    assert main(["launch", "--hostfile", "hosts", "c.toml", "--data.path", "nothing/here"]) == 7
    assert main(["launch", "c.toml", "--data.path", "nothing/here"]) == 2


def test_a_log_is_named_only_where_there_is_one(tmp_path: Path) -> None:
    assert last_word(1, launcher_code=1, run_dir=tmp_path) == "training failed. The reason is above"
    (tmp_path / "log.txt").touch()
    assert last_word(1, launcher_code=1, run_dir=tmp_path).endswith(
        f", and the log of the run is {tmp_path / 'log.txt'}"
    )
