"""`txl prepare --cluster ray` with two nodes of Ray on this machine, one of which is killed while it works.

All that uses a cluster runs in a child process. If an assertion of Ray's C++ code aborts the process, or Ray hangs, one
test fails, and pytest continues.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import forked
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
LIMIT_S = 540.0
"""Seconds after which a process that uses Ray is killed."""


def with_cluster(case: Callable[..., None], *arguments: Any, log: Path) -> None:
    """Call `case(cluster, second node, *arguments)` in a child process with a new Ray cluster of two nodes.

    Raises AssertionError with the end of its output if the process fails, is aborted, or takes too long.
    """
    variables = forked.environment(RAY_USAGE_STATS_ENABLED=0)
    process = forked.start(_call_with_cluster, case, *arguments, variables=variables, out=log)
    try:
        process.join(LIMIT_S)
        how = "hangs" if process.exitcode is None else f"ended with {process.exitcode}"
        assert process.exitcode == 0, f"the process with Ray {how}:\n{log.read_text(errors='replace')[-4000:]}"
    finally:
        with suppress(ProcessLookupError):  # Ray's processes are in the group of the process that started them
            os.killpg(process.ident or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _call_with_cluster(case: Callable[..., None], *arguments: Any) -> None:
    os.setpgrp()
    multiprocessing.set_start_method("fork", force=True)  # the default of a process that was not forked by a server
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        case(cluster, _second_node(cluster), *arguments)
    finally:
        cluster.shutdown()


def _second_node(cluster: Any) -> Any:
    """Add a node next to the head.

    Ray waits only 30 s for a node's start, which a busy machine can need for other work. So there are three tries.
    """
    for _ in range(2):
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


def prepare(cluster: Any, second: Any, folder: Path, source: Path) -> None:
    prepare_on_cluster(folder / "many", inputs=[source], cluster=f"ray={cluster.address}", **SETTINGS)


@pytest.mark.slow
def test_two_nodes_make_the_corpus_of_one_machine(tmp_path: Path, source: Path) -> None:
    prepare_corpus(tmp_path / "one", inputs=[source], **SETTINGS)
    with_cluster(prepare, tmp_path, source, log=tmp_path / "log")
    assert content_of(tmp_path / "many") == content_of(tmp_path / "one")
    assert not (tmp_path / ".many.prepare").exists()


def prepare_with_other_software(cluster: Any, second: Any, folder: Path, source: Path) -> None:
    other = ray_workers.software()._replace(txl_dist="0.0.1")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ray_workers, "software", lambda: other)
        with pytest.raises(DataError, match=r"has other software than .*: txl_dist .* instead of 0\.0\.1"):
            prepare(cluster, second, folder, source)


@pytest.mark.slow
def test_a_node_with_other_software_is_refused_before_any_work(tmp_path: Path, source: Path) -> None:
    with_cluster(prepare_with_other_software, tmp_path, source, log=tmp_path / "log")
    assert not list(tmp_path.glob("*many*"))


def prepare_while_a_node_is_killed(cluster: Any, second: Any, folder: Path, source: Path) -> None:
    kill = killed_when(
        folder / ".many.prepare", "part-*.json", 8, lambda: cluster.remove_node(second, allow_graceful=False)
    )
    prepare(cluster, second, folder, source)
    kill.join()


@pytest.mark.slow
def test_a_killed_node_costs_only_its_parts(tmp_path: Path, source: Path) -> None:
    prepare_corpus(tmp_path / "one", inputs=[source], **SETTINGS)
    with_cluster(prepare_while_a_node_is_killed, tmp_path, source, log=tmp_path / "log")
    assert content_of(tmp_path / "many") == content_of(tmp_path / "one")


def prepare_after_killed_drivers(cluster: Any, second: Any, folder: Path, source: Path, seed: int) -> None:
    settings = {**SETTINGS, "inputs": [str(source)], "cluster": f"ray={cluster.address}"}
    code = f"from txl_dist.data.prepare.cluster import prepare_on_cluster\nprepare_on_cluster('many', **{settings!r})"
    draw = random.Random(seed)
    scratch = folder / ".many.prepare"
    for pattern, most in (("part-*.json", 40), ("shard-*.json", 2)):
        driver = subprocess.Popen([sys.executable, "-c", code], cwd=folder)
        killed_when(scratch, pattern, draw.randint(1, most), lambda: driver.send_signal(signal.SIGKILL))  # noqa: B023
        driver.wait(timeout=300)
        assert driver.returncode == -9
    killed_when(scratch / "corpus", "*.idx", 4, lambda: cluster.remove_node(second, allow_graceful=False))
    summary = prepare_on_cluster(folder / "many", **settings)
    assert summary.parts_kept > 40
    assert summary.shards_kept >= 1


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_killed_nodes_and_killed_drivers_change_nothing(tmp_path: Path, source: Path, seed: int) -> None:
    prepare_corpus(tmp_path / "one", inputs=[source], **SETTINGS)
    with_cluster(prepare_after_killed_drivers, tmp_path, source, seed, log=tmp_path / "log")
    assert content_of(tmp_path / "many") == content_of(tmp_path / "one")


def abort(cluster: Any, second: Any) -> None:
    os.abort()


@pytest.mark.slow
def test_an_abort_in_the_process_with_ray_fails_one_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the process with Ray ended with -6"):
        with_cluster(abort, log=tmp_path / "log")


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
