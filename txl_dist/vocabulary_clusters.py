"""The clusters of the adaptive embedding and softmax: where to cut the vocabulary, and which tokens fall into which.

The tokens are known before the step runs, so nothing on the device needs to wait for a `nonzero()`. Each cluster's
rows are padded, to a multiple of a fixed number or to sizes that are given, and are never empty: every cluster then
runs on every step on every rank, which collectives under ZeRO need, and the device sees few different shapes.

    ids         7  0  3  9        edges (0, 2, 8, 10): clusters [0, 2), [2, 8), [8, 10)
    cluster 0   rows 1            ids 0
    cluster 1   rows 0  2         ids 5  1        (ids inside the cluster)
    cluster 2   rows 3            ids 1           rows are then padded with 4, one past the last token
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.errors import ConfigError, DataError

GRID_LEN = 512
"""Candidates for a cutoff."""
ZIPF_EXPONENT = 1.2
RUNG_ROWS = 32
"""Sizes of a rung are multiples of this: rows of tensor cores' tiles come in such numbers."""
LOWEST_SHARE = 0.2
"""Of the tokens that a tail typically has, on the lowest rung."""
RUNG_GROWTH = 1.5
"""From one rung to the next."""
SPREAD = 2.0
"""Standard deviations of the number of tokens that a rung leaves room for, as if tokens were drawn independently."""


class ClusterRows(NamedTuple):
    """The tokens of one cluster. The fields are numpy arrays here; the trainer holds the same pair as tensors."""

    rows: Any
    """[R] int64: positions in the flattened ids, ascending, padded with the number of ids (one past the end)."""
    ids: Any
    """[R] int64: ids inside the cluster, padded with 0."""


def cluster_edges(cutoffs: Sequence[int], *, vocab_size: int) -> tuple[int, ...]:
    """First id of every cluster, then the vocabulary size. Raises ConfigError if they do not increase strictly."""
    edges = (0, *cutoffs, vocab_size)
    if any(low >= high for low, high in itertools.pairwise(edges)):
        raise ConfigError(
            f"cutoffs {list(cutoffs)} must increase strictly between 0 and the vocabulary size {vocab_size}. "
            "Lower the cutoffs or prepare the corpus with a larger vocabulary."
        )
    return edges


def partition_by_cluster(
    ids: npt.NDArray[Any], *, edges: Sequence[int], multiple: int = 128, sizes: Sequence[int] = ()
) -> tuple[ClusterRows, ...]:
    """Split ids by cluster, the most frequent cluster first; together the rows name every token exactly once.

    A cluster has so many rows as `sizes` say, if they are given, which must hold its tokens.

    Raises DataError if an id lies outside the vocabulary.
    """
    flat = np.asarray(ids).reshape(-1)
    if flat.size and (flat.min() < edges[0] or flat.max() >= edges[-1]):
        raise DataError(
            f"token ids {flat.min()}..{flat.max()} leave the vocabulary [0, {edges[-1]}). "
            "The model and the corpus were made with different tokenizers: prepare the corpus again."
        )
    pairs = zip(itertools.pairwise(edges), sizes or itertools.repeat(0), strict=False)
    return tuple(_padded(flat, low=low, high=high, multiple=multiple, size=size) for (low, high), size in pairs)


def count_by_cluster(ids: npt.NDArray[Any], edges: Sequence[int]) -> tuple[int, ...]:
    """How many ids fall into each cluster."""
    clusters = np.searchsorted(edges[1:-1], np.asarray(ids).reshape(-1), side="right")
    return tuple(np.bincount(clusters, minlength=len(edges) - 1).tolist())


