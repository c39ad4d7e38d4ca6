"""Cache of whole shards of corpora at URLs, in a folder that all processes of a node share.

    CACHE/
      HASH-train-000003.tar             a shard, which got this name after its size and sha256 were checked
      HASH-train-000003.tar.lock        locked by the process that downloads the shard, while other processes wait
      HASH-train-000004.tar.R.N.part    a download of N bytes that is in progress or was killed; R is random
      cache.lock                        locked while a process removes shards

- A file's name begins with a hash of its content. So shards with the same name from two corpora do not collide, and a
  shard that was prepared again gets another name. Opening a shard checks only its size.
- A shard is in use while any process of the node has it mapped. The map holds a shared flock, which the kernel releases
  when the process ends for any reason. A full cache removes the least recently opened shards that are not in use.
- Files that are not named like a shard of the cache are neither read nor removed.

Limitations: damage that happens on the disk later is found by the crc32 of each document, not by the cache. Empty lock
files are not removed, because then two processes could hold the same lock. Small files are not cached.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from filelock import FileLock, Timeout
from typing_extensions import override

from txl_dist.console.logging import logger
from txl_dist.data.format import ShardInfo
from txl_dist.data.storage.base import Payload
from txl_dist.data.storage.fsspec_io import DamageError, retrying
from txl_dist.data.storage.local import MappedPayload
from txl_dist.data.storage.remote import Origin, RemoteStorage
from txl_dist.errors import UnreachableError
from txl_dist.io.files import flush_folder, open_new, sha256_of_file

NUM_PREFETCHERS = 4
"""Maximum number of shards that a process downloads at the same time in advance, before they are opened."""

_CACHE_FILE = re.compile(r"[0-9a-f]{32}-.+?(\.(?P<bytes>\d+)\.part)?(?<!\.lock)")
_POLL_S = 0.05
_MAX_POLLS = 20


class CachedStorage(RemoteStorage):
    """Storage of a corpus at a URL, which downloads whole shards into a cache folder and maps them into memory.

    A shard is downloaded when it is opened, or before that by `prefetch`.
    """

    def __init__(self, origin: Origin, *, folder: Path, max_bytes: int, retries: int) -> None:
        """Cache the shards of `origin` in `folder`, with at most `max_bytes` bytes in all.

        A failed download is tried again up to `retries` times. Raises UnreachableError if the folder cannot be made.
        """
        super().__init__(origin, retries=retries)
        with _errors_of(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._hints: dict[str, ShardInfo] = {}
        self._hints_lock = threading.Lock()
        self._num_prefetchers = 0

    def path_of(self, info: ShardInfo) -> Path:
        """Return the path of a shard in the cache."""
        # Hashed once more: whatever the index says there, the hash is not a path.
        key = hashlib.sha256(info.sha256.encode()).hexdigest()[:32]
        return self._folder / f"{key}-{info.name}"

    @override
    def open_payload(self, info: ShardInfo) -> Payload:
        """Open a shard, after downloading it if the cache does not contain it.

        Raises DataError as `Storage.open_payload` does, or if the cache has no room or cannot be used.
        """
        return self._open(info, patient=True)

    @override
    def prefetch(self, infos: Sequence[ShardInfo]) -> None:
        """Download these shards in background threads.

        The threads do not delay the end of the process. A download that is in progress at the end leaves a part file.
        """
        with self._hints_lock:
            self._hints.update((info.name, info) for info in infos)
            while self._num_prefetchers < min(NUM_PREFETCHERS, len(self._hints)):
                self._num_prefetchers += 1
                threading.Thread(target=self._work, name="txl-cache", daemon=True).start()

    def _work(self) -> None:
        """Download the shards that `prefetch` has listed, until the list is empty."""
        while True:
            with self._hints_lock:
                if not self._hints:
                    self._num_prefetchers -= 1
                    return
                info = self._hints.pop(next(iter(self._hints)))
            try:
                self._open(info, patient=False)
            except Exception as error:  # noqa: BLE001  only a hint: opening the shard tries again and raises
                logger.debug("no prefetch of %s: %s", self.name_of(info.name), error)

    def _open(self, info: ShardInfo, *, patient: bool) -> MappedPayload:
        """Open a shard, after downloading it if the cache does not contain it.

        Without `patient`, the method raises an error instead of waiting for another process or trying again.
        """
        path = self.path_of(info)
        name = self.name_of(info.name)
        payload = self._open_kept(path, info)
        if payload is not None:
            return payload
        with self._download_lock(path, patient=patient):
            # Another process may have downloaded it before this one got the lock.
            payload = self._open_kept(path, info)
            if payload is not None:
                return payload
            if path.exists():
                logger.warning("%s was truncated or replaced. It is downloaded again from %s", path, name)
            if patient:
                retries = self._retries
            else:
                retries = 0
            return retrying(lambda: self._download(path, info, patient=patient), what=name, retries=retries)

    def _open_kept(self, path: Path, info: ShardInfo) -> MappedPayload | None:
        """Return the mapped shard, or None if the cache does not contain the shard with its right size."""
        with _errors_of(self._folder), suppress(FileNotFoundError), path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH)
            # False if the shard was removed before this process got the lock.
            is_kept = os.path.samestat(path.stat(), os.fstat(stream.fileno()))
            if is_kept and path.stat().st_size == info.bytes:
                with suppress(PermissionError):  # another user's file: it is only removed earlier
                    os.utime(path)
                return self._mapped(stream, path, info)
        return None

    def _mapped(self, stream: IO[bytes], path: Path, info: ShardInfo) -> MappedPayload:
        remedy = (
            f"The shard was read from the cache. Remove {path}, and the shard is downloaded again. If the new copy is "
            f"damaged too, restore {self.name_of(info.name)} from a copy, or run `txl prepare` again."
        )
        return MappedPayload(stream, remedy=remedy)

    def _download(self, path: Path, info: ShardInfo, *, patient: bool) -> MappedPayload:
        """Download a shard, without a second try, and map it into memory. The caller holds the shard's download
        lock."""
        part, stream = self._reserve(path, info, patient=patient)
        try:
            self._origin.download(info.name, part)
            num_bytes = part.stat().st_size
            if num_bytes != info.bytes:
                raise OSError(f"{num_bytes} instead of {info.bytes} bytes were received")
            if sha256_of_file(part) != info.sha256:
                raise DamageError("the file is damaged: its sha256 differs from the sha256 in the index")
            os.fsync(stream.fileno())
            with self._room_lock():
                part.replace(path)
            flush_folder(self._folder)
            return self._mapped(stream, path, info)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _cache_error(self._folder, error) from error
            raise
        finally:
            part.unlink(missing_ok=True)
            stream.close()

    @contextmanager
    def _download_lock(self, path: Path, *, patient: bool) -> Iterator[None]:
        lock = FileLock(path.with_name(f"{path.name}.lock"))
        with _errors_of(self._folder):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if not patient:
                    raise
                logger.info("waiting for another process, which is downloading %s", path.name)
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _room_lock(self) -> FileLock:
        return FileLock(self._folder / "cache.lock")

    def _reserve(self, path: Path, info: ShardInfo, *, patient: bool) -> tuple[Path, IO[bytes]]:
        """Make room in the cache for a shard, and create an empty part file whose name says how many bytes it will
        need.

        Returns (path of the part file, the open part file, with a lock that marks it as in use). Raises
        UnreachableError if the cache has no room.
        """
        # Each try has a name of its own: a download that was given up may still open and write its file.
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.{info.bytes}.part")
        if patient and info.bytes <= self._max_bytes:
            polls = _MAX_POLLS
        else:
            polls = 0
        while True:
            with _errors_of(self._folder), self._room_lock():
                for old in self._folder.glob(f"{glob.escape(path.name)}.*.part"):
                    old.unlink(missing_ok=True)  # a killed process left it: this one holds the lock on the shard
                has_room, is_downloading = self._make_room(info.bytes)
                if has_room:
                    stream = open_new(part)
                    fcntl.flock(stream, fcntl.LOCK_SH)
                    return part, stream
            if polls == 0:
                raise UnreachableError(
                    f"the cache {self._folder} of {self._max_bytes / 2**30:.3g} GiB has no room for {info.bytes} "
                    f"bytes of {self.name_of(info.name)}. The shard is larger than the cache, or every shard in the "
                    f"cache is in use. Raise data.cache_gib."
                )
            # A shard that is downloaded now may be unused soon. One in use may be so only for the moment of a prefetch.
            polls -= not is_downloading
            time.sleep(_POLL_S)

    def _make_room(self, num_bytes: int) -> tuple[bool, bool]:
        """Remove unused shards until `num_bytes` more bytes fit. If they cannot fit, remove nothing.

        Returns (whether the bytes fit now, whether another download is in progress).
        """
        kept = sorted(self._each_kept(), key=lambda file: file.opened_ns)
        excess = sum(file.bytes for file in kept) + num_bytes - self._max_bytes
        unused = []
        is_downloading = False
        with ExitStack() as locks:
            for file in kept:
                if excess <= 0:
                    break
                if _is_unused(file.path, locks):
                    unused.append(file.path)
                    excess -= file.bytes
                else:
                    is_downloading |= file.path.suffix == ".part"
            if excess <= 0:
                for path in unused:
                    path.unlink(missing_ok=True)
        return excess <= 0, is_downloading

    def _each_kept(self) -> Iterator[_KeptFile]:
        """Yield the shards and part files in the cache folder."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                match = _CACHE_FILE.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # a part whose download failed
                        stat = entry.stat(follow_symlinks=False)
                        num_bytes = int(match["bytes"] or stat.st_size)
                        yield _KeptFile(Path(entry.path), num_bytes, stat.st_mtime_ns)


class _KeptFile(NamedTuple):
    """Shard or part file in the cache folder."""

    path: Path
    bytes: int
    """Size in bytes. For a part file this is the size of the complete shard."""
    opened_ns: int
    """Time at which the file was last opened, in nanoseconds since 1970."""


def _is_unused(path: Path, locks: ExitStack) -> bool:
    """Return whether no process uses a file. If so, no process can begin to use the file until `locks` are released."""
    with suppress(FileNotFoundError):
        stream = locks.enter_context(path.open("rb"))
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    """Replace an OSError of the block by an UnreachableError that names the cache folder."""
    try:
        yield
    except Timeout:
        raise
    except OSError as error:
        raise _cache_error(folder, error) from error


def _cache_error(folder: Path, error: OSError) -> UnreachableError:
    return UnreachableError(
        f"cannot use the cache {folder}: {error.strerror or error}. Set data.cache_dir to a folder on a local disk of "
        "this node, where this user can write and lock files."
    )
