"""Flat parameters change the place of weights in memory, but no result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.models import POSITIONS, random_tokens, tiny_model
from txl_dist.config.schema import OptimSection
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch, SegmentLoss
from txl_dist.train.engine.flat import ALIGNMENT, FlatModule, named_values, stored_whole
from txl_dist.train.engine.optimizer import build_optimizer, is_decayed

LANES, LENGTH = 2, 6
VARIANTS: dict[str, dict[str, Any]] = {
    **POSITIONS,
    "biases_of_their_own": {"share_biases": False, "value_bias": True, "output_bias": True},
    "clusters": {"cutoffs": (10, 30), "div_value": 2, "tie_projections": (False, True, True)},
    "untied": {"tie_weights": False},
}


def module_of(name: str, *, recompute: bool = False) -> SegmentLoss:
    model = tiny_model(dtype=torch.float64, **VARIANTS[name])
    model.recompute_every = int(recompute)
    return SegmentLoss(model)


def run(module: nn.Module, memory: Memory, *, seed: int) -> Tensor:
    tokens = random_tokens(LANES, LENGTH + 1, seed=seed)
    scored = torch.ones(LANES, LENGTH, dtype=torch.float64)
    loss, _ = module(Batch(tokens[:, :-1], tokens[:, 1:], scored, None), memory, 12.0)
    return loss  # type: ignore[no-any-return]


def memory_of(module: SegmentLoss, name: str) -> Memory:
    return module.model.empty_memory(num_lanes=LANES, memory_len=0 if name == "absolute" else 4)


def named_gradients(flat: FlatModule) -> dict[str, Tensor]:
    gradients = {}
    for tensor, slots in flat.stored:
        assert tensor.grad is not None
        for slot in slots:
            gradients[slot.name] = tensor.grad.view(-1)[slot.start : slot.stop].view(slot.shape)
    return gradients


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_gradients_are_those_of_the_plain_module(name: str, recompute: bool) -> None:
    plain = module_of(name, recompute=recompute)
    flat = FlatModule(copy.deepcopy(plain), prefix="model.")
    memory = memory_of(plain, name)
    for seed in (1, 2):  # gradients of micro-batches add up
        losses = [run(module, memory, seed=seed) for module in (plain, flat)]
        assert losses[0] == losses[1]
        for loss in losses:
            loss.backward()
    expected = {key.removeprefix("model."): value.grad for key, value in plain.named_parameters()}
    found = named_gradients(flat)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient is not None
        assert torch.equal(found[key], gradient), key


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_lies_in_one_place_aligned_and_as_it_was(name: str) -> None:
    plain = module_of(name)
    flat = FlatModule(copy.deepcopy(plain), prefix="model.")
    values = list(named_values(flat.stored))
    expected = list(named_values(stored_whole(plain, prefix="model.")))
    assert sorted(key for key, _ in values) == sorted(key for key, _ in expected)
    for key, value in expected:
        assert torch.equal(dict(values)[key], value), key
    for one in flat.stored:
        assert [slot.start % ALIGNMENT for slot in one.slots] == [0] * len(one.slots)
        assert len({is_decayed(slot.name) for slot in one.slots}) == 1
    assert len(flat.stored) == len(list(flat.parameters()))
    assert len(flat.stored) < len(expected) / 2


def test_an_update_of_the_flat_tensors_is_seen_by_the_next_forward_pass() -> None:
    plain = module_of("relative")
    flat = FlatModule(copy.deepcopy(plain), prefix="model.")
    memory = memory_of(plain, "relative")
    pairs = []
    for module, stored in ((plain, stored_whole(plain, prefix="model.")), (flat, flat.stored)):
        optimizer = build_optimizer(((one.slots[0].name, one.tensor) for one in stored), OptimSection(weight_decay=0.1))
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        losses = []
        for seed in (1, 2, 3):
            loss = run(module, memory, seed=seed)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        pairs.append(torch.stack(losses))
    assert (pairs[0] - pairs[1]).abs().max() <= 1e-12


def test_evaluation_and_training_mode_reach_the_module() -> None:
    flat = FlatModule(module_of("relative"), prefix="model.")
    assert not flat.eval().module.model.blocks[0].training
    assert flat.train().module.model.blocks[0].training
