"""A corpus without a validation split trains without evaluation, with a warning, and an evaluation names the missing
split."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_bad_input import refused, words
from tests.helpers.launch import txl
from txl_dist.cli.main import main

pytestmark = pytest.mark.slow


def test_a_corpus_without_held_out_text_trains_without_evaluation_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("a small text that is read again and again\n" * 60, encoding="utf-8")
    assert main(["prepare", "my.txt", "--out", "data", "--tokenizer", "byte", "--valid-fraction", "0"]) == 0
    capsys.readouterr()
    assert main(["train", *words(Path("data")), "--dry-run"]) == 0
    assert "warning: data has no split 'valid' (it has train): training runs without" in capsys.readouterr().out

    trained = txl("train", *words(Path("data")), cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "training runs without evaluation" in Path("run/log.txt").read_text(encoding="utf-8")
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {"train"} <= {record["kind"] for record in records}
    assert "eval" not in {record["kind"] for record in records}
    assert Path("run/DONE").exists()

    message = refused(capsys, "evaluate", "run")
    assert "has no split 'valid' to score. The corpus has train" in message
    assert "--data" in message
    assert "--split" in message
    assert main(["evaluate", "run", "--split", "train"]) == 0
    assert "bits/byte" in capsys.readouterr().out

    message = refused(capsys, "train", *words(Path("data"), run__dir="other", data__eval_split="test"))
    assert "no split 'test'" in message, "what is named must be there"
