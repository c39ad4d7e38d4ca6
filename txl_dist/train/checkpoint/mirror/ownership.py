"""The owner of a mirror: the id of its run, and a lock with a heartbeat that lets one job write.

    RUN.json          the id of the run, made by its first job; the run directory has a copy in MIRROR.json
    LOCK.json         the job that writes: run id, process, nonce (a random word), start time, number of heartbeats
    LOCK.NONCE.json   made by the job that takes over from the job with that nonce, then removed

On the same machine, pid and start time of the owner show whether it is alive. On another machine its heartbeat shows
this: the owner writes LOCK.json again every few seconds. Clocks are not compared. A job takes over from a job on
another machine after `STALE_AFTER_S` without a heartbeat. Two jobs cannot both take over, because only one of them can
create LOCK.NONCE.json.

Limitations: no lock of this kind excludes a job that stops for STALE_AFTER_S and then continues. Such a job notices the
loss at its next heartbeat, and at the latest before it uploads a manifest.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from txl_dist.console.logging import logger
from txl_dist.distributed.processes import ProcessId, process_id, process_of
from txl_dist.errors import ConfigError
from txl_dist.io.files import atomic_replace, parse_object, read_bytes
from txl_dist.train.checkpoint.mirror.bucket import Bucket, MirrorError

RUN, LOCK = "RUN.json", "LOCK.json"
LOCAL_ID = "MIRROR.json"
"""Name of the file in the run directory that has the run's id."""
BEAT_EVERY_S = 10.0
"""Seconds between two heartbeats of the job that writes to the mirror."""
STALE_AFTER_S = 60.0
"""Seconds without a heartbeat after which a job on another machine counts as dead."""
_POLL_S = 2.0


class MirrorOwner(NamedTuple):
    """Job that writes to a mirror, as LOCK.json describes it."""

    run_id: str
    process: ProcessId
    nonce: str
    """Random word that identifies the job."""
    started: str
    """Date and time of the job's start, for messages."""
    beats: int
    """Number of heartbeats that the job has sent."""


def read_local_id(run_dir: Path) -> str:
    """Return the run's id in a run directory, or an empty text if there is none."""
    try:
        return str(parse_object(read_bytes(run_dir / LOCAL_ID))["run_id"])
    except (OSError, ValueError, KeyError):
        return ""


def write_local_id(run_dir: Path, run_id: str, *, url: str) -> None:
    """Write the run's id into the run directory. Raises OSError."""
    atomic_replace(run_dir / LOCAL_ID, json.dumps({"run_id": run_id, "mirror": url}).encode() + b"\n")


def read_mirror_id(bucket: Bucket) -> str:
    """Return the id of the run that a mirror belongs to, or an empty text for a new mirror. Raises MirrorError."""
    content = bucket.read(RUN)
    if content is None:
        return ""
    try:
        return str(parse_object(content)["run_id"])
    except (ValueError, KeyError):
        return "unknown"


def claim_id(bucket: Bucket, run_id: str) -> str:
    """Make a new mirror the mirror of a run, by `run_id` or a new id. Returns the id.

    Raises MirrorError. It also raises ConfigError if another run claims the mirror at the same moment.
    """
    run_id = run_id or secrets.token_hex(8)
    facts = {"run_id": run_id, "host": process_id().host, "began": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    if not bucket.create(RUN, json.dumps(facts).encode() + b"\n"):
        raise ConfigError(f"{bucket.url}: another run began to use this mirror. Give another --checkpoint.mirror.")
    return run_id


class MirrorLock:
    """Lock of a mirror for this job. Rank 0 acquires it. A thread sends heartbeats until `release`."""

    def __init__(self, bucket: Bucket, owner: MirrorOwner) -> None:
        self._bucket = bucket
        self._owner = owner
        self._is_lost = False
        self._done = threading.Event()
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="mirror lock", daemon=True)

    @staticmethod
    def acquire(
        bucket: Bucket,
        run_id: str,
        *,
        nonce: str,
        stale_after_s: float = STALE_AFTER_S,
        wait: Callable[[float], object] = time.sleep,
    ) -> MirrorLock:
        """Lock a mirror. Raises ConfigError if another job writes to it, and MirrorError.

        The job with this `nonce` enters its own lock again.
        """
        own = MirrorOwner(run_id, process_id(), nonce, time.strftime("%Y-%m-%d %H:%M:%S %z"), 0)
        seen_claims: set[str] = set()
        while True:
            owner = _read_owner(bucket)
            if owner is None:
                if bucket.create(LOCK, _content(own)):
                    break
            elif owner.nonce == nonce:
                bucket.write(LOCK, _content(own))
                break
            elif _lives(bucket, owner, stale_after_s=stale_after_s, wait=wait):
                raise _held(bucket, owner)
            elif _take_over(bucket, owner, own, seen_claims=seen_claims):
                break
        lock = MirrorLock(bucket, own)
        lock._thread.start()
        return lock

    @property
    def is_lost(self) -> bool:
        """Whether another job has taken over the mirror. This job must then write nothing more."""
        return self._is_lost

    def beat(self) -> None:
        """Check that this job still has the lock, and write a heartbeat. Raises MirrorError."""
        with self._busy:
            owner = _read_owner(self._bucket)
            if owner is not None and owner.nonce != self._owner.nonce:
                self._is_lost = True
            if not self._is_lost and not self._done.is_set():
                self._owner = self._owner._replace(beats=self._owner.beats + 1)
                self._bucket.write(LOCK, _content(self._owner))

    def release(self) -> None:
        """End the heartbeats, and remove the lock if this job still has it. An error of the network is ignored."""
        self._done.set()
        try:
            with self._busy:
                owner = _read_owner(self._bucket)
                if owner is not None and owner.nonce == self._owner.nonce:
                    self._bucket.remove([LOCK])
        except MirrorError as error:
            logger.warning("mirror: the lock stays, and the next job waits for it: %s", error)

    def _keep(self) -> None:
        """Send heartbeats, in the thread, until the lock is released. An outage is left to the uploads to report."""
        while not self._done.wait(BEAT_EVERY_S):
            try:
                self.beat()
            except MirrorError:
                continue
            if self._is_lost:
                return


