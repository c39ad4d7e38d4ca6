"""On a GPU the kernels of relative attention compute the same as the plain function in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.helpers.adam_steps import errors_of_adam
from txl_dist.model import fused_softmax
from txl_dist.model.activation import ActivatedLinear
from txl_dist.model.kernels import attention_launch
from txl_dist.model.kernels.attention_launch import triton_relative_attention, unsupported_reason
from txl_dist.model.memory import EMPTY, AttentionMask
from txl_dist.model.relative_attention import Terms, relative_attention
from txl_dist.model.residual_norm import Drop, ResidualLayerNorm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of norms: a few roundings to 8 and to 11 bits, one after the other."""


class Sizes(NamedTuple):
    T: int
    M: int
    N: int
    H: int
    B: int = 2


SIZES = {
    "enwik8_base": Sizes(512, 512, 8, 64),
    "enwik8_large": Sizes(768, 768, 8, 128),
    "wt103_base": Sizes(150, 150, 10, 41, B=5),
    "nvidia_base": Sizes(192, 192, 8, 64, B=5),
    "nvidia_large": Sizes(384, 384, 16, 64),
    "evaluation": Sizes(64, 640, 8, 64),
    "one_token": Sizes(1, 511, 8, 64),
    "odd": Sizes(37, 23, 3, 80, B=3),
}


def leaves_and_gradient(sizes: Sizes, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """(query, key_value, distance, u, v) and the gradient of the context, rounded to the type."""
    T, M, N, H, B = sizes
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(B, T, N, H), (B, M + T, 2, N, H), (M + T, N, H), (N, H), (N, H), (B, T, N, H)]
    *leaves, gradient = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]
    return leaves, gradient


def visibility(sizes: Sizes, *, oldest: int | None = None) -> AttentionMask:
    """With document borders, and a memory that is partly empty in the first lane."""
    generator = torch.Generator().manual_seed(1)
    documents = (torch.rand(sizes.B, sizes.M + sizes.T, generator=generator) < 0.01).long().cumsum(1)
    documents[0, : sizes.M // 2] = EMPTY
    documents = documents.cuda()
    return AttentionMask(documents[:, sizes.M :], documents, oldest)


def outcome(
    attend: Callable[..., Tensor],
    leaves: list[Tensor],
    gradient: Tensor,
    *,
    visible: AttentionMask,
    dropout: float = 0.0,
) -> list[Tensor]:
    """Context and the gradients of the leaves."""
    query, key_value, distance, content_bias, position_bias = copies = [x.clone().requires_grad_() for x in leaves]
    key, value = key_value.unbind(2)
    context = attend(
        Terms(query, key, value, distance, content_bias, position_bias),
        visible=visible,
        dropout=dropout,
    )
    return [context.detach(), *torch.autograd.grad(context, copies, gradient)]


@pytest.mark.parametrize("oldest", [None, 1])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_context_and_all_gradients_are_those_of_the_twin(name: str, dtype: torch.dtype, oldest: int | None) -> None:
    leaves, gradient = leaves_and_gradient(SIZES[name], dtype)
    assert unsupported_reason(leaves[0], has_position_bias=True) is None
    visible = visibility(SIZES[name], oldest=oldest)
    measured = outcome(triton_relative_attention, leaves, gradient, visible=visible)
    exact = outcome(relative_attention, [x.double() for x in leaves], gradient.double(), visible=visible)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(measured, exact, strict=True)]
    assert [error for error in errors if not error < TOLERANCE[dtype]] == []


