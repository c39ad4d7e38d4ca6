"""Measure the share of a training step's time that the metrics take.

    python -m tools.benchmarks.metrics_logging                           8 rounds
    python -m tools.benchmarks.metrics_logging --rounds 1                the smallest size, some seconds

Two things are timed in turn: a step of the quickstart's model (1.4 million parameters, 16 lanes of 64 tokens, ZeRO-1,
one process, one thread), and a report to all default sinks (console into a file, metrics.jsonl, TensorBoard). The
milliseconds of a report are printed too, because they do not depend on the model or the device.

    share at every step       time of a report / time of a step
    share as set              time of a report / time of the steps between two reports (metrics.log_every_steps, 10 by
                              default)
    clocks                    time that measuring the step's parts takes in each step
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tools.benchmarks.measuring import add_measure_options, interleaved, write_json
from txl_dist.config.load import Config, plan_batch
from txl_dist.config.phases import saved_settings
from txl_dist.console.logging import start_logging
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo, distributed_context
from txl_dist.train.batch import batch_maker
from txl_dist.train.engine.zero import ZeroEngine
from txl_dist.train.monitoring.stragglers import StepClock
from txl_dist.train.report.loggers import MetricReporter
from txl_dist.train.report.metrics import Interval, eta_s
from txl_dist.train.run_plan import stage_context

VOCAB_SIZE = 4096
REPORTS = 50
"""Number of reports in a timed run. A single report is too short to time."""


class Bench:
    """Engine and reporter of one run."""

    def __init__(self, config: Config, ranks: RankInfo) -> None:
        plan = plan_batch(config.train, world_size=1)
        self.engine = ZeroEngine(config, vocab_size=VOCAB_SIZE, plan=plan, ranks=ranks)
        train = config.train
        ids = torch.randint(0, VOCAB_SIZE, (train.num_lanes, train.segment_len + 1)).numpy()
        self.batch = batch_maker(self.engine.model, mask_documents=False).batch(plain_segment(ids))
        self.memory = self.engine.empty_memory(num_lanes=train.num_lanes, memory_len=train.memory_len)
        no_corpora: Any = SimpleNamespace(first=SimpleNamespace(vocab_size=VOCAB_SIZE))
        steps = range(config.train.max_steps)
        context = stage_context(config, saved_settings(config), plan, ranks, no_corpora, steps=steps)
        self.reporter = MetricReporter(context, start_step=0)
        self.clock, self.interval = StepClock(ranks.device, sees_forward=True), Interval()
        self.tokens, self.num_reports, self.max_steps = train.num_lanes * train.segment_len, 0, train.max_steps
        self.step()

    def step(self) -> None:
        """Make a step as in training, without clocks and reports, which are timed separately."""
        loss, self.memory = self.engine.forward(self.batch, self.memory, normalizer=float(self.tokens))
        self.engine.backward(loss)
        norm = float(self.engine.grad_norm())
        self.engine.step(lr=1e-3, grad_norm=norm)
        self.interval.add(loss=float(loss.detach()), grad_norm=norm, lr=1e-3, num_scored=self.tokens, skipped=False)

    def clocks(self) -> None:
        """Measure the parts of a step as in training, `REPORTS` times."""
        for _ in range(REPORTS):
            self.clock.begin()
            self.clock.mark_prepared()
            self.clock.start_forward()
            self.clock.forward_ends()
            self.clock.local_ms()

    def reports(self) -> None:
        """Write `REPORTS` records as the training loop does."""
        for _ in range(REPORTS):
            self.num_reports += 1
            values = self.interval.report(step=self.num_reports, tokens_per_step=self.tokens)
            eta = eta_s(self.num_reports, max_steps=self.max_steps, step_ms=values["step_ms"])
            bits = {"bits_per_byte": 1.0, "bits_per_character": 1.0}
            counts = {"tokens_seen": self.tokens, "skipped_steps": 0, "epoch": 0.5}
            self.reporter.write("train", {"step": self.num_reports, **values, **bits, **counts, "eta_s": eta})


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_measure_options(parser)
    arguments = parser.parse_args()
    model = {"num_layers": 4, "width": 128, "num_heads": 4, "head_width": 32, "ff_width": 512, "cutoffs": [512, 2048]}
    train = {"num_lanes": 16, "microbatch_lanes": 16, "segment_len": 64, "memory_len": 128}
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder, distributed_context(timeout_s=60, num_threads=1) as ranks:
        config = Config.model_validate({"model": model, "train": train, "run": {"dir": folder}})
        sys.stderr = (Path(folder) / "stderr").open("w", encoding="utf-8")
        start_logging(file=Path(folder) / "log.txt")
        bench = Bench(config, ranks)
        timings = interleaved(
            {"step": bench.step, "reports": bench.reports, "clocks": bench.clocks}, rounds=arguments.rounds
        )
        bench.reporter.close()
    step_ms, every = timings["step"].median_ms, config.metrics.log_every_steps
    report_ms, clock_ms = timings["reports"].median_ms / REPORTS, timings["clocks"].median_ms / REPORTS
    figures = {
        "step_ms": step_ms,
        "report_ms": report_ms,
        "clocks_ms": clock_ms,
        "share_at_every_step_pct": 100 * (report_ms + clock_ms) / step_ms,
        "share_as_set_pct": 100 * (report_ms / every + clock_ms) / step_ms,
    }
    for name, value in figures.items():
        print(f"{name:<26}{value:9.4f}")
    if arguments.json is not None:
        write_json(arguments.json, {"logging": [figures]})


if __name__ == "__main__":
    main()
