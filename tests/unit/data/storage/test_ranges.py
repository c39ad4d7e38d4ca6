"""Documents that are read in ranges have the same bytes as the file, or raise an error."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.http import FileServer, serve
from txl_dist.data.format import ShardInfo
from txl_dist.data.storage import fsspec_io as remote
from txl_dist.data.storage import ranges
from txl_dist.data.storage.base import Storage
from txl_dist.data.storage.factory import open_storage
from txl_dist.errors import DataError

CONTENT = random.Random(0).randbytes(20_000)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    (tmp_path / "a.tar").write_bytes(CONTENT)
    (tmp_path / "index.json").write_bytes(b"{}")
    with serve(tmp_path) as files:
        yield files


def storage_of(server: FileServer, *, retries: int = 2) -> Storage:
    return open_storage(server.url, cache_dir="", cache_gib=1.0, retries=retries, allow_protocols=())


def info_of(content: bytes = CONTENT) -> ShardInfo:
    return ShardInfo("a.tar", len(content), 1, 1, sha256=hashlib.sha256(content).hexdigest(), idx_sha256="")


def test_any_range_is_that_of_the_file(server: FileServer) -> None:
    payload = storage_of(server).open_payload(info_of())
    generator = random.Random(1)
    for _ in range(50):
        offset = generator.randrange(len(CONTENT))
        num_bytes = generator.randint(1, len(CONTENT) - offset)
        read = payload.read(offset, num_bytes)
        assert read.dtype == np.uint8
        assert read.tobytes() == CONTENT[offset : offset + num_bytes]


def test_a_document_that_is_read_again_is_fetched_once(server: FileServer) -> None:
    storage = storage_of(server)
    payload, other = storage.open_payload(info_of()), storage.open_payload(info_of())
    before = server.requests["a.tar"]
    for reader in (payload, other, payload):
        assert reader.read(100, 500).tobytes() == CONTENT[100:600]
    assert server.requests["a.tar"] == before + 1


def test_what_is_kept_is_bounded_and_the_longest_unused_goes_first(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "RECENT_BYTES", 1000)
    payload = storage_of(server).open_payload(info_of())

    def requests_of(*offsets: int) -> int:
        before = server.requests["a.tar"]
        for offset in offsets:
            assert payload.read(offset, 400).tobytes() == CONTENT[offset : offset + 400]
        return server.requests["a.tar"] - before

    assert requests_of(0, 1000, 0, 1000) == 2
    assert requests_of(0, 2000, 0) == 1, "1000 made room"
    assert requests_of(1000) == 1
    before = server.requests["a.tar"]
    for _ in range(3):
        payload.read(0, 5000)
    assert server.requests["a.tar"] == before + 1, "larger than all room, but in use"


@pytest.mark.parametrize("trouble", ["failures", "torn", "cut", "damaged"])
def test_trouble_on_the_way_is_overcome_by_trying_again(server: FileServer, trouble: str) -> None:
    payload = storage_of(server).open_payload(info_of())
    getattr(server, trouble)["a.tar"] = 2
    crc32 = zlib.crc32(CONTENT[9_000:11_000])
    assert payload.read(9_000, 2_000, crc32=crc32).tobytes() == CONTENT[9_000:11_000]


@pytest.mark.parametrize("trouble", ["failures", "torn", "cut", "damaged"])
def test_trouble_that_stays_is_an_error_that_names_the_url_and_the_place(server: FileServer, trouble: str) -> None:
    payload = storage_of(server).open_payload(info_of())
    getattr(server, trouble)["a.tar"] = 100
    with pytest.raises(DataError, match=rf"{server.url}/a.tar, 2000 bytes at 9000: .*try 3 of 3"):
        payload.read(9_000, 2_000, crc32=zlib.crc32(CONTENT[9_000:11_000]))
    getattr(server, trouble).clear()
    assert payload.read(9_000, 2_000).tobytes() == CONTENT[9_000:11_000], "nothing wrong was kept"


def test_fewer_bytes_than_wanted_are_an_error_even_without_a_crc32(server: FileServer) -> None:
    payload = storage_of(server).open_payload(info_of())
    server.cut["a.tar"] = 100
    with pytest.raises(DataError, match="only 1000 of"):
        payload.read(9_000, 2_000)


@pytest.mark.parametrize("change", [-1, 1, -5_000, 5_000])
def test_another_size_is_found_on_opening(server: FileServer, change: int) -> None:
    (server.folder / "a.tar").write_bytes(CONTENT[: len(CONTENT) + change] + b"x" * max(change, 0))
    relation = "more" if change > 0 else "fewer"
    with pytest.raises(DataError, match=rf"{server.url}/a.tar has {relation} than the 20000 bytes"):
        storage_of(server).open_payload(info_of())


def test_an_absent_file_is_an_error_at_once(server: FileServer) -> None:
    (server.folder / "a.tar").unlink()
    with pytest.raises(DataError, match=rf"{server.url}/a.tar: it does not exist .try 1"):
        storage_of(server).open_payload(info_of())
    server.status["index.json"] = 403
    with pytest.raises(DataError, match=rf"{server.url}/index.json: .*403.*try 1"):
        storage_of(server).read("index.json")


def test_a_server_that_ignores_ranges_is_refused_never_misread(server: FileServer) -> None:
    payload = storage_of(server).open_payload(info_of())
    server.has_ranges = False
    for offset in (0, 9_000):
        with pytest.raises(DataError, match=r"ignored the byte range.*data\.cache_dir"):
            payload.read(offset, 2_000)
    with pytest.raises(DataError, match="ignored the byte range"):
        storage_of(server).open_payload(info_of())


def test_a_small_file_is_read_whole_and_proven(server: FileServer) -> None:
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    assert storage_of(server).read("a.tar") == CONTENT
    for trouble in ("failures", "torn", "cut", "damaged"):
        getattr(server, trouble)["a.tar"] = 2
        assert storage_of(server).read("a.tar", sha256=sha256) == CONTENT
    with pytest.raises(DataError, match=rf"{server.url}/a.tar: the file is damaged: its sha256 .*try 3"):
        storage_of(server).read("a.tar", sha256="0" * 64)


def test_a_dead_server_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    with serve(tmp_path) as server:
        storage = storage_of(server)
    with pytest.raises(DataError, match=rf"cannot read {server.url}/index.json: .*try 3 of 3"):
        storage.read("index.json")
