"""Storages: each location gets the right storage, and all storages give the same bytes."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pytest

from tests.helpers.corpora import flip_bit, tiny_corpus
from tests.helpers.http import serve
from txl_dist.config.schema import DataSection
from txl_dist.data.format import ShardInfo
from txl_dist.data.loader.corpus import Corpus, open_corpus, storage_of
from txl_dist.data.loader.stream import LaneStream
from txl_dist.data.loader.stream_state import first_state
from txl_dist.data.storage import fsspec_io as remote
from txl_dist.data.storage.base import Storage
from txl_dist.data.storage.cache import CachedStorage
from txl_dist.data.storage.local import LocalStorage
from txl_dist.data.storage.ranges import RangeStorage
from txl_dist.errors import DataError, UnreachableError

CONTENT = bytes(range(256)) * 20
INFO = ShardInfo("a.tar", len(CONTENT), 1, 1, sha256=hashlib.sha256(CONTENT).hexdigest(), idx_sha256="")
PLACES = ("folder", "file", "memory", "memory cached", "pipe")


def storage_at(place: str, tmp_path: Path, *, content: bytes = CONTENT, name: str = "a.tar") -> Storage:
    folder = tmp_path / "corpus"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    fsspec.filesystem("memory").pipe(f"{tmp_path}/{name}", content)
    cached = DataSection(cache_dir=str(tmp_path / "cache"), retries=0, allow_protocols=("pipe",))
    location, settings = {
        "folder": (folder, DataSection()),
        "file": (f"file://{folder}", DataSection()),
        "memory": (f"memory:/{tmp_path}", DataSection(retries=0)),
        "memory cached": (f"memory:/{tmp_path}", cached),
        "pipe": (f"pipe:cat {folder}/{{file}}", cached),
    }[place]
    return storage_of(location, settings)


@pytest.mark.parametrize("place", PLACES)
def test_every_place_gives_the_same_bytes(place: str, tmp_path: Path) -> None:
    storage = storage_at(place, tmp_path)
    assert isinstance(
        storage, {"folder": LocalStorage, "file": LocalStorage, "memory": RangeStorage}.get(place, CachedStorage)
    )
    storage.check_sizes([INFO])
    assert storage.read("a.tar") == storage.read("a.tar", sha256=INFO.sha256) == CONTENT
    storage.prefetch([INFO])
    payload = storage.open_payload(INFO)
    for offset, num_bytes in ((0, 1), (100, 900), (len(CONTENT) - 7, 7)):
        assert payload.read(offset, num_bytes).tobytes() == CONTENT[offset : offset + num_bytes]


@pytest.mark.parametrize("place", PLACES)
def test_an_absent_or_other_file_is_an_error_that_names_it(place: str, tmp_path: Path) -> None:
    storage = storage_at(place, tmp_path)
    with pytest.raises(DataError, match=r"b\.json"):
        storage.read("b.json")
    with pytest.raises(DataError, match=r"a\.tar.*sha256"):
        storage.read("a.tar", sha256="0" * 64)
    with pytest.raises(DataError, match=r"b\.tar"):
        storage.open_payload(INFO._replace(name="b.tar", sha256="1" * 64))
    for content in (CONTENT[:-1], CONTENT + b"x", b""):
        with pytest.raises(DataError, match=r"a\.tar"):
            storage_at(place, tmp_path, content=content).open_payload(INFO)


@pytest.mark.parametrize("place", ["folder", "file", "memory", "memory cached"])
def test_sizes_are_checked_by_a_listing_without_reading(place: str, tmp_path: Path) -> None:
    storage = storage_at(place, tmp_path)
    with pytest.raises(DataError, match=r"b\.tar"):
        storage.check_sizes([INFO, INFO._replace(name="b.tar")])
    with pytest.raises(DataError, match=r"a\.tar has 5120 bytes, but the index says 5121"):
        storage.check_sizes([INFO._replace(bytes=5121)])


def test_a_store_that_may_be_read_but_not_listed_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = storage_at("memory", tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("ListBucket")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "ls", refuse)
    storage.check_sizes([INFO])


@pytest.mark.parametrize("url", ["pipe:cat {file}", "simplecache::memory://a", "ssh://host/corpus"])
def test_what_may_run_programs_is_refused_unless_named(url: str) -> None:
    with pytest.raises(DataError, match=r"data\.allow_protocols"):
        storage_of(url, DataSection())


def test_in_the_cache_too_a_first_command_that_fails_is_an_error_although_all_bytes_came(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(CONTENT)
    settings = DataSection(cache_dir=str(tmp_path / "cache"), retries=0, allow_protocols=("pipe",))
    storage = storage_of(f"pipe:(cat {tmp_path}/{{file}}; exit 7) | cat", settings)
    with pytest.raises(UnreachableError, match="exit status 7"):
        storage.open_payload(INFO)
    with pytest.raises(UnreachableError, match="exit status 7"):
        storage.read("a.tar")


def test_a_command_needs_a_cache() -> None:
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        storage_of("pipe:cat {file}", DataSection(allow_protocols=("pipe",)))


@pytest.mark.parametrize("name", ["corpus", "with blank", "a:b", "s3"])
def test_a_folder_of_a_strange_name_is_a_folder(name: str) -> None:
    assert isinstance(storage_of(name, DataSection()), LocalStorage)


def segments_of(corpus: Corpus, *, count: int = 150) -> list[np.ndarray]:
    split = corpus.split("train")
    stream = LaneStream([split], first_state([split], num_lanes=8, seed=1), segment_len=13, lanes=range(8))
    return [np.concatenate([one.tokens, one.documents]) for one, _ in itertools.islice(stream, count)]


@pytest.mark.parametrize("is_cached", [False, True], ids=["ranges", "cache"])
def test_a_stream_over_a_network_with_troubles_equals_the_local_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    local = tiny_corpus(tmp_path)
    expected = segments_of(local)
    settings = DataSection(cache_dir=str(tmp_path / "cache") if is_cached else "", retries=4)
    with serve(local.folder) as server:
        for trouble in (server.failures, server.torn, server.cut, server.damaged):
            trouble.update(dict.fromkeys((path.name for path in local.folder.glob("train-*")), 1))
        server.damaged["index.json"] = 0
        corpus = open_corpus(server.url, settings)
        assert corpus.fingerprint == local.fingerprint
        assert corpus.tokenizer.fingerprint == local.tokenizer_sha256
        assert corpus.split("train").counts().tolist() == local.split("train").counts().tolist()
        corpus.split("train").check_files()
        assert np.array_equal(segments_of(corpus), expected)
        names = [shard.name for shard in corpus.split("train").shards]
        assert len(names) > 2
        if is_cached:
            assert {server.requests[name] for name in names} == {3}, "a 500, a damaged half, and each shard once"


@pytest.mark.parametrize("is_cached", [False, True], ids=["ranges", "cache"])
def test_damage_at_the_source_is_an_error_that_names_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    local = tiny_corpus(tmp_path)
    settings = DataSection(cache_dir=str(tmp_path / "cache") if is_cached else "", retries=1)
    for suffix in ("", ".idx"):
        name = f"train-000001.tar{suffix}"
        offset = 0 if suffix else int(local.split("train").open_shard(1).offsets[0])
        flip_bit(local.folder / name, offset=offset)
        with serve(local.folder) as server, pytest.raises(DataError, match=f"{server.url}/{name}.*(crc32|sha256)"):
            open_corpus(server.url, settings).split("train").read_all()
        flip_bit(local.folder / name, offset=offset)


def test_the_documents_of_a_stream_are_fetched_once_however_many_segments_they_have(tmp_path: Path) -> None:
    local = tiny_corpus(tmp_path)
    with serve(local.folder) as server:
        corpus = open_corpus(server.url)
        split = corpus.split("train")
        segments_of(corpus, count=split.tokens // 8 // 13)
        num_requests = Counter({name: n for name, n in server.requests.items() if name.endswith(".tar")}).total()
        assert num_requests <= split.documents + 2 * len(split.shards)
