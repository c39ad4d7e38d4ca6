"""Which tokens of a step fall into which cluster of the adaptive embedding and softmax, found on the host.

The tokens are known before the step runs, so nothing on the device needs to wait for a `nonzero()`. Each cluster's
rows are padded to a multiple of a fixed number and are never empty: every cluster then runs on every step on every
rank, which collectives under ZeRO need, and the device sees few different shapes.

    ids         7  0  3  9        edges (0, 2, 8, 10): clusters [0, 2), [2, 8), [8, 10)
    cluster 0   rows 1            ids 0
    cluster 1   rows 0  2         ids 5  1        (ids inside the cluster)
    cluster 2   rows 3            ids 1           rows are then padded with 4, one past the last token
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.errors import ConfigError, DataError


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
    ids: npt.NDArray[Any], *, edges: Sequence[int], multiple: int = 128
) -> tuple[ClusterRows, ...]:
    """Split ids by cluster, the most frequent cluster first; together the rows name every token exactly once.

    Raises DataError if an id lies outside the vocabulary.
    """
    flat = np.asarray(ids).reshape(-1)
    if flat.size and (flat.min() < edges[0] or flat.max() >= edges[-1]):
        raise DataError(
            f"token ids {flat.min()}..{flat.max()} leave the vocabulary [0, {edges[-1]}). "
            "The model and the corpus were made with different tokenizers: prepare the corpus again."
        )
    return tuple(_padded(flat, low=low, high=high, multiple=multiple) for low, high in itertools.pairwise(edges))


def _padded(flat: npt.NDArray[Any], *, low: int, high: int, multiple: int) -> ClusterRows:
    members = np.flatnonzero((flat >= low) & (flat < high))
    size = max(1, -(-members.size // multiple)) * multiple
    rows = np.full(size, flat.size, dtype=np.int64)
    rows[: members.size] = members
    inside = np.zeros(size, dtype=np.int64)
    inside[: members.size] = flat[members].astype(np.int64) - low
    return ClusterRows(rows=rows, ids=inside)
