"""Typed errors for people. Each message says what is wrong, where (file, key, step, rank) and the remedy.

`assert` in this project is for programmer invariants; whatever a user can cause raises one of these.
The command line prints the message without a traceback and exits with `exit_code`.

A message may contain names of files, fields and settings, and these may contain line breaks. So each argument of an
error is printed as one line: `raise ConfigError(first_line, second_line)` makes a message of two lines.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

REQUEUE = 75
"""Exit code of a run that stopped on request and saved. The same command continues it."""
HANG = 76
"""Exit code of a run in which a rank hung or was lost. The same command continues from the last checkpoint."""


_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters of a terminal, marks of writing direction, and lone surrogates."""
_BREAKS = re.compile(r"[\t\n\u2028\u2029]")
"""Characters that break a line or move within it."""


def escaped(text: str) -> str:
    """Replace each character that would control a terminal by its Python escape sequence."""
    return _STEERS.sub(_escape_sequence, text)


def one_line(text: str) -> str:
    """Return a text as one line: `escaped`, with tabs and line breaks as Python escape sequences too."""
    return escaped(_BREAKS.sub(_escape_sequence, text))


def _escape_sequence(match: re.Match[str]) -> str:
    """Return a matched character as Python writes it, for instance `\\x1b`."""
    return match[0].encode("unicode_escape").decode()


class TxlError(Exception):
    """Base class of every error that a user can cause and correct."""

    exit_code = 2
    rank: int | None = None
    """Rank that raised the error and prints it; None before the ranks have joined."""

    def __str__(self) -> str:
        """Return the message, one line per argument, with control characters escaped."""
        return "\n".join(one_line(str(line)) for line in self.args)


def missing_package(error: ModuleNotFoundError) -> str:
    """Return the message for a package that is not installed.

    A missing module of txl_dist itself is a defect, so its error is raised again.
    """
    if (error.name or "").partition(".")[0] == "txl_dist":
        raise error
    return (
        f"{sys.executable} has no package {error.name}. Activate the project's environment "
        "(source .venv/bin/activate), or make one: bash launch/quickstart.sh, or pip install -e ."
    )


def raised_everywhere(error: TxlError) -> TxlError:
    """Mark an error that every rank raises alike, so that rank 0 alone prints it. Returns the error."""
    error.rank = 0
    return error


def in_one_line(error: BaseException) -> str:
    """Describe an error of foreign code, a plugin for instance, by its type and its message without line breaks."""
    name = type(error).__name__
    words = " ".join(str(error).split())
    if not words:
        return name
    return f"{name}: {words}"


class ConfigError(TxlError, ValueError):
    """A setting is unknown, impossible, or contradicts another setting, the corpus or the run directory."""


class DataError(TxlError, ValueError):
    """Text or shards are missing, damaged or empty, or they do not fit the tokenizer."""


class UnreachableError(DataError):
    """Data cannot be reached now, because of an outage or a full disk. It may be whole, so it is never skipped."""


class CheckpointError(TxlError, RuntimeError):
    """A checkpoint or a bundle is missing, damaged, or does not belong to this run or model."""


class TrainingError(TxlError, RuntimeError):
    """Training failed: a loss is not finite, for instance, or the engine does not support the hardware."""


class LostRankError(TxlError, RuntimeError):
    """A rank died or makes no progress, and the other ranks cannot continue without it."""

    exit_code = HANG


@contextmanager
def translate_errors(
    kind: type[TxlError], what: str, remedy: str = "", *, of: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """Turn errors `of` these classes in the block into a `kind` with the message `what: reason. remedy`.

    A TxlError passes unchanged.
    """
    try:
        yield
    except TxlError:
        raise
    except of as error:
        reason = ""
        if isinstance(error, OSError):
            reason = error.strerror or ""
        if not reason:
            reason = " ".join(str(error).split())
        if remedy:
            ending = f". {remedy}"
        else:
            ending = ""
        raise kind(f"{what}: {reason}{ending}") from error
