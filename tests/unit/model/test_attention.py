"""Relative attention is what the paper's equations say, and its gradients are those of what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.naive import naive_attention, naive_encoding
from txl_dist.model.memory import EMPTY, Memory, visible_keys
from txl_dist.model.relative_attention import distance_encoding, relative_attention

B, N, H, D = 2, 2, 3, 8

CASES: dict[str, dict[str, Any]] = {
    "no_memory": {"memory": [[], []], "documents": [[0] * 5] * 2},
    "full_memory": {"memory": [[0] * 4] * 2, "documents": [[0] * 5] * 2},
    "memory_longer_than_segment": {"memory": [[0] * 7] * 2, "documents": [[0] * 3] * 2},
    "one_token": {"memory": [[0] * 6] * 2, "documents": [[0]] * 2},
    "empty_memory": {"memory": [[EMPTY] * 4] * 2, "documents": [[0] * 5] * 2},
    "partially_empty_memory": {"memory": [[EMPTY, EMPTY, 0, 0], [EMPTY, 0, 0, 0]], "documents": [[0] * 5] * 2},
    "documents": {"memory": [[3, 3, 4, 4], [EMPTY, 7, 7, 7]], "documents": [[4, 4, 5, 5, 6], [7, 7, 7, 8, 8]]},
    "same_length": {"memory": [[0] * 4] * 2, "documents": [[0] * 5] * 2, "same_length": True},
    "same_length_partially_empty": {
        "memory": [[EMPTY, EMPTY, EMPTY, 0], [EMPTY] * 4],
        "documents": [[0] * 5] * 2,
        "same_length": True,
    },
    "clamp_len": {"memory": [[0] * 4] * 2, "documents": [[0] * 5] * 2, "clamp_len": 3},
    "everything": {
        "memory": [[EMPTY, 1, 1, 1], [2, 2, 3, 3]],
        "documents": [[1, 1, 1, 2, 2], [3, 4, 4, 4, 4]],
        "same_length": True,
        "clamp_len": 2,
    },
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def visibility(memory: list[list[int]], documents: list[list[int]], *, same_length: bool = False) -> Tensor:
    document_BM = torch.tensor(memory, dtype=torch.int64)
    return visible_keys(
        Memory(torch.zeros(1, *document_BM.shape, D), document_BM), torch.tensor(documents), same_length=same_length
    )


@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_four_terms_of_the_paper(name: str) -> None:
    case = CASES[name]
    memory, documents = case["memory"], case["documents"]
    same_length, clamp_len = case.get("same_length", False), case.get("clamp_len", 0)
    T, K = len(documents[0]), len(memory[0]) + len(documents[0])
    query, key, value = draw(B, T, N, H, seed=1), draw(B, K, N, H, seed=2), draw(B, K, N, H, seed=3)
    weight_NHD, u, v = draw(N, H, D, seed=4), draw(N, H, seed=5), draw(N, H, seed=6)
    expected = naive_attention(
        query,
        key,
        value,
        distance_weight_NHD=weight_NHD,
        content_bias_NH=u,
        position_bias_NH=v,
        memory_documents_BM=memory,
        documents_BT=documents,
        same_length=same_length,
        clamp_len=clamp_len,
    )
    encoding_KD = distance_encoding(K, width=D, clamp_len=clamp_len, like=query)
    ours = relative_attention(
        query,
        key,
        value,
        distance_KNH=torch.einsum("nhd,kd->knh", weight_NHD, encoding_KD),
        content_bias_NH=u,
        position_bias_NH=v,
        visible_BTK=visibility(memory, documents, same_length=same_length),
    )
    assert ours.shape == (B, T, N, H)
    assert (ours - expected).abs().max() <= 1e-10


@pytest.mark.parametrize(
    ("memory", "documents"),
    [
        ([[], []], [[0, 0], [0, 0]]),
        ([[0, 0], [0, 0]], [[0, 0], [0, 0]]),
        ([[EMPTY, 0], [1, 2]], [[0, 0], [2, 3]]),
    ],
    ids=["no_memory", "full_memory", "masked"],
)
def test_gradients_are_those_of_what_is_computed(memory: list[list[int]], documents: list[list[int]]) -> None:
    K = len(memory[0]) + 2
    visible_BTK = visibility(memory, documents)
    inputs = [
        draw(*shape, seed=seed).requires_grad_()
        for seed, shape in enumerate([(2, 2, 2, 2), (2, K, 2, 2), (2, K, 2, 2), (K, 2, 2), (2, 2), (2, 2)])
    ]

    def attend(query: Tensor, key: Tensor, value: Tensor, distance: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return relative_attention(
            query,
            key,
            value,
            distance_KNH=distance,
            content_bias_NH=u,
            position_bias_NH=v,
            visible_BTK=visible_BTK,
        )

    assert torch.autograd.gradcheck(attend, inputs)


def test_what_a_query_may_not_see_gets_no_gradient() -> None:
    key = draw(1, 5, N, H, seed=0).requires_grad_()
    value = draw(1, 5, N, H, seed=1).requires_grad_()
    visible_BTK = visibility([[EMPTY, EMPTY, 0]], [[0, 1]])
    context = relative_attention(
        draw(1, 2, N, H, seed=2),
        key,
        value,
        distance_KNH=draw(5, N, H, seed=3),
        content_bias_NH=draw(N, H, seed=4),
        position_bias_NH=draw(N, H, seed=5),
        visible_BTK=visible_BTK,
    )
    context[:, 0].square().sum().backward()
    for tensor in (key, value):
        assert tensor.grad is not None
        seen = tensor.grad.abs().sum((0, 2, 3)) > 0
        assert seen.tolist() == [False, False, True, True, False]


def test_encodings_are_sinusoids_of_descending_distances() -> None:
    for width in (8, 7):
        ours = distance_encoding(2000, width=width, clamp_len=0, like=torch.zeros(1, dtype=torch.float64))
        expected = torch.stack([naive_encoding(distance, width=width) for distance in range(1999, -1, -1)])
        assert (ours - expected).abs().max() <= 1e-10


def test_clamped_distances_share_one_encoding() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    clamped = distance_encoding(50, width=8, clamp_len=10, like=like)
    plain = distance_encoding(50, width=8, clamp_len=0, like=like)
    assert torch.equal(clamped[-11:], plain[-11:])
    assert torch.equal(clamped[:-11], plain[-11].expand(39, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_encodings_are_built_in_fp32_and_cast_last(dtype: torch.dtype) -> None:
    full = distance_encoding(2000, width=64, clamp_len=0, like=torch.zeros(1))
    half = distance_encoding(2000, width=64, clamp_len=0, like=torch.zeros(1, dtype=dtype))
    assert full.dtype == torch.float32
    assert len(full.unique(dim=0)) == 2000
    assert half.dtype == dtype
    assert torch.equal(half, full.to(dtype))
    # Distances made in bf16 would collapse: 1,024 of them into 513.
    assert len(half.unique(dim=0)) == 2000
