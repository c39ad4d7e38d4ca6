"""Progress of a long job: a bar on a terminal, a line every ten seconds elsewhere, and nothing for a short job."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

from txl_dist.console.formatting import clock
from txl_dist.console.logging import logger

_QUIET_S = 1.0
_MB = 1e6


class Progress:
    """Display of the progress of a job in bytes or tokens. Use a `Progress` as a context manager, and call `reach`
    often."""

    def __init__(
        self,
        what: str,
        *,
        total: int,
        done: int = 0,
        every_s: float = 10.0,
        unit: Literal["MB", "tokens"] = "MB",
        note: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start at `done`, the amount that was finished before and does not count for the rate.

        A `total` of 0 means that the total is unknown. `every_s` is the time between two lines in seconds. With an
        infinite `every_s` only the bar is shown, and no lines. If `unit` is MB, all amounts are in bytes.
        `note` returns text to add to each line.
        """
        self._what = what
        self._total = total
        self._first = self._done = done
        self._every_s = every_s
        self._unit = unit
        self._scale = _MB if unit == "MB" else 1.0
        self._note = note
        self._clock = clock
        self._begin = self._last = clock()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def reach(self, done: int) -> None:
        """Set the amount that is done, and show it if enough time has passed."""
        self._done = done
        now = self._clock()
        if sys.stderr.isatty():
            if now - self._begin >= _QUIET_S:
                self._show_bar()
        elif now - self._last >= self._every_s:
            self._last = now
            logger.info("%s", self.line())

    def advance(self, more: int) -> None:
        """Add `more` to the amount that is done, and show it if enough time has passed."""
        self.reach(self._done + more)

    def line(self) -> str:
        """Return a line such as `encoding: 1,204 of 4,500 MB, 27 %, 8.3 MB/s, 0:06:37 left`."""
        rate = (self._done - self._first) / max(self._clock() - self._begin, 1e-9)
        done = f"{self._done / self._scale:,.0f}"
        speed = f"{rate / self._scale:,.1f} {self._unit}/s"
        note = self._note()
        if not self._total:
            return f"{self._what}: {done} {self._unit}, {speed}{note}"
        if rate:
            left = clock(round((self._total - self._done) / rate))
        else:
            left = "?"
        return (
            f"{self._what}: {done} of {self._total / self._scale:,.0f} {self._unit}, "
            f"{100 * self._done / self._total:.0f} %, {speed}, {left} left{note}"
        )

    def _show_bar(self) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as RichProgress

            columns = BarColumn(), TextColumn("{task.description}")
            self._bar = RichProgress(*columns, console=Console(file=sys.stderr), transient=True)
            self._bar.add_task("", total=self._total or None)
            self._bar.start()
        (task,) = self._bar.task_ids
        self._bar.update(task, completed=self._done, description=self.line())
