"""What a misspelt name was meant to be: settings in a file or as flags, values of a choice, verbs.

Names are compared by the number of slips between them: a character left out, put in, replaced, or two neighbours
swapped. A setting (`section.key`) written in another section, or without any, counts as little more than one slip, so
that `train.lr` leads to `optim.lr`. Names that are equally near are all given, but of sections only the first, so that
`model.memory_len` leads to `train.memory_len` and not to that of the evaluation. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

ELSEWHERE = 1.5
"""Slips that a right key under a wrong section, or under none, counts as: one slip in its own section is nearer."""
MAX_LEN = 200
"""Of a name that is compared: the time grows with it."""
MAX_SLIPS = 2.5
MAX_SLIPS_SHARE = 0.45
"""Nothing is suggested that is further away than both, the latter as a share of the length."""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names of `known` that `name` resembles most; none if it resembles nothing.

    A known name with a dot is a setting: it may also be reached by its key alone. Case and hyphens do not count.
    """
    if len(name) > MAX_LEN:
        return []
    distances = {other: _distance(_plain(name), other) for other in known}
    least = min(distances.values(), default=MAX_SLIPS + 1)
    if least > max(MAX_SLIPS, MAX_SLIPS_SHARE * len(name)):
        return []
    near = [other for other, distance in distances.items() if distance == least]
    return near if least == int(least) else near[:1]


def did_you_mean(name: str, known: Iterable[str], *, spell: Callable[[str], str] = str) -> str:
    """A question that ends a message, beginning with a blank; empty if nothing is near. `spell`: how to write a name.

    More than three equally near names are no help and are left out.
    """
    near = nearest(name, known)
    return f" Did you mean {' or '.join(map(spell, near))}?" if 1 <= len(near) <= 3 else ""


def _distance(name: str, other: str) -> float:
    """Of a known name; not whole if its key was found without its section."""
    whole = slips(name, _plain(other))
    if "." not in other:
        return whole
    by_key = ELSEWHERE + slips(name.rpartition(".")[2], _plain(other.rpartition(".")[2]))
    return min(whole if "." in name else whole + ELSEWHERE, by_key)


def slips(one: str, other: str) -> int:
    """Fewest characters to leave out, put in, replace, or swap with a neighbour to make one string of the other."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        before, last, row = row, before, [i]
        for j, wanted in enumerate(other, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
