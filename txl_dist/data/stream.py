"""Segments for training, each with what is needed to go on behind it.

Key properties:
- `LaneStream` yields (segment, state): the state to store once that very segment was trained on. What was
  prefetched meanwhile does not matter.
- A segment is a function of (corpora, state, lanes, segment_len): resuming costs milliseconds anywhere, ranks
  exchange nothing, and any number of ranks together reads the same global batches.
- Several corpora are mixed by lane: each lane reads one corpus, each corpus has its own position and epochs, and every
  batch holds them in the same proportion. Other weights or another number of lanes are a new cut (`continued`): what
  no lane has read yet is dealt out anew, no token twice and none left out.
- What made a run rewind is left out (`skipping`): a lane's stream is what lies outside the skips of its corpus.

    lane's stream   a b c d e f g h i ...       segment_len 3
    tokens row      a b c d                     inputs a b c, targets b c d; the next row is d e f g

What it gives up: at the border of two pieces (of stripes, of what was dealt out anew, or around a skip) a lane jumps:
one target in a piece belongs to other text. With document masks it is not scored.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.data.corpus import Shards, Split
from txl_dist.data.damage import DamagePolicy
from txl_dist.data.lanes import Cut, LanePlan, Ranges, Stretch, allot_lanes, merged, outside, owners_of_lanes
from txl_dist.data.shards import Tokens
from txl_dist.errors import CheckpointError, DataError, UnreachableError

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

STATE_VERSION = 2
STEPS_AT_ONCE = 8
MAX_TOKENS_AT_ONCE = 1 << 20


class Segment(NamedTuple):
    """The tokens of some lanes for one forward pass."""

    tokens: Int64s
    """[lanes, T+1]: inputs are [:, :-1], targets [:, 1:]; one token overlaps with the next segment."""
    documents: Int64s
    """[lanes, T+1]: for each token the lane position at which its document, or the piece of it that the lane reads,
    begins. Unique in the lane, ascending, and a function of the position: nothing to store."""
    scored: Bools
    """[lanes, T]: the target counts; not where a damaged document was replaced, nor where an evaluation pads."""


def plain_segment(tokens: Int64s) -> Segment:
    """[lanes, T+1] tokens of one document each, all targets counting."""
    return Segment(tokens, np.zeros_like(tokens), np.ones((tokens.shape[0], tokens.shape[1] - 1), dtype=bool))


class Span(NamedTuple):
    """Consecutive positions that a lane reads."""

    position: int
    length: int
    begin: int
    """Where the skip before it ended, 0 without one: no piece of a document begins earlier."""


@dataclass(frozen=True)
class CorpusState:
    """Where the lanes of one corpus are."""

    name: str
    """For people; the fingerprint decides."""
    fingerprint: str
    """Data fingerprint of the corpus."""
    split: str
    num_lanes: int
    """Lanes that read it; 0 while it is paused."""
    position: int = 0
    """Tokens that each of these lanes has been trained on, or has skipped, since they were cut; never in a skip."""
    epoch: int = 0
    """Epoch in which they were cut."""
    rest: Ranges = ()
    """What of that epoch was cut; empty means all of it."""
    skips: Ranges = ()
    """Positions since that cut that no lane is trained on, or was."""

    def cut(self) -> Cut:
        """For `LanePlan`."""
        return Cut(num_lanes=self.num_lanes, epoch=self.epoch, rest=self.rest)

    def spans(self, num_tokens: int) -> Iterator[Span]:
        """Where the next so many tokens of each lane are."""
        begin = max((end for _, end in self.skips if end <= self.position), default=0)
        for first, end in outside(self.skips, self.position, sys.maxsize):
            length = min(end - first, num_tokens)
            yield Span(first, length, begin if first == self.position else first)
            num_tokens -= length
            if not num_tokens:
                return

    def advanced(self, num_tokens: int) -> CorpusState:
        """The state after each lane has been trained on so many tokens more."""
        *_, last = self.spans(num_tokens + 1)  # ends with the token behind them
        return replace(self, position=last.position + last.length - 1)


@dataclass(frozen=True)
class StreamState:
    """Where all lanes are, for a checkpoint. Lanes belong to corpora as `owners_of_lanes` says."""

    seed: int
    corpora: tuple[CorpusState, ...]
    version: int = field(default=STATE_VERSION)

    @property
    def num_lanes(self) -> int:
        """Lanes of all corpora."""
        return sum(corpus.num_lanes for corpus in self.corpora)

    def advanced(self, num_tokens: int) -> StreamState:
        """The state after every lane has been trained on so many tokens more."""
        return replace(self, corpora=tuple(one.advanced(num_tokens) if one.num_lanes else one for one in self.corpora))

    def skipping(self, begin: StreamState, end: StreamState) -> StreamState:
        """This state, to be rewound to, but what was trained on from `begin` to `end`, or skipped before, is left out.

        Both are states of the same cut that the stream came to from here.
        """
        corpora = [
            replace(one, skips=merged(sorted((*last.skips, (first.position, last.position)))))
            for one, first, last in zip(self.corpora, begin.corpora, end.corpora, strict=True)
        ]
        return replace(self, corpora=tuple(corpora)).advanced(0)  # a skip may begin right here

    def has_lanes_of(self, other: StreamState) -> bool:
        """Whether every lane reads the same corpus, and goes on where it was: then its memory is still true."""
        mine, others = (
            [(one.fingerprint, one.split, one.num_lanes) for one in state.corpora if one.num_lanes]
            for state in (self, other)
        )
        return mine == others

    def to_dict(self) -> dict[str, Any]:
        """JSON values. After each new cut within an epoch, `rest` takes about 20 bytes more per lane."""
        values = asdict(self)
        for one, corpus in zip(values["corpora"], self.corpora, strict=True):
            one |= {"rest": _text_of(corpus.rest), "skips": _text_of(corpus.skips)}
        return values

    @staticmethod
    def from_dict(values: dict[str, Any]) -> StreamState:
        """Raises CheckpointError for values of another version or form."""
        if values.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the stream state has version {values.get('version')}, this program reads {STATE_VERSION}. "
                "Continue with the program that wrote the checkpoint."
            )
        try:
            corpora = [
                # States from before there were skips have none.
                CorpusState(**{**one, "rest": _ranges_of(one["rest"]), "skips": _ranges_of(one.get("skips", ""))})
                for one in values["corpora"]
            ]
            return StreamState(**{**values, "corpora": tuple(corpora)})
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"the stream state of the checkpoint is damaged: {error}.") from error


def _text_of(ranges: Ranges) -> str:
    """Gaps and lengths in turn are smaller than bounds, and a text stays on one line."""
    return " ".join(map(str, np.diff(np.array(ranges, np.int64).reshape(-1), prepend=0).tolist()))


def _ranges_of(text: str) -> Ranges:
    bounds = np.cumsum([int(step) for step in text.split()], dtype=np.int64).reshape(-1, 2)
    return tuple((first, end) for first, end in bounds.tolist())


def first_state(splits: Sequence[Split], *, weights: Sequence[float] = (), num_lanes: int, seed: int) -> StreamState:
    """The state of a new run. No weights means in proportion to the tokens. Raises ConfigError for bad weights."""
    names = [split.corpus.location for split in splits]
    allotted = allot_lanes(num_lanes, weights or [split.tokens for split in splits], names=names)
    return StreamState(
        seed=seed,
        corpora=tuple(
            CorpusState(name=split.corpus.name, fingerprint=split.corpus.fingerprint, split=split.name, num_lanes=count)
            for split, count in zip(splits, allotted, strict=True)
        ),
    )


def continued(old: StreamState, wanted: StreamState, splits: Sequence[Split]) -> StreamState:
    """Where `wanted`, the first state of the present settings, goes on behind `old`, the state of a checkpoint.

    A corpus that keeps its number of lanes keeps its place; one that does not is cut anew; a new one begins.
    Raises CheckpointError if the seed differs, or a corpus that was read is missing: its data would be lost.
    """
    if old.seed != wanted.seed:
        raise CheckpointError(
            f"the checkpoint's stream has the seed {old.seed}, this run {wanted.seed}. Restore run.seed."
        )
    before = {(one.fingerprint, one.split): one for one in old.corpora}
    missing = before.keys() - {(one.fingerprint, one.split) for one in wanted.corpora}
    if missing:
        lost = [one for key, one in before.items() if key in missing]
        names = ", ".join(f"{one.name} (split {one.split}, fingerprint {one.fingerprint[:12]})" for one in lost)
        raise CheckpointError(
            f"the checkpoint was trained on data that is not given now: {names}. Restore it in data.path or "
            "data.more_paths (a weight of 0 in data.weights pauses a corpus), or start a new run."
        )
    return replace(
        wanted,
        corpora=tuple(
            _continued_corpus(before[key], new, split) if (key := (new.fingerprint, new.split)) in before else new
            for new, split in zip(wanted.corpora, splits, strict=True)
        ),
    )


def _continued_corpus(old: CorpusState, new: CorpusState, split: Split) -> CorpusState:
    if old.num_lanes == new.num_lanes:
        return replace(old, name=new.name)
    if not old.num_lanes:  # was paused: its rest was listed then
        return replace(old, name=new.name, num_lanes=new.num_lanes)
    plan = LanePlan(split.shard_tokens, old.cut(), seed=0, document_tokens=lambda shard: np.empty(0, np.int64))
    epoch, rest = plan.rest_of_epoch(old.position, old.skips)
    return replace(new, epoch=epoch, rest=rest)


class LaneStream:
    """The endless training stream of some lanes."""

    def __init__(
        self,
        splits: Sequence[Split],
        state: StreamState,
        *,
        segment_len: int,
        lanes: range,
        damage: DamagePolicy | None = None,
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
                damage=damage or DamagePolicy(),
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

    def stretch_at(self, lane: int, state: StreamState) -> tuple[int, Stretch]:
        """(index of the corpus, where in it) of the first token of `segment_at` in one of our lanes, for people."""
        row = self.lanes.index(lane)
        corpus = self._corpus_of_row[row]
        stretch = self._rows[row].locate(state.corpora[corpus].position)
        span = next(state.corpora[corpus].spans(stretch.length))
        return corpus, stretch._replace(length=span.length, begin=max(stretch.begin, span.begin))

    def _read(self, state: StreamState, segment: Segment) -> None:
        segment.scored.fill(True)
        spans = [[*one.spans(segment.tokens.shape[1])] for one in state.corpora]
        for row, (reader, corpus) in enumerate(zip(self._rows, self._corpus_of_row, strict=True)):
            reader.read(spans[corpus], segment, row, mark=self._mark_documents)

    def _buffer(self, steps: int = 1) -> Segment:
        shape = len(self.lanes), self.segment_len * steps + 1
        return Segment(
            tokens=np.empty(shape, np.int64),
            documents=np.zeros(shape, np.int64),
            scored=np.ones((shape[0], shape[1] - 1), dtype=bool),
        )


def _steps_of(block: Segment, first: int, count: int) -> Segment:
    """A view of `count` inputs from the first one on, and of their targets."""
    end = first + count
    return Segment(block.tokens[:, first : end + 1], block.documents[:, first : end + 1], block.scored[:, first:end])


class _CorpusReader:
    """What the lanes of one corpus share on a rank: its plan and its open shards."""

    def __init__(self, split: Split, cut: Cut, *, seed: int, num_own_lanes: int, damage: DamagePolicy) -> None:
        self._split = split
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

    def prefetch_after(self, lane: int, position: int, stretch: Stretch) -> None:
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

    def locate(self, position: int) -> Stretch:
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
