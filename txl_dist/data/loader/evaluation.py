"""Segments of a held-out split: read once, in file order, every target scored exactly once, however it is cut.

With document masks too, where the documents end in end-of-text: as an input it belongs to the document that it opens.
Else the first token of a document has nothing to be predicted from, in any cut.

Damage always ends an evaluation: a score over other text would pass for the real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from txl_dist.console.formatting import counted
from txl_dist.data.loader.corpus import Shards, Split
from txl_dist.data.loader.lanes import lanes_of_rank
from txl_dist.data.loader.stream import Int64s, Segment
from txl_dist.errors import DataError


class EvaluationText(Protocol):
    """What an evaluation runs over: segments of some lanes, in order, and which of their targets count."""

    @property
    def lanes(self) -> range:
        """Those of this rank."""

    @property
    def segment_len(self) -> int:
        """Tokens of a segment, without those that are run again before it."""

    @property
    def overlap_len(self) -> int:
        """Most tokens that are run again before a segment, as context."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Segment]: ...


class EvalStream:
    """A split read once in file order, cut into `num_lanes` stripes of equal length.

    Of N tokens all but the first are targets. Lane l scores the targets of its stripe, beginning with an empty
    memory; so fewer lanes give more context, more lanes are faster. Short lanes, and lanes added so that every rank
    has equally many, are padded with id 0 and not scored: every rank makes the same number of forward passes. Lanes
    beyond the targets, and what of a segment is longer than a lane, would be nothing but padding: they are left out.
    """

    def __init__(
        self,
        split: Split,
        *,
        num_lanes: int,
        segment_len: int,
        overlap_len: int = 0,
        rank: int = 0,
        world_size: int = 1,
        max_tokens: int = 0,
    ) -> None:
        """`max_tokens` reads only the first so many tokens of the split; 0 reads all. Raises DataError if there
        are fewer than two tokens."""
        num_tokens = min(split.tokens, max_tokens) if max_tokens else split.tokens
        if num_tokens < 2:
            raise DataError(
                f"split {split.name!r} of {split.corpus.location} gives {counted(num_tokens, 'token')} to "
                "evaluate; two are the "
                "fewest. Prepare more held-out text or raise eval.max_tokens."
            )
        self.split, self.num_targets = split, num_tokens - 1
        self.num_lanes = min(num_lanes, self.num_targets)
        self.stripe_len = -(-self.num_targets // self.num_lanes)
        self.segment_len, self.overlap_len = min(segment_len, self.stripe_len), overlap_len
        self.lanes = lanes_of_rank(-(-self.num_lanes // world_size) * world_size, rank=rank, world_size=world_size)
        self._end_of_text = split.corpus.end_of_text
        self._shards = Shards(split, max_open=2 * len(self.lanes) + 2)
        self._shard_starts = np.cumsum(split.shard_tokens) - split.shard_tokens

    def __len__(self) -> int:
        """Forward passes, equal on all ranks."""
        return (self.stripe_len + self.segment_len - 1) // self.segment_len

    def __iter__(self) -> Iterator[Segment]:
        for step in range(len(self)):
            yield self._segment_at(step * self.segment_len)

    def _segment_at(self, position: int) -> Segment:
        overlap = min(position, self.overlap_len)
        shape = len(self.lanes), overlap + self.segment_len
        scored = np.zeros(shape, dtype=bool)
        tokens = np.zeros((shape[0], shape[1] + 1), dtype=np.int64)
        documents = np.zeros_like(tokens)
        opens = np.zeros(shape, dtype=bool)
        for row, lane in enumerate(self.lanes):
            lane_len = min(self.stripe_len, self.num_targets - lane * self.stripe_len)
            num_scored = min(self.segment_len, lane_len - position)
            if num_scored <= 0:
                documents[row] = max(lane_len, 0) + 1
                continue
            scored[row, overlap : overlap + num_scored] = True
            filled = 0
            while filled <= overlap + num_scored:
                end = slice(filled, overlap + num_scored + 1)
                count, is_begin = self._copy(lane, position - overlap + filled, tokens[row, end], documents[row, end])
                if filled and is_begin:
                    opens[row, filled - 1] = tokens[row, filled - 1] == self._end_of_text
                filled += count
            # Padding is a document of its own: with document masks no token sees it, and it sees no empty row.
            documents[row, filled:] = lane_len + 1
        return Segment(tokens=tokens, documents=documents, opens=opens, scored=scored)

    def _copy(self, lane: int, position: int, tokens: Int64s, documents: Int64s) -> tuple[int, bool]:
        """Fill the front of the rows from the document at this position.

        Returns (how many tokens, whether the first one begins the document).
        """
        token = lane * self.stripe_len + position
        index = int(self._shard_starts.searchsorted(token, side="right")) - 1
        lengths, starts = self._shards.lengths(index), self._shards.starts(index)
        in_shard = token - int(self._shard_starts[index])
        document = int(starts.searchsorted(in_shard, side="right")) - 1
        offset = in_shard - int(starts[document])
        count = min(int(lengths[document]) - offset, len(tokens))
        tokens[:count] = self._shards.document(index, document)[0][offset : offset + count]
        documents[:count] = position - min(offset, position)
        return count, not offset
