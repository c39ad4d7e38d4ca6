"""Pictures of a run's report: numbers over an axis, or a sentence that says why there are no numbers.

A picture of numbers over the time or the steps of training is defined by a row of `_ROWS`, and `picture_of` draws it.
`txl compare` uses `picture_of` too. Rows of metrics are made from the metric table. Rows of losses and of memory are
written here. A picture over another axis, such as the loss over the length of the memory, has its own function.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from markupsafe import Markup

from txl_dist.console.formatting import format_count
from txl_dist.report.figures import COLOURS, Chart, Line, Mark, draw
from txl_dist.report.records import Event, FloatArray, LossPart, PartName, Parts, RecordTable, Scores
from txl_dist.report.summary import TROUBLES, RunRecords, corpus_name
from txl_dist.train.report.metric_table import METRICS

Item = TypeVar("Item")
_MARKS = {
    "dashed lines": {"start": "resumed", "rewound": TROUBLES["rewound"]},
    "triangles": {event: word for event, word in TROUBLES.items() if event != "rewound"},
}
"""Words for the events that pictures mark, by event name, grouped by the shape of the mark."""
_MAX_LABEL = 22
"""Largest number of characters of a name in a legend."""
_MAX_DESCRIBED = 6
"""Largest number of lines that a picture's description mentions one by one."""
_SHORT_HOURS = 2
"""Hours of work below which a time axis is in minutes."""
_NUM_BINS = 8
"""Number of ranges of positions in a segment. The number is small, so that each mean is over enough tokens and has
little noise."""

Kind = Literal["train", "eval", "memory", "layers", "all"]
Axis = Literal["step", "tokens", "hours", "position"]


class Picture(NamedTuple):
    """Picture for a page. If it cannot be drawn, it has a sentence with the reason instead."""

    title: str
    svg: Markup
    """Picture as an SVG element. Empty if it cannot be drawn."""
    caption: str
    """Sentences below the picture, or the reason why there is no picture."""


class PlotRow(NamedTuple):
    """Definition of a picture: the columns of the records to draw, the axis, the unit and the texts."""

    group: str
    """Heading under which the report shows the picture."""
    title: str
    unit: str
    """Label of the vertical axis, with its unit."""
    columns: dict[str, str]
    """Columns of the records to draw, by the word that the legend shows for each column. A name PREFIX_ means all
    columns PREFIX_0, PREFIX_1 ..."""
    of: Kind = "train"
    """Kind of the records. The kind `all` gives one line for training and one line per validation split."""
    by: Axis = "step"
    """Quantity on the horizontal axis."""
    is_log: bool = False
    caption: str = ""
    missing: str = ""
    """Sentence that says why a run may lack these numbers."""


_LOSS, _MEMORY, _NATS = "Loss", "Effect of the memory", "loss, nats per token"
_NOT_LAYERS = ("embedding", "softmax")
_LAYERS = "Layer 0 is the first layer after the embedding."
_LOSS_ROWS = (
    PlotRow(_LOSS, "Loss against tokens", _NATS, {"": "loss"}, "all", "tokens", is_log=True),
    PlotRow(_LOSS, "Loss against time", _NATS, {"": "loss"}, "all", "hours", is_log=True),
    PlotRow(
        _LOSS,
        "Bits per byte",
        "bits per byte of text",
        {"": "bits_per_byte"},
        "all",
        "tokens",
        is_log=True,
        caption="The loss per byte of text, which does not depend on the tokenizer.",
    ),
    PlotRow(
        _LOSS,
        "Accuracy",
        "% of the tokens",
        {"": "accuracy_pct"},
        "all",
        "tokens",
        caption="Share of the targets for which the model gives the right token the highest probability.",
        missing="metrics.accuracy_every_steps and eval.accuracy are off",
    ),
    PlotRow(
        _LOSS,
        "Validation loss per cluster of the vocabulary",
        _NATS,
        {"cluster": "loss_cluster_"},
        "eval",
        is_log=True,
        caption="Cluster 0 contains the most frequent tokens, and the last cluster the rarest tokens.",
        missing="there is only one cluster, or no evaluation yet",
    ),
)
_MEMORY_ROWS = (
    PlotRow(
        _MEMORY,
        "Gain from the memory",
        "difference in loss, nats",
        {"": "memory_gain"},
        "memory",
        caption="Difference between the loss per token without memory and with memory.",
    ),
    PlotRow(
        _MEMORY,
        "Size of the memory",
        "root mean square",
        {"layer": "memory_norm_"},
        "memory",
        caption=f"Root mean square of the hidden states in memory. {_LAYERS}",
    ),
    PlotRow(
        _MEMORY,
        "Attention on memory",
        "share of attention, %",
        {"layer": "memory_attention_pct_"},
        "memory",
        caption=f"The rest of the attention is on tokens of the segment. {_LAYERS}",
    ),
)


