"""A user imports weights of the original code, trains them further, and exports them to Hugging Face, with commands
only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.launch import txl
from tests.helpers.peers import read_golden, state_dict, write_original_module
from txl_dist.inference.bundle import load_bundle

pytestmark = [pytest.mark.dist, pytest.mark.slow]
NAME = "wt103_large_like"


def run_txl(*words: str, cwd: Path) -> str:
    result = txl(*words, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_train_on_export_and_come_back(tmp_path: Path) -> None:
    settings, golden = read_golden(NAME)
    write_original_module(tmp_path / "model.pt", settings, state_dict(golden), legacy=True)
    said = run_txl("import", "model.pt", "bundle", "--format", "original", cwd=tmp_path)
    assert "text is written as ids in decimal" in said
    # One document, cut into as many lanes as the golden file has rows: lane l is row l.
    rows = golden["train_ids"].t()
    (tmp_path / "train.txt").write_text(" ".join(str(int(i)) for i in rows.flatten()), encoding="utf-8")
    (tmp_path / "valid.txt").write_text(" ".join(str(i) for i in range(200)), encoding="utf-8")
    tokenizer = ["--tokenizer-file", "bundle/tokenizer.json"]
    run_txl("prepare", "train.txt", "--valid", "valid.txt", "--out", "corpus", *tokenizer, cwd=tmp_path)
    optim = {"name": "adam", "lr": "1e-3", "schedule": "constant", "clip_norm": "0.25"}
    train = {"num_lanes": "3", "microbatch_lanes": "3", "max_steps": "60"}
    flags = [f"--optim.{key}={value}" for key, value in optim.items()]
    flags += [f"--train.{key}={value}" for key, value in train.items()]
    flags += ["--data.path", "corpus", "--run.dir", "run", "--metrics.log_every_steps", "1"]
    run_txl("train", "bundle/train.toml", "--init", "bundle", *flags, cwd=tmp_path)
    lines = (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]
    assert losses == pytest.approx(golden["train_loss"].tolist(), rel=1e-3)

    # Once there is a checkpoint, the run needs the bundle no more.
    (tmp_path / "bundle").rename(tmp_path / "moved")
    run_txl("train", "moved/train.toml", "--init", "bundle", *flags, "--train.max_steps", "62", cwd=tmp_path)
    assert "from run/checkpoints/step_000000060" in (tmp_path / "run/log.txt").read_text(encoding="utf-8")

    run_txl("export", "run", "trained", cwd=tmp_path)
    run_txl("export", "run", "huggingface", "--format", "huggingface", cwd=tmp_path)
    run_txl("import", "huggingface", "back", "--format", "huggingface", cwd=tmp_path)
    trained, back = load_bundle(tmp_path / "trained"), load_bundle(tmp_path / "back")
    assert back.tokenizer.fingerprint == trained.tokenizer.fingerprint
    assert (back.segment_len, back.memory_len) == (trained.segment_len, trained.memory_len)
    for (name, ours), (_, theirs) in zip(trained.model.named_parameters(), back.model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    words = ["--data", "corpus", "--json", "scores.json"]
    scores = []
    for bundle in ("trained", "back"):
        run_txl("evaluate", bundle, *words, cwd=tmp_path)
        scores.append(json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))["model"]["loss"])
    assert scores[0] == scores[1]
    assert len(run_txl("generate", "back", "--prompt", "1 2 3", "--max-tokens", "5", cwd=tmp_path).split()) == 8
