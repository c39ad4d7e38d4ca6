"""Errors that a user can cause and correct.

Each message says what is wrong, where (file, key, step, rank) and the remedy. For everything that a user can cause, one
of these errors is raised. `assert` in this project is only for mistakes of programmers. The command line prints the
message without a traceback and exits with `exit_code`.

A message may contain names of files, fields and settings, and such names may contain line breaks. So each argument of
an error is printed as one line: `raise ConfigError(first_line, second_line)` makes a message of two lines. A message
may also contain a URL with a password or a signature, so no message shows these parts of a URL.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

REQUEUE = 75
"""Exit code of a run that stopped on request and saved a checkpoint. The same command continues the run."""
HANG = 76
"""Exit code of a run in which a rank was lost or made no progress. The same command continues the run from the last
checkpoint."""


_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that must not reach a terminal: control characters, marks of writing direction, and lone surrogates."""
_BREAKS = re.compile(r"[\t\n\u2028\u2029]")
"""Tab and the characters that end a line, which `one_line` escapes in addition."""
_URL_UP_TO_USER = re.compile(r"(https?://)[^\s/?]*@", re.IGNORECASE)
"""Scheme, user and password of a URL. A password may contain `@`."""
_URL_UP_TO_QUERY = re.compile(r"""(https?://[^\s?]*)\?(?:\S*[^\s"'`.,:;)\]])?""", re.IGNORECASE)
"""URL in a text, up to the end of its query. Quotes and punctuation marks after the URL belong to the text."""


def escaped(text: str) -> str:
    """Return the text with a Python escape sequence in place of each character that would control a terminal."""
    return _STEERS.sub(_escape_sequence, text)


def without_secrets(text: str) -> str:
    """Return a text with only scheme, host and path of each http URL.

    The user part can contain a password, and the query can contain a signature or a token.
    """
    return _URL_UP_TO_QUERY.sub(r"\1", _URL_UP_TO_USER.sub(r"\1", text))


def one_line(text: str) -> str:
    """Return a text as one line. Control characters, tabs and line breaks become Python escape sequences."""
    return escaped(_BREAKS.sub(_escape_sequence, text))


def _escape_sequence(match: re.Match[str]) -> str:
    """Return the matched character as a Python escape sequence, for instance `\\x1b`."""
    return match[0].encode("unicode_escape").decode()


class TxlError(Exception):
    """Base class of every error that a user can cause and correct."""

    exit_code = 2
    """Exit code of a command that this error ends."""
    rank: int | None = None
    """Rank that raised the error and prints the message. The value is None before the ranks have joined the job."""

    def __str__(self) -> str:
        """Return the message, one line per argument, with control characters escaped and no secret parts of URLs."""
        return "\n".join(one_line(without_secrets(str(line))) for line in self.args)


def missing_package(error: ModuleNotFoundError) -> str:
    """Return the message for a package that is not installed.

    A missing module of txl_dist itself is a defect of the program. In that case this function raises `error` again.
    """
    if (error.name or "").partition(".")[0] == "txl_dist":
        raise error
    return (
        f"{sys.executable} has no package {error.name}. Activate the project's environment "
        "(source .venv/bin/activate), or make one: bash launch/quickstart.sh, or pip install -e ."
    )


def raised_everywhere(error: TxlError) -> TxlError:
    """Mark an error that every rank raises, so that only rank 0 prints it. Returns the error."""
    error.rank = 0
    return error


def in_one_line(error: BaseException) -> str:
    """Describe an error of foreign code, such as a plugin, in one line: its type, then its message."""
    name = type(error).__name__
    words = " ".join(str(error).split())
    if not words:
        return name
    return f"{name}: {words}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop, or the type of an error without a message.

    The further lines of an error of torch are a stack trace.
    """
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0].rstrip(".")


def first_and_last_line(text: str) -> str:
    """Return the first and the last line of a text that are not empty, joined by dots.

    Each line is cut after 250 characters. The first line of a compiler's error says where the error is, and the last
    line says what it is.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ends = dict.fromkeys(line[:250] for line in (*lines[:1], *lines[-1:]))  # without a repetition
    return " ... ".join(ends)


class ConfigError(TxlError, ValueError):
    """Error for a setting that is unknown or impossible, or contradicts another setting, the corpus or the run."""


class DataError(TxlError, ValueError):
    """Error for text or shards that are missing, damaged or empty, or that do not fit the tokenizer."""


class UnreachableError(DataError):
    """Error for data that cannot be read now, because of an outage or a full disk.

    The data may be undamaged, so a run does not skip it, even if the run skips damaged documents.
    """


class CheckpointError(TxlError, RuntimeError):
    """Error for a checkpoint or a bundle that is missing, damaged, or does not belong to this run or model."""


class TrainingError(TxlError, RuntimeError):
    """Error for a failure of training: for instance, a loss is not finite, or the hardware is not supported."""


class LostRankError(TxlError, RuntimeError):
    """Error for a rank that died or makes no progress. The other ranks cannot continue without it."""

    exit_code = HANG


@contextmanager
def translate_errors(
    kind: type[TxlError], what: str, remedy: str = "", *, of: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """Return a context manager that replaces an error in its block by an error of class `kind` with the message `what:
    reason. remedy`.

    `of` lists the classes of errors that are replaced. A TxlError passes unchanged.
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
