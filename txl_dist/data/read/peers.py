"""Held-out text as the peers' programs cut it, so that a published number can be set beside ours.

`PeerRows` is the original's `LMOrderedIterator`, with NVIDIA's warm-up if asked for; `RandomCrops` is nanoGPT's
`get_batch`. Both hold the split in memory, as the peers do, score fewer tokens than there are, and give each row the
same text whatever the number of ranks. What our own evaluation does instead: `evaluation.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from txl_dist.data.read.corpus import Split
from txl_dist.data.read.lanes import lanes_of_rank
from txl_dist.data.read.stream import Int64s, Segment, plain_segment
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
                f"split {split.name!r} has {split.tokens:,} tokens, {row_len:,} for each of this protocol's "
                f"{num_lanes} rows, which need {max(2, num_warm):,}. Score a longer one (--split, --data)"
                + (", or give less --memory-len." if num_warm > 2 else ".")
            )
        self.lanes = lanes_of_rank(-(-num_lanes // world_size) * world_size, rank=rank, world_size=world_size)
        self.segment_len, self.num_targets = min(segment_len, row_len - 1 + num_warm), num_lanes * (row_len - 1)
        self._num_warm = num_warm
        rows = split.read_all()[: num_lanes * row_len].reshape(num_lanes, row_len).astype(np.int64)
        before = np.roll(rows, 1, axis=0)[:, row_len - num_warm :]
        self._rows = _of_lanes(np.concatenate([before, rows], axis=1), self.lanes)
        self._is_row = np.array([lane < num_lanes for lane in self.lanes])[:, None]

    def __len__(self) -> int:
        """Forward passes, equal on all ranks."""
        return int(-(-(self._rows.shape[1] - 1) // self.segment_len))

    def __iter__(self) -> Iterator[Segment]:
        for start in range(0, self._rows.shape[1] - 1, self.segment_len):
            segment = plain_segment(np.ascontiguousarray(self._rows[:, start : start + self.segment_len + 1]))
            yield segment._replace(scored=segment.scored & self._is_row & (start >= self._num_warm))


class RandomCrops:
    """`num_batches` times `num_lanes` pieces of `segment_len` tokens from random places, each alone, all scored."""

    overlap_len = 0

    def __init__(
        self, split: Split, *, num_lanes: int, segment_len: int, num_batches: int, seed: int, rank: int, world_size: int
    ) -> None:
        """Raises ConfigError if the split is no longer than one of them."""
        if split.tokens <= segment_len:
            raise ConfigError(
                f"split {split.name!r} has {split.tokens:,} tokens, and a crop with its last target "
                f"{segment_len + 1:,}. Give a shorter --segment-len, or score a longer one (--split, --data)."
            )
        self.lanes = lanes_of_rank(-(-num_lanes // world_size) * world_size, rank=rank, world_size=world_size)
        self.segment_len, self.num_targets = segment_len, num_batches * num_lanes * segment_len
        self._num_lanes, self._num_batches, self._seed = num_lanes, num_batches, seed
        self._tokens = split.read_all()

    def __len__(self) -> int:
        """Forward passes, equal on all ranks."""
        return self._num_batches

    def __iter__(self) -> Iterator[Segment]:
        generator, places = np.random.default_rng(self._seed), np.arange(self.segment_len + 1)
        is_row = np.array([lane < self._num_lanes for lane in self.lanes])[:, None]
        for _ in range(self._num_batches):
            starts = generator.integers(0, len(self._tokens) - self.segment_len, self._num_lanes)
            crops = self._tokens[starts[:, None] + places].astype(np.int64)
            segment = plain_segment(_of_lanes(crops, self.lanes))
            yield segment._replace(scored=segment.scored & is_row)


def _of_lanes(rows: Int64s, lanes: range) -> Int64s:
    """A rank's rows; behind the last one those that make it as many as the others have, of zeros."""
    own = rows[lanes.start : lanes.stop]
    return np.pad(own, ((0, len(lanes) - len(own)), (0, 0)))
