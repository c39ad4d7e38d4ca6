"""Parsing of a command's words. The library tyro makes flags and help from a signature.

If tyro refuses words, the message is one line. It says what is wrong, where, and what was probably meant. `tyro_events`
finds out why tyro refuses words.
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

from txl_dist.artifacts import FROM_MIRROR
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
from txl_dist.config.renamed import new_flag_of_similar
from txl_dist.console.echo import echo
from txl_dist.console.formatting import flag_of
from txl_dist.console.suggest import did_you_mean
from txl_dist.distributed.rank_environment import RUN_ALONE, format_ranks, read_rank_environment
from txl_dist.errors import ConfigError
from txl_dist.io.hub import address_of, local_model
from txl_dist.train.monitoring.preemption import launchers

_LEAST_OF_A_NAME = 3
"""Least length, in characters, of a flag that is suggested for a longer unknown flag. For example, --out is suggested
for --output-folder."""

_SWITCH_CHOICES = ("True", "False")
"""Choices of a setting whose value is true or false."""

_FURTHER_WORDS = {
    "txl evaluate": "Score one model at a time, and give the corpus with --data.",
    "txl inspect": "Inspect one path at a time.",
    "txl report": "Report one run at a time. To compare several runs: `txl compare`.",
    "txl serve": "Serve one model, and set the server's address with --host and --port.",
    "txl verify": "Verify one path at a time.",
    "txl train": "Name one configuration file, and give settings as flags (--section.key VALUE).",
}
"""Last sentence of the message for a superfluous word on the command line, by the name of the command."""


def parse(target: Any, words: Sequence[str], *, prog: str, **options: Any) -> Any:
    """Parse the words of a command by the signature of `target`, a function or a class. Returns tyro's result.

    Raises ConfigError, in one line, for words that tyro refuses.
    """
    default = options.get("default", tyro.MISSING_NONPROP)
    try:
        return run_tyro(target, join_repeated(words, target, default=default), prog=prog, **options)
    except WordsRefusedError as error:
        arguments = list_arguments(target, default=default)
        raise ConfigError(_explain(error.refusal, words, arguments=arguments, prog=prog)) from None


def call(command: Callable[..., object], words: Sequence[str], *, prog: str) -> None:
    """Parse the words of a command by its signature, and run the command with them."""

    @functools.wraps(command)
    def bound(*values: Any, **named: Any) -> Callable[[], object]:
        return functools.partial(command, *values, **named)

    parse(bound, words, prog=prog)()


def local_source(path: str | Path) -> Path:
    """Return a local path unchanged, or download a model of the Hugging Face Hub and return its local folder.

    A model that is in the cache is not downloaded again. Raises TxlError, also for any other URL.
    """
    address = address_of(path)
    url = re.fullmatch(r"(\w+):/+(.+)", str(path))  # a Path has only one of the two slashes
    if address is None and url is not None and not os.path.lexists(path):
        raise ConfigError(
            f"{url[1]}://{url[2]} is a URL, but this command reads local folders and hf://OWNER/NAME. Copy the folder "
            f"to this machine. {FROM_MIRROR}"
        )
    if address is not None and os.environ.get("RANK", "0") == "0":
        announce(f"looking for {address} on the Hub")
    return local_model(path)


def announce(what: str) -> None:
    """Print to standard error what is starting. Call this function before torch is imported, because the import takes
    seconds."""
    echo(f"{what} ...", to=sys.stderr)


def announce_ranks(what: str = "") -> None:
    """Print on rank 0 what is starting, for a command whose ranks work together.

    A rank that no launcher has started prints which ranks it will wait for, and how to run without other ranks. Raises
    ConfigError if the environment variables of the job contradict each other.
    """
    place = read_rank_environment(os.environ)
    if what and place.rank == 0:
        announce(what)
    if place.world_size > 1 and not launchers():
        others = format_ranks([rank for rank in range(place.world_size) if rank != place.rank])
        echo(
            f"txl: the variables WORLD_SIZE and RANK make this process rank {place.rank} of {place.world_size}. The "
            f"process waits at {place.address} for {others}. {RUN_ALONE}",
            to=sys.stderr,
        )


def complete_switches(words: Sequence[str]) -> list[str]:
    """Return the words with True after each setting that is a switch and has no value.

    For example, `--checkpoint.keep_best` becomes `--checkpoint.keep_best True`.
    """
    completed: list[str] = []
    for number, word in enumerate(words):
        completed.append(word)
        is_bare = word.startswith("--") and "=" not in word and _name(word) in setting_names()
        if not is_bare or choices_of(_name(word)) != _SWITCH_CHOICES:
            continue
        is_last = number + 1 == len(words)
        if is_last or words[number + 1].startswith("--"):
            completed.append("True")
    return completed


def check_typos(words: Sequence[str], known: Sequence[str], *, prog: str) -> None:
    """Refuse unknown flags, impossible choices of settings, and settings without dashes.

    The message has a line for each mistake. `known` holds the names of flags and settings with underscores. Raises
    ConfigError.
    """
    problems = []
    for number, word in enumerate(words):
        name = _name(word)
        flag, is_joined, value = word.partition("=")
        if not is_joined:
            value = "".join(words[number + 1 : number + 2])
        is_setting = name in setting_names()
        if not word.startswith("--"):
            if is_joined and is_setting:
                problems.append(_stray_word(word, known, prog=prog))
            continue
        if name and name not in known:
            problems.append(unknown_flag(flag, known, prog=prog))
            continue
        if is_setting:
            choices = choices_of(name)
        else:
            choices = ()
        has_value = value[:1] not in ("", "-")
        if choices and has_value and value not in choices:
            problems.append(_impossible_choice(f"{flag} {value}", value, choices))
    if problems:
        raise ConfigError(*problems)


def _impossible_choice(where: str, value: str, choices: Sequence[str]) -> str:
    """Return the message for a value that is not among the choices. `where` names the flag and the value."""
    return f"{where}: it can be {', '.join(choices)}.{did_you_mean(value, choices)}"


def unknown_flag(flag: str, known: Sequence[str], *, prog: str) -> str:
    """Return the message for a flag that does not exist.

    `known` holds the names of flags and settings with underscores.
    """
    name = _name(flag)
    switch = _switched_off(name, known)
    if switch:
        return f"unknown flag {flag}. Did you mean {flag_of(switch)} False?"
    counterpart = find_counterpart(name, known)
    if counterpart:
        return f"unknown flag {flag}.{counterpart.hint(spell=_spelling)}"
    lacks = ""
    if "." not in name and any(candidate.endswith(f".{name}") for candidate in known):
        lacks = " (the section is missing)"
    new_name = new_flag_of_similar(name, known)
    if new_name:
        return f"unknown flag {flag}. Did you mean {_spelling(new_name)}?"
    hint = did_you_mean(name, known, spell=_spelling)
    if not hint:
        prefixes = [candidate for candidate in known if _is_prefix(candidate, name)]
        longest = max(prefixes, key=len, default="")
        hint = did_you_mean(longest, prefixes, spell=_spelling)
    return f"unknown flag {flag}{lacks}.{hint or _see_help(prog)}"


def _is_prefix(candidate: str, name: str) -> bool:
    """Return True if `name` begins with the known name `candidate`, and `candidate` has enough characters to be
    suggested."""
    return len(candidate) >= _LEAST_OF_A_NAME and name.startswith(candidate)


def _see_help(prog: str) -> str:
    """Return the general remedy, for a message that has no special remedy."""
    return f" See {prog} --help."


def _switched_off(name: str, known: Sequence[str]) -> str:
    """Return the setting that `no_section.key` or `section.no_key` switches off, or an empty text if there is none."""
    positive_names = (name.removeprefix("no_"), name.replace(".no_", ".", 1))
    for setting in known:
        if "." in setting and setting in positive_names:
            is_switch = choices_of(setting) == _SWITCH_CHOICES
            if is_switch:
                return setting
            return ""
    return ""


def _stray_word(word: str, known: Sequence[str], *, prog: str, has_flag: bool = False) -> str:
    """Return the message for a word that is neither a flag nor a flag's value."""
    name, is_joined, value = word.lstrip("-").partition("=")
    plain = name.replace("-", "_")
    if plain in known:
        if is_joined:
            ending = f" {value}"
        else:
            ending = ""
        return f"{word} is a flag without dashes. Write {flag_of(plain)}{ending}."
    if is_joined:
        hint = did_you_mean(plain, known, spell=_spelling)
        counterpart = find_counterpart(plain, known)
        if counterpart:
            hint = counterpart.hint(spell=_spelling)
        return f"{word} is not a flag.{hint or _see_help(prog)}"
    if has_flag:
        reason = "the flag before this word takes no further value"
    else:
        reason = "the command takes no further words"
    remedy = _FURTHER_WORDS.get(prog, "Remove this word.")
    return f"{prog} cannot use {word!r}: {reason}. {remedy} See {prog} --help."


