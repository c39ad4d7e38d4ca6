"""Lane arithmetic: which token of the corpus a lane reads at a position. Pure, no files.

A lane is one row of the global batch: an endless contiguous stream of tokens. In each epoch the shards, and the
documents inside each shard, come in an order that a frozen hash of (seed, epoch, id) decides. Their concatenation
of N tokens is cut into stripes of S = N // num_lanes tokens; lane l reads stripe l of epoch 0, of epoch 1, and on.

    epoch 0    | shard 2        | shard 0              | shard 1     |.    N tokens; "." = N mod num_lanes left out
    stripes    | lane 0      | lane 1      | lane 2      | lane 3    |.    S tokens each
                       ^ position p < S
    epoch 1    | shard 0              | shard 1     | shard 2        |.
    stripes    | lane 0      | lane 1      | lane 2      | lane 3    |.
                       ^ position S + p: all lanes change epoch together

So a position is one integer p, the same for all lanes; (lane, p) is found by two binary searches; every lane has
the same length, there is no short batch and nothing to agree on between ranks.

Cutting anew (another number of lanes in the middle of an epoch): what no lane has read yet is a list of token ranges,
`rest_of_epoch`. Joined, they are cut into the new stripes; behind these the lanes go on with the next whole epoch.

    epoch 0    |=====> lane 0|=====> lane 1|=====> lane 2|.    "=" is read, the ranges behind it and "." are the rest
    cut anew          | lane 0  | lane 1 ...

Skips (after a rewind, the tokens that went wrong) are ranges of lane positions that no lane reads: the stream of a lane
is what lies outside them. When lanes are cut anew within an epoch, what they were to skip of it is no part of its rest.

What it gives up: a document that spans a stripe's border is cut (at most num_lanes - 1 in an epoch), and fewer than
num_lanes tokens are left out of an epoch.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.console.formatting import counted
from txl_dist.errors import ConfigError, DataError

Int64s = npt.NDArray[np.int64]

SHARD_ORDER, _DOCUMENT_ORDER, _LANE_ORDER = 1, 2, 3
_MASK = (1 << 64) - 1


class TokenSlice(NamedTuple):
    """Consecutive tokens of one document that one lane reads, and where they lie."""

    epoch: int
    shard: int
    document: int
    """Index in the shard, in file order."""
    offset: int
    """First token, counted from the start of the document."""
    length: int
    """Tokens until the document or the lane's piece of the epoch ends."""
    begin: int
    """Lane position at which the document, or as much of it as this lane reads in one piece, begins."""
    shard_left: int
    """Tokens until the shard or the lane's piece of the epoch ends."""


Ranges = tuple[tuple[int, int], ...]
"""Ranges [first, behind the last) of tokens of one epoch or of lane positions, ascending and disjoint."""


@dataclass(frozen=True)
class LanePartition:
    """How the lanes of one corpus lie: in `num_lanes` stripes of one epoch or of its rest, then of whole epochs."""

    num_lanes: int
    epoch: int = 0
    """Epoch that was cut first."""
    rest: Ranges = ()
    """What of that epoch was cut; empty means all of it."""


def hash64(*keys: Any) -> npt.NDArray[np.uint64]:
    """splitmix64 over a tuple of integers, of which the last may be an array.

    Frozen: the order of documents, and so every resumed run, depends on it. numpy's generators may change their
    streams between versions (NEP 19).
    """
    value: npt.NDArray[np.uint64] = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            word = key.astype(np.uint64) if isinstance(key, np.ndarray) else np.uint64(key & _MASK)
            value = (value ^ word) + np.uint64(0x9E3779B97F4A7C15)
            value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            value = value ^ (value >> np.uint64(31))
    return value


def hashed_order(count: int, *keys: int) -> Int64s:
    """A permutation of range(count) that depends on nothing but its arguments."""
    return np.argsort(hash64(*keys, np.arange(count)), kind="stable")


def lanes_of_rank(num_lanes: int, *, rank: int, world_size: int) -> range:
    """The lanes that a rank owns. Raises ConfigError if the ranks cannot own equally many."""
    if num_lanes % world_size:
        raise ConfigError(
            f"{counted(num_lanes, 'lane')} cannot be shared equally by {counted(world_size, 'rank')}. "
            "Choose train.num_lanes divisible by the number of ranks."
        )
    share = num_lanes // world_size
    return range(rank * share, (rank + 1) * share)


