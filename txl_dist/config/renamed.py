"""Settings, flags and other names that were renamed since an earlier version, and how each spelling is read.

A file, a flag or a saved configuration may use the old name. It means the same, and nothing but this module knows it.
`config_from_dict` reads files and saved configurations; the command line reads its words here before anything else.
The old name in a file or a flag of the user gets one warning per process, which prints the line to write.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from txl_dist.console.echo import echo
from txl_dist.console.suggest import nearest
from txl_dist.errors import ConfigError


class Renamed(NamedTuple):
    """A setting that has another name than before."""

    old: str
    """Name (`section.key`) until the version before."""
    new: str
    """Name (`section.key`) since that version."""
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

    def reversed(self) -> Renamed:
        """Return the same change of name the other way round, from today's spelling to the old one."""
        return self._replace(old=self.new, new=self.old, values=tuple((new, old) for old, new in self.values))


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
"""Settings with another name than before."""

RENAMED_FLAGS: dict[str, tuple[Renamed, ...]] = {
    "prepare": (
        Renamed("only_seen", "observed_symbols", "0.3.0"),
        Renamed("sentence_marks", "double_eos", "0.3.0"),
        Renamed("all_splits", "tokenizer_all_splits", "0.3.0"),
        Renamed("part_bytes", "block_bytes", "0.3.0"),
        Renamed("from", "archive", "0.3.0"),
    ),
    "export": (Renamed("average", "ema", "0.3.0"),),
    "serve": (
        Renamed("rows", "max_num_seqs", "0.3.0"),
        Renamed("queue", "max_queue", "0.3.0"),
        Renamed("max_prompt", "max_prompt_len", "0.3.0"),
        Renamed("max_texts", "max_choices", "0.3.0"),
        Renamed("max_body", "max_body_bytes", "0.3.0"),
        Renamed("grace", "shutdown_timeout", "0.3.0"),
        Renamed("memory_age", "memory_ttl", "0.3.0"),
    ),
}
"""Every renamed flag of a command, with underscores. The flags of settings are in `RENAMED`."""

COMMANDS_WITH_SETTINGS = ("train", "launch", "plan", "sweep")
"""Commands whose flags are settings too."""

RENAMED_VARIABLES = (Renamed("TXL_FAULT", "TXL_FAILPOINTS", "0.3.0"),)
"""Every renamed environment variable."""

RENAMED_METHODS = (Renamed("LanguageModel.write", "LanguageModel.stream_batch", "0.3.0"),)
"""Every renamed public method."""

RENAMED_RECORDS = (Renamed("look", "memory", "0.3.0"),)
"""Every renamed kind of record in `metrics.jsonl`."""

RENAMED_EVENTS = (Renamed("stage", "phase", "0.3.0"),)
"""Every renamed event in `metrics.jsonl`."""

RENAMED_KEYS: dict[str, tuple[Renamed, ...]] = {
    "stream": (Renamed("rest", "unread", "0.3.0"),),
    "bundle": (Renamed("document_border", "document_mask", "0.3.0", (("carry", False), ("mask", True))),),
}
"""Every renamed key of a file format: of a corpus in a checkpoint's stream state, and of a bundle's config.json."""

_LEAST_ALIKE = 0.85
"""Least similarity at which an unknown flag is taken for a misspelt old name."""

_BY_OLD = {renamed.old: renamed for renamed in RENAMED}


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


def words_in_new_names(words: Sequence[str], *, command: str = "train") -> list[str]:
    """Return the words of a command with renamed flags, and their values, in the new spelling.

    Raises ConfigError naming both flags if both spellings of one flag are given. Each old flag gets a warning.
    """
    by_old = _flags_by_old(command)
    result: list[str] = []
    renamed: Renamed | None = None  # of the flag whose values follow
    given = {_setting(word) for word in words if word.startswith("--")}
    for word in words:
        if not word.startswith("--"):
            result.append(word if renamed is None else _flag_value(renamed, word))
            continue
        renamed = by_old.get(_setting(word))
        if renamed is None:
            result.append(word)
            continue
        if renamed.new in given:
            raise ConfigError(_both(renamed, "the command line"))
        _, is_joined, value = word.partition("=")
        flag = _flag(renamed.new)
        if is_joined:
            new_word = f"{flag}={_flag_value(renamed, value)}"
        else:
            new_word = flag
        _warn(f"{word.partition('=')[0]}: {_since(renamed)} Write: {flag}")
        result.append(new_word)
    return result


