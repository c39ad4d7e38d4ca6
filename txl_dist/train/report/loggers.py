"""Loggers for the records of a run: the console, `metrics.jsonl`, TensorBoard, Weights & Biases.

A record is a flat dictionary with its `step`. Its `kind` is train, eval, memory, layers, sample or event. Every logger
accepts records of every kind, and shows those values that it can show. `metric_table` says how each number is shown. An
error of a logger never ends a run. A logger that cannot write warns once, tries again with each record, and logs when
it can write again.
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
"""One record of a run: numbers, texts and lists by name."""

_MAX_SCALARS = 64
"""Maximum length of a list for which TensorBoard gets one curve per number, for instance the step times of the ranks.
TensorBoard does not get longer lists."""
_NOT_IN_IDS = "/\\#?%:"
"""Characters that Weights & Biases refuses in the id of a run."""
_LONGEST_TAG = 64
"""Maximum number of characters in a tag at Weights & Biases."""
_PATIENCE_S = 300.0
"""Minimum number of seconds between two attempts to reach Weights & Biases, because an attempt can delay a step."""


class MetricLogger(Protocol):
    """Interface of a logger, which writes all records of a run to one place, for instance a file."""

    def write(self, kind: str, record: Record) -> None:
        """Write one record. `kind` is the kind of record, for instance train or eval. Raises OSError if the record
        cannot be written."""

    def close(self) -> None:
        """Write out buffered data, and release all resources. Raises OSError if the data cannot be written."""


class MetricReporter:
    """Writer of a run's records to all loggers. An error of a logger is logged and never ends the run.

    Only rank 0 has loggers. On other ranks the methods do nothing. `start_step` is the number of steps that were
    finished when this process started. `continues` says that records of the run were written before.
    """

    def __init__(self, context: RunContext, *, start_step: int, continues: bool = False) -> None:
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
                values = config.model_dump(mode="json")
                self._sinks.append(WeightsAndBiases(run_dir, metrics, config=values, continues=continues))
        self._num_lost = [0] * len(self._sinks)
        self._failed: set[str] = set()

    def write(self, kind: str, record: Record) -> None:
        """Pass a record to every logger. `kind` is the kind of the record, which must have a `step`.

        The metrics of plugins are added to training and evaluation records.
        """
        if self._sinks and kind.startswith(("train", "eval")):
            record = {**record, **self._measured(record)}
        for index, sink in enumerate(self._sinks):
            try:
                sink.write(kind, record)
            except OSError as error:
                self._num_lost[index] += 1
                if self._num_lost[index] == 1:
                    logger.warning(
                        "metrics: the logger %s cannot write. Records are lost until the logger can write again: %s",
                        type(sink).__name__,
                        error,
                    )
                continue
            if self._num_lost[index]:
                num_lost, self._num_lost[index] = self._num_lost[index], 0
                logger.warning(
                    "metrics: the logger %s can write again. It has lost %s",
                    type(sink).__name__,
                    counted(num_lost, "record"),
                )

    def _measured(self, record: Record) -> Record:
        """Return the metrics that plugins compute from a record. A metric that raises an error is left out, and
        one warning per metric is logged."""
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
                    logger.warning(
                        "metrics: the plugin's metric %s failed, and is missing in the records: %r",
                        metric.name,
                        error,
                    )
        return numbers

    def close(self) -> None:
        """Close all loggers. An error of a logger is logged and not raised."""
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:
                logger.warning("metrics: the logger %s could not be closed: %s", type(sink).__name__, error)


def check_sinks(metrics: MetricsSection) -> None:
    """Raise ConfigError for settings with which Weights & Biases could never write: a missing package, or a wrong id or
    tag."""
    if metrics.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"metrics.wandb={metrics.wandb!r} needs the library wandb, which is not installed. "
            'Install it by `pip install "txl_dist[wandb]"`, or remove metrics.wandb.'
        )
    wrong = sorted(set(metrics.wandb_id) & set(_NOT_IN_IDS))
    if wrong or metrics.wandb_id != metrics.wandb_id.strip():
        raise ConfigError(
            f"metrics.wandb_id={metrics.wandb_id!r}: an id at Weights & Biases must not contain the characters "
            f"{' '.join(_NOT_IN_IDS)}, and must not begin or end with a blank. Copy the id from the run's page at "
            "Weights & Biases, where it is the last part of the run path under Overview."
        )
    for tag in metrics.wandb_tags:
        if not 1 <= len(tag) <= _LONGEST_TAG:
            raise ConfigError(
                f"metrics.wandb_tags: {tag!r:.80} has {len(tag)} characters, but a tag at Weights & Biases has 1 to "
                f"{_LONGEST_TAG} characters. Shorten or remove the tag."
            )


class JsonLines(MetricLogger):
    """Logger to `metrics.jsonl`: one line of JSON per record, with the kind, the time of writing and all values of the
    record."""

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
    """Return the value with None in place of each number that is not finite, because JSON has no NaN. Norms can
    overflow in half precision."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class TensorBoard(MetricLogger):
    """Logger to a TensorBoard event file. The tags are `kind/name`, for instance `train/loss`.

    Records are written in the calling thread. The writer of the TensorBoard library uses a thread of its own, which
    ends at the first error.
    """

    def __init__(self, folder: Path, *, start_step: int, settings: Mapping[str, Any]) -> None:
        """Choose the name of the event file. The first record creates the file.

        `start_step` is the number of steps that were finished when this process started. `settings` are shown next to
        the final metrics, so that runs can be compared.
        """
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
    """Return the TensorBoard summary of a record.

    A number becomes a scalar, and a short list becomes one scalar per number. Losses by position become a histogram.
    Its height is the loss, and its horizontal axis is the position in the segment in per cent. Samples and events
    become text. The seconds and the repeated steps of a recovery become scalars as well.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

    values: list[Any] = []
    if kind == "sample":
        values = [_text("sample/text", _lines(record))]
    elif kind == "event":
        facts = [f"{name}: {value}" for name, value in record.items() if name not in ("event", "step")]
        values = [_text(f"event/{record['event']}", facts)]
        if record["event"] == "recovered":
            costs = {name: value for name, value in record.items() if name.endswith("_s") or name == "repeated_steps"}
            values += [Summary.Value(tag=f"recovery/{name}", simple_value=value) for name, value in costs.items()]
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
    """Return a summary value that shows lines of text literally, without Markdown."""
    from tensorboard.plugins.text.summary_v2 import text_pb  # type: ignore[import-untyped]

    quoted = "".join(f"    {line}\n" for line in lines)  # indented, so that Markdown shows them literally
    return text_pb(tag, quoted.encode(errors="replace"), description="").value[0]


def _histogram(tag: str, heights: Sequence[float]) -> Any:
    """Return a summary value that the histogram plugin shows as one bar per item of `heights`.

    Its tensor has a row (left edge, right edge, height) per bar. The horizontal axis goes from 0 to 100.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.histogram.metadata import create_summary_metadata  # type: ignore[import-untyped]
    from tensorboard.util.tensor_util import make_tensor_proto  # type: ignore[import-untyped]

    edges = np.linspace(0.0, 100.0, len(heights) + 1)
    rows = np.stack([edges[:-1], edges[1:], np.nan_to_num(np.array(heights, dtype=np.float64))], axis=1)
    return Summary.Value(tag=tag, metadata=create_summary_metadata("", ""), tensor=make_tensor_proto(rows))


