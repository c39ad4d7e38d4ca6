"""Store of the memories that clients keep on the server, with limits on number, bytes and age.

Only the event loop uses the store. A client that knows the id of a memory can use the memory. So ids are long and
random.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass

from txl_dist.inference.text_memory import TextMemory


@dataclass
class StoredMemory:
    """A memory in the store, with its id and times."""

    id: str
    memory: TextMemory
    created: float
    """Unix time in seconds at which the memory was stored."""
    used: float
    """Time of the last use, as time.monotonic() counts it."""


class MemoryStore:
    """Store of memories with limits on their number and bytes. When the store is full, it removes the memory that was
    not used for the longest time."""

    def __init__(self, *, most: int, most_bytes: int, most_age_s: float) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._most_age_s = most_age_s
        self._by_id: OrderedDict[str, StoredMemory] = OrderedDict()  # the most recently used one is last
        self.num_bytes = 0
        """Size in bytes of all stored memories together."""

    def __len__(self) -> int:
        self.remove_expired()
        return len(self._by_id)

    def fits(self, num_bytes: int, *, num_memories: int = 1) -> bool:
        """Return whether an empty store has space for `num_memories` memories that have `num_bytes` bytes together."""
        return num_memories <= self._most and num_bytes <= self._most_bytes

    def put(self, memory: TextMemory) -> StoredMemory:
        """Store a memory. If there is no space, the memories that were not used for the longest time are removed.

        The memory must fit in an empty store.
        """
        assert self.fits(memory.num_bytes)
        self.remove_expired()
        most_bytes_before = self._most_bytes - memory.num_bytes
        while len(self._by_id) >= self._most or self.num_bytes > most_bytes_before:
            least_recently_used = next(iter(self._by_id))
            self.remove(least_recently_used)
        name = f"mem_{secrets.token_urlsafe(24)}"
        stored = StoredMemory(name, memory, time.time(), time.monotonic())
        self._by_id[stored.id] = stored
        self.num_bytes += memory.num_bytes
        return stored

    def get(self, name: str) -> StoredMemory | None:
        """Return the memory with this id, or None if there is none. The call counts as a use of the memory."""
        self.remove_expired()
        stored = self._by_id.get(name)
        if stored is not None:
            stored.used = time.monotonic()
            self._by_id.move_to_end(name)
        return stored

    def expires(self, stored: StoredMemory) -> int:
        """Return the Unix time at which a memory expires if it is not used before."""
        seconds_unused = time.monotonic() - stored.used
        return int(time.time() + self._most_age_s - seconds_unused)

    def remove(self, name: str) -> bool:
        """Remove the memory with this id. Returns whether the store had such a memory."""
        stored = self._by_id.pop(name, None)
        if stored is None:
            return False
        self.num_bytes -= stored.memory.num_bytes
        return True

    def remove_expired(self) -> None:
        """Remove the memories that were not used for longer than the limit."""
        oldest = time.monotonic() - self._most_age_s
        while self._by_id and next(iter(self._by_id.values())).used < oldest:
            self.remove(next(iter(self._by_id)))
