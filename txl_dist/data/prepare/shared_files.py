"""Files of a preparation that several machines read and write: in a shared folder, or under a URL of an object store.

    write, upload    a file appears at once when it is complete: by a rename in a folder, by the upload of an object
    read, download   a whole file or a range of its bytes
    claim_urls       one preparation at a time uses a URL; a folder is claimed by workdir.py

Two machines may write the same file at the same time, if the cluster takes a node for lost that still works. Both
write the same bytes, so a reader gets the same content from either.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from txl_dist.console.formatting import counted
from txl_dist.console.logging import logger
from txl_dist.data.storage.bucket import Bucket, read_if_present
from txl_dist.data.storage.bucket_lock import LOCK, BucketLock, is_lock
from txl_dist.errors import DataError, UnreachableError
from txl_dist.io.files import flush_folder, fsync, open_new
from txl_dist.tokenizers.tokenizer import tokenizer_bytes

STAMP = "job.json"
"""Name of the file with the hash of the settings that all other files of a work folder depend on."""
_RETRIES = 4
_UNFINISHED = ".unfinished"


class FolderFiles:
    """Files in a folder that all machines see under the same path. Names contain no folders.

    The methods are those of `Bucket`, and raise the same errors.
    """

    def __init__(self, folder: str) -> None:
        self.location = folder
        self._folder = Path(folder)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file, by name. A missing folder has no files."""
        with self._errors("", "read"), suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        return {}

    def read(self, name: str, first: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of a file from `first` up to `end`, or to its end."""
        with self._errors(name, "read"), (self._folder / name).open("rb") as stream:
            stream.seek(first)
            return stream.read(-1 if end is None else end - first)

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it."""
        with self._errors(name, "write"), self._replacing(name) as stream:
            stream.write(content)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files. Missing files are ignored."""
        for name in names:
            with self._errors(name, "remove"):
                (self._folder / name).unlink(missing_ok=True)

    def upload(self, path: Path, name: str) -> None:
        """Copy a local file into the folder."""
        with self._errors(name, "write"), self._replacing(name) as stream, path.open("rb") as source:
            shutil.copyfileobj(source, stream, 1 << 20)

    def download(self, name: str, path: Path) -> None:
        """Copy a file of the folder to a local path."""
        with self._errors(name, "read"):
            shutil.copyfile(self._folder / name, path)

    @contextmanager
    def _replacing(self, name: str) -> Iterator[Any]:
        """Open a new file that gets its name when the block ends.

        Its name until then is random, because two machines may write one file at the same time.
        """
        unfinished = self._folder / f"{secrets.token_hex(8)}{_UNFINISHED}"
        try:
            with open_new(unfinished) as stream:
                yield stream
                fsync(stream)
            unfinished.replace(self._folder / name)
        finally:
            unfinished.unlink(missing_ok=True)
        flush_folder(self._folder)

    @contextmanager
    def _errors(self, name: str, verb: str) -> Iterator[None]:
        """Replace errors of the file system by errors that name the file and this machine."""
        try:
            yield
        except OSError as error:
            kind = DataError if isinstance(error, FileNotFoundError) else UnreachableError
            raise kind(
                f"cannot {verb} {self._folder / name} on {socket.gethostname()}: {error.strerror}. All nodes must see "
                "this folder under the same path, and have room and permission to write in it."
            ) from error


SharedFiles = FolderFiles | Bucket


def shared_files(location: str) -> SharedFiles:
    """Return the files of a shared folder or of a URL. Raises DataError as `Bucket` does."""
    if "://" in location:
        return Bucket(location, retries=_RETRIES)
    return FolderFiles(location)


def read_tokenizer_file(location: str | Path) -> bytes:
    """Return the content of a tokenizer file at a path or a URL. Raises DataError, and UnreachableError for a URL."""
    if "://" not in str(location):
        return tokenizer_bytes(location, remedy="Check the path.")
    folder, _, name = str(location).rpartition("/")
    return Bucket(folder).read(name)


@contextmanager
def claim_urls(urls: Sequence[str], *, stamp: str, can_continue: bool) -> Iterator[list[BucketLock]]:
    """Use the work folders at some URLs alone, and remove their files after success. Yields their locks.

    The work of a dead process is continued if its stamp is the same and `can_continue` is True. Otherwise it is
    removed. Raises ConfigError if another process uses a URL, and DataError if it has files of another program.
    """
    remedy = "Wait for that job, or choose another --workdir or output."
    nonce = secrets.token_hex(8)
    locks: list[BucketLock] = []
    try:
        for url in urls:
            locks.append(BucketLock.acquire(Bucket(url), "txl prepare", nonce=nonce, remedy=remedy))
        folders = [Bucket(url, retries=_RETRIES) for url in urls]
        for folder in folders:
            _take_over_url(folder, stamp=stamp, can_continue=can_continue)
        yield locks
        for folder, lock in zip(folders, locks, strict=True):
            if lock.beat():
                # The stamp goes first, so that no process continues from a half-removed folder.
                folder.remove([STAMP])
                folder.remove(name for name in folder.sizes() if name != LOCK)
    finally:
        for lock in locks:
            lock.release()


def _take_over_url(files: Bucket, *, stamp: str, can_continue: bool) -> None:
    """Keep the work of an earlier process with the same stamp. Otherwise remove it with a warning."""
    content = read_if_present(files, STAMP)
    if content == stamp.encode() and can_continue:
        return
    left = [name for name in files.sizes() if not is_lock(name)]
    if left and content is None:
        raise DataError(
            f"{files.location} contains {counted(len(left), 'file')} of another program. Choose another --workdir or "
            "output."
        )
    if left:
        logger.warning(
            "%s: an interrupted preparation is discarded, because its settings or inputs can differ. Starting again.",
            files.location,
        )
        files.remove([STAMP])
        files.remove(left)
    files.write(STAMP, stamp.encode())
