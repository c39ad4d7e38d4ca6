"""A terminal for processes under test: a pseudo-terminal of a given width that records its output."""

from __future__ import annotations

import os
import select
import termios
from types import TracebackType


class Terminal:
    """A pseudo-terminal. Pass `device` to a process as its standard error, and call `read` afterwards."""

    def __init__(self, *, columns: int) -> None:
        self._master, self.device = os.openpty()
        self.resize(columns)

    def resize(self, columns: int) -> None:
        """Change the width."""
        termios.tcsetwinsize(self.device, (24, columns))

    def read(self) -> str:
        """Return the output since the last call. Wait for the end of the writers first to get all of it."""
        shown = b""
        while select.select([self._master], [], [], 0)[0]:
            shown += os.read(self._master, 1 << 16)
        return shown.decode(errors="replace")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.close(self._master)
        os.close(self.device)
