"""Baselines from counts: losses that a trained model has to beat on a corpus.

The order-0 baseline predicts each token b from its frequency alone: p(b) = (c_b + 1) / (N + V). Here c_b of the N
training tokens are b, and the vocabulary has V ids. The bigram baseline also uses the token a before b: p(b | a) =
(c_ab + k p(b)) / (c_a + k). The smoothing k is the best of a few values on the validation split, which favours the
baseline. Losses are in nats per validation token, over all targets in file order. Only pairs that occur are counted, so
memory grows with the number of tokens and not with the square of V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.errors import DataError


class Baselines(NamedTuple):
    """Losses of the two count-based baselines, in nats per validation token."""

    order0: float
    """Loss of the order-0 baseline, which uses only the frequency of each token."""
    bigram: float
    """Loss of the bigram baseline, which also uses the token before."""
    best_k: float
    """Smoothing k with which the bigram baseline has its lowest loss."""
    num_targets: int
    """Number of validation tokens that were scored."""


def order0_and_bigram(
    train_ids: npt.NDArray[Any], valid_ids: npt.NDArray[Any], *, vocab_size: int, ks: Sequence[float] = (5, 20, 50)
) -> Baselines:
    """Score the validation tokens `valid_ids` by counts of the training tokens `train_ids`.

    Both arrays are concatenated documents, as `Split.read_all` returns them. `ks` are the values to try for the
    smoothing of the bigram baseline. Raises DataError if an array has fewer than two tokens.
    """
    if min(len(train_ids), len(valid_ids)) < 2:
        raise DataError(
            "the order 0 and bigram baselines need at least two tokens in the train split and in the split that is "
            f"scored. Tokens in the train split: {len(train_ids)}. Tokens in the scored split: {len(valid_ids)}."
        )
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
    """Return one integer for each pair of neighbouring ids. Equal pairs have equal integers."""
    first_ids = ids[:-1].astype(np.int64)
    pairs: npt.NDArray[np.int64] = first_ids * vocab_size + ids[1:]
    return pairs


def _nats(probabilities: npt.NDArray[np.float64]) -> float:
    """Return the mean of -log p over all probabilities p, in nats."""
    losses = -np.log(probabilities)
    return float(losses.mean())
