"""What the package's logger says, whatever handlers and levels other tests have left on it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from txl_dist.log import logger


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
