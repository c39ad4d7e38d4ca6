"""What a run reports, once per logging interval, to all of its `sinks`.

Losses and gradient norms come from the decision of each step, which waits for the device anyway; a report waits for
nothing more. Losses are means over ranks, waiting is that of the slowest rank, peak memory that of the fullest. MFU is
the share of the devices' peak that the operations of the model's formula (`model.flops`) take. Reporting
never ends a run: a sink that cannot write says so once, tries again with each record, and says when it works again.
"""

from __future__ import annotations

import importlib.util
import math
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from txl_dist import __version__
from txl_dist.config import BatchPlan, Config, flat
from txl_dist.dist import Ranks, gather_objects, uses_gpu
from txl_dist.errors import ConfigError, TrainingError, of_all
from txl_dist.log import logger
from txl_dist.model.flops import flops_per_token, peak_tflops
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.report.sinks import Console, JsonLines, Record, Sink, TensorBoard, WeightsAndBiases


class Interval:
    """Sums since the last report; loss and gradient norm are those of all ranks, the rest is this rank's."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._wait_s = self._loss = self._grad_norm = self._lr = self._own_ms = 0.0
        self._num_steps = self._num_skipped = self._num_scored = 0

    def add(
        self, *, loss: float, grad_norm: float, lr: float, num_scored: int, skipped: bool, own_ms: float = 0.0
    ) -> None:
        """One step: its mean loss in nats, the targets that counted on this rank, whether it was skipped, and this
        rank's own part of its time (see `stragglers`)."""
        self._num_steps, self._num_scored, self._lr = self._num_steps + 1, self._num_scored + num_scored, lr
        self._own_ms += own_ms
        if skipped:
            self._num_skipped += 1
        else:
            self._loss, self._grad_norm = self._loss + loss, self._grad_norm + grad_norm

    def wait(self, seconds: float) -> None:
        """Time that this rank waited for data."""
        self._wait_s += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside (saving, evaluating) does not count as training."""
        start_s = time.perf_counter()
        yield
        self._start_s += time.perf_counter() - start_s

    def has_scored(self) -> bool:
        """Whether any rank has scored a token. All ranks call it."""
        return any(gather_objects(self._num_scored > 0))

    def report(self, *, step: int, tokens_per_step: int, num_skipped: int = 0) -> Record:
        """Means over the interval and all ranks, and the sum of the documents skipped; NaN if every step was skipped.

        Raises TrainingError on all ranks if nothing was scored.
        """
        span_s, steps = time.perf_counter() - self._start_s, max(1, self._num_steps)
        own_ms = round(self._own_ms / steps, 3)
        parts = gather_objects((self._wait_s, num_skipped, self._num_scored, peak_memory_bytes(), own_ms))
        if not any(num_scored for _, _, num_scored, *_ in parts):
            raise of_all(
                TrainingError(
                    f"no token was scored in the {steps} steps up to step {step}: all that was read is damaged. "
                    "Restore the corpus (`txl verify` lists the damage), or take it out of data.path and "
                    "data.more_paths."
                )
            )
        made = self._num_steps - self._num_skipped
        loss, grad_norm = (total / made if made else math.nan for total in (self._loss, self._grad_norm))
        return {
            "loss": loss,
            "ppl": math.exp(min(loss, 700.0)),
            "lr": self._lr,
            "grad_norm": grad_norm,
            "tokens_per_s": steps * tokens_per_step / span_s,
            "step_ms": 1000 * span_s / steps,
            "data_wait_pct": 100 * max(wait_s for wait_s, *_ in parts) / span_s,
            "peak_gib": max(peak for *_, peak, _ in parts) / 2**30,
            "skipped_documents": sum(number for _, number, *_ in parts),
            "rank_ms": [part[-1] for part in parts],
        }


class MfuMeter:
    """Model FLOPs utilization: what share of the devices' peak the model's own operations take."""

    def __init__(self, config: Config, *, plan: BatchPlan, vocab_size: int, device: torch.device) -> None:
        train, uses_tf32 = config.train, torch.backends.cuda.matmul.allow_tf32
        precision = "tf32" if config.engine.precision == "fp32" and uses_tf32 else config.engine.precision
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        peak = config.metrics.peak_tflops or peak_tflops(name, precision=precision)
        flops = flops_per_token(
            config.model,
            vocab_size=vocab_size,
            segment_len=train.segment_len,
            memory_len=train.memory_len,
            microbatch_lanes=plan.microbatch_lanes,
        )
        self._pct_per_speed = 100 * flops / (plan.world_size * peak * 1e12) if peak else 0.0

    def __call__(self, tokens_per_s: float) -> dict[str, float]:
        """mfu_pct at a speed of all ranks together; nothing where the peak of the device is not known."""
        return {"mfu_pct": self._pct_per_speed * tokens_per_s} if self._pct_per_speed else {}


def peak_memory_bytes() -> int:
    """Most that this process has held since it began: of the GPU in torch's allocator, else of host memory (RSS)."""
    if uses_gpu():
        return torch.cuda.max_memory_allocated()
    # Not by getrusage: a process inherits that peak from the one that started it.
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return 1024 * int(next((line.split()[1] for line in lines if line.startswith("VmHWM:")), "0"))