@pytest.mark.parametrize("dropout", [0.0, 0.15])
def test_the_same_seed_gives_the_same_bits(dropout: float) -> None:
    leaves, gradient = leaves_and_gradient(SIZES["nvidia_base"], torch.bfloat16)
    visible = visibility(SIZES["nvidia_base"])
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(outcome(triton_relative_attention, leaves, gradient, visible=visible, dropout=dropout))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_chunks_do_not_change_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, gradient = leaves_and_gradient(SIZES["nvidia_base"], torch.float16)
    visible = visibility(SIZES["nvidia_base"])
    whole = outcome(triton_relative_attention, leaves, gradient, visible=visible)
    monkeypatch.setattr(attention_launch, "SCORE_BUFFER_BYTES", 2 * 192 * 384 * 3)
    chunked = outcome(triton_relative_attention, leaves, gradient, visible=visible)
    for a, b in zip(whole, chunked, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * b.abs().max().item())


@pytest.mark.parametrize("name", ["enwik8_base", "wt103_base"])
def test_distance_scores_that_are_kept_change_no_bit(name: str) -> None:
    leaves, gradient = leaves_and_gradient(SIZES[name], torch.bfloat16)
    visible = visibility(SIZES[name])
    runs = []
    for attend in (triton_relative_attention, partial(triton_relative_attention, keeps_scores=True)):
        torch.manual_seed(3)
        runs.append(outcome(attend, leaves, gradient, visible=visible, dropout=0.1))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_dropout_drops_at_its_rate_and_scales_up_what_it_keeps() -> None:
    sizes = SIZES["enwik8_base"]
    leaves, gradient = leaves_and_gradient(sizes, torch.bfloat16)
    query, key_value, distance, content_bias, position_bias = (torch.zeros_like(x) for x in leaves)
    ones = torch.ones_like(key_value)
    documents = torch.zeros(sizes.B, sizes.M + sizes.T, dtype=torch.int64, device="cuda")
    inputs = [query, ones, distance, content_bias, position_bias]
    visible = AttentionMask(documents[:, sizes.M :], documents, None)
    context, *_ = outcome(triton_relative_attention, inputs, gradient, visible=visible, dropout=0.15)
    # Every probability is 1 / (number of keys): a context is the part kept over 0.85, of over 512 keys.
    assert context.float().mean().item() == pytest.approx(1.0, abs=2e-3)
    assert context.float()[..., 0].std().item() == pytest.approx((0.15 / 0.85 / 768) ** 0.5, rel=0.3)


