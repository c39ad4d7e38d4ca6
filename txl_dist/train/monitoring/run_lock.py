"""The lock of a run directory: one job per run, with a heartbeat and a safe takeover from a dead job.

    RUN/RUN.lock            JSON: the holder's process, its nonce (a random word) and its start time
    RUN/RUN.lock.NONCE      made by the job that takes over from the holder with that nonce, then renamed to RUN.lock

The holder is the job that has the lock. On the same machine the holder's pid and start time show whether it is alive.
On another machine its heartbeat shows this: the holder updates the time of the file every few seconds. Clocks are not
compared. A job takes over from a holder on another machine only after `STALE_AFTER_S` without a heartbeat.

Two jobs cannot both take over. To take over from nonce N, a job must create RUN.lock.N, and the file system lets only
one job create this file (O_EXCL). The winner renames that file to RUN.lock, which never names N again. A slower job may
create RUN.lock.N once more after this rename. The slower job then sees that RUN.lock names another nonce than N,
removes its file and starts again. A release works the same way: the holder creates RUN.lock.N itself, and then removes
RUN.lock.

With recovery the lock names the agent of the first rank 0, without which the job ends. A replacement of rank 0 enters
the lock again by its nonce, on any node. So no other job can take the lock while lost ranks are replaced.

Limitations: no lock of this kind excludes a job that stops for STALE_AFTER_S and then continues. Such a job notices the
loss at its next heartbeat. So call `beat` and then `is_lost` right before anything irreversible.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from txl_dist.artifacts import LOCK
from txl_dist.console.logging import logger
from txl_dist.distributed.collectives import RankInfo, broadcast_object, gather_objects, run_on_all_ranks
from txl_dist.distributed.processes import ProcessId, process_id, process_of
from txl_dist.errors import ConfigError, raised_everywhere
from txl_dist.io.files import open_regular, parse_object, why_unwritable

BEAT_EVERY_S = 5.0
"""Seconds between two heartbeats of the job that holds the lock. A heartbeat updates the time of the lock file."""
STALE_AFTER_S = 60.0
"""Seconds without a heartbeat after which a job on another machine, which holds the lock, counts as dead."""
SEEN_WITHIN_S = 30.0
"""Seconds within which a network file system shows a new file to other nodes."""
_LOCAL_KINDS = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
"""Types of file systems that one machine alone writes to."""
_MAX_BYTES, _MAX_NONCE = 1 << 16, 64
"""Maximum number of bytes that are read from a lock file, and of characters in a nonce."""


class Holder(NamedTuple):
    """Process that has locked a run directory, as a lock file describes it, with the time of its last heartbeat."""

    process: ProcessId
    nonce: str
    """Random word that identifies the job."""
    started: str
    """Date and time of the job's start, for messages."""
    mtime_ns: int
    """Time of the last heartbeat in nanoseconds: the modification time of the lock file."""


