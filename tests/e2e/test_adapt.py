"""`txl evaluate --adapt` scores a run with weights that adapt to the text, and changes no file of the run."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.helpers.launch import txl

pytestmark = pytest.mark.slow


def content_of(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_run_is_scored_as_it_is_and_adapting_and_no_file_of_it_changes(
    tmp_path: Path, config_file: Path, corpus: Path
) -> None:
    assert txl("train", str(config_file), cwd=tmp_path).returncode == 0
    before = content_of(tmp_path / "run")
    alone = txl("evaluate", "run", "--json", "static.json", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    static = json.loads((tmp_path / "static.json").read_text())["model"]
    ways = {
        "dynamic": ["--adapt-train", str(corpus), "--adapt-lr", "1e-3", "--adapt-batches", "20"],
        "cache": ["--cache-window", "100"],
    }
    for way, words in ways.items():
        result = txl("evaluate", "run", "--adapt", way, *words, "--json", f"{way}.json", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert f"adapted: {way}" in result.stdout
        rows = json.loads((tmp_path / f"{way}.json").read_text())
        assert list(rows) == ["model", f"adapted: {way}"]
        assert rows["model"]["loss"] == static["loss"], "the static figure stays what it was"
        assert rows[f"adapted: {way}"]["adapted"]["by"] == way
        if way == "dynamic":  # 30 steps are few: it goes on learning. Words that are drawn at random recall nothing.
            assert rows["adapted: dynamic"]["loss"] < static["loss"]
    assert content_of(tmp_path / "run") == before

    for words in (["--adapt", "dynamic", "--adapt-train", "run"], ["--adapt", "cache", "--cache-share", "1"]):
        refused = txl("evaluate", "run", *words, cwd=tmp_path)
        assert refused.returncode == 2
        assert "Traceback" not in refused.stderr
        assert words[2] in refused.stderr
