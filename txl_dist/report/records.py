"""Reader of a run's records: `metrics.jsonl` becomes columns of numbers with one row per step.

A run can crash, be resumed, and be rewound (continued from an earlier step after a problem). So its file has some steps
twice, and has steps that were discarded later. This module keeps the later record of a step. If a start or a rewind
continues the run from step S, the records of steps after S that were already in the file are left out. Hours are hours
of work: the time from record to record, without the pauses before a start.

A list of numbers becomes one column per element, NAME_0, NAME_1 ... For times per rank, only the fastest, the median
and the slowest are kept. A line that a crash cut short is counted and skipped. A null value becomes NaN, and so does a
number that training cannot produce (`is_number`). Records of unknown kinds are skipped, and fields with unknown
names raise no error. Names contain only characters that can be drawn.

Numbers are kept as arrays, not objects, to save memory. A million records take at most half a minute and less than a
gigabyte.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

import numpy as np
from numpy.typing import NDArray

from txl_dist.artifacts import RECORDS
from txl_dist.config.renamed import record_in_new_names
from txl_dist.console.formatting import printable
from txl_dist.errors import DataError
from txl_dist.io.files import open_regular, parse_object, read_bytes

FloatArray = NDArray[np.float64]
SCORES = "evaluation.json"
MOST = 1e15
"""Largest number that counts as a measurement, because larger numbers overflow in computations."""
_MAX_SCORES = _MAX_LIST = 4096
_MAX_NAME = 200
_REPEATED = ("skipped", "spike")
"""Events of a step that are written again when the step is repeated."""
BITS = {"bits_per_byte": "bits per byte", "bits_per_character": "bits per character"}
"""Metrics per byte or character of text, with their names for people. Old versions of txl_dist recorded these metrics
even if their values were not the cost of the whole text. The start record of such a version does not say why bits are
missing (`no_bits`). In that case, the values of these metrics are left out."""
_NOT_KEPT = ("time_s", "eta_s", "ppl")


class Event(NamedTuple):
    """Event of the run, such as a start, a rewind or a loss spike. Events are in the order of the file of records."""

    name: str
    step: int
    hours: float
    """Hours of work of the run before the event."""
    fields: dict[str, Any]
    """All other fields of the record, by name."""


class TextSample(NamedTuple):
    """Text that the model generated during training."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class RecordTable:
    """Valid records of one kind, sorted by step, as columns of numbers.

    Each column has one value per record. The value is NaN if the record lacks this number.
    """

    columns: dict[str, FloatArray]
    """Columns by name. The columns `step` and `hours` always exist."""

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> FloatArray:
        """Return a column by its name. If no record has this column, all values are NaN."""
        return self.columns.get(name, np.full(len(self), np.nan))

    def has(self, name: str) -> bool:
        """Return whether any record has a number of this name."""
        return bool(np.isfinite(self[name]).any())

    def last(self, name: str) -> float | None:
        """Return the newest number of a column, or None if the column has none."""
        column = self[name]
        finite = column[np.isfinite(column)]
        if len(finite):
            return float(finite[-1])
        return None

    def numbered(self, prefix: str) -> list[str]:
        """List the columns PREFIX0, PREFIX1 ... in the order of their numbers."""

        def number_of(name: str) -> int:
            return int(name.removeprefix(prefix))

        names = []
        for name in self.columns:
            if name.startswith(prefix) and name.removeprefix(prefix).isdecimal():
                names.append(name)
        return sorted(names, key=number_of)

    def newest(self, prefix: str) -> FloatArray:
        """Return the values of the columns PREFIX0, PREFIX1 ... in the last record, in the order of the columns."""
        return np.array([self[name][-1] for name in self.numbered(prefix)])


