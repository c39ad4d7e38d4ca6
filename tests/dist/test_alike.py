"""Ranks that were started with other code, settings or corpora are refused by name."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import forked
from tests.helpers.corpora import tiny_corpus
from tests.helpers.supervised import run_supervised
from txl_dist.distributed.rendezvous import free_port
from txl_dist.errors import HANG
from txl_dist.train import start

pytestmark = pytest.mark.dist

SMALL = """
[model]
num_layers = 1
width = 16
num_heads = 2
head_width = 8
ff_width = 16
[train]
num_lanes = 2
microbatch_lanes = 1
segment_len = 8
memory_len = 8
max_steps = 2
[eval]
every_steps = 0
"""


def run_nodes(
    folder: Path, *words_of_ranks: tuple[str, ...], program: Callable[..., None] = forked.run_txl
) -> tuple[list[int | None], list[str]]:
    """`txl train` on ranks that are each on a node of their own, with words of their own. Returns (codes, errors)."""
    port, processes = free_port(), []
    (folder / "small.toml").write_text(SMALL, encoding="utf-8")
    for rank, words in enumerate(words_of_ranks):
        place = forked.place_on_node(rank, len(words_of_ranks), port, num_nodes=len(words_of_ranks))
        called = run_supervised if "--recover.spares" in words else program
        command = ("train", "small.toml", "--run.dir", "run", *words)
        err = folder / f"err-{rank}"
        processes.append(forked.start(called, *command, variables=forked.environment(**place), cwd=folder, err=err))
    codes = []
    for process in processes:
        process.join(60)
        codes.append(process.exitcode)
        process.kill()
    return codes, [(folder / f"err-{rank}").read_text(encoding="utf-8") for rank in range(len(words_of_ranks))]


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (("--optim.lr", "0.001"), ("--optim.lr", "0.002"), "optim.lr is 0.001 on rank 0, but 0.002 on rank 1"),
        (("--recover.spares", "1"), (), "recover.spares is 1 on rank 0, but 0 on rank 1"),
        ((), ("--recover.spares", "1"), "recover.spares is 0 on rank 0, but 1 on rank 1"),
    ],
    ids=["another learning rate", "only the first node with spares", "only the second node with spares"],
)
def test_nodes_with_different_settings_are_refused_on_all_ranks(
    tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...], difference: str
) -> None:
    corpus = ("--data.path", str(tiny_corpus(tmp_path).folder))
    codes, errors = run_nodes(tmp_path, (*corpus, *first), (*corpus, *second))
    assert codes == [2, 2], errors
    said = "".join(errors)
    assert f"settings differ between ranks: {difference}. Rank 0 has other settings than rank 1. Start all" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_nodes_with_different_corpora_are_refused_on_all_ranks(tmp_path: Path) -> None:
    corpora = [
        tiny_corpus(tmp_path, name="a").folder,
        tiny_corpus(tmp_path, name="b", texts=[f"another text {number}. " * 5 for number in range(60)]).folder,
    ]
    codes, errors = run_nodes(tmp_path, *(("--data.path", str(corpus)) for corpus in corpora))
    assert codes == [2, 2], errors
    said = "".join(errors)
    assert f"rank 0 reads the split train of {corpora[0]} (fingerprint " in said
    assert f"but rank 1 reads the split train of {corpora[1]} (fingerprint " in said
    assert not (tmp_path / "run").exists()


def test_nodes_with_different_code_are_refused_on_all_ranks(tmp_path: Path) -> None:
    corpus = ("--data.path", str(tiny_corpus(tmp_path).folder))
    codes, errors = run_nodes(tmp_path, corpus, corpus, program=run_with_other_code_on_one_rank)
    assert codes == [2, 2], errors
    assert "but rank 1 runs txl_dist 0.0.1. Install the same versions on every node" in "".join(errors)
    assert not (tmp_path / "run").exists()


def run_with_other_code_on_one_rank(*words: str) -> None:
    """`txl WORDS` in which rank 1 has another version of the package."""
    if os.environ["RANK"] == "1":
        start.code_version = lambda: "txl_dist 0.0.1"  # type: ignore[assignment]
    forked.run_txl(*words)


def test_a_rank_that_dies_before_all_ranks_are_connected_ends_the_others_with_the_code_of_a_lost_rank(
    tmp_path: Path,
) -> None:
    corpus = ("--data.path", str(tiny_corpus(tmp_path).folder))
    codes, errors = run_nodes(tmp_path, corpus, corpus, program=run_with_a_death_at_the_check)
    assert codes == [HANG, -signal.SIGKILL]
    assert "another rank was lost or did not answer before all ranks had connected" in errors[0]
    assert "Traceback" not in errors[0]
    assert not (tmp_path / "run").exists()


def run_with_a_death_at_the_check(*words: str) -> None:
    """`txl WORDS` in which rank 1 dies when it reaches the comparison of settings."""
    if os.environ["RANK"] == "1":
        start.check_ranks_alike = lambda config, *, code: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    forked.run_txl(*words)


def test_nodes_may_have_paths_and_threads_of_their_own(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path).folder
    copy = shutil.copytree(corpus, tmp_path / "copy")
    settings = (("--data.path", str(corpus)), ("--data.path", str(copy), "--engine.num_threads", "1"))
    codes, errors = run_nodes(tmp_path, *settings)
    assert codes == [0, 0], errors