def test_nothing_waits_for_the_device() -> None:
    leaves, gradient = leaves_and_gradient(SIZES["nvidia_base"], torch.bfloat16)
    visible = visibility(SIZES["nvidia_base"])
    outcome(triton_relative_attention, leaves, gradient, visible=visible, dropout=0.1)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome(triton_relative_attention, leaves, gradient, visible=visible, dropout=0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("num_columns", "incoming"), [(204, 3.0), (20_003, 1.0), (67_735, 0.4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_weighted_loss_and_its_gradients_are_those_of_autograd(
    dtype: torch.dtype, num_columns: int, incoming: float
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1_000, 64), (num_columns, 64), (num_columns,)]
    leaves = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]
    targets = torch.randint(num_columns, (1_000,), generator=generator, device="cuda")
    weight = torch.rand(1_000, generator=generator, device="cuda") / 1_000
    hidden, table, bias = (leaf.requires_grad_() for leaf in leaves)
    assert fused_softmax.runs_kernel(hidden)
    cluster = fused_softmax.Cluster(None, targets, (fused_softmax.Columns(table, bias, 0, num_columns),), None)
    loss = fused_softmax.fused_linear_cross_entropy(hidden, [cluster], weight_S=weight)
    found = torch.autograd.grad(loss * incoming, leaves)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = exact_leaves[0] @ exact_leaves[1].t() + exact_leaves[2]
    exact = (torch.nn.functional.cross_entropy(logits, targets, reduction="none") * weight).sum()
    tolerance = TOLERANCE.get(dtype, 1e-4)
    assert loss.item() == pytest.approx(exact.item(), rel=tolerance)
    for a, b in zip(found, torch.autograd.grad(exact * incoming, exact_leaves), strict=True):
        assert (a.double() - b).norm() < tolerance * b.norm()


@pytest.mark.parametrize("name", ["enwik8_base", "wt103_base"])
def test_products_that_lie_apart_are_attended_to_as_one(name: str) -> None:
    leaves, gradient = leaves_and_gradient(SIZES[name], torch.bfloat16)
    visible = visibility(SIZES[name])

    def of_products(terms: Terms, *, visible: AttentionMask, dropout: float) -> Tensor:
        query, key, value, distance, content_bias, position_bias, *_ = terms
        assert distance is not None
        assert content_bias is not None
        assert position_bias is not None
        M = visible.memory_len
        return attention_launch.triton_attention_of_products(
            torch.stack([query, key[:, M:], value[:, M:]], 2),
            torch.stack([key[:, :M], value[:, :M]], 2),
            distance_KNH=distance,
            content_bias_NH=content_bias,
            position_bias_NH=position_bias,
            visible=visible,
            dropout=dropout,
        )

    runs = []
    for attend in (triton_relative_attention, of_products):
        torch.manual_seed(3)
        runs.append(outcome(attend, leaves, gradient, visible=visible, dropout=0.1))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("rate", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [410, 1024])
def test_residual_and_norm_are_those_of_the_twin_and_the_same_again(
    width: int, dtype: torch.dtype, rate: float
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = [torch.randn(3_001, width, generator=generator, device="cuda").to(dtype) for _ in range(4)]
    norm = ResidualLayerNorm(width).cuda().to(dtype)
    torch.nn.init.normal_(norm.weight, 1.0)
    torch.nn.init.normal_(norm.bias)

    def found(drop: Drop, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in drawn[:2]]
        module = copy.deepcopy(norm).to(dtype)
        results = module(*leaves, drop)
        inputs = [*leaves, *module.parameters()]
        return [*results, *torch.autograd.grad(results, inputs, [x.to(dtype) for x in drawn[2:]])]

    seed = torch.tensor([5], device="cuda") if rate else None
    once, again = (found(Drop(rate, True, seed), dtype) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    if rate:
        kept = (once[0] != drawn[0]).float().mean().item()  # where dropout sets to 0, the sum is the residual
        assert kept == pytest.approx(1 - rate, abs=0.02)
        return
    for a, b in zip(once, found(Drop(0.0), torch.float64), strict=True):
        assert (a.double() - b).norm() < TOLERANCE[dtype] * b.norm()


@pytest.mark.parametrize("rate", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_bias_and_activation_are_those_of_the_twin_and_the_same_again(
    name: str, dtype: torch.dtype, rate: float
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, gradient = (torch.randn(1_001, columns, generator=generator, device="cuda").to(dtype) for columns in (64, 2_100))
    linear = ActivatedLinear(64, 2_100, activation=name).cuda().to(dtype)

    def found(drop: Drop, dtype: torch.dtype) -> list[Tensor]:
        module, leaf = copy.deepcopy(linear).to(dtype), x.to(dtype).requires_grad_()
        result = module(leaf, drop)
        return [result, *torch.autograd.grad(result, [leaf, *module.parameters()], gradient.to(dtype))]

    seed = torch.tensor([5], device="cuda") if rate else None
    once, again = (found(Drop(rate, True, seed), dtype) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    exact = found(Drop(0.0), torch.float64)
    if rate:
        of_kept = (once[0] != 0)[exact[0] > 0.01].float().mean().item()
        assert of_kept == pytest.approx(1 - rate, abs=0.01)
        return
    for a, b in zip(once, exact, strict=True):
        assert (a.double() - b).norm() < 2 * TOLERANCE[dtype] * b.norm()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_adams_steps_are_those_of_torch_in_fp64(dtype: torch.dtype, kind: type[torch.optim.Adam]) -> None:
    """The gradients have this type. The model's weights are the fp32 weights rounded to bf16."""
    for name, error in errors_of_adam(kind, device="cuda", dtype=dtype).items():
        assert error < (5e-3 if name == "weights" else 1e-5), (name, error)
