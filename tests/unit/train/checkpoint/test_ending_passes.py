"""A rank that must leave its generation does so between two blocks of a pass. Until then a pass is unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.models import random_tokens, tiny_model
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.train.checkpoint.recovery import end_passes_if

NUM_LAYERS = 3


def hidden_of(model: TransformerXL) -> Tensor:
    memory = model.empty_memory(num_lanes=2, memory_len=4)
    hidden_BTD, _ = model(random_tokens(2, 5), memory)
    assert isinstance(hidden_BTD, Tensor)
    return hidden_BTD


def gradients_of(model: TransformerXL) -> list[Tensor]:
    model.zero_grad()
    hidden_of(model).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("recompute_every", [0, 1])
def test_a_pass_of_a_rank_that_stays_is_unchanged(recompute_every: int) -> None:
    model = tiny_model(num_layers=NUM_LAYERS)
    model.recompute_every = recompute_every
    before = gradients_of(model)
    num_asked = 0

    def must_leave() -> bool:
        nonlocal num_asked
        num_asked += 1
        return False

    end_passes_if(must_leave, model)
    after = gradients_of(model)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert num_asked >= 2 * NUM_LAYERS


@pytest.mark.parametrize("recompute_every", [0, 1])
def test_a_rank_that_must_leave_ends_its_pass_before_the_next_block(recompute_every: int) -> None:
    model = tiny_model(num_layers=NUM_LAYERS)
    model.recompute_every = recompute_every
    has_to_leave = False
    end_passes_if(lambda: has_to_leave, model)
    begun: list[int] = []
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: begun.append(index))

    loss = hidden_of(model).sum()
    has_to_leave = True
    begun.clear()
    with pytest.raises(ConnectionError, match="was lost"):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.blocks.parameters())
    assert not begun
    with pytest.raises(ConnectionError, match="was lost"):
        hidden_of(model)
    assert begun == [0]
