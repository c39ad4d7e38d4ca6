"""Baselines from counts: the scores that a trained model has to beat on a corpus.

Order 0 knows how frequent each token is: p(b) = (c_b + 1) / (N + V). The bigram table also knows the token before:
p(b | a) = (c_ab + k p(b)) / (c_a + k). Its smoothing k is the best of a few on the validation split, in favour of the
baseline. Counts come from the train split. Scores are nats per validation token, over all targets in file order.
Pairs are counted sparsely: memory grows with the number of tokens, not with the vocabulary squared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.errors import DataError


class Baselines(NamedTuple):
    """Scores of the baselines in nats per validation token."""

    order0: float
    bigram: float
    best_k: float
    """Smoothing of the bigram table that scored best."""
    num_targets: int


def order0_and_bigram(
    train_ids: npt.NDArray[Any], valid_ids: npt.NDArray[Any], *, vocab_size: int, ks: Sequence[float] = (5, 20, 50)
) -> Baselines:
    """Score `valid_ids`, one sequence of concatenated documents, by the counts of `train_ids`.

    Raises DataError if either has fewer than two tokens. `Split.read_all` gives the arrays.
    """
    if min(len(train_ids), len(valid_ids)) < 2:
        raise DataError(f"baselines need two tokens or more; train has {len(train_ids)}, validation {len(valid_ids)}.")
    # p(b) of each validation target.
    unigrams = np.bincount(train_ids, minlength=vocab_size)
    probabilities = (unigrams + 1) / (len(train_ids) + vocab_size)
    targets = valid_ids[1:]
    order0 = probabilities[targets]

    # c_ab of each validation target b and the token a before it.
    train_pairs = _pairs(train_ids, vocab_size)
    known_pairs, counts = np.unique(train_pairs, return_counts=True)
    valid_pairs = _pairs(valid_ids, vocab_size)
    places = known_pairs.searchsorted(valid_pairs)
    places = np.minimum(places, len(known_pairs) - 1)
    is_known = known_pairs[places] == valid_pairs
    pair_counts = np.where(is_known, counts[places], 0)

    # c_a of each. The last token of the train split precedes nothing.
    contexts = np.bincount(train_ids[:-1], minlength=vocab_size)
    previous = valid_ids[:-1]
    context_counts = contexts[previous]

    scores = []
    for k in ks:
        smoothed = (pair_counts + k * order0) / (context_counts + k)
        scores.append((_nats(smoothed), float(k)))
    bigram, best_k = min(scores)
    return Baselines(
        order0=_nats(order0),
        bigram=bigram,
        best_k=best_k,
        num_targets=len(targets),
    )


def _pairs(ids: npt.NDArray[Any], vocab_size: int) -> npt.NDArray[np.int64]:
    """Return one number for each pair of neighbouring ids."""
    first_ids = ids[:-1].astype(np.int64)
    pairs: npt.NDArray[np.int64] = first_ids * vocab_size + ids[1:]
    return pairs


def _nats(probabilities: npt.NDArray[np.float64]) -> float:
    """Return the mean of -log p."""
    losses = -np.log(probabilities)
    return float(losses.mean())
