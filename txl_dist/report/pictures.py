"""The pictures of a run's report: which numbers, against what, in which unit, and a sentence where there are none.

Each is a row of `_ROWS`, and `picture_of` draws them all, those of `txl compare` too. Numbers of the training over its
steps stand in the table of metrics; losses, and what the memory does, here. What is no curve over the training, such
as a loss over the length of the memory, finds its points itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from markupsafe import Markup

from txl_dist.console.formatting import format_count
from txl_dist.report.figures import COLOURS, Chart, Line, Mark, draw
from txl_dist.report.records import Event, FloatArray, PartName, Parts, RecordTable, Scores
from txl_dist.report.summary import TROUBLES, RunRecords, corpus_name
from txl_dist.train.report.metric_table import METRICS

Item = TypeVar("Item")
_MARKS = {
    "dashed lines": {"start": "resumed", "rewound": TROUBLES["rewound"]},
    "triangles": {event: word for event, word in TROUBLES.items() if event != "rewound"},
}
"""By how they look: events, and what people call them."""
_MAX_LABEL = 22
_NUM_BINS = 8
"""Of positions in the segment: enough tokens in each to see more than chance."""

Kind = Literal["train", "eval", "look", "layers", "all"]
Axis = Literal["step", "tokens", "hours", "position"]


class Picture(NamedTuple):
    """A figure of the page, or why there is none."""

    title: str
    svg: Markup
    """Empty where there is nothing to draw."""
    caption: str


class PlotRow(NamedTuple):
    """A picture: of columns of the records over the training, if not of something else."""

    group: str
    title: str
    unit: str
    """Of the vertical axis, and what it shows."""
    columns: dict[str, str]
    """By the word for each in the legend. PREFIX_ stands for PREFIX_0, PREFIX_1 ..."""
    of: Kind = "train"
    """Kind of the records; all are training and evaluations, a line each."""
    by: Axis = "step"
    is_log: bool = False
    caption: str = ""
    missing: str = ""
    """Why a run may not have it."""


_LOSS, _MEMORY, _NATS = "Loss", "What the memory brings", "loss, nats per token"
_BESIDE = ("embedding", "softmax")
_LAYERS = "Layer 0 is nearest the text."
_ROWS = (
    PlotRow(_LOSS, "Loss against tokens", _NATS, {"": "loss"}, "all", "tokens", is_log=True),
    PlotRow(_LOSS, "Loss against time", _NATS, {"": "loss"}, "all", "hours", is_log=True),
    PlotRow(_LOSS, "Bits per byte", "bits per byte of text", {"": "bits_per_byte"}, "all", "tokens", is_log=True,
        caption="The loss per byte of text, which does not depend on the tokenizer."),
    PlotRow(_LOSS, "Accuracy", "% of the tokens", {"": "accuracy_pct"}, "all", "tokens",
        caption="How often the most probable token is the target.",
        missing="metrics.accuracy_every_steps and eval.accuracy are off"),
    PlotRow(_LOSS, "Held-out loss per cluster of the vocabulary", _NATS, {"cluster": "loss_cluster_"}, "eval",
        is_log=True, caption="Cluster 0 holds the most frequent tokens, the last one the rarest.",
        missing="there is one cluster only, or no evaluation yet"),
    PlotRow(_MEMORY, "Gain from the memory", "loss without less loss with, nats", {"": "memory_gain"}, "look",
        caption="How much lower the loss per token is with memory than without."),
    PlotRow(_MEMORY, "Size of the memory", "root mean square", {"layer": "memory_norm_"}, "look",
        caption=f"How large the hidden states in memory are. {_LAYERS}"),
    PlotRow(_MEMORY, "Attention on memory", "share of attention, %", {"layer": "memory_attention_pct_"}, "look",
        caption=f"The rest falls on the segment. {_LAYERS}"),
    *(PlotRow(one.curve.group, one.curve.title, one.curve.axis, {"": one.name}, is_log=one.curve.is_log,
          missing=one.curve.missing) for one in METRICS.values() if one.curve),
    *(PlotRow("Layers", title, unit, {"layer": f"{name}_"} | {word: f"{name}_{word}" for word in beside}, "layers",
          is_log=True, caption=f"{caption} {_LAYERS}", missing="metrics.norms_every_steps is off")
      for title, unit, name, beside, caption in (
          ("Gradients", "norm before clipping", "gradient_norm", _BESIDE, "The embedding's are with those of weights "
           "that the softmax shares with it."),
          ("Weights", "norm", "weight_norm", _BESIDE, ""),
          ("Activations", "root mean square", "activation_rms", (), "What a layer gives to the next, without dropout."),
      )),
    PlotRow("Speed", "Time per rank", "ms per step",
        {word: f"{word}_rank_ms" for word in ("fastest", "median", "slowest")},
        caption="A rank's own part of a step, before it meets another.", missing="there is one rank only"),
)  # fmt: skip
_LOSS_BY_POSITION = PlotRow(_MEMORY, "Loss per position in the segment", _NATS, {}, by="position", is_log=True)
_GAIN_BY_POSITION = PlotRow(
    _MEMORY, "Gain from the memory per position", "loss without less loss with, nats", {}, by="position",
    caption="How much higher the loss on the same tokens is behind an empty memory. The first tokens of a segment have "
    "only the memory behind them.",
)  # fmt: skip


def pictures_of(run: RunRecords) -> dict[str, list[Picture]]:
    """All pictures of a report, by the heading that they stand under."""
    groups: dict[str, list[Picture]] = {row.group: [] for row in _ROWS}
    groups[_MEMORY].append(_positions(run))
    hours, train = run.history.hours, run.history.train
    tables = {
        "train": {"": train},
        "eval": {"": run.history.held_out},
        "look": {"": run.history.look},
        "layers": {"": run.history.layers},
        "all": {"training": train} | {corpus_name(kind): table for kind, table in run.history.evals.items()},
    }
    for row in _ROWS:
        lines = [
            Line(
                shortened(" ".join(filter(None, (name, word, column.removeprefix(prefix))))),
                places(run, table, row, hours=hours),
                table[column],
            )
            for name, table in tables[row.of].items()
            for word, prefix in row.columns.items()
            for column in spread(table.numbered(prefix), most=len(COLOURS)) or [prefix]
        ]
        missing = "; ".join(run.no_bits.values()) if row.title == "Bits per byte" else row.missing
        left_out = {
            few(word, len(table.numbered(prefix)))
            for table in tables[row.of].values()
            for word, prefix in row.columns.items()
        }
        row = row._replace(missing=missing, caption=" ".join(filter(None, [row.caption, *sorted(left_out)])))
        picture = picture_of(row, lines, hours=hours, marks=_marks(run, row))
        groups[row.group].append(picture)
    return groups


def picture_of(row: PlotRow, lines: Sequence[Line], *, hours: float = 0.0, marks: Sequence[Mark] = ()) -> Picture:
    """Draw lines as a row says, or say why not; `hours` is how far an axis of hours goes."""
    shown = [line for line in lines if np.isfinite(line.x + line.y).any()]
    if not shown:
        reason = f"; {row.missing}" if row.missing else ""
        return Picture(row.title, Markup(), f"{row.title}: nothing is on record{reason}.")
    absent = ", ".join(line.label for line in lines if line not in shown)
    notes = [row.caption, "Logarithmic scale." * row.is_log, f"Not on record for {absent}." if absent else ""]
    x_label = {
        "step": "step",
        "tokens": "tokens seen",
        "hours": "hours of work" if hours >= 2 else "minutes of work",
        "position": "position in the segment, %",
    }[row.by]
    chart = Chart(row.title, lines, x_label, row.unit, row.is_log)
    svg = draw(chart, marks=marks, alt=_described(chart._replace(lines=shown)))
    return Picture(row.title, Markup(svg), " ".join(filter(None, notes)))


def places(run: RunRecords, table: RecordTable, row: PlotRow, *, hours: float) -> FloatArray:
    """Where the records of a table stand on the axis of a row, that goes to so many hours; NaN where nobody knows."""
    if row.by == "hours":
        return table["hours"] * (1 if hours >= 2 else 60) if run.history.hours else np.full(len(table), np.nan)
    return run.tokens_at(table["step"]) if row.by == "tokens" else table["step"]


def _described(chart: Chart) -> str:
    """A picture in words; lines beyond the sixth are counted."""
    parts = []
    for line in chart.lines[:6]:
        y = line.y[np.isfinite(line.y)]
        first, last, lowest, highest = (format_count(value) for value in (y[0], y[-1], y.min(), y.max()))
        ends = f"from {first} to {last}, lowest {lowest}, highest {highest}"
        parts.append(f"{line.label or chart.y_label} {ends if len(y) > 1 else first}")
    more = f"; and {len(chart.lines) - 6} more lines" if len(chart.lines) > 6 else ""
    return f"{chart.name}: {chart.y_label} against {chart.x_label}. {'; '.join(parts)}{more}."


def shortened(label: str) -> str:
    """A name that fits into a legend: the middle of a long one is left out."""
    half = _MAX_LABEL // 2 - 1
    return label if len(label) <= _MAX_LABEL else f"{label[:half]}..{label[-half:]}"


def few(word: str, num: int) -> str:
    """For a caption, where a picture has not room for a line of each."""
    return f"{len(COLOURS)} of {num:,} {word}s." if num > len(COLOURS) else ""


def spread(items: Sequence[Item], *, most: int) -> list[Item]:
    """The first, the last, and others in even steps between them, where there are more than so many."""
    num = min(len(items), most)
    return [items[round((len(items) - 1) * index / max(num - 1, 1))] for index in range(num)]


def marks_explained(run: RunRecords) -> str:
    """What the marks in the pictures stand for; empty if there are none."""
    counts = Counter(event.name for event in _marked(run))
    signs = {
        sign: ", ".join(f"{word} ({counts[name]:,})" for name, word in names.items() if counts[name])
        for sign, names in _MARKS.items()
    }
    return "; ".join(f"{sign}: {words}" for sign, words in signs.items() if words)


def _marks(run: RunRecords, row: PlotRow) -> list[Mark]:
    events = _marked(run)
    table = RecordTable(
        {name: np.array([float(getattr(event, name)) for event in events]) for name in ("step", "hours")}
    )
    at = places(run, table, row, hours=run.history.hours)
    return [Mark(x, event.name in _MARKS["dashed lines"]) for x, event in zip(at.tolist(), events, strict=True)]


def _marked(run: RunRecords) -> list[Event]:
    known = {name for names in _MARKS.values() for name in names}
    shown = [event for event in run.history.events if event.name in known]
    return shown[1:] if shown and shown[0].name == "start" else shown  # the beginning is no resumption


def _positions(run: RunRecords) -> Picture:
    """The paired difference where a look measured it, else the loss itself; of the newest."""
    has_look = len(run.history.look) and len(run.history.look.newest("loss_by_position_"))
    table = run.history.look if has_look else run.history.held_out
    with_memory, without = (table.newest(f"loss_by_position_{word}") for word in ("", "without_memory_"))
    is_paired = len(with_memory) == len(without)
    row, values = (_GAIN_BY_POSITION, without - with_memory) if is_paired else (_LOSS_BY_POSITION, with_memory)
    if not len(values):
        return picture_of(_LOSS_BY_POSITION, [])
    bins = np.array_split(values, min(_NUM_BINS, len(values)))
    y = np.array([part[np.isfinite(part)].mean() if np.isfinite(part).any() else np.nan for part in bins])
    x = (np.arange(len(y)) + 0.5) * 100 / len(y)
    tokens = table["tokens"][-1]
    about = f", over {tokens:,.0f} tokens, about {tokens / len(y):,.0f} for each point" if np.isfinite(tokens) else ""
    caption = f"At step {table['step'][-1]:,.0f}{about}. {row.caption}".strip()
    return picture_of(row._replace(caption=caption), [Line("", x, y)])


def sweep(scores: Mapping[str, Mapping[str, Any]]) -> Chart | None:
    """The loss over the first of memory, segment and clamp that was scored with several lengths, a line for each of the
    others'; None if none was."""
    names = {"memory_len": "memory", "segment_len": "segment", "clamp_len": "clamp"}
    rows = [one for one in scores.values() if "memory_len" in one and "loss" in one]
    several = [key for key in names if len({one.get(key) for one in rows}) > 1]
    if not several:
        return None
    along, *others = several
    points: dict[str, dict[float, float]] = {}
    for one in rows:
        label = ", ".join(f"{names[key]} {format_count(one.get(key, math.nan))}" for key in others)
        points.setdefault(label, {})[one.get(along, math.nan)] = one["loss"]
    lines = [
        Line(label, np.array(sorted(own)), np.array([own[length] for length in sorted(own)]))
        for label, own in points.items()
    ]
    title = f"Held-out loss over the length of the {names[along]}"
    return Chart(title, lines, f"tokens of {names[along]}", _NATS, is_log=True)


