"""The status page of a rank: its heartbeat, step and phase, in memory that the agent shares and keeps.

The rank writes, and its agent reads. So the agent knows the last step and phase of a rank that was killed, and sees
within a fraction of a second that no thread of the rank runs any more. All times are of the monotonic clock, which is
the same for all processes of a machine. Each number is written at once, so a reader never sees half of it.
`struct.pack_into` would write zeros first, and a reader would see a rank that has made no progress since the machine
started. The phase may be read while it is written, because only messages and the comparison of two losses use it.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import NamedTuple

PAGE_BYTES = 4096
"""Size of the page in bytes."""
_HEARTBEAT, _PROGRESS, _LIMIT, _STEP, _WAITING = range(5)
"""Places of the numbers in the page, which have 8 bytes each."""
_PHASE = 40
"""Offset of the phase in bytes."""
_PHASE_BYTES = 32


class Status(NamedTuple):
    """Values of a status page. JSON stores it as a list."""

    silent_s: float
    """Seconds since the last heartbeat, which a thread of the rank writes."""
    idle_s: float
    """Seconds since the main thread has begun its present phase."""
    limit_s: float
    """Seconds without progress after which the rank counts as hung. 0 means that the rank has not started."""
    step: int
    """Training step that the main thread has reached."""
    phase: str
    """Part of the step that the main thread has begun, for instance data or save."""
    is_waiting: bool
    """Whether the main thread is inside a collective."""


class StatusPage:
    """Status of one rank in a file in memory."""

    def __init__(self, path: str | int) -> None:
        """Map the file, which is a path or a descriptor. Raises OSError if that fails."""
        descriptor = path if isinstance(path, int) else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size < PAGE_BYTES:
                os.ftruncate(descriptor, PAGE_BYTES)
            self._page = mmap.mmap(descriptor, PAGE_BYTES)
        finally:
            if not isinstance(path, int):
                os.close(descriptor)
        self._times = memoryview(self._page).cast("d")
        self._counts = memoryview(self._page).cast("q")

    def heartbeat(self, *, is_waiting: bool) -> None:
        """Note that a thread of the rank runs, and whether the main thread is inside a collective."""
        self._counts[_WAITING] = is_waiting
        self._times[_HEARTBEAT] = time.monotonic()

    def progress(self, *, step: int, phase: str) -> None:
        """Note that the main thread has begun a phase of a step."""
        self._counts[_STEP] = step
        self._set_phase(phase)
        self._times[_PROGRESS] = time.monotonic()

    def set_limit(self, limit_s: float) -> None:
        """Set the seconds without progress after which the rank counts as hung."""
        self._times[_LIMIT] = limit_s

    def clear(self) -> None:
        """Forget the process that was the rank. Its replacement is not silent yet, and in phase `begin` of step 0."""
        self._times[_LIMIT] = 0.0
        self._counts[_STEP] = 0
        self._times[_HEARTBEAT] = time.monotonic()
        self._set_phase("begin")

    def read(self) -> Status:
        """Return the present values."""
        now_s = time.monotonic()
        return Status(
            silent_s=now_s - self._times[_HEARTBEAT],
            idle_s=now_s - self._times[_PROGRESS],
            limit_s=self._times[_LIMIT],
            step=self._counts[_STEP],
            phase=self._page[_PHASE : _PHASE + _PHASE_BYTES].rstrip(b"\0").decode(errors="replace"),
            is_waiting=bool(self._counts[_WAITING]),
        )

    def _set_phase(self, phase: str) -> None:
        self._page[_PHASE : _PHASE + _PHASE_BYTES] = phase.encode()[:_PHASE_BYTES].ljust(_PHASE_BYTES, b"\0")
