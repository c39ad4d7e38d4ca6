"""Positions: sinusoids that are exact in half precision, tables that learn the distances that were read, and memory
without positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.models import POSITIONS, random_tokens, tiny_model
from tests.helpers.naive import naive_encoding
from txl_dist.config.load import choices_of
from txl_dist.config.schema import SCHEMES
from txl_dist.errors import ConfigError
from txl_dist.model.positions import LearnedDistances, distance_encoding
from txl_dist.model.transformer_xl import TransformerXL

NUM_POSITIONS, WIDTH = 2000, 64


def test_every_name_has_its_facts() -> None:
    assert set(SCHEMES) == set(choices_of("model.positions"))


def exact_encodings(num_distances: int, *, width: int) -> Tensor:
    rows = [naive_encoding(distance, width=width) for distance in range(num_distances - 1, -1, -1)]
    return torch.tensor(rows, dtype=torch.float64)


def test_encodings_are_sinusoids_of_descending_distances() -> None:
    for width in (8, 7):
        ours = distance_encoding(NUM_POSITIONS, width=width, clamp_len=0, like=torch.zeros(1, dtype=torch.float64))
        assert (ours - exact_encodings(NUM_POSITIONS, width=width)).abs().max() <= 1e-10


def test_clamped_distances_share_one_encoding() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    clamped = distance_encoding(50, width=8, clamp_len=10, like=like)
    plain = distance_encoding(50, width=8, clamp_len=0, like=like)
    assert torch.equal(clamped[-11:], plain[-11:])
    assert torch.equal(clamped[:-11], plain[-11].expand(39, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_encodings_are_built_in_fp32_and_cast_last(dtype: torch.dtype) -> None:
    full = distance_encoding(NUM_POSITIONS, width=WIDTH, clamp_len=0, like=torch.zeros(1))
    half = distance_encoding(NUM_POSITIONS, width=WIDTH, clamp_len=0, like=torch.zeros(1, dtype=dtype))
    assert full.dtype == torch.float32
    assert half.dtype == dtype
    assert torch.equal(half, full.to(dtype))


def seen_by_blocks(model: TransformerXL, *, segment_len: int, memory_len: int) -> tuple[Tensor, Tensor | None]:
    """(hidden_TD, encoding_KD) as the first block gets them; the last block must get the same encodings."""
    inputs: list[tuple[Any, ...]] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(args))
    with torch.no_grad():
        tokens_BT = torch.zeros(1, segment_len, dtype=torch.int64)
        model(tokens_BT, model.empty_memory(num_lanes=1, memory_len=memory_len))
    assert inputs[-1][2] is inputs[0][2]
    return inputs[0][0][0], inputs[0][2]


def encodings_of_a_run(name: str, *, dtype: torch.dtype) -> Tensor:
    """The sinusoids of 2,000 positions that a model of a type works with; embeddings are zeros where they are added."""
    model = tiny_model(dtype=dtype, num_layers=2, width=WIDTH, num_heads=1, **POSITIONS[name])
    if name == "relative":
        _, encoding_KD = seen_by_blocks(model, segment_len=4, memory_len=NUM_POSITIONS - 4)
        assert encoding_KD is not None
        return encoding_KD
    torch.nn.init.zeros_(model.embedding.weight(0))
    hidden_TD, encoding_KD = seen_by_blocks(model, segment_len=NUM_POSITIONS, memory_len=0)
    assert encoding_KD is None
    return hidden_TD


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["relative", "absolute"])
def test_a_model_of_any_type_tells_two_thousand_positions_apart(name: str, dtype: torch.dtype) -> None:
    encoding_KD = encodings_of_a_run(name, dtype=dtype)
    assert encoding_KD.dtype == dtype
    assert encoding_KD.shape == (NUM_POSITIONS, WIDTH)
    assert len(encoding_KD.unique(dim=0)) == NUM_POSITIONS
    # Half a unit in the last place of numbers up to 1, and what fp32 loses in angles up to 2,000.
    tolerance = torch.finfo(dtype).eps / 2 + 5e-4
    assert (encoding_KD.double() - exact_encodings(NUM_POSITIONS, width=WIDTH)).abs().max() <= tolerance


def test_encodings_built_in_bf16_would_collapse() -> None:
    """The trap itself: this is what the tests above would find if R were made in the type of the model."""
    position = torch.arange(NUM_POSITIONS - 1, -1, -1, dtype=torch.bfloat16)
    frequency = 1 / 10000 ** (torch.arange(0, WIDTH, 2, dtype=torch.bfloat16) / WIDTH)
    angle_KF = position[:, None] * frequency[None]
    collapsed = torch.cat([angle_KF.sin(), angle_KF.cos()], dim=1)
    assert len(collapsed.unique(dim=0)) < 0.4 * NUM_POSITIONS
    assert (collapsed.double() - exact_encodings(NUM_POSITIONS, width=WIDTH)).abs().max() > 1.0


TABLE = POSITIONS["learned_relative"]


def learned_distances(*, num_distances: int, clamp_len: int = 0) -> LearnedDistances:
    """A table whose row for distance d holds the number d."""
    model = tiny_model(**{**TABLE, "num_distances": num_distances}, clamp_len=clamp_len)
    table = model.blocks[0].attention.distance
    assert isinstance(table, LearnedDistances)
    with torch.no_grad():
        for parameter in table.parameters():
            rows = torch.arange(float(num_distances)).view(-1, *[1] * (parameter.dim() - 1))
            parameter.copy_(rows.expand_as(parameter))
    return table


@pytest.mark.parametrize(
    ("num_distances", "clamp_len", "expected"),
    [
        (9, 0, [5, 4, 3, 2, 1, 0]),
        (6, 0, [5, 4, 3, 2, 1, 0]),
        (4, 0, [3, 3, 3, 2, 1, 0]),
        (1, 0, [0, 0, 0, 0, 0, 0]),
        (9, 2, [2, 2, 2, 2, 1, 0]),
        (4, 3, [3, 3, 3, 2, 1, 0]),
        (4, 7, [3, 3, 3, 2, 1, 0]),
    ],
)
def test_distances_beyond_the_table_or_the_clamp_read_the_last_row(
    num_distances: int, clamp_len: int, expected: list[int]
) -> None:
    key_KNH, bias_KN = learned_distances(num_distances=num_distances, clamp_len=clamp_len)(6, None)
    assert bias_KN is not None
    assert key_KNH.shape == (6, 2, 5)
    assert key_KNH[:, 1, 2].tolist() == expected
    assert bias_KN[:, 1].tolist() == expected


@pytest.mark.parametrize(
    ("changes", "memory_len", "documents", "read"),
    [
        # The second segment, of 4 tokens: the last of them is 6 away from the oldest of 3 in memory.
        ({"num_distances": 9}, 3, None, 7),
        ({"num_distances": 9}, 0, None, 4),
        ({"num_distances": 5}, 3, None, 5),
        ({"num_distances": 9, "clamp_len": 2}, 3, None, 3),
        ({"num_distances": 9, "same_length": "memory"}, 3, None, 3),
        ({"num_distances": 9, "same_length": "memory_and_self"}, 3, None, 4),
        # Nothing is seen over a border: the farthest pair is the second document's first and last token.
        ({"num_distances": 9}, 3, [7, 7, 8, 8], 2),
    ],
)
def test_only_the_rows_that_were_read_get_a_gradient(
    changes: dict[str, Any], memory_len: int, documents: list[int] | None, read: int
) -> None:
    model = tiny_model(**{**TABLE, **changes})
    _, memory = model(random_tokens(1, 4), model.empty_memory(num_lanes=1, memory_len=memory_len))
    document_BT = None if documents is None else torch.tensor([documents])
    model(random_tokens(1, 4, seed=1), memory, document_BT=document_BT)[0].square().sum().backward()
    for block in model.blocks:
        for name, parameter in block.attention.distance.named_parameters():
            gradient_P = parameter.grad.abs().flatten(1).sum(1)
            assert (gradient_P[:read] > 0).all(), name
            assert (gradient_P[read:] == 0).all(), name


def test_the_shared_row_gets_the_sum_of_the_gradients_of_all_far_distances() -> None:
    short, long = (tiny_model(dtype=torch.float64, **{**TABLE, "num_distances": rows}) for rows in (4, 11))
    weights = dict(short.named_parameters())
    with torch.no_grad():
        for name, parameter in long.named_parameters():
            own = weights[name]
            far = own[-1:].expand(7, *own.shape[1:]) if ".distance." in name else own[:0]
            parameter.copy_(torch.cat([own, far]))
    hidden = []
    for model in (short, long):
        _, memory = model(random_tokens(2, 5), model.empty_memory(num_lanes=2, memory_len=6))
        hidden.append(model(random_tokens(2, 5, seed=1), memory)[0])
        hidden[-1].square().sum().backward()
    assert (hidden[0] - hidden[1]).abs().max() <= 1e-12
    for name, parameter in long.named_parameters():
        own, other = weights[name].grad, parameter.grad
        if own is None or other is None:
            assert own is other, name
            continue
        if ".distance." in name:
            other = torch.cat([other[:3], other[3:].sum(0, keepdim=True)])
        assert (own - other).abs().max() <= 1e-10 * (1 + own.abs().max()), name


def test_absolute_positions_are_counted_from_the_end_of_the_segment() -> None:
    model = tiny_model(num_layers=2, dtype=torch.float64, clamp_len=3, **POSITIONS["absolute"])
    torch.nn.init.zeros_(model.embedding.weight(0))
    hidden_TD, _ = seen_by_blocks(model, segment_len=6, memory_len=0)
    expected = [naive_encoding(min(distance, 3), width=12) for distance in (5, 4, 3, 2, 1, 0)]
    assert (hidden_TD - torch.tensor(expected, dtype=torch.float64)).abs().max() <= 1e-12


def test_absolute_positions_refuse_a_memory_and_name_the_remedy() -> None:
    model = tiny_model(**POSITIONS["absolute"])
    hidden, memory = model(random_tokens(2, 4), model.empty_memory(num_lanes=2, memory_len=0))
    assert hidden.shape == (2, 4, 12)
    assert torch.stack(memory.hidden).shape == (3, 2, 0, 12)
    for memory_len in (1, 8):
        with pytest.raises(ConfigError, match=rf"memory.*{memory_len} tokens.*Pass a memory of 0"):
            model(random_tokens(2, 4), model.empty_memory(num_lanes=2, memory_len=memory_len))
