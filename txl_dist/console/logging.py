"""One log format for all ranks: rank 0 speaks, the others only warn, with their rank in front.

Lines go to standard error and, on rank 0, to `log.txt` of the run. Logging never ends a run: a terminal or a pipe that
is gone gets nothing, a file on a full disk lacks the lines of that time and goes on behind them. Only a terminal gets
colours (none with NO_COLOR set), and of lines that can be shortened as much as it is wide.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from pathlib import Path
from typing import Any

from typing_extensions import override

from txl_dist.console.formatting import counted
from txl_dist.errors import escaped
from txl_dist.io.files import open_to_append

logger = logging.getLogger("txl_dist")
FIT = "fit"
"""Extra of a record: a function that says the same in a given number of columns. Files get the whole line."""
_COLOURS = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}
_WIDTH_OF_A_TERMINAL = 80
"""Where a terminal does not tell."""


class GrowingFile:
    """A file to which whole pieces are added, each by one write, so that none is ever torn in the middle of others.

    After an error the file is opened anew for the next piece: a disk that was full, or away, may be back. A file that
    somebody has removed is made again.
    """

    def __init__(self, path: Path, *, separator: bytes = b"") -> None:
        """Nothing is opened yet. The separator goes behind each piece, and where a run that was killed left it out."""
        self.path = path
        self._separator = separator
        self._descriptor = -1

    def append(self, piece: bytes) -> None:
        """Add a piece. Raises OSError; then nothing of it is in the file."""
        try:
            if not self.goes_on:
                self.close()
                self._open()
            self._write(piece + self._separator)
        except OSError:
            self.close()
            raise

    @property
    def goes_on(self) -> bool:
        """Whether the next piece goes behind others of ours: nothing has gone wrong, and the file is still there."""
        return self._descriptor >= 0 and os.fstat(self._descriptor).st_nlink > 0

    def close(self) -> None:
        """Another piece would open it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _open(self) -> None:
        self._descriptor = open_to_append(self.path)
        size, end = os.fstat(self._descriptor).st_size, len(self._separator)
        if end and size and os.pread(self._descriptor, end, max(size - end, 0)) != self._separator:
            self._write(self._separator)

    def _write(self, data: bytes) -> None:
        written = os.write(self._descriptor, data)
        if written < len(data):
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


class _Formatter(logging.Formatter):
    """Lines in which nothing steers a terminal; colours come later, from us."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


class _StandardError(logging.StreamHandler[Any]):
    """Writes to whatever `sys.stderr` is at the moment: a progress bar replaces it to keep its place."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """Ignored: the stream is always the current one."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        if not _is_terminal(self.stream):
            return super().format(record)
        if fit := getattr(record, FIT, None):
            fields = record.__dict__ | {"msg": "", "args": None}
            before = len(super().format(logging.makeLogRecord(fields)))
            record = logging.makeLogRecord(fields | {"msg": fit(_width(self.stream) - before)})
        line, colour = super().format(record), _COLOURS.get(record.levelno)
        return f"\x1b[{colour}m{line}\x1b[0m" if colour and not os.environ.get("NO_COLOR") else line

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A stream that is gone (OSError) or closed (ValueError) can be told nothing; the rest are our mistakes."""
        if not isinstance(sys.exc_info()[1], OSError | ValueError):
            super().handleError(record)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _width(stream: Any) -> int:
    """Columns of a terminal; COLUMNS comes first, as for other programs."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH_OF_A_TERMINAL
    except (OSError, ValueError):
        return _WIDTH_OF_A_TERMINAL


class _LogFile(logging.Handler):
    """Adds lines to a file. That it cannot, and that it can again, is said once each."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = GrowingFile(path, separator=b"\n")
        self._num_lost = 0

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.append(self.format(record).encode(errors="backslashreplace"))
        except OSError as error:
            self._num_lost += 1
            if self._num_lost == 1:  # a warning comes here too
                logger.warning("%s cannot be written, and lacks lines until it can: %s", self._file.path, error)
            return
        if self._num_lost:
            num_lost, self._num_lost = self._num_lost, 0
            logger.warning("%s is written again; it lacks %s", self._file.path, counted(num_lost, "line"))

    @override
    def close(self) -> None:
        self._file.close()
        super().close()


def start_logging(*, rank: int = 0, file: Path | None = None) -> None:
    """Set the package's logger up for this process; may be called again, for instance once the file is known."""
    who = "" if rank == 0 else f"[rank {rank}] "
    formatter = _Formatter(f"%(asctime)s %(levelname).1s {who}%(message)s", datefmt="%H:%M:%S")
    handlers: list[logging.Handler] = [_StandardError()]
    if file is not None:
        handlers.append(_LogFile(file))
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False


def note_in_file(message: str) -> None:
    """A line for `log.txt` alone, about what the console is told in another way."""
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, (), None)
    for handler in logger.handlers:
        if isinstance(handler, _LogFile):
            handler.handle(record)


def warn_for_all(message: str, *values: object) -> None:
    """A warning about what all ranks know, and call this for: rank 0 says it."""
    if logger.isEnabledFor(logging.INFO):  # the others begin at warnings
        logger.warning(message, *values)
