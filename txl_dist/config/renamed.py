"""Settings that have another name since an earlier version: the one table, and how each spelling is read.

A file, a flag or a saved configuration may use the old name. It means the same, and nothing but this module knows it.
`config_from_dict` reads files and saved configurations; the command line reads its words here before anything else.
The old name in a file or a flag of the user gets one warning per process, which prints the line to write.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from txl_dist.console.echo import echo
from txl_dist.errors import ConfigError


class Renamed(NamedTuple):
    """A setting that has another name than before."""

    old: str
    """`section.key` until the version before."""
    new: str
    """`section.key` now."""
    version: str
    """First version that has the new name."""
    values: tuple[tuple[Any, Any], ...] = ()
    """(old value, new value) of the values that are written in another way too. Others are the same."""

    def new_value(self, value: Any) -> Any:
        """Translate a value of the old setting."""
        for old, new in self.values:
            if value == old:
                return new
        return value

    def old_value(self, value: Any) -> Any:
        """Translate a value of the new setting."""
        for old, new in self.values:
            if value == new:
                return old
        return value


RENAMED: tuple[Renamed, ...] = (
    Renamed("data.document_border", "data.document_mask", "0.3.0", (("carry", False), ("mask", True))),
    Renamed("data.on_damage", "data.on_corrupt", "0.3.0", (("fail", "raise"),)),
    Renamed("optim.ema", "optim.ema_decay", "0.3.0"),
    Renamed("train.stages", "train.phases", "0.3.0"),
    Renamed("train.first_memory", "train.initial_memory", "0.3.0"),
    Renamed("eval.average", "eval.use_ema", "0.3.0"),
    Renamed("guard.max_skipped_in_row", "guard.max_consecutive_skips", "0.3.0"),
    Renamed("guard.check_replicas_every", "guard.check_replicas_every_steps", "0.3.0"),
)
"""Every renamed setting."""
_BY_OLD = {renamed.old: renamed for renamed in RENAMED}
_BY_NEW = {renamed.new: renamed for renamed in RENAMED}


def in_new_names(values: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Return settings by section with each old name replaced by the new one.

    Raises ConfigError naming both spellings if `source` uses both of one setting.
    """
    result: dict[str, Any] = {
        section: dict(settings) if isinstance(settings, Mapping) else settings for section, settings in values.items()
    }
    for renamed in old_names_in(values):
        section, old_key = renamed.old.split(".")
        new_section, new_key = renamed.new.split(".")
        if isinstance(values.get(new_section), Mapping) and new_key in values[new_section]:
            raise ConfigError(_both(renamed, source))
        value = result[section].pop(old_key)
        result.setdefault(new_section, {})[new_key] = renamed.new_value(value)
    return result


def old_names_in(values: Mapping[str, Any]) -> Iterator[Renamed]:
    """Find the renamed settings that settings by section give by their old name."""
    for renamed in RENAMED:
        section, key = renamed.old.split(".")
        if isinstance(values.get(section), Mapping) and key in values[section]:
            yield renamed


def warn_of_old_names(values: Mapping[str, Any], *, source: str) -> None:
    """Print a warning for each old name in settings that the user wrote, with the line to write in its place."""
    for renamed in old_names_in(values):
        section, key = renamed.old.split(".")
        value = renamed.new_value(values[section][key])
        new_section, new_key = renamed.new.split(".")
        _warn(f"{source}: {_since(renamed)} Under [{new_section}] write: {new_key} = {_as_toml(value)}")


def words_in_new_names(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the flags of renamed settings, and their values, in the new spelling.

    Raises ConfigError naming both flags if one setting is given by both. Each old flag gets a warning.
    """
    result: list[str] = []
    renamed: Renamed | None = None  # of the flag whose values follow
    given = {_setting(word) for word in words if word.startswith("--")}
    for word in words:
        if not word.startswith("--"):
            result.append(word if renamed is None else _flag_value(renamed, word))
            continue
        renamed = _BY_OLD.get(_setting(word))
        if renamed is None:
            result.append(word)
            continue
        if renamed.new in given:
            raise ConfigError(_both(renamed, "the command line"))
        _, is_joined, value = word.partition("=")
        flag = f"--{renamed.new.replace('_', '-')}"
        new_word = f"{flag}={_flag_value(renamed, value)}" if is_joined else flag
        _warn(f"{word.partition('=')[0]}: {_since(renamed)} Write: {flag}")
        result.append(new_word)
    return result


def name_since(name: str) -> str:
    """Say how a setting of an old name is named now; nothing for another name."""
    return _since(_BY_OLD[name]) if name in _BY_OLD else ""


def flat_in_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by `section.key`, of any version and not checked, under the names of today."""
    result = {}
    for name, value in values.items():
        renamed = _BY_OLD.get(name)
        if renamed is None:
            result[name] = value
        else:
            result[renamed.new] = renamed.new_value(value)
    return result


def flat_in_old_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by `section.key` under the names, and with the values, of version 0.2."""
    result = {}
    for name, value in values.items():
        renamed = _BY_NEW.get(name)
        if renamed is None:
            result[name] = value
        else:
            result[renamed.old] = renamed.old_value(value)
    return result


def _setting(flag: str) -> str:
    """The `section.key` of a flag, however it spells its hyphens."""
    return flag.partition("=")[0].removeprefix("--").replace("-", "_")


def _flag_value(renamed: Renamed, word: str) -> str:
    return str(renamed.new_value(word))


def _since(renamed: Renamed) -> str:
    return f"{renamed.old} is named {renamed.new} since version {renamed.version}."


def _both(renamed: Renamed, source: str) -> str:
    return f"{source}: {renamed.old} is the old name of {renamed.new}, and both are given. Leave out {renamed.old}."


def _as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_as_toml(entry) for entry in value) + "]"
    return str(value)


@functools.cache
def _warn(text: str) -> None:
    """Print a warning once per process, on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        echo(f"txl: warning: {text}", to=sys.stderr)
