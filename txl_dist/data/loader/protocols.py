"""Held-out text as the peers' programs cut it, so that a published number can be set beside ours.

`PeerRows` is the original's `LMOrderedIterator`, with NVIDIA's warm-up if asked for; `RandomCrops` is nanoGPT's
`get_batch`. Both hold the split in memory while they run, as the peers do (2 or 4 bytes per token, as it is stored),
score fewer tokens than there are, and give each row the same text whatever the number of ranks. What our own evaluation
does instead: `evaluation.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from txl_dist.console.formatting import counted
from txl_dist.data.loader.corpus import Split
from txl_dist.data.loader.lanes import lanes_of_rank
from txl_dist.data.loader.stream import Segment, plain_segment
from txl_dist.errors import ConfigError


class PeerRows:
    """A split as `num_lanes` rows of equal length, run side by side from an empty memory.

    N tokens give rows of S = N // num_lanes; the tokens behind num_lanes * S are dropped, and the first of each row is
    no target: num_lanes * (S - 1) are scored. `warm_up_len` tokens, rounded up to whole segments, are run unscored
    before each row: the last ones of the row before it, and for the first row those of the last (NVIDIA's data_utils).
    The last segment may be shorter.
    """

    overlap_len = 0

    def __init__(
        self, split: Split, *, num_lanes: int, segment_len: int, warm_up_len: int = 0, rank: int, world_size: int
    ) -> None:
        """Raises ConfigError if the split is too short for so many rows."""
        row_len, num_warm = split.tokens // num_lanes, -(-warm_up_len // segment_len) * segment_len
        if row_len < max(2, num_warm):
            raise ConfigError(
                f"split {split.name!r} has {counted(split.tokens, 'token')}, {row_len:,} for each of this protocol's "
                f"{counted(num_lanes, 'row')}, which need {max(2, num_warm):,}. Score a longer one (--split, --data)"
                + (", or give less --memory-len." if num_warm > 2 else ".")
            )
        self.lanes = lanes_of_rank(-(-num_lanes // world_size) * world_size, rank=rank, world_size=world_size)
        self.segment_len, self.num_targets = min(segment_len, row_len - 1 + num_warm), num_lanes * (row_len - 1)
        self._split, self._num_lanes, self._row_len, self._num_warm = split, num_lanes, row_len, num_warm

    def __len__(self) -> int:
        """Forward passes, equal on all ranks."""
        return int(-(-(self._num_warm + self._row_len - 1) // self.segment_len))

    def __iter__(self) -> Iterator[Segment]:
        tokens = self._split.read_all()[: self._num_lanes * self._row_len]
        lane_L1 = np.array(self.lanes)[:, None]
        first_L1, is_row_L1 = lane_L1 * self._row_len, lane_L1 < self._num_lanes
        for start in range(-self._num_warm, self._row_len - 1, self.segment_len):
            places = first_L1 + np.arange(start, min(start + self.segment_len + 1, self._row_len))
            # A row's warm-up ends where it begins; before the first token of the first row stands the last of all.
            segment = _segment(tokens.take(places, mode="wrap"), is_row_L1)
            yield segment._replace(scored=segment.scored & (start >= 0))


class RandomCrops:
    """`num_batches` times `num_lanes` pieces of `segment_len` tokens from random places, each alone, all scored."""

    overlap_len = 0

    def __init__(
        self, split: Split, *, num_lanes: int, segment_len: int, num_batches: int, seed: int, rank: int, world_size: int
    ) -> None:
        """Raises ConfigError if the split is no longer than one of them."""
        if split.tokens <= segment_len:
            raise ConfigError(
                f"split {split.name!r} has {counted(split.tokens, 'token')}, and a crop with its last target "
                f"{segment_len + 1:,}. Give a shorter --segment-len, or score a longer one (--split, --data)."
            )
        self.lanes = lanes_of_rank(-(-num_lanes // world_size) * world_size, rank=rank, world_size=world_size)
        self.segment_len, self.num_targets = segment_len, num_batches * num_lanes * segment_len
        self._split, self._num_lanes, self._num_batches, self._seed = split, num_lanes, num_batches, seed

    def __len__(self) -> int:
        """Forward passes, equal on all ranks."""
        return self._num_batches

    def __iter__(self) -> Iterator[Segment]:
        tokens, generator = self._split.read_all(), np.random.default_rng(self._seed)
        lanes, places = np.array(self.lanes), np.arange(self.segment_len + 1)
        for _ in range(self._num_batches):
            starts = generator.integers(0, len(tokens) - self.segment_len, self._num_lanes)
            own = starts.take(lanes, mode="clip")[:, None]
            yield _segment(tokens[own + places], lanes[:, None] < self._num_lanes)


def _segment(tokens: npt.NDArray[np.unsignedinteger], is_row_L1: npt.NDArray[np.bool_]) -> Segment:
    """A rank's rows, all targets counting; behind the last one those that make it as many as others have, of zeros."""
    segment = plain_segment(np.where(is_row_L1, tokens, 0).astype(np.int64))
    return segment._replace(scored=segment.scored & is_row_L1)
