"""What a run reports: one line, one JSON record and TensorBoard scalars per logging interval.

Sums stay on the device between two reports; a report is the only point at which the loop waits for the device.
Every value declares how ranks are joined: losses are means over ranks, waiting is that of the slowest rank. Reporting
never ends a run: a sink that cannot write says so once and falls silent.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from txl_dist.dist import Ranks, gather_objects
from txl_dist.errors import TrainingError
from txl_dist.log import logger


class Interval:
    """Sums since the last report, of this rank."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._wait_s = 0.0
        self._num_steps = self._num_scored = 0
        self._loss: Tensor | float = 0.0
        self._grad_norm: Tensor | float = 0.0

    def add(self, *, loss: Tensor, grad_norm: Tensor | float, wait_s: float, num_scored: int) -> None:
        """One step: its mean loss in nats and the targets that counted on this rank, the seconds it waited for data."""
        self._num_scored += num_scored
        self._loss, self._grad_norm = self._loss + loss, self._grad_norm + grad_norm
        self._num_steps, self._wait_s = self._num_steps + 1, self._wait_s + wait_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside (saving, evaluating) does not count as training."""
        start_s = time.perf_counter()
        yield
        self._start_s += time.perf_counter() - start_s

    def report(self, *, step: int, tokens_per_step: int, num_skipped: int = 0) -> dict[str, float]:
        """Means over the interval and all ranks, and the sum of the documents skipped. Waits for the device.

        Raises TrainingError on all ranks if the loss of any is not finite, or if nothing was scored.
        """
        # The sync point.
        mine = (float(self._loss), float(self._grad_norm), self._wait_s, num_skipped, self._num_scored)
        span_s, steps = time.perf_counter() - self._start_s, max(1, self._num_steps)
        parts = gather_objects(mine)
        loss = sum(part[0] for part in parts) / len(parts) / steps
        check_finite([part[0] for part in parts], what=f"the loss of the {steps} steps up to step {step}")
        if not any(part[4] for part in parts):
            raise TrainingError(
                f"no token was scored in the {steps} steps up to step {step}: all that was read is damaged. Restore "
                "the corpus (`txl verify` lists the damage), or take it out of data.path and data.more_paths."
            )
        wait_s = max(part[2] for part in parts)
        return {
            "loss": loss,
            "ppl": math.exp(min(loss, 700.0)),
            "grad_norm": parts[0][1] / steps,
            "tokens_per_s": steps * tokens_per_step / span_s,
            "step_ms": 1000 * span_s / steps,
            "data_wait_pct": 100 * wait_s / span_s,
            "skipped_documents": sum(part[3] for part in parts),
        }


def check_finite(values: Sequence[float], *, what: str) -> None:
    """Raise TrainingError if a value of any rank is not finite. All ranks pass the values of all."""
    bad = [rank for rank, value in enumerate(values) if not math.isfinite(value)]
    if bad:
        raise TrainingError(
            f"{what} is {values[bad[0]]} on rank(s) {bad}. The run stops before saving it; continue from the last "
            "checkpoint with a lower optim.lr, more optim.warmup_steps, or bf16 instead of fp16."
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
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """See `Sink`."""
        # JSON has no NaN: a norm that overflowed in half precision becomes null.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps({"kind": kind, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """See `Sink`."""
        self._file.close()


class TensorBoard:
    """Event files; tags are `kind/name`."""

    def __init__(self, folder: Path, *, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports tensorboard, which is slow

        # Steps that a crash made again must not be drawn twice.
        self._writer: Any = SummaryWriter(str(folder), purge_step=start_step + 1)

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """See `Sink`."""
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(f"{kind}/{name}", value, record["step"])

    def close(self) -> None:
        """See `Sink`."""
        self._writer.close()


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
        makers: list[Callable[[], Sink]] = [
            lambda: Console(max_steps=max_steps),
            lambda: JsonLines(run_dir / "metrics.jsonl"),
        ]
        if tensorboard:
            makers.append(lambda: TensorBoard(run_dir / "tensorboard", start_step=start_step))
        for maker in makers if ranks.is_first else []:
            try:
                self._sinks.append(maker())
            except OSError as error:
                logger.warning("metrics: one of the sinks cannot be opened: %s", error)

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """Hand a record (with its `step`) to every sink that still works."""
        for sink in list(self._sinks):
            try:
                sink.write(kind, record)
            except OSError as error:
                self._sinks.remove(sink)
                logger.warning("metrics: %s stopped after an error: %s", type(sink).__name__, error)

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
