"""Segments for training, each with the state from which training continues after it.

Key properties:
- `LaneStream` yields (segment, state). The state is the one to store once that very segment was trained on, however
  many segments were prefetched meanwhile.
- A segment is a function of (corpora, state, lanes, segment_len). Resuming costs milliseconds anywhere, ranks exchange
  nothing, and any number of ranks together reads the same global batches.
- Several corpora are mixed by lane: each lane reads one corpus, and each corpus has its own position and epochs. Every
  batch holds the corpora in the same proportion. `stream_state` holds the positions.

    lane's stream   a b c d e f g h i ...       segment_len 3
    tokens row      a b c d                     inputs a b c, targets b c d; the next row is d e f g

Limitations: at the border of two pieces a lane jumps to other text, and one target there is of that other text.
Borders of pieces are those of stripes, of repartitioned ranges, and of skips. With document masks such a target is
scored only where an end-of-text stands before the beginning of a document, as at any border between two documents.
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
from txl_dist.data.loader.stream_state import PositionRange, StreamState
from txl_dist.errors import DataError, UnreachableError

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

STEPS_AT_ONCE = 8
"""Number of training steps that are read together, unless they have too many tokens."""
MAX_TOKENS_AT_ONCE = 1 << 20
"""Number of tokens, over all lanes, that are read together at most, except for one step."""


class Segment(NamedTuple):
    """The tokens of some lanes for one forward pass."""

    tokens: Int64s
    """[lanes, T+1]: inputs are [:, :-1], targets [:, 1:]; one token overlaps with the next segment."""
    documents: Int64s
    """[lanes, T+1]: for each token the lane position where its document, or the piece that the lane reads, begins. The
    number is unique in the lane, ascending, and a function of the position, so nothing has to be stored."""
    opens: Bools
    """[lanes, T]: whether the input is an end-of-text and its target the first token of a document. As an input, such
    an end-of-text belongs to the document that it opens."""
    scored: Bools
    """[lanes, T]: whether the target counts. False where a damaged document was replaced, or an evaluation pads."""


def plain_segment(tokens: Int64s) -> Segment:
    """Make a segment of [lanes, T+1] tokens, one document per lane, in which all targets count."""
    num_lanes, num_tokens = tokens.shape
    opens = np.zeros((num_lanes, num_tokens - 1), dtype=bool)
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
        """Read `splits`, those of `state.corpora` in the same order, from `state` on.

        Without `mark_documents` all `documents` of the segments are 0; only document masks need them. With
        `num_buffers` segments are views of a ring: each stays valid until so many more were taken from the iterator.
        With 0 each stays valid for ever. Raises DataError if a split has fewer tokens than lanes.
        """
        self.segment_len = segment_len
        self.lanes = lanes
        self.state = state
        self._num_buffers = num_buffers
        self._mark_documents = mark_documents
        all_owners, all_numbers = owners_of_lanes([corpus.num_lanes for corpus in state.corpora], seed=state.seed)
        owners = all_owners[lanes.start : lanes.stop]
        numbers = all_numbers[lanes.start : lanes.stop]
        readers = {}
        for index in np.unique(owners).tolist():
            readers[index] = _CorpusReader(
                splits[index],
                state.corpora[index].cut(),
                seed=state.seed,
                num_local_lanes=int((owners == index).sum()),
                damage=damage or CorruptionPolicy(),
            )
        self._corpus_of_row: list[int] = owners.tolist()
        self._rows = []
        for owner, number in zip(self._corpus_of_row, numbers.tolist(), strict=True):
            self._rows.append(_LaneReader(readers[owner], number))

    def __iter__(self) -> Iterator[tuple[Segment, StreamState]]:
        """Yield segments without end, each with the state after training on it."""
        state = self.state
        # The tokens of several steps are neighbours in a lane's shard: reading them at once is three times faster.
        tokens_per_step = self.segment_len * len(self.lanes)
        steps = max(1, min(STEPS_AT_ONCE, MAX_TOKENS_AT_ONCE // tokens_per_step))
        ring = []
        if self._num_buffers:
            num_blocks = -(-self._num_buffers // steps) + 1
            ring = [self._buffer(steps) for _ in range(num_blocks)]
        for turn in itertools.count():
            if ring:
                block = ring[turn % len(ring)]
            else:
                block = self._buffer(steps)
            num_read = self._read_steps(state, block, steps)
            for step in range(num_read):
                state = state.advanced(self.segment_len)
                yield _steps_of(block, step * self.segment_len, self.segment_len), state

    def _read_steps(self, state: StreamState, block: Segment, steps: int) -> int:
        """Fill a block and return how many of its steps can be trained on. Raises DataError if the first cannot."""
        try:
            self._read(state, block)
        except UnreachableError:
            raise
        except DataError:
            if steps == 1:
                raise
            # Steps before the damage are whole. Read the first alone; the next call comes closer to the damage.
            self._read(state, _steps_of(block, 0, self.segment_len))
            return 1
        return steps

    def segment_at(self, state: StreamState) -> Segment:
        """Read the segment that is trained on next at `state`, a state of the same partition as `self.state`."""
        segment = self._buffer()
        self._read(state, segment)
        return segment

    def stretch_at(self, lane: int, state: StreamState) -> tuple[int, TokenSlice]:
        """Find the first token of `segment_at` in a lane of this rank: (index of the corpus, place in it)."""
        row = self.lanes.index(lane)
        corpus = self._corpus_of_row[row]
        tokens = self._rows[row].locate(state.corpora[corpus].position)
        unskipped = next(state.corpora[corpus].next_ranges(tokens.length))
        return corpus, tokens._replace(length=unskipped.length, begin=max(tokens.begin, unskipped.begin))

    def _read(self, state: StreamState, segment: Segment) -> None:
        """Fill a segment with the tokens at a state."""
        segment.scored.fill(True)
        segment.opens.fill(False)
        num_tokens = segment.tokens.shape[1]
        ranges = [list(corpus.next_ranges(num_tokens)) for corpus in state.corpora]
        for row, (reader, corpus) in enumerate(zip(self._rows, self._corpus_of_row, strict=True)):
            reader.read(ranges[corpus], segment, row, mark=self._mark_documents)

    def _buffer(self, steps: int = 1) -> Segment:
        """Allocate a segment of so many steps."""
        num_lanes = len(self.lanes)
        num_inputs = self.segment_len * steps
        return Segment(
            tokens=np.empty((num_lanes, num_inputs + 1), np.int64),
            documents=np.zeros((num_lanes, num_inputs + 1), np.int64),
            opens=np.zeros((num_lanes, num_inputs), dtype=bool),
            scored=np.ones((num_lanes, num_inputs), dtype=bool),
        )


def _steps_of(block: Segment, first: int, count: int) -> Segment:
    """Return a view of `count` inputs from `first` on, and of their targets."""
    end = first + count
    return Segment(
        tokens=block.tokens[:, first : end + 1],
        documents=block.documents[:, first : end + 1],
        opens=block.opens[:, first:end],
        scored=block.scored[:, first:end],
    )


class _CorpusReader:
    """Plan and open shards of one corpus, shared by its lanes on a rank."""

    def __init__(
        self, split: Split, cut: LanePartition, *, seed: int, num_local_lanes: int, damage: CorruptionPolicy
    ) -> None:
        self._split = split
        self.end_of_text = split.corpus.end_of_text
        # Each lane's view keeps its shard mapped. More open shards would only keep a cache from making room.
        max_open = num_local_lanes + 1
        self.shards = Shards(split, max_open=max_open, damage=damage)
        self.plan = LanePlan(
            split.shard_tokens,
            cut,
            seed=seed,
            document_tokens=self.shards.lengths,
            num_cached=2 * max_open,
        )

    def prefetch_after(self, lane: int, position: int, tokens: TokenSlice) -> None:
        """Ask the storage for the shard that the lane will read after the one of `tokens`."""
        self._split.prefetch([self.plan.shard_after(lane, position, tokens)])


class _LaneReader:
    """Reader of one lane. It keeps the document of the last call for speed; its result depends on positions only."""

    def __init__(self, corpus: _CorpusReader, lane: int) -> None:
        self._corpus = corpus
        self._lane = lane
        self._start = 0  # lane position of the first token of `_tokens`
        self._begin = 0  # lane position where their document begins
        self._shard = -1
        self._tokens: Tokens = np.empty(0, np.uint16)
        self._is_whole = True
        self._begins_document = False

    def locate(self, position: int) -> TokenSlice:
        """Find the lane's tokens at a position. Raises DataError if a shard's records cannot be read."""
        return self._corpus.plan.locate(self._lane, position)

    def read(self, ranges: Sequence[PositionRange], segment: Segment, row: int, *, mark: bool) -> None:
        """Fill a row of the segment with the tokens at these positions; `mark` fills `documents` and `opens` too.

        Raises DataError for damage that may not be skipped.
        """
        filled = 0
        for position, length, begin in ranges:
            range_end = filled + length
            shift = position - filled  # from an index in the row to a lane position
            while filled < range_end:
                first = shift + filled - self._start
                if not 0 <= first < len(self._tokens):
                    self._move(shift + filled)
                    first = 0
                piece = self._tokens[first : first + range_end - filled]
                end = filled + len(piece)
                segment.tokens[row, filled:end] = piece
                if mark:
                    segment.documents[row, filled:end] = max(self._begin, begin)
                    is_document_start = first == 0 and self._begins_document
                    if filled > 0 and is_document_start:
                        before = segment.tokens[row, filled - 1]
                        segment.opens[row, filled - 1] = before == self._corpus.end_of_text
                if not self._is_whole:
                    segment.scored[row, max(filled - 1, 0) : end] = False
                filled = end

    def _move(self, position: int) -> None:
        """Load the document at a position. Raises DataError."""
        place = self.locate(position)
        if place.shard != self._shard:
            self._corpus.prefetch_after(self._lane, position, place)
            self._shard = place.shard
        tokens, self._is_whole = self._corpus.shards.document(place.shard, place.document)
        self._tokens = tokens[place.offset : place.offset + place.length]
        if not len(self._tokens):
            raise DataError(f"lane {self._lane}, position {position}: shard {place.shard} changed while it was read.")
        self._start = position
        self._begin = place.begin
        self._begins_document = place.offset == 0


def documents_at(splits: Sequence[Split], state: StreamState, lanes: range) -> list[str]:
    """Describe the document that each lane reads at a state, one line per lane."""
    stream = LaneStream(splits, state, segment_len=1, lanes=lanes)
    lines = []
    for lane in lanes:
        number, place = stream.stretch_at(lane, state)
        corpus = splits[number].corpus
        shard = splits[number].shards[place.shard]
        lines.append(f"lane {lane}: {shard.name} of {corpus.name}, document {place.document}, token {place.offset}")
    return lines