def _padded(flat: npt.NDArray[Any], *, low: int, high: int, multiple: int, size: int) -> ClusterRows:
    members = np.flatnonzero((flat >= low) & (flat < high))
    size = size or max(1, -(-members.size // multiple)) * multiple
    rows = np.full(size, flat.size, dtype=np.int64)
    rows[: members.size] = members
    inside = np.zeros(size, dtype=np.int64)
    inside[: members.size] = flat[members].astype(np.int64) - low
    return ClusterRows(rows=rows, ids=inside)


@functools.cache
def size_ladder(edges: Sequence[int], num_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Rows of each cluster, rung by rung, for so many tokens; the last rung holds any.

    The first cluster always has room for all, which is little more than it needs. The tails, m tokens of each where
    words have `typical_shares`, have g m + 2 sqrt(g m) rows, with g = 0.2, 0.3, 0.45 and so on.
    """
    means = [LOWEST_SHARE * num_tokens * share for share in typical_shares(edges)[1:]]
    rungs: list[tuple[int, ...]] = []
    while not rungs or min(rungs[-1]) < num_tokens:
        rows = (num_tokens, *(min(num_tokens, mean + SPREAD * math.sqrt(mean)) for mean in means))
        rungs.append(tuple(math.ceil(size / RUNG_ROWS) * RUNG_ROWS for size in rows))
        means = [RUNG_GROWTH * mean for mean in means]
    return tuple(rungs)


def sizes_for(counts: Sequence[float], *, edges: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """The lowest rung with room for so many tokens in each cluster."""
    ladder = size_ladder(tuple(edges), num_tokens)
    return next(rung for rung in ladder if all(map(operator.le, counts, rung)))


def typical_shares(edges: Sequence[int]) -> tuple[float, ...]:
    """Share of the tokens in each cluster, where the frequency of a word falls with the power -1.2 of its rank.

    On WikiText-103, cut at 20,000, 40,000 and 200,000: 0.948, 0.017, 0.031, 0.005 (counted: 0.952, 0.022, 0.024,
    0.002). By the integral between ranks counted from a half, which lies close to the sum.
    """
    below = [(edge + 0.5) ** (1 - ZIPF_EXPONENT) for edge in edges]
    return tuple((low - high) / (below[0] - below[-1]) for low, high in itertools.pairwise(below))


def cluster_shares(counts: npt.ArrayLike, edges: Sequence[int]) -> tuple[float, ...]:
    """Share of the tokens in each cluster, from how often each id occurs; they sum to 1. Raises DataError without."""
    below = _shares_below(counts)
    return tuple(float(below[high] - below[low]) for low, high in itertools.pairwise(edges))


def best_cutoffs(
    counts: npt.ArrayLike,
    *,
    num_clusters: int,
    width: int,
    div_value: int = 1,
    model_width: int = 0,
    step_len: int = 1 << 14,
    multiple: int = 128,
) -> tuple[int, ...]:
    """The cutoffs that cost least per token in expectation, for ids in order of frequency.

    In multiply-adds, after Grave et al. 2017 (Efficient softmax approximation for GPUs, section 4), with n_i the ids
    of cluster i, p_i its share of the tokens, w_i = width // div_value**i its width and W the width of the model:

        (n_0 + num_clusters - 1) w_0  +  sum over tails i >= 1 of  q_i w_i (n_i + 2 W),     q_i = max(p_i, r / S)

    The first term is the head, which every token pays; 2 W w_i are the projections at the output and at the input.
    q_i is the floor that their model gives small matrices: of the S = `step_len` tokens on a device, a cluster pays
    for r = `multiple` even if fewer are its own (see `partition_by_cluster`). Left out: memory, looking up rows, that
    wide products run faster than narrow ones, and the loss: with div_value > 1 it gives frequent words narrower
    embeddings than papers do. The optimum is flat: round numbers nearby cost the same.

    Found by dynamic programming, exact among 512 ids in geometric progression (all ids of a smaller vocabulary).
    Raises ConfigError if there cannot be so many clusters.
    """
    below = _shares_below(counts)
    vocab_size = len(below) - 1
    model_width = model_width or width
    if not 1 <= num_clusters <= vocab_size or width // div_value ** (num_clusters - 1) == 0:
        raise ConfigError(
            f"{vocab_size} ids of width {width} cannot be cut into num_clusters={num_clusters} with "
            f"div_value={div_value}: each needs an id and a width. Ask for fewer clusters."
        )
    grid = np.unique(np.geomspace(1, vocab_size, num=GRID_LEN).astype(np.int64)) if vocab_size > GRID_LEN else None
    edges_G = np.arange(1, vocab_size + 1) if grid is None else grid
    shares_GG = np.maximum(below[edges_G][None, :] - below[edges_G][:, None], multiple / step_len)
    sizes_GG = edges_G[None, :] - edges_G[:, None]
    # cost_G[g]: the least for all ids below edges_G[g], with the clusters so far; came_from: their last edges. The
    # columns of the head that stand for clusters cost the same whatever the cutoffs.
    cost_G = edges_G * float(width)
    came_from = []
    for i in range(1, num_clusters):
        table_width = width // div_value**i
        tail_GG = np.where(sizes_GG > 0, shares_GG * table_width * (sizes_GG + 2 * model_width), np.inf)
        total_GG = cost_G[:, None] + tail_GG
        came_from.append(total_GG.argmin(axis=0))
        cost_G = total_GG.min(axis=0)
    last, cutoffs = len(edges_G) - 1, []
    for previous in reversed(came_from):
        last = int(previous[last])
        cutoffs.append(int(edges_G[last]))
    return tuple(reversed(cutoffs))


def _shares_below(counts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """[V + 1]: share of the tokens whose id is smaller."""
    sums = np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))])
    if sums[-1] <= 0:
        raise DataError("there are no tokens to count. Check that the corpus is not empty.")
    shares: npt.NDArray[np.float64] = sums / sums[-1]
    return shares
