"""One job per run directory: a lock file with a heartbeat, and safe takeover from a job that is dead.

    RUN/RUN.lock            JSON: the holder's process, its nonce (a random word), since when
    RUN/RUN.lock.NONCE      made by who takes over from the holder with that nonce; renamed to RUN.lock at once

On the same machine a holder lives or not, which its pid and start time say at once. Elsewhere its heartbeat says it:
a file time that moves, whatever the clocks show, so a holder there must be silent for `STALE_AFTER_S` first.

Why two takers cannot both win: whoever takes over from nonce N must make RUN.lock.N, and the file system makes it for
one only (O_EXCL). The winner renames that file over RUN.lock, after which RUN.lock never names N again; so a slow
taker that makes RUN.lock.N anew sees that RUN.lock does not lead to its file, removes it and begins again. Releasing
goes the same way: the holder makes RUN.lock.N itself, and only then removes RUN.lock. What no lock of this kind can
exclude is a job that stands still for STALE_AFTER_S and then wakes: it learns of its loss by its next heartbeat, so
`beat` and then `is_lost` belong right before anything that counts.
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
from txl_dist.errors import ConfigError
from txl_dist.io.files import open_regular, parse_object, why_unwritable

BEAT_EVERY_S = 5.0
STALE_AFTER_S = 60.0
"""A holder on another machine counts as dead after so many seconds without a heartbeat."""
SEEN_WITHIN_S = 30.0
"""A network file system may show a new file to other nodes so late."""
_MAX_BYTES, _MAX_NONCE = 1 << 16, 64


class Holder(NamedTuple):
    """What a lock file says, and when it was last touched."""

    process: ProcessId
    nonce: str
    started: str
    mtime_ns: int


class RunLock:
    """Holds a run directory for this job. Rank 0 acquires it; a thread of its own keeps it alive until `release`."""

    def __init__(self, path: Path, *, nonce: str, content: bytes) -> None:
        self.nonce = nonce
        self._path, self._content = path, content
        self._is_lost = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="run lock", daemon=True)

    @staticmethod
    def acquire(run_dir: Path, *, stale_after_s: float = STALE_AFTER_S) -> RunLock:
        """Take the directory, which is made if there is none. Raises ConfigError if another job has it."""
        nonce, head = secrets.token_hex(8), run_dir / LOCK
        values = {"process": process_id(), "nonce": nonce, "started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        content = json.dumps(values).encode()
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            while True:
                holder, successor = _end_of_chain(head)
                if holder is not None and _lives(holder, head, stale_after_s=stale_after_s):
                    raise _held(run_dir, holder)
                if _create(successor, content):
                    if _holds(head, nonce):
                        break
                    successor.unlink(missing_ok=True)  # another job took over, and this file leads nowhere
            if successor != head:
                successor.replace(head)
        except OSError as error:
            raise ConfigError(
                f"cannot lock the run directory {run_dir}: {why_unwritable(head, error)}. "
                "Mend that, or choose another --run.dir."
            ) from error
        lock = RunLock(head, nonce=nonce, content=content)
        lock._thread.start()
        return lock

    def beat(self) -> None:
        """Show that this job lives, and see whether the lock is still ours. Needs no disk space.

        What a failing file system answers is no answer: the lock then counts as ours.
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
        """That is locked."""
        return self._path.parent

    @property
    def is_lost(self) -> bool:
        """Another job has taken the directory over: this one must stop and write nothing more."""
        return self._is_lost

    def release(self) -> None:
        """Give the directory free. What a failing file system leaves behind, the next start takes over."""
        self._done.set()
        self._thread.join()
        with suppress(OSError):
            if _holds(self._path, self.nonce) and _create(_successor(self._path, self.nonce), b""):
                self._path.unlink()
                _successor(self._path, self.nonce).unlink()

    def _keep(self) -> None:
        while not self._done.wait(BEAT_EVERY_S):
            self.beat()


def prove_shared(run_dir: Path, *, nonce: str, ranks: RankInfo, seen_within_s: float = SEEN_WITHIN_S) -> None:
    """All ranks: each node shows that it can write the folder that rank 0 sees, and sees what rank 0 writes there.

    `nonce`: rank 0's; what others pass is ignored. Raises ConfigError on all ranks, naming the host that does not.
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
        wanted = nodes if ranks.is_rank0 else {0: nodes[0]}
        while missing := [rank for rank in wanted if not os.path.exists(proof(rank))]:
            if time.monotonic() > end_s:
                host = nodes[missing[0]] if ranks.is_rank0 else nodes[ranks.rank]
                raise ConfigError(
                    f"{host} has another folder as {run_dir} than {nodes[0]}, where rank 0 runs: neither sees what "
                    "the other writes. All nodes need the same shared folder as --run.dir."
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
    """(who holds the lock now, if anyone; the file that its successor has to make)."""
    holder, successor = None, head
    passed: set[str] = set()
    while (found := _read(successor)) is not None:
        # A chain that leads back to itself is nobody's: who takes over makes a file behind it, as behind any other.
        holder = _nobody(successor.stat()) if found.nonce in passed else found
        passed.add(holder.nonce)
        successor = _successor(head, holder.nonce)
    return holder, successor


def _successor(head: Path, nonce: str) -> Path:
    return head.with_name(f"{LOCK}.{nonce}")


def _holds(head: Path, nonce: str) -> bool:
    holder, _ = _end_of_chain(head)
    return holder is not None and holder.nonce == nonce


def _read(path: Path) -> Holder | None:
    """A file without content belongs to a job that has just made it, or died there: only its time can tell."""
    try:
        with open_regular(path) as stream:
            facts, content = os.fstat(stream.fileno()), stream.read(_MAX_BYTES)
    except FileNotFoundError:
        return _nobody(path.lstat()) if path.is_symlink() else None  # a link to nothing stands in the way all the same
    try:
        values = parse_object(content)
        nonce, started = str(values["nonce"]), f"{values['started']:.40}"
        if nonce.isascii() and nonce.isalnum() and len(nonce) <= _MAX_NONCE:
            return Holder(process_of(values["process"]), nonce, started, facts.st_mtime_ns)
    except (ValueError, KeyError, TypeError):
        pass
    return _nobody(facts)


def _nobody(facts: os.stat_result) -> Holder:
    """Who holds a file of which only inode and time can be known."""
    nonce = f"unknown{facts.st_ino}x{abs(facts.st_mtime_ns)}"
    return Holder(ProcessId("an unknown host", "", 0, 0), nonce, "an unknown time", facts.st_mtime_ns)


def _create(path: Path, content: bytes) -> bool:
    """Make a file that does not exist; False if it does."""
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
    """Whether the lock is in living hands; waits for a heartbeat where that is the only way to know."""
    lives = holder.process.lives()
    if lives is not None:
        return lives
    logger.info(
        "%s is locked by a job on %s (pid %d); waiting up to %g s for a sign of life",
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
            return False  # it changed hands; the caller looks again
        if now.mtime_ns != holder.mtime_ns:
            return True
    return False


def _held(run_dir: Path, holder: Holder) -> ConfigError:
    process = holder.process
    return ConfigError(
        f"{run_dir} is in use by another job: pid {process.pid} on {process.host}, since {holder.started}. "
        f"Stop that one (touch {run_dir / 'STOP'}) or choose another --run.dir."
    )
