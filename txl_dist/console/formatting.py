"""Numbers and tables as people read them: sizes, durations, large counts, columns of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LONGEST_PLAIN = 1e15
"""From here on a number is written with an exponent."""
_MOST_CHARACTERS = 14
"""The longest form of a number that is read without counting digits."""


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, its first row the head: columns of numbers to the right, the first and those of words to the left.

    An empty cell, `-` and `?` are numbers that are not there.
    """
    columns = list(zip(*rows, strict=True))
    is_number = [
        any(cell[:1].isdigit() for cell in column[1:])
        and all(cell[:1].isdigit() or cell in ("", "-", "?") for cell in column[1:])
        for column in columns
    ]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in rows
    ]


def format_bytes(num_bytes: float) -> str:
    """Bytes for people: 256 KiB, 12.3 MiB, 4.56 GiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:,.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.0f} KiB"


def format_duration(seconds: float) -> str:
    """Seconds for people: 95 s, 12 min, 3.4 h, 2.1 days."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:,.1f} days"


def clock(seconds: float) -> str:
    """9000 is 2:30:00."""
    whole = int(seconds)
    return f"{whole // 3600:d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def format_count(value: float, *, digits: int = 3) -> str:
    """So many digits, with k, M, G, T for thousands: 131,072,000 is 131M, 0.00025 is 0.00025. Not finite: `-`.

    Below 10,000 it is one digit more. From 1e15 on it has an exponent.
    """
    if not math.isfinite(value):
        return "-"
    if abs(value) >= _LONGEST_PLAIN:
        return f"{value:.{digits}g}"
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if letter == 'k' else factor):.{digits}g}{letter}"
    return f"{value:.{digits + 1}g}"


def bounded(value: float, form: str = ".4f") -> str:
    """A number in a format (four decimals, as for losses), or with an exponent where that would be too long to read.

    A loss of an exploding run is 1.23e+30, not 31 digits before the point. Not finite: inf, -inf, nan.
    """
    if not math.isfinite(value):
        return str(float(value))
    text = format(value, form) if abs(value) < _LONGEST_PLAIN else ""
    return text if 0 < len(text) <= _MOST_CHARACTERS else f"{value:.3g}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """A count with its noun: 1 rank, 2 ranks, 1,024 ranks; `plural` where an s does not make it."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def cluster_starts(cutoffs: Sequence[object]) -> str:
    """Say where the clusters of an adaptive softmax begin. What is no number, as in a damaged file, stays as it is."""
    starts = ", ".join(f"{start:,}" if type(start) is int else str(start) for start in cutoffs)
    return f"clusters begin at {starts}"


def printable(text: str, *, keep: str = "") -> str:
    """A text for a page, a picture or a terminal: what would steer it, and halves of characters, are replaced.

    Line breaks are too, unless they are in `keep`.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else "\ufffd" for one in text)
