"""Evaluation protocols of other programs, so that results can be compared with published numbers.

`PeerRows` reproduces `LMOrderedIterator` of the original Transformer-XL code, optionally with NVIDIA's warm-up.
`RandomCrops` reproduces nanoGPT's `get_batch`. Both classes keep the split in memory while they run, with 2 or 4 bytes
per token, as those programs do. The text of a batch row does not depend on the number of ranks.

Limitations: these protocols score only a part of the tokens. The evaluation of this package (`evaluation.py`) scores
every token that has a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from txl_dist.console.formatting import counted
from txl_dist.data.loader.lanes import lanes_of_rank
from txl_dist.data.loader.shards import Split
from txl_dist.data.loader.stream import Segment, plain_segment
from txl_dist.errors import ConfigError


class PeerRows:
    """Split cut into `num_lanes` rows of equal length, which are evaluated in parallel, each from an empty memory.

    N tokens give rows of S = N // num_lanes tokens. The tokens after num_lanes * S are dropped. The first token of a
    row is not a target, so num_lanes * (S - 1) tokens are scored. The last segment can be shorter.

    Before each row, the last `warm_up_len` tokens of the previous row are passed through the model without being
    scored, as in NVIDIA's data_utils. `warm_up_len` is rounded up to whole segments. The first row is warmed up with
    the end of the last row.
    """

    overlap_len = 0

    def __init__(
        self, split: Split, *, num_lanes: int, segment_len: int, warm_up_len: int = 0, rank: int, world_size: int
    ) -> None:
        """Cut the split into rows. Raises ConfigError if the split is too short for `num_lanes` rows."""
        row_len = split.tokens // num_lanes
        num_warm = _round_up(warm_up_len, segment_len)
        min_row_len = max(2, num_warm)
        if row_len < min_row_len:
            if num_warm > 2:
                other_remedy = ", or give a smaller --memory-len."
            else:
                other_remedy = "."
            raise ConfigError(
                f"split {split.name!r} has {counted(split.tokens, 'token')}, {row_len:,} for each of this protocol's "
                f"{counted(num_lanes, 'row')}. A row needs at least {min_row_len:,}. "
                "Score a longer split (--split, --data)" + other_remedy
            )
        self.lanes = lanes_of_rank(_round_up(num_lanes, world_size), rank=rank, world_size=world_size)
        self.segment_len = min(segment_len, row_len - 1 + num_warm)
        self.num_targets = num_lanes * (row_len - 1)
        self._split = split
        self._num_lanes = num_lanes
        self._row_len = row_len
        self._num_warm = num_warm

    def __len__(self) -> int:
        """Return the number of forward passes, equal on all ranks."""
        num_inputs = self._num_warm + self._row_len - 1
        return math.ceil(num_inputs / self.segment_len)

    def __iter__(self) -> Iterator[Segment]:
        """Yield the segments of this rank's rows in order."""
        tokens = self._split.read_all()[: self._num_lanes * self._row_len]
        lane_L1 = np.array(self.lanes)[:, None]
        first_L1 = lane_L1 * self._row_len
        is_row_L1 = lane_L1 < self._num_lanes
        for start in range(-self._num_warm, self._row_len - 1, self.segment_len):
            end = min(start + self.segment_len + 1, self._row_len)
            places_LT = first_L1 + np.arange(start, end)
            # A row's warm-up ends where the row begins. The token before the first row's first token is the last one.
            tokens_LT = tokens.take(places_LT, mode="wrap")
            segment = _segment(tokens_LT, is_row_L1)
            is_warm = start < 0
            if is_warm:
                scored = np.zeros_like(segment.scored)
            else:
                scored = segment.scored
            yield segment._replace(scored=scored)


class RandomCrops:
    """Random crops of a split, as nanoGPT evaluates them. A crop is a piece of the split at a random place, with
    `segment_len` targets, which are all scored. There are `num_batches` batches of `num_lanes` crops."""

    overlap_len = 0

    def __init__(
        self, split: Split, *, num_lanes: int, segment_len: int, num_batches: int, seed: int, rank: int, world_size: int
    ) -> None:
        """Prepare crops at places that `seed` determines. Raises ConfigError if the split is not longer than one
        crop."""
        if split.tokens <= segment_len:
            raise ConfigError(
                f"split {split.name!r} has {counted(split.tokens, 'token')}, but at least {segment_len + 1:,} tokens "
                "are needed: one segment, and the token that follows the segment. Choose a shorter --segment-len, or "
                "score a longer split (--split, --data)."
            )
        self.lanes = lanes_of_rank(_round_up(num_lanes, world_size), rank=rank, world_size=world_size)
        self.segment_len = segment_len
        self.num_targets = num_batches * num_lanes * segment_len
        self._split = split
        self._num_lanes = num_lanes
        self._num_batches = num_batches
        self._seed = seed

    def __len__(self) -> int:
        """Return the number of forward passes, equal on all ranks."""
        return self._num_batches

    def __iter__(self) -> Iterator[Segment]:
        """Yield the batches, with the crops of this rank's lanes."""
        tokens = self._split.read_all()
        generator = np.random.default_rng(self._seed)
        lanes = np.array(self.lanes)
        steps = np.arange(self.segment_len + 1)
        is_row_L1 = lanes[:, None] < self._num_lanes
        for _ in range(self._num_batches):
            num_starts = len(tokens) - self.segment_len
            starts = generator.integers(0, num_starts, self._num_lanes)
            local_starts_L1 = starts.take(lanes, mode="clip")[:, None]
            places_LT = local_starts_L1 + steps
            yield _segment(tokens[places_LT], is_row_L1)


def _round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `count`."""
    return math.ceil(count / multiple) * multiple


def _segment(tokens: npt.NDArray[np.unsignedinteger], is_row_L1: npt.NDArray[np.bool_]) -> Segment:
    """Return the segment of a rank's rows, in which all targets of the rows are scored. Lanes without a row are added
    so that every rank has the same number of lanes. They contain id 0 and are not scored.
    """
    row_tokens = np.where(is_row_L1, tokens, 0)
    segment = plain_segment(row_tokens.astype(np.int64))
    scored = segment.scored & is_row_L1
    return segment._replace(scored=scored)
