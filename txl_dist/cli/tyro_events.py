"""Access to private parts of the library tyro: why it refuses words, and which arguments a command takes.

tyro reports a refusal to a hook (`tyro._errors`) and describes a command as a parser specification (`tyro._parsers`).
Both modules may change in any release, so pyproject.toml pins tyro to one version. The rest of the package uses only
the types of this file. An event of a class that this file does not know becomes `Refused`, which still has a message.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TextIO

import tyro
from typing_extensions import override
from tyro import _errors, _parsers, _resolver
from tyro._arguments import ArgumentDefinition
from tyro._backends._tyro_backend import _LiteralValue

from txl_dist.console.echo import fitted

_FIRST_BOX = re.compile(r"^(\u256d| *-{3,})", re.MULTILINE)
"""Pattern of the beginning of the first box in tyro's help: a corner, or a horizontal rule if the stream has only
ASCII."""
_METAVAR_OF_NONE = "{None}|"
_LISTED_VALUES = re.compile(r"\{([\w,-]+)\}")
_VALUE_KINDS: dict[str, Literal["whole number", "number"]] = {"INT": "whole number", "FLOAT": "number"}


class Argument(NamedTuple):
    """Description of a command's argument: a flag or a positional argument."""

    names: tuple[str, ...]
    """All spellings of a flag with their dashes. It is empty for a positional argument."""
    metavar: str
    """Placeholder of the value in a usage line: PATH, INT, {fp32,bf16}. It is empty for a switch."""
    help: str
    """Help text of the argument, in one line without the default."""
    choices: tuple[str, ...]
    """Values that the argument can take, if the usage line lists them. It is empty for any other argument, and for a
    switch."""
    takes: Literal["nothing", "one", "many"]
    """Number of values that follow the flag."""
    is_required: bool
    is_list: bool
    """True if any number of values may follow the flag. It is False for a pair, which takes exactly two."""

    @property
    def value_kind(self) -> Literal["whole number", "number", "text"]:
        """Kind of each value: a whole number, a number or a text."""
        word = re.search(r"INT|FLOAT", self.metavar)
        if word:
            return _VALUE_KINDS[word[0]]
        return "text"


@dataclass(frozen=True)
class MissingArguments:
    """Refusal because required arguments were not given."""

    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class UnknownWords:
    """Refusal of words that are neither a flag of the command nor a value that it takes."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class InvalidChoice:
    """Refusal of a value that is not among the argument's choices."""

    argument: Argument
    value: str


@dataclass(frozen=True)
class InvalidValue:
    """Refusal of an argument that has too few values, or values that cannot be read as its type."""

    argument: Argument


@dataclass(frozen=True)
class Refused:
    """Refusal for any other reason, with a sentence that states the reason."""

    reason: str


Refusal = MissingArguments | UnknownWords | InvalidChoice | InvalidValue | Refused


class WordsRefusedError(Exception):
    """Error for words of a command line that cannot be used. Its attribute `refusal` holds the reason."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def run_tyro(target: Any, words: Sequence[str], *, prog: str, **options: Any) -> Any:
    """Parse `words` with tyro, by the signature of a function or a class.

    Raises WordsRefusedError, and SystemExit after --help.
    """
    with _errors.on_parse_error(_raise_refusal), _fitted_help(words):
        return tyro.cli(target, prog=prog, args=words, **options)


class _Captured(io.TextIOWrapper):
    """Stream in memory that has the encoding of another stream, and reports that it is a terminal if that stream is a
    terminal."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(io.BytesIO(), encoding=getattr(stream, "encoding", None) or "ascii", errors="backslashreplace")
        self._is_terminal = stream.isatty()

    @override
    def isatty(self) -> bool:
        return self._is_terminal

    def text(self) -> str:
        """Return the text that was written to the stream."""
        self.seek(0)
        return self.read()


