"""Files of a preparation that several machines read and write: in a shared folder, or under a URL of an object store.

    write, push    a file appears at once when it is complete: by a rename in a folder, by the upload of an object
    read, fetch    a whole file or a range of its bytes
    claim_url      one preparation at a time uses a URL; a folder is claimed by workdir.py

Two machines may write the same file at the same time, if the cluster takes a node for lost that still works. Both
write the same bytes, so a reader gets the same content from either.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from txl_dist.console.formatting import counted
from txl_dist.console.logging import logger
from txl_dist.data.storage.fsspec_io import filesystem_of, retrying
from txl_dist.errors import DataError, UnreachableError
from txl_dist.io.files import flush_folder, fsync, open_new, write_bytes

Result = TypeVar("Result")

OWNER = "owner.json"
"""Name of the file that says which process uses the work folder at a URL."""
STAMP = "job.json"
"""Name of the file with the hash of the settings that all other files of a work folder depend on."""
BEAT_S = 5.0
"""Seconds between two signs of life of the process that uses a URL."""
_RETRIES = 4
_UNFINISHED = ".unfinished"


class SharedFiles(ABC):
    """Interface to the files of one folder that several machines share. Names contain no folders."""

    location: str
    """Folder or URL, for messages."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a file as a whole. Raises UnreachableError if it cannot be written."""

    @abstractmethod
    def push(self, local: Path, name: str) -> None:
        """Copy a local file to the file `name`. Raises UnreachableError if it cannot be written."""

    @abstractmethod
    def read(self, name: str, first: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of a file from `first` up to `end`, or to its end. Raises DataError if it is missing, and
        UnreachableError if it cannot be read."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file, by name. A missing folder has no files."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files. Missing files are ignored."""

    def fetch(self, name: str, local: Path) -> None:
        """Copy a file to a local path."""
        write_bytes(local, self.read(name))

    def find(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it is missing."""
        try:
            return self.read(name)
        except UnreachableError:
            raise
        except DataError:
            return None


class FolderFiles(SharedFiles):
    """Files in a folder that all machines see under the same path."""

    def __init__(self, folder: str) -> None:
        self.location = folder
        self._folder = Path(folder)

    @override
    def write(self, name: str, data: bytes) -> None:
        with self._errors(name, "write"), self._replacing(name) as stream:
            stream.write(data)

    @override
    def push(self, local: Path, name: str) -> None:
        with self._errors(name, "write"), self._replacing(name) as stream, local.open("rb") as source:
            shutil.copyfileobj(source, stream, 1 << 20)

    @override
    def read(self, name: str, first: int = 0, end: int | None = None) -> bytes:
        with self._errors(name, "read"), (self._folder / name).open("rb") as stream:
            stream.seek(first)
            if end is None:
                return stream.read()
            return stream.read(end - first)

    @override
    def sizes(self) -> dict[str, int]:
        with self._errors("", "read"), suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        return {}

    @override
    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with self._errors(name, "remove"):
                (self._folder / name).unlink(missing_ok=True)

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


class UrlFiles(SharedFiles):
    """Files under a URL of an object store, through fsspec."""

    def __init__(self, url: str) -> None:
        self.location = url.rstrip("/")
        self._filesystem, self._path = filesystem_of(self.location)

    @override
    def write(self, name: str, data: bytes) -> None:
        self._try(lambda: self._filesystem.pipe_file(f"{self._path}/{name}", data), name, "write")

    @override
    def push(self, local: Path, name: str) -> None:
        self._try(lambda: self._filesystem.put_file(str(local), f"{self._path}/{name}"), name, "write")

    @override
    def read(self, name: str, first: int = 0, end: int | None = None) -> bytes:
        if end == first:  # some stores return the whole object for an empty range
            return b""
        if end is None and not first:
            limits = {}
        else:
            limits = {"start": first, "end": end}
        content: bytes = self._try(lambda: self._filesystem.cat_file(f"{self._path}/{name}", **limits), name, "read")
        return content

    @override
    def sizes(self) -> dict[str, int]:
        def look() -> dict[str, int]:
            self._filesystem.invalidate_cache()
            found = self._filesystem.find(self._path, maxdepth=1, detail=True)
            return {path.rpartition("/")[2]: int(about["size"]) for path, about in found.items()}

        return self._try(look, "", "list")

    @override
    def remove(self, names: Iterable[str]) -> None:
        present = self.sizes()
        paths = [f"{self._path}/{name}" for name in names if name in present]
        if paths:
            self._try(lambda: self._filesystem.rm(paths), "", "remove")

    def _try(self, action: Callable[[], Result], name: str, verb: str) -> Result:
        return retrying(action, what=f"{self.location}/{name}", retries=_RETRIES, verb=verb)


def shared_files(location: str) -> SharedFiles:
    """Return the files of a shared folder or of a URL. Raises DataError as `filesystem_of` does."""
    if "://" not in location:
        return FolderFiles(location)
    if location.startswith("file://"):
        return FolderFiles(location.removeprefix("file://"))
    return UrlFiles(location)


@contextmanager
def claim_url(files: SharedFiles, *, stamp: str, can_continue: bool, beat_s: float = BEAT_S) -> Iterator[None]:
    """Use the work folder at a URL alone, and remove it after success.

    A thread writes a sign of life every `beat_s` seconds. Without signs of life, the process that used the URL before
    has ended, and its work is continued if its stamp is the same and `can_continue` is True. Otherwise its work is
    removed. Raises DataError if another process uses the URL.
    """
    me = f"process {os.getpid()} on {socket.gethostname()}"
    mark = secrets.token_hex(8)
    _await_owner(files, beat_s=beat_s)
    stopped = threading.Event()

    def beat(number: int) -> None:
        files.write(OWNER, json.dumps({"owner": me, "mark": mark, "beat": number}).encode())

    def beat_on() -> None:
        number = 0
        while not stopped.wait(beat_s):
            number += 1
            try:
                beat(number)
            except UnreachableError as error:
                logger.warning("%s", error)

    beat(0)
    time.sleep(beat_s / 5)
    if mark.encode() not in (files.find(OWNER) or b""):  # another process began at the same moment
        raise _used(files)
    thread = threading.Thread(target=beat_on, name="txl-owner", daemon=True)
    thread.start()
    try:
        _take_over_url(files, stamp=stamp, can_continue=can_continue)
        yield
        # The stamp goes first, so that no process continues from a half-removed folder.
        files.remove([STAMP])
        files.remove(name for name in files.sizes() if name != OWNER)
    finally:
        stopped.set()
        thread.join()
        files.remove([OWNER])


def _await_owner(files: SharedFiles, *, beat_s: float) -> None:
    """Wait until it is certain that no other process uses the URL. Raises DataError if one does."""
    before = files.find(OWNER)
    if before is None:
        return
    logger.info("%s was used by another process. Waiting %.0f s for a sign of its life", files.location, 3 * beat_s)
    time.sleep(3 * beat_s)
    if files.find(OWNER) not in (before, None):
        raise _used(files)


def _used(files: SharedFiles) -> DataError:
    """Return the error for a URL that another process uses."""
    try:
        owner = str(json.loads(files.find(OWNER) or b"")["owner"])
    except (ValueError, KeyError, TypeError):
        owner = "another process"
    return DataError(
        f"{files.location} is used by {owner}. Wait for that process, or choose another --workdir or output."
    )


def _take_over_url(files: SharedFiles, *, stamp: str, can_continue: bool) -> None:
    """Keep the work of an earlier process with the same stamp. Otherwise remove it with a warning."""
    content = files.find(STAMP)
    if content == stamp.encode() and can_continue:
        return
    left = [name for name in files.sizes() if name != OWNER]
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
        files.remove(name for name in left if name != STAMP)
    files.write(STAMP, stamp.encode())
