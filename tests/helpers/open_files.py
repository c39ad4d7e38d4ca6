"""Open files of this process, by name. Other tests, and the threads they left, close files of theirs at any time."""

from __future__ import annotations

import os
from contextlib import suppress


def open_files(prefix: str) -> list[str]:
    """Return the target of each open descriptor whose target begins with `prefix`, for instance `/memfd:txl_`."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed since
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return [target for target in targets if target.startswith(prefix)]