def memory_sweep(scores: Scores) -> list[Picture]:
    """The loss over the length of the memory, or of what else was scored with several."""
    chart = sweep(scores)
    return [] if chart is None else [Picture(chart.name, Markup(draw(chart, alt=_described(chart))), "")]


def part_pictures(parts: Parts) -> list[Picture]:
    """The loss of each score over the clusters of its vocabulary, and over the positions in its segments, where there
    are several."""
    forms: dict[PartName, tuple[str, str]] = {
        "by_cluster": ("Scores per cluster of the vocabulary", "cluster, the most frequent tokens first"),
        "by_position": ("Scores per position in the segment", "position in the segment, tokens"),
    }
    pictures = []
    for key, (title, x_label) in forms.items():
        scores = [(name, own) for name, own in parts[key].items() if len(own) > 1]
        lines = []
        for name, own in spread(scores, most=len(COLOURS)):
            first, last, loss = np.array(own).T
            x: FloatArray = (first + last) / 2
            if key == "by_cluster":
                x = np.arange(len(own), dtype=np.float64)
            lines.append(Line(shortened(name), x, loss))
        lines = [line for line in lines if np.isfinite(line.x + line.y).any()]
        if not lines:
            continue
        chart = Chart(title, lines, x_label, _NATS, is_log=True)
        ids = [f"{index}: ids {one.first:,.0f} to {one.last:,.0f}" for index, one in enumerate(scores[0][1])]
        notes = [f"Clusters {', '.join(ids)}." if key == "by_cluster" else "", few("score", len(scores))]
        pictures.append(Picture(title, Markup(draw(chart, alt=_described(chart))), " ".join(filter(None, notes))))
    return pictures
