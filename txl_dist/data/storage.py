"""Where the files of a corpus lie, and how their bytes are reached: mapped, cached, or read in ranges.

    folder                 shards are mapped into memory; nothing is copied
    URL, cache_dir set     a whole shard is downloaded once per node, proven by size and sha256, then mapped
    URL, no cache_dir      the bytes of one document at a time, in ranges

Readers see one interface, `Storage`; what they read is checked by `corpus.Shard`, wherever it came from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from txl_dist.data.shards import ShardInfo
from txl_dist.errors import DataError

REMEDY = "Restore the file from a copy, or run `txl prepare` again."


class StorageSettings(NamedTuple):
    """How corpora at URLs are reached; the fields of the section `data` of the same names."""

    cache_dir: str = ""
    cache_gib: float = 100.0
    retries: int = 5
    allow_protocols: tuple[str, ...] = ()


class Payload(Protocol):
    """The bytes of one open shard."""

    def read(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Bytes of the file, possibly a view of it. Raises DataError if they cannot be read."""


class Storage(ABC):
    """The files of one corpus."""

    location: str
    """Folder or URL, for messages."""

    def name_of(self, file: str) -> str:
        """Where a file lies, for messages."""
        return f"{self.location.rstrip('/')}/{file}"

    @abstractmethod
    def read(self, file: str) -> bytes:
        """A small file, whole. Raises DataError."""

    @abstractmethod
    def size(self, file: str) -> int:
        """Bytes of a file. Raises DataError."""

    @abstractmethod
    def open_payload(self, info: ShardInfo) -> Payload:
        """Random access to a shard, whose size is checked. Raises DataError."""

    def check_sizes(self, infos: Sequence[ShardInfo]) -> None:
        """Raises DataError if a shard is missing or has another size."""
        for info in infos:
            check_size(self.name_of(info.name), self.size(info.name), info)

    @abstractmethod
    def prefetch(self, infos: Sequence[ShardInfo]) -> None:
        """A hint: these shards will be opened soon."""


def check_size(name: str, num_bytes: int, info: ShardInfo) -> None:
    """Raises DataError if a shard has another size than the index says: other readers miss a cut at a member border."""
    if num_bytes != info.bytes:
        raise DataError(f"{name} has {num_bytes} bytes, the index says {info.bytes}: cut or replaced. {REMEDY}")


class LocalStorage(Storage):
    """A folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = str(folder)

    def read(self, file: str) -> bytes:
        """See `Storage`."""
        try:
            return (self.folder / file).read_bytes()
        except OSError as error:
            raise _unreadable(self.folder / file, error) from error

    def size(self, file: str) -> int:
        """See `Storage`."""
        try:
            return (self.folder / file).stat().st_size
        except OSError as error:
            raise _unreadable(self.folder / file, error) from error

    def open_payload(self, info: ShardInfo) -> Payload:
        """Map the shard."""
        path = self.folder / info.name
        check_size(str(path), self.size(info.name), info)
        try:
            return MappedPayload(path)
        except OSError as error:
            raise _unreadable(path, error) from error

    def prefetch(self, infos: Sequence[ShardInfo]) -> None:
        """The kernel reads ahead by itself."""


class MappedPayload:
    """A file mapped into memory."""

    def __init__(self, path: Path) -> None:
        # A plain array over the map: slicing np.memmap itself is three times slower.
        self._bytes = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))

    def read(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A view of the file."""
        return self._bytes[offset : offset + num_bytes]


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot read {path}: {error.strerror or error}. {REMEDY}")


def open_storage(location: str | Path, settings: StorageSettings) -> Storage:
    """The storage of a folder or URL. Raises DataError for a URL whose scheme is not allowed."""
    return LocalStorage(Path(location))
