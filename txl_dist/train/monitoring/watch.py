"""The monitors of a run in one value, which the parts of the run share."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from txl_dist.errors import CheckpointError
from txl_dist.train.monitoring.preemption import PreemptionRequests
from txl_dist.train.monitoring.run_lock import RunLock


class Monitor(Protocol):
    """Interface of the monitor of this rank's main thread: the watchdog, or with recovery the link to the agent."""

    def beat(self, phase: str, *, step: int | None = None) -> None:
        """Record that the main thread has begun a phase of the step. Without `step` the step number stays the same."""

    def limit(self, limit_s: float) -> None:
        """Set the number of seconds without a beat after which a rank counts as hung."""

    def write_stacks_to(self, folder: Path | None) -> None:
        """Write stack traces to a file in this folder, and not to standard error."""


class Watch(NamedTuple):
    """The monitors of a run on one rank, in one value: stop requests, watchdog and run lock.

    The loop, the checkpoints and the validation share it.
    """

    stops: PreemptionRequests
    watchdog: Monitor
    lock: RunLock | None
    """Lock of the run directory on rank 0. It is None on other ranks."""
    nonce: str
    """Random word of this job, the same on every rank. It is part of the names of temporary folders."""
    own_disk: tuple[int, ...] = ()
    """Ranks of this node, if each node has a run directory of its own. It is empty if all ranks share one."""

    def leads_disk(self, rank: int) -> bool:
        """Return whether a rank is the one that commits, renames and removes checkpoints in its run directory."""
        if self.own_disk:
            return rank == self.own_disk[0]
        return rank == 0

    def beat(self, phase: str) -> None:
        """Report to the watchdog that the main thread has begun this phase of the step."""
        self.watchdog.beat(phase)

    def check_lock(self) -> None:
        """Raise CheckpointError if another job has taken over the run directory.

        The lock's thread notices a takeover within seconds.
        """
        if self.lock is not None and self.lock.is_lost:
            raise CheckpointError(
                f"another job has taken over {self.lock.run_dir}, because this job sent no heartbeat. The other job "
                f"continues the run. This job saves nothing more."
            )

    def confirm_lock(self) -> None:
        """Check the lock's file now. Raises CheckpointError if another job has taken over the run directory."""
        if self.lock is not None:
            self.lock.beat()
        self.check_lock()
