"""The result of `txl prepare` depends only on its input, not on workers, parts, kills or other processes."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.helpers.corpora import random_texts, tiny_corpus, write_jsonl
from tests.helpers.logs import recorded_log
from txl_dist.console.progress import Progress
from txl_dist.data import workers
from txl_dist.data.format import PREPARED_NAME
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.prepare import datasets as named
from txl_dist.data.prepare import input_splits as inputs
from txl_dist.data.prepare import merge as assembly
from txl_dist.data.prepare import preparation as job
from txl_dist.data.prepare import run as prepare
from txl_dist.data.prepare import tokenize as parts
from txl_dist.data.prepare.datasets import Member, NamedCorpus
from txl_dist.data.prepare.documents import text_bytes_of
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.data.prepare.run import PrepareSummary, prepare_corpus
from txl_dist.data.prepare.sources import list_sources
from txl_dist.data.verify.verify import verify_corpus
from txl_dist.errors import ConfigError, DataError
from txl_dist.tokenizers.training import train_tokenizer

SETTINGS: dict[str, Any] = {"kind": "byte", "valid_fraction": 0.1, "test_fraction": 0.1, "shard_len": 3000}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of 600 documents in several files and forms, some of them equal."""
    folder = tmp_path / "texts"
    folder.mkdir()
    every = random_texts(count=500)
    write_jsonl(folder / "a.jsonl", every[:200])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(write_jsonl(folder / "b", every[180:400]).read_bytes()))
    write_jsonl(folder / "c.jsonl", every[400:])
    for i in range(20):
        (folder / f"d{i:02d}.txt").write_text("" if i % 5 == 0 else f"file {i} " * i)
    return folder


def content_of(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != PREPARED_NAME
    }


def test_a_tokenizer_at_a_url_gives_the_corpus_of_the_same_file(tmp_path: Path, texts: Path) -> None:
    first = prepare_corpus(tmp_path / "first", inputs=[texts], **SETTINGS).corpus
    url = f"file://{first.location}/tokenizer.json"
    settings = {"inputs": [texts], "valid_fraction": 0.1, "num_workers": 1}
    prepare_corpus(tmp_path / "path", tokenizer_path=tmp_path / "first/tokenizer.json", **settings)
    prepare_corpus(tmp_path / "url", tokenizer_path=url, **settings)
    assert content_of(tmp_path / "url") == content_of(tmp_path / "path")
    with pytest.raises(DataError, match=r"cannot read file://.*none\.json"):
        prepare_corpus(tmp_path / "none", tokenizer_path=f"file://{tmp_path}/none.json", **settings)


def texts_in(corpus: Corpus, split: str) -> list[str]:
    tokenizer = corpus.tokenizer
    return [tokenizer.decode(document[:-1].tolist()) for document in corpus.split(split).each_document()]


KILLED = """
import os, signal, sys
import psutil
from txl_dist.data.prepare import preparation as job
from txl_dist.data.prepare import run as prepare
settings = eval(sys.argv[2])
where, after = sys.argv[3], int(sys.argv[4])

def dying(function):
    def call(*args, **kwargs):
        global after
        after -= 1
        if after < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

def dying_iterator(function):
    def call(*args, **kwargs):
        for number, item in enumerate(function(*args, **kwargs)):
            if number == after:
                print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            yield item
    return call

if __name__ == "__main__":
    if where == "read_parts":
        job.read_parts = dying_iterator(job.read_parts)
    else:
        setattr(prepare, where, dying(getattr(prepare, where)))
    prepare.prepare_corpus(sys.argv[1], **settings)
"""


