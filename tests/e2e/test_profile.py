"""A run with a trace equals the run without a trace bit for bit."""

import gzip
import json
from pathlib import Path

import pytest

from tests.helpers.launch import txl

pytestmark = pytest.mark.slow


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


def test_a_trace_changes_no_number_of_the_run(tmp_path: Path, config_file: Path) -> None:
    words = ["train", str(config_file), "--train.max-steps", "6"]
    plain = txl(*words, "--run.dir", "plain", cwd=tmp_path)
    traced = txl(*words, "--run.dir", "traced", "--profile", "3:4", cwd=tmp_path)
    assert (plain.returncode, traced.returncode) == (0, 0), plain.stderr + traced.stderr
    assert len(losses(tmp_path / "plain")) == 6
    assert losses(tmp_path / "plain") == losses(tmp_path / "traced")
    assert not (tmp_path / "plain" / "profile").exists()
    trace = tmp_path / "traced" / "profile" / "steps_3_4_rank0.pt.trace.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"data", "forward", "backward", "exchange", "update"} <= names


def test_steps_that_the_run_does_not_have_are_refused(tmp_path: Path, config_file: Path) -> None:
    result = txl("train", str(config_file), "--profile", "29:31", cwd=tmp_path)
    assert result.returncode == 2
    assert "train.max_steps = 30" in result.stderr
