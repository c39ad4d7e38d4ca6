"""Training in which some ranks do not start: the started ranks name the missing ones and stop waiting."""

from __future__ import annotations

import os
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from tests.helpers import forked
from tests.helpers.corpora import tiny_corpus
from txl_dist.distributed.rendezvous import free_port

pytestmark = pytest.mark.dist


def start(corpus: Path, *, rank: int, port: int, cwd: Path) -> ForkServerProcess:
    """`txl train` on a rank of three, each on a machine of its own; `err-RANK` has what it says."""
    place = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    variables = forked.environment(**place, MASTER_ADDR="127.0.0.1")
    words = ["--data.path", str(corpus), "--run.dir", "run", "--engine.start_timeout_s", "3"]
    return forked.start(forked.run_txl, "train", *words, variables=variables, cwd=cwd, err=cwd / f"err-{rank}")


def test_training_names_the_ranks_that_never_came_and_the_hosts_of_those_that_did(tmp_path: Path) -> None:
    corpus, port = tiny_corpus(tmp_path).folder, free_port()
    processes = {rank: start(corpus, rank=rank, port=port, cwd=tmp_path) for rank in (0, 2)}
    for rank, process in processes.items():
        process.join(120)
        errors = (tmp_path / f"err-{rank}").read_text(encoding="utf-8")
        assert process.exitcode == 2, errors
        (line,) = [line for line in errors.splitlines() if "txl train: error:" in line]
        assert f"rank 1 of 3 did not arrive within 3 s. Only {os.uname().nodename} (ranks 0, 2) arrived. " in line
        assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()


def test_training_without_rank_0_says_where_it_was_looked_for(tmp_path: Path) -> None:
    port = free_port()
    process = start(tiny_corpus(tmp_path).folder, rank=1, port=port, cwd=tmp_path)
    process.join(120)
    errors = (tmp_path / "err-1").read_text(encoding="utf-8")
    assert process.exitcode == 2, errors
    assert f"found no rank 0 at 127.0.0.1:{port} in 3 s" in errors
    assert "Traceback" not in errors