def killed(output: Path, settings: dict[str, Any], where: str, after: int, **run: Any) -> list[int]:
    """Prepare in a process that kills itself (-9) in the middle. Returns the process ids of its workers."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", KILLED, str(output), repr(settings), where, str(after)]
    result = subprocess.run(command, capture_output=True, env=environment, timeout=120, **run)
    assert result.returncode == -9, result.stderr.decode()
    assert not output.exists()
    return [int(pid) for pid in result.stdout.split()]


@pytest.mark.slow
def test_workers_and_the_size_of_parts_change_no_byte(tmp_path: Path, texts: Path) -> None:
    settings = {**SETTINGS, "inputs": [str(texts)], "duplicates": "drop"}
    expected = prepare_corpus(tmp_path / "one", **settings, num_workers=1)
    assert {split: len(expected.corpus.split(split).shards) for split in ("train", "valid", "test")}["train"] > 5
    for number, (num_workers, block_bytes) in enumerate([(2, 4000), (3, 15000), (1, 1500)]):
        folder = tmp_path / str(number)
        prepare_corpus(folder, **settings, num_workers=num_workers, block_bytes=block_bytes)
        assert content_of(folder) == content_of(tmp_path / "one")
    other = prepare_corpus(tmp_path / "seed", **settings, seed=1).corpus
    assert other.fingerprint != expected.corpus.fingerprint
    assert sorted(texts_in(other, "train")) == sorted(texts_in(expected.corpus, "train"))
    assert texts_in(other, "valid") == texts_in(expected.corpus, "valid")


@pytest.mark.parametrize(("where", "after"), [("encode_part", 4), ("write_planned", 3)])
def test_after_a_kill_the_same_command_goes_on_and_ends_as_if_nothing_had_happened(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, where: str, after: int
) -> None:
    settings = {**SETTINGS, "inputs": [str(texts)], "num_workers": 1, "block_bytes": 5000}
    expected = prepare_corpus(tmp_path / "expected", **settings)
    killed(tmp_path / "out", settings, where, after)
    calls = {"encode_part": 0, "write_planned": 0, "train_tokenizer": 0}

    def counting(module: Any, name: str) -> None:
        function = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counting(prepare, "encode_part")
    counting(prepare, "write_planned")
    counting(job, "train_tokenizer")
    finished = len(list((tmp_path / ".out.prepare").glob("part-*.json")))
    summary = prepare_corpus(tmp_path / "out", **settings)
    assert content_of(tmp_path / "out") == content_of(tmp_path / "expected")
    assert finished == (4 if where == "encode_part" else summary.parts_kept) > 3
    assert calls["train_tokenizer"] == 0
    assert summary.parts_kept == finished
    shards = sum(len(expected.corpus.split(split).shards) for split in expected.corpus.split_names)
    assert calls["write_planned"] == shards - (after if where == "write_planned" else 0)
    assert (calls["encode_part"] == 0) == (where == "write_planned")
    assert f"kept from an interrupted preparation: {finished} part" in "\n".join(summary.lines())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "out", "texts"]


@pytest.mark.slow
def test_an_output_inside_the_input_folder_is_no_input_after_a_kill_either(tmp_path: Path, texts: Path) -> None:
    settings = {**SETTINGS, "inputs": [str(texts)], "num_workers": 1, "block_bytes": 5000}
    expected = prepare_corpus(tmp_path / "expected", **settings).corpus
    killed(texts / "out", settings, "write_planned", 2)
    summary = prepare_corpus(texts / "out", **settings)
    assert summary.shards_kept == 2
    assert summary.corpus.fingerprint == expected.fingerprint
    assert prepare_corpus(texts / "out", **settings).is_unchanged


@pytest.mark.slow
def test_after_a_kill_in_the_midst_of_workers_none_of_them_lives_on(tmp_path: Path, texts: Path) -> None:
    settings = {**SETTINGS, "inputs": [str(texts)], "num_workers": 2, "block_bytes": 2000}
    tokenizer = tiny_corpus(tmp_path, name="given").folder / "tokenizer.json"
    settings = {**settings, "kind": "auto", "tokenizer_path": str(tokenizer)}
    pids = killed(tmp_path / "out", settings, "read_parts", 9)
    assert len(pids) >= 2
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, "workers outlived the process that was killed"
        time.sleep(0.05)
    assert list((tmp_path / ".out.prepare").glob("part-*.json"))
    prepare_corpus(tmp_path / "out", **settings)
    prepare_corpus(tmp_path / "expected", **{**settings, "num_workers": 1})
    assert content_of(tmp_path / "out") == content_of(tmp_path / "expected")


def test_stdin_cannot_be_read_again_after_a_kill_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (write_jsonl(tmp_path / f"{i}.jsonl", random_texts(count=100, seed=i)) for i in range(2))
    settings = {**SETTINGS, "inputs": ["-"], "stdin_format": "jsonl", "num_workers": 1, "block_bytes": 3000}
    killed(tmp_path / "out", settings, "encode_part", 4, input=first.read_bytes())
    assert (tmp_path / ".out.prepare").exists()
    with second.open("rb") as stream, monkeypatch.context() as patch, recorded_log() as log:
        patch.setattr(sys, "stdin", type("Stdin", (), {"buffer": stream, "fileno": stream.fileno})())
        summary = prepare_corpus(tmp_path / "out", **settings)
    assert "because stdin, commands and URLs without a version can have changed. Starting again." in log[0][1]
    assert summary.parts_kept == 0
    prepare_corpus(tmp_path / "file", **{**settings, "inputs": [str(second)]})
    assert content_of(tmp_path / "out") == content_of(tmp_path / "file"), "the same as from a file"


def test_a_command_runs_once_though_a_tokenizer_is_learnt_from_what_it_prints(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(count=100))
    settings = {**SETTINGS, "kind": "bpe", "vocab_size": 300, "stdin_format": "jsonl", "allow_protocols": ("pipe",)}
    prepare_corpus(tmp_path / "out", inputs=[f"pipe:echo run >> {tmp_path}/runs; cat {source}"], **settings)
    assert (tmp_path / "runs").read_text() == "run\n"
    prepare_corpus(tmp_path / "file", inputs=[source], **settings)
    assert content_of(tmp_path / "out") == content_of(tmp_path / "file")
    bad = "pipe:echo bad"
    with pytest.raises(DataError, match=f"^{bad}, line 1"):
        prepare_corpus(tmp_path / "bad", inputs=[bad], **settings)
    with pytest.raises(DataError, match="exit status 3"):
        prepare_corpus(tmp_path / "bad", inputs=[f"pipe:cat {source}; exit 3"], **settings)


def test_stdin_streams_if_the_tokenizer_is_given(tmp_path: Path) -> None:
    given = tiny_corpus(tmp_path, name="given").folder / "tokenizer.json"
    words = ["prepare", "-", "--out", "out", "--documents", "line", "--tokenizer-file", str(given)]
    lines = "\n".join(f"line {i}" for i in range(200))
    command = [sys.executable, "-m", "txl_dist", *words, "--num-workers", "2"]
    result = subprocess.run(command, input=lines, text=True, capture_output=True, cwd=tmp_path, timeout=120)
    assert result.returncode == 0, result.stderr
    corpus = open_corpus(tmp_path / "out")
    assert sorted(texts_in(corpus, "train") + texts_in(corpus, "valid")) == sorted(lines.split("\n"))
    rows = [line.split() for line in result.stdout.splitlines()[1:4]]
    assert rows[0] == ["split", "documents", "tokens", "bytes", "of", "text", "bytes/token", "longest", "shards"]
    assert [row[0] for row in rows[1:]] == ["train", "valid"]


def test_a_killed_worker_is_an_error_not_a_wait() -> None:
    with pytest.raises(DataError, match=r"a worker process was killed.*--num-workers"), workers.start_workers(2) as own:
        list(own.in_order(signal.raise_signal, [signal.SIGKILL] * 50))


def fail(task: int) -> int:
    if task >= 7:
        raise DataError(f"task {task}")
    return task


@pytest.mark.slow
def test_workers_give_results_in_order_and_the_first_error() -> None:
    results = []
    with workers.start_workers(2) as own:
        assert list(own.in_order(abs, iter(range(40)))) == list(range(40))
        with pytest.raises(DataError, match="task 7"):
            results.extend(own.in_order(fail, range(1000)))


def test_a_second_preparation_of_the_same_target_is_refused_and_says_whose_it_is(tmp_path: Path, texts: Path) -> None:
    held = prepare.claim_scratch(tmp_path / "out", stamp="", can_continue=True)
    with held, pytest.raises(DataError, match=rf"being prepared by process {os.getpid()} on "):
        prepare_corpus(tmp_path / "out", inputs=[texts], **SETTINGS)
    assert not (tmp_path / ".out.prepare").exists()
    prepare_corpus(tmp_path / "out", inputs=[texts], **SETTINGS)


@pytest.mark.slow
def test_other_settings_discard_what_was_finished_and_say_so(tmp_path: Path, texts: Path) -> None:
    settings = {**SETTINGS, "inputs": [str(texts)], "num_workers": 1, "block_bytes": 5000}
    killed(tmp_path / "out", settings, "write_planned", 2)
    with recorded_log() as log:
        summary = prepare_corpus(tmp_path / "out", **{**settings, "seed": 5})
    assert summary.parts_kept == summary.shards_kept == 0
    assert "it had other settings. Starting again" in log[0][1]
    killed(tmp_path / "again", settings, "write_planned", 2)
    another = prepare_corpus(tmp_path / "again", **{**settings, "shard_len": 1500})
    assert another.parts_kept > 3, "parts do not depend on the length of shards"
    assert another.shards_kept == 0
    assert verify_corpus(tmp_path / "again") == []


def test_after_a_file_was_mended_what_came_before_it_is_kept(tmp_path: Path) -> None:
    given = tiny_corpus(tmp_path, name="given").folder / "tokenizer.json"
    folder = tmp_path / "texts"
    folder.mkdir()
    every = random_texts(count=300)
    for i in range(3):
        write_jsonl(folder / f"{i}.jsonl", every[i * 100 : i * 100 + 100])
    good = (folder / "2.jsonl").read_text()
    (folder / "2.jsonl").write_text(good + "{\n")
    settings: dict[str, Any] = {"inputs": [folder], "tokenizer_path": given, "block_bytes": 4000, "num_workers": 1}
    with pytest.raises(DataError, match=r"2\.jsonl, line 101"):
        prepare_corpus(tmp_path / "out", **settings)
    (folder / "2.jsonl").write_text(good.replace("a", "b"))
    summary = prepare_corpus(tmp_path / "out", **settings)
    prepare_corpus(tmp_path / "expected", **settings)
    assert content_of(tmp_path / "out") == content_of(tmp_path / "expected")
    assert summary.parts_kept >= 5


def test_exact_duplicates_are_counted_and_dropped_on_request(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", ["one", "two", "one", "three", "held", "one"])
    valid = write_jsonl(tmp_path / "valid.jsonl", ["held", "out", "out"])
    settings: dict[str, Any] = {"inputs": [train], "valid_inputs": [valid], "kind": "byte"}
    report = prepare_corpus(tmp_path / "report", **settings).corpus
    counted = {"exact_duplicates": 3, "held_out_duplicates": 1, "near_duplicates": 0}
    assert report.statistics.items() >= {**counted, "duplicates_dropped": 0}.items()
    assert report.split("train").documents == 6
    dropped = prepare_corpus(tmp_path / "drop", **settings, duplicates="drop")
    assert dropped.corpus.statistics.items() >= {**counted, "duplicates_dropped": 4}.items()
    assert sorted(texts_in(dropped.corpus, "train")) == ["one", "three", "two"]
    assert texts_in(dropped.corpus, "valid") == ["held", "out"]
    assert dropped.corpus.split("train").text_bytes == len("onetwothree")
    assert verify_corpus(tmp_path / "drop") == []
    assert "  train documents that are also in the validation or test split: 1" in dropped.lines()
    ignored = prepare_corpus(tmp_path / "ignore", **settings, duplicates="ignore").corpus
    assert "exact_duplicates" not in ignored.statistics
    assert np.array_equal(ignored.split("train").read_all(), report.split("train").read_all())


def test_equal_documents_never_straddle_splits_that_a_hash_makes(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(count=100) * 2)
    corpus = prepare_corpus(tmp_path / "out", inputs=[source], **SETTINGS).corpus
    assert corpus.statistics["exact_duplicates"] == 100
    assert corpus.statistics["held_out_duplicates"] == 0
    splits = [set(texts_in(corpus, split)) for split in ("train", "valid", "test")]
    assert all(splits)
    assert sum(map(len, splits)) == len(set.union(*splits)) == 100


def test_near_duplicates_are_counted(tmp_path: Path) -> None:
    base = random_texts(count=1, longest=200_000, seed=3)[0]
    near = base[: len(base) // 2] + "changed" + base[len(base) // 2 :]
    source = write_jsonl(tmp_path / "a.jsonl", [base, *random_texts(count=20), near])
    corpus = prepare_corpus(tmp_path / "out", inputs=[source], kind="bpe", vocab_size=300).corpus
    assert corpus.statistics["near_duplicates"] == 1
    assert corpus.statistics["exact_duplicates"] == 0


def test_documents_of_many_scripts_and_empty_ones_come_back_and_the_empty_are_counted(tmp_path: Path) -> None:
    every = ["\u4e00\u5207", "", "\u0627\u0644\u0646\u0627\u0633", "a", "", "\U0001f600", "\u1789 \u17c2", "x"]
    source = write_jsonl(tmp_path / "a.jsonl", every)
    corpus = prepare_corpus(tmp_path / "out", inputs=[source], kind="bpe", valid_fraction=0.0).corpus
    assert sorted(texts_in(corpus, "train")) == sorted(filter(None, every))
    assert corpus.statistics["empty_documents_dropped"] == 2
    assert corpus.statistics["documents_read"] == 8
    bytes_only = tiny_corpus(tmp_path, texts=["a", "b", "c"], end_of_text=False, valid_fraction=0.0)
    lengths = [len(document) for document in bytes_only.split("train").each_document()]
    assert lengths == [1, 1, 1], "documents of one token are kept"


def test_any_bytes_survive_a_byte_tokenizer_and_only_that(tmp_path: Path) -> None:
    content = bytes(range(256)) * 3
    (tmp_path / "a.bin").write_bytes(content)
    settings: dict[str, Any] = {"inputs": [tmp_path / "a.bin"], "valid_fraction": 0.0, "encoding_errors": "keep"}
    corpus = prepare_corpus(tmp_path / "out", kind="byte", end_of_text=False, **settings).corpus
    (document,) = corpus.split("train").each_document()
    tokenizer = corpus.tokenizer
    assert np.array_equal(document, tokenizer.encode(content.decode("utf-8", "surrogateescape")))
    assert corpus.split("train").text_bytes == len(text_bytes_of(content.decode("utf-8", "surrogateescape"))) == 768
    with pytest.raises(ConfigError, match=r"encoding_errors=keep .*byte tokenizer"):
        prepare_corpus(tmp_path / "char", kind="char", **settings)


def test_the_tokenizer_may_be_learnt_from_a_share_of_the_train_documents(tmp_path: Path) -> None:
    every = [chr(0x4E00 + i) * 30 for i in range(200)]
    source = write_jsonl(tmp_path / "a.jsonl", every)
    settings: dict[str, Any] = {"inputs": [source], "kind": "char"}
    whole = prepare_corpus(tmp_path / "whole", **settings).corpus
    share = prepare_corpus(tmp_path / "share", **settings, tokenizer_fraction=0.3).corpus
    assert 30 < share.vocab_size < 100 < whole.vocab_size
    assert share.split("train").documents == whole.split("train").documents
    assert (
        prepare_corpus(tmp_path / "all", **settings, tokenizer_all_splits=True).corpus.vocab_size
        == 202
        > whole.vocab_size
    )


def test_a_share_without_any_document_is_named(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["some text", "other text"])
    with pytest.raises(DataError, match=r"--tokenizer-fraction 1e-09 chooses none of 2 texts .*larger"):
        prepare_corpus(tmp_path / "out", inputs=[source], kind="char", valid_fraction=0.0, tokenizer_fraction=1e-9)


def test_a_document_that_the_tokenizer_refuses_is_named(tmp_path: Path) -> None:
    given = train_tokenizer("byte", lambda: ["abc"], observed_symbols=True)
    given.save(tmp_path / "tokenizer.json")
    source = write_jsonl(tmp_path / "a.jsonl", ["abc"] * 20 + ["abcd"])
    settings: dict[str, Any] = {"tokenizer_path": tmp_path / "tokenizer.json", "valid_fraction": 0.0}
    with pytest.raises(DataError, match=r"a\.jsonl, line 21: "):
        prepare_corpus(tmp_path / "out", inputs=[source], **settings)


def test_a_named_corpus_is_prepared_from_a_local_file_as_the_papers_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = "".join(f"line {i}\t\n" for i in range(100)).encode()
    digest = hashlib.sha256(content).hexdigest()
    settings = {
        "kind": "byte",
        "documents": "file",
        "end_of_text": False,
        "observed_symbols": True,
        "tokenizer_all_splits": True,
    }
    entry = NamedCorpus(
        urls=("http://127.0.0.1:9/none",),
        sha256=digest,
        members=(Member("mine", (), sha256=digest),),
        tokenizer=settings,
        ends=(("train", len(content) // 2), ("valid", len(content))),
        clean=lambda part: part.replace(b"\t", b""),
    )
    monkeypatch.setitem(named.NAMED, "mine", entry)
    (tmp_path / "copy").write_bytes(content)
    given: dict[str, Any] = {"inputs": ["mine"], "archive": str(tmp_path / "copy")}
    corpus = prepare_corpus(tmp_path / "out", **given, encoding_errors="keep").corpus
    assert corpus.split_names == ("train", "valid")
    assert corpus.end_of_text is None
    assert corpus.vocab_size == len(set(content) - {9})
    train = content[: len(content) // 2].replace(b"\t", b"")
    assert corpus.split("train").tokens == len(train)
    own = prepare_corpus(tmp_path / "own", **given, kind="char", documents="line").corpus
    assert own.split("train").documents == len(train.splitlines()), "its splits are its own, none is held out"
    assert own.tokenizer.kind == "char"
    assert own.end_of_text is not None
    with pytest.raises(ConfigError, match="must be the only input"):
        prepare_corpus(tmp_path / "no", inputs=["mine", "stdlib"])
    with pytest.raises(ConfigError, match="its own splits"):
        prepare_corpus(tmp_path / "no", **given, valid_fraction=0.2)
    with pytest.raises(ConfigError, match="--archive"):
        prepare_corpus(tmp_path / "no", inputs=["stdlib"], archive="x")


def test_a_shard_ends_where_documents_do_and_none_is_empty(tmp_path: Path) -> None:
    every = [*random_texts(count=50), "long " * 5000, *random_texts(count=50, seed=1)]
    corpus = tiny_corpus(tmp_path, texts=every, shard_len=1000, valid_fraction=0.0, seed=3)
    split = corpus.split("train")
    assert split.shard_tokens.min() > 0
    assert split.longest == 25_001
    assert sorted(texts_in(corpus, "train")) == sorted(every)
    assert (
        len(tiny_corpus(tmp_path, name="one", texts=every, valid_fraction=0.0, shard_len=1 << 25).split("train").shards)
        == 1
    )


MEASURED = """
import re, sys
from pathlib import Path
from txl_dist.data.prepare.run import prepare_corpus
prepare_corpus(sys.argv[2], inputs=[sys.argv[1]], tokenizer_path=sys.argv[3], num_workers=1, block_bytes=1 << 19,
               shard_len=1 << 20, valid_fraction=0.01)
