"""`txl evaluate` gives the same result on any number of ranks: they share the rows of the evaluation on one rank.

Only rounding can differ, because rows are computed in other batches. The tolerance is 1e-6 of the loss. With other
numbers of lanes (batch rows), other tokens begin with an empty memory, but beyond the reach of these beginnings all
results are equal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import forked
from tests.helpers.bundles import Made, make
from txl_dist.distributed.rendezvous import free_port

pytestmark = pytest.mark.dist


def scored(made: Made, folder: Path, *words: str, world_size: int) -> dict[str, Any]:
    """The model's row, and its log-probabilities."""
    row: dict[str, Any] = rows(made, folder, "--log-probs", "p.npz", *words, world_size=world_size)["model"]
    loaded = np.load(folder / "p.npz", allow_pickle=False)
    return row | {name: loaded[name] for name in ("token", "log_p", "document")}


def rows(made: Made, folder: Path, *words: str, world_size: int) -> dict[str, Any]:
    """By their names."""
    folder.mkdir()
    port = free_port()
    given = ["evaluate", str(made.bundle), "--data", str(made.corpus.folder), "--json", "scores.json", *words]
    ranks = [
        forked.start(
            forked.run_txl, *given, cwd=folder, out=folder / f"out-{rank}",
            variables=forked.environment(**forked.place(rank, world_size, port)),
        )
        for rank in range(world_size)
    ]  # fmt: skip
    for rank, process in enumerate(ranks):
        process.join(120)
        assert process.exitcode == 0, (folder / f"out-{rank}").read_text()
        assert ("nats/token" in (folder / f"out-{rank}").read_text()) == (rank == 0), "rank 0 speaks"
    found: dict[str, Any] = json.loads((folder / "scores.json").read_text())
    return found


@pytest.mark.parametrize("document_mask", [False, True])
def test_one_two_and_four_ranks_score_every_token_alike(tmp_path: Path, document_mask: bool) -> None:
    made = make(tmp_path / "made", document_mask=document_mask, cutoffs=[20, 90])
    alone = scored(made, tmp_path / "1", "--num-lanes", "6", world_size=1)
    assert len(alone["token"]) == alone["tokens"] == made.corpus.split("valid").tokens - 1
    for world_size in (2, 4):  # six lanes on four ranks: two are padding
        found = scored(made, tmp_path / str(world_size), "--num-lanes", "6", world_size=world_size)
        assert found["loss"] == pytest.approx(alone["loss"], abs=1e-6)
        assert np.allclose(found["log_p"], alone["log_p"], atol=1e-5, rtol=0)
        for name in ("token", "document"):
            assert np.array_equal(found[name], alone[name])
        for name in ("by_cluster", "by_position"):
            for part, expected in zip(found[name], alone[name], strict=True):
                assert part["tokens"] == expected["tokens"]
                assert part["loss"] == pytest.approx(expected["loss"], abs=1e-5)


@pytest.mark.parametrize("document_mask", [False, True])
def test_the_cache_of_a_lane_does_not_depend_on_the_ranks(tmp_path: Path, document_mask: bool) -> None:
    """Three lanes on two ranks: one is padding."""
    made, words = make(tmp_path / "made", document_mask=document_mask), ["--num-lanes", "3", "--adapt", "cache"]
    one, two = (rows(made, tmp_path / str(count), *words, world_size=count) for count in (1, 2))
    for name in ("model", "adapted: cache"):
        assert two[name]["loss"] == pytest.approx(one[name]["loss"], abs=1e-6)
        assert two[name]["tokens"] == one[name]["tokens"]
    assert two["adapted: cache"]["loss"] != two["model"]["loss"]


