"""Every token is in exactly one cluster, and every cluster has rows."""

from __future__ import annotations

import numpy as np
import pytest

from txl_dist.errors import ConfigError, DataError
from txl_dist.text.clusters import cluster_edges, partition_by_cluster


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
