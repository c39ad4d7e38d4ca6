"""The pictures of a run's report: which numbers, against what, in which unit, and a sentence where there are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from txl_dist.ops.report.figures import COLOURS, Chart, Line, Mark, draw, layer_colours
from txl_dist.ops.report.records import Event, FloatArray, History, is_number
from txl_dist.ops.report.summary import Run, corpus_name
from txl_dist.tables import compact

_BORDERS = {"start": "resumed", "rewound": "rewound"}
_TRIANGLES = {"skipped": "skipped steps", "spike": "spikes", "straggler": "stragglers", "save_failed": "failed saves"}
_MAX_LABEL = 22


class Picture(NamedTuple):
    """A figure of the page, or why there is none."""

    title: str
    svg: Markup
    """Empty where there is nothing to draw."""
    caption: str


class Group(NamedTuple):
    """Pictures under one heading."""

    title: str
    pictures: list[Picture]


def pictures_of(run: Run) -> list[Group]:
    """All pictures of a report."""
    return [
        Group("Loss", [_loss(run, by="tokens"), _loss(run, by="hours"), _bits(run), _clusters(run)]),
        Group("What the memory brings", _memory(run)),
        Group("Optimisation", _optimisation(run)),
        Group("Speed", _speed(run)),
    ]


def events_picture(run: Run) -> Picture:
    """All events on one time line, a row per kind."""
    history = run.history
    names = list(dict.fromkeys(event.name for event in history.events))
    by_hours, (scale, unit) = history.hours > 0, time_axis(history.hours)
    lines = [
        Line(
            "",
            _places(history, name, scale=scale if by_hours else 0.0),
            np.full(_count(history, name), float(row)),
            style="points",
        )
        for row, name in enumerate(names)
    ]
    lines = [line._replace(colour=COLOURS[row % len(COLOURS)]) for row, line in enumerate(lines)]
    chart = Chart("events", lines, unit if by_hours else "step", "", rows=[shortened(name) for name in names])
    counts = ", ".join(f"{name} {_count(history, name):,}" for name in names)
    return picture("Events on the time line", chart, caption=f"How often: {counts}.", missing="No event is on record.")


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


def _marks(run: Run, *, by: str) -> list[Mark]:
    """Marks on an axis of steps, tokens or hours."""
    shown = _marked(run.history)
    steps = np.array([float(event.step) for event in shown])
    hours = np.array([event.hours for event in shown]) * time_axis(run.history.hours)[0]
    places = hours if by == "hours" else run.tokens_at(steps) if by == "tokens" else steps
    return [Mark(x, event.name in _BORDERS) for x, event in zip(places.tolist(), shown, strict=True)]


def _marked(history: History) -> list[Event]:
    shown = [event for event in history.events if event.name in _BORDERS | _TRIANGLES]
    return shown[1:] if shown and shown[0].name == "start" else shown  # the beginning is no resumption


def _count(history: History, name: str) -> int:
    return sum(event.name == name for event in history.events)


def _places(history: History, name: str, *, scale: float) -> FloatArray:
    events = [event for event in history.events if event.name == name]
    return np.array([event.hours * scale if scale else float(event.step) for event in events])


def time_axis(hours: float) -> tuple[float, str]:
    """(factor on hours, label of the axis): minutes for what took less than two hours."""
    return (1.0, "hours of work") if hours >= 2 else (60.0, "minutes of work")


def _loss(run: Run, *, by: str) -> Picture:
    tables = [("training", run.history.train), *((corpus_name(k), t) for k, t in run.history.evals.items())]
    scale, time_label = time_axis(run.history.hours)
    lines = [
        Line(
            shortened(name),
            table["hours"] * scale if by == "hours" else run.tokens_at(table["step"]),
            table["loss"],
            COLOURS[index % len(COLOURS)],
            _style(index),
        )
        for index, (name, table) in enumerate(tables)
    ]
    if by == "hours" and run.history.hours == 0:
        lines = []
    return picture(
        f"Loss against {time_label.split()[0] if by == 'hours' else by}",
        Chart(f"loss-{by}", lines, time_label if by == "hours" else "tokens seen", "loss, nats per token", True),
        caption="Logarithmic scale.",
        missing="No time is on record." if by == "hours" and len(run.history.train) else "No loss is on record yet.",
        marks=_marks(run, by=by),
    )


def _bits(run: Run) -> Picture:
    tables = [("training", run.history.train), *((corpus_name(k), t) for k, t in run.history.evals.items())]
    lines = [
        Line(shortened(name), run.tokens_at(table["step"]), table["bits_per_byte"], COLOURS[i % 8], _style(i))
        for i, (name, table) in enumerate(tables)
    ]
    return picture(
        "Bits per byte",
        Chart("bits", lines, "tokens seen", "bits per byte of text", log_y=True),
        caption="The loss per byte of text, which does not depend on the tokenizer. Logarithmic scale.",
        missing="; ".join(["No bits per byte are on record", *run.no_bits.values()]) + ".",
        marks=_marks(run, by="tokens"),
    )


def _style(index: int) -> str:
    """The first line is that of training; evaluations are few, and dots."""
    return "dots" if index else "line"


def _clusters(run: Run) -> Picture:
    table = run.history.evals.get("eval", run.history.train)
    names = table.numbered("loss_cluster_")
    lines = [
        Line(f"cluster {name.rpartition('_')[2]}", table["step"], table[name], COLOURS[i % len(COLOURS)], "dots")
        for i, name in enumerate(names)
    ]
    chart = Chart("clusters", lines, "step", "loss, nats per token")
    return picture(
        "Held-out loss per cluster of the vocabulary",
        chart,
        caption="Cluster 0 holds the most frequent tokens, the last one the rarest.",
        missing="No losses per cluster are on record: there is one cluster only, or no evaluation yet.",
    )


def _memory(run: Run) -> list[Picture]:
    look, profile = run.history.look, run.history.profile
    lines, caption = [], ""
    if profile is not None:
        pairs = [("with memory", profile.with_memory), ("without memory", profile.without_memory)]
        lines = [
            Line(name, (np.arange(len(y)) + 0.5) * 100 / max(len(y), 1), y, COLOURS[index], "dots")
            for index, (name, y) in enumerate(pairs)
        ]
        caption = f"At step {profile.step:,}: the first tokens of a segment have only the memory behind them."
        if len(profile.without_memory) == len(profile.with_memory) and all(np.isfinite(y).any() for _, y in pairs):
            gain = float(np.nanmean(profile.without_memory) - np.nanmean(profile.with_memory))
            caption += f" On average the memory lowers the loss by {gain:.4f} nats per token."
    per_layer = [
        ("Size of the memory", "memory_norm_", "root mean square", "How large the hidden states in memory are."),
        ("Attention on memory", "memory_attention_pct_", "share of attention, %", "The rest falls on the segment."),
    ]
    gain_lines = [Line("", look["step"], look["memory_gain"], style="dots")]
    return [
        picture(
            "Loss per position in the segment",
            Chart("positions", lines, "position in the segment, %", "loss, nats per token"),
            caption=caption,
            missing="No losses per position are on record.",
        ),
        picture(
            "Gain from the memory",
            Chart("memory-gain", gain_lines, "step", "loss without less loss with, nats"),
            caption="How much lower the loss per token is with memory than without.",
            missing="The gain from the memory is not on record.",
        ),
        *(
            picture(
                title,
                Chart(prefix, _layers(run, prefix), "step", unit, from_zero=True),
                caption=f"{caption} Layer 0 is nearest the text.",
                missing=f"{title}: nothing is on record{'' if len(look) else ', as no look into the model is'}.",
            )
            for title, prefix, unit, caption in per_layer
        ),
    ]


def _layers(run: Run, prefix: str) -> list[Line]:
    look = run.history.look
    names = look.numbered(prefix)
    labelled = {0, len(names) // 2, len(names) - 1} if len(names) > 8 else set(range(len(names)))
    return [
        Line(f"layer {name.removeprefix(prefix)}" if i in labelled else "", look["step"], look[name], colour, "dots")
        for i, (name, colour) in enumerate(zip(names, layer_colours(len(names)), strict=True))
    ]


def _optimisation(run: Run) -> list[Picture]:
    return [
        _over_steps(run, "Learning rate", "lr", "learning rate", from_zero=True),
        _over_steps(run, "Gradient norm", "grad_norm", "global norm before clipping", log_y=True),
    ]


def _speed(run: Run) -> list[Picture]:
    return [
        _over_steps(run, "Throughput", "tokens_per_s", "tokens/s, all ranks", from_zero=True),
        _over_steps(run, "Model FLOPs utilisation", "mfu_pct", "MFU, %", from_zero=True),
        _over_steps(run, "Waiting for data", "data_wait_pct", "% of the time, slowest rank", from_zero=True),
        _rank_times(run),
        _over_steps(run, "Peak memory", "peak_gib", "GiB, fullest rank", from_zero=True),
        _stalls(run),
    ]


def _over_steps(
    run: Run, title: str, column: str, unit: str, *, log_y: bool = False, from_zero: bool = False
) -> Picture:
    train = run.history.train
    chart = Chart(column, [Line("", train["step"], train[column])], "step", unit, log_y, from_zero)
    reason = " (it needs the peak of the device: metrics.peak_tflops)" if column == "mfu_pct" else ""
    return picture(
        title,
        chart,
        caption="Logarithmic scale." if log_y else "",
        missing=f"{title}: nothing is on record{reason}.",
        marks=_marks(run, by="step"),
    )


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
    lines = [Line(label, train["step"], train[name], COLOURS[i % 8]) for i, (label, name) in enumerate(chosen)]
    return picture(
        "Time per step and rank" if len(lines) > 1 else "Time per step",
        Chart("rank-times", lines, "step", "ms per step", from_zero=True),
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
        Chart("saves", [Line("", x, y, style="points")], "step", "seconds per save", from_zero=True),
        caption=f"How long training stood still for each of {len(saves):,} checkpoints; {total:.1f} s in all.",
        missing="No checkpoint is on record.",
    )
