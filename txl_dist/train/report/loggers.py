"""Loggers for the records of a run: the console, `metrics.jsonl`, TensorBoard, Weights & Biases.

A record is a flat dictionary with its `step`. Its `kind` is train, eval, memory, layers, sample or event. Every logger
takes every kind, and shows the part that it can show. `metric_table` says how each number is shown. Reporting never
ends a run. A logger that cannot write warns once, tries again with each record, and reports when it works again.
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from txl_dist.artifacts import RECORDS, TENSORBOARD
from txl_dist.config.load import flat
from txl_dist.config.schema import MetricsSection
from txl_dist.console.formatting import bounded, counted
from txl_dist.console.logging import FIT, GrowingFile, logger
from txl_dist.errors import ConfigError
from txl_dist.train.report.event_text import event_details
from txl_dist.train.report.metric_table import METRICS, Cell, cells_of, line_of
from txl_dist.train.state import RunContext

Record = dict[str, Any]

_MAX_SCALARS = 64
"""Length of the longest list, for instance step times of ranks, of which TensorBoard gets one curve per number."""
_NOT_IN_IDS = "/\\#?%:"
"""Characters that wandb refuses in the id of a run."""
_LONGEST_TAG = 64
_PATIENCE_S = 300.0
"""Seconds between two attempts to reach Weights & Biases. A step may have to wait for each attempt."""


class MetricLogger(Protocol):
    """Receiver of a run's records."""

    def write(self, kind: str, record: Record) -> None:
        """Write one record of a kind. Raises OSError if that fails."""

    def close(self) -> None:
        """Write out what is buffered, and release all resources. Raises OSError if that fails."""


class MetricReporter:
    """Reporter that passes records to all loggers of a run. Other ranks than 0 have none. It never ends a run."""

    def __init__(self, context: RunContext, *, start_step: int) -> None:
        config = context.config
        run_dir = context.run_dir
        metrics = context.config.metrics
        self._sinks: list[MetricLogger] = []
        if context.ranks.is_rank0:
            self._sinks += [Console(max_steps=config.train.max_steps), JsonLines(run_dir / RECORDS)]
            if metrics.tensorboard:
                folder = run_dir / TENSORBOARD
                settings = dict(flat(config))
                self._sinks.append(TensorBoard(folder, start_step=start_step, settings=settings))
            if metrics.wandb:
                self._sinks.append(WeightsAndBiases(run_dir, metrics, config=config.model_dump(mode="json")))
        self._num_lost = [0] * len(self._sinks)
        self._failed: set[str] = set()

    def write(self, kind: str, record: Record) -> None:
        """Pass a record, which has its `step`, to every logger."""
        if self._sinks and kind.startswith(("train", "eval")):
            record = {**record, **self._measured(record)}
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
                logger.warning(
                    "metrics: %s is written again; it lacks %s", type(sink).__name__, counted(num_lost, "record")
                )

    def _measured(self, record: Record) -> Record:
        """Return the numbers that plugins compute from a record. One that fails is left out, with one warning."""
        numbers: Record = {}
        for metric in METRICS.values():
            if metric.measure is None or metric.name in record:
                continue
            try:
                value = metric.measure(MappingProxyType(dict(record)))
                if value is not None:
                    numbers[metric.name] = float(value)
            except Exception as error:  # noqa: BLE001  a plugin's code may raise anything
                if metric.name not in self._failed:
                    self._failed.add(metric.name)
                    logger.warning("metrics: %s of a plugin is left out where it fails: %r", metric.name, error)
        return numbers

    def close(self) -> None:
        """Close all loggers. An error is logged."""
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:
                logger.warning("metrics: %s could not be closed: %s", type(sink).__name__, error)


def check_sinks(metrics: MetricsSection) -> None:
    """Refuse settings with which a logger could not write at all. Raises ConfigError."""
    if metrics.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"metrics.wandb={metrics.wandb!r} needs the library wandb, which is not installed. "
            'pip install "txl_dist[wandb]", or remove this setting.'
        )
    wrong = sorted(set(metrics.wandb_id) & set(_NOT_IN_IDS))
    if wrong or metrics.wandb_id != metrics.wandb_id.strip():
        raise ConfigError(
            f"metrics.wandb_id={metrics.wandb_id!r}: an id at Weights & Biases has none of {' '.join(_NOT_IN_IDS)} and "
            "no blank at its ends. Copy it from the run's page (Overview, Run path, the last part)."
        )
    for tag in metrics.wandb_tags:
        if not 1 <= len(tag) <= _LONGEST_TAG:
            raise ConfigError(
                f"metrics.wandb_tags: {tag!r:.80} has {len(tag)} characters; a tag at Weights & Biases has 1 to "
                f"{_LONGEST_TAG}. Shorten the tag, or remove it."
            )