def _metric_rows() -> Iterator[PlotRow]:
    """Yield the definition of a picture for each metric of the metric table that is shown as a curve."""
    for metric in METRICS.values():
        curve = metric.curve
        if curve:
            columns = {"": metric.name}
            yield PlotRow(curve.group, curve.title, curve.axis, columns, is_log=curve.is_log, missing=curve.missing)


def _layer_row(title: str, unit: str, name: str, *, others: Sequence[str] = (), caption: str = "") -> PlotRow:
    """Return the definition of a picture with one line per layer.

    `others` are modules that are not layers and get a line too.
    """
    columns = {"layer": f"{name}_"}
    for word in others:
        columns[word] = f"{name}_{word}"
    missing = "metrics.norms_every_steps is off"
    return PlotRow(
        "Layers", title, unit, columns, "layers", is_log=True, caption=f"{caption} {_LAYERS}", missing=missing
    )


_LAYER_ROWS = (
    _layer_row(
        "Gradients",
        "norm before clipping",
        "gradient_norm",
        others=_NOT_LAYERS,
        caption="The embedding's gradient includes the gradient of weights that the softmax shares with the embedding.",
    ),
    _layer_row("Weights", "norm", "weight_norm", others=_NOT_LAYERS),
    _layer_row(
        "Activations",
        "root mean square",
        "activation_rms",
        caption="Root mean square of each layer's output, without dropout.",
    ),
)
_RANK_ROW = PlotRow(
    "Speed",
    "Time per rank",
    "ms per step",
    {"fastest": "fastest_rank_ms", "median": "median_rank_ms", "slowest": "slowest_rank_ms"},
    caption="The local part of a rank's step, before its first collective.",
    missing="there is only one rank",
)
_ROWS = (*_LOSS_ROWS, *_MEMORY_ROWS, *_metric_rows(), *_LAYER_ROWS, _RANK_ROW)
"""Definitions of all pictures whose horizontal axis is the progress of training, in the order of the page."""
_LOSS_BY_POSITION = PlotRow(_MEMORY, "Loss per position in the segment", _NATS, {}, by="position", is_log=True)
_GAIN_BY_POSITION = PlotRow(
    _MEMORY,
    "Gain from the memory per position",
    "difference in loss, nats",
    {},
    by="position",
    caption="Difference between the loss of the same tokens after an empty memory and after the real memory. The "
    "first tokens of a segment have only the memory before them.",
)


def pictures_of(run: RunRecords) -> dict[str, list[Picture]]:
    """Draw all pictures of a run's report. Returns the pictures of each group by the group's heading."""
    groups: dict[str, list[Picture]] = {row.group: [] for row in _ROWS}
    groups[_MEMORY].append(_position_picture(run))
    hours = run.history.hours
    for row in _ROWS:
        lines = _lines(run, row, hours=hours)
        captions = [row.caption, *_omitted_lines(run, row)]
        row = row._replace(caption=" ".join(filter(None, captions)))
        if row.title == "Bits per byte":
            row = row._replace(missing="; ".join(run.no_bits.values()))
        groups[row.group].append(picture_of(row, lines, hours=hours, marks=_marks(run, row)))
    return groups


def _tables(run: RunRecords, kind: Kind) -> dict[str, RecordTable]:
    """Return the tables of one kind of records, by the word that the legend shows for each table."""
    history = run.history
    if kind == "all":
        tables = {"training": history.train}
        for name, table in history.evals.items():
            tables[corpus_name(name)] = table
        return tables
    one_table = {
        "train": history.train,
        "eval": history.held_out,
        "memory": history.memory,
        "layers": history.layers,
    }
    return {"": one_table[kind]}


def _lines(run: RunRecords, row: PlotRow, *, hours: float) -> list[Line]:
    """Return the lines of a picture: one per table and column. If there are many numbered columns, only some of them
    get a line."""
    lines = []
    for table_word, table in _tables(run, row.of).items():
        x = x_values(run, table, row, hours=hours)
        for column_word, prefix in row.columns.items():
            columns = spread(table.numbered(prefix), most=len(COLOURS)) or [prefix]
            for column in columns:
                words = (table_word, column_word, column.removeprefix(prefix))
                label = shortened(" ".join(filter(None, words)))
                lines.append(Line(label, x, table[column]))
    return lines


def _omitted_lines(run: RunRecords, row: PlotRow) -> list[str]:
    """Return sentences such as "8 of 16 layers." for lines that a picture leaves out, in alphabetical order. The first
    sentence is empty if a group of lines is shown in full."""
    sentences = set()
    for table in _tables(run, row.of).values():
        for word, prefix in row.columns.items():
            sentences.add(few(word, len(table.numbered(prefix))))
    return sorted(sentences)


