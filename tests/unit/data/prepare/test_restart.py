"""After any kill of `txl prepare`, and any other command in between, the result is that of the last command."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import flip_bit, random_texts, write_jsonl
from tests.helpers.logs import recorded_log
from txl_dist.data.format import PREPARED_NAME
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.data.prepare import preparation as job
from txl_dist.data.prepare import run as prepare
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.data.prepare.workdir import check_target, claim_scratch
from txl_dist.data.verify.verify import verify_corpus
from txl_dist.errors import DataError
from txl_dist.tokenizers.training import train_tokenizer

KILLED = """
import importlib, os, signal, sys
from txl_dist.data.prepare.run import prepare_corpus

output, settings, module, place, after = sys.argv[1:]
*owners, name = place.split(".")
owner = importlib.import_module(module)
for each in owners:
    owner = getattr(owner, each)
function, calls = getattr(owner, name), 0

def dying(*args, **kwargs):
    global calls
    calls += 1
    if calls > int(after):
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*args, **kwargs)

setattr(owner, name, dying)
prepare_corpus(output, **eval(settings))
"""
SETTINGS: dict[str, Any] = {"kind": "byte", "valid_fraction": 0.1, "num_workers": 1}


def killed(output: Path, settings: dict[str, Any], module: str, place: str, after: int = 0) -> Path:
    """Prepare in a process that kills itself (-9) in a call of module.place. Returns the scratch folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", KILLED, str(output), repr(settings), module, place, str(after)]
    result = subprocess.run(command, capture_output=True, env=environment, timeout=120)
    assert result.returncode == -9, result.stderr.decode()
    return output.with_name(f".{output.name}.prepare")


def content_of(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != PREPARED_NAME
    }