def _spelling(name: str, value: str = "") -> str:
    """Return a flag as `--help` writes it, followed by the value that it should have, if any.

    If the name of a setting has underscores, its spelling in a configuration file is added.
    """
    flag = flag_of(name)
    if value:
        return f"{flag} {value}"
    if "." in name and "_" in name:
        return f"{flag} ({name})"
    return flag


def _explain(refusal: Refusal, words: Sequence[str], *, arguments: Sequence[Argument], prog: str) -> str:
    """Return the message for words that tyro refused. `arguments` lists the command's arguments."""
    known = [_name(spelling) for argument in arguments for spelling in argument.names]
    check_typos(words, [*known, "help"], prog=prog)
    match refusal:
        case UnknownWords():
            return _unknown_words(refusal.words, words, arguments=arguments, known=known, prog=prog)
        case MissingArguments():
            return _missing(refusal.arguments, words, prog=prog)
        case InvalidChoice():
            where = " ".join([*refusal.argument.names[:1], refusal.value])
            return _impossible_choice(where, refusal.value, refusal.argument.choices)
        case InvalidValue():
            return _invalid_value(refusal.argument, words)
        case _:
            problems = _settings_out_of_range(words)
            if problems:
                raise ConfigError(*problems)
            return f"{refusal.reason.rstrip('.')}. See {prog} --help."


