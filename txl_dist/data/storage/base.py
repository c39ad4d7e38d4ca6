"""Interface to the files of a corpus: small files as a whole, and random access to shards.

Implementations: `local` for folders, `cache` and `ranges` for URLs. `loader.shards.Shard` checks the bytes that an
implementation returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from txl_dist.data.format import ShardInfo
from txl_dist.errors import DataError

REMEDY = "Restore the file from a copy, or run `txl prepare` again."


class Payload(Protocol):
    """Interface of a shard that is open for reading. It returns any range of the shard's bytes."""

    remedy: str
    """Advice to print if the bytes of the shard are damaged."""

    def read(self, offset: int, num_bytes: int, *, crc32: int | None = None) -> npt.NDArray[np.uint8]:
        """Return `num_bytes` bytes of the shard from `offset` on, possibly as a view of the mapped file.

        If `crc32` is given, a reader over a network fetches the bytes again when their crc32 differs. The caller must
        still check the bytes. Raises DataError if they cannot be read.
        """


class Storage(ABC):
    """Interface to the files of one corpus, in a folder or at a URL."""

    location: str
    """Folder or URL of the corpus, for messages."""

    def name_of(self, file: str) -> str:
        """Return the path or URL of a file, for messages."""
        return f"{self.location.rstrip('/')}/{file}"

    @abstractmethod
    def read(self, file: str, *, sha256: str = "") -> bytes:
        """Return the content of a small file.

        Raises DataError if the file cannot be read, or if a `sha256` is given and the file has another hash.
        """

    @abstractmethod
    def open_payload(self, info: ShardInfo) -> Payload:
        """Open a shard for random access. Raises DataError if the shard is missing or has another size than `info`
        says."""

    @abstractmethod
    def check_sizes(self, infos: Sequence[ShardInfo]) -> None:
        """Raise DataError if a shard is missing or has another size than its `info` says.

        A storage whose sizes are expensive to get does not check them.
        """

    @abstractmethod
    def prefetch(self, infos: Sequence[ShardInfo]) -> None:
        """Prepare for these shards to be opened soon. A storage may ignore this hint."""


def check_size(name: str, num_bytes: int, info: ShardInfo) -> None:
    """Raise DataError if the size of a shard differs from the index.

    The check detects a tar that was truncated between two members. Other readers of tars would take such a tar for
    complete.
    """
    if num_bytes != info.bytes or not num_bytes:
        raise DataError(
            f"{name} has {num_bytes} bytes, but the index says {info.bytes}: the file was cut or replaced. {REMEDY}"
        )
