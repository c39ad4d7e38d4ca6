"""Padded widths change the place of weights in memory, but no result beyond rounding."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.models import POSITIONS, VARIANTS, random_tokens, tiny_model
from tests.helpers.xlnet import golden_model, order_of, read_golden
from txl_dist.config.load import load_config
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL
from txl_dist.train.engine.padding import PaddedAxes, pad_widths, padded_width, stored_shapes
from txl_dist.train.engine.partitions import Partition, PartitionPiece, fill

LANES, LENGTH = 2, 6
CONFIGS = Path(__file__).parents[4] / "configs"
MODELS: dict[str, dict[str, Any]] = {
    **POSITIONS,
    **VARIANTS,
    "untied": {"tie_weights": False, "cutoffs": (5, 20), "div_value": 2},
    "embedding_alone": {"embed_width": 7},
    "plain_attention": {},
    "recomputed": {},
}
HEADS = PaddedAxes((6, 10), (2, 3, 10), (2, 4, 16), (8, 16))
ROWS = PaddedAxes((5, 10), (5, 10), (16, 16), (16, 16))
BIAS = PaddedAxes((10,), (10,), (16,), (16,))


def run(module: SegmentLoss, name: str) -> dict[str, Tensor]:
    """Losses, memories and gradients of two segments."""
    model = module.model
    memory = model.empty_memory(num_lanes=LANES, memory_len=0 if name == "absolute" else 9)
    found = {}
    for seed in (1, 2):
        tokens = random_tokens(LANES, LENGTH + 1, seed=seed)
        scored = torch.ones(LANES, LENGTH, dtype=torch.float64)
        loss, memory = module(Batch(tokens[:, :-1], tokens[:, 1:], scored, None), memory, 12.0)
        loss.backward()
        found[f"loss {seed}"] = loss.detach()
    with torch.no_grad():
        batch = Batch(tokens[:, :-1], tokens[:, 1:], scored, None)
        found["log p"] = module(batch, memory, None, True)[0]
    found |= {f"memory {layer}": hidden for layer, hidden in enumerate(memory.hidden)}
    return found | {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_logical_widths(name: str) -> None:
    plain = SegmentLoss(tiny_model(dtype=torch.float64, **MODELS[name]))
    plain.model.recompute_every = int(name == "recomputed")
    if name == "plain_attention":
        for block in plain.model.blocks:
            block.attention.kernel = "plain"
    padded = copy.deepcopy(plain)
    axes = pad_widths(padded.model)
    expected, found = run(plain, name), run(padded, name)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        if key.startswith("memory"):
            assert found[key].shape[-1] == padded_width(value.shape[-1])
            result, padding = found[key][..., : value.shape[-1]], found[key][..., value.shape[-1] :]
            assert not padding.any(), key
        elif key in axes:
            result = axes[key].unpad(found[key])
            assert torch.equal(axes[key].pad(result), found[key]), f"{key} is 0 in the padding"
        else:
            result = found[key]
        assert result.shape == value.shape, key
        torch.testing.assert_close(result, value, rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.parametrize("case", ["permutation", "typed"])
def test_the_two_streams_of_xlnet_are_those_of_the_logical_widths(case: str) -> None:
    golden = read_golden(case)
    labels_Bm = golden.of("labels", 0).clamp(min=0)
    order = order_of(golden, 0, with_types=case == "typed")
    scored_Bm = torch.ones(labels_Bm.shape, dtype=torch.float64)
    batch = Batch(golden.of("input_ids", 0), labels_Bm, scored_Bm, None, order=order)
    plain = SegmentLoss(golden_model(attention="fused", dtype=torch.float64, segment_terms=case == "typed"))
    padded = copy.deepcopy(plain)
    axes = pad_widths(padded.model)
    assert "blocks.0.attention.query.weight" in axes
    losses = []
    for module in (plain, padded):
        memory = module.model.empty_memory(num_lanes=len(labels_Bm), memory_len=golden.memory_len)
        for _ in range(2):
            loss, memory = module(batch, memory, 12.0)
            loss.backward()
            losses.append(float(loss.detach()))
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-12)
    for (name, one), other in zip(plain.model.named_parameters(), padded.model.parameters(), strict=True):
        if one.grad is None or other.grad is None:
            assert one.grad is other.grad is None, name
        else:
            found = axes[name].unpad(other.grad) if name in axes else other.grad
            torch.testing.assert_close(found, one.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_tied_parameters_stay_tied_and_no_other_name_appears(name: str) -> None:
    model, padded = (tiny_model(**MODELS[name]) for _ in range(2))
    axes = pad_widths(padded)
    shapes = {key: list(parameter.shape) for key, parameter in model.named_parameters()}
    stored = {key: list(parameter.shape) for key, parameter in padded.named_parameters()}
    assert stored == stored_shapes(shapes, axes)
    for key, parameter in model.named_parameters():
        if key in axes:
            assert torch.equal(axes[key].unpad(dict(padded.named_parameters())[key]), parameter)


def test_wt103_base_is_stored_with_aligned_rows() -> None:
    config = load_config(CONFIGS / "wt103_base.toml")
    with torch.device("meta"):
        model = TransformerXL(config.model, vocab_size=267_735)
    axes = pad_widths(model)
    shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    assert shapes["embedding.weight_0"] == (267_735, 416)
    assert shapes["softmax.bias_0"] == (267_735,)
    assert shapes["softmax.cluster_weight"] == (3, 416)
    assert shapes["blocks.0.attention.query.weight"] == (480, 416)
    assert shapes["blocks.0.attention.key_value.weight"] == (960, 416)
    assert shapes["blocks.0.attention.output.weight"] == (416, 480)
    assert shapes["blocks.0.attention.content_bias"] == (10, 48)
    assert shapes["blocks.0.ff_in.weight"] == (2112, 416)
    assert shapes["blocks.0.ff_norm.weight"] == (416,)
    num_stored = sum(parameter.numel() for parameter in model.parameters())
    num_logical = num_stored - sum(math.prod(a.stored_shape) - math.prod(a.shape) for a in axes.values())
    assert num_logical == 151_107_538  # as the recipe says
    assert num_stored < 1.04 * num_logical


@pytest.mark.parametrize("axes", [HEADS, ROWS, BIAS])
def test_every_range_of_the_stored_values_has_its_logical_values(axes: PaddedAxes) -> None:
    logical = torch.arange(1.0, 1 + torch.Size(axes.shape).numel())
    stored = axes.pad(logical.view(axes.shape)).view(-1)
    assert torch.equal(axes.unpad(stored.view(axes.stored_shape)), logical.view(axes.shape))
    for start in range(len(stored) + 1):
        assert axes.num_before(start) == int((stored[:start] > 0).sum())
        for stop in range(start + 1, len(stored) + 1):
            part = stored[start:stop]
            values = axes.unpad_range(part, start=start)
            assert torch.equal(values, part[part > 0])
            assert torch.equal(axes.pad_range(values, start=start, length=len(part)), part)


class BiasAlone:
    """Saved values of one rank, which has no value of any other parameter."""

    def kinds_of(self, parameter: str) -> list[str]:
        return {"bias": ["weight", "exp_avg"]}[parameter]

    def read(self, kind: str, parameter: str, *, start: int, length: int) -> Tensor:
        assert (parameter, start, length) == ("bias", 0, 3)
        return torch.full((3,), 1.0 if kind == "weight" else 2.0)

    def step_of(self, parameter: str) -> float:
        return {"bias": 7.0}[parameter]


def test_a_part_that_holds_only_padding_of_a_parameter_needs_no_saved_values_of_it() -> None:
    """The last rank has the end of a matrix, then a bias. The copies in its node's memory know the bias alone."""
    matrix = PaddedAxes((2, 3), (2, 3), (2, 16), (2, 16))
    flat = nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.Adam([flat])
    pieces = [PartitionPiece("matrix", 27, 0, 5), PartitionPiece("bias", 0, 5, 3)]
    fill([Partition(flat, pieces)], optimizer, BiasAlone(), with_average=False, padded={"matrix": matrix})
    assert flat.tolist() == [0.0] * 5 + [1.0] * 3
    assert optimizer.state[flat]["exp_avg"].tolist() == [0.0] * 5 + [2.0] * 3
    assert float(optimizer.state[flat]["step"]) == 7.0