@contextmanager
def _fitted_help(words: Sequence[str]) -> Iterator[None]:
    """Wrap the long lines in tyro's help: the usage, and the description before the boxes."""
    if not {"-h", "--help"} & set(words):
        yield
        return
    captured = _Captured(sys.stdout)
    try:
        with redirect_stdout(captured):
            yield
    finally:
        text = captured.text()
        found = _FIRST_BOX.search(text)
        if found:
            box_at = found.start()
        else:
            box_at = len(text)
        head = fitted(text[:box_at])
        sys.stdout.write(f"{head}\n{text[box_at:]}" if head else text)


def list_arguments(target: Any, *, default: Any = tyro.MISSING_NONPROP) -> list[Argument]:
    """List the arguments that tyro makes from a function or a class, the positional ones first."""
    specification = _parsers.ParserSpecification.from_callable_or_type(
        _resolver.TypeParamResolver.resolve_params_and_aliases(target),
        markers=set(),
        description=None,
        parent_classes=set(),
        default_instance=default,
        intern_prefix="",
        extern_prefix="",
        subcommand_prefix="",
        support_single_arg_types=False,
        prog_suffix="",
    )
    arguments = [_argument(context.arg) for context in specification.get_args_including_children()]
    return sorted(arguments, key=lambda argument: bool(argument.names))


def attached(value: str) -> str:
    """Return a flag's value in a form that tyro reads as if `=` joined flag and value. A value that begins with dashes
    needs this form."""
    return _LiteralValue(value)


def refusal_of(event: _errors.ParseErrorEvent) -> Refusal:
    """Convert an event of tyro to the refusal that it reports."""
    match event:
        case _errors.MissingArgs():
            return MissingArguments(tuple(_argument(context.arg) for context in event.missing_arguments))
        case _errors.UnrecognizedArgs():
            return UnknownWords(tuple(event.tokens))
        case _errors.InvalidChoice():
            return InvalidChoice(_argument(event.argument), event.value)
        case _errors.BadValue(reason="fixed"):
            return Refused(f"{_argument(event.argument).names[0]} takes no value")
        case _errors.BadValue():
            return InvalidValue(_argument(event.argument))
        case _errors.InstantiationFailure(argument=ArgumentDefinition() as argument):
            return InvalidValue(_argument(argument))
        case _errors.InstantiationFailure():
            return Refused(" ".join(event.message.split()))
        case _errors.MissingMutexGroup():
            names = [_argument(context.arg).names[0] for group in event.groups for context in group]
            return Refused(f"one of {', '.join(names)} is needed")
        case _errors.MutexConflict():
            return Refused(f"{event.first_token} and {event.second_token} cannot be given together")
        case _errors.MissingSubcommand():
            return Refused(f"one of {', '.join(event.subcommand_spec.parser_from_name)} is needed")
        case _errors.SubcommandConflict():
            return Refused(
                f"{event.trigger_flag} selects {event.already_selected}, so {event.attempted} cannot be selected too"
            )
        case _:
            return Refused(f"the command line cannot be read ({type(event).__name__})")


def _raise_refusal(event: _errors.ParseErrorEvent) -> None:
    raise WordsRefusedError(refusal_of(event))


def _argument(definition: ArgumentDefinition) -> Argument:
    lowered = definition.lowered
    text = definition.field.helptext
    if callable(text):
        text = text()
    names = () if definition.is_positional() else lowered.name_or_flags
    is_switch = lowered.action in ("store_true", "store_false", "boolean_optional_action", "count")
    takes_several = lowered.nargs == "*" or (isinstance(lowered.nargs, int) and lowered.nargs > 1)
    is_many = takes_several or lowered.action == "append"
    if lowered.action == "boolean_optional_action":
        names = (*names, *(name.replace("--", "--no-", 1) for name in names))
    if is_switch:
        metavar = ""
    else:
        metavar = (lowered.metavar or "").removeprefix(_METAVAR_OF_NONE)
    listed = _LISTED_VALUES.fullmatch(metavar)  # also of a flag that takes the names of plugins too
    choices = lowered.choices or (listed[1].split(",") if listed else ())
    return Argument(
        names=tuple(names),
        metavar=metavar,
        help=" ".join((text or "").split()),
        choices=() if is_switch else tuple(choices),
        takes="nothing" if is_switch else "many" if is_many else "one",
        is_required=bool(lowered.required),
        is_list=lowered.nargs == "*",
    )