def picture_of(row: PlotRow, lines: Sequence[Line], *, hours: float = 0.0, marks: Sequence[Mark] = ()) -> Picture:
    """Draw the lines of a picture, or return a sentence that says why there are no lines.

    `hours` is the length of a time axis in hours, which decides its unit. `marks` are events on the axis.
    """
    shown = [line for line in lines if np.isfinite(line.x + line.y).any()]
    if not shown:
        if row.missing:
            reason = f"; {row.missing}"
        else:
            reason = ""
        return Picture(row.title, Markup(), f"{row.title}: no numbers are recorded{reason}.")
    notes = [row.caption]
    if row.is_log:
        notes.append("Logarithmic scale.")
    absent = ", ".join(line.label for line in lines if line not in shown)
    if absent:
        notes.append(f"Not recorded for {absent}.")
    chart = Chart(row.title, lines, _x_label(row.by, hours=hours), row.unit, row.is_log)
    svg = draw(chart, marks=marks, alt=_description(chart._replace(lines=shown)))
    return Picture(row.title, Markup(svg), " ".join(filter(None, notes)))


def _x_label(axis: Axis, *, hours: float) -> str:
    """Return the label of a horizontal axis, with its unit."""
    if axis == "hours":
        if hours >= _SHORT_HOURS:
            return "hours of work"
        return "minutes of work"
    if axis == "tokens":
        return "tokens seen"
    if axis == "position":
        return "position in the segment, %"
    return "step"


def x_values(run: RunRecords, table: RecordTable, row: PlotRow, *, hours: float) -> FloatArray:
    """Return the place of each record on the horizontal axis of a picture, or NaN if the place is unknown.

    A time axis of `hours` hours is in minutes if it is short.
    """
    if row.by == "tokens":
        return run.tokens_at(table["step"])
    if row.by != "hours":
        return table["step"]
    if not run.history.hours:
        return np.full(len(table), np.nan)
    return table["hours"] * (1 if hours >= _SHORT_HOURS else 60)


def _description(chart: Chart) -> str:
    """Describe a picture in words for screen readers. Lines after the sixth are only counted."""
    parts = []
    for line in chart.lines[:_MAX_DESCRIBED]:
        y = line.y[np.isfinite(line.y)]
        values = format_count(y[0])
        if len(y) > 1:
            values = f"from {values} to {format_count(y[-1])}"
            values += f", lowest {format_count(y.min())}, highest {format_count(y.max())}"
        parts.append(f"{line.label or chart.y_label} {values}")
    num_more = len(chart.lines) - _MAX_DESCRIBED
    if num_more > 0:
        more = f"; and {num_more} more lines"
    else:
        more = ""
    return f"{chart.name}: {chart.y_label} against {chart.x_label}. {'; '.join(parts)}{more}."


def shortened(label: str) -> str:
    """Shorten a name for the legend by leaving out its middle."""
    if len(label) <= _MAX_LABEL:
        return label
    half = _MAX_LABEL // 2 - 1
    return f"{label[:half]}..{label[-half:]}"


def few(word: str, num: int) -> str:
    """Return a caption that says how many of `num` lines are shown, or an empty text if all of them are shown."""
    if num <= len(COLOURS):
        return ""
    return f"{len(COLOURS)} of {num:,} {word}s."


def spread(items: Sequence[Item], *, most: int) -> list[Item]:
    """Select up to `most` items at even distances. The first and the last item are always selected."""
    num = min(len(items), most)
    steps = max(num - 1, 1)
    return [items[round((len(items) - 1) * index / steps)] for index in range(num)]


def marks_explained(run: RunRecords) -> str:
    """Explain the marks in the pictures of a run. Returns an empty text if there are no marks."""
    counts = Counter(event.name for event in _marked_events(run))
    explained = []
    for sign, names in _MARKS.items():
        words = [f"{word} ({counts[name]:,})" for name, word in names.items() if counts[name]]
        if words:
            explained.append(f"{sign}: {', '.join(words)}")
    return "; ".join(explained)


def _marks(run: RunRecords, row: PlotRow) -> list[Mark]:
    """Return the marks of a picture: dashed lines for resumptions and rewinds, triangles for other events."""
    events = _marked_events(run)
    table = RecordTable(
        {
            "step": np.array([float(event.step) for event in events]),
            "hours": np.array([float(event.hours) for event in events]),
        }
    )
    x = x_values(run, table, row, hours=run.history.hours)
    return [Mark(at, event.name in _MARKS["dashed lines"]) for at, event in zip(x.tolist(), events, strict=True)]


def _marked_events(run: RunRecords) -> list[Event]:
    """Return the events that pictures mark. The first start of the run is left out."""
    marked_names = {name for names in _MARKS.values() for name in names}
    events = [event for event in run.history.events if event.name in marked_names]
    if events and events[0].name == "start":
        return events[1:]
    return events


