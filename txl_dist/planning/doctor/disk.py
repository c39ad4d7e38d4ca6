"""Whether the file system of a run keeps what a checkpoint needs, and whether a corpus can be opened.

    rename   over another file, as the commit of a checkpoint does        lock   refused to a second holder

Tried in a folder of its own, which is gone afterwards.
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
    """The file system under a folder; without figures where `error` says why there are none."""

    folder: str
    kind: str
    """ext4, nfs4, tmpfs ...; empty if not known."""
    free_gib: float = 0.0
    renames: bool = False
    locks: bool = False
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class CorpusShards:
    """A corpus as seen from here."""

    location: str
    tokens: int = 0
    error: str = ""


def try_disk(folder: Path) -> Disk:
    """Try where `folder` is, or would be made."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    disk = Disk(folder=str(folder), kind=_kind(folder))
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".txl-doctor-") as scratch:
            renames, locks = _renames(Path(scratch)), _locks(Path(scratch))
            return replace(disk, free_gib=psutil.disk_usage(str(folder)).free / 2**30, renames=renames, locks=locks)
    except OSError as error:
        return replace(disk, error=error.strerror or str(error))


def try_corpus(location: str) -> CorpusShards:
    """Open a corpus as a run would."""
    try:
        splits = open_corpus(location).splits.values()
        return CorpusShards(location=location, tokens=sum(split.tokens for split in splits))
    except (TxlError, OSError) as error:
        return CorpusShards(location=location, error=str(error))


def _renames(folder: Path) -> bool:
    old, new = folder / "old", folder / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    new.replace(old)
    flush_folder(folder)
    return old.read_bytes() == b"new" and not new.exists()


def _locks(folder: Path) -> bool:
    path = folder / "lock"
    with path.open("wb") as first, path.open("wb") as second, suppress(OSError):
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _kind(folder: Path) -> str:
    """Type of the file system that is mounted nearest above a folder."""
    with suppress(OSError):
        above = [one for one in psutil.disk_partitions(all=True) if folder.is_relative_to(one.mountpoint)]
        return max(above, key=lambda one: len(one.mountpoint)).fstype if above else ""
    return ""
