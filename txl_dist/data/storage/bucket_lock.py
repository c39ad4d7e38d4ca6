"""Lock of a folder in an object store, with a heartbeat, that lets one job write.

    LOCK.json         job that has the lock: label, process, nonce (a random word), start time, number of heartbeats
    LOCK.NONCE.json   job that takes over from the dead job with that nonce

A job gets the lock by creating one of these objects, and only one job can create an object. The jobs form a chain,
which begins with LOCK.json, and the last of them has the lock. After a takeover it writes LOCK.json itself and removes
the other objects.

On the same machine, pid and start time of a job show whether it is alive. On another machine its heartbeat shows this:
it writes LOCK.json again every few seconds. Clocks are not compared. A job on another machine counts as dead after
`STALE_AFTER_S` without a heartbeat.

Limitations: no lock of this kind excludes a job that stops for STALE_AFTER_S and then continues. Such a job notices the
loss at its next heartbeat. Two starts at the same moment can both get the lock where `Bucket.create` is not exact.
An object is removed by name. If a removal after an outage and a new entry of the same job happen at the same moment,
the removal takes the lock of the new entry. The next heartbeat makes it again, unless another job was faster.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from txl_dist.console.logging import logger
from txl_dist.data.storage.bucket import Bucket, read_if_present
from txl_dist.distributed.processes import ProcessId, process_id, process_of
from txl_dist.errors import ConfigError, DataError
from txl_dist.io.files import parse_object, sha256_of_bytes

LOCK = "LOCK.json"
BEAT_EVERY_S = 10.0
"""Seconds between two heartbeats of the job that has the lock."""
STALE_AFTER_S = 60.0
"""Seconds without a heartbeat after which a job on another machine counts as dead."""
_RELEASE_S = 10.0
"""Seconds for which `release` waits at most."""
_POLL_S = 2.0
"""Seconds between two looks at a lock, and before the second try to remove the lock."""


class LockOwner(NamedTuple):
    """Job that has a lock or had it, as its object describes it."""

    label: str
    """Name of the job for messages, such as `run 1a2b`."""
    process: ProcessId
    nonce: str
    """Random word that identifies the job."""
    started: str
    """Date and time of the job's start, for messages."""
    beats: int
    """Number of heartbeats that the job has sent."""


class BucketLock:
    """Lock of a bucket for this job. A thread sends heartbeats until `release`, and then removes the lock."""

    def __init__(self, bucket: Bucket, owner: LockOwner) -> None:
        self._bucket = bucket
        self._owner = owner
        self._is_lost = False
        self._is_removed = False
        self._done = threading.Event()
        self._tried = threading.Event()
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="bucket lock", daemon=True)

    @staticmethod
    def acquire(
        bucket: Bucket,
        label: str,
        *,
        nonce: str,
        remedy: str,
        stale_after_s: float = STALE_AFTER_S,
        wait: Callable[[float], object] = time.sleep,
    ) -> BucketLock:
        """Lock a bucket. Raises ConfigError with the remedy if another job has the lock, and UnreachableError.

        The job with this `nonce` enters its own lock again.
        """
        own = LockOwner(label, process_id(), nonce, time.strftime("%Y-%m-%d %H:%M:%S %z"), 0)
        while True:
            chain = _chain(bucket)
            if not chain:
                if not bucket.create(LOCK, _content(own)):
                    wait(_POLL_S)
                continue
            last = chain[-1]
            if last.nonce == nonce:
                break
            lives = _lives(bucket, last, stale_after_s=stale_after_s, wait=wait)
            if lives:
                raise ConfigError(
                    f"{bucket.location} is in use by another job: {last.label}, pid {last.process.pid} on "
                    f"{last.process.host}, since {last.started}. {remedy}"
                )
            if lives is False:
                bucket.create(_successor(last), _content(own))
        if chain != [own]:
            bucket.write(LOCK, _content(own))
            bucket.remove(_successor(dead) for dead in chain[:-1])
        lock = BucketLock(bucket, own)
        lock._thread.start()
        return lock

    def beat(self) -> bool:
        """Send a heartbeat. Returns whether this job still has the lock. If it has not, it must write nothing more.

        Raises UnreachableError.
        """
        with self._busy:
            if self._is_lost or self._done.is_set():
                return not self._is_lost
            self._owner = self._owner._replace(beats=self._owner.beats + 1)
            chain = _chain(self._bucket)
            if not chain:  # removed by hand
                self._is_lost = not self._bucket.create(LOCK, _content(self._owner))
            elif chain[-1].nonce != self._owner.nonce:
                self._is_lost = True
            else:
                self._bucket.write(LOCK, _content(self._owner))
            return not self._is_lost

    def check(self) -> None:
        """Send a heartbeat. Raises ConfigError if another job has taken over the lock, and UnreachableError."""
        if not self.beat():
            raise ConfigError(
                f"another job has taken over {self._bucket.location}, because this job was silent for too long. Wait "
                "for that job, then run the same command again."
            )

    def release(self) -> None:
        """End the heartbeats, and remove the lock if this job still has it.

        A store that refuses twice, `_POLL_S` apart, delays this by 2 s and the time of its answers. A store that does
        not answer delays this by `_RELEASE_S`. The thread then tries again until the process ends, so that a later job
        of the same process is not refused.
        """
        self._done.set()
        self._tried.wait(_RELEASE_S)
        if not self._is_removed:
            logger.warning(
                "%s/%s is not removed, because the store does not answer or refuses. This process tries again until "
                "it ends. If the lock stays, a start on another machine waits up to %g s for it",
                self._bucket.location,
                LOCK,
                STALE_AFTER_S,
            )

    def _keep(self) -> None:
        """Send heartbeats, in the thread, until the lock is released or lost. Then remove it. The job's own requests
        report an outage."""
        while not self._done.wait(BEAT_EVERY_S):
            with suppress(DataError):  # an outage, or credentials that cannot be read now
                if not self.beat():
                    break
        self._is_removed = self._try_to_remove()
        if not self._is_removed:  # perhaps for a moment only, and the second try reads refused credentials again
            time.sleep(_POLL_S)
            self._is_removed = self._try_to_remove()
        self._tried.set()
        while not self._is_removed:
            time.sleep(BEAT_EVERY_S)
            self._is_removed = self._try_to_remove()

    def _try_to_remove(self) -> bool:
        """Remove the lock if this job still has it. Returns False if the store cannot be reached.

        The check and the removal are two requests (see Limitations).
        """
        try:
            with self._busy:
                chain = _chain(self._bucket)
                # After the loss of a rank the same job may have entered its lock again, at a later `started`.
                if chain and chain[-1]._replace(beats=self._owner.beats) == self._owner:
                    self._bucket.remove([LOCK])
        except DataError:
            return False
        return True


