"""`txl prepare --cluster ray` with two nodes of Ray on this machine, one of which is killed while it works."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import random_texts, write_jsonl
from tests.unit.data.prepare.test_cluster import content_of
from txl_dist.data import ray_workers
from txl_dist.data.prepare.cluster import prepare_on_cluster
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.errors import ConfigError, DataError, UnreachableError

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
SETTINGS: dict[str, Any] = {
    "kind": "byte",
    "valid_fraction": 0.1,
    "shard_len": 20_000,
    "block_bytes": 2048,
    "duplicates": "drop",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray cluster of two nodes with one CPU each, without a dashboard."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    yield nodes
    nodes.shutdown()


def second_node(cluster: Any) -> Any:
    """Return the node next to the head. It is added if an earlier test has killed it.

    Ray waits only 30 s for a node's start, which a busy machine can need for other work. So there are three tries.
    """
    for _ in range(3):
        others = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
        if others:
            return others[0]
        with suppress(Exception):
            return cluster.add_node(**NODE)
    return cluster.add_node(**NODE)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    texts = random_texts(count=600)
    return write_jsonl(tmp_path / "a.jsonl", texts + texts[:50])


def killed_when(path: Path, pattern: str, number: int, kill: Any) -> threading.Thread:
    """Start a thread that calls `kill` when `number` files in the folder match the pattern."""

    def watch() -> None:
        while len(list(path.glob(pattern))) < number:
            time.sleep(0.02)
        kill()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_two_nodes_make_the_corpus_of_one_machine(tmp_path: Path, source: Path, cluster: Any) -> None:
    prepare_corpus(tmp_path / "one", inputs=[source], **SETTINGS)
    second_node(cluster)
    prepare_on_cluster(tmp_path / "many", inputs=[source], cluster=f"ray={cluster.address}", **SETTINGS)
    assert content_of(tmp_path / "many") == content_of(tmp_path / "one")
    assert not (tmp_path / ".many.prepare").exists()


@pytest.mark.slow
def test_a_node_with_other_software_is_refused_before_any_work(
    tmp_path: Path, source: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ray_workers.software()._replace(txl_dist="0.0.1")
    monkeypatch.setattr(ray_workers, "software", lambda: other)
    with pytest.raises(DataError, match=r"has other software than .*: txl_dist .* instead of 0\.0\.1"):
        prepare_on_cluster(tmp_path / "many", inputs=[source], cluster=f"ray={cluster.address}", **SETTINGS)
    assert not list(tmp_path.glob("*many*"))


@pytest.mark.slow
def test_a_killed_node_costs_only_its_parts(tmp_path: Path, source: Path, cluster: Any) -> None:
    prepare_corpus(tmp_path / "one", inputs=[source], **SETTINGS)
    victim = second_node(cluster)
    kill = killed_when(
        tmp_path / ".many.prepare", "part-*.json", 8, lambda: cluster.remove_node(victim, allow_graceful=False)
    )
    prepare_on_cluster(tmp_path / "many", inputs=[source], cluster=f"ray={cluster.address}", **SETTINGS)
    kill.join()
    assert content_of(tmp_path / "many") == content_of(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_killed_nodes_and_killed_drivers_change_nothing(tmp_path: Path, source: Path, cluster: Any, seed: int) -> None:
    prepare_corpus(tmp_path / "one", inputs=[source], **SETTINGS)
    settings = {**SETTINGS, "inputs": [str(source)], "cluster": f"ray={cluster.address}"}
    code = f"from txl_dist.data.prepare.cluster import prepare_on_cluster\nprepare_on_cluster('many', **{settings!r})"
    draw = random.Random(seed)
    scratch = tmp_path / ".many.prepare"
    for pattern, most in (("part-*.json", 40), ("shard-*.json", 2)):
        driver = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE)
        killed_when(scratch, pattern, draw.randint(1, most), lambda: driver.send_signal(signal.SIGKILL))  # noqa: B023
        driver.wait(timeout=300)
        assert driver.returncode == -9
    victim = second_node(cluster)
    killed_when(scratch / "corpus", "*.idx", 4, lambda: cluster.remove_node(victim, allow_graceful=False))
    summary = prepare_on_cluster(tmp_path / "many", **settings)
    assert summary.parts_kept > 40
    assert summary.shards_kept >= 1
    assert content_of(tmp_path / "many") == content_of(tmp_path / "one")


def test_a_missing_package_gets_the_line_for_pip(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'txl_dist\[ray\]'"):
        prepare_on_cluster(tmp_path / "many", inputs=[source], cluster="ray", **SETTINGS)
    assert not list(tmp_path.glob("*many*"))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_unreachable_cluster_is_refused_before_any_work(tmp_path: Path, source: Path, address: str) -> None:
    with pytest.raises(UnreachableError, match=rf"no Ray cluster answers at {address}: .*ray start --head"):
        prepare_on_cluster(tmp_path / "many", inputs=[source], cluster=f"ray={address}", **SETTINGS)
    assert not list(tmp_path.glob("*many*"))


def test_a_cluster_that_has_died_is_refused_at_once(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = pytest.importorskip("ray._private.services")
    monkeypatch.setattr(services, "find_gcs_addresses", set)  # not the cluster of another test
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    remembered = tmp_path / "ray/ray_current_cluster"
    remembered.write_text("127.0.0.1:1")  # the file that `ray start` has left
    with pytest.raises(UnreachableError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: .*ray start --head"):
        prepare_on_cluster(tmp_path / "many", inputs=[source], cluster="ray", **SETTINGS)
    remembered.unlink()
    with pytest.raises(UnreachableError, match=r"this machine belongs to no Ray cluster: .*ray start --head"):
        prepare_on_cluster(tmp_path / "many", inputs=[source], cluster="ray", **SETTINGS)
    assert not list(tmp_path.glob("*many*"))


def test_an_address_without_a_port_is_refused(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        prepare_on_cluster(tmp_path / "many", inputs=[source], cluster="ray=head", **SETTINGS)
