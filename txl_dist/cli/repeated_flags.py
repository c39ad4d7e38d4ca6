"""Repeated flags that take lists: `--prompt A B` and `--prompt A --prompt B` mean the same.

The library tyro keeps only the values of the last occurrence. It would silently drop all other values, and the text of
a lost `--valid` would become training data. So all values of a list are moved to the last occurrence of its flag before
tyro reads the words. A flag that is given once stays unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from txl_dist.cli.tyro_events import attached, list_arguments
from txl_dist.errors import ConfigError


def join_repeated(words: Sequence[str], target: Any, *, default: Any) -> list[str]:
    """Return the words with the values of each repeated list flag of `target` at the flag's last occurrence.

    `target` is the function or class whose signature defines the flags, and `default` holds its default values. Raises
    ConfigError if one of several occurrences has no value. The reason is probably an unset shell variable.
    """
    if "--" in words:
        end = words.index("--")
    else:
        end = len(words)
    groups = _groups(words[:end])
    counts = Counter(_name(group[0]) for group in groups)
    if max(counts.values(), default=0) < 2:
        return list(words)
    lists = [argument for argument in list_arguments(target, default=default) if argument.is_list]
    values: dict[str, list[str]] = {name: [] for argument in lists for name in argument.names if counts[name] > 1}
    joined: list[str] = []
    for group in groups:
        flag = _name(group[0])
        if flag not in values:
            joined += group
            continue
        _, has_value, value = group[0].partition("=")
        group_values = group[1:]
        if has_value:
            group_values.insert(0, attached(value))
        if not group_values:
            raise ConfigError(
                f"{flag} is given several times, and once without a value. Add the missing value, or remove the flag "
                "without a value."
            )
        values[flag] += group_values
        counts[flag] -= 1
        if counts[flag] == 0:
            joined += [flag, *values[flag]]
    return joined + list(words[end:])


def _groups(words: Sequence[str]) -> list[list[str]]:
    """Return the words in groups. A group is a flag and the words up to the next flag.

    Only the first group may lack a flag.
    """
    groups: list[list[str]] = []
    for word in words:
        # tyro ends a list here too: -5 is a value, -x and --x are flags.
        if not groups or (word.startswith("-") and word.lstrip("-")[:1].isalpha()):
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def _name(flag: str) -> str:
    """Return the name of a flag with hyphens and without its value."""
    return flag.partition("=")[0].replace("_", "-")