def allot_lanes(num_lanes: int, weights: Sequence[float], *, names: Sequence[str] = ()) -> tuple[int, ...]:
    """Lanes per corpus in proportion to the weights, by largest remainder: every batch holds the same shares.

    Raises ConfigError if no weight is positive, or a positive one is too small for a lane.
    """
    total = math.fsum(weights)
    if not total > 0:
        raise ConfigError(f"data.weights={list(weights)} must have a positive one.")
    shares = [weight / total * num_lanes for weight in weights]
    lanes = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (lanes[i] - shares[i], i))
    for i in by_remainder[: num_lanes - sum(lanes)]:
        lanes[i] += 1
    for i, (weight, count) in enumerate(zip(weights, lanes, strict=True)):
        if weight > 0 and not count:
            raise ConfigError(
                f"corpus {names[i] if names else i} gets none of the {counted(num_lanes, 'lane')}: its share "
                f"is {shares[i]:.2f} "
                "lanes. Raise its weight in data.weights or train.num_lanes, or give it the weight 0."
            )
    return tuple(lanes)


def owners_of_lanes(allotted: Sequence[int], *, seed: int) -> tuple[Int64s, Int64s]:
    """([lanes] corpus of each lane, [lanes] its number among the lanes of that corpus).

    A frozen hash spreads the corpora over the lanes, and so over ranks; one corpus keeps its lanes in order.
    """
    in_order = np.repeat(np.arange(len(allotted)), allotted)
    owners: Int64s = in_order[hashed_order(len(in_order), seed, 0, _LANE_ORDER)]
    numbers = np.empty_like(owners)
    for corpus, count in enumerate(allotted):
        numbers[owners == corpus] = np.arange(count)
    return owners, numbers


