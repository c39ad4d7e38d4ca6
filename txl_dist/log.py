"""One log format for all ranks: rank 0 speaks, the others only warn, with their rank in front.

Lines go to standard error and, on rank 0, to `log.txt` of the run.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

logger = logging.getLogger("txl_dist")


class _StandardError(logging.StreamHandler[Any]):
    """Writes to whatever `sys.stderr` is at the moment: a progress bar replaces it to keep its place."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """Ignored: the stream is always the current one."""


def start_logging(*, rank: int = 0, file: Path | None = None) -> None:
    """Set the package's logger up for this process; may be called again, for instance once the file is known."""
    who = "" if rank == 0 else f"[rank {rank}] "
    formatter = logging.Formatter(f"%(asctime)s %(levelname).1s {who}%(message)s", datefmt="%H:%M:%S")
    handlers: list[logging.Handler] = [_StandardError()]
    if file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
