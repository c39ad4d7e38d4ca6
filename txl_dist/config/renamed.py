"""Settings, flags and other names that were renamed since an earlier version, and how the old names are read.

A file, a flag or a saved configuration may use an old name, which means the same as the new one. Only this module knows
old names. `config_from_dict` calls this module for files and saved configurations. The command line calls this module
for its words before it parses them. If a user's file or flag has an old name, one warning per process shows the line
with the new name.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from txl_dist.console.echo import echo
from txl_dist.console.formatting import flag_of
from txl_dist.console.suggest import nearest
from txl_dist.errors import ConfigError


class Renamed(NamedTuple):
    """Setting that had another name in earlier versions."""

    old: str
    """Name (`section.key`) that earlier versions use."""
    new: str
    """Name (`section.key`) that this version uses."""
    version: str
    """First version that has the new name."""
    values: tuple[tuple[Any, Any], ...] = ()
    """Pairs (old value, new value) for values that were renamed too. All other values are unchanged."""

    def new_value(self, value: Any) -> Any:
        """Translate a value under the old name to the value under the new name."""
        for old, new in self.values:
            if value == old:
                return new
        return value

    def reversed(self) -> Renamed:
        """Return the opposite change of names and values, from the new spelling to the old spelling."""
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
"""Settings that had other names in earlier versions."""

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
"""Renamed flags of each command, with underscores. Renamed flags of settings are in `RENAMED`."""

COMMANDS_WITH_SETTINGS = ("train", "launch", "plan", "sweep")
"""Commands that take settings as flags, in addition to their own flags."""

RENAMED_VARIABLES = (Renamed("TXL_FAULT", "TXL_FAILPOINTS", "0.3.0"),)
"""Environment variables that were renamed."""

RENAMED_METHODS = (Renamed("LanguageModel.write", "LanguageModel.stream_batch", "0.3.0"),)
"""Public methods that were renamed."""

RENAMED_RECORDS = (Renamed("look", "memory", "0.3.0"),)
"""Kinds of records in `metrics.jsonl` that were renamed."""

RENAMED_EVENTS = (Renamed("stage", "phase", "0.3.0"),)
"""Events in `metrics.jsonl` that were renamed."""

RENAMED_KEYS: dict[str, tuple[Renamed, ...]] = {
    "stream": (Renamed("rest", "unread", "0.3.0"),),
    "bundle": (Renamed("document_border", "document_mask", "0.3.0", (("carry", False), ("mask", True))),),
}
"""Renamed keys of file formats: of a corpus in a checkpoint's stream state, and of a bundle's config.json."""

_LEAST_ALIKE = 0.85
"""Least similarity at which an unknown flag is taken for a misspelt old name."""

_BY_OLD = {renamed.old: renamed for renamed in RENAMED}


def in_new_names(values: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Return settings by section, where each old name is replaced by the new name.

    Raises ConfigError if `source` uses both names of one setting.
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
    """Return the renamed settings whose old names occur in settings by section."""
    for renamed in RENAMED:
        section, key = renamed.old.split(".")
        if isinstance(values.get(section), Mapping) and key in values[section]:
            yield renamed


def warn_of_old_names(values: Mapping[str, Any], *, source: str) -> None:
    """Print a warning for each old name in settings that the user wrote. The warning shows the line with the new
    name."""
    for renamed in old_names_in(values):
        section, key = renamed.old.split(".")
        value = renamed.new_value(values[section][key])
        new_section, new_key = renamed.new.split(".")
        _warn(f"{source}: {_since(renamed)} Under [{new_section}] write: {new_key} = {_as_toml(value)}")


def words_in_new_names(words: Sequence[str], *, command: str = "train") -> list[str]:
    """Return the words of a command, where renamed flags and their values have the new spelling.

    A warning is printed for each old flag. Raises ConfigError if both spellings of one flag are given.
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
        flag = flag_of(renamed.new)
        if is_joined:
            new_word = f"{flag}={_flag_value(renamed, value)}"
        else:
            new_word = flag
        _warn(f"{word.partition('=')[0]}: {_since(renamed)} Write: {flag}")
        result.append(new_word)
    return result


def new_keyword(name: str, *, command: str) -> str:
    """Return the new name of a keyword argument, without a warning.

    A name that was not renamed is returned unchanged.
    """
    by_old = _flags_by_old(command)
    if name in by_old:
        return by_old[name].new
    return name


def keywords_in_old_names(keywords: Mapping[str, Any], *, command: str) -> dict[str, Any]:
    """Return the keyword arguments of a command with the names of version 0.2. Keyword arguments have the names of the
    command's flags."""
    return _with_new_keys(keywords, [renamed.reversed() for renamed in RENAMED_FLAGS[command]])


def new_flag_of_similar(name: str, known: Collection[str]) -> str:
    """Return the new name of a renamed flag whose old name is similar to an unknown flag, or an empty text.

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
    """Set each new environment variable to the value of the old variable, if only the old variable is set. Prints a
    warning.

    Raises ConfigError if the old and the new variable have different values.
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
    """Print a warning, once, that a public method (`Class.name`) has a new name."""
    for renamed in RENAMED_METHODS:
        if renamed.old == name:
            _warn(_since(renamed))


def name_since(name: str) -> str:
    """Describe the new name of a setting that is given by its old name. Returns an empty text for any other name."""
    if name in _BY_OLD:
        return _since(_BY_OLD[name])
    return ""


def flat_in_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by `section.key` under the names of this version.

    The settings may have the names of any version. Their values are not checked.
    """
    return _with_new_keys(values, RENAMED)


def record_in_new_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of `metrics.jsonl` with the kind and the event of this version.

    The file may be of any version.
    """
    result = dict(record)
    for key, table in (("kind", RENAMED_RECORDS), ("event", RENAMED_EVENTS)):
        for renamed in table:
            if record.get(key) == renamed.old:
                result[key] = renamed.new
    return result


def keys_in_new_names(values: Mapping[str, Any], *, of: str) -> dict[str, Any]:
    """Return an object of a file format under the keys of this version. The file may be of any version.

    `of` names the format: a row of `RENAMED_KEYS`.
    """
    return _with_new_keys(values, RENAMED_KEYS[of])


def flat_in_old_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by `section.key` under the names, and with the values, of version 0.2."""
    return _with_new_keys(values, [renamed.reversed() for renamed in RENAMED])


def _with_new_keys(values: Mapping[str, Any], table: Iterable[Renamed]) -> dict[str, Any]:
    """Return values in the same order, where each renamed key and value has its new spelling."""
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
    """Return the renamed flags of a command by their old names. Switches also have their `no_` forms."""
    if command in COMMANDS_WITH_SETTINGS:
        by_old = dict(_BY_OLD)
    else:
        by_old = {}
    for renamed in RENAMED_FLAGS.get(command, ()):
        by_old[renamed.old] = renamed
        by_old[f"no_{renamed.old}"] = renamed._replace(old=f"no_{renamed.old}", new=f"no_{renamed.new}")
    return by_old


def _setting(flag: str) -> str:
    """Return the `section.key` of a flag, which may be spelt with hyphens or underscores."""
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
    """Print a warning once per process, and only on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        echo(f"txl: warning: {text}", to=sys.stderr)