def is_lock(name: str) -> bool:
    """Return whether an object belongs to the lock of its bucket."""
    return name.startswith("LOCK.") and name.endswith(".json")


def _chain(bucket: Bucket) -> list[LockOwner]:
    """Return the job of LOCK.json and the jobs that took over from it, in this order. The last of them has the lock."""
    chain: list[LockOwner] = []
    name = LOCK
    while True:
        owner = _read_owner(bucket, name)
        if owner is None:
            return chain
        chain.append(owner)
        name = _successor(owner)


def _successor(owner: LockOwner) -> str:
    """Return the name of the object of the job that takes over from this one."""
    return f"LOCK.{owner.nonce}.json"


def _read_owner(bucket: Bucket, name: str) -> LockOwner | None:
    """Return the job that an object names, or None if there is no such object. Wrong content names an unknown job."""
    content = read_if_present(bucket, name)
    if content is None:
        return None
    try:
        values = parse_object(content)
        process = process_of(values["process"])
        started = f"{values['started']:.40}"
        owner = LockOwner(str(values["label"]), process, str(values["nonce"]), started, int(values["beats"]))
        if not owner.nonce.isalnum():  # it is a part of a name
            raise ValueError(owner.nonce)
        return owner
    except (ValueError, KeyError, TypeError):
        process = ProcessId("an unknown host", "", 0, 0)
        nonce = sha256_of_bytes(name.encode() + content)[:16]
        return LockOwner("an unknown job", process, nonce, "an unknown time", 0)


def _content(owner: LockOwner) -> bytes:
    return json.dumps(owner._asdict()).encode() + b"\n"


def _lives(bucket: Bucket, owner: LockOwner, *, stale_after_s: float, wait: Callable[[float], object]) -> bool | None:
    """Return whether the job that has the lock is alive, or None if it has the lock no more.

    For a job on another machine this waits for a heartbeat.
    """
    lives = owner.process.lives()
    if lives is not None:
        return lives
    logger.info(
        "%s is locked by a job on %s. This job waits up to %g s for a heartbeat of that job",
        bucket.location,
        owner.process.host,
        stale_after_s,
    )
    waited_s = 0.0
    while waited_s < stale_after_s:
        wait(_POLL_S)
        waited_s += _POLL_S
        chain = _chain(bucket)
        if not chain or chain[-1].nonce != owner.nonce:
            return None
        if chain[-1].beats != owner.beats:
            return True
    return False
