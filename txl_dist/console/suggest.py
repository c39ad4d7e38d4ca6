"""What a misspelt name was meant to be: settings in a file or as flags, values of a choice, verbs, folders.

Names are compared by difflib, whatever their case and hyphens. A setting (`section.key`) written in another section, or
without any, counts as a little less alike than in its own, so that `train.lr` leads to `optim.lr`. Names that are
equally alike are all given, but of sections only the first, so that `model.memory_len` leads to `train.memory_len` and
not to that of the evaluation. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import SequenceMatcher

LEAST_ALIKE = 0.6
"""Nothing is suggested that is less alike, unless told otherwise: 1 is equal, 0 has nothing in common."""
ELSEWHERE = 0.9
"""Of its likeness a right key under a wrong section, or under none, has so much."""
MAX_LEN = 200
"""Of a name that is compared: the time grows with it."""


def nearest(name: str, known: Iterable[str], *, least_alike: float = LEAST_ALIKE) -> list[str]:
    """The names of `known` that `name` resembles most; none if it resembles nothing so much.

    A known name with a dot is a setting: it may also be reached by its key alone.
    """
    plain = name.lower().replace("-", "_")
    likeness = {other: _likeness(plain, other.lower().replace("-", "_")) for other in known if len(name) <= MAX_LEN}
    most, is_elsewhere = max(likeness.values(), default=(0.0, False))
    near = [other for other, found in likeness.items() if found == (most, is_elsewhere)]
    return [] if most < least_alike else near[:1] if is_elsewhere else near


def did_you_mean(name: str, known: Iterable[str], *, spell: Callable[[str], str] = str) -> str:
    """A question that ends a message, beginning with a blank; empty if nothing is near. `spell`: how to write a name.

    More than three equally near names are no help and are left out.
    """
    near = nearest(name, known)
    return f" Did you mean {' or '.join(map(spell, near))}?" if 1 <= len(near) <= 3 else ""


def _likeness(name: str, other: str) -> tuple[float, bool]:
    """(how alike, whether by the key of a setting alone)."""
    whole = SequenceMatcher(None, name, other).ratio()
    if "." not in other:
        return whole, False
    by_key = ELSEWHERE * SequenceMatcher(None, name.rpartition(".")[2], other.rpartition(".")[2]).ratio()
    return max((whole, False), (by_key, True))
