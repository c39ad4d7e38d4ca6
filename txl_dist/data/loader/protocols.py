"""Evaluation protocols of other programs, so that results can be compared with published numbers.

`PeerRows` is the original's `LMOrderedIterator`, optionally with NVIDIA's warm-up. `RandomCrops` is nanoGPT's
`get_batch`. Both hold the split in memory while they run, 2 or 4 bytes per token, as those programs do. Each row gets
the same text whatever the number of ranks.

Limitations: they score fewer tokens than there are. The evaluation of this package (`evaluation.py`) scores all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from txl_dist.console.formatting import counted
from txl_dist.data.loader.corpus import Split
from txl_dist.data.loader.lanes import lanes_of_rank
from txl_dist.data.loader.stream import Segment, plain_segment
from txl_dist.errors import ConfigError


class PeerRows:
    """A split as `num_lanes` rows of equal length, run in parallel from an empty memory.

    N tokens give rows of S = N // num_lanes. The tokens after num_lanes * S are dropped, and the first token of a row
    is not a target, so num_lanes * (S - 1) are scored. Before each row, `warm_up_len` tokens, rounded up to whole
    segments, are run unscored: the last ones of the row before it (NVIDIA's data_utils). The first row's warm-up is
    the end of the last row. The last segment may be shorter.
    """

    overlap_len = 0

    def __init__(
        self, split: Split, *, num_lanes: int, segment_len: int, warm_up_len: int = 0, rank: int, world_size: int
    ) -> None:
        """Cut the split. Raises ConfigError if it is too short for so many rows."""
        row_len = split.tokens // num_lanes
        num_warm = _round_up(warm_up_len, segment_len)
        min_row_len = max(2, num_warm)
        if row_len < min_row_len:
            if num_warm > 2:
                other_remedy = ", or give less --memory-len."
            else:
                other_remedy = "."
            raise ConfigError(
                f"split {split.name!r} has {counted(split.tokens, 'token')}, {row_len:,} for each of this protocol's "
                f"{counted(num_lanes, 'row')}, which need {min_row_len:,}. Score a longer one (--split, --data)"
                + other_remedy
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
    """`num_batches` batches of `num_lanes` pieces from random places, each of `segment_len` tokens, all scored."""

    overlap_len = 0

    def __init__(
        self, split: Split, *, num_lanes: int, segment_len: int, num_batches: int, seed: int, rank: int, world_size: int
    ) -> None:
        """Take crops of the split. Raises ConfigError if it is no longer than one of them."""
        if split.tokens <= segment_len:
            raise ConfigError(
                f"split {split.name!r} has {counted(split.tokens, 'token')}, but a crop of one segment with its last "
                f"target needs {segment_len + 1:,} tokens. Give a shorter --segment-len, or score a longer split "
                f"(--split, --data)."
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
    """Round up to a multiple."""
    return math.ceil(count / multiple) * multiple


def _segment(tokens: npt.NDArray[np.unsignedinteger], is_row_L1: npt.NDArray[np.bool_]) -> Segment:
    """Make a segment of a rank's rows, all targets counting.

    Lanes that are no row, which give every rank equally many, hold zeros and are not scored.
    """
    row_tokens = np.where(is_row_L1, tokens, 0)
    segment = plain_segment(row_tokens.astype(np.int64))
    scored = segment.scored & is_row_L1
    return segment._replace(scored=scored)
