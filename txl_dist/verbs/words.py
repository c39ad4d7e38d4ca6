"""How a verb reads its words: tyro makes flags and help of a signature; what it refuses becomes one line.

The line says what is wrong, what was asked for, and what was probably meant. It is made of tyro's own message and of
the verb's help, which both are public; a message of an unknown form is told as it stands, in a line all the same.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from txl_dist.config import choices_of, explain_flag, lower, setting_names
from txl_dist.console import say
from txl_dist.errors import ConfigError
from txl_dist.suggest import did_you_mean

_RULE, _SIDE = "\u2500", "\u2502"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LEAST_OF_A_NAME = 3
"""Characters of a flag that a longer, unknown one is taken for: --output-folder for --out."""
_NUMBERS = {"int": "a whole number", "float": "a number"}


def parse(target: Any, words: Sequence[str], *, prog: str, **options: Any) -> Any:
    """What tyro makes of the words; a function is not called yet. Raises ConfigError, in one line, for wrong ones."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(target, prog=prog, args=words, **options)
    except SystemExit as stop:
        if not stop.code:
            raise  # the help was asked for
    raise ConfigError(_explain(_said(said.getvalue()), list(words), flags=_flags(target, **options), prog=prog))


def call(verb: Callable[..., object], words: Sequence[str], *, prog: str) -> None:
    """Read the words of a verb and run it. What it writes to stderr is its own."""

    @functools.wraps(verb)
    def bound(*values: Any, **named: Any) -> Callable[[], object]:
        return functools.partial(verb, *values, **named)

    parse(bound, words, prog=prog)()


def announce(what: str) -> None:
    """Before torch is imported, which takes seconds: that it begins, and with what. One process of a job says it."""
    if os.environ.get("RANK", "0") == "0":
        say(f"{what} ...", to=sys.stderr)


def refuse_slips(words: Sequence[str], known: Sequence[str], *, prog: str) -> None:
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
        raise ConfigError("\n".join(problems))


def unknown_flag(flag: str, known: Sequence[str], *, prog: str) -> str:
    """What to say of a flag that does not exist. `known` are names, of flags and of settings, with underscores."""
    name = flag.removeprefix("--").replace("-", "_")
    lacks = " (its section is missing)" if "." not in name and any(one.endswith(f".{name}") for one in known) else ""
    begun = [one for one in known if len(one) >= _LEAST_OF_A_NAME and name.startswith(one)]
    longest = max(begun, key=len, default="")
    hint = did_you_mean(name, known, spell=_spelt) or did_you_mean(longest, begun, spell=_spelt)
    return f"unknown flag {flag}{lacks}.{hint or f' See {prog} --help.'}"


def _stray_word(word: str, known: Sequence[str], *, prog: str, has_flag: bool = False) -> str:
    """What to say of a word that is neither a flag nor the value of one."""
    name, is_joined, value = word.lstrip("-").partition("=")
    plain = name.replace("-", "_")
    if plain in known:
        return f"{word} lacks its dashes. Write --{plain.replace('_', '-')}{f' {value}' if is_joined else ''}."
    if is_joined:
        return f"{word} is no flag.{did_you_mean(plain, known, spell=_spelt) or f' See {prog} --help.'}"
    reason = "it takes no further words" if not has_flag else "the flag before it takes no further value"
    return f"{prog} cannot use {word!r}: {reason}. Leave it out, or see {prog} --help."


def _spelt(name: str) -> str:
    """As `--help` has it, and a setting as files have it too."""
    flag = "--" + name.replace("_", "-")
    return f"{flag} ({name})" if "." in name and "_" in name else flag


def _explain(said: str, words: list[str], *, flags: dict[str, str], prog: str) -> str:
    known = list(flags)
    refuse_slips(words, known, prog=prog)
    if strays := _between(said, "Unrecognized options: ", "$"):
        return _of_strays(strays.split(", "), words, known=known, prog=prog)
    if missing := _between(said, "Missing from .*?: ", "$"):
        return _of_missing(missing, words, flags=flags, prog=prog)
    flag = (_between(said, "for argument '", "'") or _between(said, "Error parsing ", ": ")).split("/")[0]
    values, own = _values_of(flag, words), _between(said, r"Error parsing .*?: ", "$")
    if choices := re.findall("'(.*?)'", said.partition("Expected one of")[2]):
        value = " ".join(values)
        return f"{flag} {value}: it can be {', '.join(choices)}.{did_you_mean(value, choices)}"
    if flag.startswith("--"):
        return _of_value(flag, values, flags=flags, own=own)
    if flag and own:
        return _of_settings(words) or own
    return said.rstrip(".") + f". See {prog} --help."


