"""Dropout: every place has its own rate, acts independently, and drops the right share of values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.models import POSITIONS, random_tokens, tiny_model, tiny_section
from txl_dist.model.block import Block
from txl_dist.model.dropout import PIECE, dropout, gelu_dropout, relu_dropout_
from txl_dist.model.memory import AttentionMask
from txl_dist.model.positions import attention_biases, build_attention
from txl_dist.model.relative_attention import Terms
from txl_dist.model.transformer_xl import TransformerXL

OWN_RATES = ["embed_dropout", "distance_dropout", "projection_dropout", "ff_dropout", "output_dropout"]
PLACES = ["attention_dropout", *OWN_RATES]
NOWHERE: dict[str, float] = {"dropout": 0.0, **dict.fromkeys(PLACES, 0.0)}
RATE = 0.3
MEMORY_LEN = {"relative": 6, "learned_relative": 6, "absolute": 0}


def drops(model: TransformerXL, tokens_BT: Tensor, *, memory_len: int) -> dict[str, list[Tensor]]:
    """Per place the tensors in training mode where a dropout has just acted, before anything else mixed them.

    What a sublayer gives is seen as the sum after it, less the sum before it; so the model must be post-norm.
    """
    seen: dict[str, list[Tensor]] = {place: [] for place in OWN_RATES}

    def block_begins(_: nn.Module, args: tuple[Any, ...]) -> None:
        if not seen["embed_dropout"]:
            seen["embed_dropout"].append(args[0])
            if args[2] is not None:
                seen["distance_dropout"].append(args[2])

    def sum_is_normed(place: str, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        seen[place].append(output[0] - args[0])

    for block in model.blocks:
        assert isinstance(block, Block)
        block.register_forward_pre_hook(block_begins)
        block.attention_norm.register_forward_hook(lambda _, *seen: sum_is_normed("projection_dropout", *seen))
        block.ff_out.register_forward_pre_hook(lambda _, args: seen["ff_dropout"].append(args[0]))
        block.ff_norm.register_forward_hook(lambda _, *seen: sum_is_normed("ff_dropout", *seen))
    memory = model.empty_memory(num_lanes=tokens_BT.shape[0], memory_len=memory_len)
    seen["output_dropout"].append(model.train()(tokens_BT, memory)[0])
    return seen


def outputs(model: TransformerXL, *, memory_len: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Hidden states of two segments, the second with a memory."""
    torch.manual_seed(seed)
    memory = model.empty_memory(num_lanes=2, memory_len=memory_len)
    first, memory = model(random_tokens(2, 4), memory)
    return first, model(random_tokens(2, 4, seed=1), memory)[0]


@contextmanager
def evaluating(model: TransformerXL) -> Iterator[TransformerXL]:
    was_training = model.training
    yield model.eval()
    model.train(was_training)


def trains_as_it_evaluates(model: TransformerXL, *, memory_len: int) -> bool:
    training = outputs(model.train(), memory_len=memory_len)
    with evaluating(model):
        evaluation = outputs(model, memory_len=memory_len)
    return all(torch.equal(a, b) for a, b in zip(training, evaluation, strict=True))


@pytest.mark.parametrize("pre_norm", [False, True], ids=["post_norm", "pre_norm"])
@pytest.mark.parametrize("name", POSITIONS)
@torch.no_grad()
def test_each_place_alone_makes_training_differ_and_none_leaves_it_equal(name: str, pre_norm: bool) -> None:
    settings = {**NOWHERE, "pre_norm": pre_norm, **POSITIONS[name]}
    assert trains_as_it_evaluates(tiny_model(**settings), memory_len=MEMORY_LEN[name])
    for place in PLACES:
        model = tiny_model(**{**settings, place: RATE})
        acts = place != "distance_dropout" or name == "relative"
        assert trains_as_it_evaluates(model, memory_len=MEMORY_LEN[name]) is not acts, place


@pytest.mark.parametrize("name", POSITIONS)
@torch.no_grad()
def test_minus_one_means_the_common_rate(name: str) -> None:
    for place in OWN_RATES:
        by_name, by_default = (
            tiny_model(**{**NOWHERE, **POSITIONS[name], **rates})
            for rates in ({place: RATE}, {"dropout": RATE, place: -1.0})
        )
        for one, other in zip(
            outputs(by_name, memory_len=MEMORY_LEN[name]), outputs(by_default, memory_len=MEMORY_LEN[name]), strict=True
        ):
            assert torch.equal(one, other), place
    # Nobody asks for dropout on attention probabilities by asking for dropout.
    model = tiny_model(**{**NOWHERE, **POSITIONS[name], "dropout": RATE})
    assert trains_as_it_evaluates(model, memory_len=MEMORY_LEN[name])


