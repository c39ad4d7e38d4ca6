"""Segments for training, each with the state from which training continues after it.

Key properties:
- A lane is a row of the batch with its own token stream. `LaneStream` yields pairs (segment, state). After training on
  a segment, a checkpoint stores the state of this pair, no matter how many segments were prefetched.
- The content of a segment depends only on (corpora, state, lanes, segment_len). So resuming takes milliseconds at any
  position, ranks exchange no data, and the global batches do not depend on the number of ranks.
- Several corpora are mixed by lane: each lane reads one corpus, and each corpus has its own position and epochs. Every
  batch contains the corpora in the same proportion. `stream_state` keeps the positions.

    lane's stream   a b c d e f g h i ...       segment_len 3
    tokens row      a b c d                     inputs a b c, targets b c d (the next row is d e f g)

Limitations: a lane jumps to another place of the corpus at the end of its part of an epoch (stripe) and at skipped
ranges. If the corpus was divided again among other lanes within an epoch, a lane also jumps from one unread range to
the next. At each jump one target belongs to the new text. With document masks such a target is scored only if the
target is the first token of a document and the token before it is an end-of-text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.data.format import Tokens
from txl_dist.data.loader.corruption import CorruptionPolicy
from txl_dist.data.loader.lanes import LanePartition, LanePlan, TokenSlice, owners_of_lanes
from txl_dist.data.loader.shards import Shards, Split
from txl_dist.data.loader.stream_state import PositionRange, StreamState
from txl_dist.errors import DataError, UnreachableError

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

STEPS_AT_ONCE = 8
"""Number of training steps whose tokens are read together. Fewer steps are read together if they have more than
MAX_TOKENS_AT_ONCE tokens."""
MAX_TOKENS_AT_ONCE = 1 << 20
"""Maximum number of tokens, of all lanes of a rank, that are read together. A single step can have more."""


class Segment(NamedTuple):
    """Input of one forward pass: T tokens of each lane (row of the batch), with their targets, and arrays that mark
    documents and scored targets."""

    tokens: Int64s
    """[lanes, T+1] token ids. Inputs are [:, :-1] and targets are [:, 1:]. The last token of a segment is the first
    input of the next segment."""
    documents: Int64s
    """[lanes, T+1] number of the document that contains each token. The number is the lane position at which the
    document begins. If the lane reads only a later part of the document, the number is the position at which this part
    begins. The numbers ascend and are unique in the lane. They are computed from the position, so a checkpoint need not
    store them."""
    opens: Bools
    """[lanes, T] True where the input is an end-of-text and its target is the first token of a document. As an input,
    such an end-of-text belongs to the document that follows it."""
    scored: Bools
    """[lanes, T] True where the target is scored. False where a damaged document was replaced, and in the padding of an
    evaluation."""


def plain_segment(tokens: Int64s) -> Segment:
    """Return a segment of `tokens`, [lanes, T+1], with one document per lane and all targets scored."""
    num_lanes, num_tokens = tokens.shape
    opens = np.zeros((num_lanes, num_tokens - 1), dtype=bool)
    return Segment(tokens, np.zeros_like(tokens), opens, ~opens)


class LaneStream:
    """Endless stream of training segments for the lanes of one rank.

    A lane is a row of the batch with its own token stream. Iterating yields pairs (segment, state after training on the
    segment).
    """

    def __init__(
        self,
        splits: Sequence[Split],
        state: StreamState,
        *,
        segment_len: int,
        lanes: range,
        step_len: int = 0,
        damage: CorruptionPolicy | None = None,
        mark_documents: bool = True,
        num_buffers: int = 0,
    ) -> None:
        """Begin the stream at `state`. `splits` are the training splits of `state.corpora`, in the same order.

        Document numbers are needed only for document masks. Without `mark_documents` all `documents` of a segment are
        0. With `num_buffers` above 0, segments are views of reused buffers: a segment is valid until `num_buffers`
        further segments were taken from the iterator. With 0 every segment stays valid. `damage` decides whether
        damaged documents may be skipped. A step moves each lane on by `step_len` tokens. If `step_len` is 0, a step
        moves each lane on by the whole segment. With a smaller `step_len` each segment begins inside the segment before
        it. Raises DataError if a split has fewer tokens than lanes.
        """
        self.segment_len = segment_len
        self.step_len = step_len or segment_len
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
        """Yield segments without end, each with the stream state after training on that segment."""
        state = self.state
        # The tokens of several steps are neighbours in a lane's shard: reading them at once is three times faster.
        tokens_per_step = self.step_len * len(self.lanes)
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
                state = state.advanced(self.step_len)
                yield _steps_of(block, step * self.step_len, self.segment_len), state

    def _read_steps(self, state: StreamState, block: Segment, steps: int) -> int:
        """Fill `block`, a segment with room for the tokens of `steps` training steps. Returns the number of steps that
        were read.

        If a document of the block is damaged, only the first step is read. Raises DataError if the first step is
        damaged.
        """
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

    def positions(self, state: StreamState) -> list[int]:
        """Return the position of each lane of this rank at a state: the number of tokens that the lane has passed.

        Positions begin at 0 again when a corpus is divided among another number of lanes.
        """
        return [state.corpora[corpus].position for corpus in self._corpus_of_row]

    def segment_at(self, state: StreamState) -> Segment:
        """Return the segment that training reads next at `state`.

        `state` must divide the corpora among the lanes as `self.state` does.
        """
        segment = self._buffer()
        self._read(state, segment)
        return segment

    def stretch_at(self, lane: int, state: StreamState) -> tuple[int, TokenSlice]:
        """Return (index of the corpus, place in the corpus) of the tokens that a lane of this rank reads next at
        `state`."""
        row = self.lanes.index(lane)
        corpus = self._corpus_of_row[row]
        tokens = self._rows[row].locate(state.corpora[corpus].position)
        unskipped = next(state.corpora[corpus].next_ranges(tokens.length))
        return corpus, tokens._replace(length=unskipped.length, begin=max(tokens.begin, unskipped.begin))

    def _read(self, state: StreamState, segment: Segment) -> None:
        """Fill a segment with the tokens that follow `state`."""
        segment.scored.fill(True)
        segment.opens.fill(False)
        num_tokens = segment.tokens.shape[1]
        ranges = [list(corpus.next_ranges(num_tokens)) for corpus in state.corpora]
        for row, (reader, corpus) in enumerate(zip(self._rows, self._corpus_of_row, strict=True)):
            reader.read(ranges[corpus], segment, row, mark=self._mark_documents)

    def _buffer(self, steps: int = 1) -> Segment:
        """Allocate a segment with room for `steps` training steps."""
        num_lanes = len(self.lanes)
        num_inputs = self.step_len * (steps - 1) + self.segment_len
        return Segment(
            tokens=np.empty((num_lanes, num_inputs + 1), np.int64),
            documents=np.zeros((num_lanes, num_inputs + 1), np.int64),
            opens=np.zeros((num_lanes, num_inputs), dtype=bool),
            scored=np.ones((num_lanes, num_inputs), dtype=bool),
        )


def _steps_of(block: Segment, first: int, count: int) -> Segment:
    """Return a part of a segment as a view: `count` inputs, beginning at index `first`, and their targets."""
    end = first + count
    return Segment(
        tokens=block.tokens[:, first : end + 1],
        documents=block.documents[:, first : end + 1],
        opens=block.opens[:, first:end],
        scored=block.scored[:, first:end],
    )


class _CorpusReader:
    """Lane plan and open shards of one corpus, shared by all lanes of this rank that read the corpus."""

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
        """Hint to the storage that the lane will soon read the shard after the shard of `tokens`."""
        self._split.prefetch([self.plan.shard_after(lane, position, tokens)])


class _LaneReader:
    """Reader of the tokens of one lane of a corpus.

    It keeps the document that it read last, for speed. The tokens that it returns depend only on the positions.
    """

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
        """Return the place of the tokens that the lane reads from `position` on.

        Raises DataError if the records of a shard cannot be read.
        """
        return self._corpus.plan.locate(self._lane, position)

    def read(self, ranges: Sequence[PositionRange], segment: Segment, row: int, *, mark: bool) -> None:
        """Write the tokens at the lane positions `ranges` into one row of a segment. If `mark` is true, `documents` and
        `opens` of the segment are filled too.

        Raises DataError for a damaged document if skipping is not allowed.
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
        """Load the document that the lane reads at a position. Raises DataError if the document cannot be read."""
        place = self.locate(position)
        if place.shard != self._shard:
            self._corpus.prefetch_after(self._lane, position, place)
            self._shard = place.shard
        tokens, self._is_whole = self._corpus.shards.document(place.shard, place.document)
        self._tokens = tokens[place.offset : place.offset + place.length]
        if not len(self._tokens):
            raise DataError(
                f"lane {self._lane}, token {position} of the lane: the file of shard {place.shard} changed after the "
                "command had opened the file. Run the same command again."
            )
        self._start = position
        self._begin = place.begin
        self._begins_document = place.offset == 0


def documents_at(splits: Sequence[Split], state: StreamState, lanes: range) -> list[str]:
    """Return one line per lane that names the document and the token which the lane reads next at `state`."""
    stream = LaneStream(splits, state, segment_len=1, lanes=lanes)
    lines = []
    for lane in lanes:
        number, place = stream.stretch_at(lane, state)
        corpus = splits[number].corpus
        shard = splits[number].shards[place.shard]
        lines.append(f"lane {lane}: {shard.name} of {corpus.name}, document {place.document}, token {place.offset}")
    return lines
