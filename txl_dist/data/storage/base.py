"""Interface of the storage of a corpus: its small files, and random access to its shards.

Implementations: `local` for folders, `cache` and `ranges` for URLs. `loader.corpus.Shard` checks what comes from any of
them.
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
    """Bytes of one open shard."""

    remedy: str
    """Advice for the user if they are damaged, for messages."""

    def read(self, offset: int, num_bytes: int, *, crc32: int | None = None) -> npt.NDArray[np.uint8]:
        """Return bytes of the file, possibly a view of it. Raises DataError if they cannot be read.

        With `crc32` a reader over a network fetches bytes again that lack it. The caller still has to check them.
        """


class Storage(ABC):
    """Files of one corpus."""

    location: str
    """Folder or URL, for messages."""

    def name_of(self, file: str) -> str:
        """Return the path or URL of a file, for messages."""
        return f"{self.location.rstrip('/')}/{file}"

    @abstractmethod
    def read(self, file: str, *, sha256: str = "") -> bytes:
        """Read a small file whole. Raises DataError if it cannot be read, or lacks the `sha256` if one is given."""

    @abstractmethod
    def open_payload(self, info: ShardInfo) -> Payload:
        """Open a shard for random access. Raises DataError if it is missing or has another size."""

    @abstractmethod
    def check_sizes(self, infos: Sequence[ShardInfo]) -> None:
        """Raise DataError if a shard is missing or has another size, as far as that is cheap to find out."""

    @abstractmethod
    def prefetch(self, infos: Sequence[ShardInfo]) -> None:
        """Prepare for these shards to be opened soon. It is only a hint."""


def check_size(name: str, num_bytes: int, info: ShardInfo) -> None:
    """Raise DataError if a shard has another size than the index says.

    Other readers of tars do not notice a file that is cut between two members.
    """
    if num_bytes != info.bytes or not num_bytes:
        raise DataError(
            f"{name} has {num_bytes} bytes, but the index says {info.bytes}: the file was cut or replaced. {REMEDY}"
        )