def texts_in(folder: Path, split: str = "train") -> list[str]:
    corpus = open_corpus(folder)
    decode = corpus.tokenizer.decode
    return [decode(document[:-1].tolist()) for document in corpus.split(split).each_document()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """400 documents, half of them equal to others."""
    return write_jsonl(tmp_path / "a.jsonl", random_texts(count=200) * 2)


@pytest.mark.parametrize("place", ["write_planned", "atomic_replace"])
@pytest.mark.parametrize("other", [{"shard_len": 4500}, {"duplicates": "drop"}])
def test_shards_are_kept_only_by_the_plan_that_they_were_written_for(
    tmp_path: Path, source: Path, other: dict[str, Any], place: str
) -> None:
    settings = {**SETTINGS, "inputs": [str(source)], "shard_len": 3000}
    prepare_corpus(tmp_path / "expected", **settings)
    killed(tmp_path / "out", settings, "txl_dist.data.prepare.run", "write_planned", 5)
    module = "txl_dist.data.prepare.run" if place == "write_planned" else "txl_dist.data.prepare.merge"
    scratch = killed(tmp_path / "out", {**settings, **other}, module, place, 1 if place == "write_planned" else 0)
    if place == "atomic_replace":  # the tar is that of the other plan by now
        assert not (scratch / "shard-train-000000.tar.json").exists()
    summary = prepare_corpus(tmp_path / "out", **settings)
    assert summary.parts_kept > 0
    assert summary.shards_kept == 0
    assert content_of(tmp_path / "out") == content_of(tmp_path / "expected")


def test_shards_that_were_damaged_meanwhile_are_written_again(tmp_path: Path, source: Path) -> None:
    settings = {**SETTINGS, "inputs": [str(source)], "shard_len": 3000}
    prepare_corpus(tmp_path / "expected", **settings)
    scratch = killed(tmp_path / "out", settings, "txl_dist.data.prepare.run", "write_planned", 5)
    os.truncate(scratch / "corpus" / "train-000000.tar", 5000)
    flip_bit(scratch / "corpus" / "train-000001.tar.idx")
    assert prepare_corpus(tmp_path / "out", **settings).shards_kept == 3
    assert content_of(tmp_path / "out") == content_of(tmp_path / "expected")


def test_after_a_kill_in_the_cleaning_up_the_corpus_may_be_moved_away_and_made_again(
    tmp_path: Path, source: Path
) -> None:
    settings = {**SETTINGS, "inputs": [str(source)], "shard_len": 3000}
    for number, (module, place) in enumerate([("txl_dist.data.prepare.workdir", "flush_folder"), ("shutil", "rmtree")]):
        output, moved = tmp_path / str(number), tmp_path / f"moved{number}"
        scratch = killed(output, settings, module, place)
        assert verify_corpus(output) == []
        if place == "rmtree":
            for path in scratch.glob("*.ids"):
                path.unlink()
        output.rename(moved)
        assert prepare_corpus(output, **settings).shards_kept == 0
        assert content_of(output) == content_of(moved)
        assert not scratch.exists()


def test_a_kill_between_a_part_and_what_is_said_of_it_leaves_no_other_text_in_its_place(tmp_path: Path) -> None:
    source, right = tmp_path / "a.txt", tmp_path / "right.txt"
    train_tokenizer("byte", lambda: ["any"]).save(tmp_path / "tokenizer.json")
    settings = {"inputs": [str(source)], "num_workers": 1, "documents": "line", "valid_fraction": 0.0}
    settings["tokenizer_path"] = str(tmp_path / "tokenizer.json")
    source.write_text("the right text\n")
    killed(tmp_path / "out", settings, "txl_dist.data.prepare.run", "write_planned")
    source.rename(right)
    source.write_text("the wrong text\n")
    killed(tmp_path / "out", settings, "txl_dist.data.prepare.tokenize", "atomic_replace")
    right.replace(source)
    prepare_corpus(tmp_path / "out", **settings)
    assert texts_in(tmp_path / "out") == ["the right text"]


def test_a_kill_between_a_tokenizer_and_what_it_was_learnt_from_leaves_no_other_tokenizer(tmp_path: Path) -> None:
    source, right = tmp_path / "a.txt", tmp_path / "right.txt"
    settings = {"inputs": [str(source)], "num_workers": 1, "kind": "char", "valid_fraction": 0.0}
    source.write_text("abc")
    killed(tmp_path / "out", settings, "txl_dist.data.prepare.run", "encode_part")
    source.rename(right)
    source.write_text("wxyz")
    killed(tmp_path / "out", settings, "txl_dist.data.prepare.preparation", "atomic_replace", 1)
    right.replace(source)
    prepare_corpus(tmp_path / "out", **settings)
    assert texts_in(tmp_path / "out") == ["abc"]


def test_a_kill_while_work_is_discarded_leaves_nothing_that_is_taken_for_whole(tmp_path: Path, source: Path) -> None:
    settings = {**SETTINGS, "inputs": [str(source)]}
    killed(tmp_path / "out", settings, "txl_dist.data.prepare.run", "write_planned")
    scratch = killed(tmp_path / "out", {**settings, "seed": 5}, "pathlib", "Path.unlink", 1)
    assert list(scratch.glob("part-*.json"))
    assert prepare_corpus(tmp_path / "out", **settings).parts_kept == 0


def test_a_kill_between_the_two_renames_of_overwrite_loses_neither_corpus(tmp_path: Path, source: Path) -> None:
    settings = {**SETTINGS, "inputs": [str(source)]}
    prepare_corpus(tmp_path / "out", **settings)
    old = content_of(tmp_path / "out")
    scratch = killed(tmp_path / "out", {**settings, "seed": 1, "overwrite": True}, "pathlib", "Path.rename", 1)
    assert not (tmp_path / "out").exists()
    killed(tmp_path / "out", {**settings, "seed": 2, "overwrite": True}, "txl_dist.data.prepare.run", "encode_part")
    assert content_of(tmp_path / "out") == old
    prepare_corpus(tmp_path / "out", **settings, seed=2, overwrite=True)
    assert content_of(tmp_path / "out") != old
    assert not scratch.exists()


def test_a_corpus_that_cannot_be_replaced_stays(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SETTINGS, "inputs": [str(source)]}
    prepare_corpus(tmp_path / "out", **settings)
    old, rename = content_of(tmp_path / "out"), Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.name == "corpus":
            raise OSError(errno.EIO, "it broke")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(DataError, match=r"it broke\. Choose another output folder"):
        prepare_corpus(tmp_path / "out", **settings, seed=1, overwrite=True)
    assert content_of(tmp_path / "out") == old


def test_a_tokenizer_is_not_learnt_again_after_ctrl_c(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS, "inputs": [str(source)]}

    def interrupted(task: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "encode_part", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(tmp_path / "out", **settings)
    monkeypatch.setattr(job, "train_tokenizer", None)
    assert prepare_corpus(tmp_path / "out", **settings).corpus.split("train").documents > 300


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("part-000000.json", True),
        ("tokenizer-inputs", True),
        ("named/corpus.tar.gz", True),
        ("named/corpus.tar.gz.part", False),
        ("stdin", False),
    ],
)
def test_after_an_error_what_can_be_used_again_is_kept_and_nothing_else(
    tmp_path: Path, name: str, is_kept: bool
) -> None:
    scratch = tmp_path / ".out.prepare"

    def interrupted(*, can_continue: bool) -> None:
        with claim_scratch(tmp_path / "out", stamp="", can_continue=can_continue):
            (scratch / name).parent.mkdir(exist_ok=True)
            (scratch / name).touch()
            raise KeyboardInterrupt

    for can_continue in (True, False):
        with recorded_log() as log, pytest.raises(KeyboardInterrupt):
            interrupted(can_continue=can_continue)
        assert scratch.exists() == (is_kept and can_continue)
        assert any("finished work is kept" in message for _, message in log) == scratch.exists()


def test_the_remedy_is_space_only_where_space_is_short(tmp_path: Path) -> None:
    remedies = {errno.ENOSPC: r"Free some disk space or choose another", errno.EBUSY: r"busy\. Choose another"}
    for number, remedy in remedies.items():
        with (
            pytest.raises(DataError, match=remedy),
            claim_scratch(tmp_path / "out", stamp="", can_continue=True),
        ):
            raise OSError(number, os.strerror(number))


def test_the_output_may_be_a_link_to_a_folder_and_a_mount_point_is_refused_at_once(
    tmp_path: Path, source: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for seed in range(2):
        prepare_corpus(tmp_path / "link", inputs=[source], **SETTINGS, seed=seed, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert verify_corpus(tmp_path / "folder") == []
    with pytest.raises(DataError, match=r"mount point.*a folder below it"):
        check_target(Path("/"))
