"""Memory: a window of the newest positions of fixed size, masked where it is empty, through which no gradients flow."""

from __future__ import annotations

import random

import pytest
import torch

from tests.helpers.models import POSITIONS, RECURRENT, VARIANTS, random_tokens, tiny_model
from tests.helpers.naive import naive_visible
from txl_dist.model.memory import EMPTY, Memory, build_mask, empty_memory

LAYERS, LANES, WIDTH = 2, 3, 4


def numbered(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden_LBTD, document_BT) whose position p holds the number p, in every layer and lane."""
    position = torch.arange(first, first + count)
    return position.float()[None, None, :, None].expand(LAYERS, LANES, count, WIDTH), position.expand(LANES, count)


@pytest.mark.parametrize("memory_len", [0, 1, 5, 8])
@pytest.mark.parametrize("lengths", [(2, 2, 2), (5, 5), (8, 3, 1), (1,) * 9, (20,), (3, 9)])
def test_memory_holds_the_newest_positions_oldest_first_in_a_static_shape(
    memory_len: int, lengths: tuple[int, ...]
) -> None:
    memory = empty_memory([memory_len] * LAYERS, num_lanes=LANES, width=WIDTH, like=torch.empty(0))
    seen = 0
    for length in lengths:
        hidden, document = numbered(seen, length)
        memory = memory.append(hidden, document_BT=document)
        seen += length
        assert memory.memory_len == memory_len
        assert torch.stack(memory.hidden).shape == (LAYERS, LANES, memory_len, WIDTH)
        kept = list(range(seen))[-memory_len:] if memory_len else []
        expected = torch.tensor([EMPTY] * (memory_len - len(kept)) + kept)
        assert torch.equal(memory.document_BM, expected.expand(LANES, memory_len))
        filled = torch.stack(memory.hidden)[:, :, memory_len - len(kept) :]
        assert torch.equal(filled, torch.tensor(kept).float()[None, None, :, None].expand_as(filled))


def test_appending_makes_a_new_value_and_leaves_the_old_one_alone() -> None:
    hidden, document = numbered(0, 5)
    old = empty_memory([5] * LAYERS, num_lanes=LANES, width=WIDTH, like=torch.empty(0))
    new = old.append(hidden, document_BT=document)
    for layer in new.hidden:
        layer.fill_(7.0)
    assert (torch.stack(old.hidden) == 0).all()
    assert (old.document_BM == EMPTY).all()
    assert torch.equal(hidden, numbered(0, 5)[0])


def test_a_memory_of_one_segment_shares_the_storage_of_the_layers_inputs() -> None:
    hidden, document = numbered(0, 5)
    old = empty_memory([5, 3], num_lanes=LANES, width=WIDTH, like=torch.empty(0))
    first, second = (layer.contiguous() for layer in hidden)
    new = old.append([first, second], document_BT=document)
    assert new.hidden[0].data_ptr() == first.data_ptr()
    assert new.hidden[1].data_ptr() != second.data_ptr()
    in_half = old.append([first.half(), second.half()], document_BT=document)
    assert in_half.hidden[0].dtype == torch.float32


@pytest.mark.parametrize("name", VARIANTS)
def test_a_backward_pass_leaves_a_memory_that_shares_storage_with_activations_alone(name: str) -> None:
    model = tiny_model(**VARIANTS[name])
    memory = model.empty_memory(num_lanes=2, memory_len=4)
    for seed in (1, 2):
        hidden, memory = model(random_tokens(2, 4, seed=seed), memory)
        kept = torch.stack(memory.hidden).clone()
        hidden.square().sum().backward()
        assert torch.equal(torch.stack(memory.hidden), kept)


def test_appending_cuts_the_way_of_gradients() -> None:
    hidden, document = numbered(0, 3)
    memory = empty_memory([5] * LAYERS, num_lanes=LANES, width=WIDTH, like=torch.empty(0))
    new = memory.append(hidden.clone().requires_grad_() * 2, document_BT=document)
    assert not torch.stack(new.hidden).requires_grad


def test_memory_starts_in_the_type_of_the_model() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        memory = tiny_model(dtype=dtype).empty_memory(num_lanes=2, memory_len=3)
        assert torch.stack(memory.hidden).dtype == dtype
        assert memory.document_BM.dtype == torch.int64


def test_visible_keys_are_those_of_the_definition() -> None:
    generator = random.Random(0)
    for _ in range(60):
        memory_len, segment_len = generator.randint(0, 5), generator.randint(1, 5)
        borders = [generator.random() < 0.3 for _ in range(memory_len + segment_len)]
        ordinal = [sum(borders[: i + 1]) for i in range(memory_len + segment_len)]
        empty = generator.randint(0, memory_len)
        past, documents = [EMPTY] * empty + ordinal[empty:memory_len], ordinal[memory_len:]
        memory = Memory((torch.zeros(1, memory_len, 1),), torch.tensor([past], dtype=torch.int64))
        for same_length in ("off", "memory", "memory_and_self") if memory_len else ("off", "memory_and_self"):
            mask = build_mask(memory, torch.tensor([documents]), same_length=same_length).mask()
            expected = [
                [
                    naive_visible(i, j, memory_documents=past, documents=documents, same_length=same_length)
                    for j in range(memory_len + segment_len)
                ]
                for i in range(segment_len)
            ]
            assert mask[0].tolist() == expected
            assert mask.any(-1).all(), "every query sees a key"


def test_windows_give_every_query_equally_many_keys() -> None:
    memory = Memory((torch.zeros(2, 6, 1),), torch.zeros(2, 6, dtype=torch.int64))
    document_BT = torch.zeros(2, 4, dtype=torch.int64)
    counts = {
        same_length: build_mask(memory, document_BT, same_length=same_length).mask()[0].sum(-1).tolist()
        for same_length in ("off", "memory", "memory_and_self")
    }
    # As the peers count them: 6 in the original PyTorch code and Hugging Face, 7 in NVIDIA's and the TensorFlow code.
    assert counts == {"off": [7, 8, 9, 10], "memory": [6, 6, 6, 6], "memory_and_self": [7, 7, 7, 7]}
    half_empty = memory._replace(document_BM=torch.tensor([[EMPTY, EMPTY, EMPTY, 0, 0, 0]] * 2))
    for same_length, expected in (("memory", [4, 5, 6, 6]), ("memory_and_self", [4, 5, 6, 7])):
        assert build_mask(half_empty, document_BT, same_length=same_length).mask()[0].sum(-1).tolist() == expected


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_empty_memory_contributes_nothing(name: str, pre_norm: bool) -> None:
    model = tiny_model(pre_norm=pre_norm, value_bias=True, **POSITIONS[name])
    tokens_BT = random_tokens(2, 4)
    _, memory = model(random_tokens(2, 3, seed=1), model.empty_memory(num_lanes=2, memory_len=8))
    assert (memory.document_BM == EMPTY).sum(1).tolist() == [5, 5]
    garbage = torch.stack(memory.hidden).clone()
    garbage[:, :, :5] = 1e3 * torch.randn(3, 2, 5, 12)
    expected, after = model(tokens_BT, memory)
    hidden, after_garbage = model(tokens_BT, memory._replace(hidden=tuple(garbage)))
    assert torch.equal(hidden, expected)
    filled = after.document_BM[0] != EMPTY
    assert torch.equal(torch.stack(after.hidden)[:, :, filled], torch.stack(after_garbage.hidden)[:, :, filled])
    garbage[:, :, 5:] += 1.0
    assert not torch.equal(model(tokens_BT, memory._replace(hidden=tuple(garbage)))[0], expected)


@pytest.mark.parametrize("name", RECURRENT)
def test_an_empty_memory_is_the_same_as_none(name: str) -> None:
    model = tiny_model(dtype=torch.float64, **POSITIONS[name])
    tokens_BT = random_tokens(2, 6)
    without, _ = model(tokens_BT, model.empty_memory(num_lanes=2, memory_len=0))
    with_empty, _ = model(tokens_BT, model.empty_memory(num_lanes=2, memory_len=9))
    assert (without - with_empty).abs().max() <= 1e-12


@pytest.mark.parametrize("recompute_every", [0, 1, 2])
@pytest.mark.parametrize("name", RECURRENT)
def test_no_gradient_flows_into_the_memory(name: str, recompute_every: int) -> None:
    model = tiny_model(**POSITIONS[name])
    model.recompute_every = recompute_every
    first, second = random_tokens(2, 4, seed=1), random_tokens(2, 4, seed=2)
    _, memory = model(first, model.empty_memory(num_lanes=2, memory_len=6))
    assert not torch.stack(memory.hidden).requires_grad
    assert torch.stack(memory.hidden).grad_fn is None

    def gradients(past: Memory) -> list[torch.Tensor]:
        model.zero_grad()
        hidden, after = model(second, past)
        assert not torch.stack(after.hidden).requires_grad
        hidden.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    carried = gradients(memory)
    plain = gradients(Memory(tuple(torch.stack(memory.hidden).clone()), memory.document_BM))
    assert len(carried) > 20
    assert all(torch.equal(a, b) for a, b in zip(carried, plain, strict=True))
