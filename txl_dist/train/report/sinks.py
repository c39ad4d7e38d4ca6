"""Where the records of a run go: the console, `metrics.jsonl`, TensorBoard, Weights & Biases.

A record is a flat dictionary with its `step`, of one `kind`: train, eval, look, sample or event. Every sink takes every
kind and shows what it can of it. A sink that cannot write raises OSError; `Reporter` makes sure that this never ends
a run.
"""

from __future__ import annotations

import io
import json
import math
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from txl_dist.log import FIT, GrowingFile, logger
from txl_dist.train.report.metric_table import Cell, cells_of, line_of

Record = dict[str, Any]

_MAX_SCALARS = 64
"""Longest list whose numbers TensorBoard gets, one curve each: step times of ranks, losses by position."""
_PATIENCE_S = 300.0
"""Between two attempts to reach Weights & Biases, each of which a step may have to wait for."""


class Sink(Protocol):
    """Where records go."""

    def write(self, kind: str, record: Record) -> None:
        """Take one record. Raises OSError."""

    def close(self) -> None:
        """Flush."""


class JsonLines:
    """`metrics.jsonl`: one record per line with the time it was written, complete numbers, always."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path, separator=b"\n")

    def write(self, kind: str, record: Record) -> None:
        """See `Sink`."""
        finite = {name: _finite(value) for name, value in record.items()}
        self._file.append(json.dumps({"kind": kind, "time_s": round(time.time(), 3), **finite}).encode())

    def close(self) -> None:
        """See `Sink`."""
        self._file.close()


def _finite(value: Any) -> Any:
    """JSON has no NaN: a norm that overflowed in half precision becomes null."""
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """An event file; tags are `kind/name`. It is written here and now: the library's writer does it in a thread, which
    the first error ends."""

    def __init__(self, folder: Path, *, start_step: int, settings: Mapping[str, bool | float | str]) -> None:
        """`settings` are shown beside the final metrics, to compare runs by."""
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._folder, self._file = folder, GrowingFile(folder / name)
        self._step, self._settings = start_step, settings
        self._again_from = start_step + 1

    def write(self, kind: str, record: Record) -> None:
        """See `Sink`."""
        # Slow to import.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        step = record["step"]
        if kind == "train":
            self._again_from = step if step <= self._step else self._again_from  # after a rewind
            self._step = step
        events: list[Record] = []
        if not self._file.goes_on:
            shown = [{"step": step, "summary": summary} for summary in _settings_summaries(self._settings)]
            events += [{"file_version": "brain.Event:2"}, *shown]
        if self._again_from:
            # Steps that a crash or a rewind made again must not be drawn twice.
            events.append({"step": self._again_from, "session_log": SessionLog(status=SessionLog.START)})
        events.append({"step": step, "summary": _summary(kind, record)})
        piece = io.BytesIO()
        for event in events:
            RecordWriter(piece).write(Event(wall_time=time.time(), **event).SerializeToString())
        self._folder.mkdir(exist_ok=True)
        self._file.append(piece.getvalue())
        self._again_from = 0

    def close(self) -> None:
        """See `Sink`."""
        self._file.close()


def _summary(kind: str, record: Record) -> Any:
    """Numbers as scalars, each of a list of few numbers as one of its own, a sample as text."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
    from tensorboard.plugins.text.metadata import create_summary_metadata  # type: ignore[import-untyped]

    if kind == "sample":
        quoted = "".join(f"    {line}\n" for line in _lines(record))  # indented: as it is
        text = TensorProto(dtype="DT_STRING", string_val=[quoted.encode(errors="replace")])
        return Summary(value=[Summary.Value(tag="sample/text", metadata=create_summary_metadata("", ""), tensor=text)])
    numbers = {name: value for name, value in record.items() if name != "step" and isinstance(value, int | float)}
    for name, value in record.items():
        if isinstance(value, list) and len(value) <= _MAX_SCALARS:
            numbers |= {f"{name}/{index:02}": number for index, number in enumerate(value)}
    return Summary(value=[Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in numbers.items()])


