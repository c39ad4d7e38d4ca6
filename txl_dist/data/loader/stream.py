"""Segments for training, each with what is needed to go on behind it.

Key properties:
- `LaneStream` yields (segment, state): the state to store once that very segment was trained on. What was
  prefetched meanwhile does not matter.
- A segment is a function of (corpora, state, lanes, segment_len): resuming costs milliseconds anywhere, ranks
  exchange nothing, and any number of ranks together reads the same global batches.
- Several corpora are mixed by lane: each lane reads one corpus, each corpus has its own position and epochs, and every
  batch holds them in the same proportion. `position` says where they are.

    lane's stream   a b c d e f g h i ...       segment_len 3
    tokens row      a b c d                     inputs a b c, targets b c d; the next row is d e f g

What it gives up: at the border of two pieces (of stripes, of what was dealt out anew, or around a skip) a lane jumps:
one target in a piece belongs to other text. With document masks it is scored only where an end-of-text stands before a
document that begins there, which is what a border between two documents is anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.data.format import Tokens
from txl_dist.data.loader.corpus import Shards, Split
from txl_dist.data.loader.corruption import CorruptionPolicy
from txl_dist.data.loader.lanes import LanePartition, LanePlan, TokenSlice, owners_of_lanes
from txl_dist.data.loader.stream_state import Span, StreamState
from txl_dist.errors import DataError, UnreachableError

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

STEPS_AT_ONCE = 8
MAX_TOKENS_AT_ONCE = 1 << 20


class Segment(NamedTuple):
    """The tokens of some lanes for one forward pass."""

    tokens: Int64s
    """[lanes, T+1]: inputs are [:, :-1], targets [:, 1:]; one token overlaps with the next segment."""
    documents: Int64s
    """[lanes, T+1]: for each token the lane position at which its document, or the piece of it that the lane reads,
    begins. Unique in the lane, ascending, and a function of the position: nothing to store."""
    opens: Bools
    """[lanes, T]: the input is an end-of-text, and its target the first token of a document: as an input it belongs to
    the document that it opens."""
    scored: Bools
    """[lanes, T]: the target counts; not where a damaged document was replaced, nor where an evaluation pads."""


def plain_segment(tokens: Int64s) -> Segment:
    """[lanes, T+1] tokens of one document each, all targets counting."""
    opens = np.zeros((tokens.shape[0], tokens.shape[1] - 1), dtype=bool)
    return Segment(tokens, np.zeros_like(tokens), opens, ~opens)


class LaneStream:
    """The endless training stream of some lanes."""

    def __init__(
        self,
        splits: Sequence[Split],
        state: StreamState,
        *,
        segment_len: int,
        lanes: range,
        damage: CorruptionPolicy | None = None,
        mark_documents: bool = True,
        num_buffers: int = 0,
    ) -> None:
        """`splits` are those of `state.corpora`, in the same order. Who masks no documents need not have them marked:
        then all are 0. With `num_buffers` the segments are views of a ring: each holds until so many more were taken
        from the iterator. 0: each holds for ever.

        Raises DataError if a split has fewer tokens than lanes.
        """
        self.segment_len, self.lanes, self.state = segment_len, lanes, state
        self._num_buffers, self._mark_documents = num_buffers, mark_documents
        owners, numbers = owners_of_lanes([one.num_lanes for one in state.corpora], seed=state.seed)
        owners, numbers = owners[lanes.start : lanes.stop], numbers[lanes.start : lanes.stop]
        readers = {
            index: _CorpusReader(
                splits[index],
                state.corpora[index].cut(),
                seed=state.seed,
                num_own_lanes=int((owners == index).sum()),
                damage=damage or CorruptionPolicy(),
            )
            for index in np.unique(owners).tolist()
        }
        self._corpus_of_row: list[int] = owners.tolist()
        self._rows = [
            _LaneReader(readers[owner], number) for owner, number in zip(owners.tolist(), numbers.tolist(), strict=True)
        ]

    def __iter__(self) -> Iterator[tuple[Segment, StreamState]]:
        """Endless. The state is that after training on the segment."""
        state, size = self.state, self.segment_len
        # Several steps of a lane lie together in its shard: reading them at once is three times faster.
        steps = max(1, min(STEPS_AT_ONCE, MAX_TOKENS_AT_ONCE // (size * len(self.lanes))))
        ring = [self._buffer(steps) for _ in range(-(-self._num_buffers // steps) + 1 if self._num_buffers else 0)]
        for turn in itertools.count():
            block = ring[turn % len(ring)] if ring else self._buffer(steps)
            for step in range(self._read_steps(state, block, steps)):
                state = state.advanced(size)
                yield _steps_of(block, step * size, size), state

    def _read_steps(self, state: StreamState, block: Segment, steps: int) -> int:
        """Fill a block; returns how many of its steps can be trained on. Raises DataError if the first one cannot."""
        try:
            self._read(state, block)
        except UnreachableError:
            raise
        except DataError:
            if steps == 1:
                raise
            # The steps before the damage are whole, and come first.
            self._read(state, _steps_of(block, 0, self.segment_len))
            return 1
        return steps

    def segment_at(self, state: StreamState) -> Segment:
        """The segment that is trained on next at a state of the same cut as ours."""
        segment = self._buffer()
        self._read(state, segment)
        return segment

    def stretch_at(self, lane: int, state: StreamState) -> tuple[int, TokenSlice]:
        """(index of the corpus, where in it) of the first token of `segment_at` in one of our lanes, for people."""
        row = self.lanes.index(lane)
        corpus = self._corpus_of_row[row]
        stretch = self._rows[row].locate(state.corpora[corpus].position)
        span = next(state.corpora[corpus].spans(stretch.length))
        return corpus, stretch._replace(length=span.length, begin=max(stretch.begin, span.begin))

    def _read(self, state: StreamState, segment: Segment) -> None:
        segment.scored.fill(True)
        segment.opens.fill(False)
        spans = [[*one.spans(segment.tokens.shape[1])] for one in state.corpora]
        for row, (reader, corpus) in enumerate(zip(self._rows, self._corpus_of_row, strict=True)):
            reader.read(spans[corpus], segment, row, mark=self._mark_documents)

    def _buffer(self, steps: int = 1) -> Segment:
        shape = len(self.lanes), self.segment_len * steps + 1
        return Segment(
            tokens=np.empty(shape, np.int64),
            documents=np.zeros(shape, np.int64),
            opens=np.zeros((shape[0], shape[1] - 1), dtype=bool),
            scored=np.ones((shape[0], shape[1] - 1), dtype=bool),
        )


def _steps_of(block: Segment, first: int, count: int) -> Segment:
    """A view of `count` inputs from the first one on, and of their targets."""
    end = first + count
    return Segment(
        tokens=block.tokens[:, first : end + 1],
        documents=block.documents[:, first : end + 1],
        opens=block.opens[:, first:end],
        scored=block.scored[:, first:end],
    )


class _CorpusReader:
    """What the lanes of one corpus share on a rank: its plan and its open shards."""

    def __init__(
        self, split: Split, cut: LanePartition, *, seed: int, num_own_lanes: int, damage: CorruptionPolicy
    ) -> None:
        self._split = split
        self.end_of_text = split.corpus.end_of_text
        # A lane's own view keeps its shard mapped; more here would only keep a cache from making room.
        max_open = num_own_lanes + 1
        self.shards = Shards(split, max_open=max_open, damage=damage)
        self.plan = LanePlan(
            split.shard_tokens,
            cut,
            seed=seed,
            document_tokens=self.shards.lengths,
            num_cached=2 * max_open,
        )

    def prefetch_after(self, lane: int, position: int, stretch: TokenSlice) -> None:
        """Tell the storage which shard the lane will read next."""
        self._split.prefetch([self.plan.shard_after(lane, position, stretch)])


class _LaneReader:
    """One lane. Between calls it keeps the stretch it reads, for speed: what it yields depends on the position only."""

    def __init__(self, corpus: _CorpusReader, lane: int) -> None:
        self._corpus = corpus
        self._lane = lane
        self._start = self._begin = 0
        self._shard = -1
        self._tokens: Tokens = np.empty(0, np.uint16)
        self._is_whole = True
        self._begins_document = False

    def locate(self, position: int) -> TokenSlice:
        """Where the lane is at a position. Raises DataError."""
        return self._corpus.plan.locate(self._lane, position)

    def read(self, spans: Sequence[Span], segment: Segment, row: int, *, mark: bool) -> None:
        """Fill a row of the segment with these positions. Raises DataError for damage that may not be skipped."""
        filled = 0
        for position, length, begin in spans:
            wanted, before = filled + length, position - filled
            while filled < wanted:
                first = before + filled - self._start
                if not 0 <= first < len(self._tokens):
                    self._move(before + filled)
                    first = 0
                piece = self._tokens[first : first + wanted - filled]
                end = filled + len(piece)
                segment.tokens[row, filled:end] = piece
                if mark:
                    segment.documents[row, filled:end] = max(self._begin, begin)
                    if filled and not first and self._begins_document:
                        segment.opens[row, filled - 1] = segment.tokens[row, filled - 1] == self._corpus.end_of_text
                if not self._is_whole:
                    segment.scored[row, max(filled - 1, 0) : end] = False
                filled = end

    def _move(self, position: int) -> None:
        stretch = self.locate(position)
        if stretch.shard != self._shard:
            self._corpus.prefetch_after(self._lane, position, stretch)
            self._shard = stretch.shard
        tokens, self._is_whole = self._corpus.shards.document(stretch.shard, stretch.document)
        self._tokens = tokens[stretch.offset : stretch.offset + stretch.length]
        if not len(self._tokens):
            raise DataError(f"lane {self._lane}, position {position}: shard {stretch.shard} changed while it was read.")
        self._start, self._begin = position, stretch.begin
        self._begins_document = not stretch.offset


def documents_at(splits: Sequence[Split], state: StreamState, lanes: range) -> list[str]:
    """What lanes read at a state, for people: a document each."""
    stream = LaneStream(splits, state, segment_len=1, lanes=lanes)
    found = []
    for lane in lanes:
        number, stretch = stream.stretch_at(lane, state)
        corpus = splits[number].corpus
        found.append(
            f"lane {lane}: {splits[number].shards[stretch.shard].name} of {corpus.name}, document {stretch.document}, "
            f"token {stretch.offset}"
        )
    return found
