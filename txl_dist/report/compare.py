"""`txl compare`: several runs on one self-contained HTML page, and in a table for the terminal.

Losses in nats per token can be compared only between runs with the same tokenizer, because tokens of different
tokenizers are different amounts of text. The checkpoints may prove that all runs have the same tokenizer. If they do
not, losses are shown in bits per byte of text. A run has no bits per byte if its tokenizer loses text, or if only a
part of the validation split is scored. If a run has no bits per byte, the losses of the runs are not compared.

Runs are ranked only if the recorded sizes show no difference between the texts on which the runs were scored. With the
same tokenizer, every evaluation must have the same number of tokens. With different tokenizers, the evaluations must
cover whole texts with the same number of bytes.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from txl_dist.console.formatting import bounded, counted, format_table, printable
from txl_dist.errors import ConfigError
from txl_dist.report.figures import Line
from txl_dist.report.pictures import Axis, Kind, Picture, PlotRow, picture_of, shortened, x_values
from txl_dist.report.records import is_number
from txl_dist.report.report import check_writable, setting_rows, write_page
from txl_dist.report.summary import RunRecords, best, facts_of, fixed, read_run
from txl_dist.train.report.metric_table import METRICS

MAX_RUNS = 16
_FIGURES = {"step": "Step", "tokens": "Tokens seen", "work": "Working time", "speed": "Speed"}
"""Facts that the table for the terminal shows in addition to losses, as {column heading: name of the fact}."""
_FACTS = ("Corpus", "Tokenizer", "Model", "Memory", "Commit", "MFU", "Peak memory", "State")
"""Names of further facts about each run that the page shows."""


class Unit(NamedTuple):
    """Unit in which the losses of all runs are compared."""

    column: str
    """Column of the records that holds losses in this unit. Empty if the runs have no common unit."""
    label: str
    sentence: str
    """Sentence for people that names the unit and the reason for it."""
    is_fair: bool = True
    """Whether the runs may be ranked by losses in this unit."""


def write_comparison(run_dirs: Sequence[Path], *, out: Path) -> list[str]:
    """Write the page that compares runs to the file `out`, and return the table as lines for the terminal.

    Raises ConfigError if there are fewer than two runs, too many runs or the same run twice, or if the page cannot be
    written. Raises DataError for a run without records.
    """
    _check_runs(run_dirs)
    check_writable(out)
    runs = [read_run(path) for path in run_dirs]
    names = _names(run_dirs)
    unit = unit_of(runs)
    facts = []
    for run in runs:
        facts.append({fact.name: fact.value for fact in facts_of(run)})
    figures = [["run", *_FIGURES, "train", "validation", "best validation"]]
    for run, name, known in zip(runs, names, facts, strict=True):
        row = [name]
        row += [known.get(fact, "-") for fact in _FIGURES.values()]
        row += _loss_cells(run, unit)
        figures.append(row)
    ranks = ranking(runs, names, unit)
    figure_rows = [list(column) for column in zip(*figures, strict=True)]
    for fact in _FACTS:
        row = [fact]
        for known in facts:
            row.append(known.get(fact, "-"))
        figure_rows.append(row)
    settings = []
    without_settings = []
    for run, name in zip(runs, names, strict=True):
        if run.settings:
            settings.append(run.settings | {"run.dir": ""})
        else:
            settings.append({})
        if run.settings_problem:
            without_settings.append(name)
    page = write_page(
        out,
        "compare.html.j2",
        title=f"{counted(len(runs), 'run')} compared",
        unit=unit,
        ranking=ranks,
        groups=_pictures(runs, names, unit),
        figure_rows=figure_rows,
        setting_rows=setting_rows(settings, names),
        without_settings=without_settings,
    )
    lines = format_table(figures)
    lines.append(unit.sentence)
    lines += ranks
    lines.append(page)
    return lines


def _loss_cells(run: RunRecords, unit: Unit) -> list[str]:
    """Return table cells of a run: its newest training loss, its newest validation loss, and its best validation loss
    with the step.
    """
    cells = []
    for table in (run.history.train, run.history.held_out):
        newest = fixed(table.last(unit.column), 4)
        cells.append(newest or "-")
    lowest = best(run.history.held_out, unit.column)
    if lowest:
        loss, step = lowest
        cells.append(f"{bounded(loss)} at {step:,}")
    else:
        cells.append("-")
    return cells


def _check_runs(run_dirs: Sequence[Path]) -> None:
    if not 2 <= len(run_dirs) <= MAX_RUNS:
        raise ConfigError(
            f"{counted(len(run_dirs), 'run')} given, but a comparison needs 2 to {MAX_RUNS} run "
            "directories. For one run, type `txl report RUN`."
        )
    places: dict[Path, Path] = {}
    for path in run_dirs:
        place = path.resolve()
        if place in places:
            raise ConfigError(f"{path} and {places[place]} are the same run. Name each run once.")
        places[place] = path


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """Return a name for each run: the name of its folder, and also of parent folders if two runs would have the same
    name."""
    places = [path.resolve() for path in run_dirs]
    for depth in range(1, max(len(place.parts) for place in places) + 1):
        names = [printable(os.path.join(*place.parts[-depth:])) for place in places]
        if len(set(names)) == len(names):
            break
    return names


def unit_of(runs: Sequence[RunRecords]) -> Unit:
    """Choose the unit in which the losses of these runs can be compared.

    The unit is nats per token if all runs have the same tokenizer. Otherwise it is bits per byte, if all runs recorded
    losses in bits per byte. Otherwise there is no unit.
    """
    tokenizers = {run.tokenizer for run in runs}
    is_one = len(tokenizers) == 1 and None not in tokenizers
    differ = "The records do not show whether the runs have the same tokenizer"
    if len(tokenizers - {None}) > 1:
        differ = "The runs have different tokenizers"
    without = []
    for run in runs:
        history = run.history
        scored = history.evals.get("eval", history.train)  # without a validation split the training text
        if not scored.has("bits_per_byte"):
            without.append(run)
    if is_one:
        unit = Unit("loss", "nats per token", "All runs have the same tokenizer: losses are in nats per token")
    elif not without:
        sentence = f"{differ}: losses are in bits per byte of text, because nats per token cannot be compared"
        unit = Unit("bits_per_byte", "bits per byte", sentence)
    else:
        reasons = []
        for run in without:
            reason = next(iter(run.no_bits.values()), "they are not recorded")
            reasons.append(f"{printable(run.name)}: {reason}")
        listed = "; ".join(reasons)
        sentence = (
            f"{differ}, and not all runs have bits per byte ({listed}). So losses cannot be compared, and the runs "
            "are not ranked. `txl report RUN` shows the losses of one run."
        )
        return Unit("", "", sentence, is_fair=False)
    unfair = _unfair(runs, in_nats=is_one)
    if unfair:
        return unit._replace(sentence=f"{unit.sentence}. But the runs are not ranked, because {unfair}.", is_fair=False)
    return unit._replace(sentence=f"{unit.sentence}.")


def _unfair(runs: Sequence[RunRecords], *, in_nats: bool) -> str:
    """Return the reason why the runs were not scored on the same text, or an empty text if no difference is known."""
    sizes = set()
    counts = set()
    scores_all = set()
    unknown = []
    for run in runs:
        held_out = run.history.held_out
        size = run.start.get("held_out_bytes")
        if is_number(size):
            sizes.add(size)
        elif len(held_out):
            unknown.append(run)
        for count in held_out["tokens"]:
            if np.isfinite(count):
                counts.add(int(count))
        # Older programs did not score the first tokens of documents with document masks.
        has_masks = bool(run.settings.get("data.document_mask"))
        scores_all.add(not has_masks or "no_bits" in run.start)
    if len(sizes) > 1:
        return f"their validation splits differ: {_listed(sizes)} bytes"
    if in_nats and len(counts) > 1:
        return f"the validation losses are over different numbers of tokens, {_listed(counts)}"
    if in_nats and len(scores_all) > 1:
        return "not all runs score the first tokens of documents"
    if not in_nats and unknown:
        names = ", ".join(printable(run.name) for run in unknown)
        return f"the records do not show how much of the validation split was scored ({names})"
    return ""


def _listed(numbers: Collection[float]) -> str:
    return " and ".join(f"{number:,.0f}" for number in sorted(numbers))


def ranking(runs: Sequence[RunRecords], names: Sequence[str], unit: Unit) -> list[str]:
    """Return a list with one line, which orders the runs by their best validation loss.

    The list is empty if the unit allows no fair ranking, or if fewer than two runs have a validation loss.
    """
    lowest = []
    for run, name in zip(runs, names, strict=True):
        found = best(run.history.held_out, unit.column)
        if found:
            lowest.append((found[0], name))
    if not unit.is_fair or len(lowest) < 2:
        return []
    listed = ", ".join(f"{name} {bounded(loss)}" for loss, name in sorted(lowest))
    return [f"best validation loss, in {unit.label}: {listed}"]


def _pictures(runs: Sequence[RunRecords], names: Sequence[str], unit: Unit) -> dict[str, list[Picture]]:
    """Draw the losses and speeds of all runs. Each picture has a line for each run that has the numbers."""
    rows = _plot_rows(unit)
    hours = max(run.history.hours for run in runs)
    labels = [shortened(name) for name in names]
    if len(set(labels)) < len(labels):
        labels = [f"{number}: {label}" for number, label in enumerate(labels, 1)]
    groups: dict[str, list[Picture]] = {row.group: [] for row in rows}
    for row in rows:
        column = row.columns[""]
        lines = []
        for label, run in zip(labels, runs, strict=True):
            if row.of == "train":
                table = run.history.train
            else:
                table = run.history.held_out
            x = x_values(run, table, row, hours=hours)
            lines.append(Line(label, x, table[column]))
        groups[row.group].append(picture_of(row, lines, hours=hours))
    return groups


def _plot_rows(unit: Unit) -> list[PlotRow]:
    """Return the definitions of the comparison's pictures: losses, if the runs have a common unit, and speeds."""
    rows = []
    if unit.column:
        axis = f"loss, {unit.label}"
        columns = {"": unit.column}
        for kind, title in _KINDS.items():
            for by, word in _AXES.items():
                name = f"{title} loss against {word}"
                rows.append(PlotRow("Loss", name, axis, columns, kind, by, is_log=True))
    for metric in METRICS.values():
        curve = metric.curve
        if curve and curve.compared:
            columns = {"": metric.name}
            rows.append(PlotRow("Speed", curve.title, curve.axis, columns, is_log=curve.is_log))
    return rows


_KINDS: dict[Kind, str] = {"train": "Training", "eval": "Validation"}
_AXES: dict[Axis, str] = {"tokens": "tokens", "hours": "time"}