# Not ru_maxrss, which keeps the peak of whoever started this process.
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    given = tiny_corpus(tmp_path, name="given").folder / "tokenizer.json"
    lines = "".join(json.dumps({"text": text * 20}) + "\n" for text in random_texts(count=400))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    peaks = []
    for number, times in enumerate((6, 36)):
        source = tmp_path / f"{number}.jsonl"
        source.write_text(lines * times)
        command = [sys.executable, "-c", MEASURED, str(source), str(tmp_path / f"out{number}"), str(given)]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
        assert result.returncode == 0, result.stderr
        peaks.append(int(result.stdout))
    size = source.stat().st_size
    assert size > 30e6
    assert peaks[1] - peaks[0] < size / 4


@pytest.mark.parametrize("cut", ["line", "blank_line"])
def test_parts_batches_and_shards_hold_only_so_many_documents_however_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: Any
) -> None:
    settings: dict[str, Any] = {**SETTINGS, "inputs": [tmp_path / "a.txt"], "documents": cut, "shard_len": 1 << 20}
    every = [str(i) for i in range(1000)]
    (tmp_path / "a.txt").write_text("\n\n".join(every))
    expected = prepare_corpus(tmp_path / "expected", **settings).corpus
    monkeypatch.setattr(inputs, "MOST_RECORDS", 100)
    monkeypatch.setattr(parts, "_BATCH_DOCUMENTS", 7)
    monkeypatch.setattr(assembly, "_MOST_DOCUMENTS", 200)
    files = list_sources([tmp_path / "a.txt"], PrepareSettings((), documents=cut), split="train").files
    cut_up = list(inputs.read_parts(files, part_bytes=1 << 20))
    assert len(cut_up) > 10
    for number, part in enumerate(cut_up):
        assert list(inputs.read_parts(files, part_bytes=1 << 20, begin=part.end)) == cut_up[number + 1 :]
    sizes: list[int] = []
    encode = parts._encode_batch

    def counting(batch: Any, *rest: Any) -> None:
        sizes.append(len(batch))
        encode(batch, *rest)

    monkeypatch.setattr(parts, "_encode_batch", counting)
    corpus = prepare_corpus(tmp_path / "out", **settings).corpus
    assert max(sizes) == 7
    assert sum(sizes) == 1000
    assert [len(each.split("train").shards) for each in (expected, corpus)] == [1, 4]
    assert max(shard.documents for shard in corpus.split("train").shards) < 300
    assert texts_in(corpus, "train") == texts_in(expected, "train")


