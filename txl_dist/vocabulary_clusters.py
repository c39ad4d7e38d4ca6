"""Clusters of the adaptive embedding and softmax: choice of the cutoffs, and grouping of tokens by cluster.

The host groups the tokens before the step runs, so that no operation waits for a `nonzero()` on the device. A cluster's
rows are the positions of its tokens. The rows are padded to a multiple of a fixed number or to given sizes, and a
cluster has at least one row. So every rank computes every cluster in every step, because collectives under ZeRO need
the same operations on all ranks. With the padding, the device also sees few different shapes.

    ids         7  0  3  9        edges (0, 2, 8, 10): clusters [0, 2), [2, 8), [8, 10)
    cluster 0   rows 1            ids 0
    cluster 1   rows 0  2         ids 5  1        (ids inside the cluster)
    cluster 2   rows 3            ids 1           rows are then padded with 4, one past the last token
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.errors import ConfigError, DataError

GRID_LEN = 512
"""Maximum number of token ids that `best_cutoffs` tries as a cutoff."""
ZIPF_EXPONENT = 1.2
"""Exponent a of typical word frequencies, which are proportional to rank ** -a."""
RUNG_ROWS = 32
"""All numbers of rows in `size_ladder` are multiples of this number, because tiles of tensor cores have 32 rows."""
LOWEST_SHARE = 0.2
"""The smallest sizes in `size_ladder` have room for this share of the tokens that a cluster typically has."""
RUNG_GROWTH = 1.5
"""Factor by which the number of tokens grows from one tuple of sizes in `size_ladder` to the next."""
SPREAD = 2.0
"""Number of standard deviations that `size_ladder` adds to the mean number of a cluster's tokens. The standard
deviation is computed for independently drawn tokens."""


class ClusterRows(NamedTuple):
    """Tokens of one cluster, as numpy arrays [R]. The trainer uses the same class with tensors. R is the padded number
    of tokens."""

    rows: Any
    """Positions of the cluster's tokens in the flattened ids, [R] int64, ascending. The padding is the number of ids,
    which is one past the last position."""
    ids: Any
    """Ids of the tokens relative to the first id of the cluster, [R] int64, padded with 0."""


def cluster_edges(cutoffs: Sequence[int], *, vocab_size: int) -> tuple[int, ...]:
    """Return the edges of the clusters: the first id of every cluster, then the vocabulary size.

    Raises ConfigError if these numbers do not increase strictly.
    """
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
    """Split ids by cluster, the most frequent cluster first. Together the rows hold every token exactly once.

    Raises DataError if an id is outside the vocabulary.

    Args:
        edges: The first id of every cluster, then the vocabulary size, as `cluster_edges` returns them.
        multiple: The number of rows of each cluster is padded to a multiple of this number, unless `sizes` is given.
        sizes: The padded number of rows of each cluster. The cluster's tokens must fit.
    """
    flat = np.asarray(ids).reshape(-1)
    lowest = flat.min(initial=edges[0])
    highest = flat.max(initial=edges[0])
    if lowest < edges[0] or highest >= edges[-1]:
        raise DataError(
            f"token ids {flat.min()}..{flat.max()} are not all in the vocabulary [0, {edges[-1]}). "
            "The model and the corpus have different tokenizers: prepare the corpus with the model's tokenizer."
        )
    clusters = []
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        positions = np.flatnonzero((flat >= low) & (flat < high))
        if sizes:
            size = sizes[number]
        else:
            num_blocks = math.ceil(positions.size / multiple)
            size = max(1, num_blocks) * multiple
        clusters.append(_pad_cluster(flat, positions, first_id=low, size=size))
    return tuple(clusters)


def count_by_cluster(ids: npt.NDArray[Any], edges: Sequence[int]) -> tuple[int, ...]:
    """Return the number of ids in each cluster. `edges` is a result of `cluster_edges`."""
    flat = np.asarray(ids).reshape(-1)
    clusters = np.searchsorted(edges[1:-1], flat, side="right")
    counts = np.bincount(clusters, minlength=len(edges) - 1)
    return tuple(counts.tolist())


def _pad_cluster(flat: npt.NDArray[Any], positions: npt.NDArray[np.intp], *, first_id: int, size: int) -> ClusterRows:
    """Return the rows of one cluster, padded to `size` rows. `flat` are the ids of all clusters, and `positions` are
    the places of this cluster's ids in `flat`."""
    rows = np.full(size, flat.size, dtype=np.int64)
    rows[: positions.size] = positions
    ids_inside = np.zeros(size, dtype=np.int64)
    ids_inside[: positions.size] = flat[positions].astype(np.int64) - first_id
    return ClusterRows(rows=rows, ids=ids_inside)


