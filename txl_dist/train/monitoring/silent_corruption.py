"""A check for silent corruption: whether the parameters that all ranks replicate still agree, bit for bit.

Each rank hashes its copy on its device. The hash is a sum over all elements, modulo 2**64. Each element's bits, read as
an integer, are multiplied by an odd number that belongs to the element's place. A single changed bit always changes the
sum. Several changed bits leave the sum unchanged only with a probability of about 2**-32. Ranks exchange 16 bytes. Only
if these bytes differ, the ranks exchange one number per parameter.

The check does not detect a corruption that is the same on all ranks. Parameters that are partitioned (ZeRO-3) cannot be
checked, because there are no copies to compare.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from txl_dist.distributed.collectives import gather_objects
from txl_dist.distributed.rank_environment import format_ranks

CHUNK_LEN = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Number of elements that are hashed at once, by kind of device.

On a CPU a chunk of this length fits into a cache. On a GPU it keeps the device busy with little memory.
"""
GOLDEN = 0x9E3779B97F4A7C15
"""Odd number from which the factor of each chunk is computed."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type with the same number of bytes as an element, by number of bytes."""


class Deviation(NamedTuple):
    """Result of a check that found different parameters on different ranks."""

    ranks: tuple[int, ...]
    """Ranks that differ from the majority. Without a majority these are all ranks."""
    parameter: str
    """First parameter that is not the same on all ranks."""
    has_majority: bool
    """Whether more than half of the ranks agree. The other ranks must then be wrong."""

    def sentence(self) -> str:
        """Return a sentence that describes the deviation for people, without the remedy."""
        ranks = format_ranks(self.ranks)
        if self.has_majority:
            return f"parameter {self.parameter} on {ranks} differs from that of the other ranks"
        return f"parameter {self.parameter} is not the same on {ranks}, and no majority shows which is right"


def deviating_ranks(parameters: Iterable[tuple[str, Tensor]]) -> Deviation | None:
    """Compare the parameters of all ranks. Returns None if they are bitwise the same.

    `parameters` are (name, values) pairs of any floating type and device. All ranks call it together, with the same
    names in the same order, and get the same result.
    """
    named = list(parameters)
    hashes = hash_parameters([values for _, values in named])
    digest = hashlib.blake2b(repr(hashes).encode(), digest_size=16).digest()
    digests = gather_objects(digest)
    if len(set(digests)) == 1:
        return None
    hashes_by_rank = gather_objects(hashes)
    most_common_digest, count = Counter(digests).most_common(1)[0]
    has_majority = 2 * count > len(digests)
    if has_majority:
        ranks = [rank for rank, rank_digest in enumerate(digests) if rank_digest != most_common_digest]
    else:
        ranks = list(range(len(digests)))
    for (name, _), rank_hashes in zip(named, zip(*hashes_by_rank, strict=True), strict=True):
        if len(set(rank_hashes)) > 1:
            return Deviation(tuple(ranks), name, has_majority)
    raise AssertionError(
        "the digests of the parameter hashes differ between ranks, but the hashes are equal on all ranks"
    )


def hash_parameters(parameters: Iterable[Tensor]) -> list[int]:
    """Return a 64-bit hash of the bits of each parameter. This waits for the device once."""
    with torch.no_grad():
        hashes = [_hash(values) for values in parameters]
        if hashes:
            return torch.stack(hashes).tolist()
        return []


def _hash(values: Tensor) -> Tensor:
    """Return a hash of the bits of a tensor as a scalar of int64, computed on the tensor's device."""
    bits = values.detach().reshape(-1).view(INTEGERS[values.element_size()])
    chunk_len = CHUNK_LEN[bits.device.type]
    weights = _weights(min(chunk_len, len(bits)), device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, chunk in enumerate(bits.split(chunk_len)):
        # Integer products and sums are modulo a power of two, in which no odd factor loses a bit.
        chunk_sum = (weights[: len(chunk)] * chunk).sum(dtype=torch.int64)
        chunk_factor = GOLDEN * (2 * number + 1) % 2**63 | 1
        total += chunk_sum * chunk_factor
    return total


def _weights(count: int, *, device: torch.device) -> Tensor:
    """Return [count] odd int32 numbers that look random. The hash multiplies elements by them."""
    values = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    for factor in (-1640531535, -2048144789, -1028477379):  # constants of murmur and xxhash
        values = values * factor
        values = values ^ (values >> 15)
    return values | 1
