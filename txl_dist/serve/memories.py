"""Memories that clients come back to: bounded in number, bytes and age. Who knows a handle has the memory, so nobody
can guess one. Of the event loop alone."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass

from txl_dist.inference.text_memory import TextMemory


@dataclass
class StoredMemory:
    """A memory that is kept."""

    id: str
    memory: TextMemory
    created: float
    """Unix time."""
    used: float
    """By time.monotonic()."""


class MemoryStore:
    """The memory that was not used for longest goes first."""

    def __init__(self, *, most: int, most_bytes: int, most_age_s: float) -> None:
        self._most, self._most_bytes, self._most_age_s = most, most_bytes, most_age_s
        self._held: OrderedDict[str, StoredMemory] = OrderedDict()  # the one that was used last is the last
        self.num_bytes = 0
        """Of all that are kept."""

    def __len__(self) -> int:
        self.forget_old()
        return len(self._held)

    def fits(self, num_bytes: int, *, num_memories: int = 1) -> bool:
        """Whether so many memories of so many bytes together could be kept at all."""
        return num_memories <= self._most and num_bytes <= self._most_bytes

    def put(self, memory: TextMemory) -> StoredMemory:
        """Keep a memory that fits, in the place of older ones if need be."""
        assert self.fits(memory.num_bytes)
        self.forget_old()
        while len(self._held) >= self._most or self.num_bytes + memory.num_bytes > self._most_bytes:
            self.remove(next(iter(self._held)))
        held = StoredMemory(f"mem_{secrets.token_urlsafe(24)}", memory, time.time(), time.monotonic())
        self._held[held.id] = held
        self.num_bytes += memory.num_bytes
        return held

    def get(self, name: str) -> StoredMemory | None:
        """A memory, which is used now; None if there is none of that name any more."""
        self.forget_old()
        held = self._held.get(name)
        if held is not None:
            held.used = time.monotonic()
            self._held.move_to_end(name)
        return held

    def expires(self, held: StoredMemory) -> int:
        """When it would go of age, in Unix time."""
        return int(time.time() + held.used + self._most_age_s - time.monotonic())

    def remove(self, name: str) -> bool:
        """Forget one; whether it was there."""
        held = self._held.pop(name, None)
        if held is None:
            return False
        self.num_bytes -= held.memory.num_bytes
        return True

    def forget_old(self) -> None:
        """Forget those that are too old."""
        oldest = time.monotonic() - self._most_age_s
        while self._held and next(iter(self._held.values())).used < oldest:
            self.remove(next(iter(self._held)))
