"""The baselines, compared with dense tables that are computed from their formulas."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from txl_dist.data.verify.baselines import order0_and_bigram
from txl_dist.errors import DataError


def test_scores_equal_those_of_dense_tables() -> None:
    generator = np.random.default_rng(0)
    vocab_size = 11
    train, valid = (generator.integers(0, 9, size=size).astype(np.uint16) for size in (400, 90))
    counts, table = np.zeros(vocab_size), np.zeros((vocab_size, vocab_size))
    for i, b in enumerate(train):
        counts[b] += 1
        if i:
            table[train[i - 1], b] += 1
    order0 = (counts + 1) / (len(train) + vocab_size)
    pairs = list(itertools.pairwise(valid))
    scores = {
        k: -np.mean([math.log((table[a, b] + k * order0[b]) / (table[a].sum() + k)) for a, b in pairs])
        for k in (5, 20, 50)
    }
    found = order0_and_bigram(train, valid, vocab_size=vocab_size)
    assert found.order0 == pytest.approx(-np.mean([math.log(order0[b]) for _, b in pairs]))
    assert found.bigram == pytest.approx(min(scores.values()))
    assert scores[int(found.best_k)] == min(scores.values())
    assert found.num_targets == 89


def test_unseen_tokens_and_pairs_cost_a_finite_amount() -> None:
    found = order0_and_bigram(np.zeros(10, dtype=np.uint16), np.array([3, 70_000, 1]), vocab_size=70_001)
    assert math.isfinite(found.order0)
    assert math.isfinite(found.bigram)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(DataError, match=r"Tokens in the scored split: 1\."):
        order0_and_bigram(np.zeros(5, dtype=np.uint16), np.zeros(1, dtype=np.uint16), vocab_size=3)
