"""A terminal for processes under test: a pseudo-terminal of a given width, and what was shown on it."""

from __future__ import annotations

import os
import select
import termios
from types import TracebackType


class Terminal:
    """Pass `device` to a process as its standard error; `read` afterwards."""

    def __init__(self, *, columns: int) -> None:
        self._master, self.device = os.openpty()
        self.resize(columns)

    def resize(self, columns: int) -> None:
        """Another width."""
        termios.tcsetwinsize(self.device, (24, columns))

    def read(self) -> str:
        """What was shown since the last time, all writers having ended or at least what came so far."""
        shown = b""
        while select.select([self._master], [], [], 0)[0]:
            shown += os.read(self._master, 1 << 16)
        return shown.decode(errors="replace")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.close(self._master)
        os.close(self.device)
