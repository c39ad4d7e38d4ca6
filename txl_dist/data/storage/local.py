"""Where the files of a corpus lie, and how their bytes are reached: one interface, and the folder, whose shards are
mapped into memory.

What readers of `Storage` read is checked by `corpus.Shard`, wherever it came from.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from txl_dist.data.format import ShardInfo
from txl_dist.errors import DataError, translate_errors
from txl_dist.io.files import open_regular, read_bytes, resolve_inside

MAX_FILE_BYTES = 1 << 36
"""Of a file that is read whole: records have 16 bytes for each document of a shard."""
REMEDY = "Restore the file from a copy, or run `txl prepare` again."


class Payload(Protocol):
    """The bytes of one open shard."""

    remedy: str
    """What to do if they are damaged."""

    def read(self, offset: int, num_bytes: int, *, crc32: int | None = None) -> npt.NDArray[np.uint8]:
        """Bytes of the file, possibly a view of it. Raises DataError if they cannot be read.

        Whoever knows their crc32 says it: a reader over a network fetches them again if they have another. To judge
        them in the end is the caller's business.
        """


class Storage(ABC):
    """The files of one corpus."""

    location: str
    """Folder or URL, for messages."""

    def name_of(self, file: str) -> str:
        """Where a file lies, for messages."""
        return f"{self.location.rstrip('/')}/{file}"

    @abstractmethod
    def read(self, file: str, *, sha256: str = "") -> bytes:
        """A small file, whole. Raises DataError if it cannot be read or lacks the sha256, where one is given."""

    @abstractmethod
    def open_payload(self, info: ShardInfo) -> Payload:
        """Random access to a shard, whose size is checked. Raises DataError."""

    @abstractmethod
    def check_sizes(self, infos: Sequence[ShardInfo]) -> None:
        """Raises DataError if a shard is missing or has another size, as far as that is cheap to know."""

    @abstractmethod
    def prefetch(self, infos: Sequence[ShardInfo]) -> None:
        """A hint: these shards will be opened soon."""


def check_size(name: str, num_bytes: int, info: ShardInfo) -> None:
    """Raises DataError if a shard has another size than the index says: other readers miss a cut at a member border."""
    if num_bytes != info.bytes or not num_bytes:
        raise DataError(f"{name} has {num_bytes} bytes, the index says {info.bytes}: cut or replaced. {REMEDY}")


class LocalStorage(Storage):
    """A folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = str(folder)

    @override
    def read(self, file: str, *, sha256: str = "") -> bytes:
        with translate_errors(DataError, f"cannot read {self.folder / file}", REMEDY):
            content = read_bytes(self._path(file), max_bytes=MAX_FILE_BYTES)
        if sha256 and hashlib.sha256(content).hexdigest() != sha256:
            raise DataError(f"{self.folder / file} is damaged: its sha256 is not the one in the index. {REMEDY}")
        return content

    def open_payload(self, info: ShardInfo) -> Payload:
        """Map the shard."""
        self.check_sizes([info])
        path = self._path(info.name)
        with translate_errors(DataError, f"cannot read {path}", REMEDY), open_regular(path) as stream:
            return MappedPayload(stream)

    @override
    def check_sizes(self, infos: Sequence[ShardInfo]) -> None:
        for info in infos:
            path = self._path(info.name)
            with translate_errors(DataError, f"cannot read {path}", REMEDY):
                num_bytes = path.stat().st_size
            check_size(str(path), num_bytes, info)

    def prefetch(self, infos: Sequence[ShardInfo]) -> None:
        """The kernel reads ahead by itself."""

    def _path(self, file: str) -> Path:
        remedy = "Copy the file to its place, or use another corpus."
        with translate_errors(DataError, f"{self.folder}", remedy, of=(ValueError,)):
            return resolve_inside(self.folder, file)


class MappedPayload:
    """A file mapped into memory."""

    def __init__(self, file: Path | IO[bytes], *, remedy: str = REMEDY) -> None:
        """An open file may be closed afterwards; its flock stays as long as the map and its views do."""
        # A plain array over the map: slicing np.memmap itself is three times slower.
        self._bytes = np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))
        self.remedy = remedy

    def read(self, offset: int, num_bytes: int, *, crc32: int | None = None) -> npt.NDArray[np.uint8]:
        """A view of the file."""
        return self._bytes[offset : offset + num_bytes]
