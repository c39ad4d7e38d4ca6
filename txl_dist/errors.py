"""Typed errors for people. Each message says what is wrong, where (file, key, step, rank) and the remedy.

`assert` in this project is for programmer invariants; whatever a user can cause raises one of these.
The command line prints the message without a traceback and exits with `exit_code`.

Messages hold names of files, fields and settings, and these may hold anything, line breaks too. So each argument of an
error is one line, whatever it was made of: `raise ConfigError(first_line, second_line)` makes a message of two lines.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

REQUEUE = 75
"""Exit code of a run that was asked to stop, saved, and wants to be started again by the same command."""
HANG = 76
"""Exit code of a run in which a rank made no progress, or was lost; the same command goes on from its checkpoint."""


_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that steer a terminal."""
_BREAKS = re.compile(r"[\t\n\u2028\u2029]")
"""Characters that break a line, or jump in it."""


def escaped(text: str) -> str:
    """Write the characters that would steer a terminal as Python spells them."""
    return _STEERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Write a text in one line: `escaped`, and tabs and line breaks as Python spells them too."""
    return escaped(_BREAKS.sub(lambda found: found[0].encode("unicode_escape").decode(), text))


class TxlError(Exception):
    """Base of every error that a user can cause and mend."""

    exit_code = 2
    rank: int | None = None
    """The rank that met it, once ranks have joined; that one prints it."""

    def __str__(self) -> str:
        """Return the message, a line per argument; control characters in it are written out."""
        return "\n".join(one_line(str(line)) for line in self.args)


def missing_package(error: ModuleNotFoundError) -> str:
    """For people: a package is missing, as outside the environment; one of our own modules is a defect, and raised."""
    if (error.name or "").partition(".")[0] == "txl_dist":
        raise error
    return (
        f"{sys.executable} has no package {error.name}. Activate the project's environment "
        "(source .venv/bin/activate), or make one: bash launch/quickstart.sh, or pip install -e ."
    )


def raised_everywhere(error: TxlError) -> TxlError:
    """An error that every rank raises, about what all know: rank 0 prints it."""
    error.rank = 0
    return error


def in_one_line(error: BaseException) -> str:
    """Describe an error of foreign code, a plugin for instance, by its type and its message without line breaks."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


class ConfigError(TxlError, ValueError):
    """A setting is unknown, impossible, or contradicts another setting, the corpus or the run directory."""


class DataError(TxlError, ValueError):
    """Text or shards are missing, damaged, empty or do not fit the tokenizer."""


class UnreachableError(DataError):
    """Data that may be whole cannot be reached now: an outage, a full disk. It is never skipped as damage."""


class CheckpointError(TxlError, RuntimeError):
    """A checkpoint or a bundle is missing, damaged or belongs to something else."""


class TrainingError(TxlError, RuntimeError):
    """Training itself went wrong: a loss that is not finite, an engine that refuses the hardware."""


class LostRankError(TxlError, RuntimeError):
    """A rank died or makes no progress; the others cannot go on without it."""

    exit_code = HANG


@contextmanager
def translate_errors(
    kind: type[TxlError], what: str, remedy: str = "", *, of: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """Errors `of` these classes in the block become one for people: `what: reason. remedy`. Ours pass as they are."""
    try:
        yield
    except TxlError:
        raise
    except of as error:
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise kind(f"{what}: {reason}" + (f". {remedy}" if remedy else "")) from error
