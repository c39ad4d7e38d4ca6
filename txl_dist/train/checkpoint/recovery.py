"""Recovery as the training loop sees it: store each step's state, and find the stored state after a loss.

`Recovery` does nothing, for a run without recovery. `InJobRecovery` connects a member of the job with the slots that
hold copies of its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from txl_dist.train.checkpoint.slots import Share, StateSlots, StoredState
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.monitoring.member import Member
from txl_dist.train.state import TrainState


class Recovery:
    """Recovery of a run that has none: its methods do nothing."""

    def take_stored(self) -> StoredState | None:
        """Return the newest state that all ranks have stored, once after each loss of a rank. Otherwise return None.

        All ranks call it together.
        """
        return None

    def check_room(self, state: TrainState, engine: Engine) -> None:
        """Check that copies of the state fit into host memory. All ranks call it together. Raises ConfigError."""

    def store(self, state: TrainState, engine: Engine, sums: dict[str, Any]) -> None:
        """Begin to store the state after a step, and the sums of the logging interval. Weights may change again only
        after `wait`."""

    def wait(self) -> None:
        """Wait until the last state is stored. Raises TrainingError if that fails."""

    def leave(self, abandon_save: Callable[[], None]) -> None:
        """End the threads that use the engine, when the loop ends. `abandon_save` ends a save that is in progress."""

    def close(self) -> None:
        """Release the copies of this process. The agent keeps them."""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Return a context manager whose block makes process groups."""
        yield

    def mark_loaded(self) -> None:
        """Note that the stored state is loaded."""

    def mark_step(self) -> dict[str, Any] | None:
        """Note that the first step of this process or generation is finished. Returns the facts of a recovery, or
        None."""
        return None


class InJobRecovery(Recovery):
    """Recovery of a run in which lost ranks are replaced."""

    def __init__(self, member: Member, *, share: Share) -> None:
        """Open the slots of this rank. `share` is the part of each parameter that this rank stores."""
        self._member = member
        self._slots = StateSlots(member.slots, share=share)
        self._is_new = member.generation > 1

    @override
    def take_stored(self) -> StoredState | None:
        if not self._is_new:
            return None
        self._is_new = False
        return self._slots.newest_common()

    @override
    def check_room(self, state: TrainState, engine: Engine) -> None:
        self._slots.check_room(state, engine)

    @override
    def store(self, state: TrainState, engine: Engine, sums: dict[str, Any]) -> None:
        self._slots.store(state, engine, sums)

    @override
    def wait(self) -> None:
        self._slots.wait()

    @override
    def leave(self, abandon_save: Callable[[], None]) -> None:
        self._slots.join()
        abandon_save()

    @override
    def close(self) -> None:
        self._slots.close()

    @override
    @contextmanager
    def collecting(self) -> Iterator[None]:
        with self._member.collecting():
            yield

    @override
    def mark_loaded(self) -> None:
        self._member.mark_loaded()

    @override
    def mark_step(self) -> dict[str, Any] | None:
        return self._member.mark_step()
