"""What a run is: a `RunContext`, which stays the same while it goes on, and a `TrainState`, which each step makes anew.

All that follows from the settings alone is derived once, for the context, and handed on with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from txl_dist.config.load import BatchPlan, Config
from txl_dist.data.loader.corpora import Corpora
from txl_dist.data.loader.lanes import lanes_of_rank
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.distributed.collectives import RankInfo
from txl_dist.model.memory import Memory
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.train.stability import Health


@dataclass(frozen=True)
class RunContext:
    """What stays the same while a run goes on."""

    config: Config
    plan: BatchPlan
    ranks: RankInfo
    corpora: Corpora
    """With what is trained on, what is evaluated, and where the lanes of a new run begin."""

    @property
    def run_dir(self) -> Path:
        """Where the run lies."""
        return Path(self.config.run.dir)

    @cached_property
    def lanes(self) -> range:
        """Of this rank."""
        return lanes_of_rank(self.config.train.num_lanes, rank=self.ranks.rank, world_size=self.ranks.world_size)

    @property
    def masks_documents(self) -> bool:
        """Whether a query sees its own document only."""
        return self.config.data.document_mask

    @property
    def vocab_size(self) -> int:
        """Of all corpora."""
        return self.corpora.first.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """Of all corpora. Raises DataError if it cannot be read."""
        return self.corpora.first.tokenizer


@dataclass(frozen=True)
class TrainState:
    """Everything of a run, besides weights and optimizer, that survives a crash; nothing else may. A value: each step
    makes the next one."""

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
