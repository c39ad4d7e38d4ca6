"""Charts as inline SVG: small, readable on a light and a dark page, without a script, and the same for the same data.

`draw` makes a chart from lines of numbers. Long lines are thinned: the horizontal axis is cut into bins, and each bin
keeps its mean, its lowest and its highest value. So a spike of one step in a million stays visible. Text stays text in
the SVG. The colours of text and grid are CSS variables of the page (--ink, --grid). The colours of lines have a medium
lightness, so that they are visible on white and on black. The same numbers give the same bytes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from txl_dist.console.formatting import format_count
from txl_dist.report.records import FloatArray

COLOURS = ("#2f7ed8", "#d9680f", "#2e9b4f", "#9a62d0", "#d9434e", "#1799a8", "#a8743a", "#d0569b")
"""Colours of a chart's lines, in the order of the lines."""
NUM_BINS = 250
_STEPS = (1, 2, 2.5, 5, 10)
_INK, _GRID = "#010101", "#020202"
"""Colours of text and grid in the style sheet, which `draw` replaces by CSS variables."""
_SIZE_INCHES = (4.7, 2.9)
_PNG_DPI = 200
_MAX_MARKS = 120
_MAX_DOTS = 60
_STYLE = Path(__file__).with_name("figures.mplstyle")


class Line(NamedTuple):
    """One line of a chart with its label in the legend. Points without a finite value are left out."""

    label: str
    x: FloatArray
    y: FloatArray


class Mark(NamedTuple):
    """Mark on the horizontal axis of a chart, at a place where an event happened."""

    x: float
    is_border: bool
    """Whether the mark is a dashed line over the whole height. Otherwise it is a small triangle on the axis."""


class Chart(NamedTuple):
    """Data and labels of a chart, which `draw` and `draw_png` take."""

    name: str
    """Name of the chart. The name must be unique on the page, because the ids inside the picture contain it."""
    lines: Sequence[Line]
    x_label: str
    y_label: str
    """Label of the vertical axis, with its unit."""
    is_log: bool = False
    """Whether the vertical axis is logarithmic. If a value is not positive, the axis is linear instead. A linear axis
    begins at zero."""


class Thinned(NamedTuple):
    """Points of a line in the order of x. If a point was not merged with other points, its low and high equal its
    mean."""

    x: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray


