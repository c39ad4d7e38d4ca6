"""Ids in order of frequency: id 0 is the most frequent symbol of the training split.

Adaptive softmax cuts the vocabulary at ids, so an id must say how frequent its symbol is. That holds for
end-of-text too: it is as frequent as there are documents. Ties fall by the symbol itself, so that the same text
gives the same ids on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping


def by_frequency(counts: Mapping[str, int]) -> list[str]:
    """The symbols, the most frequent one first, equally frequent ones in code point order."""
    return sorted(counts, key=lambda symbol: (-counts[symbol], symbol))


def most_frequent(counts: Mapping[str, int], *, max_size: int, min_frequency: int) -> dict[str, int]:
    """At most `max_size` symbols (0: no limit) that occur `min_frequency` times or more."""
    ranked = [symbol for symbol in by_frequency(counts) if counts[symbol] >= min_frequency]
    return {symbol: counts[symbol] for symbol in (ranked[:max_size] if max_size else ranked)}
