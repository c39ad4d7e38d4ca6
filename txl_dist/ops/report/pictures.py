"""The pictures of a run's report: which numbers, against what, in which unit, and a sentence where there are none.

Most are a row of `_ROWS`. Numbers of the training over its steps stand in the table of metrics; losses, and what the
memory does, here. What is no curve of a column has a function of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from markupsafe import Markup

from txl_dist.ops.report.figures import COLOURS, SPECTRUM, Chart, Line, Mark, Scale, draw
from txl_dist.ops.report.records import Event, FloatArray, History, Scores, Table, is_number
from txl_dist.ops.report.summary import Run, corpus_name
from txl_dist.tables import compact
from txl_dist.train.report.metric_table import METRICS

_BORDERS = {"start": "resumed", "rewound": "rewound"}
_TRIANGLES = {"skipped": "skipped steps", "spike": "spikes", "straggler": "stragglers", "save_failed": "failed saves"}
_MAX_LABEL, _MAX_LEGEND = 22, 9
_NUM_BINS = 8
"""Of positions in the segment: enough tokens in each to see more than chance."""

Axis = Literal["step", "tokens", "hours"]


class Picture(NamedTuple):
    """A figure of the page, or why there is none."""

    title: str
    svg: Markup
    """Empty where there is nothing to draw."""
    caption: str


class Row(NamedTuple):
    """A picture of a column of the records, or of several."""

    group: str
    title: str
    column: str
    """With `each`, the beginning of COLUMN0, COLUMN1 ..., which are a line each."""
    axis: str
    """What the column is, with its unit."""
    of: Literal["training", "all", "held-out", "look"] = "training"
    by: Axis = "step"
    scale: Scale = "from zero"
    each: str = ""
    caption: str = ""
    missing: str = ""
    """Why a run may not have it."""


_LOSS, _MEMORY, _NATS = "Loss", "What the memory brings", "loss, nats per token"
_MISSING = {"mfu_pct": "it needs the peak of the device, metrics.peak_tflops"}
_ROWS = (
    Row(_LOSS, "Loss against tokens", "loss", _NATS, "all", "tokens", "log"),
    Row(_LOSS, "Loss against time", "loss", _NATS, "all", "hours", "log"),
    Row(_LOSS, "Bits per byte", "bits_per_byte", "bits per byte of text", "all", "tokens", "log",
        caption="The loss per byte of text, which does not depend on the tokenizer."),
    Row(_LOSS, "Held-out loss per cluster of the vocabulary", "loss_cluster_", _NATS, "held-out", scale="fitting",
        each="cluster", caption="Cluster 0 holds the most frequent tokens, the last one the rarest.",
        missing="there is one cluster only, or no evaluation yet"),
    Row(_MEMORY, "Gain from the memory", "memory_gain", "loss without less loss with, nats", "look", scale="fitting",
        caption="How much lower the loss per token is with memory than without."),
    Row(_MEMORY, "Size of the memory", "memory_norm_", "root mean square", "look", each="layer",
        caption="How large the hidden states in memory are. Layer 0 is nearest the text."),
    Row(_MEMORY, "Attention on memory", "memory_attention_pct_", "share of attention, %", "look", each="layer",
        caption="The rest falls on the segment. Layer 0 is nearest the text."),
    *(Row(one.curve.group, one.curve.title, one.name, one.curve.axis, scale=one.curve.scale,
          missing=_MISSING.get(one.name, "")) for one in METRICS if one.curve),
)  # fmt: skip


def pictures_of(run: Run) -> dict[str, list[Picture]]:
    """All pictures of a report, by the heading that they stand under."""
    groups: dict[str, list[Picture]] = {row.group: [] for row in _ROWS}
    groups[_MEMORY] = [_positions(run.history)]
    for row in _ROWS:
        groups[row.group].append(_curves(run, row))
    groups["Speed"] += [_rank_times(run), _stalls(run)]
    return groups


def _curves(run: Run, row: Row) -> Picture:
    lines, hours = [], run.history.hours
    for name, table in _tables(run.history, row.of).items():
        for column in table.numbered(row.column) if row.each else [row.column]:
            label = f"{row.each} {column.removeprefix(row.column)}" if row.each else shortened(name)
            style = "line" if table is run.history.train else "dots"  # evaluations are few
            lines.append(Line(label, places(run, table, by=row.by, hours=hours), table[column], style=style))
    lines = _coloured(lines, ordered=row.each == "layer")
    reasons = [row.missing, *(run.no_bits.values() if row.column == "bits_per_byte" else ())]
    return picture(
        row.title,
        Chart(f"{row.column}-{row.by}", lines, axis_label(row.by, hours=hours), row.axis, row.scale),
        caption=f"{row.caption} Logarithmic scale.".strip() if row.scale == "log" else row.caption,
        missing="; ".join([f"{row.title}: nothing is on record", *filter(None, reasons)]) + ".",
        marks=_marks(run, by=row.by),
    )


def _tables(history: History, of: str) -> dict[str, Table]:
    """By what a legend calls them."""
    if of == "all":
        return {"training": history.train} | {corpus_name(kind): table for kind, table in history.evals.items()}
    return {"": {"look": history.look, "held-out": history.evals.get("eval", history.train)}.get(of, history.train)}


def _coloured(lines: list[Line], *, ordered: bool) -> list[Line]:
    """Each line in its colour. Of many that have an order only the ends and the middle are in the legend."""
    last = max(len(lines) - 1, 1)
    colours = [SPECTRUM[index * (len(SPECTRUM) - 1) // last] for index in range(len(lines))] if ordered else COLOURS
    named = {0, len(lines) // 2, len(lines) - 1} if len(lines) > _MAX_LEGEND else range(len(lines))
    return [
        line._replace(label=line.label if index in named else "", colour=colours[index % len(colours)])
        for index, line in enumerate(lines)
    ]


def places(run: Run, table: Table, *, by: Axis, hours: float) -> FloatArray:
    """Where the records of a table stand on an axis for so many hours; NaN where that is not known."""
    if by == "hours":
        return table["hours"] * (1 if hours >= 2 else 60) if run.history.hours else np.full(len(table), np.nan)
    return run.tokens_at(table["step"]) if by == "tokens" else table["step"]


def axis_label(by: Axis, *, hours: float) -> str:
    """Of the horizontal axis: minutes for what took less than two hours."""
    time_label = "hours of work" if hours >= 2 else "minutes of work"
    return {"hours": time_label, "tokens": "tokens seen", "step": "step"}[by]


def picture(title: str, chart: Chart, *, caption: str, missing: str, marks: Sequence[Mark] = ()) -> Picture:
    """Draw a chart, or say why not."""
    lines = [line for line in chart.lines if np.isfinite(line.y[np.isfinite(line.x)]).any()]
    if not lines:
        return Picture(title, Markup(), missing)
    chart = chart._replace(lines=lines)
    return Picture(title, Markup(draw(chart, marks=marks, alt=described(title, chart))), caption)


def described(title: str, chart: Chart) -> str:
    """The picture in words."""
    if chart.rows:
        return f"{title}: {', '.join(chart.rows)} against {chart.x_label}."
    parts = []
    for line in chart.lines[:6]:
        y = line.y[np.isfinite(line.y)]
        ends = f"from {compact(y[0])} to {compact(y[-1])}, lowest {compact(y.min())}, highest {compact(y.max())}"
        parts.append(f"{line.label or chart.y_label} {ends if len(y) > 1 else compact(y[0])}")
    more = f"; and {len(chart.lines) - 6} more lines" if len(chart.lines) > 6 else ""
    return f"{title}: {chart.y_label} against {chart.x_label}. {'; '.join(parts)}{more}."


def shortened(label: str) -> str:
    """A name that fits into a legend: the middle of a long one is left out."""
    half = _MAX_LABEL // 2 - 1
    return label if len(label) <= _MAX_LABEL else f"{label[:half]}..{label[-half:]}"


def marks_explained(run: Run) -> str:
    """What the marks in the pictures stand for; empty if there are none."""
    counts = Counter(event.name for event in _marked(run.history))
    sentences = []
    for names, sign in ((_BORDERS, "Dashed lines"), (_TRIANGLES, "triangles")):
        parts = [f"{word} ({counts[name]:,})" for name, word in names.items() if counts[name]]
        sentences += [f"{sign}: {', '.join(parts)}"] if parts else []
    text = "; ".join(sentences)
    return f"Marks in the pictures. {text[:1].upper()}{text[1:]}." if text else ""


def _marks(run: Run, *, by: Axis) -> list[Mark]:
    shown = _marked(run.history)
    at = places(run, _as_table(shown), by=by, hours=run.history.hours)
    return [Mark(x, event.name in _BORDERS) for x, event in zip(at.tolist(), shown, strict=True)]


def _marked(history: History) -> list[Event]:
    shown = [event for event in history.events if event.name in _BORDERS | _TRIANGLES]
    return shown[1:] if shown and shown[0].name == "start" else shown  # the beginning is no resumption


def _as_table(events: Sequence[Event]) -> Table:
    return Table(
        {
            "step": np.array([float(event.step) for event in events]),
            "hours": np.array([event.hours for event in events]),
        }
    )


def events_picture(run: Run) -> Picture:
    """All events on one time line, a row per kind."""
    history = run.history
    counts = Counter(event.name for event in history.events)
    by: Axis = "hours" if history.hours > 0 else "step"
    lines = []
    for row, name in enumerate(counts):
        these = [event for event in history.events if event.name == name]
        x = places(run, _as_table(these), by=by, hours=history.hours)
        lines.append(Line("", x, np.full(len(x), float(row)), COLOURS[row % len(COLOURS)], "points"))
    chart = Chart("events", lines, axis_label(by, hours=history.hours), "", rows=[shortened(name) for name in counts])
    often = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return picture("Events on the time line", chart, caption=f"How often: {often}.", missing="No event is on record.")


def _positions(history: History) -> Picture:
    """The paired difference where it was measured, else the loss itself."""
    profile, title = history.profile, "Loss per position in the segment"
    if profile is None:
        return Picture(title, Markup(), f"{title}: nothing is on record.")
    is_paired = len(profile.without_memory) == len(profile.with_memory)
    values = profile.without_memory - profile.with_memory if is_paired else profile.with_memory
    edges = np.linspace(0, len(values), min(_NUM_BINS, len(values)) + 1).astype(int)
    known = np.isfinite(values)
    counts = np.add.reduceat(known.astype(float), edges[:-1])
    sums = np.add.reduceat(np.where(known, values, 0.0), edges[:-1])
    y = np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)
    caption = f"At step {profile.step:,}"
    if profile.tokens:
        caption += f", over {profile.tokens:,.0f} tokens, about {profile.tokens / len(y):,.0f} for each point"
    if is_paired and known.any():
        title = "Gain from the memory per position"
        caption += (
            ": how much higher the loss on the same tokens is behind an empty memory. The first tokens of a segment "
            "have only the memory behind them"
        )
    x = (edges[:-1] + edges[1:]) * 50 / len(values)
    axis = "loss without less loss with, nats" if is_paired else _NATS
    chart = Chart("positions", [Line("", x, y, style="dots")], "position in the segment, %", axis)
    return picture(title, chart, caption=f"{caption}.", missing=f"{title}: nothing is on record.")


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
        label = ", ".join(f"{names[key]} {compact(one.get(key, math.nan))}" for key in others)
        points.setdefault(label, {})[one.get(along, math.nan)] = one["loss"]
    lines = [
        Line(label, np.array(sorted(own)), np.array([own[length] for length in sorted(own)]), style="dots")
        for label, own in points.items()
    ]
    return Chart("sweep", _coloured(lines, ordered=True), f"tokens of {names[along]}", _NATS)


def memory_sweep(scores: Scores) -> list[Picture]:
    """The loss over the length of the memory, or of what else was scored with several."""
    chart = sweep(scores)
    if chart is None:
        return []
    title = f"Held-out loss over the length of the {chart.x_label.removeprefix('tokens of ')}"
    return [picture(title, chart, caption="", missing="")]


def _rank_times(run: Run) -> Picture:
    train = run.history.train
    ranks = train.numbered("rank_ms_")
    if len(ranks) < 2 and not (train["fastest_rank_ms"] < train["slowest_rank_ms"]).any():
        chosen, caption = [("", "step_ms")], ""
    else:
        is_apart = not (np.isfinite(train["median_rank_ms"]) & np.isnan(train["rank_ms_0"])).any()
        chosen = [(f"rank {number}", name) for number, name in enumerate(ranks)]
        if not is_apart:  # more ranks than lines can be told apart, at least for a while
            chosen = [(word, f"{word}_rank_ms") for word in ("fastest", "median", "slowest")]
        chosen.append(("whole step", "step_ms"))
        caption = f"{straggler_sentence(run.history)} A rank's time is its own part of a step, before it meets another."
    lines = _coloured([Line(label, train["step"], train[name]) for label, name in chosen], ordered=False)
    return picture(
        "Time per step and rank" if len(lines) > 1 else "Time per step",
        Chart("rank-times", lines, "step", "ms per step", "from zero"),
        caption=caption,
        missing="Times per step are not on record.",
    )


def straggler_sentence(history: History) -> str:
    """Who was the slowest, how often and by how much."""
    slowest, behind = history.train["slowest_rank"], history.train["slowest_pct"]
    known = np.isfinite(slowest)
    if not known.any():
        return "Which rank was the slowest is not on record."
    ranks, counts = np.unique(slowest[known], return_counts=True)
    rank = int(ranks[counts.argmax()])
    host = f" on {history.hosts[rank]}" if rank in history.hosts else ""
    pct = behind[known & (slowest == rank)]
    by = (
        f", there by {np.nanmedian(pct):.1f} % (median) longer than the median of the others"
        if np.isfinite(pct).any()
        else ""
    )
    return f"Rank {rank}{host} was the slowest in {100 * counts.max() / counts.sum():.0f} % of the records{by}."


def _stalls(run: Run) -> Picture:
    saves = [event for event in run.history.events if event.name == "saved"]
    seconds = [event.fields.get("seconds") for event in saves]
    y = np.array([float(value) if is_number(value) else np.nan for value in seconds])
    x = np.array([float(event.step) for event in saves])
    total = float(np.nansum(y)) if len(y) else 0.0
    return picture(
        "Waiting for saves",
        Chart("saves", [Line("", x, y, style="points")], "step", "seconds per save", "from zero"),
        caption=f"How long training stood still for each of {len(saves):,} checkpoints; {total:.1f} s in all.",
        missing="No checkpoint is on record.",
    )