def thinned(x: FloatArray, y: FloatArray) -> Thinned:
    """Return the finite points of a line, with fewer points if there are many.

    If there are more than twice NUM_BINS points, each bin becomes one point, with the bin's mean, lowest and highest
    value.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x = x[finite]
    y = y[finite]
    if (np.diff(x) < 0).any():
        order = np.argsort(x, kind="stable")
        x = x[order]
        y = y[order]
    if len(x) <= 2 * NUM_BINS:
        return Thinned(x, y, y, y)
    width = (x[-1] - x[0]) / NUM_BINS or 1.0
    bins = np.minimum((x - x[0]) // width, NUM_BINS - 1)
    first = np.flatnonzero(np.diff(bins, prepend=-1.0))
    count = np.diff(first, append=len(x))
    return Thinned(
        np.add.reduceat(x, first) / count,
        np.add.reduceat(y, first) / count,
        np.minimum.reduceat(y, first),
        np.maximum.reduceat(y, first),
    )


def draw(chart: Chart, *, marks: Sequence[Mark] = (), alt: str) -> str:
    """Draw a chart as an <svg> element for a page. `alt` is the description for screen readers."""
    svg = _drawn(chart, marks, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(svg.decode(), alt=alt)


def draw_png(chart: Chart) -> bytes:
    """Return a chart as the content of a PNG file with a white background."""
    return _drawn(chart, (), grid="#dddddd", format="png", dpi=_PNG_DPI, metadata={"Software": None})


def _drawn(chart: Chart, marks: Sequence[Mark], *, grid: str = _GRID, **options: Any) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rc_file(_STYLE)  # and else the defaults: the user's own settings would make other pictures
        matplotlib.rcParams.update({"svg.hashsalt": chart.name, "grid.color": grid})
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for index, line in enumerate(chart.lines):
            _draw_line(axes, line, colour=COLOURS[index % len(COLOURS)])
        _set_axes(axes, chart)
        _draw_marks(axes, marks)
        labels = axes.get_legend_handles_labels()[1]
        if len(labels) > 1:
            figure.legend(loc="outside upper left", ncols=min(len(labels), 4), handlelength=1.2, columnspacing=1.0)
        stream = io.BytesIO()
        with warnings.catch_warnings():  # letters that its own font lacks, the reader's has
            warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
            figure.savefig(stream, **options)
    return stream.getvalue()


def _draw_line(axes: Any, line: Line, *, colour: str) -> None:
    """Draw a line, with dots if it has few points. A line without a finite value gets no entry in the legend."""
    x, mean, low, high = thinned(line.x, line.y)
    if not len(x):
        return
    if not np.array_equal(low, high):
        axes.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0)
    if len(x) <= _MAX_DOTS:
        style = {"marker": "o", "markersize": 3.0, "linewidth": 0.8}
    else:
        style = {}
    axes.plot(x, mean, color=colour, label=line.label or None, **style)


def _set_axes(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    plain = FuncFormatter(lambda value, _: format_count(value, digits=6))  # of ticks that lie close together, too
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_STEPS))
    values = np.concatenate([line.y[np.isfinite(line.x + line.y)] for line in chart.lines])
    low = values.min()
    high = values.max()
    ticks: Any = MaxNLocator(6, steps=_STEPS)
    if chart.is_log and low > 0:
        axes.set_yscale("log")
        if high >= 1000 * low:
            ticks = LogLocator(subs=(1.0,))
        elif high > 5 * low:  # else ticks in even steps are more, and rounder
            ticks = LogLocator(subs=(1.0, 2.0, 5.0))
    else:
        bottom = 1.08 * min(low, 0.0)
        top = 1.08 * max(high, 0.0)
        if top <= bottom:
            top = 1.0
        axes.set_ylim(bottom, top)
    axes.yaxis.set_major_locator(ticks)
    axes.yaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(plain)


def _draw_marks(axes: Any, marks: Sequence[Mark]) -> None:
    left, right = axes.get_xlim()
    shown = [mark for mark in marks if left <= mark.x <= right]  # which NaN is not
    places = {}
    for mark in shown:
        place = round(_MAX_MARKS * (mark.x - left) / (right - left))
        places[place, mark.is_border] = mark.x
    for (_, is_border), x in sorted(places.items()):
        if is_border:
            axes.axvline(x, color=_INK, linewidth=0.8, linestyle=(0, (3, 3)), alpha=0.55)
        else:
            at_the_axis = axes.get_xaxis_transform()
            axes.plot(
                [x],
                [0],
                transform=at_the_axis,
                marker="^",
                markersize=5,
                color=COLOURS[4],
                clip_on=False,
                zorder=5,
            )


def _for_page(svg: str, *, alt: str) -> str:
    """Return the part of an SVG file that a page needs: no headers, metadata or unused ids, and CSS variables as
    colours.
    """
    from markupsafe import escape

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style type=.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"<defs>\s*</defs>", "", svg)
    used = set(re.findall(r'#([\w-]+)[")]', svg))

    def used_id(match: re.Match[str]) -> str:
        if match[1] in used:
            return match[0]
        return ""

    def shortened_path(match: re.Match[str]) -> str:
        return re.sub(r"(\.\d\d)\d+", r"\1", match[0])

    def root_element(match: re.Match[str]) -> str:
        return (
            f'<svg role="img" aria-label="{escape(alt)}" viewBox="{match[1]}" xmlns="http://www.w3.org/2000/svg" '
            'xmlns:xlink="http://www.w3.org/1999/xlink">'
        )

    svg = re.sub(r' id="([^"]+)"', used_id, svg)
    svg = re.sub(r' d="[^"]*"', shortened_path, svg)
    svg = re.sub(r"font-family: [^;\"]*; ", "", svg)  # the page's
    svg = svg.replace(_INK, "var(--ink)")
    svg = svg.replace(_GRID, "var(--grid)")
    svg = re.sub(r">\s+<", "><", svg)
    svg = re.sub(r'<svg[^>]*?viewBox="([^"]+)"[^>]*>', root_element, svg, count=1)
    return svg.strip()
