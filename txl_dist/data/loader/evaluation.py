"""Segments for evaluation: a split is read once, in file order, and each target token is scored exactly once.

This is true for any number of lanes (batch rows, each with its own part of the split). With document masks the first
token of a document can only be predicted from the end-of-text before it. As an input, an end-of-text therefore belongs
to the document that follows it. In a corpus without end-of-text, document masks leave the first token of each document
without a prediction.

Limitations: damaged documents are not skipped. Damage always ends an evaluation, because the score of another text
would look like a valid score.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from txl_dist.console.formatting import counted
from txl_dist.data.loader.lanes import lanes_of_rank
from txl_dist.data.loader.shards import Shards, Split
from txl_dist.data.loader.stream import Int64s, Segment
from txl_dist.errors import DataError


class EvaluationText(Protocol):
    """Interface of a text to evaluate: iterating yields the segments of this rank in order.

    Each segment marks the targets that are scored. `len` is the number of segments.
    """

    @property
    def lanes(self) -> range:
        """Indices of the lanes (batch rows) that this rank evaluates."""

    @property
    def segment_len(self) -> int:
        """Number of targets in each lane (batch row) of a segment. Repeated context tokens before the targets are not
        counted."""

    @property
    def overlap_len(self) -> int:
        """Maximum number of tokens that a segment repeats from the text before it, as context that is not scored
        again."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Segment]: ...


class EvalStream:
    """Split to evaluate, read once in file order by `num_lanes` lanes (batch rows).

    All tokens but the first are targets. They are cut into consecutive ranges of equal length (stripes). Lane l scores
    the targets of stripe l and begins with an empty memory. So fewer lanes give the model more context, and more lanes
    are faster.

    The last lanes can be shorter than the others. Lanes are added until every rank has the same number of lanes. Short
    and added lanes are padded with id 0, which is not scored, so that every rank makes the same number of forward
    passes. To avoid segments that contain only padding, there are never more lanes than targets, and a segment is never
    longer than a stripe.
    """

    def __init__(
        self,
        split: Split,
        *,
        num_lanes: int,
        segment_len: int,
        overlap_len: int = 0,
        step_len: int = 0,
        rank: int = 0,
        world_size: int = 1,
        max_tokens: int = 0,
    ) -> None:
        """Select the lanes of this rank in the split's first `max_tokens` tokens (0 means all tokens).

        Each segment repeats up to `overlap_len` tokens before it as context. Each lane moves on by `step_len` tokens
        per segment. If `step_len` is 0, a lane moves on by the whole segment. With a smaller `step_len` segments
        overlap, and tokens are read several times. Raises DataError if there are fewer than two tokens to evaluate.
        """
        if max_tokens:
            num_tokens = min(split.tokens, max_tokens)
        else:
            num_tokens = split.tokens
        if num_tokens < 2:
            raise DataError(
                f"split {split.name!r} of {split.corpus.location} gives {counted(num_tokens, 'token')} to evaluate, "
                "but at least two tokens are needed. Prepare more text for this split. If eval.max_tokens is 1, "
                "raise `eval.max_tokens`."
            )
        self.split = split
        self.num_targets = num_tokens - 1
        self.num_lanes = min(num_lanes, self.num_targets)
        self.stripe_len = math.ceil(self.num_targets / self.num_lanes)
        self.segment_len = min(segment_len, self.stripe_len)
        self.step_len = min(step_len or self.segment_len, self.segment_len)
        self.overlap_len = overlap_len
        lanes_per_rank = math.ceil(self.num_lanes / world_size)
        num_padded_lanes = lanes_per_rank * world_size
        self.lanes = lanes_of_rank(num_padded_lanes, rank=rank, world_size=world_size)
        self._end_of_text = split.corpus.end_of_text
        self._shards = Shards(split, max_open=2 * len(self.lanes) + 2)
        self._shard_starts = np.cumsum(split.shard_tokens) - split.shard_tokens

    def __len__(self) -> int:
        """Return the number of forward passes, equal on all ranks."""
        num_after_first = math.ceil((self.stripe_len - self.segment_len) / self.step_len)
        return 1 + num_after_first

    def __iter__(self) -> Iterator[Segment]:
        """Yield the segments of this rank's lanes in order."""
        for step in range(len(self)):
            yield self._segment_at(step * self.step_len)

    def _segment_at(self, position: int) -> Segment:
        """Read the segment whose first scored target has the index `position` in each lane."""
        overlap = min(position, self.overlap_len)
        num_lanes = len(self.lanes)
        num_inputs = overlap + self.segment_len
        scored = np.zeros((num_lanes, num_inputs), dtype=bool)
        tokens = np.zeros((num_lanes, num_inputs + 1), dtype=np.int64)
        documents = np.zeros_like(tokens)
        opens = np.zeros((num_lanes, num_inputs), dtype=bool)
        for row, lane in enumerate(self.lanes):
            num_targets_left = self.num_targets - lane * self.stripe_len
            lane_len = min(self.stripe_len, num_targets_left)
            num_scored = min(self.segment_len, lane_len - position)
            if num_scored <= 0:
                documents[row] = max(lane_len, 0) + 1
                continue
            row_len = overlap + num_scored + 1
            scored[row, overlap : row_len - 1] = True
            filled = 0
            while filled < row_len:
                lane_position = position - overlap + filled
                unfilled_tokens = tokens[row, filled:row_len]
                unfilled_documents = documents[row, filled:row_len]
                count, is_begin = self._copy(lane, lane_position, unfilled_tokens, unfilled_documents)
                if filled and is_begin:
                    opens[row, filled - 1] = tokens[row, filled - 1] == self._end_of_text
                filled += count
            # Padding is a document of its own: with document masks no token sees it, and it sees no empty row.
            documents[row, filled:] = lane_len + 1
        return Segment(tokens=tokens, documents=documents, opens=opens, scored=scored)

    def _copy(self, lane: int, position: int, tokens: Int64s, documents: Int64s) -> tuple[int, bool]:
        """Fill the start of `tokens` and `documents` with tokens of one document, beginning at `position` of the lane.

        Returns (number of tokens written, whether the first written token is the first token of the document).
        """
        token = lane * self.stripe_len + position
        shard = int(self._shard_starts.searchsorted(token, side="right")) - 1
        lengths = self._shards.lengths(shard)
        starts = self._shards.starts(shard)
        in_shard = token - int(self._shard_starts[shard])
        document = int(starts.searchsorted(in_shard, side="right")) - 1
        offset = in_shard - int(starts[document])
        count = min(int(lengths[document]) - offset, len(tokens))
        document_tokens, _ = self._shards.document(shard, document)
        tokens[:count] = document_tokens[offset : offset + count]
        documents[:count] = position - min(offset, position)
        return count, offset == 0
