"""Log format of all ranks: rank 0 logs everything, and the other ranks log only warnings, with their rank in front.

Lines are written to standard error and, on rank 0, to `log.txt` of the run. Logging never ends a run. If the terminal
or pipe has closed, lines to it are dropped. If the disk of the log file is full, the file lacks the lines of that time
and continues afterwards. Only a terminal gets colours (none if NO_COLOR is set). A long line is shortened to the width
of the terminal if its message can be shortened (`FIT`).
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
"""Name of an extra attribute of a log record. The attribute is a function that shortens the message to a number of
columns for a terminal. A log file gets the whole message."""
_COLOURS = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}
_WIDTH_OF_A_TERMINAL = 80
"""Columns that are assumed for a terminal whose width is unknown."""


class GrowingFile:
    """File to which pieces of data are appended. Each piece is written by one call, so two writers never mix their
    pieces.

    After an error the file is opened again for the next piece, because a disk that was full or missing may be available
    again. A removed file is created again.
    """

    def __init__(self, path: Path, *, separator: bytes = b"") -> None:
        """Keep the path without opening the file.

        The separator is written after each piece. If a run was killed, the file can end without the separator. In that
        case the separator is also written before the first piece.
        """
        self.path = path
        self._separator = separator
        self._descriptor = -1

    def append(self, piece: bytes) -> None:
        """Append a piece to the file. If the method raises OSError, no part of the piece is in the file."""
        try:
            if not self.is_continuous:
                self.close()
                self._open()
            self._write(piece + self._separator)
        except OSError:
            self.close()
            raise

    @property
    def is_continuous(self) -> bool:
        """Return whether the next piece follows directly after the earlier pieces.

        This holds if no error has occurred and the file still exists.
        """
        return self._descriptor >= 0 and os.fstat(self._descriptor).st_nlink > 0

    def close(self) -> None:
        """Close the file. Appending another piece would open it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _open(self) -> None:
        self._descriptor = open_to_append(self.path)
        size = os.fstat(self._descriptor).st_size
        end = len(self._separator)
        if end and size and os.pread(self._descriptor, end, max(size - end, 0)) != self._separator:
            self._write(self._separator)

    def _write(self, data: bytes) -> None:
        written = os.write(self._descriptor, data)
        if written < len(data):
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


class _Formatter(logging.Formatter):
    """Formatter that escapes control characters. `_StandardError` adds colours to the formatted line."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


class _StandardError(logging.StreamHandler[Any]):
    """Handler that writes to the current `sys.stderr`, which a progress bar replaces while it is shown."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """Ignore a stream that is assigned, because the handler always writes to the current `sys.stderr`."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        if not _is_terminal(self.stream):
            return super().format(record)
        fit = getattr(record, FIT, None)
        if fit:
            fields = record.__dict__ | {"msg": "", "args": None}
            before = len(super().format(logging.makeLogRecord(fields)))
            record = logging.makeLogRecord(fields | {"msg": fit(_width(self.stream) - before)})
        line = super().format(record)
        colour = _COLOURS.get(record.levelno)
        if colour and not os.environ.get("NO_COLOR"):
            return f"\x1b[{colour}m{line}\x1b[0m"
        return line

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore errors of a stream that is closed or cannot be written. Report any other error, which is a defect."""
        if not isinstance(sys.exc_info()[1], OSError | ValueError):
            super().handleError(record)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _width(stream: Any) -> int:
    """Return the number of columns of a terminal. The variable COLUMNS takes precedence, as in other programs."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH_OF_A_TERMINAL
    except (OSError, ValueError):
        return _WIDTH_OF_A_TERMINAL


class _LogFile(logging.Handler):
    """Handler that appends lines to a file. The handler warns once when writing fails, and once when writing works
    again."""

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
                logger.warning(
                    "%s cannot be written, and lacks all lines until writing works again: %s", self._file.path, error
                )
            return
        if self._num_lost:
            num_lost = self._num_lost
            self._num_lost = 0
            logger.warning(
                "%s is written again, but %s could not be written", self._file.path, counted(num_lost, "line")
            )

    @override
    def close(self) -> None:
        self._file.close()
        super().close()


def start_logging(*, rank: int = 0, file: Path | None = None) -> None:
    """Set up the package's logger for this process, with the log file `file` if it is given.

    The function may be called again, for instance after the path of the file is known.
    """
    if rank == 0:
        prefix = ""
    else:
        prefix = f"[rank {rank}] "
    formatter = _Formatter(f"%(asctime)s %(levelname).1s {prefix}%(message)s", datefmt="%H:%M:%S")
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
    """Write a line to `log.txt` only, because the console shows the event in another way."""
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, (), None)
    for handler in logger.handlers:
        if isinstance(handler, _LogFile):
            handler.handle(record)


def warn_for_all(message: str, *values: object) -> None:
    """Log a warning about something that all ranks have found. All ranks may call it, but only rank 0 logs."""
    if logger.isEnabledFor(logging.INFO):  # on rank 0 only
        logger.warning(message, *values)
