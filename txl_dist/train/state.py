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
from txl_dist.data.loader.target_sampler import TargetSettings
from txl_dist.distributed.collectives import RankInfo
from txl_dist.model.memory import Memory
from txl_dist.train.stability import Health


class EvaluationPlan(NamedTuple):
    """Lengths and options of the evaluations of the validation splits during a run."""

    num_lanes: int
    """Number of lanes (batch rows). A split is cut into this number of stripes of consecutive text, one per lane."""
    segment_len: int
    """Tokens per lane and forward pass."""
    overlap_len: int
    """Number of tokens before each segment that are run again as context and not scored."""
    memory_len: int
    """Number of tokens of memory (hidden states of earlier segments) per batch row."""
    max_tokens: int
    """Largest number of tokens of a split that are scored. 0 means all tokens."""
    with_accuracy: bool
    """Whether accuracy is measured too: the share of targets that are the most probable token."""


@dataclass(frozen=True)
class RunContext:
    """Everything that stays the same during one phase of a run. `run_plan` derives it once."""

    config: Config
    """Settings of this phase."""
    saved_settings: SavedSettings
    """Settings of the whole run, as config.toml and the checkpoints store them."""
    steps: range
    """Steps of this phase: from the number of finished steps at its beginning to the number at its end."""
    plan: BatchPlan
    """Division of the batch into ranks and micro-batches."""
    ranks: RankInfo
    """This rank, the number of ranks, and the device."""
    corpora: Corpora
    """The splits to train on and to evaluate, and the positions at which the lanes (batch rows) of a new run begin."""
    run_dir: Path
    """Folder of the run."""
    vocab_size: int
    """Vocabulary size, the same for all corpora."""
    lanes: range
    """Global ids of this rank's lanes (batch rows, each with its own token stream)."""
    scored_len: int
    """Number of targets per segment whose loss counts in training. With next-token prediction these are the last
    targets of the segment."""
    unscored: str
    """Reason why some targets have no training loss, for messages. It is empty if all targets have a loss."""
    target_settings: TargetSettings | None
    """Lengths by which XLNet's objective chooses the tokens to predict. The value is None for next-token
    prediction."""
    evaluation: EvaluationPlan
    """Lengths and options of evaluations during the run."""
    flops: dict[str, float]
    """Operations per trained token, by part of the model (`flops_by_part`)."""
    peak_flops: float
    """Peak rate of all devices together in operations per second, or 0 if it is not known."""


@dataclass(frozen=True)
class TrainState:
    """State of training that a checkpoint stores, apart from weights and optimizer state. Each step makes a new
    value."""

    step: int
    """Number of finished optimizer steps."""
    tokens_seen: int
    """Number of tokens trained on, over all lanes. Tokens of skipped steps do not count."""
    health: Health
    """Counts of skipped steps, and recent losses, which the detection of spikes uses."""
    stream: StreamState
    """Position in the training text after the last segment that was trained on. Prefetched segments do not count."""
    memories: tuple[Memory, ...]
    """One memory per micro-batch of this rank, in lane order. A skipped step does not change the memories."""