class JsonLines(MetricLogger):
    """Logger to `metrics.jsonl`: one record per line, with all its numbers and the time of writing."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path, separator=b"\n")

    @override
    def write(self, kind: str, record: Record) -> None:
        finite = {name: _finite(value) for name, value in record.items()}
        self._file.append(json.dumps({"kind": kind, "time_s": round(time.time(), 3), **finite}).encode())

    @override
    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by null, since JSON has no NaN. Norms overflow in half precision."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class TensorBoard(MetricLogger):
    """Logger to a TensorBoard event file, with the tags `kind/name`.

    It writes in the calling thread. The library's own writer uses a thread, which ends at the first error.
    """

    def __init__(self, folder: Path, *, start_step: int, settings: Mapping[str, Any]) -> None:
        """`settings` are shown next to the final metrics, to compare runs."""
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._folder = folder
        self._file = GrowingFile(folder / name)
        self._step = start_step
        self._settings = settings
        self._again_from = start_step + 1

    @override
    def write(self, kind: str, record: Record) -> None:
        # Imported here, because the import is slow.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        step = record["step"]
        if kind == "train":
            self._again_from = step if step <= self._step else self._again_from  # after a rewind
            self._step = step
        events: list[Record] = []
        if not self._file.is_continuous:
            shown = [{"step": step, "summary": summary} for summary in _settings_summaries(self._settings)]
            events += [{"file_version": "brain.Event:2"}, *shown]
        if self._again_from:
            # Without this, steps that are made again after a crash or a rewind would be drawn twice.
            events.append({"step": self._again_from, "session_log": SessionLog(status=SessionLog.START)})
        events.append({"step": step, "summary": _summary(kind, record)})
        piece = io.BytesIO()
        for event in events:
            RecordWriter(piece).write(Event(wall_time=time.time(), **event).SerializeToString())
        self._folder.mkdir(exist_ok=True)
        self._file.append(piece.getvalue())
        self._again_from = 0

    @override
    def close(self) -> None:
        self._file.close()


def _summary(kind: str, record: Record) -> Any:
    """Convert a record for TensorBoard.

    Numbers become scalars, and so does each number of a short list. Losses by position become the heights of a
    histogram over the segment, in per cent. Samples and events become text.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

    values: list[Any] = []
    if kind == "sample":
        values = [_text("sample/text", _lines(record))]
    elif kind == "event":
        facts = [f"{name}: {value}" for name, value in record.items() if name not in ("event", "step")]
        values = [_text(f"event/{record['event']}", facts)]
    shapes = {metric.name: metric.tensorboard for metric in METRICS.values()}
    for name, value in record.items() if not values else ():
        tag = f"{kind}/{name}"
        shape = shapes.get(name, "scalar")
        if shape == "histogram":
            values.append(_histogram(tag, value))
        elif isinstance(value, list) and len(value) <= _MAX_SCALARS:
            values += [Summary.Value(tag=f"{tag}/{index:02}", simple_value=item) for index, item in enumerate(value)]
        elif isinstance(value, int | float) and name != "step" and shape == "scalar":
            values.append(Summary.Value(tag=tag, simple_value=value))
    return Summary(value=values)


def _text(tag: str, lines: Iterable[str]) -> Any:
    """Make a summary value that shows lines of text literally."""
    from tensorboard.plugins.text.summary_v2 import text_pb  # type: ignore[import-untyped]

    quoted = "".join(f"    {line}\n" for line in lines)  # indented, so that Markdown shows them literally
    return text_pb(tag, quoted.encode(errors="replace"), description="").value[0]


