"""Attention equals the papers' equations, and its gradients are those of its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.models import POSITIONS, tiny_section
from tests.helpers.naive import learned_score, naive_attention, plain_score, relative_score
from txl_dist.model.attention import Attention, _joint, joint_linear
from txl_dist.model.block import Block, ResidualMix
from txl_dist.model.memory import EMPTY, AttentionMask, Memory, build_mask
from txl_dist.model.positions import attention_biases, build_attention, distance_encoding
from txl_dist.model.relative_attention import Terms, relative_attention

B, N, H, D = 2, 2, 3, 8

CASES: dict[str, dict[str, Any]] = {
    "no_memory": {"memory": [[], []], "documents": [[0] * 5] * 2},
    "full_memory": {"memory": [[0] * 4] * 2, "documents": [[0] * 5] * 2},
    "memory_longer_than_segment": {"memory": [[0] * 7] * 2, "documents": [[0] * 3] * 2},
    "one_token": {"memory": [[0] * 6] * 2, "documents": [[0]] * 2},
    "empty_memory": {"memory": [[EMPTY] * 4] * 2, "documents": [[0] * 5] * 2},
    "partially_empty_memory": {"memory": [[EMPTY, EMPTY, 0, 0], [EMPTY, 0, 0, 0]], "documents": [[0] * 5] * 2},
    "documents": {"memory": [[3, 3, 4, 4], [EMPTY, 7, 7, 7]], "documents": [[4, 4, 5, 5, 6], [7, 7, 7, 8, 8]]},
    "window": {"memory": [[0] * 4] * 2, "documents": [[0] * 5] * 2, "same_length": "memory"},
    "window_and_self": {"memory": [[0] * 4] * 2, "documents": [[0] * 5] * 2, "same_length": "memory_and_self"},
    "window_partially_empty": {
        "memory": [[EMPTY, EMPTY, EMPTY, 0], [EMPTY] * 4],
        "documents": [[0] * 5] * 2,
        "same_length": "memory",
    },
    "clamp_len": {"memory": [[0] * 4] * 2, "documents": [[0] * 5] * 2, "clamp_len": 3},
    "everything": {
        "memory": [[EMPTY, 1, 1, 1], [2, 2, 3, 3]],
        "documents": [[1, 1, 1, 2, 2], [3, 4, 4, 4, 4]],
        "same_length": "memory",
        "clamp_len": 2,
    },
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def visibility(memory: list[list[int]], documents: list[list[int]], *, same_length: Any = "off") -> AttentionMask:
    document_BM = torch.tensor(memory, dtype=torch.int64)
    return build_mask(
        Memory((torch.zeros(*document_BM.shape, D),), document_BM), torch.tensor(documents), same_length=same_length
    )


def naive_contexts(case: dict[str, Any], query: Tensor, key: Tensor, value: Tensor, *, score_N: list[Any]) -> Tensor:
    """context_BTNH of the naive implementation."""
    contexts = [
        naive_attention(
            query[b].tolist(),
            key[b].tolist(),
            value[b].tolist(),
            score_N=score_N,
            memory_documents=case["memory"][b],
            documents=case["documents"][b],
            same_length=case.get("same_length", "off"),
        )
        for b in range(B)
    ]
    return torch.tensor(contexts, dtype=torch.float64)


def drawn_inputs(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, AttentionMask]:
    """(query_BTNH, key_BKNH, value_BKNH, visible)."""
    memory, documents = case["memory"], case["documents"]
    T, K = len(documents[0]), len(memory[0]) + len(documents[0])
    visible = visibility(memory, documents, same_length=case.get("same_length", "off"))
    return draw(B, T, N, H, seed=1), draw(B, K, N, H, seed=2), draw(B, K, N, H, seed=3), visible


@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_four_terms_of_the_paper(name: str) -> None:
    case = CASES[name]
    query, key, value, visible = drawn_inputs(case)
    weight_NHD, u, v, clamp_len = (
        draw(N, H, D, seed=4),
        draw(N, H, seed=5),
        draw(N, H, seed=6),
        case.get("clamp_len", 0),
    )
    score_N = [
        relative_score(weight_NHD[n].tolist(), u[n].tolist(), v[n].tolist(), clamp_len=clamp_len) for n in range(N)
    ]
    encoding_KD = distance_encoding(key.shape[1], width=D, clamp_len=clamp_len, like=query)
    ours = relative_attention(
        Terms(query, key, value, torch.einsum("nhd,kd->knh", weight_NHD, encoding_KD), u, v), visible=visible
    )
    assert ours.shape == query.shape
    assert (ours - naive_contexts(case, query, key, value, score_N=score_N)).abs().max() <= 1e-10


@pytest.mark.parametrize("name", CASES)
def test_learned_distances_take_the_place_of_terms_b_and_d(name: str) -> None:
    case = CASES[name]
    query, key, value, visible = drawn_inputs(case)
    num_keys = key.shape[1]
    table_KNH, bias_KN, u = draw(num_keys, N, H, seed=4), draw(num_keys, N, seed=6), draw(N, H, seed=5)
    score_N = [learned_score(table_KNH[:, n].tolist(), bias_KN[:, n].tolist(), u[n].tolist()) for n in range(N)]
    ours = relative_attention(
        Terms(query, key, value, table_KNH.flip(0), u, distance_bias_KN=bias_KN.flip(0)), visible=visible
    )
    assert (ours - naive_contexts(case, query, key, value, score_N=score_N)).abs().max() <= 1e-10


@pytest.mark.parametrize("name", CASES)
def test_absolute_attention_is_a_scaled_dot_product(name: str) -> None:
    query, key, value, visible = drawn_inputs(CASES[name])
    attention = build_attention(
        tiny_section(num_heads=N, head_width=H, **POSITIONS["absolute"]), biases=attention_biases(N, H)
    )
    ours = attention.attend(Terms(query, key, value), visible=visible)
    expected = naive_contexts(CASES[name], query, key, value, score_N=[plain_score] * N)
    assert (ours - expected).abs().max() <= 1e-10


def double_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module in fp64, drawn so that none is zero."""
    parameters = list(module.double().parameters())
    for i, parameter in enumerate(parameters):
        parameter.data = draw(*parameter.shape, seed=100 + i) * 0.6
    return parameters