def _settings_summaries(settings: Mapping[str, bool | float | str]) -> list[Any]:
    """What the HPARAMS tab shows: the settings of the run, and which metrics to show beside them."""
    from tensorboard.plugins.hparams import summary_v2  # type: ignore[import-untyped]

    metrics = [summary_v2.Metric(tag) for tag in ("eval/loss", "eval/bits_per_byte", "train/loss")]
    names = [summary_v2.HParam(name) for name in settings]
    return [summary_v2.hparams_config_pb(names, metrics), summary_v2.hparams_pb(dict(settings))]


class WeightsAndBiases:
    """The same records as a run at wandb.ai, or, with WANDB_MODE=offline, in RUN/wandb for `wandb sync`.

    A run that goes on is the same run there. Nothing that goes wrong in that library or on the way ends a training.
    """

    def __init__(self, run_dir: Path, *, project: str, config: Record) -> None:
        self._run_dir, self._project, self._config = run_dir, project, config
        self._run: Any = None
        self._next_try_s = 0.0

    def write(self, kind: str, record: Record) -> None:
        """See `Sink`."""
        try:
            if self._run is None:
                if time.monotonic() < self._next_try_s:
                    raise TimeoutError("not reached; tried again in some minutes")
                self._next_try_s = time.monotonic() + _PATIENCE_S
                self._run = self._begin()
            self._run.log({name if name == "step" else f"{kind}/{name}": value for name, value in record.items()})
        except Exception as error:
            raise OSError(f"Weights & Biases: {error}") from error

    def _begin(self) -> Any:
        import wandb

        name = self._run_dir.resolve().name
        run = wandb.init(
            project=self._project,
            name=name,
            id=sha256(str(self._run_dir.resolve()).encode()).hexdigest()[:12],
            resume="allow",
            dir=str(self._run_dir),
            config=self._config,
        )
        # Steps that a rewind makes again would be refused as the library's own count of steps.
        run.define_metric("*", step_metric="step")
        return run

    def close(self) -> None:
        """See `Sink`."""
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as error:
                raise OSError(f"Weights & Biases: {error}") from error


class Console:
    """A line per record in the log; on a terminal as much of it as fits, and a progress bar below the lines."""

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
        cells = record_cells(kind, record, max_steps=self._max_steps)
        logger.info(line_of(cells), extra={FIT: lambda width: line_of(cells, width=width)})
        if self._bar is not None and kind == "train":
            self._bar.update(self._task, completed=record["step"])

    def close(self) -> None:
        """See `Sink`."""
        if self._bar is not None:
            self._bar.stop()


def format_record(kind: str, record: Record, *, max_steps: int) -> str:
    """The whole line of a record, as log files have it; a sample has a line per line of text."""
    return line_of(record_cells(kind, record, max_steps=max_steps))


def record_cells(kind: str, record: Record, *, max_steps: int) -> list[Cell]:
    """What the line of a record is made of."""
    if kind == "event":
        return [Cell(" ".join(f"{key}={value}" for key, value in record.items() if not isinstance(value, dict)))]
    head = [Cell(f"step {record['step']:>{len(str(max_steps))}}/{max_steps}"), Cell(kind)]
    if kind == "sample":
        return [Cell("\n".join([line_of(head), *(f"  | {line}" for line in _lines(record))]))]
    if kind == "look":
        shares = [value for name, value in record.items() if name.startswith("memory_attention_pct")]
        by_layer = f"attention on memory by layer {' '.join(f'{share:.0f}%' for share in shares)}"
        return [*head, Cell(f"memory gains {record['memory_gain']:.4f} nats per token"), Cell(by_layer, drop=1)]
    return head + cells_of(record)


def _lines(sample: Record) -> list[str]:
    """Of a text that may hold anything: what would steer a terminal is written out."""
    text = (sample["prompt"] + sample["text"]).rstrip("\n")
    shown = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown).split("\n")