def epochs_read(cut: LanePartition, position: int, *, num_tokens: int) -> float:
    """How often a corpus of so many tokens has been read when its lanes have come to this position."""
    rest_len = sum(end - first for first, end in cut.rest) or num_tokens
    first_stripe_len = rest_len // cut.num_lanes if cut.num_lanes else rest_len
    if position < first_stripe_len:
        return cut.epoch + (num_tokens - rest_len + position * cut.num_lanes) / num_tokens
    return cut.epoch + 1 + (position - first_stripe_len) / (num_tokens // max(cut.num_lanes, 1))


class LanePlan:
    """Finds the tokens of every lane in a corpus of shards.

    `document_tokens(shard)` gives the lengths of the shard's documents in file order; it is asked only for shards
    that are located, so a rank needs the record files of no others.
    """

    def __init__(
        self,
        shard_tokens: Sequence[int] | Int64s,
        cut: LanePartition,
        *,
        seed: int,
        document_tokens: Callable[[int], Int64s],
        num_cached: int = 64,
    ) -> None:
        """Raises DataError if the corpus has fewer tokens than lanes."""
        self._shard_tokens = np.asarray(shard_tokens, dtype=np.int64)
        self.num_tokens = int(self._shard_tokens.sum())
        if cut.num_lanes > self.num_tokens:
            raise DataError(
                f"the corpus has {counted(self.num_tokens, 'token')}, fewer than the {counted(cut.num_lanes, 'lane')}. "
                "Prepare more text or lower train.num_lanes."
            )
        self.cut = cut
        rest = np.array(cut.rest or ((0, self.num_tokens),), dtype=np.int64)
        self._rest_firsts = rest[:, 0]
        lengths = rest[:, 1] - rest[:, 0]
        self._rest_ends = np.cumsum(lengths)
        self._rest_starts = self._rest_ends - lengths
        self.stripe_len = self.num_tokens // cut.num_lanes
        """Tokens of a lane in a whole epoch."""
        self.first_stripe_len = int(self._rest_ends[-1]) // cut.num_lanes
        """Tokens of a lane in the epoch that was cut first."""
        self._seed = seed
        self._document_tokens = document_tokens
        self._num_cached = num_cached
        self._orders: OrderedDict[tuple[int, int], tuple[Int64s, Int64s]] = OrderedDict()

    def locate(self, lane: int, position: int) -> TokenSlice:
        """The stretch of tokens that begins at this position of the lane."""
        epoch, token, in_piece, left = self.token_at(lane, position)
        shard, in_shard, shard_left = self._find(epoch, None, token)
        document, offset, document_left = self._find(epoch, shard, in_shard)
        return TokenSlice(
            epoch=epoch,
            shard=shard,
            document=document,
            offset=offset,
            length=min(document_left, left),
            begin=position - min(offset, in_piece),
            shard_left=min(shard_left, left),
        )

    def token_at(self, lane: int, position: int) -> tuple[int, int, int, int]:
        """(epoch, token in its order, tokens of the piece before it, tokens of the piece from it on) of a lane at a
        position. A piece is contiguous in the epoch."""
        find = self.token_in_rest if position < self.first_stripe_len else self.token_behind_rest
        epoch, token, before, left = map(int, find(lane, position))
        return epoch, token, before, left

    def token_in_rest(self, lane: Any, position: Any) -> tuple[Any, Any, Any, Any]:
        """The same in the epoch that was cut first, of integers, or of arrays that broadcast."""
        joined = lane * self.first_stripe_len + position
        piece = np.minimum(self._rest_ends.searchsorted(joined, side="right"), len(self._rest_ends) - 1)
        before = np.minimum(joined - self._rest_starts[piece], position)
        left = np.minimum(self._rest_ends[piece] - joined, self.first_stripe_len - position)
        return self.cut.epoch, self._rest_firsts[piece] + joined - self._rest_starts[piece], before, left

    def token_behind_rest(self, lane: Any, position: Any) -> tuple[Any, Any, Any, Any]:
        """The same in the whole epochs behind it."""
        epochs, in_stripe = divmod(position - self.first_stripe_len, self.stripe_len)
        return self.cut.epoch + 1 + epochs, lane * self.stripe_len + in_stripe, in_stripe, self.stripe_len - in_stripe

    def rest_of_epoch(self, position: int, skips: Ranges = ()) -> tuple[int, Ranges]:
        """(epoch, what no lane has read of it) when all lanes have come to this position, which is in no skip.

        No ranges means all of it. What the lanes were to skip of this epoch is left out; what of later ones, forgotten.
        """
        if position < self.first_stripe_len:
            epoch, stripe_len, total = self.cut.epoch, self.first_stripe_len, int(self._rest_ends[-1])
            in_stripe = position
        else:
            epochs, in_stripe = divmod(position - self.first_stripe_len, self.stripe_len)
            epoch, stripe_len, total = self.cut.epoch + 1 + epochs, self.stripe_len, self.num_tokens
        begin = position - in_stripe  # lane position of the epoch's first token
        kept = [*outside(skips, position, begin + stripe_len)]
        starts = [lane * stripe_len - begin for lane in range(self.cut.num_lanes)]
        unread = [(start + first, start + end) for start in starts for first, end in kept]
        unread.append((self.cut.num_lanes * stripe_len, total))
        if position < self.first_stripe_len:
            unread = [piece for first, end in unread for piece in self._ranges_in_epoch(first, end)]
        joined = merged(unread)
        return epoch, () if joined == ((0, self.num_tokens),) else joined

    def shard_after(self, lane: int, position: int, stretch: TokenSlice) -> int:
        """The shard that a lane reads behind the one of the stretch at this position."""
        epoch, token, _, _ = self.token_at(lane, position + stretch.shard_left)
        return self._find(epoch, None, token)[0]

    def _ranges_in_epoch(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Ranges of the epoch that a range of the joined rest stands for."""
        while first < end:
            piece = int(self._rest_ends.searchsorted(first, side="right"))
            stop = min(end, int(self._rest_ends[piece]))
            shift = int(self._rest_firsts[piece] - self._rest_starts[piece])
            yield first + shift, stop + shift
            first = stop

    def _find(self, epoch: int, shard: int | None, token: int) -> tuple[int, int, int]:
        """(shard or document, tokens of it before this one, tokens of it from this one on)."""
        order, starts = self._order(epoch, shard)
        rank = int(starts.searchsorted(token, side="right")) - 1
        found, before = int(order[rank]), token - int(starts[rank])
        tokens = self._shard_tokens if shard is None else self._document_tokens(shard)
        return found, before, int(tokens[found]) - before

    def _order(self, epoch: int, shard: int | None) -> tuple[Int64s, Int64s]:
        """Hashed order of the shards (None) or of one shard's documents, and the first token of each in it."""
        key = (epoch, -1 if shard is None else shard)
        tokens = self._shard_tokens if shard is None else self._document_tokens(shard)
        known = self._orders.get(key)
        # A shard that was lost, or came back, has other documents than it had.
        if known is not None and len(known[0]) == len(tokens):
            self._orders.move_to_end(key)
            return known
        own = (SHARD_ORDER,) if shard is None else (_DOCUMENT_ORDER, shard)
        order = hashed_order(len(tokens), self._seed, epoch, *own)
        starts = np.cumsum(tokens[order]) - tokens[order]
        self._orders[key] = order, starts
        if len(self._orders) > self._num_cached:
            self._orders.popitem(last=False)
        return order, starts


def outside(skips: Ranges, first: int, end: int) -> Iterator[tuple[int, int]]:
    """The ranges of [first, end) that lie in no skip, ascending."""
    for skip_first, skip_end in skips:
        if first < min(skip_first, end):
            yield first, min(skip_first, end)
        first = max(first, skip_end)
    if first < end:
        yield first, end


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ascending ranges without empty ones; touching or overlapping ones become one."""
    joined: list[tuple[int, int]] = []
    for first, end in ranges:
        if first == end:
            continue
        if joined and joined[-1][1] >= first:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((first, end))
    return tuple(joined)
