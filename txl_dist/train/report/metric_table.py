"""The table of the metrics that people read: on the console, in TensorBoard, in `txl report` and in `txl compare`.

Each metric has one row. A new row appears in all these places. A number without a row still appears in `metrics.jsonl`
and as a curve in TensorBoard. This module imports no torch, so commands that only show numbers start fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from txl_dist.console.formatting import bounded, clock


class Curve(NamedTuple):
    """Curve on the web pages of `txl report` and `txl compare`: one number of the training records, drawn over the
    steps."""

    group: Literal["Optimisation", "Speed"]
    """Heading of the part of the page that contains the curve."""
    title: str
    """Title of the curve on the page."""
    axis: str
    """Label of the vertical axis, with the unit and the ranks that the number describes."""
    is_log: bool = False
    """Whether the vertical axis is logarithmic."""
    compared: bool = False
    """Whether `txl compare` shows the curve too."""
    missing: str = ""
    """Reason that the page shows if a run lacks this number."""


@dataclass(frozen=True)
class Metric:
    """One number of a run's records, and its form on the console, in TensorBoard and on web pages."""

    name: str
    """Key of the number in the record, in `metrics.jsonl` and in TensorBoard."""
    form: str = ""
    """Format of the number on the console: a format specification, or `clock` for seconds as h:mm:ss. With an empty
    form the console does not show the number."""
    label: str = ""
    """Text before the number on the console."""
    unit: str = ""
    """Text after the number on the console. It is empty if the number needs no unit."""
    drop: int = 0
    """Order in which numbers are removed from a line of the console that is too long. The number with the highest
    `drop` is removed first. A number whose `drop` is 0 is never removed."""
    hides_zero: bool = False
    """Whether the console leaves out the number while the number is 0."""
    curve: Curve | None = None
    """Curve of the number on web pages. With None there is no curve."""
    tensorboard: Literal["scalar", "histogram", "none"] = "scalar"
    """Form of the number in TensorBoard. A histogram shows a list: the horizontal axis is the place in the list, and
    each record is one line. With `none` TensorBoard does not get the number."""
    measure: Callable[[Mapping[str, Any]], float | None] | None = None
    """Function of a plugin that computes the number from a record. The function returns None if the record lacks values
    that the function needs. For metrics of this package `measure` itself is None."""

    def text(self, value: Any) -> str:
        """Return the number with its label and unit, as the console shows it."""
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
            missing="MFU needs the peak of the device, metrics.peak_tflops",
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
            "seconds that steps waited",
            missing="no step waited for a checkpoint, or the run's version did not record it",
        ),
    ),
    Metric("eta_s", "clock", "eta", drop=3, tensorboard="none"),
    Metric("skipped_steps", "d", "skipped", hides_zero=True),
    Metric("skipped_documents", "d", "damaged documents", hides_zero=True),
    Metric("loss_by_position", tensorboard="histogram"),
    Metric("accuracy_by_position", tensorboard="histogram"),
    Metric("loss_by_position_without_memory", tensorboard="histogram"),
)
"""All metrics that this package itself defines. Plugins can add further metrics to `METRICS`."""
METRICS: dict[str, Metric] = {row.name: row for row in _ROWS}
"""All metrics by name, in the order in which lines and pages show them. A plugin may add metrics by
`plugins.register_metric`."""


class Cell(NamedTuple):
    """One part of a line on the console, for instance a number with its unit."""

    text: str
    drop: int = 0
    """Order in which cells are removed from a line that is too long, as in `Metric.drop`."""


def cells_of(record: Mapping[str, Any]) -> list[Cell]:
    """Return one cell for each metric of a record that the console shows, in the order of the table."""
    cells = []
    for metric in METRICS.values():
        value = record.get(metric.name)
        if metric.form and value is not None and (value or not metric.hides_zero):
            cells.append(Cell(metric.text(value), metric.drop))
    return cells


def line_of(cells: Sequence[Cell], *, width: int | None = None) -> str:
    """Join cells to a line. With `width`, remove cells until the line has at most that many columns.

    Cells with `drop` 0 stay, so the line may be longer than `width`.
    """
    kept = list(cells)
    while width is not None and len(line := "  ".join(cell.text for cell in kept)) > width:
        last = max(kept, key=lambda cell: cell.drop)
        if not last.drop:
            return line
        kept.remove(last)
    return "  ".join(cell.text for cell in kept)
