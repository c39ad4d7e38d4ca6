"""Segments for training and evaluation, each with what is needed to go on behind it.

Key properties:
- `LaneStream` yields (segment, state): the state to store once that very segment was trained on. What was
  prefetched meanwhile does not matter.
- A segment is a function of (corpus, split, num_lanes, seed, lanes, position): resuming costs milliseconds anywhere,
  ranks exchange nothing, and any number of ranks together reads the same global batches.
- `EvalStream` reads a split once, in file order, and scores every target exactly once, however it is cut.

    lane's stream   a b c d e f g h i ...       segment_len 3
    tokens row      a b c d                     inputs a b c, targets b c d; the next row is d e f g

What it gives up: worker processes. One thread (`prefetch`) reads far faster than any model trains.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from txl_dist.data.corpus import Corpus, Shards
from txl_dist.data.lanes import LanePlan, Stretch, lanes_of_rank
from txl_dist.errors import CheckpointError, DataError

Item = TypeVar("Item")
Int64s = npt.NDArray[np.int64]

STATE_VERSION = 1
_POLL_S = 0.1


class Segment(NamedTuple):
    """One step's tokens of some lanes."""

    tokens: Int64s
    """[lanes, T+1]: inputs are [:, :-1], targets [:, 1:]; one token overlaps with the next segment."""
    documents: Int64s
    """[lanes, T+1]: for each token the lane position at which its document, or the piece of it inside this stripe,
    begins. Unique in the lane, ascending, and a function of the position: nothing to store."""


class EvalSegment(NamedTuple):
    """One forward pass of evaluation; tokens and documents as in `Segment`, padded with tokens that are not scored."""

    tokens: Int64s
    documents: Int64s
    scored: npt.NDArray[np.bool_]
    """[lanes, T]: the target counts. T is the segment's length and what it overlaps the one before."""


@dataclass(frozen=True)
class StreamState:
    """Where the lanes are, for a checkpoint: one integer, and what must be equal for it to mean the same."""

    position: int
    """Tokens that each lane has been trained on."""
    num_lanes: int
    seed: int
    fingerprint: str
    """Data fingerprint of the corpus."""
    split: str
    version: int = STATE_VERSION

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> StreamState:
        """Raises CheckpointError for values of another version or form."""
        if values.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the stream state has version {values.get('version')}, this program reads {STATE_VERSION}. "
                "Continue with the program that wrote the checkpoint."
            )
        try:
            return StreamState(**values)
        except TypeError as error:
            raise CheckpointError(f"the stream state of the checkpoint is damaged: {error}.") from error


class LaneStream:
    """The endless training stream of some lanes of a split."""

    def __init__(
        self,
        corpus: Corpus,
        split: str,
        *,
        num_lanes: int,
        segment_len: int,
        seed: int,
        lanes: range,
        state: StreamState | None = None,
    ) -> None:
        """Raises DataError if the split has fewer tokens than lanes, CheckpointError if `state` is of other data."""
        self.segment_len = segment_len
        self.lanes = lanes
        start = StreamState(position=0, num_lanes=num_lanes, seed=seed, fingerprint=corpus.fingerprint, split=split)
        if state is not None:
            _check_same_stream(state, start)
            start = state
        self.state = start
        opened = corpus.split(split)
        # Each lane is in one shard, at a segment's border in two.
        max_open = 2 * len(lanes) + 2
        self._shards = Shards(opened, max_open=max_open)
        self.plan = LanePlan(
            opened.shard_tokens,
            num_lanes=num_lanes,
            seed=seed,
            document_tokens=lambda shard: self._shards[shard].lengths,
            num_cached=2 * max_open,
        )

    def __iter__(self) -> Iterator[tuple[Segment, StreamState]]:
        """Endless. The state is that after training on the segment."""
        values = self.state.to_dict()
        while True:
            segment = self.segment_at(values["position"])
            values["position"] += self.segment_len
            yield segment, StreamState(**values)

    def segment_at(self, position: int) -> Segment:
        """The segment whose first input is at this lane position."""
        shape = len(self.lanes), self.segment_len + 1
        segment = Segment(tokens=np.empty(shape, np.int64), documents=np.empty(shape, np.int64))
        for row, lane in enumerate(self.lanes):
            filled = 0
            while filled <= self.segment_len:
                stretch = self.plan.locate(lane, position + filled)
                tokens, documents = segment.tokens[row, filled:], segment.documents[row, filled:]
                filled += _copy_stretch(stretch, self._shards, tokens, documents)
        return segment


