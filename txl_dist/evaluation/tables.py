"""Lines of text for the terminal: a table of scores, and losses by vocabulary cluster and position in the segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from txl_dist.console.formatting import bounded, format_count, format_table
from txl_dist.data.loader.bits_per_byte import TextUnits

Result = dict[str, Any]

_POSITIONS = 4
"""Largest number of ranges of positions in a segment whose losses are printed."""


def table(results: dict[str, Result], units: TextUnits) -> list[str]:
    """Return the lines of a table with one row per score.

    The table shows bits per byte and per character. If the losses do not cover the whole text, it shows perplexity per
    token instead, and the reason.
    """
    columns = _columns(results, units)
    rows = [["", *columns.values(), "nats/token", "tokens"]]
    for name, values in results.items():
        row = [name]
        for key in columns:
            if key in values:
                row.append(_number(key, values[key]))
            else:
                row.append("-")
        row.append(bounded(values["loss"]))
        row.append(f"{int(values['tokens']):,}")
        rows.append(row)
    lines = format_table(rows)
    if units.problem:
        lines.append(f"no bits per byte: {units.problem}")
    if units.unknown_pct:
        lines.append(f"unknown: {units.unknown_pct:.2f} % of the tokens")
    token_counts = {values["tokens"] for values in results.values()}
    if len(token_counts) > 1:
        lines.append("these rows score different numbers of tokens, so their losses cannot be compared")
    return lines


def _columns(results: dict[str, Result], units: TextUnits) -> dict[str, str]:
    """Return the title of each column by the key of its value. A column for which no result has a value is left out."""
    if units.problem:
        columns = {
            "ppl": f"ppl/{units.token}",
            "bits_per_token": f"bits/{units.token}",
        }
    else:
        columns = {
            "bits_per_byte": "bits/byte",
            "bits_per_character": "bits/char",
            "word_ppl": "ppl/word",
        }
    columns["accuracy_pct"] = "accuracy, %"
    known: set[str] = set()
    for values in results.values():
        known.update(values)
    return {key: title for key, title in columns.items() if key in known}


def _number(key: str, value: float) -> str:
    """Format a value with the number of decimals of its column."""
    if key == "word_ppl":
        return format_count(value)  # source code has long words, and a perplexity per word in the millions
    if key in ("ppl", "accuracy_pct"):
        return bounded(value, ".2f")
    return bounded(value, ".4f")


def part_lines(result: Result) -> list[str]:
    """Return a line with the loss by vocabulary cluster, and a line with the loss by position in the segment. A line
    with only one cluster, or with one range of positions, is left out.
    """
    lines = []
    clusters = result["by_cluster"]
    if len(clusters) > 1:
        lines.append(_parts_line("nats/token by id", clusters))
    positions = _merged(result["by_position"])
    if len(positions) > 1:
        lines.append(_parts_line("nats/token by position in the segment", positions))
    return lines


def _parts_line(title: str, parts: Sequence[Result]) -> str:
    """Format the loss and the number of tokens of each part. Parts without tokens are left out."""
    texts = []
    for part in parts:
        if part["tokens"]:
            loss = bounded(part["loss"])
            texts.append(f"{part['first']}-{part['last']} {loss} ({part['tokens']:,})")
    return f"{title} (tokens): {', '.join(texts)}"


def _merged(parts: Sequence[Result]) -> list[Result]:
    """Merge neighbouring ranges of positions, so that few enough remain to print."""
    merged = []
    num_groups = min(_POSITIONS, len(parts))
    for indices in np.array_split(np.arange(len(parts)), num_groups):
        group = [parts[index] for index in indices.tolist()]
        tokens = sum(part["tokens"] for part in group)
        nats = sum((part["loss"] or 0.0) * part["tokens"] for part in group)
        if tokens:
            loss = nats / tokens
        else:
            loss = None
        merged.append(
            {
                "first": group[0]["first"],
                "last": group[-1]["last"],
                "loss": loss,
                "tokens": tokens,
            }
        )
    return merged
