"""Attention computed from the paper's equations (Dai et al. 2019, section 3.3), number by number.

The code is slow, and shares nothing with the package, not even torch. Vectors are lists of floats. Visibility,
distances, encodings and scores are derived again from the paper, so that an error in the package cannot be repeated
here. `naive_model` contains the rest of the network.

Shapes for one lane (batch row): T queries, K keys, P rows of a table, D model width, N heads, H head width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

Vector = list[float]
Matrix = list[Vector]
Score = Callable[[Vector, Vector, int], float]
"""A function of a query, a key and their distance that returns the score of one head before the division by sqrt(H)."""


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def times(matrix: Matrix, vector: Vector) -> Vector:
    return [dot(row, vector) for row in matrix]


def plus(a: Vector, b: Vector) -> Vector:
    return [x + y for x, y in zip(a, b, strict=True)]


def rms(vector: Vector, *, eps: float) -> Vector:
    """Return the vector divided by its root mean square."""
    return [x / math.sqrt(dot(vector, vector) / len(vector) + eps) for x in vector]


def same(vector: Vector) -> Vector:
    return vector


def naive_encoding(distance: int, *, width: int) -> Vector:
    """Return the encoding R of one distance: sines of all frequencies, then cosines."""
    angles = [distance / 10000.0 ** (2 * f / width) for f in range((width + 1) // 2)]
    return ([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])[:width]


def relative_score(
    weight_HD: Matrix,
    content_bias: Vector,
    position_bias: Vector,
    *,
    clamp_len: int = 0,
    norm: Callable[[Vector], Vector] = same,
) -> Score:
    """Return the score function of one head with the terms (a) to (d). `weight_HD` is W_{k,R}, the biases are u and v,
    and `norm` is applied to encodings."""

    @functools.cache
    def encoding(distance: int) -> Vector:
        return norm(times(weight_HD, naive_encoding(distance, width=len(weight_HD[0]))))

    def score(query: Vector, key: Vector, distance: int) -> float:
        r = encoding(min(distance, clamp_len) if clamp_len else distance)
        return dot(query, key) + dot(query, r) + dot(content_bias, key) + dot(position_bias, r)

    return score


def learned_score(
    table_PH: Matrix,
    bias_P: Vector,
    content_bias: Vector,
    *,
    clamp_len: int = 0,
    norm: Callable[[Vector], Vector] = same,
) -> Score:
    """Return a score function with a learned vector and a learned number per distance. All larger distances use the
    last ones."""
    last = min(len(table_PH) - 1, clamp_len) if clamp_len else len(table_PH) - 1

    def score(query: Vector, key: Vector, distance: int) -> float:
        row = min(distance, last)
        return dot(query, key) + dot(query, norm(table_PH[row])) + dot(content_bias, key) + bias_P[row]

    return score


def plain_score(query: Vector, key: Vector, _: int) -> float:
    """Return the score of a head without distances."""
    return dot(query, key)


def naive_visible(
    query: int,
    key: int,
    *,
    memory_documents: Sequence[int],
    documents: Sequence[int],
    same_length: str = "off",
    memory_len: int | None = None,
) -> bool:
    """Return whether a query of the segment may attend to a key. Keys are counted over memory and segment, and a
    negative document means an empty position.

    `memory_len` is the length of a full memory. None means the length of the given memory.
    """
    distance = len(memory_documents) + query - key
    memory_len = len(memory_documents) if memory_len is None else memory_len
    farthest = {"off": distance, "memory": memory_len - 1, "memory_and_self": memory_len}[same_length]
    if not 0 <= distance <= farthest:
        return False
    key_document = [*memory_documents, *documents][key]
    return key_document >= 0 and key_document == documents[query]


def naive_attention(
    query_TNH: Sequence[Matrix],
    key_KNH: Sequence[Matrix],
    value_KNH: Sequence[Matrix],
    *,
    score_N: Sequence[Score],
    memory_documents: Sequence[int],
    documents: Sequence[int],
    same_length: str = "off",
    memory_len: int | None = None,
) -> list[Matrix]:
    """Return context_TNH of one lane. The keys are those of the given memory, then those of the segment."""
    context_TNH = []
    for i, query_NH in enumerate(query_TNH):
        seen = [
            j
            for j in range(len(key_KNH))
            if naive_visible(
                i,
                j,
                memory_documents=memory_documents,
                documents=documents,
                same_length=same_length,
                memory_len=memory_len,
            )
        ]
        context_NH = []
        for n, (query, score) in enumerate(zip(query_NH, score_N, strict=True)):
            distance = [len(memory_documents) + i - j for j in seen]
            scores = [
                score(query, key_KNH[j][n], d) / math.sqrt(len(query)) for j, d in zip(seen, distance, strict=True)
            ]
            weights = [math.exp(s - max(scores)) for s in scores]
            values = [value_KNH[j][n] for j in seen]
            context_NH.append([dot(weights, list(column)) / sum(weights) for column in zip(*values, strict=True)])
        context_TNH.append(context_NH)
    return context_TNH
