"""Predicted host memory of recovery's copies of the ranks' states."""

from __future__ import annotations

from txl_dist.config.load import Config
from txl_dist.distributed.recovery.partner import NUM_PARTNER_SLOTS, num_own_slots
from txl_dist.train.footprint.checkpoint import CheckpointSize


def version_bytes(
    *, state_bytes: float, memory_bytes: float, ranks: int, ranks_per_node: int, is_sharded: bool
) -> float:
    """Return the bytes of one version of a rank's state. `txl_dist.planning.recovery_cost` has the formula.

    `state_bytes` are the bytes of all weights with their optimizer state, and `memory_bytes` those of all memories.
    `is_sharded` is false at ZeRO stage 0.
    """
    if is_sharded:
        return (state_bytes + memory_bytes) / ranks
    return state_bytes / min(ranks, ranks_per_node) + memory_bytes / ranks


def num_versions(*, has_partner: bool, partner_every: int) -> int:
    """Return the number of versions that the agent of a rank holds, those of its partner included."""
    own = num_own_slots(has_partner=has_partner, partner_every=partner_every)
    return own + NUM_PARTNER_SLOTS if has_partner else own


def copies_bytes(config: Config, size: CheckpointSize, *, ranks: int, ranks_per_node: int) -> float:
    """Return the bytes of host memory per rank for copies of the ranks' states, or 0 without recovery.

    `size` is that of the run's checkpoint, which has the same values.
    """
    recover = config.recover
    if not recover.spares:
        return 0.0
    version = version_bytes(
        state_bytes=size.weights + size.optimizer,
        memory_bytes=size.memories,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        is_sharded=config.engine.zero_stage > 0,
    )
    return version * num_versions(has_partner=recover.copies == "partner", partner_every=recover.partner_every)
