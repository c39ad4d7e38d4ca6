"""Suggestions for a misspelt name: settings in a file or as flags, values of a choice, commands, folders.

Names are compared by difflib, ignoring case and hyphens. A setting (`section.key`) that is written under another
section, or under none, counts as slightly less similar than under its own. So `train.lr` leads to `optim.lr`. Equally
similar names are all suggested. Of equally similar keys in other sections only the first is suggested, so
`model.memory_len` leads to `train.memory_len` and not to the evaluation's. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import SequenceMatcher

LEAST_ALIKE = 0.6
"""Default of the least similarity for a suggestion: 1 means equal, 0 means nothing in common."""
ELSEWHERE = 0.9
"""Factor on the similarity of a key that is written under a wrong section, or under none."""
MAX_LEN = 200
"""Longest name in characters that is compared: the time grows with the length."""
_MAX_SUGGESTIONS = 3
"""Largest number of equally similar names that a message suggests."""


def nearest(name: str, known: Iterable[str], *, least_alike: float = LEAST_ALIKE) -> list[str]:
    """Return the names of `known` that are most similar to `name`; none if all are below `least_alike`.

    A known name with a dot is a setting: it is compared by its key alone too.
    """
    if len(name) > MAX_LEN:
        return []
    plain = _plain(name)
    similarities = {candidate: _similarity(plain, _plain(candidate)) for candidate in known}
    if not similarities:
        return []
    best = max(similarities.values())
    best_ratio, is_by_key = best
    if best_ratio < least_alike:
        return []
    candidates = [candidate for candidate, similarity in similarities.items() if similarity == best]
    if is_by_key:
        return candidates[:1]
    return candidates


def did_you_mean(name: str, known: Iterable[str], *, spell: Callable[[str], str] = str) -> str:
    """Return a question that ends a message, with a leading blank; empty if no name is similar.

    `spell` writes a name as the user would type it. More than three equally similar names are no help, so then the
    text is empty too.
    """
    candidates = nearest(name, known)
    if not 1 <= len(candidates) <= _MAX_SUGGESTIONS:
        return ""
    return f" Did you mean {' or '.join(map(spell, candidates))}?"


def _plain(name: str) -> str:
    """Return a name in lower case with underscores in place of hyphens."""
    return name.lower().replace("-", "_")


def _similarity(name: str, other: str) -> tuple[float, bool]:
    """Return the similarity, and whether it is that of the setting's key alone."""
    whole = SequenceMatcher(None, name, other).ratio()
    if "." not in other:
        return whole, False
    name_key = name.rpartition(".")[2]
    other_key = other.rpartition(".")[2]
    by_key = ELSEWHERE * SequenceMatcher(None, name_key, other_key).ratio()
    return max((whole, False), (by_key, True))
