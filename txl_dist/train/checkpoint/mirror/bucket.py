"""Access to the objects of a mirror through fsspec: list, read, write, create, remove, upload and download.

Every failure of a library or a network becomes a `MirrorError`, whose message says which host could not do what to
which object. Listings are never cached. The methods can be called from several threads.

Limitations: exclusive creation is exact on S3 and in memory. A file system without it checks first and then writes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from txl_dist.data.storage.fsspec_io import filesystem_of
from txl_dist.distributed.processes import process_id
from txl_dist.errors import CheckpointError, first_line

PART_BYTES = 8 * 2**20
"""Bytes of a large file that one request sends or fetches. This bounds the memory of a transfer."""
PARTS_AT_ONCE = 2
"""Number of parts of one file that are in transfer at the same time."""
_MAX_PARTS = 9000
"""Maximum number of parts of one file. S3 allows 10,000."""


class MirrorError(CheckpointError):
    """Error for a mirror that cannot be read or written now, for instance because of a network or its credentials."""


class Bucket:
    """Folder of an object store that holds the mirror of one run. Names of objects are relative to this folder."""

    def __init__(self, url: str, *, allow: Sequence[str] = ()) -> None:
        """Open the file system of a URL. Raises DataError if its package is missing or its scheme is not allowed.

        `allow` contains schemes that are allowed in addition (`data.allow_protocols`).
        """
        self.url = url.rstrip("/")
        self._file_system, root = filesystem_of(self.url, allow=allow)
        self._root = root.rstrip("/")

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the size in bytes of every object below a folder, by name. Raises MirrorError."""
        with self._errors("list", folder):
            self._file_system.invalidate_cache()
            found: dict[str, Any] = self._file_system.find(self._path(folder), detail=True)
        return {path[len(self._root) + 1 :]: int(facts["size"]) for path, facts in found.items()}

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object, or None if there is no such object. Raises MirrorError."""
        with self._errors("read", name):
            try:
                content: bytes = self._file_system.cat_file(self._path(name))
            except FileNotFoundError:
                return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, or replace it. Raises MirrorError."""
        with self._errors("write", name):
            self._file_system.pipe_file(self._path(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Write a small object that must not exist yet. Returns False if it exists. Raises MirrorError."""
        with self._errors("write", name):
            try:
                self._file_system.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                return False
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects in the given order. An object that does not exist is passed over. Raises MirrorError."""
        for name in names:
            with self._errors("remove", name), suppress(FileNotFoundError):
                self._file_system.rm_file(self._path(name))

    def upload(self, path: Path, name: str) -> None:
        """Copy a file into the bucket. Raises MirrorError, or OSError if the file cannot be read."""
        limits = self._limits("put_file", path.stat().st_size)
        with self._errors("write", name):
            self._file_system.put_file(str(path), self._path(name), **limits)

    def download(self, name: str, path: Path, *, num_bytes: int) -> None:
        """Copy an object of about `num_bytes` bytes into a file. Raises MirrorError."""
        limits = self._limits("get_file", num_bytes)
        with self._errors("read", name):
            self._file_system.get_file(self._path(name), str(path), **limits)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _limits(self, method: str, num_bytes: int) -> dict[str, int]:
        """Return those arguments for a transfer of `num_bytes` bytes that bound its memory and that the file system
        knows."""
        function = getattr(self._file_system, f"_{method}", None) or getattr(self._file_system, method)
        part_bytes = max(PART_BYTES, math.ceil(num_bytes / _MAX_PARTS))
        limits = {"chunksize": part_bytes, "max_concurrency": PARTS_AT_ONCE}
        known = inspect.signature(function).parameters
        return {name: value for name, value in limits.items() if name in known}

    @contextmanager
    def _errors(self, action: str, name: str) -> Iterator[None]:
        """Return a context manager that turns every error of the block into a MirrorError."""
        try:
            yield
        except Exception as error:  # each library fails in its own way
            where = f"{self.url}/{name}".rstrip("/")
            reason = first_line(error)
            if type(error).__name__ not in reason:
                reason = f"{type(error).__name__}: {reason}"
            raise MirrorError(f"{process_id().host} cannot {action} {where}: {reason}") from error
