"""Lane arithmetic: computes which token of the corpus a lane reads at a position. This module reads no files.

A lane is one row of the global batch: an endless stream of tokens. In each epoch a hash of (seed, epoch, id) determines
the order of the shards and of the documents inside each shard. The hash function never changes. The N tokens in this
order are cut into consecutive stripes of S = N // num_lanes tokens. Lane l reads stripe l of epoch 0, of epoch 1, and
so on.

    epoch 0    | shard 2        | shard 0              | shard 1     |.    N tokens; "." = N mod num_lanes left out
    stripes    | lane 0      | lane 1      | lane 2      | lane 3    |.    S tokens each
                       ^ position p < S
    epoch 1    | shard 0              | shard 1     | shard 2        |.
    stripes    | lane 0      | lane 1      | lane 2      | lane 3    |.
                       ^ position S + p: all lanes change epoch together

A position is one integer p, the same for all lanes. Two binary searches find the token of (lane, p). All lanes have
the same length, so no batch is short, and ranks need not communicate.

Repartitioning (another number of lanes in the middle of an epoch): `rest_of_epoch` lists the token ranges that no lane
has read yet. These ranges are joined and cut into new stripes. Then the lanes continue with the next whole epoch.

    epoch 0    |=====> lane 0|=====> lane 1|=====> lane 2|.    "=" is read, and the rest is unread
    new stripes       | lane 0  | lane 1 ...

Skips are ranges of lane positions that no lane reads. If training diverges and the run returns to an earlier checkpoint
(rewind), it skips the tokens on which training diverged. A repartition within an epoch also leaves out the skipped
tokens of that epoch.

Limitations: a document that crosses the border between two stripes is cut. At most num_lanes - 1 documents
are cut in an epoch. Each epoch leaves out fewer than num_lanes tokens.
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
"""Number that is hashed along with the seed to order shards, so that no other order uses the same hashes."""
_DOCUMENT_ORDER = 2
"""Number that is hashed along with the seed to order the documents of a shard."""
_LANE_ORDER = 3
"""Number that is hashed along with the seed to assign lanes (batch rows) to corpora."""
_MASK = (1 << 64) - 1
"""Mask that keeps the low 64 bits of an integer."""


class TokenSlice(NamedTuple):
    """Place in the corpus of consecutive tokens that one lane reads from one document.

    A lane is a row of the batch with its own token stream. It reads contiguous ranges of tokens, one after the other:
    usually one range per epoch.
    """

    epoch: int
    """Epoch in which the lane reads the tokens, counted from 0."""
    shard: int
    """Index of the shard in its split."""
    document: int
    """Index of the document in the shard, in file order."""
    offset: int
    """Index in the document of the first token."""
    length: int
    """Number of tokens up to the end of the document or of the lane's range, whichever is first."""
    begin: int
    """Position in the lane's token stream at which the document starts. If the lane's range begins inside the document,
    this is the position at which the range begins."""
    shard_left: int
    """Number of tokens up to the end of the shard or of the lane's range, whichever is first."""


Ranges = tuple[tuple[int, int], ...]
"""Ascending, disjoint half-open ranges [first, end), either of token indices in an epoch or of lane positions."""


@dataclass(frozen=True)
class LanePartition:
    """Division of a corpus among `num_lanes` lanes (rows of the batch, each with its own token stream).

    The tokens of an epoch are cut into `num_lanes` consecutive parts of equal length, called stripes, one for each
    lane. In the first epoch only the tokens that `unread` lists are divided. Later epochs are divided as a whole.
    """

    num_lanes: int
    epoch: int = 0
    """First epoch that is divided, counted from 0."""
    unread: Ranges = ()
    """Token ranges of the first epoch that are divided among the lanes. Empty means the whole epoch."""