def _read_owner(bucket: Bucket, name: str = LOCK) -> MirrorOwner | None:
    """Return the job that a lock object names, or None if there is no such object. Wrong content names an unknown
    job."""
    content = bucket.read(name)
    if content is None:
        return None
    try:
        values = parse_object(content)
        process = process_of(values["process"])
        return MirrorOwner(
            values["run_id"], process, str(values["nonce"]), f"{values['started']:.40}", int(values["beats"])
        )
    except (ValueError, KeyError, TypeError):
        return MirrorOwner("unknown", ProcessId("an unknown host", "", 0, 0), "unknown", "an unknown time", 0)


def _content(owner: MirrorOwner) -> bytes:
    return json.dumps(owner._asdict()).encode() + b"\n"


def _lives(bucket: Bucket, owner: MirrorOwner, *, stale_after_s: float, wait: Callable[[float], object]) -> bool:
    """Return whether the owner of a lock is alive. For an owner on another machine this waits for a heartbeat."""
    lives = owner.process.lives()
    if lives is not None:
        return lives
    logger.info(
        "mirror: %s is locked by a job on %s. This job waits up to %g s for a heartbeat of that job",
        bucket.url,
        owner.process.host,
        stale_after_s,
    )
    waited_s = 0.0
    while waited_s < stale_after_s:
        wait(_POLL_S)
        waited_s += _POLL_S
        now = _read_owner(bucket)
        if now is None or now.nonce != owner.nonce:
            return False  # another job has the lock, or none has; the caller checks again
        if now.beats != owner.beats:
            return True
    return False


def _take_over(bucket: Bucket, dead: MirrorOwner, own: MirrorOwner, *, seen_claims: set[str]) -> bool:
    """Take the lock from a dead job. Returns False if another job was faster, or died while it took over.

    `seen_claims` has the nonces of jobs whose claims this job has seen before. A claim that is seen twice, with a wait
    for the heartbeat of `dead` between, is left by a dead job.
    """
    claim = f"LOCK.{dead.nonce}.json"
    if not bucket.create(claim, _content(own)):
        rival = _read_owner(bucket, claim)
        if rival is not None and (rival.process.lives() is False or rival.nonce in seen_claims):
            bucket.remove([claim])
        elif rival is not None:
            seen_claims.add(rival.nonce)
            time.sleep(_POLL_S)
        return False
    owner = _read_owner(bucket)
    is_free = owner is None or owner.nonce == dead.nonce
    if is_free:
        bucket.write(LOCK, _content(own))
    bucket.remove([claim])
    return is_free


def _held(bucket: Bucket, owner: MirrorOwner) -> ConfigError:
    """Return the error for a mirror to which another job writes."""
    process = owner.process
    return ConfigError(
        f"{bucket.url} is in use by another job: run {owner.run_id}, pid {process.pid} on {process.host}, since "
        f"{owner.started}. Stop that job, or give another --checkpoint.mirror."
    )
