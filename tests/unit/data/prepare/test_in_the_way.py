"""An existing corpus in the output folder is refused before any work, with one line. Other paths or the same command
work."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import flip_bit
from txl_dist.cli.main import main
from txl_dist.data.format import PREPARED_NAME
from txl_dist.data.prepare import run
from txl_dist.data.prepare.reindex import reindex_corpus
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.errors import DataError

TEXT = "".join(f"line {number} of some text\n" for number in range(200))
SETTINGS: dict[str, Any] = {"inputs": ["a.txt"], "kind": "byte", "valid_fraction": 0.0}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(TEXT)
    Path("b.txt").write_text(TEXT.upper())
    Path("c.txt").write_text(TEXT)
    prepare_corpus("out", **SETTINGS)
    return tmp_path


OTHERS: dict[str, dict[str, Any]] = {
    "another text of the same size": {"inputs": ["b.txt"]},
    "one text more": {"inputs": ["a.txt", "b.txt"]},
    "a text to hold out": {"valid_inputs": ["b.txt"]},
    "another tokenizer": {"kind": "char"},
    "another seed": {"seed": 1},
    "another way of cutting": {"documents": "line"},
    "another treatment of duplicates": {"documents": "line", "duplicates": "drop"},
    "shards of another length": {"shard_len": 1000},
    "a command": {"inputs": ["pipe:cat a.txt"], "allow_protocols": ["pipe"]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_corpus_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(run, "claim_scratch", None)  # nothing is made, nor discarded
        with pytest.raises(DataError, match=r"^another corpus is in [^\n]*out \([^\n]*--overwrite`\.$"):
            prepare_corpus("out", **{**SETTINGS, **OTHERS[name]})
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before
    prepare_corpus("out", overwrite=True, **{**SETTINGS, **OTHERS[name]})


def test_the_same_text_goes_on_whatever_its_path_and_time_and_how_the_work_is_divided(tmp_path: Path) -> None:
    os.utime("a.txt", (1, 1))
    assert prepare_corpus("out", **SETTINGS).is_unchanged
    assert prepare_corpus("out", **{**SETTINGS, "inputs": [tmp_path / "c.txt"]}).is_unchanged
    assert prepare_corpus("out", **SETTINGS, num_workers=2, block_bytes=1000).is_unchanged


def test_a_damaged_shard_is_mended_by_the_same_command_and_a_damaged_index_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flip_bit(Path("out/train-000000.tar"))
    assert not prepare_corpus("out", **SETTINGS).is_unchanged
    assert prepare_corpus("out", **SETTINGS).is_unchanged
    flip_bit(Path("out/index.json"), offset=40)
    monkeypatch.setattr(run, "claim_scratch", None)
    with pytest.raises(DataError, match=r"^[^\n]*out is damaged: [^\n]*--overwrite`\.$"):
        prepare_corpus("out", **SETTINGS)


def test_a_corpus_of_tars_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree("out", "tars")
    reindex_corpus("tars", tokenizer_path="tars/tokenizer.json", overwrite=True)
    assert not Path("tars", PREPARED_NAME).exists()
    monkeypatch.setattr(run, "claim_scratch", None)
    with pytest.raises(DataError, match=r"another corpus is in [^\n]*tars \(it was made of tars by --reindex\)"):
        prepare_corpus("tars", **SETTINGS)


def test_a_corpus_of_an_older_version_is_compared_as_before() -> None:
    Path("out", PREPARED_NAME).unlink()
    assert prepare_corpus("out", **SETTINGS).is_unchanged
    with pytest.raises(DataError, match="another corpus is in"):
        prepare_corpus("out", **{**SETTINGS, "inputs": ["b.txt"]})


def test_the_command_says_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["prepare", "b.txt", "--out", "out", "--tokenizer", "byte", "--valid-fraction", "0"]
    assert main(words) == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert main(["prepare", "--reindex", "--out", "out", "--tokenizer-file", "out/tokenizer.json"]) == 2
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].endswith("add `--overwrite`. The tars are not changed.")
    assert json.loads(Path("out/index.json").read_text())["splits"].keys() == {"train"}
