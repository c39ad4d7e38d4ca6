"""Formats of numbers and tables for people: sizes, durations, large counts, columns of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LONGEST_PLAIN = 1e15
"""Smallest number that `format_count` writes with an exponent."""
_MOST_CHARACTERS = 14
"""Maximum number of characters of a number that `bounded` writes without an exponent. A person cannot read a longer
number without counting its digits."""
_COUNT_UNITS = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
"""Smallest value, divisor and letter of each unit of a count, the largest unit first."""


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose first row is the header.

    Columns of numbers are aligned to the right, all others to the left. An empty cell, `-` and `?` count as missing
    numbers. All rows must have the same number of cells.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_number = [_holds_numbers(column[1:]) for column in columns]
    lines = []
    for row in rows:
        cells = []
        for cell, width, is_right in zip(row, widths, is_number, strict=True):
            cells.append(cell.rjust(width) if is_right else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def _holds_numbers(cells: Sequence[str]) -> bool:
    """Return whether the cells of a column are numbers. At least one number must be present."""
    present = [cell for cell in cells if cell not in ("", "-", "?")]
    if not present:
        return False
    return all(cell[0].isdigit() for cell in present)


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes: 256 KiB, 12.3 MiB, 4.56 GiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:,.2f} GiB"
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**10:.0f} KiB"


def format_duration(seconds: float) -> str:
    """Format a duration with one unit: 95 s, 12 min, 3.4 h, 2.1 days."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86_400:,.1f} days"


def clock(seconds: float) -> str:
    """Format a duration in hours, minutes and seconds: 9000 is 2:30:00."""
    whole = int(seconds)
    hours = whole // 3600
    minutes = whole // 60 % 60
    return f"{hours:d}:{minutes:02d}:{whole % 60:02d}"


def format_count(value: float, *, digits: int = 3) -> str:
    """Format a number with `digits` significant digits and k, M, G or T: 131,072,000 is 131M, 0.00025 is 0.00025.

    A number below 10,000 has one more digit. A number from 1e15 on has an exponent. A number that is not finite is `-`.
    """
    if not math.isfinite(value):
        return "-"
    if abs(value) >= _LONGEST_PLAIN:
        return f"{value:.{digits}g}"
    for smallest, divisor, letter in _COUNT_UNITS:
        if abs(value) >= smallest:
            return f"{value / divisor:.{digits}g}{letter}"
    return f"{value:.{digits + 1}g}"


def bounded(value: float, form: str = ".4f") -> str:
    """Format a number with the format specification `form`, or with an exponent if the result would be too long.

    For example, the loss of an exploding run is written as 1.23e+30, and not with 31 digits before the point. A number
    that is not finite is inf, -inf or nan.
    """
    if not math.isfinite(value):
        return str(float(value))
    if abs(value) < _LONGEST_PLAIN:
        text = format(value, form)
        if 0 < len(text) <= _MOST_CHARACTERS:
            return text
    return f"{value:.3g}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: 1 rank, 2 ranks, 1,024 ranks.

    `plural` is the plural of the noun, if it is not the noun with an s.
    """
    word = noun
    if number != 1:
        word = plural or noun + "s"
    return f"{number:,} {word}"


def cluster_starts(cutoffs: Sequence[object]) -> str:
    """Return a text with the first token id of each cluster of an adaptive softmax, without the first cluster.

    A cutoff that is not an integer is written as it is.
    """
    starts = []
    for start in cutoffs:  # a damaged file may hold anything
        starts.append(f"{start:,}" if type(start) is int else str(start))
    return f"clusters begin at {', '.join(starts)}"


def printable(text: str, *, keep: str = "") -> str:
    """Return a text that is safe to show on a page, in a picture or on a terminal.

    Control characters, line breaks and lone surrogates are replaced by U+FFFD, except the characters in `keep`.
    """
    if text.isprintable():
        return text
    characters = []
    for character in text:
        is_safe = character.isprintable() or character in keep
        characters.append(character if is_safe else "\ufffd")
    return "".join(characters)


def flag_of(name: str) -> str:
    """Return the command-line flag of an option, such as --num-lanes for num_lanes."""
    return f"--{name.replace('_', '-')}"
