"""`txl prepare` into a bucket of a real S3 server: equal bytes, killed and continued, and refused before any work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import random_texts, write_jsonl
from tests.helpers.object_store import BUCKET, ObjectStore
from tests.unit.data.prepare.test_cluster import SETTINGS, content_of, on_cluster
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.data.storage.bucket import Bucket
from txl_dist.data.storage.bucket_lock import LOCK, BucketLock
from txl_dist.errors import ConfigError, UnreachableError

pytestmark = pytest.mark.slow

DRIVER = """
import json, sys
from txl_dist.data.prepare.cluster import prepare_on_cluster
from txl_dist.data.workers import PoolWorkers
output, cluster, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
workers = PoolWorkers(None, 1) if not cluster else None
prepare_on_cluster(output, workers=workers, cluster=cluster, **settings)
"""
"""Program that prepares a corpus, in its own process or on a Ray cluster."""


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(count=150))
    return SETTINGS | {"shard_len": 8000, "inputs": [str(source)]}


def made(store: ObjectStore, prefix: str) -> dict[str, bytes]:
    """Return the objects below a prefix, by name."""
    return {name: store.file_system.cat_file(f"{BUCKET}/{prefix}/{name}") for name in store.names(prefix)}


def kill_at(store: ObjectStore, driver: subprocess.Popen[bytes], prefix: str, start: str, number: int) -> None:
    """Kill a driver when `number` finished files with this start of their name are in the bucket."""
    end_s = time.monotonic() + 300
    while sum(name.startswith(start) and name.endswith(".json") for name in store.names(prefix)) < number:
        assert driver.poll() is None, "the driver ended before the kill"
        assert time.monotonic() < end_s
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()


def start_driver(output: str, cluster: str, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", DRIVER, output, cluster, json.dumps(settings)]
    return subprocess.Popen(words, env=dict(os.environ), stderr=subprocess.DEVNULL)


def test_a_killed_preparation_continues_in_the_bucket_and_equals_that_of_a_local_folder(
    tmp_path: Path, store: ObjectStore, settings: dict[str, Any]
) -> None:
    prepare_corpus(tmp_path / "one", **settings)
    url, settings = f"{store.url}/corpora/made", settings | {"workdir": f"{store.url}/scratch", "block_bytes": 2048}
    kill_at(store, start_driver(url, "", settings), "scratch/.made.prepare", "part-", 3)
    assert "index.json" not in store.names("corpora/made")
    summary = on_cluster(url, **settings)
    assert summary.parts_kept >= 3
    assert made(store, "corpora/made") == content_of(tmp_path / "one")
    assert store.names("scratch") == []
    assert store.names("corpora/.made.prepare") == []
    assert on_cluster(url, **settings).is_unchanged


def test_a_bucket_that_another_preparation_uses_is_refused_before_any_work(
    store: ObjectStore, settings: dict[str, Any]
) -> None:
    url = f"{store.url}/used/corpus"
    lock = BucketLock.acquire(Bucket(f"{store.url}/used/.corpus.prepare"), "txl prepare", nonce="held", remedy="")
    try:  # also with another work folder, because both would write to one output
        with pytest.raises(
            ConfigError, match=r"in use by another job: txl prepare, pid \d+ on .*another --workdir or out"
        ):
            on_cluster(url, workdir=f"{store.url}/elsewhere", **settings)
    finally:
        lock.release()
    assert store.names("used") == store.names("elsewhere") == []


def test_a_bucket_out_of_reach_is_one_line_before_any_work(store: ObjectStore, settings: dict[str, Any]) -> None:
    with pytest.raises(UnreachableError) as caught:
        on_cluster("s3://nowhere/corpus", **settings)
    assert str(caught.value).startswith("cannot list s3://nowhere/corpus from ")
    assert ": the bucket does not exist. Check the address, the network, the credentials" in str(caught.value)
    with pytest.raises(UnreachableError, match=r"cannot write s3://nowhere/\.c\.prepare/LOCK.json from .*: the bucket"):
        on_cluster(f"{store.url}/c", workdir="s3://nowhere", **settings)
    assert store.names("c") == store.names(".c.prepare") == []


@pytest.mark.parametrize("has_dead_owner", [False, True])
def test_of_many_starts_at_one_moment_one_gets_the_lock(store: ObjectStore, has_dead_owner: bool) -> None:
    bucket = Bucket(f"{store.url}/lock{has_dead_owner}")
    if has_dead_owner:
        bucket.write(LOCK, b"a job that cannot be read")
    ready = threading.Barrier(6)
    got: list[BucketLock] = []

    def start(number: int) -> None:
        ready.wait()
        with suppress(ConfigError):
            got.append(BucketLock.acquire(bucket, "job", nonce=f"job{number}", remedy="", wait=lambda _: None))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(start, range(6)))
    assert len(got) == 1
    got[0].release()
    assert LOCK not in bucket.sizes()


@pytest.mark.nightly
def test_a_ray_cluster_continues_a_killed_preparation_in_the_bucket(
    tmp_path: Path, store: ObjectStore, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    prepare_corpus(tmp_path / "one", **settings)
    url, settings = f"{store.url}/ray/made", settings | {"workdir": f"{store.url}/work", "block_bytes": 1024}
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        with suppress(Exception):  # a busy machine can need longer than Ray waits
            nodes.add_node(**node)
        address = f"ray={nodes.address}"
        kill_at(store, start_driver(url, address, settings), "work/.made.prepare", "part-", 5)
        kill_at(store, start_driver(url, address, settings), "work/.made.prepare", "shard-", 1)
        driver = start_driver(url, address, settings)
        assert driver.wait(timeout=400) == 0
    finally:
        nodes.shutdown()
    assert made(store, "ray/made") == content_of(tmp_path / "one")
    assert store.names("work") == []
