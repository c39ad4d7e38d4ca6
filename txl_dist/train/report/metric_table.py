"""The numbers of a run's records that people read: one table for the console, TensorBoard, `txl report` and `compare`.

One row per number; a new one is a new row, and is seen everywhere. What has no row is in `metrics.jsonl`, and a curve
in TensorBoard. No torch here: who only shows numbers need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from txl_dist.console.formatting import bounded, clock


class Curve(NamedTuple):
    """How pages draw a number of the training records over the steps."""

    group: Literal["Optimisation", "Speed"]
    """Heading under which it stands."""
    title: str
    axis: str
    """With its unit, and of whom it is."""
    is_log: bool = False
    compared: bool = False
    """Whether `txl compare` draws it too."""
    missing: str = ""
    """Why a run may not have it."""


@dataclass(frozen=True)
class Metric:
    """One number of a record."""

    name: str
    """Its key in the record, in `metrics.jsonl` and in TensorBoard."""
    form: str = ""
    """Format specification on the console; `clock` is h:mm:ss of seconds; empty: it is not shown there."""
    label: str = ""
    """In front of the number."""
    unit: str = ""
    """Behind the number; empty where the label says it."""
    drop: int = 0
    """A line that is too long loses the numbers with the highest first; those with 0 stay."""
    hides_zero: bool = False
    """Shown only where there is something to say."""
    curve: Curve | None = None
    tensorboard: Literal["scalar", "histogram", "none"] = "scalar"
    """histogram: of a list, which is drawn over the places in it, a line per record."""
    measure: Callable[[Mapping[str, Any]], float | None] | None = None
    """For a plugin's metric: computes the number from the other numbers of a record; None where it cannot."""

    def text(self, value: Any) -> str:
        """The number with its label and unit."""
        number = clock(value) if self.form == "clock" else bounded(value, self.form)
        gap = " " if self.unit and self.unit != "%" else ""
        return f"{self.label} {number}{gap}{self.unit}".lstrip()


METRICS: dict[str, Metric] = {row.name: row for row in (
    Metric("loss", ".4f", "loss"),
    Metric("ppl", ".2f", "ppl", drop=4),
    Metric("bits_per_byte", ".4f", "bpb", drop=1),
    Metric("bits_per_character", ".4f", "bpc", drop=11),
    Metric("accuracy_pct", ".2f", "acc", "%", drop=2),
    Metric("unknown_pct", ".2f", "unknown", "%", drop=3),
    Metric("tokens", ",.0f", "", "tokens", drop=8, tensorboard="none"),
    Metric("seconds", ".1f", "in", "s", drop=7),
    Metric("lr", ".3e", "lr", drop=5, curve=Curve("Optimisation", "Learning rate", "learning rate")),
    Metric("grad_norm", ".3f", "gnorm", drop=6,
           curve=Curve("Optimisation", "Gradient norm", "global norm before clipping", is_log=True)),
    Metric("clipped_pct", curve=Curve("Optimisation", "Clipped steps", "% of the steps")),
    Metric("tokens_per_s", ",.0f", "", "tok/s", drop=2,
           curve=Curve("Speed", "Throughput", "tokens/s, all ranks", compared=True)),
    Metric("mfu_pct", ".1f", "mfu", "%", drop=7,
           curve=Curve("Speed", "Model FLOPs utilisation", "MFU, %", compared=True,
                       missing="it needs the peak of the device, metrics.peak_tflops")),
    Metric("step_ms", curve=Curve("Speed", "Time per step", "ms per step")),
    Metric("peak_gib", ".2f", "peak", "GiB", drop=9,
           curve=Curve("Speed", "Peak memory", "GiB, fullest rank", compared=True)),
    Metric("data_wait_pct", ".1f", "wait", "%", drop=10,
           curve=Curve("Speed", "Waiting for data", "% of the time, slowest rank")),
    Metric("save_s", ".2f", "saved in", "s", drop=8,
           curve=Curve("Speed", "Waiting for saves", "seconds, of steps that waited",
                       missing="no step waited for one, or this version did not record it")),
    Metric("eta_s", "clock", "eta", drop=3, tensorboard="none"),
    Metric("skipped_steps", "d", "skipped", hides_zero=True),
    Metric("skipped_documents", "d", "damaged documents", hides_zero=True),
    Metric("loss_by_position", tensorboard="histogram"),
    Metric("loss_by_position_without_memory", tensorboard="histogram"),
)}  # fmt: skip
"""By name, in the order in which a line, and a page, has them; a plugin may add rows (`plugins.register_metric`)."""


class Cell(NamedTuple):
    """A piece of a line."""

    text: str
    drop: int = 0
    """As in `Metric`."""


def cells_of(record: Mapping[str, Any]) -> list[Cell]:
    """What a line says of a record: the numbers of the table that it holds."""
    known = [(one, record[one.name]) for one in METRICS.values() if one.form and record.get(one.name) is not None]
    return [Cell(metric.text(value), metric.drop) for metric, value in known if value or not metric.hides_zero]


def line_of(cells: Sequence[Cell], *, width: int | None = None) -> str:
    """The cells side by side: all of them, or those that `width` columns hold."""
    kept = list(cells)
    while width is not None and len(line := "  ".join(cell.text for cell in kept)) > width:
        last = max(kept, key=lambda cell: cell.drop)
        if not last.drop:
            return line
        kept.remove(last)
    return "  ".join(cell.text for cell in kept)
