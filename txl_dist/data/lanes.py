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
the same length, there is no short batch and nothing to agree on between ranks. What it gives up: a document that
spans a stripe's border is cut (at most num_lanes - 1 in an epoch), and fewer than num_lanes tokens are left out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.errors import ConfigError, DataError

Int64s = npt.NDArray[np.int64]

_SHARD_ORDER, _DOCUMENT_ORDER = 1, 2
_MASK = (1 << 64) - 1


class Stretch(NamedTuple):
    """Consecutive tokens of one document that one lane reads."""

    epoch: int
    shard: int
    document: int
    """Index in the shard, in file order."""
    offset: int
    """First token, counted from the start of the document."""
    length: int
    """Tokens until the document or the stripe ends."""
    begin: int
    """Lane position at which the document, or the piece of it inside this stripe, begins."""


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
            f"{num_lanes} lanes cannot be shared equally by {world_size} ranks. "
            "Choose train.num_lanes divisible by the number of ranks."
        )
    share = num_lanes // world_size
    return range(rank * share, (rank + 1) * share)


class LanePlan:
    """Finds the tokens of every lane in a corpus of shards.

    `document_tokens(shard)` gives the lengths of the shard's documents in file order; it is asked only for shards
    that are located, so a rank needs the record files of no others.
    """

    def __init__(
        self,
        shard_tokens: Sequence[int] | Int64s,
        *,
        num_lanes: int,
        seed: int,
        document_tokens: Callable[[int], Int64s],
        num_cached: int = 64,
    ) -> None:
        """Raises DataError if the corpus has fewer tokens than lanes."""
        self._shard_tokens = np.asarray(shard_tokens, dtype=np.int64)
        self.num_tokens = int(self._shard_tokens.sum())
        if num_lanes > self.num_tokens:
            raise DataError(
                f"the corpus has {self.num_tokens} tokens, fewer than the {num_lanes} lanes. "
                "Prepare more text or lower train.num_lanes."
            )
        self.num_lanes = num_lanes
        self.stripe_len = self.num_tokens // num_lanes
        self._seed = seed
        self._document_tokens = document_tokens
        self._num_cached = num_cached
        self._orders: OrderedDict[tuple[int, int], tuple[Int64s, Int64s]] = OrderedDict()

    def locate(self, lane: int, position: int) -> Stretch:
        """The stretch of tokens that begins at this position of the lane."""
        epoch, in_stripe = divmod(position, self.stripe_len)
        shard, in_shard = self._find(epoch, None, lane * self.stripe_len + in_stripe)
        document, offset = self._find(epoch, shard, in_shard)
        document_len = int(self._document_tokens(shard)[document])
        return Stretch(
            epoch=epoch,
            shard=shard,
            document=document,
            offset=offset,
            length=min(document_len - offset, self.stripe_len - in_stripe),
            begin=position - min(offset, in_stripe),
        )

    def _find(self, epoch: int, shard: int | None, token: int) -> tuple[int, int]:
        order, starts = self._order(epoch, shard)
        rank = int(starts.searchsorted(token, side="right")) - 1
        return int(order[rank]), token - int(starts[rank])

    def _order(self, epoch: int, shard: int | None) -> tuple[Int64s, Int64s]:
        """Hashed order of the shards (None) or of one shard's documents, and the first token of each in it."""
        key = (epoch, -1 if shard is None else shard)
        if key in self._orders:
            self._orders.move_to_end(key)
            return self._orders[key]
        if shard is None:
            tokens = self._shard_tokens
            order = hashed_order(len(tokens), self._seed, epoch, _SHARD_ORDER)
        else:
            tokens = self._document_tokens(shard)
            order = hashed_order(len(tokens), self._seed, epoch, _DOCUMENT_ORDER, shard)
        starts = np.cumsum(tokens[order]) - tokens[order]
        self._orders[key] = order, starts
        if len(self._orders) > self._num_cached:
            self._orders.popitem(last=False)
        return order, starts