def hash64(*keys: Any) -> npt.NDArray[np.uint64]:
    """Return the splitmix64 hash of a tuple of integers. The last item may be an array of integers. The result is then
    an array of hashes.

    The function must never change, because the order of documents, and with it every resumed run, depends on the
    hashes. numpy's generators are not used, because they can give other numbers in another version of numpy (NEP 19).
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
    """Return a permutation of range(count) that depends only on `count` and `keys`."""
    items = np.arange(count)
    return np.argsort(hash64(*keys, items), kind="stable")


def lanes_of_rank(num_lanes: int, *, rank: int, world_size: int) -> range:
    """Return the indices of the lanes (rows of the batch) that a rank processes.

    Raises ConfigError if `num_lanes` is not divisible by `world_size`.
    """
    if num_lanes % world_size:
        raise ConfigError(
            f"{counted(num_lanes, 'lane')} cannot be shared equally by {counted(world_size, 'rank')}. Set "
            "train.num_lanes to a multiple of the number of ranks."
        )
    share = num_lanes // world_size
    first = rank * share
    return range(first, first + share)


def allot_lanes(num_lanes: int, weights: Sequence[float], *, names: Sequence[str] = ()) -> tuple[int, ...]:
    """Return the number of lanes (rows of the batch) of each corpus, in proportion to the weights.

    Fractions of lanes are rounded by the method of largest remainders. `names` are the names of the corpora in
    messages. Raises ConfigError if no weight is positive, or if a corpus with a positive weight gets no lane.
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
                "Raise the weight of this corpus in data.weights, raise train.num_lanes, or leave out this corpus "
                "with a weight of 0."
            )
    return tuple(lanes)


