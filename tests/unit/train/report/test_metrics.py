"""Reports: how values are combined over steps and ranks, how they are printed, and that a failed sink ends no run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.jobs import job_of
from tests.helpers.logs import format_record, recorded_log
from tests.helpers.tiny import tiny_config
from txl_dist.distributed.collectives import RankInfo
from txl_dist.errors import TrainingError
from txl_dist.model.flops import flops_by_part
from txl_dist.train.monitoring import stragglers
from txl_dist.train.monitoring.stragglers import StragglerWatch
from txl_dist.train.report import metrics
from txl_dist.train.report.loggers import JsonLines, MetricReporter
from txl_dist.train.report.metrics import Interval, eta_s, mfu

FULL_DISK = Path("/dev/full")

TRAIN_RECORD: dict[str, Any] = {
    "step": 40,
    "loss": 2.0,
    "ppl": math.exp(2.0),
    "grad_norm": 0.1234,
    "tokens_per_s": 12345.6,
    "step_ms": 100.0,
    "data_wait_pct": 1.26,
    "peak_gib": 1.5,
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


def ranks_are(monkeypatch: pytest.MonkeyPatch, *others: tuple[float, int, int, int]) -> None:
    """This process is rank 0; `others` are the (seconds waited, documents skipped, targets scored, peak bytes) of other
    ranks, whose local part of a step takes 7 ms."""
    monkeypatch.setattr(metrics, "peak_memory_bytes", lambda: 2**30)
    monkeypatch.setattr(metrics, "gather_objects", lambda mine: [mine, *((*other, 7.0) for other in others)])


def add(interval: Interval, *, loss: float, skipped: bool = False, num_scored: int = 100) -> None:
    """A step whose gradient norm is twice its loss."""
    interval.add(loss=loss, grad_norm=2 * loss, lr=1e-3 * loss, num_scored=num_scored, skipped=skipped, local_ms=10.0)


def test_a_report_is_the_mean_over_steps_and_the_slowest_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ranks_are(monkeypatch, (0.5, 1, 5, 3 * 2**30), (0.1, 2, 5, 2**29))
    interval = Interval(clip_norm=3.0)
    for loss in (1.0, 2.0, 6.0):
        add(interval, loss=loss)
        interval.wait(0.05)
        clock.now_s += 0.5
    values = interval.report(step=3, tokens_per_step=100, num_skipped=4)
    assert values.pop("rank_ms") == [10.0, 7.0, 7.0]
    assert values == pytest.approx(
        {
            "loss": 3.0,
            "ppl": math.exp(3.0),
            "lr": 6e-3,  # of the last step
            "grad_norm": 6.0,
            "clipped_pct": 100 * 2 / 3,
            "tokens_per_s": 200.0,
            "step_ms": 500.0,
            "data_wait_pct": 100 * 0.5 / 1.5,
            "peak_gib": 3.0,  # of the fullest rank
            "skipped_documents": 4 + 1 + 2,  # of all ranks
        }
    )


def test_the_straggler_is_named_with_its_host_and_again_after_it_had_recovered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stragglers, "gather_objects", lambda mine: ["node1", "node1", "node2", "node3"])
    report = reporter(tmp_path)
    watch = StragglerWatch(report)
    slow, even = [10.0, 10.0, 20.0, 10.0], [10.0, 10.0, 10.0, 10.0]
    with recorded_log() as lines:
        found = [watch(rank_ms, step=step) for step, rank_ms in enumerate([slow] * 5 + [even] + [slow] * 3, start=1)]
    report.close()
    assert found[0] == {"slowest_rank": 2, "slowest_host": "node2", "slowest_pct": 100.0}
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(event["step"], event["rank"], event["host"]) for event in events] == [(3, 2, "node2"), (9, 2, "node2")]
    warnings = [message for level, message in lines if level == "WARNING"]
    assert len(warnings) == 2
    assert warnings[0].startswith("rank 2 on node2 keeps the other ranks waiting")
    assert watch([10.0], step=10) == {}, "a rank alone keeps nobody waiting"


def test_skipped_steps_are_no_part_of_the_means(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are(monkeypatch)
    interval = Interval()
    for loss, skipped in ((1.0, False), (math.nan, True), (2.0, False)):
        add(interval, loss=loss, skipped=skipped)
    assert interval.report(step=3, tokens_per_step=1)["loss"] == 1.5
    interval = Interval()
    add(interval, loss=math.nan, skipped=True)
    assert math.isnan(interval.report(step=4, tokens_per_step=1)["loss"])


def test_steps_in_which_nothing_was_scored_are_no_loss_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are(monkeypatch, (0.0, 3, 0, 0))
    interval = Interval()
    add(interval, loss=0.0, num_scored=0)
    with pytest.raises(TrainingError, match=r"no token was scored in the 1 step up to step 7.*txl verify"):
        interval.report(step=7, tokens_per_step=100)


def test_time_spent_saving_or_evaluating_is_not_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ranks_are(monkeypatch)
    interval = Interval()
    add(interval, loss=1.0)
    clock.now_s += 2.0
    with interval.paused():
        clock.now_s += 1000.0
    clock.now_s += 1.0
    assert interval.report(step=1, tokens_per_step=30)["tokens_per_s"] == pytest.approx(10.0)


def test_steps_of_a_lost_process_count_for_the_means_and_not_for_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ranks_are(monkeypatch)
    lost = Interval()
    for loss in (1.0, 2.0, 6.0):
        add(lost, loss=loss)
    interval = Interval()
    interval.continue_from(lost.sums())
    add(interval, loss=3.0)
    clock.now_s += 2.0
    record = interval.report(step=4, tokens_per_step=30)
    assert (record["loss"], record["step_ms"], record["tokens_per_s"]) == pytest.approx((3.0, 2000.0, 15.0))


def mfu_at(speed: float, *, peak_tflops: float, ranks: int = 1) -> dict[str, float]:
    config = tiny_config(metrics={"peak_tflops": peak_tflops})
    job = job_of(config, RankInfo(0, ranks, 0, torch.device("cpu"), num_threads=1), vocab_size=300)
    return mfu(speed, flops_per_token=sum(job.flops.values()), peak_flops=job.peak_flops)


def test_mfu_is_the_models_operations_over_the_peak_of_all_devices() -> None:
    model, lengths = tiny_config().model, {"segment_len": 8, "memory_lens": [12, 12], "microbatch_lanes": 2}
    flops = sum(flops_by_part(model, vocab_size=300, **lengths).values())
    speed = 0.25 * 2e12 / flops  # a quarter of two devices of 1 TFLOP/s
    assert mfu_at(speed, peak_tflops=1.0, ranks=2)["mfu_pct"] == pytest.approx(25.0)
    assert mfu_at(speed, peak_tflops=4.0)["mfu_pct"] == pytest.approx(12.5)


def test_no_mfu_is_reported_of_a_device_whose_peak_nobody_knows() -> None:
    assert mfu_at(1000.0, peak_tflops=0.0) == {}


def test_peak_memory_follows_what_the_process_has_held() -> None:
    program = (
        "import torch; from txl_dist.train.report.metrics import peak_memory_bytes as peak; before = peak();"
        "held = torch.ones(2**26); del held; print(peak() - before)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(result.stdout) == pytest.approx(2**28, rel=0.1)


def test_a_huge_loss_still_has_a_perplexity(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are(monkeypatch)
    interval = Interval()
    add(interval, loss=1e30)
    assert math.isfinite(interval.report(step=1, tokens_per_step=1)["ppl"])


def test_the_time_left_is_that_of_the_steps_left() -> None:
    assert eta_s(40, max_steps=100, step_ms=500.0) == pytest.approx(30.0)
    assert eta_s(100, max_steps=100, step_ms=500.0) == 0


def test_the_line_of_a_training_record() -> None:
    assert format_record("train", TRAIN_RECORD, max_steps=1000) == (
        "step   40/1000  train  loss 2.0000  ppl 7.39  bpb 1.5000  bpc 1.7500  lr 2.500e-04  gnorm 0.123  "
        "12,346 tok/s  peak 1.50 GiB  wait 1.3%  eta 1:02:05"
    )
    assert "12,346 tok/s  mfu 41.2%  peak" in format_record("train", TRAIN_RECORD | {"mfu_pct": 41.17}, max_steps=1000)
    assert format_record("train", {**TRAIN_RECORD, "skipped_steps": 3}, max_steps=1000).endswith("  skipped 3")
    damaged = {**TRAIN_RECORD, "skipped_documents": 2}
    assert format_record("train", damaged, max_steps=1000).endswith("  damaged documents 2")


def test_the_line_of_an_evaluation_and_of_an_event() -> None:
    assert format_record("eval", EVAL_RECORD, max_steps=99) == (
        "step 40/99  eval  loss 2.0000  ppl 7.39  bpb 1.5000  bpc 1.7500  1,234,567 tokens  in 3.1 s"
    )
    saved = {"event": "saved", "step": 40, "path": "step_000000040", "seconds": 0.1, "gib": 2.5}
    assert format_record("event", saved, max_steps=99) == (
        "step 40/99  saved  step_000000040, 2.50 GiB. Training waited for 0.10 s"
    )
    of_another_version = {"event": "no_such_event", "step": 40, "what": 3}
    assert format_record("event", of_another_version, max_steps=99) == "step 40/99  no such event  what 3"


@pytest.mark.parametrize("loss", [1e4, 3.7e15, 1.01e304, -2.5e200, math.inf, -math.inf, math.nan])
def test_the_line_of_an_exploding_run_can_be_read(loss: float) -> None:
    record = {"step": 40, "loss": loss, "ppl": abs(loss), "lr": 1e-3, "grad_norm": loss, "tokens_per_s": 1e3}
    line = format_record("train", record, max_steps=99)
    assert max(map(len, line.split())) <= 14
    assert f"loss {loss:.3g}" in line or f"loss {loss:.4f}" in line


RANK = RankInfo(rank=0, world_size=2, local_rank=0, device=torch.device("cpu"), num_threads=1)


def reporter(run_dir: Path, *, rank: int = 0, tensorboard: bool = False, start_step: int = 0) -> MetricReporter:
    ranks = replace(RANK, rank=rank, local_rank=rank)
    config = tiny_config(run={"dir": str(run_dir)}, train={"max_steps": 1000}, metrics={"tensorboard": tensorboard})
    return MetricReporter(job_of(config, ranks), start_step=start_step)


def test_every_record_is_one_json_line_that_can_be_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "event", "event": "earlier run"}\n')
    report = reporter(tmp_path)
    report.write("train", TRAIN_RECORD)
    report.write("eval", EVAL_RECORD)
    records = [json.loads(line) for line in path.read_text().splitlines()]  # before closing
    report.close()
    times_s = [record.pop("time_s") for record in records[1:]]
    assert sorted(times_s) == times_s
    assert abs(times_s[0] - time.time()) < 3600
    assert records[0] == {"kind": "event", "event": "earlier run"}
    assert records[1:] == [{"kind": "train", **TRAIN_RECORD}, {"kind": "eval", **EVAL_RECORD}]


def test_only_the_first_rank_reports(tmp_path: Path) -> None:
    report = reporter(tmp_path, rank=1, tensorboard=True)
    report.write("train", TRAIN_RECORD)
    report.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not FULL_DISK.exists(), reason="needs a device that is always full")
def test_a_sink_that_cannot_write_warns_once_tries_on_and_says_when_it_works_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to(FULL_DISK)
    report = reporter(tmp_path)
    with recorded_log() as lines:
        for step in (10, 20, 30):
            report.write("train", {**TRAIN_RECORD, "step": step})
        path.unlink()
        for step in (40, 50):
            report.write("train", {**TRAIN_RECORD, "step": step})
        report.close()
    warnings = [message for level, message in lines if level == "WARNING"]
    assert len(warnings) == 2
    assert "JsonLines cannot write. Records are lost until the logger can write again: [Errno 28]" in warnings[0]
    assert "JsonLines can write again. It has lost 3 records" in warnings[1]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [40, 50]
    assert [message[:9] for level, message in lines if level == "INFO"] == [
        f"step   {step}" for step in range(10, 60, 10)
    ]


def test_a_line_that_a_killed_run_left_torn_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "event"}\n{"kind": "tra')
    report = reporter(tmp_path)
    report.write("train", TRAIN_RECORD)
    report.close()
    whole, torn, new = path.read_text().splitlines()
    assert (json.loads(whole), torn) == ({"kind": "event"}, '{"kind": "tra')
    assert json.loads(new)["step"] == 40


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_tears_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: it lets a part of a record through."""
    script = f"""
import resource
from pathlib import Path
from tests.unit.train.report.test_metrics import TRAIN_RECORD, reporter
from txl_dist.console.logging import start_logging

folder = Path({str(tmp_path)!r})
start_logging(file=folder / "log.txt")
report = reporter(folder, tensorboard=True)
for size, steps in ((1500, range(1, 11)), (resource.RLIM_INFINITY, range(11, 14))):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    for step in steps:
        report.write("train", {{**TRAIN_RECORD, "step": step}})
report.close()
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr
    assert "Traceback" not in child.stderr
    assert "Logging error" not in child.stderr
    for name in ("JsonLines", "TensorBoard"):
        assert child.stderr.count(f"{name} cannot write") == 1
        assert child.stderr.count(f"{name} can write again") == 1
    assert child.stderr.count("log.txt cannot be written") == 1
    assert child.stderr.count("log.txt is written again") == 1
    lines = (tmp_path / "metrics.jsonl").read_text()
    kept = [json.loads(line)["step"] for line in lines.splitlines()]
    assert lines.endswith("\n")
    assert 1 <= len(kept) - 3 < 10
    assert kept == [*range(1, len(kept) - 2), 11, 12, 13]
    steps = [step for step, _ in scalars(tmp_path / "tensorboard")]
    assert steps == [*range(1, len(steps) - 2), 11, 12, 13]
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert all(line[2] == ":" and line[9] in "IW" for line in log), "each begins with its time"
    assert [line for line in log if "step   13/1000" in line]


@pytest.mark.slow
def test_a_terminal_that_goes_away_costs_the_progress_bar_only(tmp_path: Path) -> None:
    script = f"""
