"""Named random streams from one seed.

Every use of randomness has its own name, so that adding one does not shift another. Dropout is a function of
(seed, step, first lane of the micro-batch): it is set on torch's default generator before each micro-batch. It must be
the default one; with an explicit generator activation checkpointing recomputes other masks and gradients are
silently wrong. So resuming needs no generator state, and ranks never share a mask.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream `names`; a frozen function (sha256), equal on every machine and version."""
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
