"""`txl compare`: several runs on one self-contained page, and a table for the terminal.

Losses in nats per token can be compared only between runs of one tokenizer: a token of another is another amount of
text. Unless checkpoints prove that all runs have the same, losses are in bits per byte of text; and where a run has no
such numbers, because its tokenizer loses text, or a part of its held-out text alone is scored, no losses are put side
by side. Runs are ranked only if they were scored on the same text, as far as sizes on record tell: with one tokenizer
on as many tokens in every evaluation, else on whole texts of as many bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from txl_dist.errors import ConfigError
from txl_dist.ops.report.figures import COLOURS, Chart, Line, Scale
from txl_dist.ops.report.pictures import Axis, Picture, axis_label, picture, places, shortened
from txl_dist.ops.report.records import Table, is_number
from txl_dist.ops.report.report import check_writable, cut, write_page
from txl_dist.ops.report.summary import Run, best, defaults, read_run, recent
from txl_dist.tables import aligned, compact, duration, printable
from txl_dist.train.report.metric_table import METRICS

MAX_RUNS = 16


class Unit(NamedTuple):
    """In which the losses of all runs are compared."""

    column: str
    """Of the records; empty: there is none in which they can be compared."""
    label: str
    sentence: str
    """Which it is, and why."""
    is_fair: bool = True
    """Whether the runs may be ranked by it."""


def write_comparison(run_dirs: Sequence[Path], *, out: Path) -> list[str]:
    """Write the page. Returns lines for people.

    Raises ConfigError for fewer than two runs, too many, one twice, or a page that cannot be written; DataError for a
    run without records.
    """
    _check_runs(run_dirs)
    check_writable(out)
    runs = [read_run(path) for path in run_dirs]
    names = _names(run_dirs)
    unit = unit_of(runs)
    rows = figure_rows(runs, names, unit)
    ranks = ranking(runs, names, unit)
    page = write_page(
        out,
        "compare.html.j2",
        title=f"{len(runs)} runs compared",
        unit=unit,
        ranking=ranks,
        groups=_pictures(runs, names, unit),
        figure_rows=list(zip(*rows, strict=True)),
        setting_rows=setting_rows(runs, names),
        without_settings=[name for name, run in zip(names, runs, strict=True) if run.settings_problem],
    )
    return [*aligned([row[: -len(_FURTHER)] for row in rows]), unit.sentence, *ranks, page]


def _check_runs(run_dirs: Sequence[Path]) -> None:
    if not 2 <= len(run_dirs) <= MAX_RUNS:
        raise ConfigError(
            f"{len(run_dirs)} run(s) to compare: name 2 to {MAX_RUNS} run directories. `txl report RUN` shows one."
        )
    places: dict[Path, Path] = {}
    for path in run_dirs:
        if (place := path.resolve()) in places:
            raise ConfigError(f"{path} and {places[place]} are the same run. Name each run once.")
        places[place] = path


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """The folders' names; with as much of the path as tells them apart, where they are equal."""
    places = [path.resolve() for path in run_dirs]
    for depth in range(1, max(len(place.parts) for place in places) + 1):
        names = [printable(os.path.join(*place.parts[-depth:])) for place in places]
        if len(set(names)) == len(names):
            break
    return names


def unit_of(runs: Sequence[Run]) -> Unit:
    """Nats per token where that is fair, else bits per byte where all runs have them, else none."""
    tokenizers = {run.tokenizer for run in runs}
    if len(tokenizers) == 1 and None not in tokenizers:
        sentence = "All runs have the same tokenizer: losses are in nats per token"
        return _judged("loss", "nats per token", sentence, _other_text(runs) or _other_targets(runs))
    differ = "It is not on record whether the runs have the same tokenizer"
    if len(tokenizers - {None}) > 1:
        differ = "The runs have different tokenizers"
    # Of the held-out text, or where there is none, of the training text.
    without = [run for run in runs if not run.history.evals.get("eval", run.history.train).has("bits_per_byte")]
    if not without:
        sentence = f"{differ}: losses are in bits per byte of text, as nats per token cannot be compared"
        return _judged("bits_per_byte", "bits per byte", sentence, _other_text(runs) or _unknown_text(runs))
    reasons = [(run.name, next(iter(run.no_bits.values()), "they are not on record")) for run in without]
    listed = "; ".join(f"{printable(name)}: {reason}" for name, reason in reasons)
    sentence = (
        f"{differ}, and not all of them have bits per byte ({listed}): their losses cannot be compared, and the runs "
        "are not ranked. `txl report RUN` shows each in its own units."
    )
    return Unit("", "", sentence, is_fair=False)


def _judged(column: str, label: str, sentence: str, unfair: str) -> Unit:
    if not unfair:
        return Unit(column, label, f"{sentence}.")
    return Unit(column, label, f"{sentence}; but {unfair}: the runs are not ranked.", is_fair=False)


def _other_text(runs: Sequence[Run]) -> str:
    """How it is known that the runs were not scored on the same held-out text; empty if it may be the same."""
    sizes = {size for run in runs if is_number(size := run.start.get("held_out_bytes"))}
    return f"their held-out texts are others, of {_listed(sizes)} bytes" if len(sizes) > 1 else ""


def _unknown_text(runs: Sequence[Run]) -> str:
    """Which runs do not tell the size of their held-out text; empty if all do, or have no held-out losses to rank."""
    unknown = [run for run in runs if len(_held_out(run)) and not is_number(run.start.get("held_out_bytes"))]
    names = ", ".join(printable(run.name) for run in unknown)
    return f"it is not on record how much held-out text was scored ({names})" if unknown else ""


