"""Document masks: the tokens of a document are scored as if there were no other document."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.helpers.models import POSITIONS, RECURRENT, random_tokens, segment_losses, tiny_model

SEGMENT = 5
VARIANTS: dict[str, dict[str, Any]] = {
    **RECURRENT,
    "relative_pre_norm": {"pre_norm": True, "final_norm": True, "cutoffs": (5, 20), "div_value": 2},
    "relative_clamped": {"clamp_len": 3, "value_bias": True},
    "relative_window": {"same_length": "memory"},
    "relative_window_and_self": {"same_length": "memory_and_self", "pre_norm": True},
    "learned_relative_pre_norm": {"pre_norm": True, **RECURRENT["learned_relative"]},
    "learned_relative_window": {"same_length": "memory", **RECURRENT["learned_relative"]},
}
CASES = [
    (name, memory_len)
    for name, settings in VARIANTS.items()
    for memory_len in (0, 3, 11)
    if memory_len or settings.get("same_length") != "memory"  # a window of no keys
]
TEXTS = [(3, 14), (7, 10), (12, 5), (1, 16), (2, 2, 13), (4, 8, 5)]
"""Per lane the lengths of its documents: borders inside and between segments and memories, short and long documents."""
TEXT_LEN = 17


def segments(start: int, stop: int) -> list[int]:
    """Lengths of the pieces of [start, stop) when the text is cut every SEGMENT tokens."""
    cuts = [start, *range(start - start % SEGMENT + SEGMENT, stop, SEGMENT), stop]
    return [b - a for a, b in itertools.pairwise(cuts)]


def documents_of(lengths: Sequence[int], *, first: int = 3) -> torch.Tensor:
    return torch.tensor([[first + i for i, length in enumerate(lengths) for _ in range(length)]])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)], ids=["fp32", "fp64"])
@pytest.mark.parametrize(("name", "memory_len"), CASES)
@torch.no_grad()
def test_each_document_is_scored_as_if_it_were_alone(
    name: str, memory_len: int, dtype: torch.dtype, tolerance: float
) -> None:
    model = tiny_model(dtype=dtype, num_layers=2, **VARIANTS[name])
    tokens_BS, document_BS = random_tokens(len(TEXTS), TEXT_LEN + 1), torch.cat([documents_of(text) for text in TEXTS])
    together = segment_losses(
        model, tokens_BS, memory_len=memory_len, lengths=segments(0, TEXT_LEN), document_BS=document_BS
    )
    for lane, lengths in enumerate(TEXTS):
        stop = 0
        for length in lengths:
            start, stop = stop, stop + length
            tokens_1S = tokens_BS[lane : lane + 1, start : stop + 1]
            alone = segment_losses(model, tokens_1S, memory_len=memory_len, lengths=segments(start, stop))
            error = (together[lane, start:stop] - alone).abs()
            assert (error <= tolerance * alone.abs().clamp(min=1)).all(), (lengths, start)


@pytest.mark.parametrize("memory_len", [0, 3, 11])
@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_without_masks_an_earlier_document_is_felt(name: str, memory_len: int) -> None:
    model = tiny_model(**RECURRENT[name])
    tokens_1S = random_tokens(1, 10)
    whole = segment_losses(model, tokens_1S, memory_len=memory_len, lengths=segments(0, 9))
    alone = segment_losses(model, tokens_1S[:, 3:], memory_len=memory_len, lengths=segments(3, 9))
    assert ((whole[:, 3:5] - alone[:, :2]).abs() > 1e-3).all()
    assert bool(((whole[:, 5:] - alone[:, 2:]).abs() > 1e-3).any()) is (memory_len > 0)


@pytest.mark.parametrize(
    ("name", "memory_len"), [*((name, memory_len) for name in RECURRENT for memory_len in (3, 11)), ("absolute", 0)]
)
@torch.no_grad()
def test_a_change_in_one_document_changes_nothing_in_the_others(name: str, memory_len: int) -> None:
    model = tiny_model(dtype=torch.float64, **POSITIONS[name])
    lengths = (4, 5, 8)
    tokens_1S, document_1S = random_tokens(1, 18), documents_of(lengths)

    def losses(tokens: torch.Tensor) -> torch.Tensor:
        cut = segments(0, 17)
        return segment_losses(model, tokens, memory_len=memory_len, lengths=cut, document_BS=document_1S)[0]

    before = losses(tokens_1S)
    for document, first in enumerate((0, 4, 9)):
        changed = tokens_1S.clone()
        changed[:, first] = (changed[:, first] + 7) % 50
        is_other = (document_1S[0] != 3 + document) & (
            torch.arange(17) != first - 1
        )  # that loss is of the token itself
        difference = (losses(changed) - before).abs()
        assert (difference[is_other] == 0).all()
        assert difference[first] > 1e-6
        assert difference[first + 1] > 1e-6 or (name == "absolute" and (first + 1) % SEGMENT == 0)
