"""What a run reports: one line, one JSON record and TensorBoard scalars per logging interval.

Losses and gradient norms come from the decision of each step, which waits for the device anyway; a report waits for
nothing more. Losses are means over ranks, waiting is that of the slowest rank, peak memory that of the fullest. MFU is
the share of the devices' peak that the operations of the model's formula (`model.flops`) take. Reporting
never ends a run: a sink that cannot write says so once, tries again with each record, and says when it works again.
"""

from __future__ import annotations

import io
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from txl_dist.config import BatchPlan, Config
from txl_dist.dist import Ranks, gather_objects, uses_gpu
from txl_dist.errors import TrainingError, of_all
from txl_dist.log import GrowingFile, logger
from txl_dist.model.flops import flops_per_token, peak_tflops


class Interval:
    """Sums since the last report; loss and gradient norm are those of all ranks, the rest is this rank's."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._wait_s = self._loss = self._grad_norm = self._lr = 0.0
        self._num_steps = self._num_skipped = self._num_scored = 0

    def add(self, *, loss: float, grad_norm: float, lr: float, num_scored: int, skipped: bool) -> None:
        """One step: its mean loss in nats, the targets that counted on this rank, and whether it was skipped."""
        self._num_steps, self._num_scored, self._lr = self._num_steps + 1, self._num_scored + num_scored, lr
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

    def report(self, *, step: int, tokens_per_step: int, num_skipped: int = 0) -> dict[str, float]:
        """Means over the interval and all ranks, and the sum of the documents skipped; NaN if every step was skipped.

        Raises TrainingError on all ranks if nothing was scored.
        """
        span_s, steps = time.perf_counter() - self._start_s, max(1, self._num_steps)
        parts = gather_objects((self._wait_s, num_skipped, self._num_scored, peak_memory_bytes()))
        if not any(num_scored for _, _, num_scored, _ in parts):
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
            "peak_gib": max(peak for *_, peak in parts) / 2**30,
            "skipped_documents": sum(number for _, number, *_ in parts),
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


class Sink(Protocol):
    """Where records go."""

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """Take one record; `kind` is train, eval or event."""

    def close(self) -> None:
        """Flush."""


class JsonLines:
    """`metrics.jsonl`: one record per line, complete numbers, always written."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path, separator=b"\n")

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """See `Sink`."""
        # JSON has no NaN: a norm that overflowed in half precision becomes null.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.append(json.dumps({"kind": kind, **finite}).encode())

    def close(self) -> None:
        """See `Sink`."""
        self._file.close()


class TensorBoard:
    """An event file; tags are `kind/name`. It is written here and now: the library's writer does it in a thread, which
    the first error ends."""

    def __init__(self, folder: Path, *, start_step: int) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._folder, self._file = folder, GrowingFile(folder / name)
        self._step = start_step
        self._again_from = start_step + 1

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """See `Sink`."""
        # Slow to import.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        values = [
            Summary.Value(tag=f"{kind}/{name}", simple_value=value)
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float)
        ]
        step = record["step"]
        if kind == "train":
            self._again_from = step if step <= self._step else self._again_from  # after a rewind
            self._step = step
        events = [{"step": step, "summary": Summary(value=values)}]
        if self._again_from:
            # Steps that a crash or a rewind made again must not be drawn twice.
            again = {"step": self._again_from, "session_log": SessionLog(status=SessionLog.START)}
            events = [{"file_version": "brain.Event:2"}, again, *events]
        piece = io.BytesIO()
        for event in events:
            RecordWriter(piece).write(Event(wall_time=time.time(), **event).SerializeToString())
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file.append(piece.getvalue())
        self._again_from = 0

    def close(self) -> None:
        """See `Sink`."""
        self._file.close()


class Console:
    """A line per record in the log; on a terminal also a progress bar below the lines."""

    def __init__(self, *, max_steps: int) -> None:
        self._max_steps = max_steps
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console as Terminal
            from rich.progress import Progress

            self._bar = Progress(console=Terminal(stderr=True), transient=True)
            self._task = self._bar.add_task("training", total=max_steps)
            with suppress(OSError):  # the terminal may be gone
                self._bar.start()

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """See `Sink`."""
        logger.info(format_record(kind, record, max_steps=self._max_steps))
        if self._bar is not None and kind == "train":
            self._bar.update(self._task, completed=record["step"])

    def close(self) -> None:
        """See `Sink`."""
        if self._bar is not None:
            self._bar.stop()


class Reporter:
    """All sinks of a run; on ranks other than 0 there are none. Reporting never ends a run."""

    def __init__(self, run_dir: Path, *, start_step: int, max_steps: int, tensorboard: bool, ranks: Ranks) -> None:
        self._sinks: list[Sink] = []
        if ranks.is_first:
            self._sinks += [Console(max_steps=max_steps), JsonLines(run_dir / "metrics.jsonl")]
            self._sinks += [TensorBoard(run_dir / "tensorboard", start_step=start_step)] if tensorboard else []
        self._num_lost = [0] * len(self._sinks)

    def write(self, kind: str, record: dict[str, Any]) -> None:
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


def format_record(kind: str, record: dict[str, Any], *, max_steps: int) -> str:
    """The console line of a record."""
    if kind == "event":
        return " ".join(f"{key}={value}" for key, value in record.items())
    parts = [f"step {record['step']:>{len(str(max_steps))}}/{max_steps}", f"{kind}", f"loss {record['loss']:.4f}"]
    parts += [
        f"ppl {record['ppl']:.2f}",
        f"bpb {record['bits_per_byte']:.4f}",
        f"bpc {record['bits_per_character']:.4f}",
    ]
    if kind == "train":
        eta = int(record["eta_s"])
        parts += [
            f"lr {record['lr']:.3e}",
            f"gnorm {record['grad_norm']:.3f}",
            f"{record['tokens_per_s']:,.0f} tok/s",
            *([f"mfu {record['mfu_pct']:.1f}%"] if "mfu_pct" in record else []),
            f"peak {record['peak_gib']:.2f} GiB",
            f"wait {record['data_wait_pct']:.1f}%",
            f"eta {eta // 3600:d}:{eta // 60 % 60:02d}:{eta % 60:02d}",
        ]
        if record["skipped_steps"]:
            parts.append(f"skipped {record['skipped_steps']}")
        if record["skipped_documents"]:
            parts.append(f"damaged documents {record['skipped_documents']}")
    else:
        parts.append(f"{record['tokens']:,} tokens in {record['seconds']:.1f} s")
    return "  ".join(parts)
