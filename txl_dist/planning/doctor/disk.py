"""Checks of the file system of a run, and of a corpus.

A checkpoint needs to rename a file over another file. Downloads need a lock that only one process can hold. The checks
try the rename and the lock in a temporary folder.
"""

from __future__ import annotations

import fcntl
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from txl_dist.data.loader.corpus import open_corpus
from txl_dist.errors import TxlError
from txl_dist.io.files import flush_folder


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Facts about the file system under a folder. If `error` is not empty, the other facts are missing."""

    folder: str
    kind: str
    """Type of the file system, such as ext4, nfs4 or tmpfs. It is empty if the type is unknown."""
    free_gib: float = 0.0
    renames: bool = False
    """True if a file can be renamed over another file, and a folder can be flushed to disk."""
    locks: bool = False
    """True if a second process cannot lock a file that one process has locked."""
    error: str = ""
    """Reason why the file system cannot be used. Empty if it can be used."""


@dataclass(frozen=True, kw_only=True)
class CorpusShards:
    """Size of a corpus as this machine sees it, or the error if it cannot be opened."""

    location: str
    """Folder or URL of the corpus."""
    tokens: int = 0
    error: str = ""


def try_disk(folder: Path) -> Disk:
    """Check the file system on which a folder is, or on which it would be made. Returns its facts."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    disk = Disk(folder=str(folder), kind=_kind(folder))
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".txl-doctor-") as scratch:
            renames = _renames(Path(scratch))
            locks = _locks(Path(scratch))
            free_gib = psutil.disk_usage(str(folder)).free / 2**30
            return replace(disk, free_gib=free_gib, renames=renames, locks=locks)
    except OSError as error:
        return replace(disk, error=error.strerror or str(error))


def try_corpus(location: str) -> CorpusShards:
    """Open a corpus as a run does. Returns the size of the corpus, or the error if it cannot be opened."""
    try:
        splits = open_corpus(location).splits.values()
        return CorpusShards(location=location, tokens=sum(split.tokens for split in splits))
    except (TxlError, OSError) as error:
        return CorpusShards(location=location, error=str(error))


def _renames(folder: Path) -> bool:
    """Return whether a file can be renamed over another file, and a folder can be flushed to disk."""
    old = folder / "old"
    new = folder / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    new.replace(old)
    flush_folder(folder)
    return old.read_bytes() == b"new" and not new.exists()


def _locks(folder: Path) -> bool:
    """Return whether a file that is locked once cannot be locked a second time."""
    path = folder / "lock"
    with path.open("wb") as first, path.open("wb") as second, suppress(OSError):
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _kind(folder: Path) -> str:
    """Return the type of the file system on which a folder is, or an empty string if it is unknown."""
    with suppress(OSError):
        partitions = psutil.disk_partitions(all=True)
        above = [partition for partition in partitions if folder.is_relative_to(partition.mountpoint)]
        if above:
            nearest = max(above, key=lambda partition: len(partition.mountpoint))
            return str(nearest.fstype)
    return ""
