"""Leftover variables of a launcher are reported at once: which ranks are awaited, and how to run alone."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.corpora import tiny_corpus
from txl_dist.cli.main import main
from txl_dist.distributed.rank_environment import format_ranks, read_rank_environment
from txl_dist.errors import ConfigError

ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871"}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1"}, "RANK=1 and WORLD_SIZE=1 contradict"),
        ({"RANK": "2", "WORLD_SIZE": "2", **ADDRESS}, "RANK=2 and WORLD_SIZE=2 contradict"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **ADDRESS}, "contradict"),
        ({"WORLD_SIZE": "0"}, "contradict"),
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR or MASTER_PORT is not set"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_ADDR or MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' must be an integer"),
        ({"RANK": ""}, "RANK='' must be an integer"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' must be an integer"),
    ],
)
def test_variables_that_contradict_each_other_are_refused_with_the_way_out(
    variables: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        read_rank_environment(variables)
    assert "unset WORLD_SIZE RANK" in str(refused.value)


def test_what_is_left_over_of_a_job_of_one_is_a_job_of_one() -> None:
    for variables in ({}, ADDRESS, {"MASTER_ADDR": "elsewhere"}, {"LOCAL_RANK": "3"}, {"RANK": "0", "WORLD_SIZE": "1"}):
        place = read_rank_environment(variables)
        assert (place.rank, place.world_size) == (0, 1)


def test_ranks_are_shown_in_ranges() -> None:
    assert format_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([]) == ""


@pytest.mark.parametrize(
    "words", ["generate nowhere", "export nowhere out", "inspect nowhere", "prepare nowhere --out o"]
)
def test_a_command_without_ranks_speaks_whatever_is_left_over(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **ADDRESS}.items():
        monkeypatch.setenv(name, value)
    assert main(words.split()) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_training_with_a_local_rank_left_over_says_its_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert main(["train", "nowhere.toml"]) == 2
    assert "nowhere.toml" in capsys.readouterr().err


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("command", ["train", "doctor"])
def test_a_process_that_waits_for_ranks_says_so_and_hears_ctrl_c(command: str, rank: int, tmp_path: Path) -> None:
    tiny_corpus(tmp_path)
    (tmp_path / "c.toml").write_text("[data]\npath = 'corpus'\n[train]\nnum_lanes = 8\nmicrobatch_lanes = 1\n")
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = {"train": ["train", "c.toml"], "doctor": ["doctor", "--timeout-s", "100"]}[command]
    process = subprocess.Popen(
        [sys.executable, "-m", "txl_dist", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.getcwd()} | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("txl: waiting at"):
            break
    said = "".join(lines)
    assert f"make this process rank {rank} of 2. The process waits at 127.0.0.1:{port} for rank {1 - rank}." in said
    assert f"txl: waiting at 127.0.0.1:{port} for rank {1 - rank} of 2" in said
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
