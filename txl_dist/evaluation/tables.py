"""Scores for people: a table, and what the parts of the vocabulary and of a segment cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from txl_dist.console.formatting import bounded, format_count, format_table
from txl_dist.data.loader.bits_per_byte import TextUnits

Result = dict[str, Any]

_POSITIONS = 4
"""Parts of a segment that are shown."""


def table(results: dict[str, Result], units: TextUnits) -> list[str]:
    """A row per score: in bits of the text where that is what it costs, else in perplexity, and why."""
    columns = {"bits_per_byte": "bits/byte", "bits_per_character": "bits/char", "word_ppl": "ppl/word"}
    if units.problem:
        columns = {"ppl": f"ppl/{units.token}", "bits_per_token": f"bits/{units.token}"}
    columns["accuracy_pct"] = "accuracy, %"
    columns = {key: title for key, title in columns.items() if any(key in values for values in results.values())}
    rows = [["", *columns.values(), "nats/token", "tokens"]]
    for name, values in results.items():
        told = [_number(key, values[key]) if key in values else "-" for key in columns]
        rows.append([name, *told, bounded(values["loss"]), f"{int(values['tokens']):,}"])
    lines = format_table(rows)
    if units.problem:
        lines.append(f"no bits per byte: {units.problem}")
    if units.unknown_pct:
        lines.append(f"unknown: {units.unknown_pct:.2f} % of the tokens")
    if len({values["tokens"] for values in results.values()}) > 1:
        lines.append("these rows are over different numbers of tokens: they do not compare")
    return lines


def _number(key: str, value: float) -> str:
    if key == "word_ppl":
        return format_count(value)  # of code, whose words are long, it is in the millions
    return bounded(value, ".2f" if key in ("ppl", "accuracy_pct") else ".4f")


def part_lines(result: Result) -> list[str]:
    """Where the loss of one score lies: by cluster of the vocabulary, if it has several, and in the segment."""
    clusters = result["by_cluster"]
    lines = [_parts("nats/token by id", clusters)] if len(clusters) > 1 else []
    positions = _joined(result["by_position"])
    return [*lines, _parts("nats/token by position in the segment", positions)] if len(positions) > 1 else lines


def _parts(title: str, parts: Sequence[Result]) -> str:
    told = [
        f"{part['first']}-{part['last']} {bounded(part['loss'])} ({part['tokens']:,})"
        for part in parts
        if part["tokens"]
    ]
    return f"{title} (tokens): {', '.join(told)}"


def _joined(parts: Sequence[Result]) -> list[Result]:
    """Neighbours put together, to as many as are shown."""
    groups = [group.tolist() for group in np.array_split(np.arange(len(parts)), min(_POSITIONS, len(parts)))]
    joined = []
    for group in groups:
        own = [parts[index] for index in group]
        tokens = sum(part["tokens"] for part in own)
        nats = sum((part["loss"] or 0.0) * part["tokens"] for part in own)
        ends = {"first": own[0]["first"], "last": own[-1]["last"]}
        joined.append({**ends, "loss": nats / tokens if tokens else None, "tokens": tokens})
    return joined
