"""The output for a user of a run on two ranks, of which one is slow and whose TensorBoard folder is removed."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job import Job
from tests.helpers.launch import txl

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.alone]

SLOW = ",".join(f"slow:1:{step}" for step in (6, 7, 8))


def records_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def replace_by_file(folder: Path) -> None:
    """Put a file where the run has its TensorBoard folder, which the running job may make again in between."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(IsADirectoryError):
            folder.write_text("in the way")
            return
    raise AssertionError(f"{folder} comes back again and again")


def test_a_run_shows_its_model_names_its_straggler_and_outlives_tensorboard(tmp_path: Path, config_file: Path) -> None:
    words = [str(config_file), "--train.max_steps", "20", "--eval.every_steps", "10", "--checkpoint.every_steps", "10"]
    samples = ["--metrics.sample_every_steps", "10", "--metrics.sample_len", "12", "--metrics.sample_prompt", "the cat"]
    run = tmp_path / "run"
    with Job("train", *words, *samples, log=tmp_path / "log", cwd=tmp_path, fault=SLOW) as job:
        job.wait_for(lambda: any(record["kind"] == "train" for record in records_of(run)))
        replace_by_file(run / "tensorboard")
        assert job.wait(limit_s=300) == [0, 0], job.text[-4000:]

    records = records_of(run)
    kinds = {kind: [record for record in records if record["kind"] == kind] for kind in ("eval", "memory", "sample")}
    assert [[record["step"] for record in found] for found in kinds.values()] == [[10, 20]] * 3
    assert all(record["prompt"] == "the cat" and record["text"] for record in kinds["sample"])
    assert {"loss_cluster_0", "loss_cluster_1", "loss_cluster_2"} <= kinds["eval"][0].keys()
    assert len(kinds["memory"][0]["loss_by_position"]) == 24
    train = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in train] == list(range(1, 21))
    assert all(len(record["rank_ms"]) == 2 for record in train)
    assert [record["slowest_rank"] for record in train[5:8]] == [1, 1, 1]
    assert {record["slowest_host"] for record in train} == {os.uname().nodename}
    assert train[5]["rank_ms"][1] > 1900 > train[5]["rank_ms"][0]
    assert any("save_s" in record for record in train)

    events = [record for record in records if record["kind"] == "event"]
    assert [event["event"] for event in events].count("straggler") >= 1
    named = next(event for event in events if event["event"] == "straggler" and event["rank"] == 1)
    assert named["step"] <= 8, "three reports after it became slow, or before, if the machine was busy"
    assert named["host"] == os.uname().nodename
    start = events[0]
    assert (start["event"], start["ranks"], start["hosts"]) == ("start", 2, 1)
    assert start["parameters"] > 10_000
    assert events[-1]["event"] == "done"

    said = (run / "log.txt").read_text(encoding="utf-8")
    assert "rank 1 on" in said
    assert "keeps the other ranks waiting" in said
    assert said.count("TensorBoard cannot write") == 1
    assert "  | the cat" in said
    assert (run / "tensorboard").is_file()


def test_a_prompt_that_the_tokenizer_does_not_know_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("only plain letters here\n" * 200, encoding="utf-8")
    words = ["--out", "letters", "--tokenizer", "char", "--observed-symbols", "--valid-fraction", "0"]
    prepared = txl("prepare", "plain.txt", *words, cwd=tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    (tmp_path / "run.toml").write_text('[data]\npath = "letters"\neval_split = ""\n', encoding="utf-8")
    sampling = ["--metrics.sample_every_steps", "3", "--metrics.sample_prompt", "na\u00efve \u2603"]
    result = txl("train", "run.toml", "--run.dir", "run", *sampling, cwd=tmp_path)
    assert result.returncode == 2
    assert "metrics.sample_prompt=" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()