LAYERS: dict[str, dict[str, Any]] = {
    "relative": {},
    "relative_clamped": {"clamp_len": 1},
    "learned": {"positions": "learned_relative", "num_distances": 8},
    "learned_far_distances": {"positions": "learned_relative", "num_distances": 2},
    "learned_clamped": {"positions": "learned_relative", "num_distances": 4, "clamp_len": 1},
    "absolute": {"positions": "absolute"},
}
VISIBILITIES: dict[str, tuple[list[int], list[int], str]] = {
    "no_memory": ([], [0, 0, 0], "off"),
    "memory": ([0, 0], [0, 0, 0], "off"),
    "documents": ([EMPTY, 0], [0, 0, 1], "off"),
    "window": ([0, 0], [0, 0, 0], "memory"),
    "window_and_self": ([EMPTY, 0], [0, 0, 0], "memory_and_self"),
}


@pytest.mark.parametrize("where", VISIBILITIES)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_attention_are_those_of_what_is_computed(name: str, where: str) -> None:
    past, documents, same_length = VISIBILITIES[where]
    section = tiny_section(width=3, head_width=2, value_bias=True, output_bias=True, **LAYERS[name])
    attention: Attention = build_attention(section, biases=attention_biases(section.num_heads, section.head_width))
    parameters, K = double_parameters(attention), len(past) + 3
    visible = visibility([past], [documents], same_length=same_length)
    encoding_KD = distance_encoding(K, width=3, clamp_len=section.clamp_len, like=parameters[0])
    states = [draw(1, 3, 3, seed=1).requires_grad_(), draw(1, K, 3, seed=2).requires_grad_()]

    def attend(hidden_BTD: Tensor, source_BKD: Tensor, encoding_KD: Tensor, *_: Tensor) -> Tensor:
        key, value = attention.project_key_value(source_BKD).unbind(2)
        result: Tensor = attention(
            hidden_BTD,
            key_BKNH=key,
            value_BKNH=value,
            distances=attention.distances(K, encoding_KD=encoding_KD),
            visible=visible,
        )
        return result

    encoding_KD.requires_grad_(section.positions == "relative")
    assert torch.autograd.gradcheck(attend, (*states, encoding_KD, *parameters))  # perturbs the parameters in place


