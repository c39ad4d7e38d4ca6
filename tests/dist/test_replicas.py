"""Silent corruption: one flipped bit on one rank is found, and the rank and the parameter are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from txl_dist.distributed.collectives import RankInfo
from txl_dist.train.monitoring import silent_corruption as replicas
from txl_dist.train.monitoring.silent_corruption import Deviation, deviating_ranks, hash_parameters


def parameters(dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"scale": (), "embedding": (300, 7), "empty": (0, 3), "projection": (9, 11)}
    return [(name, torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()]


def flip(values: torch.Tensor, *, place: int, bit: int) -> None:
    """One bit of one element, in place."""
    bits = values.view(-1).view(replicas.INTEGERS[values.element_size()])
    bits[place] ^= torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(bits.dtype)


def compare_with_flips(ranks: RankInfo, cases: list[dict[int, str]]) -> list[Deviation | None]:
    """For each case: a bit is flipped on some ranks, in the parameter named."""
    answers = []
    for flips in cases:
        mine = parameters(torch.bfloat16)
        for name in filter(None, [flips.get(ranks.rank)]):
            flip(dict(mine)[name], place=5, bit=0)
        answers.append(deviating_ranks(mine))
    return answers


@pytest.mark.dist
def test_the_rank_whose_copy_has_a_flipped_bit_is_named_on_every_rank(tmp_path: Path) -> None:
    two_alike, none_alike = {0: "projection", 2: "projection"}, {0: "embedding", 1: "projection"}
    cases = [{}, {1: "projection"}, {0: "embedding"}, two_alike, none_alike]
    answers = run_ranks(compare_with_flips, cases, world_size=3, folder=tmp_path)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] == [
        None,
        Deviation((1,), "projection", has_majority=True),
        Deviation((0,), "embedding", has_majority=True),
        Deviation((1,), "projection", has_majority=True),
        Deviation((0, 1, 2), "embedding", has_majority=False),
    ]


def test_two_ranks_have_no_majority(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(value: Any) -> list[Any]:
        return [value, value[:-1] + (b"?" if isinstance(value, bytes) else [7])]

    monkeypatch.setattr(replicas, "gather_objects", gathered)
    deviation = deviating_ranks(parameters(torch.float32))
    assert deviation == Deviation((0, 1), "projection", has_majority=False)
    assert "projection is not the same on ranks 0-1, and no majority" in deviation.sentence()
    assert (
        "on rank 3 differs from that of the other ranks" in Deviation((3,), "projection", has_majority=True).sentence()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk_len", [1 << 16, 100])
def test_any_single_bit_changes_the_hash_of_its_parameter_only(
    dtype: torch.dtype, chunk_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(replicas.CHUNK_LEN, "cpu", chunk_len)
    named = parameters(dtype)
    values = [values for _, values in named]
    before = hash_parameters(values)
    for index, place in ((0, 0), (1, 0), (1, 99), (1, 100), (1, 2099), (3, 98)):
        for bit in range(8 * dtype.itemsize):
            flip(values[index], place=place, bit=bit)
            changed = [i for i, (a, b) in enumerate(zip(before, hash_parameters(values), strict=True)) if a != b]
            assert changed == [index]
            flip(values[index], place=place, bit=bit)
    assert hash_parameters(values) == before


def test_elements_that_change_places_change_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replicas.CHUNK_LEN, "cpu", 100)
    values = torch.randn(1000)
    hashes = hash_parameters([values, values.flip(0), values.roll(1), values.roll(100), -values, values.clone()])
    assert len(set(hashes)) == 5
    assert hashes[0] == hashes[5]
    square = torch.randn(30, 30)
    assert hash_parameters([square.T]) == hash_parameters([square.T.contiguous()]), "strides do not matter"
