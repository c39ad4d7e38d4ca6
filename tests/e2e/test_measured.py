"""A run that measures accuracy and norms equals the run without them bit for bit, and its figures are reported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.test_resume import losses
from tests.e2e.test_stages import tensors_of
from tests.helpers.launch import train, txl
from txl_dist.artifacts import list_checkpoints

pytestmark = [pytest.mark.dist, pytest.mark.slow]

MEASURING = ["--metrics.accuracy_every_steps", "5", "--metrics.norms_every_steps", "10", "--eval.accuracy", "True"]


@pytest.fixture
def runs(tmp_path: Path, config_file: Path) -> list[Path]:
    words = [str(config_file), "--engine.zero_stage", "2", "--eval.every_steps", "15"]
    train(*words, "--run.dir", "plain", cwd=tmp_path)
    train(*words, *MEASURING, "--run.dir", "measured", cwd=tmp_path)
    return [tmp_path / "plain", tmp_path / "measured"]


def records_of(run: Path, kind: str) -> dict[int, dict[str, Any]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {one["step"]: one for one in records if one["kind"] == kind}


def test_it_is_the_same_run_and_its_measurements_are_seen(runs: list[Path]) -> None:
    plain, measured = runs
    assert losses(plain) == losses(measured)
    ours, theirs = (tensors_of(list_checkpoints(run)[-1]) for run in runs)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert records_of(plain, "layers") == {}
    assert not any("accuracy_pct" in one for kind in ("train", "eval") for one in records_of(plain, kind).values())
    layers = records_of(measured, "layers")
    assert [*layers] == [10, 20, 30]
    train_records = records_of(measured, "train")
    for step, record in layers.items():
        if step in train_records:  # of that step alone
            parts = [value for name, value in record.items() if name.startswith("gradient_norm_")]
            total = math.hypot(*record["gradient_norm"], *parts)
            assert total == pytest.approx(train_records[step]["grad_norm"], rel=1e-4)
        assert len(record["activation_rms"]) == len(record["weight_norm"]) == 2
    told = {step: one["accuracy_pct"] for step, one in train_records.items() if "accuracy_pct" in one}
    assert {*told} <= {5, 10, 15, 20, 25, 30}
    assert all(0 <= share <= 100 for share in told.values())
    assert all(0 < one["accuracy_pct"] < 100 for one in records_of(measured, "eval").values())
    events = EventAccumulator(str(measured / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "train/accuracy_pct",
        "eval/accuracy_pct",
        "layers/gradient_norm/01",
        "layers/weight_norm_embedding",
    } <= tags
    page = txl("report", str(measured), cwd=measured.parent)
    assert page.returncode == 0, page.stderr
    html = (measured / "report.html").read_text()
    assert all(f"{title}: " in html for title in ("Accuracy", "Gradients", "Weights", "Activations"))