@dataclass(frozen=True)
class History:
    """All valid records of a run, from `metrics.jsonl`. `read_history` reads it."""

    train: RecordTable
    evals: dict[str, RecordTable]
    """Evaluations by kind of record: `eval` for the first corpus, `eval_NAME` for further corpora and held-out
    sets."""
    memory: RecordTable
    """Records of the kind `memory`: the effect of the memory, measured at each evaluation."""
    layers: RecordTable
    """Records of the kind `layers`: norms of each layer (metrics.norms_every_steps)."""
    events: list[Event]
    samples: list[TextSample]
    hosts: dict[int, str]
    """Host name of each rank that was the slowest at some step."""
    hours: float
    """Hours of work that the records cover."""
    last_time_s: float
    """Unix time in seconds of the newest record. It is NaN if no record has a time."""
    num_records: int
    """Number of complete lines in the file."""
    num_damaged: int
    """Number of lines that are not records, because a crash cut them short."""
    num_superseded: int
    """Number of train records that later records replaced: their steps were repeated, or discarded by a rewind."""

    @property
    def held_out(self) -> RecordTable:
        """Evaluations of the first corpus, or of the first held-out set if the run has no validation split. The table
        is empty if there are none."""
        none = RecordTable({"step": np.empty(0), "hours": np.empty(0)})
        *_, first = (none, *self.evals.values())  # an evaluation writes the record of its first text last
        return self.evals.get("eval", first)

    @property
    def step(self) -> int:
        """Newest step of any record."""
        newest = 0.0
        for table in (self.train, self.memory, *self.evals.values()):
            step = table.last("step")
            newest = max(newest, step or 0.0)
        if self.events:
            newest = max(newest, self.events[-1].step)
        return int(newest)


def read_history(run_dir: Path) -> History:
    """Read the records of a run from its folder.

    Raises DataError if there is no file of records or no valid record in it.
    """
    path = run_dir / RECORDS
    try:
        with open_regular(path) as stream:
            history = history_of(stream)
    except OSError as error:
        if not run_dir.is_dir():
            what = "there is no such folder"
        else:
            what = f"{path.name}: {error.strerror}"
        raise DataError(
            f"{run_dir} is not a run with records: {what}. Name a run directory that `txl train` wrote (--run.dir)."
        ) from error
    if not history.num_records:
        raise DataError(
            f"{path} has no complete record yet. A run writes its first record when it starts. Wait for that record, "
            "or name another run."
        )
    return history


def history_of(lines: Iterable[bytes]) -> History:
    """Make a history from the lines of a file of records. Each line is a JSON object."""
    reader = _Reader()
    for line in lines:
        reader.take(line)
    return reader.history()


Scores = dict[str, dict[str, float]]
"""Scores from the file of `txl evaluate --json`: the numbers of each score by its name."""


class LossPart(NamedTuple):
    """Loss on a part of the targets: a cluster of the vocabulary, or a range of positions in the segment."""

    first: float
    last: float
    """Last id of the cluster, or last position of the range."""
    loss: float
    """Loss in nats per token. NaN if the part has no target."""


PartName = Literal["by_cluster", "by_position"]
Parts = dict[PartName, dict[str, list[LossPart]]]
"""Losses over parts of the targets. The first key is the kind of part, such as vocabulary cluster, and the second key
is the name of the score."""


def read_scores(run_dir: Path) -> Scores:
    """Read the scores that `txl evaluate --json` wrote into a run's folder. The result is empty if no scores can be
    read."""
    scores = {}
    for name, values in _scored(run_dir):
        scores[name] = {key: float(value) for key, value in values.items() if is_number(value)}
    return scores


def read_loss_parts(run_dir: Path) -> Parts:
    """Read the losses of parts of the text from the file that `read_scores` reads. The result is empty if no losses can
    be read."""
    rows = _scored(run_dir)
    parts_by_name: Parts = {}
    for key in get_args(PartName):
        parts_by_name[key] = {}
        for name, values in rows:
            parts = _parts_of(values.get(key))
            if parts:
                parts_by_name[key][name] = parts
    return parts_by_name


