"""What watches over a run, as its parts need it: one value in place of four."""

from __future__ import annotations

from typing import NamedTuple

from txl_dist.errors import CheckpointError
from txl_dist.train.monitoring.preemption import PreemptionRequests
from txl_dist.train.monitoring.run_lock import RunLock
from txl_dist.train.monitoring.watchdog import Watchdog


class Watch(NamedTuple):
    """Of one run, on one rank."""

    stops: PreemptionRequests
    watchdog: Watchdog
    lock: RunLock | None
    """On rank 0."""
    nonce: str
    """The same on every rank and no other run's: it names temporary folders."""

    def beat(self, phase: str) -> None:
        """The main thread has begun this phase of the step."""
        self.watchdog.beat(phase)

    def check_lock(self) -> None:
        """Raises CheckpointError if another job has taken the run over. Its own thread looks every few seconds."""
        if self.lock is not None and self.lock.is_lost:
            raise CheckpointError(
                f"another job has taken {self.lock.run_dir} over while this one made no sign of life. It is left to "
                "that job; nothing is saved here."
            )

    def confirm_lock(self) -> None:
        """The same, having looked now."""
        if self.lock is not None:
            self.lock.beat()
        self.check_lock()
