"""The two values that describe a run: a constant `RunContext`, and a `TrainState` that each step replaces.

Everything that follows from the settings alone is derived once, and stored in the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from txl_dist.config.load import BatchPlan, Config
from txl_dist.config.phases import SavedSettings
from txl_dist.data.loader.corpora import Corpora
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.distributed.collectives import RankInfo
from txl_dist.model.memory import Memory
from txl_dist.train.stability import Health


class EvaluationPlan(NamedTuple):
    """How the validation splits are scored during a run."""

    num_lanes: int
    segment_len: int
    """Tokens per lane and forward pass."""
    overlap_len: int
    """Tokens before each segment that are run again as context and not scored."""
    memory_len: int
    """Tokens of memory that each stripe carries."""
    max_tokens: int
    """Number of tokens of a split that are scored at most; 0 means all."""
    with_accuracy: bool
    """Whether the share of tokens whose most probable token is the target is measured too."""


@dataclass(frozen=True)
class RunContext:
    """Everything that stays the same during one stage of a run. `run_plan` derives it, once."""

    config: Config
    """Settings that hold in this stage."""
    saved_settings: SavedSettings
    steps: range
    """Steps of this stage: from the finished steps at its beginning to those at its end."""
    plan: BatchPlan
    ranks: RankInfo
    corpora: Corpora
    """The splits to train on and to evaluate, and where the lanes of a new run begin."""
    run_dir: Path
    """Folder of the run."""
    vocab_size: int
    """Vocabulary size, the same for all corpora."""
    lanes: range
    """Global ids of this rank's lanes."""
    scored_len: int
    """Targets of a segment whose loss counts in training, the last ones."""
    evaluation: EvaluationPlan
    flops: dict[str, float]
    """Operations per trained token, by part of the model (`flops_by_part`)."""
    peak_flops: float
    """Operations per second of all devices together at their peak; 0 if it is not known."""


@dataclass(frozen=True)
class TrainState:
    """Everything that survives a crash, apart from weights and optimizer state. Each step makes a new value."""

    step: int
    """Number of finished optimizer steps."""
    tokens_seen: int
    """Tokens trained on, over all lanes, without those of skipped steps."""
    health: Health
    """Counts of skipped steps, and the recent losses that a spike is compared with."""
    stream: StreamState
    """Position after the last segment trained on; what the reader has prefetched does not count."""
    memories: tuple[Memory, ...]
    """One memory per micro-batch of this rank, in lane order. A skipped step does not change it."""
