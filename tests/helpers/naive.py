"""Relative attention written down from the paper's equations (Dai et al. 2019, section 3.3), number by number.

Nothing here is fast, and nothing is shared with the package: visibility, distances, encodings and scores are derived
again from the text, so that an error in one of them cannot hide in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def naive_encoding(distance: int, *, width: int) -> Tensor:
    """R of one distance: sines of all frequencies, then cosines."""
    angles = [distance / 10000.0 ** (2 * f / width) for f in range((width + 1) // 2)]
    values = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
    return torch.tensor(values[:width], dtype=torch.float64)


def naive_visible(
    query: int, key: int, *, memory_documents: Sequence[int], documents: Sequence[int], same_length: bool
) -> bool:
    """Whether a query of the segment may see a key, counted over memory (negative document: empty) and segment."""
    memory_len = len(memory_documents)
    position = memory_len + query
    if key > position:
        return False
    if same_length and position - key >= memory_len:
        return False
    key_document = [*memory_documents, *documents][key]
    return key_document >= 0 and key_document == documents[query]


def naive_attention(
    query_BTNH: Tensor,
    key_BKNH: Tensor,
    value_BKNH: Tensor,
    *,
    distance_weight_NHD: Tensor,
    content_bias_NH: Tensor,
    position_bias_NH: Tensor,
    memory_documents_BM: Sequence[Sequence[int]],
    documents_BT: Sequence[Sequence[int]],
    same_length: bool = False,
    clamp_len: int = 0,
) -> Tensor:
    """context_BTNH; `distance_weight_NHD` is W_{k,R}, one matrix per head."""
    B, T, N, H = query_BTNH.shape
    K, width = key_BKNH.shape[1], distance_weight_NHD.shape[2]
    context = torch.zeros(B, T, N, H, dtype=torch.float64)
    for b in range(B):
        for i in range(T):
            for n in range(N):
                q, u, v = query_BTNH[b, i, n], content_bias_NH[n], position_bias_NH[n]
                scores, values = [], []
                for j in range(K):
                    if not naive_visible(
                        i,
                        j,
                        memory_documents=memory_documents_BM[b],
                        documents=documents_BT[b],
                        same_length=same_length,
                    ):
                        continue
                    distance = K - T + i - j
                    if clamp_len:
                        distance = min(distance, clamp_len)
                    k, r = key_BKNH[b, j, n], distance_weight_NHD[n] @ naive_encoding(distance, width=width)
                    term_a, term_b, term_c, term_d = q @ k, q @ r, u @ k, v @ r
                    scores.append(float(term_a + term_b + term_c + term_d) / math.sqrt(H))
                    values.append(value_BKNH[b, j, n])
                largest = max(scores)
                weights = [math.exp(score - largest) for score in scores]
                for weight, value in zip(weights, values, strict=True):
                    context[b, i, n] += weight / sum(weights) * value
    return context
