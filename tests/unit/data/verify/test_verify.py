"""`txl verify` reads every byte once, names damaged files, and reports damage by its exit code."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from tests.helpers.corpora import flip_bit, random_texts, tiny_corpus
from txl_dist.cli.main import main
from txl_dist.config.schema import DataSection
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.verify import tars
from txl_dist.data.verify.tars import ForwardReader
from txl_dist.data.verify.verify import each_problem, strangers, verify_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return tiny_corpus(tmp_path)


def exit_code_of(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_a_whole_corpus_has_the_exit_code_0_and_a_damaged_one_1_with_a_line_per_problem(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of("verify", str(corpus.folder)) == 0
    assert capsys.readouterr().out == f"{corpus.folder}: whole\n"
    flip_bit(corpus.folder / "valid-000000.tar.idx")
    (corpus.folder / "train-000000.tar").unlink()
    assert exit_code_of("verify", str(corpus.folder)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "train-000000.tar" in lines[0]
    assert "valid-000000.tar.idx" in lines[1]


def test_what_is_no_corpus_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("verify", str(tmp_path / "missing")) == 2
    assert "missing does not exist" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert exit_code_of("verify", str(tmp_path / "empty")) == 2
    assert "index.json" in capsys.readouterr().err
    (tmp_path / "train-000000.tar.idx").touch()
    assert exit_code_of("verify", str(tmp_path)) == 1, "a corpus that has lost its index"
    assert "index.json" in capsys.readouterr().out


def test_files_that_do_not_belong_to_the_corpus_are_remarked_and_no_damage(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    assert strangers(corpus) == []
    (corpus.folder / "notes.txt").write_text("mine")
    shutil.copy(corpus.folder / "train-000000.tar", corpus.folder / "train-000099.tar")
    assert strangers(corpus) == ["notes.txt", "train-000099.tar"]
    assert exit_code_of("verify", str(corpus.folder)) == 0
    out = capsys.readouterr().out
    assert "contains 2 files not listed in its index: notes.txt, train-000099.tar" in out
    assert out.endswith("whole\n")


def problems_of(corpus: Corpus, **settings: Any) -> list[str]:
    return list(each_problem(corpus, DataSection(), **settings))


def test_progress_hears_of_every_byte_of_the_tars(corpus: Corpus) -> None:
    read: list[int] = []
    assert problems_of(corpus, on_bytes=read.append) == []
    assert sum(read) == sum(path.stat().st_size for path in corpus.folder.glob("*.tar"))


def test_worker_processes_find_the_same_problems_in_the_same_order(corpus: Corpus) -> None:
    for index, shard in enumerate(corpus.split("train").shards):
        if index % 2:
            flip_bit(corpus.folder / shard.name, offset=int(corpus.split("train").open_shard(index).offsets[0]))
    problems = problems_of(corpus)
    assert len(problems) > 5
    assert problems_of(corpus, num_workers=2) == problems


def test_a_corpus_at_a_url_is_verified_there(corpus: Corpus) -> None:
    memory = fsspec.filesystem("memory")
    for path in corpus.folder.iterdir():
        memory.pipe_file(f"/verified/{path.name}", path.read_bytes())
    try:
        assert verify_corpus("memory://verified") == []
        damaged = bytearray(memory.cat_file("/verified/train-000001.tar"))
        damaged[-9000] ^= 1
        memory.pipe_file("/verified/train-000001.tar", bytes(damaged))
        problems = verify_corpus("memory://verified")
        assert any("memory://verified/train-000001.tar is damaged: its sha256" in problem for problem in problems)
        assert strangers(open_corpus("memory://verified")) == []
    finally:
        memory.rm("/verified", recursive=True)


def test_a_split_that_is_not_the_sum_of_its_shards_is_named(corpus: Corpus) -> None:
    corpus.splits["train"].tokens += 1
    problems = problems_of(corpus)
    assert any("the sizes of split train are not the sums over its shards" in problem for problem in problems)
    assert any("train-counts.npy: the sum of the counts is not" in problem for problem in problems)


def test_ids_beyond_the_vocabulary_are_named_though_every_hash_agrees(corpus: Corpus) -> None:
    corpus.vocab_size = 10
    problems = problems_of(corpus)
    assert sum("outside the vocabulary of 10" in problem for problem in problems) > 20


class Bytes:
    """A payload in memory that counts what is asked of it."""

    remedy = ""

    def __init__(self, content: bytes) -> None:
        self.content = np.frombuffer(content, np.uint8)
        self.num_read = 0

    def read(self, offset: int, num_bytes: int, *, crc32: int | None = None) -> np.ndarray:
        found = self.content[offset : offset + num_bytes]
        self.num_read += len(found)
        return found


def test_a_forward_reader_gives_the_bytes_of_the_file_and_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tars, "CHUNK_BYTES", 1000)
    content = os.urandom(50_000)
    payload = Bytes(content)
    reader = ForwardReader(payload, len(content), name="x")
    for offset, length in [(0, 10), (10, 5000), (5009, 1), (20_000, 3000), (22_999, 700), (49_990, 100), (60_000, 1)]:
        reader.seek(offset)
        assert reader.read(length) == content[offset : offset + length]
        assert reader.tell() == offset + len(content[offset : offset + length])
    assert reader.sha256() == hashlib.sha256(content).hexdigest()
    assert payload.num_read == len(content), "nothing twice, as long as it is read forward"
    reader.seek(5)
    assert reader.read(7) == content[5:12]
    assert reader.sha256() == hashlib.sha256(content).hexdigest()
    for count in (-1, -512):
        with pytest.raises(ValueError, match="length"):
            reader.read(count)


def test_memory_does_not_grow_with_what_a_forward_reader_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tars, "CHUNK_BYTES", 1000)
    reader = ForwardReader(Bytes(bytes(200_000)), 200_000, name="x")
    for _ in range(2000):
        reader.read(100)
        assert len(reader._window) < 3000


def test_a_long_document_beside_packed_short_ones_verifies(tmp_path: Path) -> None:
    texts = [*random_texts(count=30), "long " * 30_000, *random_texts(count=30, seed=1)]
    assert verify_corpus(tiny_corpus(tmp_path, texts=texts).folder) == []
