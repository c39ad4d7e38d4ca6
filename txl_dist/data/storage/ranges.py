"""Storage of a corpus at a URL without a cache folder: each document is read by a range request.

Bytes are compared with their sha256 or crc32 inside the action that is tried again. So bytes that the network has
changed are fetched again before they are reported as damaged. Limitations: each document takes one request, which is
slow for short documents. A cache folder (cache.py) avoids this.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from txl_dist.data.format import ShardInfo
from txl_dist.data.storage.base import Payload
from txl_dist.data.storage.fsspec_io import DamageError, retrying
from txl_dist.data.storage.remote import RemoteStorage, UrlOrigin
from txl_dist.errors import DataError

RECENT_BYTES = 256 << 20
"""Maximum number of bytes of documents that are kept in memory. If the documents that a rank is reading do not fit in
this limit, they are fetched again for each segment."""


class RangeStorage(RemoteStorage):
    """Storage of a corpus at a URL, which reads each document by a range request.

    The documents that were read last are kept in memory, because several segments and lanes (batch rows) can share a
    document.
    """

    def __init__(self, origin: UrlOrigin, *, retries: int) -> None:
        super().__init__(origin, retries=retries)
        self._ranges = origin
        self._recent = _RecentBytes(RECENT_BYTES)

    @override
    def open_payload(self, info: ShardInfo) -> Payload:
        """Open a shard. A small read at the end of the shard checks the shard's size, and whether the server supports
        byte ranges.

        Raises DataError if the check fails.
        """
        payload = RangePayload(self._ranges, info, recent=self._recent, retries=self._retries)
        payload.check_end()
        return payload

    def prefetch(self, infos: Sequence[ShardInfo]) -> None:
        """Do nothing, because bytes are fetched only when they are read."""


class RangePayload(Payload):
    """Shard at a URL that is open for reading. Its bytes are fetched when they are read."""

    def __init__(self, origin: UrlOrigin, info: ShardInfo, *, recent: _RecentBytes, retries: int) -> None:
        self._origin = origin
        self._info = info
        self._recent = recent
        self._retries = retries
        self._name = origin.name_of(info.name)
        self.remedy = f"Restore {self._name} from a copy, or run `txl prepare` again."

    @override
    def read(self, offset: int, num_bytes: int, *, crc32: int | None = None) -> npt.NDArray[np.uint8]:
        """Return bytes of the shard, from memory if they were read recently.

        If the crc32 of the received bytes is not `crc32`, the bytes are fetched again.
        """
        key = self._info.name, offset, num_bytes
        content = self._recent.get(key)
        if content is None:
            what = f"{self._name}, {num_bytes} bytes at {offset}"
            content = retrying(lambda: self._fetch(offset, num_bytes, crc32), what=what, retries=self._retries)
            self._recent.put(key, content)
        return np.frombuffer(content, dtype=np.uint8)

    def check_end(self) -> None:
        """Raise DataError if the size of the file differs from the index, or if the server does not support ranges."""
        retrying(self._fetch_end, what=f"the end of {self._name}", retries=self._retries)

    def _fetch_end(self) -> None:
        num_bytes = self._info.bytes
        try:
            content = self._origin.read_range(self._info.name, num_bytes - 1, num_bytes + 1)
        except Exception as error:
            if getattr(error, "status", None) == 416:  # HTTP: the range begins after the end
                raise self._other_size("fewer") from error
            raise
        self._check_is_range(content, 2)
        if len(content) == 2:
            raise self._other_size("more")
        if not content:
            raise OSError(
                f"no bytes were received, but the index says {num_bytes} bytes: perhaps the file is truncated"
            )

    def _other_size(self, relation: str) -> DataError:
        return DataError(
            f"{self._name} has {relation} than the {self._info.bytes} bytes that the index says: it was truncated "
            "or replaced. " + self.remedy
        )

    def _fetch(self, offset: int, num_bytes: int, crc32: int | None) -> bytes:
        content = self._origin.read_range(self._info.name, offset, offset + num_bytes)
        self._check_is_range(content, num_bytes)
        if len(content) < num_bytes:
            raise OSError(f"only {len(content)} of {num_bytes} bytes were received")
        if crc32 is not None and zlib.crc32(content) != crc32:
            raise DamageError("the bytes are damaged: their crc32 differs from the crc32 in the document's record")
        return content

    def _check_is_range(self, content: bytes, num_bytes: int) -> None:
        if len(content) > num_bytes:
            raise DataError(
                f"{self._name}: the server ignored the byte range of the request, and sent {len(content)} bytes "
                f"instead of {num_bytes}. Set data.cache_dir to a local folder. txl_dist then downloads whole "
                "shards into this folder, and requests no byte ranges."
            )


class _RecentBytes:
    """Bytes that were read last, kept in memory up to `max_bytes` in all. The newest entry is kept even if it is larger
    than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: tuple[str, int, int]) -> bytes | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: tuple[str, int, int], content: bytes) -> None:
        with self._lock:
            self._num_bytes += len(content) - len(self._kept.pop(key, b""))
            self._kept[key] = content
            while self._num_bytes > self._max_bytes and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= len(oldest)
