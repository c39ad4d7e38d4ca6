"""`TrainState`: everything of a run, besides weights and optimizer, that survives a crash. Nothing else may."""

from __future__ import annotations

from dataclasses import dataclass

from txl_dist.data.read.position import StreamState
from txl_dist.model.memory import Memory
from txl_dist.train.health import Health


@dataclass(frozen=True)
class TrainState:
    """A value: each step makes the next one."""

    step: int
    """Finished optimizer steps."""
    tokens_seen: int
    """Tokens trained on, over all lanes; those of skipped steps are not."""
    health: Health
    """Steps skipped, and what a spike is measured by."""
    stream: StreamState
    """Position after the segment that was trained on last, whatever the reader has prefetched."""
    memories: tuple[Memory, ...]
    """One memory per micro-batch of this rank, in lane order. A skipped step leaves it as it was."""
