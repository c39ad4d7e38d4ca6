"""Training whose ranks do not all come: those that did name the others, and nobody waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.corpora import tiny_corpus
from tests.helpers.launch import _environment, _free_port

pytestmark = pytest.mark.dist


def start(corpus: Path, *, rank: int, port: int, cwd: Path) -> subprocess.Popen[str]:
    """`txl train` on a rank of three, each on a machine of its own."""
    variables = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    environment = _environment() | {name: str(value) for name, value in variables.items()}
    words = ["--data.path", str(corpus), "--run.dir", "run", "--engine.start_timeout_s", "5"]
    return subprocess.Popen(
        [sys.executable, "-m", "txl_dist", "train", *words],
        cwd=cwd,
        env=environment | {"MASTER_ADDR": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_training_names_the_ranks_that_never_came_and_the_hosts_of_those_that_did(tmp_path: Path) -> None:
    corpus, port = tiny_corpus(tmp_path).folder, _free_port()
    processes = [start(corpus, rank=rank, port=port, cwd=tmp_path) for rank in (0, 2)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 2, errors
        (line,) = [line for line in errors.splitlines() if "txl train: error:" in line]
        assert f"rank 1 of 3 did not come in 5 s; here are {os.uname().nodename} (rank 0, 2). " in line
        assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()


def test_training_without_rank_0_says_where_it_was_looked_for(tmp_path: Path) -> None:
    port = _free_port()
    process = start(tiny_corpus(tmp_path).folder, rank=1, port=port, cwd=tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2, errors
    assert f"found no rank 0 at 127.0.0.1:{port} in 5 s" in errors
    assert "Traceback" not in errors
