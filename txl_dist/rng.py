"""Named random streams from one seed.

Every use of randomness has its own name, so adding one does not change another. Dropout is a function of (seed, step,
first lane of the micro-batch): its seed is set on torch's default generator before each micro-batch. So resuming needs
no generator state, and no two ranks have the same mask. It must be the default generator: activation checkpointing does
not restore an explicit one, recomputes other masks, and the gradients are silently wrong.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for the stream `names`. The function is frozen: equal on every machine and version."""
    parts = [str(seed)]
    for name in names:
        parts.append(str(name))
    digest = hashlib.sha256("\x1f".join(parts).encode()).digest()
    first_64_bits = int.from_bytes(digest[:8], "little")
    return first_64_bits >> 1