def test_with_other_lanes_only_what_follows_the_beginning_of_a_stripe_differs(tmp_path: Path) -> None:
    """A layer looks M tokens back behind its segment: M L tokens and a segment on nothing of the start is left."""
    made, lengths = make(tmp_path / "made"), ["--memory-len", "3", "--segment-len", "3"]
    one = scored(made, tmp_path / "1", "--num-lanes", "1", *lengths, world_size=1)
    three = scored(made, tmp_path / "3", "--num-lanes", "3", *lengths, world_size=1)
    stripe_len = -(-len(one["token"]) // 3)
    assert stripe_len % 3 == 0, "segments begin at the same places"
    place = np.arange(len(one["token"])) % stripe_len
    place[:stripe_len] = stripe_len  # the first stripe begins where all begin
    is_same = np.isclose(one["log_p"], three["log_p"], atol=1e-5, rtol=0)
    reach = 3 + 3 * 3
    assert is_same[place >= reach].all()
    assert not is_same[place < 2].all()


def test_what_one_rank_alone_cannot_read_is_told_by_all(tmp_path: Path) -> None:
    """The end of the split is damaged, which rank 1 reads."""
    made = make(tmp_path / "made")
    shard = sorted(made.corpus.folder.glob("*valid*.tar"))[-1]
    content = bytearray(shard.read_bytes())
    split = made.corpus.split("valid")
    last = list(split.each_document())[-1].tobytes()
    place = content.rindex(last)
    content[place : place + len(last)] = b"\x01" * len(last)
    shard.write_bytes(content)
    port = free_port()
    given = ["evaluate", str(made.bundle), "--data", str(made.corpus.folder), "--num-lanes", "2"]
    ranks = [
        forked.start(
            forked.run_txl, *given, cwd=tmp_path, out=tmp_path / f"out-{rank}",
            variables=forked.environment(**forked.place(rank, 2, port)),
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank, process in enumerate(ranks):
        process.join(120)
        said = (tmp_path / f"out-{rank}").read_text()
        assert process.exitcode == 2, said
        assert "Traceback" not in said
    assert shard.name in (tmp_path / "out-1").read_text()


@pytest.mark.parametrize("command", ["evaluate", "recl"])
@pytest.mark.parametrize("who", [0, 1])
def test_only_rank_0_looks_whether_a_file_can_be_written_and_all_tell_what_it_finds(
    tmp_path: Path, command: str, who: int
) -> None:
    """Each rank is in a folder of its own, and one of the two has the folder that is named."""
    made, port = make(tmp_path / "made"), free_port()
    given = [command, str(made.bundle), "--data", str(made.corpus.folder), "--json", "results/scores.json"]
    given += ["--step", "9", "--max-context", "18", "--num-tokens", "4"] if command == "recl" else ["--num-lanes", "2"]
    ranks = []
    for rank in range(2):
        (tmp_path / f"at-{rank}" / ("results" if rank == who else "others")).mkdir(parents=True)
        variables = forked.environment(**forked.place(rank, 2, port))
        ranks.append(
            forked.start(
                forked.run_txl, *given, cwd=tmp_path / f"at-{rank}", out=tmp_path / f"out-{rank}", variables=variables
            )
        )
    for process in ranks:
        process.join(60)
        process.kill()  # one that waits for the other
    for rank, process in enumerate(ranks):
        process.join()
        said = (tmp_path / f"out-{rank}").read_text()
        assert process.exitcode == (0 if who == 0 else 2), said
        assert ("cannot write results/scores.json" in said) == (who == 1 and rank == 0), said
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("at-*/*/*")]
    assert files == (["at-0/results/scores.json"] if who == 0 else [])


def test_what_all_ranks_find_wrong_is_told_once(tmp_path: Path) -> None:
    made, port = make(tmp_path / "made"), free_port()
    given = ["evaluate", str(made.bundle), "--data", str(made.corpus.folder), "--protocol", "nvidia"]
    ranks = [
        forked.start(
            forked.run_txl, *given, "--memory-len", "100000", cwd=tmp_path, out=tmp_path / f"out-{rank}",
            variables=forked.environment(**forked.place(rank, 2, port)),
        )
        for rank in range(2)
    ]  # fmt: skip
    said = []
    for rank, process in enumerate(ranks):
        process.join(60)
        process.kill()
        said.append((tmp_path / f"out-{rank}").read_text())
        assert process.exitcode == 2, said[-1]
    assert ["for each of this protocol's 16 rows" in one for one in said] == [True, False]
