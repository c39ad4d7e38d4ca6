"""Charts as inline SVG: small, deterministic, readable on light and dark ground, without a script.

`draw` makes one chart from lines of numbers. Long lines are thinned: the horizontal axis is cut into bins, and a bin
keeps its mean, its lowest and its highest value, so that a spike of one step in a million is still seen. Text stays
text; ink and grid are CSS variables of the page (--ink, --grid), and the colours of lines are of a middling lightness
that stands out from white and from black. The same numbers give the same bytes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from txl_dist.ops.report.records import FloatArray
from txl_dist.tables import compact

COLOURS = ("#2f7ed8", "#d9680f", "#2e9b4f", "#9a62d0", "#d9434e", "#1799a8", "#a8743a", "#d0569b")
SPECTRUM = ("#578cdb", "#2998c2", "#22a099", "#22a047", "#50a022", "#8f8d1e", "#b98727", "#d87646", "#db5757")
"""For lines that have an order, such as layers: from blue by green to red."""
NUM_BINS = 250
_STEPS = (1, 2, 2.5, 5, 10)
_INK, _GRID = "#010101", "#020202"
_SIZE_INCHES = (4.7, 2.9)
_PNG_DPI = 200
_MAX_MARKS = 120
_MAX_BINS = 2500
_MAX_DOTS = 60
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.0,
    "font.family": "sans-serif",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.4,
}


Scale = Literal["fitting", "from zero", "log"]


class Line(NamedTuple):
    """One line of a chart; points without a finite value are left out."""

    label: str
    x: FloatArray
    y: FloatArray
    colour: str = COLOURS[0]
    style: str = "line"
    """line; dots: points joined by a thin line, while they are few; points: not joined."""


class Mark(NamedTuple):
    """A place on the horizontal axis where something happened."""

    x: float
    is_border: bool
    """A dashed line over the whole height; else a small triangle on the axis."""


class Chart(NamedTuple):
    """What is to be drawn."""

    name: str
    """Unique on the page: it keeps the ids inside the pictures apart."""
    lines: Sequence[Line]
    x_label: str
    y_label: str
    """With its unit."""
    scale: Scale = "fitting"
    """Of the vertical axis."""
    rows: Sequence[str] = ()
    """Names for the places 0, 1, 2 ... of the vertical axis, in place of numbers."""


class Thinned(NamedTuple):
    """Points of a line by increasing x; low and high are equal to mean where nothing was put together."""

    x: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray


def thinned(x: FloatArray, y: FloatArray, *, num_bins: int = NUM_BINS) -> Thinned:
    """The finite points of a line; of more than two per bin, each bin's means, its lowest and its highest value."""
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if (np.diff(x) < 0).any():
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
    if len(x) <= 2 * num_bins:
        return Thinned(x, y, y, y)
    width = (x[-1] - x[0]) / num_bins or 1.0
    bins = np.minimum((x - x[0]) // width, num_bins - 1)
    first = np.flatnonzero(np.diff(bins, prepend=-1.0))
    count = np.diff(first, append=len(x))
    return Thinned(
        np.add.reduceat(x, first) / count,
        np.add.reduceat(y, first) / count,
        np.minimum.reduceat(y, first),
        np.maximum.reduceat(y, first),
    )


def draw(chart: Chart, *, marks: Sequence[Mark] = (), alt: str) -> str:
    """An <svg> element for a page, with `alt` as its text for those who do not see it."""
    return _for_page(_drawn(chart, marks, format="svg", transparent=True, metadata={"Date": None}).decode(), alt=alt)


def draw_png(chart: Chart) -> bytes:
    """The same as a PNG file, on white."""
    return _drawn(chart, (), format="png", dpi=_PNG_DPI, metadata={"Software": None})


def _drawn(chart: Chart, marks: Sequence[Mark], **options: Any) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the user's own settings would make other pictures
        matplotlib.rcParams.update(_SETTINGS)
        matplotlib.rcParams["svg.hashsalt"] = chart.name
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        num_bins = max(60, min(NUM_BINS, _MAX_BINS // max(len(chart.lines), 1)))
        for line in chart.lines:
            _draw_line(axes, line, num_bins=num_bins)
        _set_axes(axes, chart)
        _draw_marks(axes, marks)
        labelled = [line for line in chart.lines if line.label]
        if len(labelled) > 1:
            figure.legend(loc="outside upper left", ncols=min(len(labelled), 4), handlelength=1.2, columnspacing=1.0)
        stream = io.BytesIO()
        with warnings.catch_warnings():  # letters that its own font lacks, the reader's has
            warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
            figure.savefig(stream, **options)
    return stream.getvalue()


def _draw_line(axes: Any, line: Line, *, num_bins: int) -> None:
    is_points = line.style == "points"
    x, mean, low, high = thinned(line.x, line.y, num_bins=num_bins // 2 if is_points else num_bins)
    if not np.array_equal(low, high):
        axes.fill_between(x, low, high, color=line.colour, alpha=0.25, linewidth=0)
    has_markers = is_points or len(x) == 1 or (line.style == "dots" and len(x) <= _MAX_DOTS)
    marker = {"marker": "o", "markersize": 3.0} if has_markers else {}
    width = 0.0 if is_points else 0.8 if has_markers else 1.4
    axes.plot(x, mean, color=line.colour, linewidth=width, label=line.label or None, **marker)


def _set_axes(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    def plain(value: float, _: int) -> str:
        return compact(value, digits=6)  # of ticks that lie close together, too

    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_STEPS))
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in chart.lines])
    low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
    if chart.rows:
        axes.set_yticks(range(len(chart.rows)), chart.rows)
        axes.set_ylim(len(chart.rows) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        return
    if chart.scale == "log" and low > 0:
        axes.set_yscale("log")
        if high > 5 * low:  # else ticks in even steps are more, and rounder
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)))
        else:
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=_STEPS))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=_STEPS))
        if chart.scale == "from zero":
            axes.set_ylim(0, 1.08 * high if high > 0 else 1)
    axes.yaxis.set_major_formatter(FuncFormatter(plain))