def check_finite(values: Sequence[float], *, what: str) -> None:
    """Raise TrainingError if a value of any rank is not finite. All ranks pass the values of all."""
    bad = [rank for rank, value in enumerate(values) if not math.isfinite(value)]
    if bad:
        raise of_all(
            TrainingError(
                f"{what} is {values[bad[0]]} on rank(s) {bad}. The run stops before saving it; continue from the last "
                "checkpoint with a lower optim.lr, more optim.warmup_steps, or bf16 instead of fp16."
            )
        )


class Reporter:
    """All sinks of a run; on ranks other than 0 there are none. Reporting never ends a run."""

    def __init__(self, config: Config, *, start_step: int, ranks: Ranks) -> None:
        run_dir, metrics = Path(config.run.dir), config.metrics
        self._sinks: list[Sink] = []
        if ranks.is_first:
            self._sinks += [Console(max_steps=config.train.max_steps), JsonLines(run_dir / "metrics.jsonl")]
            if metrics.tensorboard:
                folder, settings = run_dir / "tensorboard", {name: _plain(value) for name, value in flat(config)}
                self._sinks.append(TensorBoard(folder, start_step=start_step, settings=settings))
            if metrics.wandb:
                self._sinks.append(
                    WeightsAndBiases(run_dir, project=metrics.wandb, config=config.model_dump(mode="json"))
                )
        self._num_lost = [0] * len(self._sinks)

    def write(self, kind: str, record: Record) -> None:
        """Hand a record (with its `step`) to every sink."""
        for index, sink in enumerate(self._sinks):
            try:
                sink.write(kind, record)
            except OSError as error:
                self._num_lost[index] += 1
                if self._num_lost[index] == 1:
                    logger.warning(
                        "metrics: %s cannot be written, and lacks records until it can: %s", type(sink).__name__, error
                    )
                continue
            if self._num_lost[index]:
                num_lost, self._num_lost[index] = self._num_lost[index], 0
                logger.warning("metrics: %s is written again; it lacks %d records", type(sink).__name__, num_lost)

    def close(self) -> None:
        """Flush and release all sinks."""
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:
                logger.warning("metrics: %s could not be closed: %s", type(sink).__name__, error)


def eta_s(step: int, *, max_steps: int, step_ms: float) -> float:
    """Seconds to the end of the run at the present speed."""
    return (max_steps - step) * step_ms / 1000


def start_facts(engine: Engine, ranks: Ranks) -> Record:
    """Who runs what on what, for the record of a start. All ranks call it together."""
    hosts = gather_objects(socket.gethostname())
    name = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else platform.machine()
    return {
        "ranks": ranks.world_size,
        "threads_per_rank": ranks.num_threads,
        "hosts": len(set(hosts)),
        "device": name,
        "parameters": sum(math.prod(shape) for shape in engine.shapes.values()),
        "txl_dist": __version__,
        "torch": torch.__version__,
    }


def check_sinks(config: Config) -> None:
    """Refuse what could not be written at all. Raises ConfigError."""
    if config.metrics.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"metrics.wandb={config.metrics.wandb!r} needs the library wandb, which is not installed. "
            'pip install "txl_dist[wandb]", or leave the setting out.'
        )


def _plain(value: Any) -> bool | float | str:
    """As TensorBoard takes settings: a list becomes text."""
    return value if isinstance(value, bool | int | float | str) else str(value)
