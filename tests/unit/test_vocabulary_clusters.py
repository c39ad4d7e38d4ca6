"""Every token is in exactly one cluster, and every cluster has rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from txl_dist.errors import ConfigError, DataError
from txl_dist.vocabulary_clusters import best_cutoffs, cluster_edges, cluster_shares, partition_by_cluster


@pytest.mark.parametrize("multiple", [1, 8, 128])
@pytest.mark.parametrize("cutoffs", [(), (3,), (5, 20, 90)])
def test_clusters_hold_every_token_once_and_give_its_id_back(cutoffs: tuple[int, ...], multiple: int) -> None:
    ids = np.random.default_rng(0).integers(0, 100, size=(7, 33))
    edges = cluster_edges(cutoffs, vocab_size=100)
    clusters = partition_by_cluster(ids, edges=edges, multiple=multiple)
    assert len(clusters) == len(cutoffs) + 1
    restored = np.full(ids.size + 1, -1)
    rows = []
    for low, cluster in zip(edges, clusters, strict=False):
        real = cluster.rows < ids.size
        assert len(cluster.rows) == len(cluster.ids)
        assert len(cluster.rows) % multiple == 0
        assert (cluster.rows[~real] == ids.size).all()
        assert (cluster.ids[~real] == 0).all()
        restored[cluster.rows[real]] = cluster.ids[real] + low
        rows.append(cluster.rows[real])
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(ids.size))
    assert np.array_equal(restored[:-1], ids.reshape(-1))


def test_a_cluster_without_tokens_still_has_rows() -> None:
    clusters = partition_by_cluster(np.zeros(5, dtype=np.uint16), edges=(0, 2, 4), multiple=4)
    assert [len(cluster.rows) for cluster in clusters] == [8, 4]
    assert clusters[1].rows.tolist() == [5, 5, 5, 5]
    assert all(field.dtype == np.int64 for cluster in clusters for field in cluster)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for ids in ([0, 10], [-1, 3]):
        with pytest.raises(DataError, match=r"\[0, 10\)"):
            partition_by_cluster(np.array(ids), edges=(0, 10))


def test_cutoffs_that_do_not_increase_are_refused() -> None:
    for cutoffs in ((0,), (5, 5), (5, 10)):
        with pytest.raises(ConfigError, match="increase"):
            cluster_edges(cutoffs, vocab_size=10)


def naive_cost(
    counts: list[int], cutoffs: tuple[int, ...], *, width: int, div_value: int, step_len: int, multiple: int
) -> float:
    """Multiply-adds of one step per token, counted cluster by cluster."""
    edges = [0, *cutoffs, len(counts)]
    work = 0.0
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        own_width = width // div_value**i
        if i == 0:
            work += step_len * own_width * (high + len(cutoffs))
            continue
        rows = max(step_len * sum(counts[low:high]) / sum(counts), multiple)
        work += rows * own_width * (high - low) + 2 * rows * own_width * width
    return work / step_len


@pytest.mark.parametrize("num_clusters", [1, 2, 3, 4])
@pytest.mark.parametrize(("width", "div_value"), [(8, 1), (8, 2), (64, 4)])
def test_no_other_cutoffs_cost_less(num_clusters: int, width: int, div_value: int) -> None:
    generator = np.random.default_rng(num_clusters * width)
    for vocab_size, step_len in ((4, 10_000), (17, 100), (17, 10_000), (17, 3_000)):
        counts = np.sort((1e6 / np.arange(1, vocab_size + 1) ** generator.uniform(0.5, 3)).astype(int))[::-1].tolist()
        settings: dict[str, int] = {"width": width, "div_value": div_value, "step_len": step_len, "multiple": 8}
        found = best_cutoffs(counts, num_clusters=num_clusters, **settings)
        every = itertools.combinations(range(1, vocab_size), num_clusters - 1)
        least = min(naive_cost(counts, cutoffs, **settings) for cutoffs in every)
        assert len(found) == num_clusters - 1
        assert naive_cost(counts, found, **settings) == pytest.approx(least, rel=1e-12)


def test_cutoffs_of_a_large_vocabulary_cost_hardly_more_than_the_best_nearby() -> None:
    counts = (1e8 / np.arange(1, 20_001)).astype(int).tolist()
    settings = {"width": 256, "div_value": 4, "step_len": 16_384, "multiple": 128}
    found = best_cutoffs(counts, num_clusters=3, **settings)
    cost = naive_cost(counts, found, **settings)
    for factors in itertools.product((0.8, 0.9, 0.95, 0.98, 1, 1.02, 1.05, 1.1, 1.2), repeat=2):
        nearby = tuple(int(cutoff * factor) for cutoff, factor in zip(found, factors, strict=True))
        assert cost < naive_cost(counts, nearby, **settings) * 1.001
    assert cost < naive_cost(counts, (), **settings) / 3


def test_shares_of_clusters_are_those_of_the_tokens_that_they_hold() -> None:
    ids = np.random.default_rng(3).zipf(1.3, size=5_000) % 100
    edges = cluster_edges((3, 20), vocab_size=100)
    shares = cluster_shares(np.bincount(ids, minlength=100), edges)
    clusters = partition_by_cluster(ids, edges=edges)
    assert shares == pytest.approx(
        [(cluster.rows < ids.size).mean() * len(cluster.rows) / ids.size for cluster in clusters]
    )
    assert sum(shares) == pytest.approx(1)


def test_clusters_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_clusters=4"):
        best_cutoffs([3, 2, 1], num_clusters=4, width=8)
    with pytest.raises(ConfigError, match="width 8"):
        best_cutoffs([3, 2, 1], num_clusters=3, width=8, div_value=4)
    with pytest.raises(DataError, match="no tokens"):
        cluster_shares([0, 0], (0, 2))
