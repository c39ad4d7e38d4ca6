"""Silent corruption: do the parameters that all ranks hold alike still agree, bit for bit?

Each rank hashes its copy on its device: the bits of every element, read as an integer, times an odd number that belongs
to its place, summed modulo 2**64. Any single changed bit changes the sum for certain, and further changes undo it only
by a chance of about 2**-32. Ranks exchange 16 bytes; only if these differ, a number per parameter.

What it gives up: a corruption that all ranks made together, and where parameters are partitioned (ZeRO-3) there is
nothing to compare.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from txl_dist.distributed.collectives import gather_objects

CHUNK_LEN = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements hashed at once, by kind of device: what a cache holds, and what keeps a GPU busy in little memory."""
GOLDEN = 0x9E3779B97F4A7C15
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Deviation(NamedTuple):
    """That ranks hold different parameters."""

    ranks: tuple[int, ...]
    """Those that differ from the majority; without a majority, all of them."""
    parameter: str
    """The first that is not the same everywhere."""
    has_majority: bool
    """More than half of the ranks agree, so that the others are known to be wrong."""

    def sentence(self) -> str:
        """For people, without the remedy."""
        ranks = ", ".join(map(str, self.ranks))
        if self.has_majority:
            return f"parameter {self.parameter} of rank(s) {ranks} is not that of the other ranks"
        return f"parameter {self.parameter} is not the same on the ranks {ranks}, and no majority shows which is right"


def deviating_ranks(parameters: Iterable[tuple[str, Tensor]]) -> Deviation | None:
    """Compare (name, values) pairs over all ranks; None if they are bitwise the same.

    All ranks call it, with the same names in the same order, of any floating type and device; all get the same answer.
    """
    named = list(parameters)
    hashes = hash_parameters([values for _, values in named])
    digests = gather_objects(hashlib.blake2b(repr(hashes).encode(), digest_size=16).digest())
    if len(set(digests)) == 1:
        return None
    of_ranks = gather_objects(hashes)
    digest, count = Counter(digests).most_common(1)[0]
    has_majority = 2 * count > len(digests)
    ranks = tuple(rank for rank, other in enumerate(digests) if not has_majority or other != digest)
    first = next(i for i, values in enumerate(zip(*of_ranks, strict=True)) if len(set(values)) > 1)
    return Deviation(ranks, named[first][0], has_majority)


def hash_parameters(parameters: Iterable[Tensor]) -> list[int]:
    """A 64-bit number for the bits of each. Waits for the device, once."""
    with torch.no_grad():
        hashes = [_hash(values) for values in parameters]
        return torch.stack(hashes).tolist() if hashes else []


def _hash(values: Tensor) -> Tensor:
    bits = values.detach().reshape(-1).view(INTEGERS[values.element_size()])
    chunk_len = CHUNK_LEN[bits.device.type]
    weights = _weights(min(chunk_len, len(bits)), device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, chunk in enumerate(bits.split(chunk_len)):
        # Integer products and sums are modulo a power of two, in which no odd factor loses a bit.
        total += (weights[: len(chunk)] * chunk).sum(dtype=torch.int64) * (GOLDEN * (2 * number + 1) % 2**63 | 1)
    return total


def _weights(count: int, *, device: torch.device) -> Tensor:
    """[count] odd int32, without a pattern."""
    values = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    for factor in (-1640531535, -2048144789, -1028477379):  # of murmur and xxhash
        values = values * factor
        values = values ^ (values >> 15)
    return values | 1