def _settings_summaries(settings: Mapping[str, Any]) -> list[Any]:
    """Return the summaries for TensorBoard's HPARAMS tab: the run's settings, and the metrics to show next to them."""
    from tensorboard.plugins.hparams import summary_v2  # type: ignore[import-untyped]

    metrics = [summary_v2.Metric(tag) for tag in ("eval/loss", "eval/bits_per_byte", "train/loss")]
    names = [summary_v2.HParam(name) for name in settings]
    plain = {
        name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in settings.items()
    }
    return [summary_v2.hparams_config_pb(names, metrics), summary_v2.hparams_pb(plain)]


class WeightsAndBiases(MetricLogger):
    """Logger to a run at wandb.ai. With WANDB_MODE=offline it writes to the folder RUN/wandb, for `wandb sync`.

    A resumed training continues the same run at wandb.ai. Errors of the wandb library or of the network never end a
    training.
    """

    def __init__(self, run_dir: Path, metrics: MetricsSection, *, config: Record, continues: bool) -> None:
        """Start nothing yet. `continues` says that records of the run were written before."""
        self._run_dir = run_dir
        self._metrics = metrics
        self._config = config
        self._continues = continues
        self._run: Any = None
        self._next_try_s = 0.0

    @override
    def write(self, kind: str, record: Record) -> None:
        try:
            if self._run is None:
                if time.monotonic() < self._next_try_s:
                    raise TimeoutError(
                        "the server of Weights & Biases could not be reached. The run tries again within five minutes"
                    )
                self._next_try_s = time.monotonic() + _PATIENCE_S
                self._run = self._begin()
            self._run.log({name if name == "step" else f"{kind}/{name}": value for name, value in record.items()})
        except Exception as error:
            raise OSError(f"Weights & Biases: {error}") from error

    def _begin(self) -> Any:
        """Start or resume the run at Weights & Biases, and return it. May raise any error of the wandb library."""
        import wandb

        metrics = self._metrics
        run_dir = self._run_dir.resolve()
        if self._continues and metrics.wandb_resume == "never":
            resume = "allow"  # each phase and each recovery begins with a logger of its own
        else:
            resume = metrics.wandb_resume
        run = wandb.init(
            project=metrics.wandb,
            entity=metrics.wandb_entity or None,
            name=metrics.wandb_name or run_dir.name,
            group=metrics.wandb_group or None,
            tags=metrics.wandb_tags or None,
            id=metrics.wandb_id or sha256(str(run_dir).encode()).hexdigest()[:12],
            resume=resume,
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
    """Logger to the console: one line per record. On a terminal, lines are shortened to fit, and a progress bar is
    shown below."""

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
    """Return the cells of a record's line on the console. A cell is a part of the line that is dropped as a whole if
    the line is too long."""
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
        by_layer = f"attention to the memory by layer {' '.join(f'{share:.0f}%' for share in shares)}"
        return [
            *head,
            Cell(f"memory lowers the loss by {bounded(record['memory_gain'])} nats per token"),
            Cell(by_layer, drop=1),
        ]
    if kind == "layers":
        return [*head, Cell(f"gradient norms by layer {' '.join(f'{norm:.3g}' for norm in record['gradient_norm'])}")]
    return head + cells_of(record)


def _lines(sample: Record) -> list[str]:
    """Return the lines of a sample's prompt and text. Control characters are escaped, because they would control the
    terminal."""
    text = (sample["prompt"] + sample["text"]).rstrip("\n")
    shown = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown).split("\n")