import os, sys, time
from pathlib import Path
from tests.unit.train.report.test_metrics import TRAIN_RECORD, reporter
from txl_dist.console.logging import start_logging

folder = Path({str(tmp_path)!r})
start_logging(file=folder / "log.txt")
assert sys.stderr.isatty()
report = reporter(folder)
report.write("train", {{**TRAIN_RECORD, "step": 1}})
os.write(1, b"ready\\n")  # print goes through the bar
sys.stdin.readline()
for step in range(2, 6):
    report.write("train", {{**TRAIN_RECORD, "step": step}})
    time.sleep(0.2)  # the bar is drawn ten times a second
report.close()
os.write(1, b"done\\n")
os._exit(0)  # as the command line leaves: the interpreter itself would fail to flush a terminal that has gone
"""
    terminal, stderr = os.openpty()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child: subprocess.Popen[str] = subprocess.Popen([sys.executable, "-c", script], stderr=stderr, **pipes)
    os.close(stderr)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    os.close(terminal)
    assert child.communicate("go on\n", timeout=120)[0] == "done\n"
    assert child.returncode == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    *log, last = (tmp_path / "log.txt").read_text().splitlines()
    assert len(log) == 5
    assert "Console could not be closed" in last


def test_a_sink_that_cannot_be_closed_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(sink: JsonLines) -> None:
        raise OSError("no space left on device")

    report = reporter(tmp_path)
    monkeypatch.setattr(JsonLines, "close", fail)
    with recorded_log() as lines:
        report.close()
    assert [level for level, _ in lines] == ["WARNING"]


def scalars(folder: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    """What TensorBoard draws: (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


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
    assert scalars(tmp_path / "tensorboard") == [(10, 9.0), (20, 2.0), (30, 2.0)]
    expected = {f"train/{name}" for name in TRAIN_RECORD} | {f"eval/{name}" for name in EVAL_RECORD}
    assert set(events.Tags()["scalars"]) == expected - {"train/step", "eval/step", "train/eta_s", "eval/tokens"}


def test_tensorboard_draws_steps_that_a_rewind_made_again_once(tmp_path: Path) -> None:
    report = reporter(tmp_path, tensorboard=True)
    for step, loss in ((10, 2.0), (20, 3.0), (30, 99.0), (20, 2.0), (30, 1.0), (40, 0.5)):
        report.write("train", {**TRAIN_RECORD, "step": step, "loss": loss})
        report.write("eval", {**EVAL_RECORD, "step": step, "loss": loss})
    report.close()
    expected = [(10, 2.0), (20, 2.0), (30, 1.0), (40, 0.5)]
    assert scalars(tmp_path / "tensorboard") == expected
    assert scalars(tmp_path / "tensorboard", "eval/loss") == expected


@pytest.mark.parametrize("word", ["--local_rank=0", "--local-rank=1"])
def test_the_command_of_a_start_has_no_word_of_the_launcher(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "gather_objects", lambda value: [value])
    monkeypatch.setattr(sys, "argv", ["txl", word, "train", "c.toml", "--run.seed", "3"])
    engine: Any = SimpleNamespace(shapes={"weight": (2, 3)})
    facts = metrics.start_facts(engine, replace(RANK, world_size=1))
    assert facts["command"] == ["txl", "train", "c.toml", "--run.seed", "3"]
    assert facts["parameters"] == 6