def _histogram(tag: str, heights: Sequence[float]) -> Any:
    """Make a histogram value: a row (left edge, right edge, height) per position, as the plugin draws it."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.histogram.metadata import create_summary_metadata  # type: ignore[import-untyped]
    from tensorboard.util.tensor_util import make_tensor_proto  # type: ignore[import-untyped]

    edges = np.linspace(0.0, 100.0, len(heights) + 1)
    rows = np.stack([edges[:-1], edges[1:], np.nan_to_num(np.array(heights, dtype=np.float64))], axis=1)
    return Summary.Value(tag=tag, metadata=create_summary_metadata("", ""), tensor=make_tensor_proto(rows))


def _settings_summaries(settings: Mapping[str, Any]) -> list[Any]:
    """Make the summaries for the HPARAMS tab: the run's settings, and the metrics to show next to them."""
    from tensorboard.plugins.hparams import summary_v2  # type: ignore[import-untyped]

    metrics = [summary_v2.Metric(tag) for tag in ("eval/loss", "eval/bits_per_byte", "train/loss")]
    names = [summary_v2.HParam(name) for name in settings]
    plain = {
        name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in settings.items()
    }
    return [summary_v2.hparams_config_pb(names, metrics), summary_v2.hparams_pb(plain)]


class WeightsAndBiases(MetricLogger):
    """Logger to a run at wandb.ai, or with WANDB_MODE=offline to RUN/wandb, for `wandb sync`.

    A resumed run is the same run there. No error of that library or of the network ends a training.
    """

    def __init__(self, run_dir: Path, metrics: MetricsSection, *, config: Record) -> None:
        self._run_dir = run_dir
        self._metrics = metrics
        self._config = config
        self._run: Any = None
        self._next_try_s = 0.0

    @override
    def write(self, kind: str, record: Record) -> None:
        try:
            if self._run is None:
                if time.monotonic() < self._next_try_s:
                    raise TimeoutError("not reached; the next attempt is in some minutes")
                self._next_try_s = time.monotonic() + _PATIENCE_S
                self._run = self._begin()
            self._run.log({name if name == "step" else f"{kind}/{name}": value for name, value in record.items()})
        except Exception as error:
            raise OSError(f"Weights & Biases: {error}") from error

    def _begin(self) -> Any:
        """Start or resume the run at Weights & Biases. May raise any error of that library."""
        import wandb

        metrics = self._metrics
        run_dir = self._run_dir.resolve()
        run = wandb.init(
            project=metrics.wandb,
            entity=metrics.wandb_entity or None,
            name=metrics.wandb_name or run_dir.name,
            group=metrics.wandb_group or None,
            tags=metrics.wandb_tags or None,
            id=metrics.wandb_id or sha256(str(run_dir).encode()).hexdigest()[:12],
            resume=metrics.wandb_resume,
            dir=str(self._run_dir),
            config=self._config,
        )
        # The library's own step count would refuse steps that are made again after a rewind.
        run.define_metric("*", step_metric="step")
        return run

    @override
    def close(self) -> None:
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as error:
                raise OSError(f"Weights & Biases: {error}") from error


class Console(MetricLogger):
    """Logger to the console: one line per record. On a terminal lines are cut to fit, with a progress bar below."""

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

    @override
    def write(self, kind: str, record: dict[str, Any]) -> None:
        cells = record_cells(kind, record, max_steps=self._max_steps)
        logger.info(line_of(cells), extra={FIT: lambda width: line_of(cells, width=width)})
        if self._bar is not None and kind == "train":
            self._bar.update(self._task, completed=record["step"])

    @override
    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def record_cells(kind: str, record: Record, *, max_steps: int) -> list[Cell]:
    """Return the cells of a record's line on the console."""
    step = Cell(f"step {record['step']:>{len(str(max_steps))}}/{max_steps}")
    if kind == "event":
        fields = {name: value for name, value in record.items() if name not in ("event", "step")}
        name = str(record["event"])
        return [step, Cell(name.replace("_", " ")), Cell(event_details(name, fields))]
    head = [step, Cell(kind)]
    if kind == "sample":
        return [Cell("\n".join([line_of(head), *(f"  | {line}" for line in _lines(record))]))]
    if kind == "memory":
        shares = [value for name, value in record.items() if name.startswith("memory_attention_pct")]
        by_layer = f"attention on memory by layer {' '.join(f'{share:.0f}%' for share in shares)}"
        return [
            *head,
            Cell(f"memory gains {bounded(record['memory_gain'])} nats per token"),
            Cell(by_layer, drop=1),
        ]
    if kind == "layers":
        return [*head, Cell(f"gradient norms by layer {' '.join(f'{norm:.3g}' for norm in record['gradient_norm'])}")]
    return head + cells_of(record)


def _lines(sample: Record) -> list[str]:
    """Return the lines of a sample's text. Control characters, which would steer a terminal, are escaped."""
    text = (sample["prompt"] + sample["text"]).rstrip("\n")
    shown = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown).split("\n")
