"""The cache of a node: verified copies, one download for any number of processes, bounded size, and safety after
crashes."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import random
import re
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import flip_bit
from tests.helpers.http import FileServer, serve
from tests.helpers.launch import wait_for
from tests.helpers.shard_readers import GIB, evict_by_turns, hold_shard, storage_of
from txl_dist.data.format import ShardInfo
from txl_dist.data.storage import fsspec_io as remote
from txl_dist.data.storage.cache import CachedStorage
from txl_dist.data.storage.remote import UrlOrigin
from txl_dist.errors import DataError

SIZE = 100_000
processes = multiprocessing.get_context("spawn")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    (tmp_path / "files").mkdir()
    with serve(tmp_path / "files") as files:
        yield files


def make_shard(server: FileServer, name: str = "a.tar", *, size: int = SIZE) -> ShardInfo:
    content = random.Random(name).randbytes(size)
    (server.folder / name).parent.mkdir(exist_ok=True)
    (server.folder / name).write_bytes(content)
    return ShardInfo(name, size, 1, 1, sha256=hashlib.sha256(content).hexdigest(), idx_sha256="")


def read_all(storage: CachedStorage, info: ShardInfo) -> bytes:
    return storage.open_payload(info).read(0, info.bytes).tobytes()


def content_of(server: FileServer, info: ShardInfo) -> bytes:
    return (server.folder / info.name).read_bytes()


def kept_in(cache: Path) -> set[str]:
    """Names without the hash in front and without what marks a try."""
    names = (path.name.partition("-")[2] for path in cache.iterdir() if not path.name.endswith(".lock"))
    return {re.sub(r"\.[0-9a-f]{8}(?=\.\d+\.part$)", "", name) for name in names}


def start(target: Any, *arguments: Any) -> tuple[BaseProcess, Any]:
    ours, theirs = processes.Pipe()
    process = processes.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def test_a_shard_is_downloaded_once_and_then_read_from_the_disk(server: FileServer, tmp_path: Path) -> None:
    info = make_shard(server)
    for _ in range(3):
        assert read_all(storage_of(server.url, tmp_path / "cache"), info) == content_of(server, info)
    assert server.requests["a.tar"] == 1
    assert kept_in(tmp_path / "cache") == {"a.tar"}


def test_processes_that_open_the_same_shard_download_it_once(server: FileServer, tmp_path: Path) -> None:
    info = make_shard(server, size=5_000_000)
    server.stalled.add("a.tar")
    started = [start(hold_shard, server.url, tmp_path / "cache", GIB, info) for _ in range(4)]
    assert [connection.recv() for _, connection in started] == ["begin"] * 4
    server.end.set()
    assert [connection.recv() for _, connection in started] == [info.sha256] * 4
    assert server.requests["a.tar"] == 1
    for process, connection in started:
        connection.send("end")
        process.join()
        assert process.exitcode == 0


def test_a_kill_in_the_middle_of_a_download_leaves_a_part_that_the_next_process_replaces(
    server: FileServer, tmp_path: Path
) -> None:
    info = make_shard(server, size=5_000_000)
    cache = tmp_path / "cache"
    server.stalled.add("a.tar")
    process, _ = start(hold_shard, server.url, cache, GIB, info)
    wait_for(lambda: any(part.stat().st_size > 1_000_000 for part in cache.glob(f"*-a.tar.*.{info.bytes}.part")))
    process.kill()
    process.join()
    assert kept_in(cache) == {f"a.tar.{info.bytes}.part"}
    server.stalled.clear()
    other, connection = start(hold_shard, server.url, cache, GIB, info)
    assert [connection.recv(), connection.recv()] == ["begin", info.sha256]
    assert kept_in(cache) == {"a.tar"}
    connection.send("end")
    other.join()


def test_what_a_killed_download_left_is_room_for_others(server: FileServer, tmp_path: Path) -> None:
    info = make_shard(server)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"{'0' * 32}-old.tar.{SIZE}.part").write_bytes(b"half")
    assert read_all(storage_of(server.url, tmp_path / "cache", max_bytes=SIZE), info) == content_of(server, info)
    assert kept_in(tmp_path / "cache") == {"a.tar"}


@pytest.mark.parametrize("trouble", ["failures", "torn", "cut", "damaged"])
def test_a_wrong_copy_is_fetched_again(server: FileServer, tmp_path: Path, trouble: str) -> None:
    info = make_shard(server)
    getattr(server, trouble)["a.tar"] = 2
    assert read_all(storage_of(server.url, tmp_path / "cache"), info) == content_of(server, info)
    assert server.requests["a.tar"] == 3


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("failures", "500"),
        ("torn", "ClientPayloadError"),
        ("cut", "50000 instead of 100000 bytes"),
        ("damaged", "sha256"),
    ],
)
def test_a_copy_that_stays_wrong_is_refused_by_name_and_not_kept(
    server: FileServer, tmp_path: Path, trouble: str, reason: str
) -> None:
    info = make_shard(server)
    getattr(server, trouble)["a.tar"] = 100
    with pytest.raises(DataError, match=rf"{server.url}/a.tar: .*{reason}.*try 3 of 3"):
        storage_of(server.url, tmp_path / "cache").open_payload(info)
    assert kept_in(tmp_path / "cache") == set()


def test_a_server_that_falls_silent_is_an_error(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.2)
    info = make_shard(server)
    for trouble in (server.silent, server.stalled):
        trouble.add("a.tar")
        with pytest.raises(DataError, match=rf"{server.url}/a.tar: .*try 2 of 2"):
            storage_of(server.url, tmp_path / "cache", retries=1).open_payload(info)
        trouble.clear()
    assert read_all(storage_of(server.url, tmp_path / "cache"), info) == content_of(server, info)


def test_a_kept_copy_of_another_size_is_fetched_again(server: FileServer, tmp_path: Path) -> None:
    info = make_shard(server)
    storage = storage_of(server.url, tmp_path / "cache")
    storage.open_payload(info)
    for size in (SIZE - 1, 0, SIZE + 1):
        storage.path_of(info).write_bytes(bytes(size))
        assert read_all(storage, info) == content_of(server, info)
    assert server.requests["a.tar"] == 4


def test_the_remedy_for_a_bit_that_flipped_on_the_disk_mends_it(server: FileServer, tmp_path: Path) -> None:
    info = make_shard(server)
    storage = storage_of(server.url, tmp_path / "cache")
    storage.open_payload(info)
    flip_bit(storage.path_of(info))
    payload = storage.open_payload(info)
    assert payload.read(0, SIZE).tobytes() != content_of(server, info), "the crc32 of the document finds it"
    assert f"Remove {storage.path_of(info)}" in payload.remedy
    storage.path_of(info).unlink()
    assert read_all(storage, info) == content_of(server, info)


def test_equal_names_in_two_corpora_do_not_meet(server: FileServer, tmp_path: Path) -> None:
    infos = {name: make_shard(server, f"{name}/train-000000.tar") for name in ("x", "y")}
    for _ in range(2):
        for name, info in infos.items():
            storage = storage_of(f"{server.url}/{name}", tmp_path / "cache")
            assert read_all(storage, info._replace(name="train-000000.tar")) == content_of(server, info)


def test_an_index_cannot_name_a_place_outside_the_cache(server: FileServer, tmp_path: Path) -> None:
    info = make_shard(server)._replace(sha256="../../" * 10)
    storage = storage_of(server.url, tmp_path / "cache", retries=0)
    assert storage.path_of(info).parent == tmp_path / "cache"
    with pytest.raises(DataError, match="sha256"):
        storage.open_payload(info)


def test_a_shard_that_was_prepared_again_is_not_taken_from_the_cache(server: FileServer, tmp_path: Path) -> None:
    old = make_shard(server)
    storage = storage_of(server.url, tmp_path / "cache")
    storage.open_payload(old)
    new = make_shard(server, "b.tar")._replace(name="a.tar")
    (server.folder / "b.tar").replace(server.folder / "a.tar")
    assert read_all(storage, new) == content_of(server, new)


def test_room_is_made_by_removing_what_was_opened_longest_ago(server: FileServer, tmp_path: Path) -> None:
    infos = [make_shard(server, f"{i}.tar") for i in range(4)]
    storage = storage_of(server.url, tmp_path / "cache", max_bytes=3 * SIZE)
    foreign = tmp_path / "cache" / "foreign.tar"
    foreign.write_bytes(bytes(10 * SIZE))
    for index in (0, 1, 2, 0, 3):
        assert read_all(storage, infos[index]) == content_of(server, infos[index])
    assert kept_in(tmp_path / "cache") - {""} == {"0.tar", "2.tar", "3.tar"}
    assert foreign.stat().st_size == 10 * SIZE, "not ours: not touched, not counted"


def test_a_shard_that_any_process_of_the_node_has_open_is_never_removed(server: FileServer, tmp_path: Path) -> None:
    infos = [make_shard(server, f"{i}.tar") for i in range(4)]
    cache = tmp_path / "cache"
    other, connection = start(hold_shard, server.url, cache, 2 * SIZE, infos[0])
    assert [connection.recv(), connection.recv()] == ["begin", infos[0].sha256]
    storage = storage_of(server.url, cache, max_bytes=2 * SIZE)
    for info in infos[1:]:
        assert read_all(storage, info) == content_of(server, info)
    assert kept_in(cache) == {"0.tar", "3.tar"}
    mine = storage.open_payload(infos[3])
    with pytest.raises(DataError, match=r"no room for 100000 bytes of .*/1\.tar.*in use.*data\.cache_gib"):
        storage.open_payload(infos[1])
    assert kept_in(cache) == {"0.tar", "3.tar"}, "nothing is removed that would not be enough"
    connection.send("end")
    other.join()
    assert read_all(storage, infos[1]) == content_of(server, infos[1])
    assert kept_in(cache) == {"1.tar", "3.tar"}
    del mine


def test_a_view_alone_keeps_a_shard_in_use(server: FileServer, tmp_path: Path) -> None:
    infos = [make_shard(server, f"{i}.tar") for i in range(2)]
    storage = storage_of(server.url, tmp_path / "cache", max_bytes=SIZE)
    view = storage.open_payload(infos[0]).read(10, 20)
    with pytest.raises(DataError, match="in use"):
        storage.open_payload(infos[1])
    del view
    storage.open_payload(infos[1])


def test_a_shard_larger_than_the_cache_is_refused_and_removes_nothing(server: FileServer, tmp_path: Path) -> None:
    small, large = make_shard(server), make_shard(server, "b.tar", size=3 * SIZE)
    storage = storage_of(server.url, tmp_path / "cache", max_bytes=2 * SIZE)
    storage.open_payload(small)
    with pytest.raises(DataError, match=r"300000 bytes.*data\.cache_gib"):
        storage.open_payload(large)
    assert kept_in(tmp_path / "cache") == {"a.tar"}


def test_a_download_under_way_counts_as_all_that_it_will_be(server: FileServer, tmp_path: Path) -> None:
    infos = [make_shard(server, f"{i}.tar", size=5_000_000) for i in range(2)]
    cache = tmp_path / "cache"
    server.stalled.add("0.tar")
    other, _ = start(hold_shard, server.url, cache, 9_000_000, infos[0])
    wait_for(lambda: any(part.stat().st_size > 1_000_000 for part in cache.glob("*.part")))
    storage = storage_of(server.url, cache, max_bytes=9_000_000)
    storage.prefetch([infos[1]])
    wait_for(lambda: not any(thread.name == "txl-cache" for thread in threading.enumerate()))
    assert kept_in(cache) == {"0.tar.5000000.part"}
    assert server.requests["1.tar"] == 0
    other.kill()
    assert read_all(storage, infos[1]) == content_of(server, infos[1])


def test_opening_waits_for_the_room_of_a_download_under_way(server: FileServer, tmp_path: Path) -> None:
    infos = [make_shard(server, f"{i}.tar", size=5_000_000) for i in range(2)]
    storage = storage_of(server.url, tmp_path / "cache", max_bytes=9_000_000)
    server.stalled.add("0.tar")
    storage.prefetch(infos[:1])
    wait_for(lambda: kept_in(tmp_path / "cache") == {"0.tar.5000000.part"})
    threading.Timer(0.3, server.end.set).start()
    assert read_all(storage, infos[1]) == content_of(server, infos[1])
    assert kept_in(tmp_path / "cache") == {"1.tar"}


@pytest.mark.slow
def test_processes_that_make_room_at_once_never_harm_each_other(server: FileServer, tmp_path: Path) -> None:
    infos = [make_shard(server, f"{i}.tar") for i in range(8)]
    cache = tmp_path / "cache"
    started = [start(evict_by_turns, server.url, cache, 4 * SIZE, infos, seed) for seed in range(3)]
    assert [connection.recv() for _, connection in started] == [0, 0, 0]
    for process, _ in started:
        process.join()
    shards = [path for path in cache.iterdir() if path.suffix == ".tar"]
    assert sum(path.stat().st_size for path in shards) <= 4 * SIZE


def test_prefetched_shards_are_there_when_they_are_opened(server: FileServer, tmp_path: Path) -> None:
    infos = [make_shard(server, f"{i}.tar") for i in range(10)]
    storage = storage_of(server.url, tmp_path / "cache")
    storage.prefetch(infos)
    storage.prefetch(infos)
    wait_for(lambda: kept_in(tmp_path / "cache") == {info.name for info in infos})
    before = server.requests.copy()
    for info in infos:
        assert read_all(storage, info) == content_of(server, info)
    assert server.requests == before == dict.fromkeys((info.name for info in infos), 1)


def test_a_prefetch_that_fails_says_nothing_and_leaves_the_opening_to_itself(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info, absent = make_shard(server), make_shard(server, "b.tar")
    (server.folder / "b.tar").unlink()
    server.failures["a.tar"] = 1
    storage = storage_of(server.url, tmp_path / "cache")
    storage.prefetch([info, absent])
    wait_for(lambda: not any(thread.name == "txl-cache" for thread in threading.enumerate()))
    assert capsys.readouterr().err == ""
    assert kept_in(tmp_path / "cache") == set()
    assert read_all(storage, info) == content_of(server, info)
    with pytest.raises(DataError, match=r"b\.tar: it does not exist"):
        storage.open_payload(absent)


def prefetch_and_end(url: str, cache: Path, info: ShardInfo, connection: Any) -> None:
    storage_of(url, cache).prefetch([info])
    wait_for(lambda: any(part.stat().st_size > 0 for part in cache.glob(f"*-a.tar.*.{info.bytes}.part")))


def test_a_prefetch_that_hangs_does_not_hold_up_the_end_of_a_process(server: FileServer, tmp_path: Path) -> None:
    info = make_shard(server, size=5_000_000)
    server.stalled.add("a.tar")
    process, _ = start(prefetch_and_end, server.url, tmp_path / "cache", info)
    process.join(timeout=60)
    assert process.exitcode == 0


def test_a_cache_that_cannot_be_used_is_named(server: FileServer, tmp_path: Path) -> None:
    info = make_shard(server)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=rf"cache {tmp_path}/file/cache: .*data\.cache_dir"):
        storage_of(server.url, tmp_path / "file" / "cache")
    storage = storage_of(server.url, tmp_path / "cache")
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_text("")
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        storage.open_payload(info)


def test_a_full_disk_is_no_fault_of_the_source(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(UrlOrigin, "download", fill)
    with pytest.raises(DataError, match=rf"cannot use the cache {tmp_path}/cache: No space left"):
        storage_of(server.url, tmp_path / "cache").open_payload(make_shard(server))
    assert kept_in(tmp_path / "cache") == set()
