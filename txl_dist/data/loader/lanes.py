"""Lane arithmetic: which token of the corpus a lane reads at a position. Pure, no files.

A lane is one row of the global batch: an endless contiguous stream of tokens. In each epoch the shards, and the
documents inside each shard, come in an order that a frozen hash of (seed, epoch, id) decides. Their concatenation
of N tokens is cut into stripes of S = N // num_lanes tokens. Lane l reads stripe l of epoch 0, of epoch 1, and so on.

    epoch 0    | shard 2        | shard 0              | shard 1     |.    N tokens; "." = N mod num_lanes left out
    stripes    | lane 0      | lane 1      | lane 2      | lane 3    |.    S tokens each
                       ^ position p < S
    epoch 1    | shard 0              | shard 1     | shard 2        |.
    stripes    | lane 0      | lane 1      | lane 2      | lane 3    |.
                       ^ position S + p: all lanes change epoch together

A position is one integer p, the same for all lanes. Two binary searches find the token of (lane, p). Every lane has
the same length, so there is no short batch and nothing to agree on between ranks.

Repartitioning (another number of lanes in the middle of an epoch): `rest_of_epoch` lists the token ranges that no lane
has read yet. Joined, they are cut into the new stripes. After these the lanes continue with the next whole epoch.

    epoch 0    |=====> lane 0|=====> lane 1|=====> lane 2|.    "=" is read, the ranges after it and "." are unread
    new stripes       | lane 0  | lane 1 ...

Skips are ranges of lane positions that no lane reads: after a rewind, the tokens on which training went wrong. A lane's
stream is what lies outside the skips. Repartitioning within an epoch leaves the skipped tokens of that epoch out too.

Limitations: a document across a stripe's border is cut, at most num_lanes - 1 of them in an epoch. Fewer than
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

SHARD_ORDER = 1
"""Key of the hash that orders shards."""
_DOCUMENT_ORDER = 2
"""Key of the hash that orders documents."""
_LANE_ORDER = 3
"""Key of the hash that orders lanes."""
_MASK = (1 << 64) - 1
"""Mask of 64 bits."""


class TokenSlice(NamedTuple):
    """Consecutive tokens of one document that one lane reads, and their place in the corpus."""

    epoch: int
    shard: int
    """Index of the shard in its split."""
    document: int
    """Index in the shard, in file order."""
    offset: int
    """First token, counted from the start of the document."""
    length: int
    """Number of tokens until the document or the lane's piece of the epoch ends."""
    begin: int
    """Lane position where the document begins, or the part of it that the lane reads in one piece."""
    shard_left: int
    """Number of tokens until the shard or the lane's piece of the epoch ends."""


Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges [first, end) of tokens of one epoch or of lane positions, ascending and disjoint."""


@dataclass(frozen=True)
class LanePartition:
    """Partition of a corpus into `num_lanes` stripes: first of one epoch or its unread part, then of whole epochs."""

    num_lanes: int
    epoch: int = 0
    """The first epoch that was partitioned."""
    unread: Ranges = ()
    """Token ranges of that epoch that were partitioned. Empty means the whole epoch."""


def hash64(*keys: Any) -> npt.NDArray[np.uint64]:
    """Compute splitmix64 over a tuple of integers, of which the last may be an array.

    The function is frozen: the order of documents, and so every resumed run, depends on it. numpy's generators may
    change their streams between versions (NEP 19).
    """
    value: npt.NDArray[np.uint64] = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            word = key.astype(np.uint64) if isinstance(key, np.ndarray) else np.uint64(key & _MASK)
            value = value ^ word
            value = value + np.uint64(0x9E3779B97F4A7C15)
            value = value ^ (value >> np.uint64(30))
            value = value * np.uint64(0xBF58476D1CE4E5B9)
            value = value ^ (value >> np.uint64(27))
            value = value * np.uint64(0x94D049BB133111EB)
            value = value ^ (value >> np.uint64(31))
    return value


def hashed_order(count: int, *keys: int) -> Int64s:
    """Return a permutation of range(count) that depends only on its arguments."""
    items = np.arange(count)
    return np.argsort(hash64(*keys, items), kind="stable")


def lanes_of_rank(num_lanes: int, *, rank: int, world_size: int) -> range:
    """Return the lanes that a rank owns. Raises ConfigError if num_lanes is not divisible by world_size."""
    if num_lanes % world_size:
        raise ConfigError(
            f"{counted(num_lanes, 'lane')} cannot be shared equally by {counted(world_size, 'rank')}. "
            "Choose train.num_lanes divisible by the number of ranks."
        )
    share = num_lanes // world_size
    first = rank * share
    return range(first, first + share)


def allot_lanes(num_lanes: int, weights: Sequence[float], *, names: Sequence[str] = ()) -> tuple[int, ...]:
    """Divide the lanes among the corpora in proportion to the weights, by largest remainder.

    Returns the number of lanes of each corpus, so that every batch holds the same shares. `names` are the corpora in
    messages. Raises ConfigError if no weight is positive, or a positive one is too small for a lane.
    """
    total = math.fsum(weights)
    if not total > 0:
        raise ConfigError(f"data.weights={list(weights)} needs at least one positive weight.")
    shares = [weight / total * num_lanes for weight in weights]
    lanes = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (lanes[i] - shares[i], i))
    num_left = num_lanes - sum(lanes)
    for i in by_remainder[:num_left]:
        lanes[i] += 1
    for i, weight in enumerate(weights):
        if weight > 0 and lanes[i] == 0:
            name = names[i] if names else str(i)
            raise ConfigError(
                f"corpus {name} gets none of the {counted(num_lanes, 'lane')}: its share is {shares[i]:.2f} lanes. "
                "Raise its weight in data.weights or train.num_lanes, or give it the weight 0."
            )
    return tuple(lanes)


def owners_of_lanes(allotted: Sequence[int], *, seed: int) -> tuple[Int64s, Int64s]:
    """Assign the lanes to the corpora.

    Returns ([lanes] index of each lane's corpus, [lanes] the lane's number among the lanes of that corpus). A frozen
    hash spreads the corpora over the lanes, and so over ranks. The lanes of one corpus are numbered in order.
    """
    corpora = np.arange(len(allotted))
    in_order = np.repeat(corpora, allotted)
    order = hashed_order(len(in_order), seed, 0, _LANE_ORDER)
    owners: Int64s = in_order[order]
    numbers = np.empty_like(owners)
    for corpus, count in enumerate(allotted):
        numbers[owners == corpus] = np.arange(count)
    return owners, numbers


def epochs_read(cut: LanePartition, position: int, *, num_tokens: int) -> float:
    """Return how often a corpus of `num_tokens` tokens has been read when its lanes are at `position`."""
    num_unread = sum(end - first for first, end in cut.unread) or num_tokens
    num_lanes = max(cut.num_lanes, 1)
    first_stripe_len = num_unread // num_lanes
    if position < first_stripe_len:
        num_read_before = num_tokens - num_unread
        num_read = num_read_before + position * cut.num_lanes
        return cut.epoch + num_read / num_tokens
    stripe_len = num_tokens // num_lanes
    later_epochs = (position - first_stripe_len) / stripe_len
    return cut.epoch + 1 + later_epochs


class LanePlan:
    """Map from lanes and positions to the tokens of a corpus of shards.

    `document_tokens(shard)` returns the lengths of the shard's documents in file order. It is called only for shards
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
        """Prepare the partition `cut` of shards of so many tokens. Keeps `num_cached` shards' document orders.

        Raises DataError if the corpus has fewer tokens than lanes.
        """
        self._shard_tokens = np.asarray(shard_tokens, dtype=np.int64)
        self.num_tokens = int(self._shard_tokens.sum())
        if cut.num_lanes > self.num_tokens:
            raise DataError(
                f"the corpus has {counted(self.num_tokens, 'token')}, fewer than the {counted(cut.num_lanes, 'lane')}. "
                "Prepare more text or lower train.num_lanes."
            )
        self.cut = cut
        whole_epoch = ((0, self.num_tokens),)
        unread = np.array(cut.unread or whole_epoch, dtype=np.int64)
        firsts = unread[:, 0]
        ends = unread[:, 1]
        lengths = ends - firsts
        self._unread_firsts = firsts
        """First token of each unread range, counted in the epoch."""
        self._unread_ends = np.cumsum(lengths)
        """End of each unread range, counted in the joined ranges."""
        self._unread_starts = self._unread_ends - lengths
        """Start of each unread range, counted in the joined ranges."""
        self.stripe_len = self.num_tokens // cut.num_lanes
        """Number of tokens that a lane reads in a whole epoch."""
        self.first_stripe_len = int(self._unread_ends[-1]) // cut.num_lanes
        """Number of tokens that a lane reads in the first partitioned epoch."""
        self._seed = seed
        self._document_tokens = document_tokens
        self._num_cached = num_cached
        self._orders: OrderedDict[tuple[int, int], tuple[Int64s, Int64s]] = OrderedDict()

    def locate(self, lane: int, position: int) -> TokenSlice:
        """Find the tokens that a lane reads from a position on, up to the end of their document or piece."""
        epoch, token, in_piece, left = self.token_at(lane, position)
        shard, in_shard, shard_left = self._find_shard(epoch, token)
        document, offset, document_left = self._find_document(epoch, shard, in_shard)
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
        """Find the token of a lane at a position.

        Returns (epoch, index of the token in the epoch's order, number of tokens of its piece before it, number of
        tokens of its piece from it on). A piece is contiguous in the epoch.
        """
        if position < self.first_stripe_len:
            place = self.token_in_rest(lane, position)
        else:
            place = self.token_after_rest(lane, position)
        epoch, token, before, left = place
        return int(epoch), int(token), int(before), int(left)

    def token_in_rest(self, lane: Any, position: Any) -> tuple[Any, Any, Any, Any]:
        """Do the same as `token_at` in the first partitioned epoch, for integers or for arrays that broadcast."""
        joined = lane * self.first_stripe_len + position
        last_piece = len(self._unread_ends) - 1
        piece = self._unread_ends.searchsorted(joined, side="right")
        piece = np.minimum(piece, last_piece)
        in_piece = joined - self._unread_starts[piece]
        token = self._unread_firsts[piece] + in_piece
        before = np.minimum(in_piece, position)
        left_in_piece = self._unread_ends[piece] - joined
        left_in_stripe = self.first_stripe_len - position
        left = np.minimum(left_in_piece, left_in_stripe)
        return self.cut.epoch, token, before, left

    def token_after_rest(self, lane: Any, position: Any) -> tuple[Any, Any, Any, Any]:
        """Do the same as `token_in_rest` in the whole epochs after the first partitioned one."""
        epochs, in_stripe = divmod(position - self.first_stripe_len, self.stripe_len)
        epoch = self.cut.epoch + 1 + epochs
        token = lane * self.stripe_len + in_stripe
        left = self.stripe_len - in_stripe
        return epoch, token, in_stripe, left

    def rest_of_epoch(self, position: int, skips: Ranges = ()) -> tuple[int, Ranges]:
        """List the token ranges that no lane has read when all lanes are at `position`, which is in no skip.

        Returns (epoch, ranges); no ranges means the whole epoch. Tokens of this epoch in `skips` are left out. Skips of
        later epochs are forgotten.
        """
        is_first = position < self.first_stripe_len
        if is_first:
            epoch = self.cut.epoch
            stripe_len = self.first_stripe_len
            total = int(self._unread_ends[-1])
            in_stripe = position
        else:
            epochs, in_stripe = divmod(position - self.first_stripe_len, self.stripe_len)
            epoch = self.cut.epoch + 1 + epochs
            stripe_len = self.stripe_len
            total = self.num_tokens
        begin = position - in_stripe  # lane position of the epoch's first token
        kept = list(outside(skips, position, begin + stripe_len))
        unread: list[tuple[int, int]] = []
        for lane in range(self.cut.num_lanes):
            start = lane * stripe_len - begin
            unread.extend((start + first, start + end) for first, end in kept)
        # The tokens that no stripe holds.
        num_in_stripes = self.cut.num_lanes * stripe_len
        unread.append((num_in_stripes, total))
        if is_first:
            unread = list(self._ranges_in_epoch(unread))
        joined = merged(unread)
        if joined == ((0, self.num_tokens),):
            return epoch, ()
        return epoch, joined

    def shard_after(self, lane: int, position: int, stretch: TokenSlice) -> int:
        """Return the shard that a lane reads after the shard of `stretch`, the lane's tokens at `position`."""
        epoch, token, _, _ = self.token_at(lane, position + stretch.shard_left)
        shard, _, _ = self._find_shard(epoch, token)
        return shard

    def _ranges_in_epoch(self, joined: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Map ranges of the joined unread tokens to ranges of the epoch."""
        for first, end in joined:
            while first < end:
                piece = int(self._unread_ends.searchsorted(first, side="right"))
                stop = min(end, int(self._unread_ends[piece]))
                shift = int(self._unread_firsts[piece] - self._unread_starts[piece])
                yield first + shift, stop + shift
                first = stop

    def _find_shard(self, epoch: int, token: int) -> tuple[int, int, int]:
        """Find a token of the epoch: (shard, number of its tokens before this one, number from this one on)."""
        order, starts = self._shard_order(epoch)
        return _find(token, order, starts, self._shard_tokens)

    def _find_document(self, epoch: int, shard: int, token: int) -> tuple[int, int, int]:
        """Find a token of the shard: (document, number of its tokens before this one, number from this one on)."""
        order, starts = self._document_order(epoch, shard)
        return _find(token, order, starts, self._document_tokens(shard))

    def _shard_order(self, epoch: int) -> tuple[Int64s, Int64s]:
        """Return the hashed order of the shards and the first token of each in that order."""
        return self._cached_order((epoch, -1), self._shard_tokens, SHARD_ORDER)

    def _document_order(self, epoch: int, shard: int) -> tuple[Int64s, Int64s]:
        """Return the hashed order of a shard's documents and the first token of each in that order."""
        return self._cached_order((epoch, shard), self._document_tokens(shard), _DOCUMENT_ORDER, shard)

    def _cached_order(self, key: tuple[int, int], tokens: Int64s, *hash_keys: int) -> tuple[Int64s, Int64s]:
        """Return the order of items of so many tokens, kept for the last `num_cached` (epoch, shard or -1)."""
        cached = self._orders.get(key)
        # A shard that was lost, or came back, has other documents than it had.
        if cached is not None and len(cached[0]) == len(tokens):
            self._orders.move_to_end(key)
            return cached
        epoch, _ = key
        order = hashed_order(len(tokens), self._seed, epoch, *hash_keys)
        tokens_in_order = tokens[order]
        starts = np.cumsum(tokens_in_order) - tokens_in_order
        self._orders[key] = order, starts
        if len(self._orders) > self._num_cached:
            self._orders.popitem(last=False)
        return order, starts


def _find(token: int, order: Int64s, starts: Int64s, tokens: Int64s) -> tuple[int, int, int]:
    """Find the item that holds a token, of items in this order which start there and have so many tokens."""
    place = int(starts.searchsorted(token, side="right")) - 1
    item = int(order[place])
    before = token - int(starts[place])
    after = int(tokens[item]) - before
    return item, before, after


def outside(skips: Ranges, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of [first, end) that lie in no skip, ascending."""
    for skip_first, skip_end in skips:
        stop = min(skip_first, end)
        if first < stop:
            yield first, stop
        first = max(first, skip_end)
    if first < end:
        yield first, end


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Join ascending ranges that touch or overlap, and drop empty ones."""
    joined: list[tuple[int, int]] = []
    for first, end in ranges:
        if first == end:
            continue
        if joined and joined[-1][1] >= first:
            last_first, last_end = joined[-1]
            joined[-1] = last_first, max(last_end, end)
        else:
            joined.append((first, end))
    return tuple(joined)
