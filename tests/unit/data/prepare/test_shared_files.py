"""Files that machines share: whole or absent, and one preparation at a time at a URL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from txl_dist.data.prepare.cluster import _NodeRates
from txl_dist.data.prepare.cluster_tasks import Places, check_node
from txl_dist.data.prepare.shared_files import STAMP, FolderFiles, SharedFiles, claim_urls, shared_files
from txl_dist.data.storage.bucket import read_if_present
from txl_dist.data.storage.bucket_lock import LOCK
from txl_dist.distributed.processes import process_id
from txl_dist.errors import ConfigError, DataError, UnreachableError


@pytest.fixture(params=["folder", "memory://shared"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedFiles]:
    (tmp_path / "folder").mkdir()
    location = request.param if "://" in request.param else str(tmp_path / request.param)
    yield shared_files(location)
    fsspec.filesystem("memory").store.clear()


def test_files_are_written_read_by_range_and_removed(files: SharedFiles, tmp_path: Path) -> None:
    (tmp_path / "local").write_bytes(b"pushed")
    files.write("a", b"0123456789")
    files.write("a", b"abcdefghij")
    files.upload(tmp_path / "local", "b")
    assert files.read("a") == b"abcdefghij"
    assert files.read("a", 2, 5) == b"cde"
    assert files.read("a", 5, 5) == b""
    assert files.sizes() == {"a": 10, "b": 6}
    files.remove(["a", "missing"])
    assert read_if_present(files, "a") is None
    with pytest.raises(DataError, match="cannot read"):
        files.read("a")


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    files = FolderFiles(str(tmp_path))
    with pytest.raises(UnreachableError, match=r"cannot write .*/name on"):
        files.upload(tmp_path, "name")  # a folder cannot be copied as a file
    assert not list(tmp_path.iterdir())


def test_a_url_is_used_by_one_process_at_a_time() -> None:
    files = shared_files("memory://claimed")
    with claim_urls(["memory://claimed"], stamp="settings", can_continue=True):
        with pytest.raises(
            ConfigError, match=r"memory://claimed is in use by another job: txl prepare, pid .*--workdir"
        ):
            enter("memory://claimed", "settings")
        files.write("part", b"work")
    assert not files.sizes()


def test_the_work_of_a_dead_process_is_continued_or_discarded() -> None:
    files = shared_files("memory://left")
    dead = process_id()._replace(start_ticks=1)
    owner = {"label": "txl prepare", "process": dead, "nonce": "dead", "started": "today", "beats": 7}
    files.write(LOCK, json.dumps(owner).encode())
    files.write(STAMP, b"settings")
    files.write("part", b"work")
    with pytest.raises(RuntimeError):
        enter("memory://left", "settings", error=RuntimeError("an error keeps the work"))
    assert files.read("part") == b"work"
    assert files.sizes().keys() == {STAMP, "part"}
    with claim_urls(["memory://left"], stamp="other settings", can_continue=True):
        assert files.sizes().keys() == {STAMP, LOCK}


def test_files_of_another_program_are_not_removed() -> None:
    files = shared_files("memory://theirs")
    files.write("thesis.txt", b"years of work")
    with pytest.raises(DataError, match="contains 1 file of another program"):
        enter("memory://theirs", "settings")
    assert files.sizes().keys() == {"thesis.txt"}


def test_a_process_that_lost_a_url_removes_nothing() -> None:
    files = shared_files("memory://lost")
    with claim_urls(["memory://lost"], stamp="settings", can_continue=True) as [lock]:
        files.write("part", b"work of another process")
        files.remove([LOCK])
        with claim_urls(["memory://lost"], stamp="settings", can_continue=True):
            with pytest.raises(ConfigError, match="another job has taken over memory://lost"):
                lock.check()
            files.write("part", b"work of another process")
            kept = files.sizes()
    assert "part" in kept
    fsspec.filesystem("memory").store.clear()


def enter(url: str, stamp: str, *, error: Exception | None = None) -> None:
    with claim_urls([url], stamp=stamp, can_continue=True):
        if error is not None:
            raise error


def test_a_node_that_does_not_see_the_folders_or_inputs_is_named(tmp_path: Path) -> None:
    places = Places(str(tmp_path), str(tmp_path))
    with pytest.raises(DataError, match=r"node gpu-07 does not see the folder .*--workdir"):
        check_node(places, "token", [], "gpu-07")
    (tmp_path / "token").write_text("token")
    check_node(places, "token", [str(tmp_path)], "gpu-07")
    with pytest.raises(DataError, match="node gpu-07 does not see /nowhere"):
        check_node(places, "token", ["/nowhere"], "gpu-07")


def test_the_progress_names_the_slowest_nodes() -> None:
    rates = _NodeRates()
    assert rates.note() == ""
    for number in range(10):
        rates.add(f"node-{number}", 1000 * (10 - number))
    assert re.match(r"; 10 nodes: node-9 [\d.]+ MB/s, node-8 [\d.]+ MB/s", rates.note())
    assert rates.note().endswith(", ...")
