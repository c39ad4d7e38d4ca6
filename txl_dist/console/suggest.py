"""Suggestions for a misspelt name: settings in a file or as flags, values of a choice, commands, folders.

Names are compared by difflib, ignoring case and hyphens. A setting (`section.key`) can be written under a wrong section
or under none. Such a setting counts as slightly less similar than a setting under its own section. So `train.lr` gives
the suggestion `optim.lr`. All equally similar names are suggested. The exception is a key that several other sections
have: only the first of these settings is suggested. So `model.memory_len` gives `train.memory_len` and not the setting
of the evaluation. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import SequenceMatcher

LEAST_ALIKE = 0.6
"""Minimum similarity for a suggestion, by default. 1 means equal, 0 means nothing in common."""
ELSEWHERE = 0.9
"""Factor by which the similarity is multiplied if a key is written under a wrong section, or under none."""
MAX_LEN = 200
"""Maximum length in characters of a name that is compared. The time of a comparison grows with the length."""
_MAX_SUGGESTIONS = 3
"""Maximum number of equally similar names that a message suggests."""


def nearest(name: str, known: Iterable[str], *, least_alike: float = LEAST_ALIKE) -> list[str]:
    """Return the names of `known` that are most similar to `name`. The list is empty if all are less similar than
    `least_alike`.

    A known name with a dot is a setting (`section.key`). The key without its section is compared too. If only keys are
    similar, the first of the most similar settings is returned alone.
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
    """Return a question that ends a message, with a leading blank. The text is empty if no name is similar.

    `spell` writes a name as the user would type it. The text is also empty if more than three names are equally
    similar, because so many names do not help.
    """
    candidates = nearest(name, known)
    if not 1 <= len(candidates) <= _MAX_SUGGESTIONS:
        return ""
    return f" Did you mean {' or '.join(map(spell, candidates))}?"


def _plain(name: str) -> str:
    """Return a name in lower case with underscores in place of hyphens."""
    return name.lower().replace("-", "_")


def _similarity(name: str, other: str) -> tuple[float, bool]:
    """Return (similarity of two names, True if only the keys were compared, without their sections)."""
    whole = SequenceMatcher(None, name, other).ratio()
    if "." not in other:
        return whole, False
    name_key = name.rpartition(".")[2]
    other_key = other.rpartition(".")[2]
    by_key = ELSEWHERE * SequenceMatcher(None, name_key, other_key).ratio()
    return max((whole, False), (by_key, True))