def _unknown_words(
    unknown: Sequence[str], words: Sequence[str], *, arguments: Sequence[Argument], known: Sequence[str], prog: str
) -> str:
    """Return the message for words that the command does not take. The message is about the first such word."""
    word = unknown[0]
    name = _name(word)
    has_value = "=" in word
    if re.match("-[A-Za-z]", word) and name not in known:
        return unknown_flag(word.partition("=")[0], known, prog=prog)
    if prog == "txl generate" and not word.startswith("-") and not has_value:
        text = " ".join(itertools.takewhile(_is_no_flag, unknown))
        return (
            f"txl generate cannot use {word!r}: the command takes no further words. Did you mean --prompt "
            f"{shlex.quote(text)}?"
        )
    if name in known and not has_value and len(unknown) > 1:
        value = unknown[1]
        return f"{word} {value} is a flag without dashes. Write {flag_of(name)} {value}."
    flags_with_choice = [argument.names[0] for argument in arguments if argument.names and word in argument.choices]
    if len(flags_with_choice) == 1:
        return (
            f"{prog} cannot use {word!r}: the command takes no further words. Did you mean {flags_with_choice[0]} "
            f"{word}?"
        )
    if word in words:
        index = words.index(word)
    else:
        index = 0
    has_flag = index > 0 and words[index - 1].startswith("--")
    return _stray_word(word, known, prog=prog, has_flag=has_flag)


def _is_no_flag(word: str) -> bool:
    """Return True if a word does not begin with a dash."""
    return not word.startswith("-")


def _name(word: str) -> str:
    """Return the name of a flag with underscores, without its dashes and its value."""
    return word.partition("=")[0].lstrip("-").replace("-", "_")


def flags_in(words: Sequence[str]) -> set[str]:
    """Return the names of the flags among the words, with underscores and without dashes."""
    return {_name(word) for word in words if word.startswith("--")}


def _missing(missing: Sequence[Argument], words: Sequence[str], *, prog: str) -> str:
    """Return the message for required arguments that were not given.

    If --out is missing and several words have no flag, the message suggests --out with the last such word.
    """
    descriptions = []
    for argument in missing:
        meaning = lower(argument.help.rstrip("."))
        if argument.names:
            descriptions.append(f"{argument.names[0]} {argument.metavar} ({meaning})")
        else:
            descriptions.append(meaning)
    positional_words = []
    previous = ""
    for word in words:
        is_value = previous.startswith("--") and "=" not in previous
        if not word.startswith("-") and not is_value:
            positional_words.append(word)
        previous = word
    hint = _see_help(prog)
    lacks_out = any("--out" in argument.names for argument in missing)
    if lacks_out and len(positional_words) > 1:
        hint = f" Did you mean --out {positional_words[-1]}?"
    return f"missing: {'; '.join(descriptions)}.{hint}"


def _invalid_value(argument: Argument, words: Sequence[str]) -> str:
    """Return the message for a flag whose value is missing, or has the wrong type."""
    if argument.names:
        flag = argument.names[0]
    else:
        flag = argument.metavar
    values = last_values(flag, words)
    if _name(flag) in setting_names():
        return explain_flag(_name(flag), values)
    meaning = ""
    if argument.help:
        meaning = f" ({lower(argument.help.rstrip('.'))})"
    if not values:
        return f"{flag} needs a value{meaning}."
    where = f"{flag} {' '.join(values)}"
    if argument.value_kind == "text":
        return f"{where}: the flag does not accept this value{meaning}."
    rule = f"a {argument.value_kind}"
    if argument.takes == "many":
        rule = f"{argument.value_kind}s"
    return f"{where}: it must be {rule}{meaning}."


def _settings_out_of_range(words: Sequence[str]) -> list[str]:
    """Return one line for every setting whose value on the command line is out of range."""
    lines = []
    for word in words:
        name = _name(word)
        if not word.startswith("--") or name not in setting_names():
            continue
        flag = word.partition("=")[0]
        line = explain_flag(name, last_values(flag, words))
        if line and line not in lines:
            lines.append(line)
    return lines


def last_values(flag: str, words: Sequence[str]) -> list[str]:
    """Return the values after the last occurrence of a flag. The flag may be spelt with hyphens or underscores."""
    values: list[str] = []
    for number, word in enumerate(words):
        name, is_joined, value = word.partition("=")
        if name.replace("_", "-") != flag.replace("_", "-"):
            continue
        if is_joined:
            values = [value]
        else:
            following = words[number + 1 :]
            values = list(itertools.takewhile(_is_no_long_flag, following))
    return values


def _is_no_long_flag(word: str) -> bool:
    """Return True if a word does not begin with two dashes."""
    return not word.startswith("--")
