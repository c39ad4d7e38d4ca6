"""Output for people, in which text from files cannot control the terminal.

File names, splits, fields of an exported model, records and generated text may contain escape sequences. Escape
sequences can move the cursor, rename the window or overwrite earlier output. So control characters except newline and
tab, marks of writing direction, and lone surrogates are escaped (\\x1b). This applies to the output of commands, log
lines and errors. The exception is text that a model generates. It is escaped on a terminal, and written unchanged to a
file or a pipe.
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
    """Error for a failed write to standard output, for instance because its disk is full."""


def guard_streams() -> None:
    """Prepare standard output and standard error of this process for a full disk, and for a pipe whose reader has
    ended.

    A failed write to standard output raises LostOutputError, or BrokenPipeError if the reader of the pipe has ended. A
    failed write to standard error is ignored, so that a lost message never changes what a command does.
    """
    # Python has None for a stream that was closed before it started.
    if sys.stdout is None:
        sys.stdout = _nowhere()
    else:
        sys.stdout = _reopened(sys.stdout, _StandardOutput)
    if sys.stderr is None:
        sys.stderr = _nowhere()
    else:
        sys.stderr = _reopened(sys.stderr, _StandardError)


def flush_output() -> None:
    """Write the buffered standard output. Raises LostOutputError if the write fails, or BrokenPipeError if the reader
    of the pipe has ended."""
    sys.stdout.flush()


def drop_output() -> None:
    """Discard all further standard output, because Python would fail on the broken stream when it exits."""
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
    """Return a stream that writes to the file of `stream` through the class `kind`.

    A stream without a file, as in a notebook, is returned unchanged.
    """
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
    """Wrap each long line of a text to a width in columns. A width of 0 means the width of the terminal.

    A continuation line is indented to the first word of the line that it continues. If that line begins with a name in
    a first column, the continuation line is indented to the second column. Colour codes take no column.
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
    """Print lines for people, by default on standard output. Control characters in the text are escaped."""
    if to is None:
        stream = sys.stdout
    else:
        stream = to
    print(_encodable(escaped(text), stream), file=stream, flush=flush)


def write_text(text: str) -> None:
    """Write a piece of generated text to standard output at once. The text is escaped only on a terminal."""
    stream = sys.stdout
    stream.write(_encodable(escaped(text) if stream.isatty() else text, stream))
    stream.flush()


def _encodable(text: str, stream: TextIO) -> str:
    """Escape the characters that the stream's encoding lacks, so that output works in an ASCII locale."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)