def _parts_of(listed: object) -> list[LossPart]:
    parts: list[LossPart] = []
    if not isinstance(listed, list):
        return parts
    for values in listed[:_MAX_LIST]:
        if isinstance(values, dict):
            parts.append(_part_of(values))
    return parts


def _part_of(values: dict[str, Any]) -> LossPart:
    """Make a part of the loss from recorded values. A value that is missing or not a number becomes NaN."""
    numbers = []
    for field in LossPart._fields:
        value = values.get(field)
        numbers.append(float(value) if is_number(value) else math.nan)
    return LossPart(*numbers)


def _scored(run_dir: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        content = read_bytes(run_dir / SCORES)
        scores = parse_object(content)
    except (OSError, ValueError):
        return []
    rows = []
    for name, values in scores.items():
        if isinstance(values, dict):
            short_name = printable(name[:_MAX_NAME])
            rows.append((short_name, values))
    return rows[:_MAX_SCORES]


class _Rows:
    """Columns that grow with each record. If a record lacks a column, the column gets NaN for this record."""

    def __init__(self) -> None:
        self.num = 0
        self._columns: dict[str, array[float]] = {}

    def append(self, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            column = self._columns.setdefault(name, array("d"))
            column.extend([math.nan] * (self.num - len(column)))
            column.append(value)
        self.num += 1

    def table(self, reached: list[tuple[int, int]]) -> RecordTable:
        """Return the valid rows. `reached` has (number of rows so far, step) for each start and rewind."""
        columns = {"step": np.empty(0), "hours": np.empty(0)}
        for name, column in self._columns.items():
            column.extend([math.nan] * (self.num - len(column)))
            columns[name] = np.frombuffer(column, dtype=np.float64)
        step = columns["step"]
        limit = np.full(len(step) + 1, np.inf)
        for rows, at in reached:  # what was written before, of later steps, was given up
            limit[rows] = min(limit[rows], at)
        backwards = np.minimum.accumulate(limit[::-1])
        limit = backwards[::-1][1:]
        newest_first = np.flatnonzero(step <= limit)[::-1]
        _, first = np.unique(step[newest_first], return_index=True)  # sorted by step; of equal ones the later
        kept = newest_first[first]
        return RecordTable({name: values[kept] for name, values in columns.items()})


class _Reader:
    """Reader that takes the lines of a file in their order, and makes a history of them."""

    def __init__(self) -> None:
        self.num_records = self.num_damaged = 0
        self._rows = {kind: _Rows() for kind in ("train", "eval", "memory", "layers")}
        self._reached: list[tuple[dict[str, int], int]] = []
        self._events: list[Event] = []
        self._samples: dict[tuple[int, str], TextSample] = {}
        self._hosts: dict[int, str] = {}
        self._hours = 0.0
        self._time_s = math.nan
        self._not_kept = {*_NOT_KEPT, *BITS}
        self._last_step = 0

    def take(self, line: bytes) -> None:
        """Read one line, which may be incomplete."""
        try:
            record = record_in_new_names(parse_object(line))
            kind = record["kind"]
            step = record["step"]
            if not (isinstance(kind, str) and type(step) is int and 0 <= step <= MOST):
                raise ValueError(line)
        except (ValueError, KeyError):
            self.num_damaged += bool(line.strip())
            return
        self.num_records += 1
        record["kind"] = kind = printable(kind[:_MAX_NAME])
        self._advance_clock(record, step)
        if kind == "event":
            self._take_event(record, step)
        elif kind == "sample":
            prompt = str(record.get("prompt", ""))
            text = str(record.get("text", ""))
            self._samples.pop((step, prompt), None)
            self._samples[step, prompt] = TextSample(step, prompt, text)
        elif kind in ("train", "memory", "layers") or kind.startswith("eval"):
            rows = self._rows.setdefault(kind, _Rows())
            numbers = dict(self._numbers(record))
            numbers["hours"] = self._hours
            rows.append(numbers)

    def history(self) -> History:
        """Return the history of all lines so far."""
        tables = {}
        for kind, rows in self._rows.items():
            reached = [(counts.get(kind, 0), step) for counts, step in self._reached]
            tables[kind] = rows.table(reached)
        evals = {}
        for kind, table in tables.items():
            if kind.startswith("eval") and len(table):
                evals[kind] = table
        samples = list(self._samples.values())
        samples.sort(key=lambda sample: sample.step)
        return History(
            train=tables["train"],
            evals=evals,
            memory=tables["memory"],
            layers=tables["layers"],
            events=self._events,
            samples=samples,
            hosts=self._hosts,
            hours=self._hours,
            last_time_s=self._time_s,
            num_records=self.num_records,
            num_damaged=self.num_damaged,
            num_superseded=self._rows["train"].num - len(tables["train"]),
        )

    def _advance_clock(self, record: dict[str, Any], step: int) -> None:
        """Add the time since the last record to the hours of work.

        Old records without a time add the duration of their steps.
        """
        time_s = record.get("time_s")
        is_start = record.get("event") == "start"
        spent_s = 0.0
        if is_number(time_s) and math.isfinite(self._time_s):
            spent_s = max(time_s - self._time_s, 0.0)
        elif record["kind"] == "train" and is_number(record.get("step_ms")):
            spent_s = max(step - self._last_step, 0) * record["step_ms"] / 1000
        if not is_start:
            self._hours += spent_s / 3600
        if is_number(time_s):
            self._time_s = float(time_s)
        if record["kind"] == "train" or is_start or record.get("event") in ("rewound", "recovered"):
            self._last_step = step

    def _take_event(self, record: dict[str, Any], step: int) -> None:
        name = printable(str(record.get("event", "?"))[:_MAX_NAME])
        known = ("kind", "event", "step", "time_s")
        fields = {key: value for key, value in record.items() if key not in known}
        if name in ("start", "recovered"):
            rewinds = [index for index, event in enumerate(self._events) if event.name == "rewound"]
            first = max(rewinds, default=-1) + 1  # what a rewind gave up is not made again
            made = [event for event in self._events[first:] if event.name not in _REPEATED or event.step <= step]
            self._events[first:] = made
        self._events.append(Event(name, step, self._hours, fields))
        if "no_bits" in fields:
            self._not_kept -= BITS.keys()
        if name in ("start", "rewound", "recovered"):  # steps after this step are made again
            num_rows = {kind: rows.num for kind, rows in self._rows.items()}
            self._reached.append((num_rows, step))
            self._samples = {key: sample for key, sample in self._samples.items() if sample.step <= step}

    def _numbers(self, record: dict[str, Any]) -> Iterator[tuple[str, float]]:
        for name, value in record.items():
            if is_number(value) and name not in self._not_kept and len(name) <= _MAX_NAME:
                yield name, value
            elif name == "rank_ms" and isinstance(value, list):
                times = sorted(filter(is_number, value))
                if len(times) > 1:
                    yield "fastest_rank_ms", times[0]
                    yield "median_rank_ms", times[len(times) // 2]
                    yield "slowest_rank_ms", times[-1]
            elif isinstance(value, list):
                for index, number in enumerate(value[:_MAX_LIST]):
                    if is_number(number):
                        yield f"{name}_{index}", number
                    else:
                        yield f"{name}_{index}", math.nan
            elif name == "slowest_host":
                rank = record.get("slowest_rank")
                if type(rank) is int:
                    host = str(value)[:_MAX_NAME]
                    self._hosts[rank] = printable(host)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number that training can produce: finite, and between -`MOST` and `MOST`."""
    return type(value) in (float, int) and abs(value) <= MOST  # type: ignore[arg-type]