def _check_same_stream(state: StreamState, wanted: StreamState) -> None:
    differences = [
        f"{name} was {old}, is {new}"
        for (name, old), new in zip(state.to_dict().items(), wanted.to_dict().values(), strict=True)
        if name != "position" and old != new
    ]
    if differences:
        raise CheckpointError(
            f"the checkpoint's position belongs to another stream: {'; '.join(differences)}. "
            "Restore the corpus and the settings of that run, or start a new run."
        )


def _copy_stretch(stretch: Stretch, shards: Shards, tokens: Int64s, documents: Int64s) -> int:
    """Copy as much of the stretch as fits to the front of the rows; returns how much."""
    count = min(stretch.length, len(tokens))
    document = shards[stretch.shard].document(stretch.document)
    tokens[:count] = document[stretch.offset : stretch.offset + count]
    documents[:count] = stretch.begin
    return count


class EvalStream:
    """A split read once in file order, cut into `num_lanes` stripes of equal length.

    Of N tokens all but the first are targets. Lane l scores the targets of its stripe, beginning with an empty
    memory; so fewer lanes give more context, more lanes are faster. Short lanes, and lanes added so that every rank
    has equally many, are padded with id 0 and not scored: every rank makes the same number of forward passes.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: str,
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
        opened = corpus.split(split)
        num_tokens = min(opened.tokens, max_tokens) if max_tokens else opened.tokens
        if num_tokens < 2:
            raise DataError(
                f"split {split!r} of {corpus.location} gives {num_tokens} tokens to evaluate; two are the fewest. "
                "Prepare more held-out text or raise eval.max_tokens."
            )
        self.segment_len, self.overlap_len = segment_len, overlap_len
        self.num_targets = num_tokens - 1
        self.stripe_len = -(-self.num_targets // num_lanes)
        self.lanes = lanes_of_rank(-(-num_lanes // world_size) * world_size, rank=rank, world_size=world_size)
        self._shards = Shards(opened, max_open=2 * len(self.lanes) + 2)
        self._shard_starts = np.cumsum(opened.shard_tokens) - opened.shard_tokens

    def __len__(self) -> int:
        """Forward passes, equal on all ranks."""
        return (self.stripe_len + self.segment_len - 1) // self.segment_len

    def __iter__(self) -> Iterator[EvalSegment]:
        for step in range(len(self)):
            yield self._segment_at(step * self.segment_len)

    def _segment_at(self, position: int) -> EvalSegment:
        overlap = min(position, self.overlap_len)
        shape = len(self.lanes), overlap + self.segment_len
        scored = np.zeros(shape, dtype=bool)
        tokens = np.zeros((shape[0], shape[1] + 1), dtype=np.int64)
        documents = np.zeros_like(tokens)
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
                stretch = self._locate(lane, position - overlap + filled)
                filled += _copy_stretch(stretch, self._shards, tokens[row, end], documents[row, end])
            # Padding is a document of its own: with document masks no token sees it, and it sees no empty row.
            documents[row, filled:] = lane_len + 1
        return EvalSegment(tokens=tokens, documents=documents, scored=scored)

    def _locate(self, lane: int, position: int) -> Stretch:
        token = lane * self.stripe_len + position
        index = int(self._shard_starts.searchsorted(token, side="right")) - 1
        shard = self._shards[index]
        in_shard = token - int(self._shard_starts[index])
        document = int(shard.starts.searchsorted(in_shard, side="right")) - 1
        offset = in_shard - int(shard.starts[document])
        length = int(shard.lengths[document]) - offset
        return Stretch(0, index, document, offset=offset, length=length, begin=position - min(offset, position))


def prefetch(iterable: Iterable[Item], *, depth: int) -> Generator[Item, None, None]:
    """The same items, made ahead by one background thread, at most `depth` of them waiting.

    The thread starts with the first `next`. An exception in it is raised here, behind the items made before it.
    Closing the iterator ends the thread; it waits for the item that is being made.
    """
    waiting: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(kind: str, value: Any) -> None:
        while not stop.is_set():
            try:
                return waiting.put((kind, value), timeout=_POLL_S)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in iterable:
                put("item", item)
                if stop.is_set():
                    return
            put("end", None)
        except BaseException as error:  # noqa: BLE001  whatever ends the thread is raised in the consumer
            put("error", error)

    thread = threading.Thread(target=work, name="txl-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = waiting.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stop.set()
        thread.join()
