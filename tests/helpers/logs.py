"""Messages of the package's logger in tests, independent of the handlers and levels of other tests, and lines of
records."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from txl_dist.console.logging import logger
from txl_dist.train.report.loggers import record_cells
from txl_dist.train.report.metric_table import line_of


@contextmanager
def recorded_log() -> Iterator[list[tuple[str, str]]]:
    """Yield a list to which (level, message) of everything logged in the context is appended."""
    lines: list[tuple[str, str]] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.levelname, record.getMessage()))

    recorder, level = Recorder(), logger.level
    logger.addHandler(recorder)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(recorder)
        logger.setLevel(level)


def format_record(kind: str, record: dict[str, Any], *, max_steps: int) -> str:
    """Return the whole text of a record as in log files. A sample has one line per line of its text."""
    return line_of(record_cells(kind, record, max_steps=max_steps))