def test_a_named_corpus_keeps_its_settings_if_its_own_kind_of_tokenizer_is_asked_for() -> None:
    for name in named.NAMED:
        settings = PrepareSettings(inputs=(name,)).completed()
        assert PrepareSettings(inputs=(name,), kind=settings.kind).completed() == settings
    other = PrepareSettings(inputs=("enwik8",), kind="bpe").completed()
    assert other.end_of_text
    assert other.encoding_errors == "refuse"


def test_progress_tells_rate_and_time_left_at_intervals() -> None:
    now = 0.0
    progress = Progress("encoding", total=100_000_000, done=20_000_000, clock=lambda: now)
    with progress, recorded_log() as log:
        for second in range(1, 26):
            now = float(second)
            progress.reach(20_000_000 + second * 1_000_000)
    assert [message for _, message in log] == [
        "encoding: 30 of 100 MB, 30 %, 1.0 MB/s, 0:01:10 left",
        "encoding: 40 of 100 MB, 40 %, 1.0 MB/s, 0:01:00 left",
    ]


def test_the_summary_is_a_table_that_lines_up(tmp_path: Path, texts: Path) -> None:
    summary: PrepareSummary = prepare_corpus(tmp_path / "out", inputs=[texts], **SETTINGS)
    table = summary.lines()[1:5]
    assert len({len(line) for line in table}) == 1
    assert [line.split()[0] for line in table] == ["split", "train", "valid", "test"]


def test_the_share_of_unknown_words_is_told_per_split(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", ["a a a b"] * 5)
    valid = write_jsonl(tmp_path / "valid.jsonl", ["a c d b"])
    settings = {"inputs": [train], "valid_inputs": [valid], "kind": "word", "end_of_text": False}
    lines = prepare_corpus(tmp_path / "corpus", **settings).lines()
    assert [line for line in lines if line.startswith("  unknown")] == ["  unknown tokens in valid: 40.00%"]


def test_a_url_is_no_output_and_a_fraction_means_nothing_beside_given_text(tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", ["some text"])
    with pytest.raises(ConfigError, match="call prepare_on_cluster"):
        prepare_corpus("http://example.org/corpus", inputs=[text])
    with pytest.raises(ConfigError, match=r"valid_fraction=0.2 has no effect"):
        prepare_corpus(tmp_path / "corpus", inputs=[text], valid_inputs=[text], valid_fraction=0.2)