def _other_targets(runs: Sequence[Run]) -> str:
    """In what the targets of runs of one tokenizer differ; empty if they are the same as far as is known."""
    counts = {int(count) for run in runs for count in _held_out(run)["tokens"] if np.isfinite(count)}
    if len(counts) > 1:
        return f"held-out losses are over other tokens, {_listed(counts)} of them"
    # Older programs did not score the first tokens of documents with document masks.
    scores_all = {run.settings.get("data.document_border") != "mask" or "no_bits" in run.start for run in runs}
    return "not all of them score the first tokens of documents" if len(scores_all) > 1 else ""


def _listed(numbers: Collection[float]) -> str:
    return " and ".join(f"{number:,.0f}" for number in sorted(numbers))


def _held_out(run: Run) -> Table:
    return run.history.evals.get("eval", Table({"step": np.empty(0)}))


def ranking(runs: Sequence[Run], names: Sequence[str], unit: Unit) -> list[str]:
    """A line that orders the runs by their best held-out loss; none where that would not be fair, or is not known."""
    lowest = [
        (found[0], name) for run, name in zip(runs, names, strict=True) if (found := best(_held_out(run), unit.column))
    ]
    if not unit.is_fair or len(lowest) < 2:
        return []
    return [f"best held-out loss, in {unit.label}: " + ", ".join(f"{name} {loss:.4f}" for loss, name in sorted(lowest))]


def figure_rows(runs: Sequence[Run], names: Sequence[str], unit: Unit) -> list[list[str]]:
    """A row per run of what it came to, losses in the unit; '-' where something is not on record."""
    head = ["run", "step", "tokens", "work", "tokens/s", "train", "held-out", "best held-out", *_FURTHER]
    return [head, *([name, *_figures(run, unit)] for name, run in zip(names, runs, strict=True))]


_FURTHER = ("held-out bits/byte", "held-out bits/character", "MFU %", "peak GiB", "parameters", "state")
"""Columns of the page for which a terminal has no room."""


def _figures(run: Run, unit: Unit) -> list[str]:
    history = run.history
    train, held_out = history.train, _held_out(run)
    lowest = best(held_out, unit.column)
    speed = recent(train, "tokens_per_s")
    return [
        f"{history.step:,}",
        compact(float(run.tokens_at(np.array([float(history.step)]))[0])),
        duration(3600 * history.hours) if history.hours else "-",
        "-" if speed is None else f"{speed:,.0f}",
        _fixed(train.last(unit.column)),
        _fixed(held_out.last(unit.column)),
        "-" if lowest is None else f"{lowest[0]:.4f} at {lowest[1]:,}",
        _fixed(held_out.last("bits_per_byte")),
        _fixed(held_out.last("bits_per_character")),
        _fixed(recent(train, "mfu_pct"), digits=1),
        _fixed(train.last("peak_gib"), digits=2),
        compact(run.parameters) if run.parameters else "-",
        re.split("[:;,]", run.state)[0],
    ]


def _fixed(value: float | None, *, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def setting_rows(runs: Sequence[Run], names: Sequence[str]) -> list[list[str]]:
    """Settings in which the runs differ; one that an older version did not have counts as its default."""
    usual = defaults()
    known = [run.settings for run in runs]
    keys = [*usual, *sorted({key for settings in known for key in settings} - set(usual))]
    rows = [["setting", *names]]
    for key in keys:
        values = [settings.get(key, usual.get(key, "-")) if settings else "unknown" for settings in known]
        if key != "run.dir" and len({json.dumps(value, default=str) for value in values}) > 1:
            rows.append([key, *(cut(str(value), most=200) for value in values)])
    return rows


def _pictures(runs: Sequence[Run], names: Sequence[str], unit: Unit) -> dict[str, list[Picture]]:
    losses = [
        _picture(runs, names, f"{title} loss against {word}", unit.column, f"loss, {unit.label}", kind, by, "log")
        for kind, title in (("train", "Training"), ("eval", "Held-out"))
        for by, word in _AXES.items()
        if unit.column
    ]
    speeds = [
        _picture(runs, names, one.curve.title, one.name, one.curve.axis, "train", "step", one.curve.scale)
        for one in METRICS
        if one.curve and one.curve.compared
    ]
    return ({"Loss": losses} if losses else {}) | {"Speed": speeds}


_AXES: dict[Axis, str] = {"tokens": "tokens", "hours": "time"}


def _picture(
    runs: Sequence[Run],
    names: Sequence[str],
    title: str,
    column: str,
    unit: str,
    kind: str,
    by: Axis,
    scale: Scale,
) -> Picture:
    """A line per run that has the column."""
    lines, absent = [], []
    hours = max(run.history.hours for run in runs)
    labels = [shortened(name) for name in names]
    if len(set(labels)) < len(labels):
        labels = [f"{number}: {label}" for number, label in enumerate(labels, 1)]
    for number, (run, name, label) in enumerate(zip(runs, names, labels, strict=True)):
        table = run.history.train if kind == "train" else _held_out(run)
        x = places(run, table, by=by, hours=hours)
        if not np.isfinite(x + table[column]).any():
            absent.append(name)
        lines.append(
            Line(label, x, table[column], COLOURS[number % len(COLOURS)], "line" if kind == "train" else "dots")
        )
    notes = ["Logarithmic scale."] * (scale == "log") + [f"Not on record for {', '.join(absent)}."] * bool(absent)
    return picture(
        title,
        Chart(f"{kind}-{column}-{by}", lines, axis_label(by, hours=hours), unit, scale),
        caption=" ".join(notes),
        missing=f"{title}: nothing is on record.",
    )