def owners_of_lanes(allotted: Sequence[int], *, seed: int) -> tuple[Int64s, Int64s]:
    """Assign each lane (row of the batch) to a corpus.

    Returns ([lanes] index of the corpus that each lane reads, [lanes] number of each lane among the lanes of its
    corpus). A hash function, which is the same in all versions, spreads the corpora over the lanes, and so over the
    ranks. The lanes of one corpus are numbered in ascending order.
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
    """Return how many epochs of a corpus have been read when its lanes are at `position`, for example 1.5.

    `num_tokens` is the number of tokens of the corpus. `cut` says how the corpus is divided among its lanes.
    """
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
    """Map from (lane, position) to a token of the corpus, for all epochs.

    A lane is a row of the batch with its own token stream. `shard_tokens` are the numbers of tokens of the shards.
    `document_tokens(shard)` returns the number of tokens of each document of a shard, in file order. It is called only
    for shards that a lane of this rank reads, so a rank reads the records of no other shards.
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
        """Divide the corpus among the lanes as `cut` says. `seed` determines the order of shards and documents.

        The order of documents is kept in memory for the last `num_cached` shards. Raises DataError if the corpus has
        fewer tokens than lanes.
        """
        self._shard_tokens = np.asarray(shard_tokens, dtype=np.int64)
        self.num_tokens = int(self._shard_tokens.sum())
        if cut.num_lanes > self.num_tokens:
            raise DataError(
                f"the corpus has only {counted(self.num_tokens, 'token')} for {counted(cut.num_lanes, 'lane')} (rows "
                "of the batch), but each lane needs at least one token of its own. Prepare more text or lower "
                "train.num_lanes."
            )
        self.cut = cut
        whole_epoch = ((0, self.num_tokens),)
        unread = np.array(cut.unread or whole_epoch, dtype=np.int64)
        firsts = unread[:, 0]
        ends = unread[:, 1]
        lengths = ends - firsts
        self._unread_firsts = firsts
        """Index in the epoch of each unread range's first token."""
        self._unread_ends = np.cumsum(lengths)
        """End of each unread range, as an index into the joined unread ranges."""
        self._unread_starts = self._unread_ends - lengths
        """Start of each unread range, as an index into the joined unread ranges."""
        self.stripe_len = self.num_tokens // cut.num_lanes
        """Number of tokens that a lane reads in a whole epoch."""
        self.first_stripe_len = int(self._unread_ends[-1]) // cut.num_lanes
        """Number of tokens that a lane reads in the first epoch that `cut` divides. This epoch can be partly read
        already."""
        self._seed = seed
        self._document_tokens = document_tokens
        self._num_cached = num_cached
        self._orders: OrderedDict[tuple[int, int], tuple[Int64s, Int64s]] = OrderedDict()

    def locate(self, lane: int, position: int) -> TokenSlice:
        """Return the place of the tokens that a lane reads from `position` on.

        The tokens end where their document ends, or where the lane's contiguous range of the epoch ends, whichever is
        first.
        """
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
        """Find the token that a lane reads at a position.

        Returns (epoch, index of the token in the order of the epoch, number of tokens in the range before the token,
        number of tokens in the range from the token on). A range is a contiguous part of the epoch that one lane reads.
        """
        if position < self.first_stripe_len:
            place = self.token_in_rest(lane, position)
        else:
            place = self.token_after_rest(lane, position)
        epoch, token, before, left = place
        return int(epoch), int(token), int(before), int(left)

    def token_in_rest(self, lane: Any, position: Any) -> tuple[Any, Any, Any, Any]:
        """Find the tokens that lanes read at positions in the first epoch of the partition.

        `lane` and `position` are integers, or arrays that broadcast. Returns the four values of `token_at`, as integers
        or arrays.
        """
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
        """Find the tokens that lanes read at positions after the first epoch of the partition.

        `lane` and `position` are integers, or arrays that broadcast. Returns the four values of `token_at`, as integers
        or arrays.
        """
        epochs, in_stripe = divmod(position - self.first_stripe_len, self.stripe_len)
        epoch = self.cut.epoch + 1 + epochs
        token = lane * self.stripe_len + in_stripe
        left = self.stripe_len - in_stripe
        return epoch, token, in_stripe, left

    def rest_of_epoch(self, position: int, skips: Ranges = ()) -> tuple[int, Ranges]:
        """Return the token ranges of an epoch that no lane has read when all lanes are at `position` of this epoch.

        `skips` are ranges of lane positions that no lane reads. No such range contains `position`. Returns (epoch,
        ranges), where empty ranges mean the whole epoch. Skipped tokens of this epoch are left out of the ranges. Skips
        of later epochs are ignored.
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
        """Return the index of the shard that a lane reads after the shard of `stretch`.

        `stretch` is the place of the tokens that the lane reads at `position`.
        """
        epoch, token, _, _ = self.token_at(lane, position + stretch.shard_left)
        shard, _, _ = self._find_shard(epoch, token)
        return shard

    def _ranges_in_epoch(self, joined: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Convert ranges of the joined unread tokens to token ranges of the epoch."""
        for first, end in joined:
            while first < end:
                piece = int(self._unread_ends.searchsorted(first, side="right"))
                stop = min(end, int(self._unread_ends[piece]))
                shift = int(self._unread_firsts[piece] - self._unread_starts[piece])
                yield first + shift, stop + shift
                first = stop

    def _find_shard(self, epoch: int, token: int) -> tuple[int, int, int]:
        """Return (shard that contains a token of the epoch, number of the shard's tokens before this token, number of
        the shard's tokens from it on)."""
        order, starts = self._shard_order(epoch)
        return _find(token, order, starts, self._shard_tokens)

    def _find_document(self, epoch: int, shard: int, token: int) -> tuple[int, int, int]:
        """Return (document that contains a token of the shard, number of the document's tokens before this token,
        number of the document's tokens from it on)."""
        order, starts = self._document_order(epoch, shard)
        return _find(token, order, starts, self._document_tokens(shard))

    def _shard_order(self, epoch: int) -> tuple[Int64s, Int64s]:
        """Return (order of the shards in an epoch, index in the epoch of the first token of each shard in this
        order)."""
        return self._cached_order((epoch, -1), self._shard_tokens, SHARD_ORDER)

    def _document_order(self, epoch: int, shard: int) -> tuple[Int64s, Int64s]:
        """Return (order of a shard's documents in an epoch, index in this order of each document's first token)."""
        return self._cached_order((epoch, shard), self._document_tokens(shard), _DOCUMENT_ORDER, shard)

    def _cached_order(self, key: tuple[int, int], tokens: Int64s, *hash_keys: int) -> tuple[Int64s, Int64s]:
        """Return (hashed order of items, index of the first token of each item in this order).

        `tokens` are the numbers of tokens of the items. The result is kept for the last `num_cached` keys (epoch,
        shard), where shard -1 means the order of the shards themselves.
        """
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
    """Return (item that contains a token, number of the item's tokens before this token, number of the item's tokens
    from this token on).

    The items have the order `order` and begin at `starts` in this order. Item i has `tokens[i]` tokens.
    """
    place = int(starts.searchsorted(token, side="right")) - 1
    item = int(order[place])
    before = token - int(starts[place])
    after = int(tokens[item]) - before
    return item, before, after


def outside(skips: Ranges, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of [first, end) that no range in `skips` contains, in ascending order."""
    for skip_first, skip_end in skips:
        stop = min(skip_first, end)
        if first < stop:
            yield first, stop
        first = max(first, skip_end)
    if first < end:
        yield first, end


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Join ascending ranges that touch or overlap, and drop empty ranges."""
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
