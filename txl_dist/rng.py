"""Named random streams that are derived from one seed.

Every use of randomness has its own name, so a new use does not change the random numbers of another use. Dropout masks
are a function of (seed, step, first lane of the micro-batch), where a lane is a batch row. A seed derived from these
numbers is set on torch's default generator before each micro-batch. So resuming needs no generator state, and no two
ranks have the same mask.

The default generator is used because activation checkpointing, which computes activations twice, restores no other
generator. With another mask the second time, the gradients would be wrong, without an error.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for the random stream that `names` identifies.

    The result is the same on every machine and in every version of the package.
    """
    parts = [str(seed)]
    for name in names:
        parts.append(str(name))
    digest = hashlib.sha256("\x1f".join(parts).encode()).digest()
    first_64_bits = int.from_bytes(digest[:8], "little")
    return first_64_bits >> 1