def assert_dropped(x: Tensor, *, rate: float, what: str) -> None:
    """The share of zeros lies within five standard errors of the rate."""
    share, error = (x == 0).float().mean().item(), math.sqrt(rate * (1 - rate) / x.numel())
    assert abs(share - rate) <= 5 * error, f"{what}: {share:.3f} of {x.numel()} numbers are zero, not {rate}"


@pytest.mark.parametrize("name", POSITIONS)
@torch.no_grad()
def test_each_place_drops_the_share_of_numbers_it_says_and_scales_the_rest(name: str) -> None:
    rates = {place: 0.1 * (i + 1) for i, place in enumerate(OWN_RATES)}
    settings = {"activation": "gelu", "num_layers": 2, "width": 40, "ff_width": 48, **POSITIONS[name]}
    tokens_BT = random_tokens(8, 16)
    model = tiny_model(**{**NOWHERE, **rates, **settings})
    seen = drops(model, tokens_BT, memory_len=MEMORY_LEN[name])
    whole = drops(tiny_model(**{**NOWHERE, **settings}), tokens_BT, memory_len=MEMORY_LEN[name])
    assert {place: len(tensors) for place, tensors in seen.items()} == {
        "embed_dropout": 1,
        "distance_dropout": 1 if name == "relative" else 0,
        "projection_dropout": 2,
        "ff_dropout": 4,
        "output_dropout": 1,
    }
    for place, tensors in seen.items():
        for x, undropped in zip(tensors, whole[place], strict=True):
            is_number = undropped != 0  # the sine of distance 0 is zero, dropped or not
            assert is_number.float().mean() > 0.9, place
            assert_dropped(x[is_number], rate=rates[place], what=place)
    for place in ("embed_dropout", "distance_dropout"):  # nothing random came before these
        for x, undropped in zip(seen[place], whole[place], strict=True):
            assert (x - undropped / (1 - rates[place]))[x != 0].abs().max() <= 1e-5, place


@pytest.mark.parametrize("name", POSITIONS)
@torch.no_grad()
def test_attention_drops_probabilities_and_scales_the_rest(name: str) -> None:
    """Values are unit vectors, one per key, so that a context is the list of the probabilities."""
    num_keys = 40
    section = tiny_section(head_width=num_keys, attention_dropout=RATE, **POSITIONS[name])
    attention = build_attention(section, biases=attention_biases(section.num_heads, section.head_width))
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.1)
    torch.manual_seed(0)
    key = torch.randn(1, num_keys, 2, num_keys)
    value = torch.eye(num_keys)[None, :, None].expand_as(key)
    query_BTNH, encoding_KD = torch.randn(1, 30, 2, num_keys), torch.randn(num_keys, 12)
    visible = AttentionMask(torch.zeros(1, 30), torch.zeros(1, num_keys), None)
    terms = Terms(query_BTNH, key, value)
    if (distances := attention.distances(num_keys, encoding_KD=encoding_KD)) is not None:
        terms = Terms(*terms[:3], distances.key_KNH, attention.content_bias, attention.position_bias, distances.bias_KN)
    training, evaluation = (attention.train(mode).attend(terms, visible=visible) for mode in (True, False))
    assert (evaluation.sum(-1) - 1).abs().max() <= 1e-5
    is_visible = visible.mask()[:, :, None].expand_as(evaluation)
    assert (training[~is_visible] == 0).all()
    assert_dropped(training[is_visible], rate=RATE, what=name)
    assert (training - evaluation / (1 - RATE))[training != 0].abs().max() <= 1e-6


@torch.no_grad()
def test_what_is_remembered_was_dropped_once() -> None:
    """The memory holds each layer's input as the layer got it: embeddings after their dropout, as the original has."""
    model = tiny_model(**{**NOWHERE, "embed_dropout": RATE, "width": 40}).train()
    _, memory = model(random_tokens(8, 16), model.empty_memory(num_lanes=8, memory_len=16))
    assert_dropped(torch.stack(memory.hidden)[0], rate=RATE, what="memory of the first layer")
    assert (torch.stack(memory.hidden)[1:] != 0).all()


NUMBERS = 400_003
"""Not a multiple of those that share a word, and more than a piece."""