@functools.cache
def size_ladder(edges: Sequence[int], num_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return the allowed padded sizes of the clusters: tuples with the number of rows of each cluster, in ascending
    order.

    The sizes are for `num_tokens` tokens, and the last tuple fits any text. The first cluster always has room for all
    tokens, which is little more than it needs. For each other cluster, let m be the number of its tokens if words have
    `typical_shares`. Then its sizes are g m + 2 sqrt(g m) rows, with g = 0.2, 0.3, 0.45 and so on.
    """
    _, *tail_shares = typical_shares(edges)
    means = [LOWEST_SHARE * num_tokens * share for share in tail_shares]
    rungs: list[tuple[int, ...]] = []
    while not rungs or min(rungs[-1]) < num_tokens:
        rows = [_round_to_rung_rows(num_tokens)]
        for mean in means:
            size = mean + SPREAD * math.sqrt(mean)
            rows.append(_round_to_rung_rows(min(num_tokens, size)))
        rungs.append(tuple(rows))
        means = [RUNG_GROWTH * mean for mean in means]
    return tuple(rungs)


def _round_to_rung_rows(size: float) -> int:
    """Return the number of rows, rounded up to a multiple of RUNG_ROWS."""
    num_tiles = math.ceil(size / RUNG_ROWS)
    return num_tiles * RUNG_ROWS


def sizes_for(counts: Sequence[float], *, edges: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Return the smallest tuple of `size_ladder` that has room for the tokens of each cluster.

    `counts` are the numbers of tokens in the clusters. `num_tokens` is the number of all tokens.
    """
    for rung in size_ladder(tuple(edges), num_tokens):
        has_room = [count <= size for count, size in zip(counts, rung, strict=False)]
        if all(has_room):
            return rung
    raise AssertionError("size_ladder returned no sizes with room for the tokens of every cluster")


def typical_shares(edges: Sequence[int]) -> tuple[float, ...]:
    """Return each cluster's share of the tokens if the frequency of a word is proportional to rank ** -1.2.

    For WikiText-103 with cutoffs 20,000, 40,000 and 200,000 the result is 0.948, 0.017, 0.031, 0.005. The counted
    shares are 0.952, 0.022, 0.024, 0.002. The sum over ranks is approximated by its integral, with ranks counted from
    one half.
    """
    tails = [(edge + 0.5) ** (1 - ZIPF_EXPONENT) for edge in edges]
    total = tails[0] - tails[-1]
    shares = [(low - high) / total for low, high in itertools.pairwise(tails)]
    return tuple(shares)


def cluster_shares(counts: npt.ArrayLike, edges: Sequence[int]) -> tuple[float, ...]:
    """Return each cluster's share of the tokens, computed from the count of each id. The shares sum to 1.

    Raises DataError if there are no tokens.
    """
    below = _shares_below(counts)
    shares = []
    for low, high in itertools.pairwise(edges):
        share = below[high] - below[low]
        shares.append(float(share))
    return tuple(shares)


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
    """Return the cutoffs with the lowest expected cost per token, for ids in order of frequency.

    The cost is in multiply-adds, after Grave et al. 2017 (Efficient softmax approximation for GPUs, section 4). Cluster
    i has n_i ids, the share p_i of the tokens, and the width w_i = width // div_value**i. W is the width of the model:

        (n_0 + num_clusters - 1) w_0  +  sum over tails i >= 1 of  q_i w_i (n_i + 2 W),     q_i = max(p_i, r / S)

    The first term is for the head (cluster 0), which is computed for every token. The other clusters are the tails. The
    term 2 W w_i is for the projections at the output and at the input. The factor q_i has a lower bound, because small
    matrices cost more per token. For the S = `step_len` tokens of a step on a device, a cluster computes at least
    r = `multiple` rows, even if it has fewer tokens (see `partition_by_cluster`).

    The cost ignores memory, row look-ups, and the higher speed of wide matrix products. The cost also ignores the
    model's loss. With div_value > 1 the result gives frequent words narrower embeddings than papers use. The optimum is
    flat, so round numbers near the result cost nearly the same.

    Dynamic programming finds the exact optimum among 512 ids in geometric progression, or among all ids of a smaller
    vocabulary. `counts` holds the number of tokens with each id. Raises ConfigError if there cannot be that many
    clusters.
    """
    below = _shares_below(counts)
    vocab_size = len(below) - 1
    model_width = model_width or width
    narrowest = width // div_value ** max(0, num_clusters - 1)
    if not 1 <= num_clusters <= vocab_size or narrowest == 0:
        raise ConfigError(
            f"a vocabulary of {vocab_size} ids with embeddings of width {width} cannot be divided into "
            f"num_clusters={num_clusters} with div_value={div_value}: each cluster needs at least one id and "
            "embeddings of width 1 or more. Choose a smaller number of clusters."
        )
    if vocab_size > GRID_LEN:
        progression = np.geomspace(1, vocab_size, num=GRID_LEN)
        edges_G = np.unique(progression.astype(np.int64))
    else:
        edges_G = np.arange(1, vocab_size + 1)
    shares_G = below[edges_G]
    smallest_share = multiple / step_len
    shares_GG = shares_G[None, :] - shares_G[:, None]
    shares_GG = np.maximum(shares_GG, smallest_share)
    sizes_GG = edges_G[None, :] - edges_G[:, None]
    # cost_G[g] is the lowest cost of all ids below edges_G[g], with the clusters so far, and last_cutoffs has the last
    # edge of each. The head's columns that stand for clusters are left out: they cost the same for any cutoffs.
    cost_G = edges_G * float(width)
    last_cutoffs = []
    for i in range(1, num_clusters):
        cluster_width = width // div_value**i
        tail_GG = shares_GG * cluster_width * (sizes_GG + 2 * model_width)
        tail_GG = np.where(sizes_GG > 0, tail_GG, np.inf)
        total_GG = cost_G[:, None] + tail_GG
        last_cutoffs.append(total_GG.argmin(axis=0))
        cost_G = total_GG.min(axis=0)
    cutoffs = []
    g = len(edges_G) - 1
    for last_cutoff_G in reversed(last_cutoffs):
        g = int(last_cutoff_G[g])
        cutoffs.append(int(edges_G[g]))
    cutoffs.reverse()
    return tuple(cutoffs)


def _shares_below(counts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return for each id from 0 to V the share of the tokens with a smaller id, [V + 1]. Raises DataError if there are
    no tokens."""
    running_sums = np.cumsum(np.asarray(counts, dtype=np.int64))
    sums = np.concatenate([[0], running_sums])
    total = sums[-1]
    if total <= 0:
        raise DataError("there are no tokens to count. Check that the corpus is not empty.")
    shares: npt.NDArray[np.float64] = sums / total
    return shares
