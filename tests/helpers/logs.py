"""What the package's logger says, whatever handlers and levels other tests have left on it, and lines of records."""

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
    """(level, message) of everything logged inside."""
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
    """The whole line of a record, as log files have it; a sample has a line per line of text."""
    return line_of(record_cells(kind, record, max_steps=max_steps))
