"""How fast and how honest the file system of a run or a corpus is, in a test that ends and leaves nothing behind.

    write     up to 64 MiB, forced to disk; stops after 5 s        read      the same, dropped from the cache before
    force     4 KiB at a time: what each file of a checkpoint waits for at least
    rename    over another file, as the commit of a checkpoint does        lock      refused to a second holder

Reading is from the server's or the disk's own cache at best; what the kernel still holds in spite of being asked to
drop it shows as a speed beyond the disk's.
"""

from __future__ import annotations

import fcntl
import os
import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from txl_dist.data.read.corpus import open_corpus
from txl_dist.errors import TxlError
from txl_dist.files import flush_folder

MIB = 2**20
WRITTEN_MIB = 64
MAX_WRITE_S = 5.0
NUM_FORCED = 10


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The file system under a folder. Figures are 0 where `error` says why there are none."""

    folder: str
    kind: str
    """ext4, nfs4, tmpfs ...; empty if not known."""
    free_gib: float = 0.0
    write_mib_s: float = 0.0
    read_mib_s: float = 0.0
    force_ms: float = 0.0
    renames: bool = False
    locks: bool = False
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus as seen from here."""

    location: str
    tokens: int = 0
    read_mib_s: float = 0.0
    """Of its first shard; 0 for one at a URL."""
    error: str = ""


def measure_disk(folder: Path) -> Disk:
    """Measure where `folder` is, or would be made."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    kind = _kind(folder)
    try:
        usage = os.statvfs(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".txl-doctor-") as scratch:
            path = Path(scratch) / "speed"
            write_mib_s = _write(path)
            return Disk(
                folder=str(folder),
                kind=kind,
                free_gib=usage.f_bavail * usage.f_frsize / 2**30,
                write_mib_s=write_mib_s,
                read_mib_s=read_speed(path),
                force_ms=_force_ms(Path(scratch)),
                renames=_renames(Path(scratch)),
                locks=_locks(path),
            )
    except OSError as error:
        return Disk(folder=str(folder), kind=kind, error=error.strerror or str(error))


def measure_corpus(location: str) -> Corpus:
    """Open a corpus as a run would, and read of its first shard."""
    try:
        corpus = open_corpus(location)
        split = next(iter(corpus.splits.values()))
        path = Path(location) / split.shards[0].name
        tokens = sum(split.tokens for split in corpus.splits.values())
        return Corpus(location=location, tokens=tokens, read_mib_s=read_speed(path) if path.is_file() else 0.0)
    except (TxlError, OSError) as error:
        return Corpus(location=location, error=str(error))


def read_speed(path: Path) -> float:
    """MiB/s of the first 64 MiB of a file, of which the kernel is asked to forget what it holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        start_s, num_bytes = time.perf_counter(), 0
        while num_bytes < WRITTEN_MIB * MIB and (piece := os.read(descriptor, MIB)):
            num_bytes += len(piece)
        return num_bytes / MIB / max(time.perf_counter() - start_s, 1e-9)
    finally:
        os.close(descriptor)


def _write(path: Path) -> float:
    piece, num_pieces = os.urandom(MIB), 0
    start_s = time.perf_counter()
    with path.open("wb", buffering=0) as stream:
        while num_pieces < WRITTEN_MIB and time.perf_counter() - start_s < MAX_WRITE_S:
            num_pieces += stream.write(piece) // MIB
        os.fsync(stream.fileno())
    return num_pieces / (time.perf_counter() - start_s)


def _force_ms(folder: Path) -> float:
    times_ms: list[float] = []
    end_s = time.perf_counter() + MAX_WRITE_S
    with (folder / "force").open("wb", buffering=0) as stream:
        while len(times_ms) < NUM_FORCED and time.perf_counter() < end_s:
            start_s = time.perf_counter()
            stream.write(b"x" * 4096)
            os.fsync(stream.fileno())
            times_ms.append(1000 * (time.perf_counter() - start_s))
    return statistics.median(times_ms)


def _renames(folder: Path) -> bool:
    old, new = folder / "old", folder / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    new.replace(old)
    flush_folder(folder)
    return old.read_bytes() == b"new" and not new.exists()


def _locks(path: Path) -> bool:
    with path.open("rb") as first, path.open("rb") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def _kind(folder: Path) -> str:
    """Type of the file system that is mounted nearest above a folder."""
    with suppress(OSError):
        above = [one for one in psutil.disk_partitions(all=True) if folder.is_relative_to(one.mountpoint)]
        return max(above, key=lambda one: len(one.mountpoint)).fstype if above else ""
    return ""
