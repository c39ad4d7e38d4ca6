"""Each class of event with which tyro refuses arguments, caused by the command line of a small function."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from tyro import _errors
from tyro.conf import CascadeSubcommandArgs, Fixed, Positional, create_mutex_group

from txl_dist.cli import parsing
from txl_dist.cli.tyro_events import (
    InvalidChoice,
    InvalidValue,
    MissingArguments,
    Refusal,
    Refused,
    UnknownWords,
    WordsRefusedError,
    list_arguments,
    refusal_of,
    run_tyro,
)
from txl_dist.errors import ConfigError

ROOT = Path(__file__).parents[3]
NEEDED, FREE = create_mutex_group(required=True), create_mutex_group(required=False)


def command(
    source: Positional[Path],
    /,
    count: int,
    kind: Literal["a", "b"] = "a",
    pair: tuple[int, int] = (1, 2),
    sizes: tuple[int, ...] = (),
    fixed: Fixed[int] = 3,
    switch: bool = False,
    note: Path | None = None,
) -> None:
    """A command.

    Args:
        source: Where
            from.
        count: How many.
    """


def needs_one(red: Annotated[bool, NEEDED] = False, blue: Annotated[bool, NEEDED] = False) -> None:
    """A required group."""


def takes_one(red: Annotated[bool, FREE] = False, blue: Annotated[bool, FREE] = False) -> None:
    """A group of which one may be given."""


@dataclass(frozen=True)
class Add:
    """Add."""

    size: int = 1


@dataclass(frozen=True)
class Drop:
    """Drop."""

    name: str = ""


def has_subcommands(what: Add | Drop) -> None:
    """Subcommands, without a default."""


@dataclass(frozen=True)
class Defaulted:
    """Subcommands with a default one."""

    what: Add | Drop = field(default_factory=Add)


@dataclass(frozen=True)
class Even:
    """A class that refuses some values itself."""

    number: int = 2

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError(f"{self.number} is odd;\n  give an even number")


def takes_even(even: Even) -> None:
    """A nested class that refuses."""


def refused(target: Any, words: Sequence[str], **options: Any) -> Refusal:
    with pytest.raises(WordsRefusedError) as caught:
        run_tyro(target, words, prog="txl x", **options)
    return caught.value.refusal


def test_missing_arguments_are_named_with_their_meaning() -> None:
    refusal = refused(command, ["--kind", "b"])
    assert isinstance(refusal, MissingArguments)
    places = {(argument.names, argument.metavar, argument.help) for argument in refusal.arguments}
    assert places == {((), "PATH", "Where from."), (("--count",), "INT", "How many.")}


def test_unknown_words_are_named_in_order() -> None:
    assert refused(command, ["p", "--count", "1", "--nope", "q"]) == UnknownWords(("--nope", "q"))


def test_a_value_that_is_no_choice_is_named_with_the_choices() -> None:
    refusal = refused(command, ["p", "--count", "1", "--kind", "c"])
    assert isinstance(refusal, InvalidChoice)
    assert (refusal.value, refusal.argument.choices, refusal.argument.names) == ("c", ("a", "b"), ("--kind",))


@pytest.mark.parametrize(
    ("given", "name", "kind"),
    [
        (["--count"], "--count", "whole number"),
        (["--count", "many"], "--count", "whole number"),
        (["--count", "1", "--pair", "1"], "--pair", "whole number"),
        (["--count", "1", "--sizes", "1", "x"], "--sizes", "whole number"),
    ],
)
def test_too_few_values_and_values_of_another_type_are_invalid_values(given: list[str], name: str, kind: str) -> None:
    refusal = refused(command, ["p", *given])
    assert isinstance(refusal, InvalidValue)
    assert (refusal.argument.names[0], refusal.argument.value_kind) == (name, kind)


@pytest.mark.parametrize(
    ("target", "words", "reason"),
    [
        (command, ["p", "--count", "1", "--fixed", "4"], "--fixed takes no value"),
        (takes_even, ["--even.number", "3"], "3 is odd; give an even number"),
        (Even, ["--number", "5"], "5 is odd; give an even number"),
        (needs_one, [], "one of --red, --blue is needed"),
        (takes_one, ["--red", "--blue"], "--red and --blue cannot be given together"),
        (has_subcommands, [], "one of what:add, what:drop is needed"),
        (CascadeSubcommandArgs[Defaulted], ["--what.size", "2", "what:drop"], "--what.size selects what:add"),
    ],
)
def test_every_other_event_is_a_sentence(target: Any, words: list[str], reason: str) -> None:
    refusal = refused(target, words)
    assert isinstance(refusal, Refused)
    assert reason in refusal.reason


def subclasses(kind: type) -> list[type]:
    return [one for child in kind.__subclasses__() for one in (child, *subclasses(child))]


def test_every_class_of_event_of_this_tyro_is_known_and_an_unknown_one_is_still_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {kind.__name__ for kind in subclasses(_errors.ParseErrorEvent) if kind.__module__ == _errors.__name__}
    assert names == {
        *("MissingArgs", "MissingMutexGroup", "MissingSubcommand", "MutexConflict", "SubcommandConflict"),
        *("BadValue", "InvalidChoice", "UnrecognizedArgs", "InstantiationFailure"),
    }

    @dataclass(frozen=True)
    class NewEvent(_errors.ParseErrorEvent):
        """Of a later tyro."""

    assert refusal_of(NewEvent("txl x")) == Refused("the command line cannot be read (NewEvent)")

    def fail(*_: Any, **__: Any) -> None:
        raise WordsRefusedError(refusal_of(NewEvent("txl x")))

    monkeypatch.setattr(parsing, "run_tyro", fail)
    with pytest.raises(ConfigError) as caught:
        parsing.parse(command, ["p"], prog="txl x")
    assert str(caught.value) == "the command line cannot be read (NewEvent). See txl x --help."


def test_nothing_is_printed_when_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refused(command, [])
    refused(Even, ["--number", "1"])
    assert capsys.readouterr() == ("", "")


def test_the_arguments_of_a_command_are_listed_with_positional_ones_first() -> None:
    listed = list_arguments(command)
    assert [argument.names for argument in listed][:2] == [(), ("--count",)]
    by_name = {argument.names[0]: argument for argument in listed[1:]}
    assert by_name["--switch"].names == ("--switch", "--no-switch")
    assert [by_name[name].takes for name in ("--switch", "--note", "--pair", "--sizes")] == [
        *("nothing", "one", "many", "many"),
    ]
    assert by_name["--note"].metavar == "PATH"
    assert [argument.names[:1] for argument in listed if argument.is_required] == [(), ("--count",)]


def test_tyro_is_pinned_to_the_version_whose_private_parts_are_read() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pin = f"tyro=={version('tyro')}"
    assert pin in project["project"]["dependencies"]
    assert pin in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_one_file_alone_reads_private_parts_of_tyro() -> None:
    files = [*(ROOT / "txl_dist").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    readers = [file.name for file in files if re.search(r"\btyro(\._| import _)", file.read_text(encoding="utf-8"))]
    assert readers == ["tyro_events.py"]