def _position_picture(run: RunRecords) -> Picture:
    """Draw the newest gain from memory by position in the segment, or the loss by position if no gain was measured."""
    memory = run.history.memory
    has_gain = len(memory) and len(memory.newest("loss_by_position_"))
    if has_gain:
        table = memory
    else:
        table = run.history.held_out
    values = table.newest("loss_by_position_")
    without_memory = table.newest("loss_by_position_without_memory_")
    row = _LOSS_BY_POSITION
    if len(values) == len(without_memory):  # on the same tokens
        row = _GAIN_BY_POSITION
        values = without_memory - values
    if not len(values):
        return picture_of(_LOSS_BY_POSITION, [])
    means = []
    for part in np.array_split(values, min(_NUM_BINS, len(values))):
        finite = part[np.isfinite(part)]
        means.append(finite.mean() if len(finite) else np.nan)
    y = np.array(means)
    x = (np.arange(len(y)) + 0.5) * 100 / len(y)
    tokens = table["tokens"][-1]
    if np.isfinite(tokens):
        over = f", over {tokens:,.0f} tokens, about {tokens / len(y):,.0f} for each point"
    else:
        over = ""
    caption = f"At step {table['step'][-1]:,.0f}{over}. {row.caption}".strip()
    return picture_of(row._replace(caption=caption), [Line("", x, y)])


def chart_over_lengths(scores: Mapping[str, Mapping[str, Any]]) -> Chart | None:
    """Return a chart of the loss over a length that was scored with several values.

    The axis is the first such length among the memory, segment and clamp lengths. Each combination of the other two
    lengths has a line. Returns None if no length was scored with several values.
    """
    names = {"memory_len": "memory", "segment_len": "segment", "clamp_len": "clamp"}
    rows = [score for score in scores.values() if "memory_len" in score and "loss" in score]
    varying = []
    for key in names:
        different = {row.get(key) for row in rows}
        if len(different) > 1:
            varying.append(key)
    if not varying:
        return None
    along, *others = varying
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        label = ", ".join(f"{names[key]} {format_count(row.get(key, math.nan))}" for key in others)
        losses = points.setdefault(label, {})
        losses[row.get(along, math.nan)] = row["loss"]
    lines = []
    for label, losses in points.items():
        lengths = sorted(losses)
        lines.append(Line(label, np.array(lengths), np.array([losses[length] for length in lengths])))
    title = f"Validation loss over the length of the {names[along]}"
    return Chart(title, lines, f"tokens of {names[along]}", _NATS, is_log=True)


def memory_sweep(scores: Scores) -> list[Picture]:
    """Draw the loss over the length of the memory, or over another length that was scored with several values.

    `scores` is the content of the file that `txl evaluate --json` wrote.
    """
    chart = chart_over_lengths(scores)
    if chart is None:
        return []
    return [Picture(chart.name, Markup(draw(chart, alt=_description(chart))), "")]


_PART_TITLES: dict[PartName, tuple[str, str]] = {
    "by_cluster": ("Scores per cluster of the vocabulary", "cluster, the most frequent tokens first"),
    "by_position": ("Scores per position in the segment", "position in the segment, tokens"),
}
"""Title and axis label of the pictures of the loss by vocabulary cluster and by position."""


def part_pictures(parts: Parts) -> list[Picture]:
    """Draw the loss of each score by vocabulary cluster and by position in the segment.

    A score that has only one part is left out.
    """
    pictures = []
    for key, (title, x_label) in _PART_TITLES.items():
        scores = [(name, score_parts) for name, score_parts in parts[key].items() if len(score_parts) > 1]
        lines = []
        for name, score_parts in spread(scores, most=len(COLOURS)):
            line = _part_line(name, score_parts, key)
            if np.isfinite(line.x + line.y).any():
                lines.append(line)
        if not lines:
            continue
        notes = []
        if key == "by_cluster":
            clusters = scores[0][1]
            ids = [f"{index}: ids {part.first:,.0f} to {part.last:,.0f}" for index, part in enumerate(clusters)]
            notes.append(f"Clusters {', '.join(ids)}.")
        notes.append(few("score", len(scores)))
        chart = Chart(title, lines, x_label, _NATS, is_log=True)
        svg = draw(chart, alt=_description(chart))
        pictures.append(Picture(title, Markup(svg), " ".join(filter(None, notes))))
    return pictures


def _part_line(name: str, parts: Sequence[LossPart], key: PartName) -> Line:
    """Return the line of a score. The value of x is the number of the cluster, or the middle of a range of
    positions."""
    first, last, loss = np.array(parts).T
    x: FloatArray = (first + last) / 2
    if key == "by_cluster":
        x = np.arange(len(parts), dtype=np.float64)
    return Line(shortened(name), x, loss)
