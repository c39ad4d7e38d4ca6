"""What is written to people passes here: text of others must not steer their terminal.

File names, splits, fields of a bundle, records and generated text may hold escape sequences, which move the cursor,
rename the window or rewrite what was printed before. So every control character but newline and tab, C1 and DEL, the
marks that turn the direction of writing, and halves of characters are written out (\\x1b), in what verbs print, in log
lines and in errors, wherever they go. Only text that a model generates is given as it is to a file or a pipe, byte by
byte; on a terminal it is escaped too.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from contextlib import suppress
from typing import Any, TextIO

from txl_dist.errors import escaped

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FIRST_COLUMN = re.compile(r"\s+(\S+\s{2,})?|usage: ")


class LostOutputError(OSError):
    """Standard output cannot be written: its disk is full, for instance."""


def guard_streams() -> None:
    """Prepare standard output and standard error of this process for disks that are full and readers that are gone.

    What cannot be written to standard output raises LostOutputError, or BrokenPipeError if its reader has ended. What
    cannot be written to standard error is dropped: a lost message never changes what a command does.
    """
    # Python has None for a stream that was closed before it started.
    sys.stdout = _nowhere() if sys.stdout is None else _reopened(sys.stdout, _StandardOutput)
    sys.stderr = _nowhere() if sys.stderr is None else _reopened(sys.stderr, _StandardError)


def flush_output() -> None:
    """Write what standard output still holds. Raises as `guard_streams` says."""
    sys.stdout.flush()


def drop_output() -> None:
    """Send all further standard output nowhere: Python would fail on it again when it ends."""
    sys.stdout = _nowhere()


class _StandardOutput(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise LostOutputError(error.errno, error.strerror) from error


class _StandardError(io.FileIO):
    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            return super().write(data)
        return len(memoryview(data))


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _reopened(stream: TextIO, kind: type[io.FileIO]) -> TextIO:
    """The same stream through another class; as it is where it has no file, as in a notebook."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return stream
    stream.flush()
    raw = kind(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=kind is _StandardError or raw.isatty(),
        write_through=kind is _StandardError,
    )


def fitted(text: str, *, width: int = 0) -> str:
    """The text with each long line wrapped to a width in columns; 0 is that of the terminal.

    What follows begins where the words of the line do: behind its indentation, and behind a name of its own column.
    Colours take no column.
    """
    width = width or shutil.get_terminal_size().columns
    lines: list[str] = []
    for line in text.splitlines():
        column = _FIRST_COLUMN.match(_COLOUR.sub("", line))
        indent = " " * (column.end() if column else 0)
        fitting, *words = line.split(" ")
        for word in words:
            longer = f"{fitting} {word}"
            if len(_COLOUR.sub("", longer)) > width and fitting.strip():
                lines.append(fitting.rstrip())
                longer = indent + word
            fitting = longer
        lines.append(fitting)
    return "\n".join(lines)


def echo(text: str, *, to: TextIO | None = None, flush: bool = False) -> None:
    """Print lines for people, on standard output unless told otherwise."""
    stream = sys.stdout if to is None else to
    print(_encodable(escaped(text), stream), file=stream, flush=flush)


def write_text(text: str) -> None:
    """Write a piece of generated text to standard output at once: as it is, unless that is a terminal."""
    stream = sys.stdout
    stream.write(_encodable(escaped(text) if stream.isatty() else text, stream))
    stream.flush()


def _encodable(text: str, stream: TextIO) -> str:
    """With characters that the stream's encoding lacks written out: a locale of ASCII is no reason to fail."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)
