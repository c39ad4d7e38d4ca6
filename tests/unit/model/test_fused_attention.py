"""The fused function equals the plain equation with the right gradients, and computes no more than necessary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.waits import Waits
from txl_dist.model import fused_attention
from txl_dist.model.fused_attention import fused_relative_attention
from txl_dist.model.memory import EMPTY, AttentionMask
from txl_dist.model.relative_attention import Terms, relative_attention


class Case(NamedTuple):
    """A small attention."""

    B: int = 2
    T: int = 5
    M: int = 3
    N: int = 2
    H: int = 4
    oldest: int | None = None
    documents: bool = False
    learned: bool = False


CASES = [
    Case(),
    Case(T=7, M=0),
    Case(T=1, M=6),
    Case(B=1, T=1, M=0, N=1, H=1),
    Case(B=3, T=4, M=9, N=3, H=5),
    Case(M=6, oldest=1),
    Case(M=6, oldest=0),
    Case(documents=True),
    Case(learned=True),
    Case(T=7, M=5, N=3, documents=True, learned=True, oldest=0),
]


@pytest.fixture(autouse=True)
def small_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, the last of them shorter, and several groups of heads, also where little is attended."""
    monkeypatch.setattr(fused_attention, "CPU", fused_attention._Tile(block_len=3, scores_bytes=1000))


def inputs_of(case: Case, *, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """By the parameters' names; the same numbers in fp32 and in fp64."""
    B, T, M, N, H, *_ = case
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "query_BTNH": (B, T, N, H),
        "key_BKNH": (B, M + T, N, H),
        "value_BKNH": (B, M + T, N, H),
        "distance_KNH": (M + T, N, H),
        "content_bias_NH": (N, H),
    }
    shapes |= {"distance_bias_KN": (M + T, N)} if case.learned else {"position_bias_NH": (N, H)}
    return {name: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for name, shape in shapes.items()}


def visible_of(case: Case) -> AttentionMask:
    document_BK = torch.zeros(case.B, case.M + case.T, dtype=torch.int64)
    if case.documents:  # borders in memory and segment, other ones in each lane; the memory's beginning is empty
        document_BK += (torch.arange(case.M + case.T) + torch.arange(case.B)[:, None]) // 3
        document_BK[:, : case.M // 2] = EMPTY
    return AttentionMask(document_BK[:, case.M :], document_BK, case.oldest)


def results(
    attend: Callable[..., Tensor], case: Case, *, dtype: torch.dtype = torch.float64, dropout: float = 0.0
) -> dict[str, Tensor]:
    """The context and the gradient of every input, of a sum weighted at random."""
    inputs = inputs_of(case, dtype=dtype)
    context = attend(Terms(**inputs), visible=visible_of(case), dropout=dropout)
    weights = torch.randn(context.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    gradients = torch.autograd.grad(context, list(inputs.values()), weights)
    return {"context": context.detach(), **dict(zip(inputs, gradients, strict=True))}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], *, tolerance: float) -> None:
    for name, expected in theirs.items():
        assert ours[name].shape == expected.shape
        scale = expected.abs().max().clamp(min=1).item()
        assert (ours[name] - expected).abs().max().item() <= tolerance * scale, name


@pytest.mark.parametrize("case", CASES)
def test_the_gradients_are_those_of_the_function(case: Case) -> None:
    inputs = inputs_of(case)

    def attend(*values: Tensor) -> Tensor:
        return fused_relative_attention(Terms(**dict(zip(inputs, values, strict=True))), visible=visible_of(case))

    assert torch.autograd.gradcheck(attend, tuple(inputs.values()), fast_mode=True)


@pytest.mark.parametrize("case", CASES)
def test_the_plain_equation_gives_the_same(case: Case) -> None:
    assert_same(results(fused_relative_attention, case), results(relative_attention, case), tolerance=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Case,
        B=st.integers(1, 3),
        T=st.integers(1, 90),
        M=st.integers(0, 80),
        N=st.integers(1, 3),
        H=st.integers(1, 9),
        oldest=st.sampled_from([None, 0]),
        documents=st.booleans(),
        learned=st.booleans(),
    ),
    st.integers(1, 64),
    st.integers(1, 2**20),
)
def test_any_shape_in_blocks_of_any_length_gives_what_the_plain_equation_gives(
    case: Case, block_len: int, scores_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_attention, "CPU", fused_attention._Tile(block_len, scores_bytes))
        ours, exact = (results(f, case) for f in (fused_relative_attention, relative_attention))
        assert_same(ours, exact, tolerance=1e-12)
        ours, plain = (results(f, case, dtype=torch.float32) for f in (fused_relative_attention, relative_attention))
    # A gradient that is exactly zero for a query with a single key is here the sum of as many rounded differences.
    rounding = 8 * torch.finfo(torch.float32).eps * math.sqrt(case.B * (case.M + case.T))
    for name, expected in exact.items():
        error, plain_error = ((values[name] - expected).abs().max().item() for values in (ours, plain))
        assert error <= 2 * plain_error + rounding * expected.abs().max().clamp(min=1).item(), name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_half_precision_is_as_exact_as_its_type(dtype: torch.dtype, tolerance: float) -> None:
    case = Case(documents=True)
    ours = results(fused_relative_attention, case, dtype=dtype)
    assert all(value.dtype == dtype for value in ours.values())
    exact = results(relative_attention, case)
    assert_same({name: value.double() for name, value in ours.items()}, exact, tolerance=tolerance)


