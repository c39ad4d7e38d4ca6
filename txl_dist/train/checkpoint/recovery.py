"""Recovery as the training loop sees it: store the state every few steps, and find the stored state after a loss.

`Recovery` does nothing, for a run without recovery. `InJobRecovery` connects a member of the job with the slots that
hold copies of its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from txl_dist.console.logging import logger
from txl_dist.distributed.collectives import RankInfo, barrier, gather_objects, ranks_with_same
from txl_dist.distributed.recovery.seat import node_name
from txl_dist.errors import ConfigError, raised_everywhere
from txl_dist.fault_injection import failpoint
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.train.checkpoint.partner import find_partner
from txl_dist.train.checkpoint.slot_copy import PinnedSlotCopy, SlotCopy
from txl_dist.train.checkpoint.slots import Share, StateSlots, StoredState
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.monitoring.member import Member
from txl_dist.train.state import TrainState


class Recovery:
    """Recovery of a run that has none: its methods do nothing."""

    is_again = False
    """Whether the job has lost a rank before."""

    def take_stored(self) -> StoredState | None:
        """Return the newest state that all ranks have stored, once after each loss of a rank. Otherwise return None.

        All ranks call it together.
        """
        return None

    def check_room(self, state: TrainState, engine: Engine, *, with_average: bool) -> None:
        """Check that copies of the state fit into host memory, unless the job has stored some before.

        `with_average` says whether the run averages its weights. All ranks call it together. Raises ConfigError on all
        ranks.
        """

    def store(self, state: TrainState, engine: Engine, carried: dict[str, Any]) -> None:
        """Begin to store the state after a step, if a copy is due, with further values that a replacement continues.

        Weights may change again only after `wait`.
        """

    def store_beginning(self, state: TrainState, engine: Engine, carried: dict[str, Any]) -> None:
        """Store the state with which a phase begins. Returns when all ranks have stored it.

        So a loss in the first step does not make the phase before end again. All ranks call it together.
        """

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

    def watch_passes(self, model: TransformerXL) -> None:
        """Make forward and backward passes of the model end between two blocks after the loss of a rank.

        Without this a pass of many seconds would continue until the next collective.
        """

    def mark_begun(self) -> None:
        """Note that the run directory is opened. After a loss the run then continues from its own checkpoints."""

    def mark_loaded(self) -> None:
        """Note that the state is loaded from which training starts."""

    def records_start(self) -> bool:
        """Return whether a start must be recorded: not again after the loss of a rank. All ranks call it together."""
        return True

    def mark_step(self, step: int, *, continued_from: int) -> dict[str, Any] | None:
        """Note that a step is finished. Returns the facts of a recovery after the first step that follows it, or None.

        `continued_from` is the step after which this process or generation has continued.
        """
        return None


def _copy_for(device: torch.device, member: Member) -> SlotCopy:
    """Return what copies the state of this rank from its device."""
    if device.type == "cuda":
        return PinnedSlotCopy(device, is_void=lambda: member.must_leave)
    return SlotCopy()


def end_passes_if(must_leave: Callable[[], bool], model: TransformerXL) -> None:
    """Make a pass of the model raise ConnectionError, as a collective that was cut does, once `must_leave` is true.

    It is asked after each block's forward pass, and before each block's backward pass.
    """

    def check() -> None:
        if must_leave():
            raise ConnectionError("a rank of this generation was lost")

    def check_both(block: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor | None]) -> None:
        check()
        hidden_BTD, _ = outputs
        if hidden_BTD.requires_grad:
            hidden_BTD.register_hook(lambda gradient: check())

    for block in model.blocks:
        block.register_forward_hook(check_both)


class InJobRecovery(Recovery):
    """Recovery of a run in which lost ranks are replaced."""

    def __init__(self, member: Member, ranks: RankInfo, *, share: Share, copy_every: int, partner_every: int) -> None:
        """Open the slots of this rank. `share` is the part of each partition that this rank stores.

        `copy_every` is the number of steps between two copies, of which each `partner_every`-th one is for the partner.
        With recover.copies=partner the rank connects to its partner, so all ranks call it together. Raises ConfigError
        if there is no other node.
        """
        self._member = member
        self._copy_every = copy_every
        self._last_step = -1
        partner = None
        if member.partner_address is not None:
            with member.collecting():
                idle = member.idle_addresses
                partner = find_partner(member.partner_address, rank=ranks.rank, every=partner_every, idle=idle)
            if partner.rank is None:
                self._miss_partner()
        self._slots = StateSlots(
            member.slots,
            share=share,
            rank=ranks.rank,
            world_size=ranks.world_size,
            others=member.others,
            partner=partner,
            copy=_copy_for(ranks.device, member),
        )
        self.is_again = self._is_new = member.generation > 1

    def _miss_partner(self) -> None:
        """Refuse to start without another node. After a loss the job continues without partner copies."""
        if self._member.generation == 1:
            raise raised_everywhere(
                ConfigError(
                    "recover.copies=partner keeps copies on another node, but all ranks are on one node. Start ranks "
                    "on two nodes or more, or set recover.copies to node."
                )
            )
        logger.warning("recovery: only one node is left, so no other node keeps copies of the state")

    @override
    def take_stored(self) -> StoredState | None:
        if not self._is_new:
            return None
        self._is_new = False
        with self._member.collecting():  # a newer plan ends transfers from agents of other nodes
            stored = self._slots.newest_common()
        if stored is None:
            logger.warning(
                "recovery: no copy of the state exists for all ranks. The run continues from a checkpoint. If there "
                "is none, it begins again"
            )
        else:
            self._last_step = stored.step
        return stored

    @override
    def check_room(self, state: TrainState, engine: Engine, *, with_average: bool) -> None:
        self._slots.check_room(state, engine, with_average=with_average)

    @override
    def store(self, state: TrainState, engine: Engine, carried: dict[str, Any]) -> None:
        has_rewound = state.step <= self._last_step  # all copies are of steps that the run has given up
        if state.step % self._copy_every == 0 or has_rewound:
            self._slots.store(state, engine, carried, after_rewind=has_rewound)
        self._last_step = state.step

    @override
    def store_beginning(self, state: TrainState, engine: Engine, carried: dict[str, Any]) -> None:
        self._slots.store(state, engine, carried, begins_phase=True)
        self._last_step = state.step
        self._slots.wait()
        barrier()

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
    def watch_passes(self, model: TransformerXL) -> None:
        if next(model.parameters()).device.type == "cpu":  # on a GPU passes are only queued, or replayed as graphs
            end_passes_if(self._must_leave, model)

    def _must_leave(self) -> bool:
        """Return whether a pass of the model must end. It is asked between two blocks."""
        failpoint("pass", step=self._member.step)
        return self._member.must_leave

    @override
    def mark_begun(self) -> None:
        self._member.has_opened = True

    @override
    def mark_loaded(self) -> None:
        self._member.mark_loaded()

    @override
    def records_start(self) -> bool:
        is_again = self._member.recovered is not None and any(gather_objects(self._member.has_recorded_start))
        self._member.has_recorded_start = True
        return not is_again

    @override
    def mark_step(self, step: int, *, continued_from: int) -> dict[str, Any] | None:
        return self._member.mark_step(step, continued_from=continued_from)


def recovery_of(
    member: Member | None, ranks: RankInfo, *, zero_stage: int, copy_every: int, partner_every: int
) -> Recovery:
    """Return the recovery of a run in which this rank is `member`.

    At ZeRO stage 0 the ranks of a node divide the copies of the state, because all of them hold the same weights.
    """
    if member is None:
        return Recovery()
    share = Share(0, 1)
    if zero_stage == 0:
        on_node = ranks_with_same(node_name())
        share = Share(on_node.index(ranks.rank), len(on_node))
    return InJobRecovery(member, ranks, share=share, copy_every=copy_every, partner_every=partner_every)