def new_keyword(name: str, *, command: str) -> str:
    """Return the new name of a keyword argument, without a warning; a name that is not renamed stays."""
    by_old = _flags_by_old(command)
    if name in by_old:
        return by_old[name].new
    return name


def keywords_in_old_names(keywords: Mapping[str, Any], *, command: str) -> dict[str, Any]:
    """Return keyword arguments, named like the flags of a command, under the names of version 0.2."""
    return _with_new_keys(keywords, [renamed.reversed() for renamed in RENAMED_FLAGS[command]])


def new_flag_of_similar(name: str, known: Collection[str]) -> str:
    """Return the new name of a renamed flag whose old name is similar to an unknown one; empty if there is none.

    Only flags in `known` are returned.
    """
    new_names: dict[str, str] = {}
    for renamed in RENAMED:
        new_names[renamed.old] = renamed.new
    for flags in RENAMED_FLAGS.values():
        for renamed in flags:
            new_names[renamed.old] = renamed.new
    possible = {old: new for old, new in new_names.items() if new in known}
    similar = nearest(name, possible, least_alike=_LEAST_ALIKE)
    if similar:
        return possible[similar[0]]
    return ""


def rename_variables() -> None:
    """Set each renamed environment variable that only has its old name, with a warning.

    Raises ConfigError naming both if both are set to different values.
    """
    for renamed in RENAMED_VARIABLES:
        old_value = os.environ.get(renamed.old, "")
        if not old_value:
            continue
        if os.environ.get(renamed.new, old_value) != old_value:
            raise ConfigError(_both(renamed, "the environment"))
        _warn(f"{_since(renamed)} Set: {renamed.new}={shlex.quote(old_value)}")
        os.environ[renamed.new] = old_value


def warn_of_old_method(name: str) -> None:
    """Print a warning, once, that a public method, `Class.name`, has another name now."""
    for renamed in RENAMED_METHODS:
        if renamed.old == name:
            _warn(_since(renamed))


def name_since(name: str) -> str:
    """Say how a setting of an old name is named now; nothing for another name."""
    if name in _BY_OLD:
        return _since(_BY_OLD[name])
    return ""


def flat_in_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by `section.key`, of any version and not checked, under the names of today."""
    return _with_new_keys(values, RENAMED)


def record_in_new_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of `metrics.jsonl`, of any version, with the kind and the event that it has today."""
    result = dict(record)
    for key, table in (("kind", RENAMED_RECORDS), ("event", RENAMED_EVENTS)):
        for renamed in table:
            if record.get(key) == renamed.old:
                result[key] = renamed.new
    return result


def keys_in_new_names(values: Mapping[str, Any], *, of: str) -> dict[str, Any]:
    """Return an object of a file format, of any version, under the keys of today; `of` is a row of `RENAMED_KEYS`."""
    return _with_new_keys(values, RENAMED_KEYS[of])


def flat_in_old_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by `section.key` under the names, and with the values, of version 0.2."""
    return _with_new_keys(values, [renamed.reversed() for renamed in RENAMED])


def _with_new_keys(values: Mapping[str, Any], table: Iterable[Renamed]) -> dict[str, Any]:
    """Return the values in their order, with each key and value that the table renames in its new spelling."""
    by_old = {renamed.old: renamed for renamed in table}
    result = {}
    for key, value in values.items():
        renamed = by_old.get(key)
        if renamed is None:
            result[key] = value
        else:
            result[renamed.new] = renamed.new_value(value)
    return result


def _flags_by_old(command: str) -> dict[str, Renamed]:
    """Return the renamed flags of a command by their old names, with the `no_` forms of switches."""
    if command in COMMANDS_WITH_SETTINGS:
        by_old = dict(_BY_OLD)
    else:
        by_old = {}
    for renamed in RENAMED_FLAGS.get(command, ()):
        by_old[renamed.old] = renamed
        by_old[f"no_{renamed.old}"] = renamed._replace(old=f"no_{renamed.old}", new=f"no_{renamed.new}")
    return by_old


def _flag(name: str) -> str:
    """Return a name with underscores as a flag."""
    return f"--{name.replace('_', '-')}"


def _setting(flag: str) -> str:
    """Return the `section.key` of a flag, with hyphens or underscores."""
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
