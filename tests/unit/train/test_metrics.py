"""Reports: what is joined how over steps and ranks, how it reads, and that no broken sink ends a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.logs import recorded_log
from txl_dist.dist import Ranks
from txl_dist.errors import TrainingError
from txl_dist.train import metrics
from txl_dist.train.metrics import Interval, JsonLines, Reporter, eta_s, format_record

FULL_DISK = Path("/dev/full")

TRAIN_RECORD: dict[str, Any] = {
    "step": 40,
    "loss": 2.0,
    "ppl": math.exp(2.0),
    "grad_norm": 0.1234,
    "tokens_per_s": 12345.6,
    "step_ms": 100.0,
    "data_wait_pct": 1.26,
    "bits_per_byte": 1.5,
    "bits_per_character": 1.75,
    "lr": 2.5e-4,
    "tokens_seen": 81920,
    "skipped_steps": 0,
    "skipped_documents": 0,
    "eta_s": 3725.9,
}
EVAL_RECORD: dict[str, Any] = {
    "step": 40,
    "loss": 2.0,
    "ppl": math.exp(2.0),
    "bits_per_byte": 1.5,
    "bits_per_character": 1.75,
    "tokens": 1_234_567,
    "seconds": 3.14,
}


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: self.now_s))


def ranks_are(monkeypatch: pytest.MonkeyPatch, *others: tuple[float, ...]) -> None:
    """This process is rank 0; `others` are the (loss, gradient norm, waiting) sums of the other ranks."""
    monkeypatch.setattr(metrics, "gather_objects", lambda mine: [mine, *others])


def test_a_report_is_the_mean_over_steps_and_ranks_and_the_slowest_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ranks_are(monkeypatch, (9.0, 99.0, 0.5, 1, 5), (6.0, 99.0, 0.1, 2, 5))
    interval = Interval()
    for loss in (1.0, 2.0, 3.0):
        interval.add(loss=torch.tensor(loss), grad_norm=torch.tensor(2 * loss), wait_s=0.05, num_scored=100)
        clock.now_s += 0.5
    values = interval.report(step=3, tokens_per_step=100, num_skipped=4)
    assert values == pytest.approx(
        {
            "loss": (6.0 + 9.0 + 6.0) / 3 / 3,
            "ppl": math.exp(21.0 / 9),
            "grad_norm": 4.0,  # all ranks know the same norm
            "tokens_per_s": 200.0,
            "step_ms": 500.0,
            "data_wait_pct": 100 * 0.5 / 1.5,
            "skipped_documents": 4 + 1 + 2,  # of all ranks
        }
    )


def test_steps_in_which_nothing_was_scored_are_no_loss_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are(monkeypatch, (0.0, 0.0, 0.0, 3, 0))
    interval = Interval()
    interval.add(loss=torch.tensor(0.0), grad_norm=0.0, wait_s=0.0, num_scored=0)
    with pytest.raises(TrainingError, match=r"no token was scored in the 1 steps up to step 7.*txl verify"):
        interval.report(step=7, tokens_per_step=100)


def test_time_spent_saving_or_evaluating_is_not_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ranks_are(monkeypatch)
    interval = Interval()
    interval.add(loss=torch.tensor(1.0), grad_norm=0.0, wait_s=0.0, num_scored=100)
    clock.now_s += 2.0
    with interval.paused():
        clock.now_s += 1000.0
    clock.now_s += 1.0
    assert interval.report(step=1, tokens_per_step=30)["tokens_per_s"] == pytest.approx(10.0)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_on_any_rank_is_an_error_that_names_the_rank(
    loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_are(monkeypatch, (1.0, 0.0, 0.0, 0, 5), (loss, 0.0, 0.0, 0, 5))
    interval = Interval()
    interval.add(loss=torch.tensor(1.0), grad_norm=0.0, wait_s=0.0, num_scored=100)
    with pytest.raises(TrainingError, match=rf"up to step 7 is {loss} on rank\(s\) \[2\]"):
        interval.report(step=7, tokens_per_step=1)


def test_a_huge_loss_still_has_a_perplexity(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are(monkeypatch)
    interval = Interval()
    interval.add(loss=torch.tensor(1e30), grad_norm=0.0, wait_s=0.0, num_scored=100)
    assert math.isfinite(interval.report(step=1, tokens_per_step=1)["ppl"])


def test_the_time_left_is_that_of_the_steps_left() -> None:
    assert eta_s(40, max_steps=100, step_ms=500.0) == pytest.approx(30.0)
    assert eta_s(100, max_steps=100, step_ms=500.0) == 0


def test_the_line_of_a_training_record() -> None:
    assert format_record("train", TRAIN_RECORD, max_steps=1000) == (
        "step   40/1000  train  loss 2.0000  ppl 7.39  bpb 1.5000  bpc 1.7500  lr 2.500e-04  gnorm 0.123  "
        "12,346 tok/s  wait 1.3%  eta 1:02:05"
    )
    assert format_record("train", {**TRAIN_RECORD, "skipped_steps": 3}, max_steps=1000).endswith("  skipped 3")
    damaged = {**TRAIN_RECORD, "skipped_documents": 2}
    assert format_record("train", damaged, max_steps=1000).endswith("  damaged documents 2")


def test_the_line_of_an_evaluation_and_of_an_event() -> None:
    assert format_record("eval", EVAL_RECORD, max_steps=99) == (
        "step 40/99  eval  loss 2.0000  ppl 7.39  bpb 1.5000  bpc 1.7500  1,234,567 tokens in 3.1 s"
    )
    assert format_record("event", {"event": "saved", "step": 40}, max_steps=99) == "event=saved step=40"


def reporter(run_dir: Path, *, rank: int = 0, tensorboard: bool = False, start_step: int = 0) -> Reporter:
    ranks = Ranks(rank=rank, world_size=2, local_rank=rank, device=torch.device("cpu"), num_threads=1)
    return Reporter(run_dir, start_step=start_step, max_steps=1000, tensorboard=tensorboard, ranks=ranks)


def test_every_record_is_one_json_line_that_can_be_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "event", "event": "earlier run"}\n')
    report = reporter(tmp_path)
    report.write("train", TRAIN_RECORD)
    report.write("eval", EVAL_RECORD)
    records = [json.loads(line) for line in path.read_text().splitlines()]  # before closing
    report.close()
    assert records[0] == {"kind": "event", "event": "earlier run"}
    assert records[1:] == [{"kind": "train", **TRAIN_RECORD}, {"kind": "eval", **EVAL_RECORD}]


def test_only_the_first_rank_reports(tmp_path: Path) -> None:
    report = reporter(tmp_path, rank=1, tensorboard=True)
    report.write("train", TRAIN_RECORD)
    report.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not FULL_DISK.exists(), reason="needs a device that is always full")
def test_a_sink_that_cannot_write_is_dropped_with_one_warning_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(FULL_DISK)
    report = reporter(tmp_path)
    with recorded_log() as lines:
        for step in (10, 20, 30):
            report.write("train", {**TRAIN_RECORD, "step": step})
        report.close()
    warnings = [message for level, message in lines if level == "WARNING"]
    assert len(warnings) == 1
    assert "JsonLines stopped after an error" in warnings[0]
    assert [message[:9] for level, message in lines if level == "INFO"] == ["step   10", "step   20", "step   30"]


def test_a_sink_that_cannot_be_closed_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(sink: JsonLines) -> None:
        raise OSError("no space left on device")

    report = reporter(tmp_path)
    monkeypatch.setattr(JsonLines, "close", fail)
    with recorded_log() as lines:
        report.close()
    assert [level for level, _ in lines] == ["WARNING"]


def test_tensorboard_gets_every_number_once_also_after_a_crash(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    crashed = reporter(tmp_path, tensorboard=True)
    for step in (10, 20, 30):
        crashed.write("train", {**TRAIN_RECORD, "step": step, "loss": 9.0})
    crashed.close()
    resumed = reporter(tmp_path, tensorboard=True, start_step=10)
    for step in (20, 30):
        resumed.write("train", {**TRAIN_RECORD, "step": step})
    resumed.write("eval", EVAL_RECORD)
    resumed.write("event", {"event": "saved", "step": 30})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(10, 9.0), (20, 2.0), (30, 2.0)]
    expected = {f"train/{name}" for name in TRAIN_RECORD} | {f"eval/{name}" for name in EVAL_RECORD}
    assert set(events.Tags()["scalars"]) == expected - {"train/step", "eval/step"}