@pytest.mark.parametrize(("activation", "pre_norm"), [("relu", False), ("gelu", True)], ids=["post_norm", "pre_norm"])
@pytest.mark.parametrize("name", POSITIONS)
def test_gradients_of_a_block_are_those_of_what_is_computed(name: str, activation: str, pre_norm: bool) -> None:
    changes = {"width": 3, "head_width": 2, "ff_width": 4, "activation": activation, "pre_norm": pre_norm}
    section = tiny_section(**{**changes, **POSITIONS[name]})
    block = Block(section, biases=attention_biases(section.num_heads, section.head_width))
    parameters = double_parameters(block)
    past = [] if name == "absolute" else [0, 0]
    visible = visibility([past], [[0, 0, 1]])
    encoding_KD = distance_encoding(len(past) + 3, width=3, clamp_len=0, like=parameters[0])
    states = [draw(1, 3, 3, seed=1).requires_grad_(), draw(1, len(past), 3, seed=2).requires_grad_(bool(past))]

    def run(hidden_BTD: Tensor, memory_BMD: Tensor, *_: Tensor) -> Tensor:
        result: Tensor = block(hidden_BTD, memory_BMD, encoding_KD, visible)[0]
        return result

    assert torch.autograd.gradcheck(run, (*states, *parameters))


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("name", POSITIONS)
def test_gradients_of_a_modern_block_are_those_of_what_is_computed(name: str, activation: str) -> None:
    changes = {"width": 3, "head_width": 2, "ff_width": 4, "activation": activation, "pre_norm": True, "norm": "rms"}
    section = tiny_section(**{**changes, "query_key_norm": True, "value_residual": True, **POSITIONS[name]})
    first, block = (
        Block(section, biases=attention_biases(section.num_heads, section.head_width), is_first=i == 0)
        for i in range(2)
    )
    mix = ResidualMix()
    parameters = [*double_parameters(first), *double_parameters(block), *double_parameters(mix)]
    past = [] if name == "absolute" else [0, 0]
    visible = visibility([past], [[0, 0, 1]])
    encoding_KD = distance_encoding(len(past) + 3, width=3, clamp_len=0, like=parameters[0])
    states = [draw(1, 3, 3, seed=1).requires_grad_(), draw(1, len(past), 3, seed=2).requires_grad_(bool(past))]

    def run(hidden_BTD: Tensor, memory_BMD: Tensor, *_: Tensor) -> Tensor:
        between, values = first(hidden_BTD, memory_BMD, encoding_KD, visible)
        result: Tensor = block(mix(between, hidden_BTD), memory_BMD, encoding_KD, visible, values)[0]
        return result

    assert torch.autograd.gradcheck(run, (*states, *parameters))


def test_what_a_query_may_not_see_gets_no_gradient() -> None:
    key = draw(1, 5, N, H, seed=0).requires_grad_()
    value = draw(1, 5, N, H, seed=1).requires_grad_()
    visible = visibility([[EMPTY, EMPTY, 0]], [[0, 1]])
    distance, u, v = draw(5, N, H, seed=3), draw(N, H, seed=4), draw(N, H, seed=5)
    context = relative_attention(Terms(draw(1, 2, N, H, seed=2), key, value, distance, u, v), visible=visible)
    context[:, 0].square().sum().backward()
    for tensor in (key, value):
        assert tensor.grad is not None
        seen = tensor.grad.abs().sum((0, 2, 3)) > 0
        assert seen.tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("is_flat", [False, True], ids=["apart", "flat"])
def test_one_product_of_two_matrices_is_both_and_copies_none_that_lie_together(is_flat: bool) -> None:
    flat = torch.randn(10 * 6, dtype=torch.float64, requires_grad=True)
    first, second = (part.view(-1, 6) for part in flat.split([4 * 6, 6 * 6]))
    if not is_flat:
        second = second.clone()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    past = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 3, 10, dtype=torch.float64), torch.randn(2, 4, 6, dtype=torch.float64)
    found = [
        torch.autograd.grad(products, (x, past, flat), weights)
        for products in (
            joint_linear(x, past, first, second),
            (F.linear(x, torch.cat([first, second])), F.linear(past, second)),
        )
    ]
    torch.testing.assert_close(*found, rtol=1e-14, atol=1e-14)
    assert (_joint(first, second).data_ptr() == flat.data_ptr()) is is_flat


@pytest.mark.parametrize("value_bias", [False, True])
def test_queries_keys_and_values_of_a_segment_are_those_of_their_own_products(value_bias: bool) -> None:
    section = tiny_section(value_bias=value_bias)
    attention = build_attention(section, biases=attention_biases(section.num_heads, section.head_width)).double()
    for parameter in attention.parameters():
        parameter.data = torch.randn_like(parameter)
    hidden, past = torch.randn(2, 2, 3, section.width, dtype=torch.float64)
    apart = torch.cat([attention.project_query(hidden)[:, :, None], attention.project_key_value(hidden)], 2)
    segment, of_past = attention.project_segment(hidden, past)
    torch.testing.assert_close(segment, apart, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(of_past, attention.project_key_value(past), rtol=1e-13, atol=1e-13)
    assert not attention.supports_fused_qkv(hidden)  # on a CPU
