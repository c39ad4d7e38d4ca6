"""The two values that describe a run: a constant `RunContext`, and a `TrainState` that each step replaces.

All that follows from the settings alone is derived once, in the context, and handed on with it.
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
    """Everything that stays the same during one stage of a run."""

    config: Config
    plan: BatchPlan
    ranks: RankInfo
    corpora: Corpora
    """The splits to train on and to evaluate, and where the lanes of a new run begin."""

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.config.run.dir)

    @cached_property
    def lanes(self) -> range:
        """Global ids of this rank's lanes."""
        return lanes_of_rank(self.config.train.num_lanes, rank=self.ranks.rank, world_size=self.ranks.world_size)

    @property
    def masks_documents(self) -> bool:
        """Whether a token attends only within its own document."""
        return self.config.data.document_mask

    @property
    def vocab_size(self) -> int:
        """Vocabulary size, the same for all corpora."""
        return self.corpora.first.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of all corpora. Raises DataError if it cannot be read."""
        return self.corpora.first.tokenizer


@dataclass(frozen=True)
class TrainState:
    """Everything that survives a crash, apart from weights and optimizer state. Each step makes a new value."""

    step: int
    """Finished optimizer steps."""
    tokens_seen: int
    """Tokens trained on, over all lanes, without those of skipped steps."""
    health: Health
    """Counts of skipped steps, and the recent losses that a spike is compared with."""
    stream: StreamState
    """Position after the last segment trained on; what the reader has prefetched does not count."""
    memories: tuple[Memory, ...]
    """One memory per micro-batch of this rank, in lane order. A skipped step does not change it."""