def test_the_tile_of_a_gpu_gives_what_the_plain_equation_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(T=2 * fused_attention.GPU.block_len + 44, M=70, N=3, H=8, documents=True, learned=True)
    monkeypatch.setattr(fused_attention, "CPU", fused_attention.GPU)
    assert_same(results(fused_relative_attention, case), results(relative_attention, case), tolerance=1e-12)


def test_inputs_without_gradient_and_evaluation_change_nothing() -> None:
    inputs, visible = inputs_of(Case()), visible_of(Case())
    full = fused_relative_attention(Terms(**inputs), visible=visible)
    with torch.no_grad():
        assert torch.equal(fused_relative_attention(Terms(**inputs), visible=visible), full)
    expected = torch.autograd.grad(full.sum(), inputs["value_BKNH"])[0]
    only = {name: value.detach() for name, value in inputs.items()}
    only["value_BKNH"].requires_grad_()
    fused_relative_attention(Terms(**only), visible=visible).sum().backward()
    assert torch.equal(only["value_BKNH"].grad, expected)


def test_evaluation_keeps_nothing_of_the_scores() -> None:
    inputs, visible = inputs_of(Case()), visible_of(Case())
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        with torch.no_grad():
            fused_relative_attention(Terms(**inputs), visible=visible)
        assert saved == []
        fused_relative_attention(Terms(**inputs), visible=visible)
    assert saved


def test_the_future_and_other_documents_give_and_get_nothing_whatever_stands_there() -> None:
    case = Case(documents=True)
    inputs, visible = inputs_of(case), visible_of(case)
    seen_BTK = visible.mask()
    context = fused_relative_attention(Terms(**inputs), visible=visible)
    for query in range(case.T):
        gradient = torch.autograd.grad(context[:, query].sum(), inputs["value_BKNH"], retain_graph=True)[0]
        assert torch.equal(gradient.abs().sum((2, 3)) > 0, seen_BTK[:, query])


IDENTITY = Case(B=2, T=6, M=4, N=3, H=10)
"""Heads as wide as there are keys: a value can be a row of the identity, and a context then holds the weights."""


def dropped_weights(case: Case, *, rate: float, seed: int) -> Tensor:
    """weights_BTNK after dropout."""
    inputs = inputs_of(case)
    inputs["value_BKNH"] = torch.eye(case.H, dtype=torch.float64)[None, :, None].expand(case.B, -1, case.N, -1)
    torch.manual_seed(seed)
    return fused_relative_attention(Terms(**inputs), visible=visible_of(case), dropout=rate).detach()


def test_dropout_drops_at_its_rate_and_scales_what_it_keeps() -> None:
    case = Case(B=8, T=40, M=24, N=8, H=64)
    all_BTNK, some_BTNK = (dropped_weights(case, rate=rate, seed=3) for rate in (0.0, 0.3))
    is_seen = visible_of(case).mask()[:, :, None].expand_as(all_BTNK)
    is_kept = some_BTNK > 0
    share = is_kept[is_seen].double().mean().item()
    deviation = (0.3 * 0.7 / is_seen.sum().item()) ** 0.5
    assert abs(share - 0.7) < 5 * deviation
    torch.testing.assert_close(some_BTNK[is_kept], all_BTNK[is_kept] / 0.7)
    assert not torch.equal(some_BTNK, dropped_weights(case, rate=0.3, seed=4))


def test_the_gradient_under_dropout_is_that_of_the_equation_with_the_same_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_NBTK = (dropped_weights(IDENTITY, rate=0.4, seed=5) > 0).permute(2, 0, 1, 3)
    torch.manual_seed(5)
    ours = results(fused_relative_attention, IDENTITY, dropout=0.4)
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, rate, training: x * keep_NBTK / (1 - rate))
    assert_same(ours, results(relative_attention, IDENTITY, dropout=0.4), tolerance=1e-12)


def test_the_same_seed_drops_the_same_and_a_recomputed_pass_too() -> None:
    inputs, visible = inputs_of(Case()), visible_of(Case())
    names = list(inputs)

    def attend(*values: Tensor) -> Tensor:
        return fused_relative_attention(Terms(**dict(zip(names, values, strict=True))), visible=visible, dropout=0.5)

    gradients = []
    for run in (attend, lambda *values: checkpoint(attend, *values, use_reentrant=False)):
        torch.manual_seed(6)
        context = run(*inputs.values())
        gradients.append((context, *torch.autograd.grad(context.square().sum(), list(inputs.values()))))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_nothing_waits_for_the_device(case: Case) -> None:
    with Waits() as waits:
        results(fused_relative_attention, case, dropout=0.1)
    assert waits.num_operations > 10
    assert waits.places == []


@pytest.mark.parametrize(("T", "M"), [(128, 128), (512, 512), (64, 640), (192, 192)])
def test_few_masked_pairs_are_computed(T: int, M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine products over pairs of a query and a key: three forward, six backward."""
    monkeypatch.undo()
    B, N, H = 2, 2, 16
    with torch.device("meta"):
        case = Case(B=B, T=T, M=M, N=N, H=H)
        inputs = {name: torch.empty(value.shape, requires_grad=True) for name, value in inputs_of(case).items()}
        visible = AttentionMask(torch.zeros(B, T, dtype=torch.int64), torch.zeros(B, M + T, dtype=torch.int64), None)
        with FlopCounterMode(display=False) as counter:
            fused_relative_attention(Terms(**inputs), visible=visible).sum().backward()
    needed = 9 * 2 * B * N * H * T * (M + (T + 1) / 2)
    assert needed < counter.get_total_flops() <= 1.17 * needed
