"""The table of the metrics that people read, for the console, TensorBoard, `txl report` and `txl compare`.

Each metric has one row, and a new row appears in all these places. A number without a row is still in `metrics.jsonl`,
and a curve in TensorBoard. This module imports no torch, so that commands which only show numbers start fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from txl_dist.console.formatting import bounded, clock


class Curve(NamedTuple):
    """Description of a curve: a number of the training records over the steps, as web pages draw it."""

    group: Literal["Optimisation", "Speed"]
    """Heading of the page under which the curve is drawn."""
    title: str
    axis: str
    """Label of the vertical axis, with the unit and the ranks that the number belongs to."""
    is_log: bool = False
    compared: bool = False
    """Whether `txl compare` draws it too."""
    missing: str = ""
    """Reason why a run may lack this number."""


@dataclass(frozen=True)
class Metric:
    """One number of a record, and how it is shown."""

    name: str
    """Key of the number in the record, in `metrics.jsonl` and in TensorBoard."""
    form: str = ""
    """Format on the console: a format specification, or `clock` for seconds as h:mm:ss; empty if it is not shown."""
    label: str = ""
    """Text before the number on the console."""
    unit: str = ""
    """Text after the number on the console; empty if the label says it."""
    drop: int = 0
    """Order in which a line that is too long loses its numbers, the highest first; 0 is never dropped."""
    hides_zero: bool = False
    """Whether the number is left out of the line while it is 0."""
    curve: Curve | None = None
    tensorboard: Literal["scalar", "histogram", "none"] = "scalar"
    """Form in TensorBoard. A histogram draws a list over the places in it, one line per record."""
    measure: Callable[[Mapping[str, Any]], float | None] | None = None
    """Function of a plugin's metric, which computes the number from a record; it returns None if it cannot."""

    def text(self, value: Any) -> str:
        """Return the number with its label and unit, for the console."""
        if self.form == "clock":
            number = clock(value)
        else:
            number = bounded(value, self.form)
        if self.unit and self.unit != "%":
            gap = " "
        else:
            gap = ""
        return f"{self.label} {number}{gap}{self.unit}".lstrip()


_ROWS = (
    Metric("loss", ".4f", "loss"),
    Metric("ppl", ".2f", "ppl", drop=4),
    Metric("bits_per_byte", ".4f", "bpb", drop=1),
    Metric("bits_per_character", ".4f", "bpc", drop=11),
    Metric("accuracy_pct", ".2f", "acc", "%", drop=2),
    Metric("unknown_pct", ".2f", "unknown", "%", drop=3),
    Metric("tokens", ",.0f", "", "tokens", drop=8, tensorboard="none"),
    Metric("seconds", ".1f", "in", "s", drop=7),
    Metric("lr", ".3e", "lr", drop=5, curve=Curve("Optimisation", "Learning rate", "learning rate")),
    Metric(
        "grad_norm",
        ".3f",
        "gnorm",
        drop=6,
        curve=Curve("Optimisation", "Gradient norm", "global norm before clipping", is_log=True),
    ),
    Metric("clipped_pct", curve=Curve("Optimisation", "Clipped steps", "% of the steps")),
    Metric(
        "tokens_per_s",
        ",.0f",
        "",
        "tok/s",
        drop=2,
        curve=Curve("Speed", "Throughput", "tokens/s, all ranks", compared=True),
    ),
    Metric(
        "mfu_pct",
        ".1f",
        "mfu",
        "%",
        drop=7,
        curve=Curve(
            "Speed",
            "Model FLOPs utilisation",
            "MFU, %",
            compared=True,
            missing="it needs the peak of the device, metrics.peak_tflops",
        ),
    ),
    Metric("step_ms", curve=Curve("Speed", "Time per step", "ms per step")),
    Metric(
        "peak_gib",
        ".2f",
        "peak",
        "GiB",
        drop=9,
        curve=Curve("Speed", "Peak memory", "GiB, fullest rank", compared=True),
    ),
    Metric(
        "data_wait_pct",
        ".1f",
        "wait",
        "%",
        drop=10,
        curve=Curve("Speed", "Waiting for data", "% of the time, slowest rank"),
    ),
    Metric(
        "save_s",
        ".2f",
        "saved in",
        "s",
        drop=8,
        curve=Curve(
            "Speed",
            "Waiting for saves",
            "seconds, of steps that waited",
            missing="no step waited for one, or this version did not record it",
        ),
    ),
    Metric("eta_s", "clock", "eta", drop=3, tensorboard="none"),
    Metric("skipped_steps", "d", "skipped", hides_zero=True),
    Metric("skipped_documents", "d", "damaged documents", hides_zero=True),
    Metric("loss_by_position", tensorboard="histogram"),
    Metric("loss_by_position_without_memory", tensorboard="histogram"),
)
METRICS: dict[str, Metric] = {row.name: row for row in _ROWS}
"""All metrics by name, in the order of a line and of a page. A plugin may add rows (`plugins.register_metric`)."""


class Cell(NamedTuple):
    """One part of a line on the console."""

    text: str
    drop: int = 0
    """Order in which cells are dropped from a long line, as in `Metric`."""


def cells_of(record: Mapping[str, Any]) -> list[Cell]:
    """Return the cells of a record's line: its metrics that the console shows, in the order of the table."""
    cells = []
    for metric in METRICS.values():
        value = record.get(metric.name)
        if metric.form and value is not None and (value or not metric.hides_zero):
            cells.append(Cell(metric.text(value), metric.drop))
    return cells


def line_of(cells: Sequence[Cell], *, width: int | None = None) -> str:
    """Join cells to a line. With `width`, cells are dropped until the line fits into so many columns."""
    kept = list(cells)
    while width is not None and len(line := "  ".join(cell.text for cell in kept)) > width:
        last = max(kept, key=lambda cell: cell.drop)
        if not last.drop:
            return line
        kept.remove(last)
    return "  ".join(cell.text for cell in kept)
