"""The tasks of a cluster make the corpus of one machine, byte for byte, in a folder and in an object store."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.helpers.corpora import random_texts, write_jsonl
from txl_dist.data.prepare import cluster, cluster_tasks
from txl_dist.data.prepare.cluster import prepare_on_cluster
from txl_dist.data.prepare.run import PrepareSummary, prepare_corpus
from txl_dist.data.workers import PoolWorkers
from txl_dist.errors import ConfigError, DataError

SETTINGS: dict[str, Any] = {"kind": "byte", "valid_fraction": 0.1, "shard_len": 4000, "duplicates": "drop"}


def on_cluster(output: str | Path, **settings: Any) -> PrepareSummary:
    """Prepare with the tasks of a cluster, all of which run in this process."""
    return prepare_on_cluster(output, workers=PoolWorkers(None, 1), cluster="ray", **settings)


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Folder with a plain file, a compressed file and two small files, with documents that occur twice."""
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = random_texts(count=300)
    plain = write_jsonl(folder / "a.jsonl", texts[:150])
    with gzip.open(folder / "b.jsonl.gz", "wb") as stream:
        stream.write(write_jsonl(tmp_path / "b.jsonl", texts[100:]).read_bytes())
    write_jsonl(folder / "c.jsonl", texts[:1])
    (folder / "d.txt").write_text("one file, one document\n")
    assert plain.stat().st_size > 4096
    return folder


@pytest.mark.parametrize(
    "changed", [{"near_duplicates": "drop"}, {"near_duplicates": "ignore"}, {"kind": "bpe", "vocab_size": 300}]
)
def test_a_cluster_makes_the_corpus_of_one_machine(tmp_path: Path, source: Path, changed: dict[str, Any]) -> None:
    settings = {**SETTINGS, **changed, "inputs": [source]}
    prepare_corpus(tmp_path / "one", **settings)
    summary = on_cluster(tmp_path / "many", block_bytes=2048, **settings)
    assert len(summary.corpus.splits["train"].shards) > 3
    assert content_of(tmp_path / "many") == content_of(tmp_path / "one")
    assert not (tmp_path / ".many.prepare").exists()


@pytest.mark.slow
def test_work_and_output_can_be_in_an_object_store(tmp_path: Path, source: Path) -> None:
    prepare_corpus(tmp_path / "one", inputs=[source], **SETTINGS)
    on_cluster("memory://bucket/many", inputs=[source], block_bytes=2048, workdir="memory://scratch", **SETTINGS)
    store = fsspec.filesystem("memory")
    made = {path.rpartition("/")[2]: store.cat_file(path) for path in store.find("/bucket")}
    assert made == content_of(tmp_path / "one")
    assert not store.find("/scratch")
    again = on_cluster("memory://bucket/many", inputs=[source], **SETTINGS)
    assert again.is_unchanged
    with pytest.raises(DataError, match="another corpus is in"):
        on_cluster("memory://bucket/many", inputs=[source], **SETTINGS | {"valid_fraction": 0.2})
    store.rm("/bucket", recursive=True)


@pytest.mark.slow
def test_finished_parts_and_shards_are_kept_after_an_error(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS, "inputs": [source], "block_bytes": 2048}
    prepare_corpus(tmp_path / "one", **settings)
    for name, after in (("encode_part", 5), ("write_planned", 3)):
        with monkeypatch.context() as patched:
            patched.setattr(cluster_tasks, name, failing(getattr(cluster_tasks, name), after))
            with pytest.raises(RuntimeError, match="lost"):
                on_cluster(tmp_path / "many", **settings)
    summary = on_cluster(tmp_path / "many", **settings)
    assert summary.parts_kept > 5
    assert summary.shards_kept == 3
    assert content_of(tmp_path / "many") == content_of(tmp_path / "one")


def failing(function: Any, after: int) -> Any:
    """Return the function with an error in each call after the first `after` calls."""
    calls = 0

    def limited(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise RuntimeError("the machine was lost")
        return function(*args)

    return limited


@pytest.mark.slow
def test_a_compressed_file_is_encoded_by_few_tasks(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = []
    encode = cluster.encode_on_node
    monkeypatch.setattr(cluster, "encode_on_node", lambda job, task: tasks.append(task) or encode(job, task))
    on_cluster(tmp_path / "many", inputs=[source], block_bytes=1024, **SETTINGS)
    compressed = [task for task in tasks if task.group.files[0].path.endswith(".gz")]
    plain = [task for task in tasks if task.group.files[0].path.endswith("a.jsonl")]
    assert 1 < len(compressed) <= 8
    assert sum(len(task.parts) for task in compressed) > 8
    assert all(len(task.parts) == 1 for task in plain)


def test_a_file_that_changes_between_the_scan_and_the_encoding_is_noticed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = cluster.encode_on_node

    def changing(job: Any, task: Any) -> Any:
        write_jsonl(source / "a.jsonl", random_texts(count=3))
        return encode(job, task)

    monkeypatch.setattr(cluster, "encode_on_node", changing)
    with pytest.raises(DataError, match=r"a\.jsonl or a file next to it has changed"):
        on_cluster(tmp_path / "many", inputs=[source], block_bytes=2048, **SETTINGS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cluster": "slurm"}, "cluster=slurm: it must be ray or ray=HOST:PORT"),
        ({"cluster": "ray="}, "it must be ray or ray=HOST:PORT"),
        ({"cluster": "ray", "inputs": ["-"]}, "can be read only once"),
        ({"cluster": "ray", "inputs": ["enwik8"]}, "enwik8 is too small for a cluster"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_on_cluster(tmp_path / "out", **{"inputs": ["stdlib"], **settings})
    assert not list(tmp_path.iterdir())
