"""Text has few shapes on a GPU: the recipes' numbers of rare words over 5,000 steps need only a few sizes."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tools.benchmarks.count_graphs import RECIPES, count, microbatches
from txl_dist.config.load import load_config
from txl_dist.data.loader.stream import plain_segment
from txl_dist.train.batch import BatchMaker
from txl_dist.vocabulary_clusters import RUNG_ROWS, cluster_edges, size_ladder, sizes_for, typical_shares

CONFIGS = Path(__file__).parents[3] / "configs"
NUM_STEPS = 5000
MOST_GRAPHS, MOST_PADDED = 6, 0.15
LARGE = [name for name in RECIPES if load_config(CONFIGS / f"{name}.toml").model.cutoffs]
EDGES = (0, 20_000, 40_000, 200_000, 267_735)


def independent(shares: npt.NDArray[np.float64], lanes: int, length: int) -> npt.NDArray[np.int64]:
    """[steps, clusters]: how many tokens fall into each, drawn one by one."""
    return np.random.default_rng(1).multinomial(lanes * length, shares, size=NUM_STEPS)


def in_clumps(shares: npt.NDArray[np.float64], lanes: int, length: int) -> npt.NDArray[np.int64]:
    """The same where every lane has its topic, of some 1,000 tokens, in which a rare cluster is half to twice as
    frequent as elsewhere."""
    rng, topic_steps = np.random.default_rng(2), max(1, 1000 // length)
    total = np.zeros((NUM_STEPS, len(shares)), dtype=np.int64)
    for _ in range(lanes):
        factors = np.exp(rng.normal(0, 0.6, (NUM_STEPS // topic_steps + 1, len(shares) - 1)) - 0.18)
        own = np.repeat(shares[1:] * factors, topic_steps, axis=0)[:NUM_STEPS]
        total += rng.multinomial(length, np.column_stack([1 - own.sum(1), own]))
    return total


@pytest.mark.parametrize("draw", [independent, in_clumps])
@pytest.mark.parametrize("counted", [False, True], ids=["typical", "counted"])
@pytest.mark.parametrize("recipe", LARGE)
def test_a_handful_of_sizes_holds_5000_steps(recipe: str, counted: bool, draw: object) -> None:
    config = load_config(CONFIGS / f"{recipe}.toml")
    edges = cluster_edges(config.model.cutoffs, vocab_size=RECIPES[recipe])
    # Those of WikiText-103, which differ from what the ladder expects.
    shares = np.array([0.952, 0.022, 0.024, 0.002] if counted else typical_shares(edges))
    lanes, length = config.train.microbatch_lanes, config.train.segment_len
    counts = draw(shares, lanes, length)  # type: ignore[operator]
    rungs = np.array(size_ladder(edges, lanes * length))
    chosen = (counts[:, None] <= rungs).all(2).argmax(1)
    used = Counter(chosen.tolist())
    padded = rungs[chosen].sum() / counts.sum() - 1
    assert len(used) <= MOST_GRAPHS, used
    assert padded <= MOST_PADDED


def test_what_is_counted_is_what_batches_have() -> None:
    config = load_config(CONFIGS / "wt103_large.toml")
    vocab_size = RECIPES["wt103_large"]
    found = count(microbatches(None, config, vocab_size=vocab_size, num_steps=3), config, vocab_size=vocab_size)
    assert found.num_shapes <= 3
    assert 0.05 < found.padded_rows <= MOST_PADDED
    assert found.most_frequent in size_ladder(EDGES, 16 * 384)


def test_the_lowest_rung_that_holds_all_clusters_is_taken() -> None:
    ladder = size_ladder(EDGES, 6000)
    for rung, above in itertools.pairwise(ladder):
        assert sizes_for(rung, edges=EDGES, num_tokens=6000) == rung
        for cluster in (1, 2, 3):
            if rung[cluster] < above[cluster]:
                more = [0] * 4
                more[cluster] = rung[cluster] + 1
                assert sizes_for(more, edges=EDGES, num_tokens=6000) == above


@pytest.mark.parametrize("num_tokens", [1, 31, 512, 9000])
@pytest.mark.parametrize("edges", [(0, 50), (0, 10, 50), EDGES])
def test_any_batch_has_a_rung(edges: tuple[int, ...], num_tokens: int) -> None:
    assert all(size % RUNG_ROWS == 0 for rung in size_ladder(edges, num_tokens) for size in rung)
    for cluster in range(len(edges) - 1):
        counts = [0] * (len(edges) - 1)
        counts[cluster] = num_tokens
        assert sizes_for(counts, edges=edges, num_tokens=num_tokens)[cluster] >= num_tokens


def test_embedding_and_softmax_stand_on_one_rung() -> None:
    edges = (0, 10, 30, 50)
    maker = BatchMaker(edges, edges, mask_documents=False)
    ids = np.zeros((64, 9), dtype=np.int64)
    ids[:, 0] = 40  # 64 rare tokens, which are no targets
    batch = maker.batch(plain_segment(ids))
    sizes = [[len(cluster.rows) for cluster in part or ()] for part in (batch.token_partition, batch.target_partition)]
    assert sizes[0] == sizes[1]
    assert sizes[0][2] >= 64


def test_a_cluster_that_holds_every_token_has_rows_for_all() -> None:
    batch = BatchMaker((0, 50), (0, 10, 50), mask_documents=False).batch(plain_segment(np.full((3, 5), 49)))
    assert batch.token_partition is None
    assert batch.target_partition is not None
    rows = batch.target_partition[1].rows
    assert sorted(rows[rows < 12].tolist()) == list(range(12))
