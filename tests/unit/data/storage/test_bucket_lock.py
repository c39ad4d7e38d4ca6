"""The lock of a bucket: one job at a time, also for two starts at one moment and after jobs that died at any moment."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.logs import recorded_log
from txl_dist.data.storage import bucket_lock
from txl_dist.data.storage.bucket import Bucket
from txl_dist.data.storage.bucket_lock import LOCK, BucketLock, LockOwner
from txl_dist.distributed.processes import ProcessId, process_id
from txl_dist.errors import ConfigError, UnreachableError

ELSEWHERE = ProcessId("another host", "its boot", 7, 7)
DEAD = process_id()._replace(start_ticks=1)
"""Process of this machine that has ended."""


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(f"file://{tmp_path}/bucket/run")


def acquire(bucket: Bucket, nonce: str) -> BucketLock:
    return BucketLock.acquire(bucket, "run 1", nonce=nonce, remedy="Stop it.", wait=lambda _: None)


def put_owner(bucket: Bucket, process: ProcessId, nonce: str, *, name: str = LOCK, beats: int = 0) -> None:
    owner = LockOwner("run 1", process, nonce, "today", beats)
    bucket.write(name, json.dumps(owner._asdict()).encode())


def test_the_second_job_is_refused_with_the_name_of_the_first(bucket: Bucket) -> None:
    lock = acquire(bucket, "first")
    with pytest.raises(ConfigError, match=rf"in use by another job: run 1, pid {process_id().pid} on .* Stop it\."):
        acquire(bucket, "second")
    acquire(bucket, "first").release()  # after the loss of a rank, in the same job
    lock.release()
    acquire(bucket, "second").release()
    assert bucket.sizes() == {}


def test_a_job_on_another_machine_keeps_the_lock_by_its_heartbeat(bucket: Bucket) -> None:
    put_owner(bucket, ELSEWHERE, "other", beats=1)
    waits = iter(range(2, 100))
    with pytest.raises(ConfigError, match="pid 7 on another host, since today"):
        BucketLock.acquire(
            bucket,
            "run 1",
            nonce="new",
            remedy="",
            wait=lambda _: put_owner(bucket, ELSEWHERE, "other", beats=next(waits)),
        )


def test_a_silent_job_loses_the_lock_and_notices(bucket: Bucket) -> None:
    put_owner(bucket, ELSEWHERE, "other", beats=1)
    lock = acquire(bucket, "new")
    assert lock.beat()
    put_owner(bucket, ELSEWHERE, "other", beats=2)  # it was not dead
    assert not lock.beat()
    lock.release()
    assert LOCK in bucket.sizes()  # the lock of the other job


def test_a_lock_that_was_removed_by_hand_is_made_again(bucket: Bucket) -> None:
    lock = acquire(bucket, "one")
    bucket.remove([LOCK])
    assert lock.beat()
    with pytest.raises(ConfigError, match="in use"):
        acquire(bucket, "two")
    lock.release()


def release_in_outage(
    bucket: Bucket,
    lock: BucketLock,
    monkeypatch: pytest.MonkeyPatch,
    *,
    hangs: bool = False,
    num_failures: int = 99,
    beat_every_s: float = 0.01,
) -> list[str]:
    """Release a lock whose bucket does not answer, or refuses some reads. Return the lines in the log."""
    monkeypatch.setattr(bucket_lock, "BEAT_EVERY_S", beat_every_s)
    monkeypatch.setattr(bucket_lock, "_POLL_S", 0.01)
    is_over = threading.Event()
    read_now = bucket.read
    failures = iter(range(num_failures))

    def read(name: str) -> bytes:
        is_over.wait(60 * hangs)
        if next(failures, None) is None:
            return read_now(name)
        raise UnreachableError(f"cannot read {name}.")

    with monkeypatch.context() as outage, recorded_log() as log:
        outage.setattr(bucket_lock, "_RELEASE_S", 0.05 if hangs else 30.0)
        outage.setattr(bucket, "read", read)
        lock.release()
    is_over.set()
    return [line for _, line in log]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_lock_that_an_outage_kept_is_removed_after_it_and_blocks_no_job_of_the_same_process(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    lock = acquire(bucket, "one")
    (line,) = release_in_outage(bucket, lock, monkeypatch, hangs=hangs)
    assert line.startswith(f"{bucket.location}/LOCK.json is not removed, because the store does not answer or refuses")
    assert line.endswith("a start on another machine waits up to 60 s for it")
    lock._thread.join(60)
    acquire(bucket, "two").release()
    assert bucket.sizes() == {}


def test_a_lock_that_the_same_job_has_entered_again_stays_after_an_outage(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = acquire(bucket, "one")
    entered_again = json.loads(bucket.read(LOCK)) | {"started": "later"}
    bucket.write(LOCK, json.dumps(entered_again).encode())
    release_in_outage(bucket, lock, monkeypatch)
    lock._thread.join(60)
    assert list(bucket.sizes()) == [LOCK]


def test_a_short_failure_at_the_release_leaves_no_lock(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = acquire(bucket, "one")
    assert release_in_outage(bucket, lock, monkeypatch, num_failures=1, beat_every_s=3600.0) == []
    assert bucket.sizes() == {}


def test_jobs_that_died_while_they_took_over_are_passed(bucket: Bucket) -> None:
    put_owner(bucket, DEAD, "a")
    put_owner(bucket, DEAD, "b", name="LOCK.a.json")
    put_owner(bucket, ELSEWHERE, "c", name="LOCK.b.json")
    lock = acquire(bucket, "d")
    assert list(bucket.sizes()) == [LOCK]
    assert lock.beat()
    lock.release()


def test_a_job_that_is_taking_over_is_alive_by_its_heartbeat(bucket: Bucket) -> None:
    put_owner(bucket, DEAD, "a")
    put_owner(bucket, process_id(), "b", name="LOCK.a.json")
    with pytest.raises(ConfigError, match="in use"):
        acquire(bucket, "c")


def test_a_lock_that_cannot_be_read_is_left_by_an_unknown_job(bucket: Bucket) -> None:
    bucket.write(LOCK, b"")
    acquire(bucket, "one").release()
    assert bucket.sizes() == {}


@pytest.mark.parametrize("left", [None, DEAD, ELSEWHERE])
def test_of_many_starts_at_one_moment_one_gets_the_lock(bucket: Bucket, left: ProcessId | None) -> None:
    if left is not None:
        put_owner(bucket, left, "left")
    ready = threading.Barrier(6)
    got: list[BucketLock] = []

    def start(number: int) -> None:
        ready.wait()
        with suppress(ConfigError):
            got.append(acquire(bucket, f"job{number}"))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(start, range(6)))
    assert len(got) == 1
    assert got[0].beat()
    got[0].release()
    assert LOCK not in bucket.sizes()
