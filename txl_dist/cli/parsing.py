"""How a command reads its words: tyro makes flags and help of a signature; what it refuses becomes one line.

The line says what is wrong, where, and what was probably meant. `tyro_events` says what tyro refuses.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

from txl_dist.cli.repeated_flags import join_repeated
from txl_dist.cli.tyro_events import (
    Argument,
    InvalidChoice,
    InvalidValue,
    MissingArguments,
    Refusal,
    UnknownWords,
    WordsRefusedError,
    list_arguments,
    run_tyro,
)
from txl_dist.config.foreign_names import find_counterpart
from txl_dist.config.load import choices_of, explain_flag, lower, setting_names
from txl_dist.console.echo import echo
from txl_dist.console.suggest import did_you_mean
from txl_dist.distributed.rank_environment import RUN_ALONE, format_ranks, read_rank_environment
from txl_dist.errors import ConfigError
from txl_dist.io.hub import address_of, local_model
from txl_dist.train.monitoring.preemption import launchers

_LEAST_OF_A_NAME = 3
"""Characters of a flag that a longer, unknown one is taken for: --output-folder for --out."""

_FURTHER_WORDS = {
    "txl evaluate": "Score one model at a time; its corpus is --data.",
    "txl inspect": "Look into one path at a time.",
    "txl report": "Report one run at a time; `txl compare` compares several.",
    "txl serve": "Serve one model; its address is --host and --port.",
    "txl verify": "Verify one path at a time.",
    "txl train": "Name one configuration file; settings are flags.",
}
"""Remedy for a word that a command does not take, by command."""


def parse(target: Any, words: Sequence[str], *, prog: str, **options: Any) -> Any:
    """What tyro makes of the words; a function is not called yet. Raises ConfigError, in one line, for wrong ones."""
    default = options.get("default", tyro.MISSING_NONPROP)
    try:
        return run_tyro(target, join_repeated(words, target, default=default), prog=prog, **options)
    except WordsRefusedError as error:
        arguments = list_arguments(target, default=default)
        raise ConfigError(_explain(error.refusal, words, arguments=arguments, prog=prog)) from None


def call(verb: Callable[..., object], words: Sequence[str], *, prog: str) -> None:
    """Read the words of a verb and run it. What it writes to stderr is its own."""

    @functools.wraps(verb)
    def bound(*values: Any, **named: Any) -> Callable[[], object]:
        return functools.partial(verb, *values, **named)

    parse(bound, words, prog=prog)()


def local_source(path: str | Path) -> Path:
    """The path itself, or the folder of a model of the Hub, which is downloaded unless it is in the cache. Raises
    TxlError."""
    address = address_of(path)
    if address is not None and os.environ.get("RANK", "0") == "0":
        announce(f"looking for {address} on the Hub")
    return local_model(path)


def announce(what: str) -> None:
    """Say what begins, before torch is imported, which takes seconds."""
    echo(f"{what} ...", to=sys.stderr)


def announce_ranks(what: str = "") -> None:
    """Say what begins, on rank 0, for a command whose ranks work together. A rank that no launcher has started says
    which ranks it will wait for, and how to run alone.

    Raises ConfigError if the variables of the environment that describe a job contradict each other.
    """
    place = read_rank_environment(os.environ)
    if what and place.rank == 0:
        announce(what)
    if place.world_size > 1 and not launchers():
        others = format_ranks([rank for rank in range(place.world_size) if rank != place.rank])
        echo(
            f"txl: the variables WORLD_SIZE and RANK make this rank {place.rank} of {place.world_size}. It waits at "
            f"{place.address} for rank {others}. {RUN_ALONE}",
            to=sys.stderr,
        )


def complete_switches(words: Sequence[str]) -> list[str]:
    """The words with True after each setting that is true or false and has no value: --checkpoint.keep_best."""
    completed: list[str] = []
    for number, word in enumerate(words):
        completed.append(word)
        is_bare = word.startswith("--") and "=" not in word and _name(word) in setting_names()
        following = words[number + 1] if number + 1 < len(words) else "--"
        if is_bare and choices_of(_name(word)) == ("True", "False") and following.startswith("--"):
            completed.append("True")
    return completed


def check_typos(words: Sequence[str], known: Sequence[str], *, prog: str) -> None:
    """Refuse unknown flags, impossible choices of settings and settings without dashes, all at once, in a line each.

    `known` are names, of flags and of settings, with underscores. Raises ConfigError.
    """
    problems = []
    for number, word in enumerate(words):
        name, (flag, is_joined, value) = _name(word), word.partition("=")
        choices = choices_of(name) if name in setting_names() else ()
        if not is_joined:
            value = "".join(words[number + 1 : number + 2])
        is_flag = word.startswith("--")
        if is_flag and name and name not in known:
            problems.append(unknown_flag(flag, known, prog=prog))
        elif not is_flag and is_joined and name in setting_names():
            problems.append(_stray_word(word, known, prog=prog))
        elif is_flag and choices and value not in choices and value[:1] not in ("", "-"):
            problems.append(f"{flag} {value}: it can be {', '.join(choices)}.{did_you_mean(value, choices)}")
    if problems:
        raise ConfigError(*problems)


def unknown_flag(flag: str, known: Sequence[str], *, prog: str) -> str:
    """What to say of a flag that does not exist. `known` are names, of flags and of settings, with underscores."""
    name = _name(flag)
    if switched_off := _switch_off(name, known):
        return f"unknown flag {flag}. Did you mean --{switched_off.replace('_', '-')} False?"
    if counterpart := find_counterpart(name, known):
        return f"unknown flag {flag}.{counterpart.hint(spell=_spelt)}"
    lacks = " (its section is missing)" if "." not in name and any(one.endswith(f".{name}") for one in known) else ""
    begun = [one for one in known if len(one) >= _LEAST_OF_A_NAME and name.startswith(one)]
    longest = max(begun, key=len, default="")
    hint = did_you_mean(name, known, spell=_spelt) or did_you_mean(longest, begun, spell=_spelt)
    return f"unknown flag {flag}{lacks}.{hint or f' See {prog} --help.'}"


def _switch_off(name: str, known: Sequence[str]) -> str:
    """The setting that `no_section.key` or `section.no_key` switches off; empty if it is none."""
    for setting in known:
        if "." in setting and setting in (name.removeprefix("no_"), name.replace(".no_", ".", 1)):
            return setting if choices_of(setting) == ("True", "False") else ""
    return ""


def _stray_word(word: str, known: Sequence[str], *, prog: str, has_flag: bool = False) -> str:
    """What to say of a word that is neither a flag nor the value of one."""
    name, is_joined, value = word.lstrip("-").partition("=")
    plain = name.replace("-", "_")
    if plain in known:
        return f"{word} lacks its dashes. Write --{plain.replace('_', '-')}{f' {value}' if is_joined else ''}."
    if is_joined:
        counterpart = find_counterpart(plain, known)
        hint = counterpart.hint(spell=_spelt) if counterpart else did_you_mean(plain, known, spell=_spelt)
        return f"{word} is no flag.{hint or f' See {prog} --help.'}"
    reason = "it takes no further words" if not has_flag else "the flag before it takes no further value"
    remedy = _FURTHER_WORDS.get(prog, "Leave it out.")
    return f"{prog} cannot use {word!r}: {reason}. {remedy} See {prog} --help."


def _spelt(name: str, value: str = "") -> str:
    """A flag as `--help` has it, and a setting as files have it too. With the value that it should have, if any."""
    flag = "--" + name.replace("_", "-")
    if value:
        return f"{flag} {value}"
    return f"{flag} ({name})" if "." in name and "_" in name else flag


def _explain(refusal: Refusal, words: Sequence[str], *, arguments: Sequence[Argument], prog: str) -> str:
    """The message for words that tyro refused. `arguments`: what the command takes."""
    known = [_name(spelling) for argument in arguments for spelling in argument.names]
    check_typos(words, [*known, "help"], prog=prog)
    match refusal:
        case UnknownWords():
            return _unknown_words(refusal.words, words, arguments=arguments, known=known, prog=prog)
        case MissingArguments():
            return _missing(refusal.arguments, words, prog=prog)
        case InvalidChoice():
            where, choices = " ".join([*refusal.argument.names[:1], refusal.value]), refusal.argument.choices
            return f"{where}: it can be {', '.join(choices)}.{did_you_mean(refusal.value, choices)}"
        case InvalidValue():
            return _invalid_value(refusal.argument, words)
        case _:
            if problems := _settings_out_of_range(words):
                raise ConfigError(*problems)
            return f"{refusal.reason.rstrip('.')}. See {prog} --help."


def _unknown_words(
    unknown: Sequence[str], words: Sequence[str], *, arguments: Sequence[Argument], known: Sequence[str], prog: str
) -> str:
    """Return the message for words that the command does not take. The first word decides."""
    word = unknown[0]
    having_choice = [argument.names[0] for argument in arguments if word in argument.choices and argument.names]
    if re.match("-[A-Za-z]", word) and _name(word) not in known:
        return unknown_flag(word.partition("=")[0], known, prog=prog)
    if prog == "txl generate" and not word.startswith("-") and "=" not in word:
        text = " ".join(itertools.takewhile(lambda other: not other.startswith("-"), unknown))
        return (
            f"txl generate cannot use {word!r}: it takes no further words. Did you mean --prompt {shlex.quote(text)}?"
        )
    if _name(word) in known and "=" not in word and unknown[1:]:
        return f"{word} {unknown[1]} lacks its dashes. Write --{_name(word).replace('_', '-')} {unknown[1]}."
    if len(having_choice) == 1:
        return f"{prog} cannot use {word!r}: it takes no further words. Did you mean {having_choice[0]} {word}?"
    at = words.index(word) if word in words else 0
    return _stray_word(word, known, prog=prog, has_flag=at > 0 and words[at - 1].startswith("--"))


def _name(word: str) -> str:
    """Of a flag, with underscores and without its value."""
    return word.partition("=")[0].lstrip("-").replace("-", "_")


def _missing(missing: Sequence[Argument], words: Sequence[str], *, prog: str) -> str:
    """Required arguments that were not given; a folder for --out may have been given without its flag."""
    wanted = []
    for argument in missing:
        meaning = lower(argument.help.rstrip("."))
        wanted.append(f"{argument.names[0]} {argument.metavar} ({meaning})" if argument.names else meaning)
    places = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not word.startswith("-") and not (before.startswith("--") and "=" not in before)
    ]
    lacks_out = any("--out" in argument.names for argument in missing)
    hint = f" Did you mean --out {places[-1]}?" if lacks_out and len(places) > 1 else ""
    return f"missing: {'; '.join(wanted)}.{hint or f' See {prog} --help.'}"


def _invalid_value(argument: Argument, words: Sequence[str]) -> str:
    """A flag whose value is missing, or is nothing that it takes."""
    flag = argument.names[0] if argument.names else argument.metavar
    values = _values_of(flag, words)
    if _name(flag) in setting_names():
        return explain_flag(_name(flag), values)
    meaning = f" ({lower(argument.help.rstrip('.'))})" if argument.help else ""
    if not values:
        return f"{flag} needs a value{meaning}."
    if argument.value_kind == "text":
        return f"{flag} {' '.join(values)}: it takes no such value{meaning}."
    rule = f"{argument.value_kind}s" if argument.takes == "many" else f"a {argument.value_kind}"
    return f"{flag} {' '.join(values)}: it must be {rule}{meaning}."


def _settings_out_of_range(words: Sequence[str]) -> list[str]:
    """Every setting among the words whose value is out of range, a line each."""
    given = [word.partition("=")[0] for word in words if word.startswith("--") and _name(word) in setting_names()]
    lines = [explain_flag(_name(flag), _values_of(flag, words)) for flag in given]
    return list(dict.fromkeys(filter(None, lines)))


def _values_of(flag: str, words: Sequence[str]) -> list[str]:
    """What stands behind a flag, in either spelling; the last time it is given."""
    values: list[str] = []
    for number, word in enumerate(words):
        name, is_joined, value = word.partition("=")
        if name.replace("_", "-") == flag.replace("_", "-"):
            rest = list(words[number + 1 :])
            end = next((at for at, later in enumerate(rest) if later.startswith("--")), len(rest))
            values = [value] if is_joined else rest[:end]
    return values
