"""Storage of a corpus in a folder: shards are mapped into memory and not copied."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from txl_dist.data.format import ShardInfo
from txl_dist.data.storage.base import REMEDY, Payload, Storage, check_size
from txl_dist.errors import DataError, translate_errors
from txl_dist.io.files import open_regular, read_bytes, resolve_inside

MAX_FILE_BYTES = 1 << 36
"""Maximum size in bytes of a file that is read as a whole. The largest are files of records, with 16 bytes for each
document of a shard."""


class LocalStorage(Storage):
    """Storage of a corpus in a folder, whose shards are mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = str(folder)

    @override
    def read(self, file: str, *, sha256: str = "") -> bytes:
        with translate_errors(DataError, f"cannot read {self.folder / file}", REMEDY):
            content = read_bytes(self._path(file), max_bytes=MAX_FILE_BYTES)
        if sha256 and hashlib.sha256(content).hexdigest() != sha256:
            raise DataError(
                f"{self.folder / file} is damaged: its sha256 differs from the sha256 in the index. {REMEDY}"
            )
        return content

    def open_payload(self, info: ShardInfo) -> Payload:
        """Map a shard into memory. Raises DataError if the shard is missing or has another size than `info` says."""
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
        """Do nothing, because the kernel reads ahead by itself."""

    def _path(self, file: str) -> Path:
        """Return the path of a file. Raises DataError if its name leads out of the folder."""
        remedy = "Copy the file itself into this folder, or use another corpus."
        with translate_errors(DataError, f"{self.folder}", remedy, of=(ValueError,)):
            return resolve_inside(self.folder, file)


class MappedPayload:
    """Shard that is open for reading and mapped into memory."""

    def __init__(self, file: Path | IO[bytes], *, remedy: str = REMEDY) -> None:
        """Map a file, given by its path or as an open file.

        The caller may close the open file afterwards. A flock on the file lasts as long as the map and the views of the
        map.
        """
        # A plain array over the map: slicing np.memmap itself is three times slower.
        self._bytes = np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))
        self.remedy = remedy

    def read(self, offset: int, num_bytes: int, *, crc32: int | None = None) -> npt.NDArray[np.uint8]:
        """Return `num_bytes` bytes from `offset` on, as a view of the mapped file."""
        return self._bytes[offset : offset + num_bytes]
