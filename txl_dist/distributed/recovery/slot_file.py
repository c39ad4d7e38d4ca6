"""A slot: a file in memory that holds one version of a rank's state, and says whether the version is whole.

    slot      [head] [content]
    head      serial number, rank, number of ranks, sizes of the three parts of the content, hash of the content
    content   [values] [table] [facts], whose meaning is in `train.checkpoint.slots`

The serial number is written last. It is 0 while the slot holds no version or is being written.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import xxhash

HEAD_BYTES = 64
"""Bytes before the content."""
_HEAD = struct.Struct("6qQ")
_MAX_BYTES = 1 << 46
"""Limit for the sizes in a head from another process, far above any memory."""
_MOST_SPARE_BYTES = 1 << 20
"""Largest unused room in bytes that a slot gets when it grows, for versions that are a little longer."""


class Version(NamedTuple):
    """Name of the state of one rank after a step."""

    serial: int
    """Number that increases with each version. All ranks of a step have the same number."""
    world_size: int
    """Number of ranks that stored this step together."""
    rank: int


class SlotHead(NamedTuple):
    """Head of a slot."""

    serial: int
    """Number of the version, which increases with each version. 0 means that the slot holds no version."""
    rank: int
    """Rank whose state it is."""
    world_size: int
    """Number of ranks that stored this version together."""
    values_len: int
    """Size of the values in bytes."""
    table_len: int
    facts_len: int
    content_hash: int
    """64-bit xxHash of the content, from `hash_of`."""

    @property
    def num_bytes(self) -> int:
        """Size of the slot, with its head."""
        return HEAD_BYTES + self.values_len + self.table_len + self.facts_len

    @property
    def version(self) -> Version:
        """Name of the version that the slot holds."""
        return Version(self.serial, self.world_size, self.rank)

    def to_bytes(self) -> bytes:
        """Return the head as `SlotFile` stores it."""
        return _HEAD.pack(*self).ljust(HEAD_BYTES, b"\0")


def hash_of(content: memoryview | bytes) -> int:
    """Return the hash of the content of a slot: XXH3, 64 bits, which is as fast as reading memory."""
    return xxhash.xxh3_64_intdigest(content)


NO_VERSION = SlotHead(0, 0, 0, 0, 0, 0, 0)
"""Head of an empty slot."""


def head_of(content: bytes) -> SlotHead:
    """Return the head that these bytes describe. Raises ValueError if its sizes are impossible."""
    head = SlotHead(*_HEAD.unpack(content[: _HEAD.size]))
    sizes = head[3:6]
    if min(sizes) < 0 or max(sizes) > _MAX_BYTES:
        raise ValueError(f"a slot cannot have parts of {sizes} bytes")
    return head


class SlotFile:
    """One slot. Several processes may open the same one. Only one of them writes at a time."""

    def __init__(self, file: int | str) -> None:
        """Open the file, which is a descriptor or a path. The object owns the descriptor."""
        if isinstance(file, int):
            self._file = file
        else:
            self._file = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None

    def close(self) -> None:
        """Close the file. Values that were read stay valid."""
        os.close(self._file)

    @property
    def path(self) -> str:
        """Path at which other processes can open the slot, as long as this object has it open."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def head(self) -> SlotHead:
        """Head of the version in this slot. `NO_VERSION` if the slot is empty or its head is damaged."""
        content = self._map[:HEAD_BYTES] if self._map is not None else os.pread(self._file, HEAD_BYTES, 0)
        if len(content) < HEAD_BYTES:
            return NO_VERSION
        with suppress(ValueError):
            return head_of(content)
        return NO_VERSION

    def is_whole(self) -> bool:
        """Return whether the content of the slot has the hash that its head says."""
        return self.holds(self.head)

    def holds(self, head: SlotHead) -> bool:
        """Return whether the slot has the content that a head describes, by its size and its hash."""
        if os.fstat(self._file).st_size < head.num_bytes:
            return False
        return self._hash(head.num_bytes) == head.content_hash

    def begin(self, num_bytes: int) -> mmap.mmap:
        """Invalidate the version in this slot, and return the file with room for a slot of `num_bytes`.

        Raises OSError if there is not enough memory. Then the old version is still valid.
        """
        content = self.mapped(num_bytes)
        content[:8] = bytes(8)
        return content

    def seal(self, version: Version, values_len: int, table_len: int, facts_len: int) -> None:
        """Make the content that was written after `begin` valid, as this version. The sizes are in bytes."""
        content_hash = self._hash(HEAD_BYTES + values_len + table_len + facts_len)
        serial, world_size, rank = version
        self.finish(SlotHead(serial, rank, world_size, values_len, table_len, facts_len, content_hash))

    def finish(self, head: SlotHead) -> None:
        """Make the content that was written after `begin` valid, with the head that describes it."""
        content = self.mapped(head.num_bytes)
        packed = head.to_bytes()
        content[8:HEAD_BYTES] = packed[8:]
        content[:8] = packed[:8]

    def _hash(self, num_bytes: int) -> int:
        """Return the hash of the content of a slot of `num_bytes`."""
        with memoryview(self.mapped(num_bytes)) as content:
            return hash_of(content[HEAD_BYTES:num_bytes])

    def mapped(self, num_bytes: int) -> mmap.mmap:
        """Return the file as memory of at least `num_bytes`. A file that is too small grows. Raises OSError."""
        if self._map is None or len(self._map) < num_bytes:
            if os.fstat(self._file).st_size < num_bytes:
                size = num_bytes + min(num_bytes // 8, _MOST_SPARE_BYTES)
                os.posix_fallocate(self._file, 0, size)  # OSError here, and not a signal at a later write
            self._map = mmap.mmap(self._file, 0)
        return self._map


S = TypeVar("S", bound=SlotFile)


def slot_to_replace(slots: Sequence[S], *, kept: set[int]) -> S:
    """Return the slot to write next: the one with the oldest version, except versions in `kept` (serial numbers).

    A version that two slots hold needs only one of them.
    """
    serials = [slot.head.serial for slot in slots]
    replaceable = [number for number, serial in enumerate(serials) if serial not in kept or serials.count(serial) > 1]
    return slots[min(replaceable, key=serials.__getitem__)]