def _of_strays(strays: list[str], words: list[str], *, known: Sequence[str], prog: str) -> str:
    word = strays[0]
    if _name(word) in known and "=" not in word and strays[1:]:
        return f"{word} {strays[1]} lacks its dashes. Write --{_name(word).replace('_', '-')} {strays[1]}."
    at = words.index(word) if word in words else 0
    return _stray_word(word, known, prog=prog, has_flag=at > 0 and words[at - 1].startswith("--"))


def _name(word: str) -> str:
    """Of a flag, with underscores and without its value."""
    return word.partition("=")[0].lstrip("-").replace("-", "_")


def _of_missing(missing: str, words: list[str], *, flags: dict[str, str], prog: str) -> str:
    """The required arguments that were not given; `--out` may stand there without its name."""
    wanted = []
    for one in re.split(r"\s*\(required\)\s*", missing.strip())[:-1]:
        name, _, text = one.strip().partition("  ")
        text = " ".join(text.split()).rstrip(".")
        wanted.append(f"{name} ({lower(text)})" if name.startswith("--") else lower(text))
    places = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not word.startswith("-") and not (before.startswith("--") and "=" not in before)
    ]
    hint = f" Did you mean --out {places[-1]}?" if "--out" in missing and len(places) > 1 else ""
    return f"missing: {'; '.join(wanted)}.{hint or f' See {prog} --help.'}"


def _of_value(flag: str, values: list[str], *, flags: dict[str, str], own: str = "") -> str:
    """A flag whose value is missing, or is nothing that it takes."""
    name = flag.removeprefix("--").replace("-", "_")
    if name in setting_names():
        return explain_flag(name, values)
    meaning = flags.get(name, "").rstrip(".")
    in_brackets = f" ({lower(meaning)})" if meaning else ""
    if not values:
        return f"{flag} needs a value{in_brackets}."
    number = re.search(r"(?:could not convert string to|invalid literal for) (int|float)", own)
    what = f"it must be {_NUMBERS[number[1]]}" if number else own or "it needs more values"
    if "valid parse" in own:  # tyro's words for a flag that takes several
        what = "it takes no such value"
    return f"{flag} {' '.join(values)}: {what}{in_brackets}."


def _of_settings(words: list[str]) -> str:
    """Every setting among the words whose value is out of range, a line each."""
    given = [word.partition("=")[0] for word in words if word.startswith("--") and _name(word) in setting_names()]
    lines = [explain_flag(_name(flag), _values_of(flag, words)) for flag in given]
    return "\n".join(dict.fromkeys(filter(None, lines)))


def _values_of(flag: str, words: list[str]) -> list[str]:
    """What stands behind a flag, in either spelling; the last time it is given."""
    values: list[str] = []
    for number, word in enumerate(words):
        name, is_joined, value = word.partition("=")
        if name.replace("_", "-") == flag.replace("_", "-"):
            rest = words[number + 1 :]
            end = next((at for at, later in enumerate(rest) if later.startswith("--")), len(rest))
            values = [value] if is_joined else rest[:end]
    return values


def _between(text: str, before: str, behind: str) -> str:
    found = re.search(f"(?:{before})(.*?)(?:{behind})", text, re.DOTALL)
    return found[1].strip() if found else ""


def _said(box: str) -> str:
    """What a box says above its first rule, in one line; columns stay two blanks apart."""
    lines = _ANSI.sub("", box).splitlines()
    # A terminal without such characters has a title and a rule in place of the sides.
    lines = [line.strip(_SIDE)[1:] for line in lines if line.startswith(_SIDE)] or lines[2:]
    upper = itertools.takewhile(lambda line: line.strip(f" {_RULE}-"), lines)
    joined = "".join(f"{'  ' if line.startswith('    ') else ' '}{line.strip()}" for line in upper)
    return joined.strip() or "the command line cannot be understood"


def _flags(target: Any, **options: Any) -> dict[str, str]:
    """Per flag, by its name with underscores, what the help says of it."""
    help_text, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"  # wider help has columns side by side
    with contextlib.redirect_stdout(help_text), contextlib.suppress(SystemExit):
        tyro.cli(target, args=["--help"], **{**options, "return_unknown_args": False})
    os.environ.pop("COLUMNS")
    if columns is not None:
        os.environ["COLUMNS"] = columns
    inner = re.sub(f"^{_SIDE}|{_SIDE}$", " ", _ANSI.sub("", help_text.getvalue()), flags=re.MULTILINE)
    # A flag stands at the left, behind a short one perhaps; its text behind two blanks or below, farther in.
    found = re.findall(r"^ {1,3}(?:-\w, )?(--\w.*(?:\n {5,}\S.*)*)", inner, flags=re.MULTILINE)
    flags: dict[str, str] = {}
    for one in found:
        head, _, text = " ".join(one.split("\n", 1)).partition("  ")
        text = re.sub(r"\s*\((default|required|repeatable).*", "", " ".join(text.split()))
        flags |= {name.replace("-", "_"): text for name in re.findall(r"--([\w.-]+)", head)}
    return flags