class RunLock:
    """Lock of a run directory for this job. Rank 0 acquires it. A thread sends heartbeats until `release`."""

    def __init__(self, path: Path, *, nonce: str, content: bytes) -> None:
        self.nonce = nonce
        self._path = path
        self._content = content
        self._is_lost = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="run lock", daemon=True)

    @staticmethod
    def acquire(
        run_dir: Path, *, stale_after_s: float = STALE_AFTER_S, nonce: str = "", holder_pid: int = 0
    ) -> RunLock:
        """Lock the directory, which is created if missing. Raises ConfigError if another job has locked it.

        With `nonce` the job of this nonce enters its own lock again. Without it a new nonce is drawn. `holder_pid` is
        the process that lives as long as the job. 0 means this process.
        """
        nonce = nonce or secrets.token_hex(8)
        head = run_dir / LOCK
        holding = process_id(holder_pid)
        values = {"process": holding, "nonce": nonce, "started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        content = json.dumps(values).encode()
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            while True:
                holder, successor = _end_of_chain(head)
                if holder is not None and holder.nonce == nonce:
                    successor = _path_of(head, nonce)
                    break
                if holder is not None and _lives(holder, head, stale_after_s=stale_after_s):
                    raise _held(run_dir, holder)
                if _create(successor, content):
                    if _holds(head, nonce):
                        break
                    successor.unlink(missing_ok=True)  # another job took over, so this file is not in use
            if successor != head:
                successor.replace(head)
        except OSError as error:
            raise ConfigError(
                f"cannot lock the run directory {run_dir}: {why_unwritable(head, error)}. "
                "Correct the cause, or choose another --run.dir."
            ) from error
        lock = RunLock(head, nonce=nonce, content=content)
        lock._thread.start()
        return lock

    def beat(self) -> None:
        """Send a heartbeat, and check that this job still has the lock.

        This needs no disk space. If the file system fails, the job is assumed to have the lock.
        """
        with suppress(OSError):
            holder, _ = _end_of_chain(self._path)
            if holder is None:  # somebody removed the file: take it again, unless another job is faster
                _create(self._path, self._content)
            elif holder.nonce == self.nonce:
                os.utime(self._path)
            else:
                self._is_lost = True

    @property
    def run_dir(self) -> Path:
        """Folder of the run that is locked."""
        return self._path.parent

    @property
    def is_lost(self) -> bool:
        """Whether another job has taken over the directory. This job must then stop and write nothing more."""
        return self._is_lost

    def release(self) -> None:
        """Release the directory. If the file system fails, the next start takes over the remaining files."""
        self._done.set()
        self._thread.join()
        with suppress(OSError):
            if _holds(self._path, self.nonce) and _create(_successor(self._path, self.nonce), b""):
                self._path.unlink()
                _successor(self._path, self.nonce).unlink()

    def _keep(self) -> None:
        """Send heartbeats, in the thread, until the lock is released."""
        while not self._done.wait(BEAT_EVERY_S):
            self.beat()


def is_shared(run_dir: Path, *, nonce: str, ranks: RankInfo, seen_within_s: float = SEEN_WITHIN_S) -> bool:
    """Return whether all nodes share the run directory. Returns False if each node has one of its own, which is made.

    All ranks call it together. A file on a file system of this machine is seen at once, and on any other file system
    within `seen_within_s` seconds. Raises ConfigError on all ranks if some nodes share the directory and others do not,
    or if a node cannot write there.
    """
    proof = f"{LOCK}.{broadcast_object(nonce)}.rank"
    speaks_for_node = ranks.is_rank0 or ranks.local_rank == 0
    own = run_dir / f"{proof}{ranks.rank}"

    def write() -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            own.touch()
        except OSError as error:
            raise ConfigError(
                f"{process_id().host} cannot write to the run directory {run_dir}: {error.strerror}. Correct the "
                "permissions, or choose another --run.dir."
            ) from error

    try:
        run_on_all_ranks(lambda: write() if speaks_for_node else None)
        speakers = [rank for rank, speaks in enumerate(gather_objects(speaks_for_node)) if speaks]
        is_fast = all(gather_objects(not speaks_for_node or _is_on_this_machine(run_dir)))
        end_s = time.monotonic() + seen_within_s
        while True:
            seen = [rank for rank in speakers if os.path.exists(run_dir / f"{proof}{rank}")]
            is_over = broadcast_object(is_fast or time.monotonic() > end_s)
            seen_by_speaker = [found for rank, found in enumerate(gather_objects(seen)) if rank in speakers]
            if all(found == speakers for found in seen_by_speaker):
                return True
            if is_over and all(len(found) == 1 for found in seen_by_speaker):
                return False
            if is_over:
                raise raised_everywhere(
                    ConfigError(
                        f"some nodes share the run directory {run_dir}, and others do not. Give all nodes the same "
                        "shared folder as --run.dir, or each node a folder of its own."
                    )
                )
            time.sleep(0.2)
    finally:
        with suppress(OSError):
            own.unlink(missing_ok=True)


def _is_on_this_machine(folder: Path) -> bool:
    """Return whether a folder is on a file system of this machine's disks or memory, by the table of mounts."""
    import psutil

    path = Path(os.path.realpath(folder))
    kind = ""
    longest = -1
    for mount in psutil.disk_partitions(all=True):
        length = len(mount.mountpoint)
        if length > longest and path.is_relative_to(mount.mountpoint):
            kind, longest = mount.fstype, length
    return kind in _LOCAL_KINDS


def prove_shared(run_dir: Path, *, nonce: str, ranks: RankInfo, seen_within_s: float = SEEN_WITHIN_S) -> None:
    """Check that all nodes share the run directory: each node can write there and sees the files of rank 0.

    All ranks call it together. `nonce` is the random word of rank 0's lock. The argument of other ranks is ignored.
    Raises ConfigError on all ranks if a node has another folder, and the message names the
    node's host.
    """
    nonce = broadcast_object(nonce)
    speaks_for_node = ranks.is_rank0 or ranks.local_rank == 0

    def proof(rank: int) -> Path:
        return run_dir / f"{LOCK}.{nonce}.rank{rank}"

    def write() -> None:
        try:
            proof(ranks.rank).touch()
        except OSError as error:
            raise ConfigError(
                f"{process_id().host} cannot write to the run directory {run_dir}: {error.strerror}. "
                "All nodes need the same shared folder as --run.dir."
            ) from error

    def see(nodes: dict[int, str]) -> None:
        end_s = time.monotonic() + seen_within_s
        if ranks.is_rank0:
            wanted = nodes
        else:
            wanted = {0: nodes[0]}
        while missing := [rank for rank in wanted if not os.path.exists(proof(rank))]:
            if time.monotonic() > end_s:
                if ranks.is_rank0:
                    host = nodes[missing[0]]
                else:
                    host = nodes[ranks.rank]
                raise ConfigError(
                    f"{run_dir} on {host} is not the same folder as on {nodes[0]}, where rank 0 runs. Neither node "
                    "sees the files that the other node writes. All nodes need the same shared folder as --run.dir."
                )
            time.sleep(0.2)

    try:
        run_on_all_ranks(lambda: write() if speaks_for_node else None)
        hosts = gather_objects(process_id().host if speaks_for_node else "")
        nodes = {rank: host for rank, host in enumerate(hosts) if host}
        run_on_all_ranks(lambda: see(nodes) if speaks_for_node else None)
    finally:
        with suppress(OSError):
            proof(ranks.rank).unlink(missing_ok=True)


def _end_of_chain(head: Path) -> tuple[Holder | None, Path]:
    """Return (holder, path): the present holder of the lock or None, and the path of the file that a successor has to
    create."""
    holder = None
    successor = head
    passed: set[str] = set()
    while (next_holder := _read(successor)) is not None:
        # A chain that leads back to itself has no valid holder, and is taken over like any other.
        if next_holder.nonce in passed:
            holder = _nobody(successor.stat())
        else:
            holder = next_holder
        passed.add(holder.nonce)
        successor = _successor(head, holder.nonce)
    return holder, successor


def _successor(head: Path, nonce: str) -> Path:
    """Return the file that a job must create to take over from the holder with this nonce."""
    return head.with_name(f"{LOCK}.{nonce}")


def _path_of(head: Path, nonce: str) -> Path:
    """Return the file in the chain of the lock that names this nonce. The chain must have such a file."""
    path = head
    while (holder := _read(path)) is not None and holder.nonce != nonce:
        path = _successor(head, holder.nonce)
    return path


def _holds(head: Path, nonce: str) -> bool:
    """Return whether the job with this nonce holds the lock."""
    holder, _ = _end_of_chain(head)
    return holder is not None and holder.nonce == nonce


def _read(path: Path) -> Holder | None:
    """Return the holder that a lock file names, or None if there is no such file.

    If the file has no valid content, an unknown holder is returned. A job has then just created the file, or died while
    it created the file. Only the file's time shows which of the two cases applies.
    """
    try:
        with open_regular(path) as stream:
            facts = os.fstat(stream.fileno())
            content = stream.read(_MAX_BYTES)
    except FileNotFoundError:
        return _nobody(path.lstat()) if path.is_symlink() else None  # a broken link still blocks the name
    try:
        values = parse_object(content)
        nonce = str(values["nonce"])
        started = f"{values['started']:.40}"
        if nonce.isascii() and nonce.isalnum() and len(nonce) <= _MAX_NONCE:
            return Holder(process_of(values["process"]), nonce, started, facts.st_mtime_ns)
    except (ValueError, KeyError, TypeError):
        pass
    return _nobody(facts)


def _nobody(facts: os.stat_result) -> Holder:
    """Return an unknown holder for a lock file without valid content, identified by the file's inode and time."""
    nonce = f"unknown{facts.st_ino}x{abs(facts.st_mtime_ns)}"
    return Holder(ProcessId("an unknown host", "", 0, 0), nonce, "an unknown time", facts.st_mtime_ns)


def _create(path: Path, content: bytes) -> bool:
    """Create a file with this content. Returns False if the file already exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, content)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return True


def _lives(holder: Holder, head: Path, *, stale_after_s: float) -> bool:
    """Return whether the lock's holder is alive.

    For a holder on another machine this waits for a heartbeat, at most `stale_after_s` seconds.
    """
    lives = holder.process.lives()
    if lives is not None:
        return lives
    logger.info(
        "%s is locked by a job on %s (pid %d). This job waits up to %g s for a heartbeat of that job",
        head.parent,
        holder.process.host,
        holder.process.pid,
        stale_after_s,
    )
    end_s = time.monotonic() + stale_after_s
    while time.monotonic() < end_s:
        time.sleep(min(0.5, stale_after_s / 10))
        now, _ = _end_of_chain(head)
        if now is None or now.nonce != holder.nonce:
            return False  # another job has the lock now; the caller checks again
        if now.mtime_ns != holder.mtime_ns:
            return True
    return False


def _held(run_dir: Path, holder: Holder) -> ConfigError:
    """Return the error for a run directory that another job has locked."""
    process = holder.process
    return ConfigError(
        f"{run_dir} is in use by another job: pid {process.pid} on {process.host}, since {holder.started}. "
        f"Stop that job (touch {run_dir / 'STOP'}) or choose another --run.dir."
    )