def _draw_marks(axes: Any, marks: Sequence[Mark]) -> None:
    left, right = axes.get_xlim()
    shown = [mark for mark in marks if left <= mark.x <= right]  # which NaN is not
    places = {(round(_MAX_MARKS * (mark.x - left) / (right - left)), mark.is_border): mark.x for mark in shown}
    for (_, is_border), x in sorted(places.items()):
        if is_border:
            axes.axvline(x, color=_INK, linewidth=0.8, linestyle=(0, (3, 3)), alpha=0.55)
        else:
            axes.plot([x], [0], marker="^", markersize=5, color=COLOURS[4], transform=axes.get_xaxis_transform(),
                      clip_on=False, zorder=5)  # fmt: skip


def _for_page(svg: str, *, alt: str) -> str:
    """Only what a page needs of the file: no headers, metadata or unused ids; colours by variables."""
    from markupsafe import escape

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style type=.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"<defs>\s*</defs>", "", svg)
    used = set(re.findall(r'#([\w-]+)[")]', svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = re.sub(r' d="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), svg)
    svg = re.sub(r"font-family: [^;\"]*; ", "", svg)  # the page's
    svg = svg.replace(_INK, "var(--ink)").replace(_GRID, "var(--grid)")
    svg = re.sub(r">\s+<", "><", svg)
    return re.sub(
        r'<svg[^>]*?viewBox="([^"]+)"[^>]*>',
        lambda match: (
            f'<svg role="img" aria-label="{escape(alt)}" viewBox="{match[1]}" xmlns="http://www.w3.org/2000/svg" '
            'xmlns:xlink="http://www.w3.org/1999/xlink">'
        ),
        svg,
        count=1,
    ).strip()
