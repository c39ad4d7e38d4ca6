"""The numbers of a run's records that people read: how each is written, and which leave a line that is too long.

One row per number; a new one is a new row. No torch here: who only shows numbers need not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from txl_dist.tables import clock


@dataclass(frozen=True)
class Metric:
    """One number of a record."""

    name: str
    """Its key in the record, in `metrics.jsonl` and in TensorBoard."""
    label: str
    """In front of the number."""
    form: str
    """Format specification; `clock` is h:mm:ss of seconds."""
    unit: str = ""
    """Behind the number; empty where the label says it."""
    drop: int = 0
    """A line that is too long loses the numbers with the highest first; those with 0 stay."""
    hides_zero: bool = False
    """Shown only where there is something to say."""

    def text(self, value: Any) -> str:
        """The number with its label and unit."""
        number = clock(value) if self.form == "clock" else format(value, self.form)
        gap = " " if self.unit and self.unit != "%" else ""
        return f"{self.label} {number}{gap}{self.unit}".lstrip()


METRICS = (
    Metric("loss", "loss", ".4f"),
    Metric("ppl", "ppl", ".2f", drop=4),
    Metric("bits_per_byte", "bpb", ".4f", drop=1),
    Metric("bits_per_character", "bpc", ".4f", drop=11),
    Metric("unknown_pct", "unknown", ".2f", "%", drop=3),
    Metric("tokens", "", ",.0f", "tokens", drop=8),
    Metric("seconds", "in", ".1f", "s", drop=7),
    Metric("lr", "lr", ".3e", drop=5),
    Metric("grad_norm", "gnorm", ".3f", drop=6),
    Metric("tokens_per_s", "", ",.0f", "tok/s", drop=2),
    Metric("mfu_pct", "mfu", ".1f", "%", drop=7),
    Metric("peak_gib", "peak", ".2f", "GiB", drop=9),
    Metric("data_wait_pct", "wait", ".1f", "%", drop=10),
    Metric("save_s", "saved in", ".2f", "s", drop=8),
    Metric("eta_s", "eta", "clock", drop=3),
    Metric("skipped_steps", "skipped", "d", hides_zero=True),
    Metric("skipped_documents", "damaged documents", "d", hides_zero=True),
)
"""In the order in which a line has them."""


class Cell(NamedTuple):
    """A piece of a line."""

    text: str
    drop: int = 0
    """As in `Metric`."""


def cells_of(record: Mapping[str, Any]) -> list[Cell]:
    """What a line says of a record: the numbers of the table that it holds."""
    known = [(metric, record[metric.name]) for metric in METRICS if record.get(metric.name) is not None]
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