def masks_and_gradients(rate: float, *, seed: int = 3) -> list[Tensor]:
    """Of each function on ones: what it gives, then the gradient of ones; contiguous, [NUMBERS]."""
    found = []
    for function in (dropout, relu_dropout_):
        torch.manual_seed(seed)
        x = torch.ones(NUMBERS, requires_grad=True)
        y = function(x.clone(), rate)
        y.backward(torch.ones_like(y))
        assert x.grad is not None
        found += [y.detach(), x.grad]
    return found


@pytest.mark.parametrize("rate", [1e-3, 0.1, 0.2, 0.5, 0.9])
def test_masks_have_the_mean_and_variance_of_independent_choices(rate: float) -> None:
    for y in masks_and_gradients(rate):
        assert y.unique().numel() == 2
        assert_dropped(y, rate=rate, what="numbers")
        variance = rate / (1 - rate)  # of a number that is 0 or 1 / (1 - rate)
        assert abs(y.mean().item() - 1) <= 5 * math.sqrt(variance / NUMBERS)
        centred = (y - y.mean()) / math.sqrt(variance)
        # Neighbours in a word, words, pieces and far apart are not correlated.
        for distance in (1, 2, 3, 4, 5, 8, 64, 624 * 2, 2**17, 2**17 + 1):
            correlation = (centred[distance:] * centred[:-distance]).mean().item()
            assert abs(correlation) <= 5 / math.sqrt(NUMBERS - distance), distance
        # Counts in groups spread as binomial ones do.
        counts = (y[: NUMBERS // 100 * 100].view(-1, 100) == 0).sum(1).double()
        spread = counts.var().item() / (100 * rate * (1 - rate))
        # The standard error of a sample variance, with the fourth moment of a binomial one.
        error = math.sqrt((2 + (1 - 6 * rate * (1 - rate)) / (100 * rate * (1 - rate))) / len(counts))
        assert abs(spread - 1) <= 5 * error


def test_forward_and_backward_drop_the_same_numbers_a_seed_decides_which_and_draws_go_on() -> None:
    y, d_x, relu_y, relu_d_x = masks_and_gradients(RATE)
    assert torch.equal(y, d_x)
    assert torch.equal(relu_y, relu_d_x)
    assert torch.equal(y, relu_y)
    assert all(torch.equal(a, b) for a, b in zip(masks_and_gradients(RATE), (y, d_x, relu_y, relu_d_x), strict=True))
    assert not torch.equal(masks_and_gradients(RATE, seed=4)[0], y)
    torch.manual_seed(3)
    first, second = (dropout(torch.ones(NUMBERS), RATE) for _ in range(2))
    assert torch.equal(first, y)
    assert not torch.equal(second, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_value_that_stays_is_divided_by_the_probability_of_that(dtype: torch.dtype) -> None:
    """Of any memory format; what relu removes has no gradient."""
    torch.manual_seed(0)
    x = torch.randn(30, 70, dtype=dtype).t().requires_grad_()
    for function, plain in ((dropout, lambda x: x), (relu_dropout_, torch.relu), (gelu_dropout, nn.functional.gelu)):
        x.grad = None
        y = function(x.contiguous() + 0, 0.25)
        y.sum().backward()
        (expected,) = torch.autograd.grad(plain(x).sum(), x)
        assert x.grad is not None
        is_kept = y != 0
        assert_dropped(y[plain(x) != 0], rate=0.25, what=str(function))
        torch.testing.assert_close(y[is_kept], (plain(x) / 0.75)[is_kept])
        torch.testing.assert_close(x.grad, torch.where(is_kept, expected / 0.75, 0).to(dtype))
        assert torch.equal(function(x.contiguous() + 0, 0.0), plain(x.contiguous()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [dropout, relu_dropout_])
def test_half_precision_drops_what_fp32_drops_and_rounds_once(function: Any, dtype: torch.dtype) -> None:
    found = []
    given, d_y = torch.randn(2, PIECE + 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    for wide in (False, True):
        x = (given.float() if wide else given).requires_grad_()
        torch.manual_seed(0)
        y = function(x + 0, RATE)
        (d_x,) = torch.autograd.grad(y, x, d_y.to(x.dtype))
        found.append((y.to(dtype), d_x.to(dtype)))
    for half, rounded in zip(*found, strict=True):
        assert torch.equal(half, rounded)


def test_blocks_that_are_computed_again_drop_the_same_numbers() -> None:
    tokens_BT = random_tokens(2, 8)
    gradients = []
    for recompute_every in (0, 1):
        model = tiny_model(dropout=RATE).train()
        model.recompute_every = recompute_every
        torch.manual_seed(1)
        model(tokens_BT, model.empty_memory(num_lanes=2, memory_len=4))[0].square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(gradients[0]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
