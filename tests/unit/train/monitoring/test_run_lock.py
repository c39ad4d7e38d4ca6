"""Two jobs never use the same run folder at once, and a dead job does not block it."""

import json
import multiprocessing as mp
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from txl_dist.artifacts import LOCK
from txl_dist.distributed.collectives import RankInfo
from txl_dist.distributed.processes import process_id
from txl_dist.distributed.recovery.seat import Seat
from txl_dist.errors import ConfigError
from txl_dist.train.monitoring import run_lock
from txl_dist.train.monitoring.member import Member
from txl_dist.train.monitoring.run_lock import RunLock, prove_shared

SPAWN = mp.get_context("fork")


def hold(folder: Path, pipe: Connection) -> None:
    RunLock.acquire(folder)
    pipe.send("held")
    signal.pause()


def start_holder(folder: Path) -> mp.Process:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=hold, args=(folder, theirs))
    process.start()
    assert ours.recv() == "held"
    return process


def test_a_second_job_is_refused_while_the_first_lives_and_not_once_it_is_dead(tmp_path: Path) -> None:
    holder = start_holder(tmp_path / "run")
    start_s = time.monotonic()
    with pytest.raises(ConfigError, match=rf"in use by another job: pid {holder.pid} on \S+, since"):
        RunLock.acquire(tmp_path / "run")
    assert time.monotonic() - start_s < 2
    os.kill(holder.pid, signal.SIGSTOP)
    with pytest.raises(ConfigError, match="in use"):  # a stopped one may go on
        RunLock.acquire(tmp_path / "run")
    holder.kill()
    holder.join()
    RunLock.acquire(tmp_path / "run").release()
    assert os.listdir(tmp_path / "run") == []


def enter(folder: Path, pipe: Connection, pid: int) -> None:
    RunLock.acquire(folder, nonce="feed", holder_pid=pid)
    pipe.send("held")
    signal.pause()


def test_a_lock_that_an_agent_holds_outlives_its_rank_and_is_entered_again_by_its_nonce(tmp_path: Path) -> None:
    agent = SPAWN.Process(target=signal.pause)
    agent.start()
    for _ in range(2):  # a rank, and its replacement
        ours, theirs = SPAWN.Pipe()
        rank = SPAWN.Process(target=enter, args=(tmp_path, theirs, agent.pid))
        rank.start()
        assert ours.recv() == "held"
        rank.kill()
        rank.join()
        with pytest.raises(ConfigError, match=rf"in use by another job: pid {agent.pid} on"):
            RunLock.acquire(tmp_path)
    RunLock.acquire(tmp_path, nonce="feed", holder_pid=agent.pid).release()
    assert os.listdir(tmp_path) == []
    RunLock.acquire(tmp_path, nonce="feed", holder_pid=agent.pid)._done.set()
    agent.kill()
    agent.join()
    RunLock.acquire(tmp_path).release()  # the whole job has ended


def test_a_lock_is_entered_again_in_the_middle_of_its_takeover(tmp_path: Path) -> None:
    path = write_lock(tmp_path, process=process_id()._replace(start_ticks=1), nonce="old")
    write_lock(tmp_path, nonce="feed").rename(tmp_path / f"{LOCK}.old")
    write_lock(tmp_path, process=process_id()._replace(start_ticks=1), nonce="old")
    lock = RunLock.acquire(tmp_path, nonce="feed")
    assert os.listdir(tmp_path) == [LOCK]
    assert json.loads(path.read_text())["nonce"] == "feed"
    lock.release()


def test_a_job_whose_lock_was_taken_over_does_not_enter_it_again(tmp_path: Path) -> None:
    other = RunLock.acquire(tmp_path)
    with pytest.raises(ConfigError, match="in use"):
        RunLock.acquire(tmp_path, nonce="feed")
    other.release()


def seat_at(pid: int, word: str) -> Seat:
    return Seat(f"txl-recovery-{pid}-{word}", pid, 0, [], [], {})


def test_rank_0_on_another_agent_enters_the_lock_that_the_first_one_holds(tmp_path: Path) -> None:
    pid = os.getpid()
    lock = RunLock.acquire(tmp_path, nonce="feed", holder_pid=pid)
    told: list[dict[str, str]] = []
    member: Any = SimpleNamespace(_lock=None, _plan={}, _seat=seat_at(os.getppid(), "beef"), _tell=told.append)
    with pytest.raises(ConfigError, match="in use by another job"):
        Member.lock(member, tmp_path)
    member._plan = {"holder": json.loads(seat_at(pid, "feed").to_json())}
    assert Member.lock(member, tmp_path).nonce == lock.nonce
    assert json.loads((tmp_path / LOCK).read_text())["process"][2] == pid  # which lives as long as the job
    assert told == [{"kind": "lock", "path": str(tmp_path / LOCK)}]
    Member.lock(member, tmp_path).release()
    lock.release()
    assert os.listdir(tmp_path) == []


def race(folder: Path, gate, wins, num_rounds: int) -> None:
    for _ in range(num_rounds):
        gate.wait()
        try:
            lock = RunLock.acquire(folder)
        except ConfigError:
            lock = None
        else:
            with wins.get_lock():
                wins.value += 1
        gate.wait()  # all have tried
        gate.wait()  # the counting is over
        if lock is not None:
            lock._done.set()


def test_of_many_takers_of_a_dead_jobs_lock_exactly_one_wins(tmp_path: Path) -> None:
    num_takers, num_rounds = 8, 60
    gate, wins = SPAWN.Barrier(num_takers + 1), SPAWN.Value("i", 0)
    takers = [SPAWN.Process(target=race, args=(tmp_path, gate, wins, num_rounds)) for _ in range(num_takers)]
    for taker in takers:
        taker.start()
    won = []
    for _ in range(num_rounds):
        (tmp_path / LOCK).unlink(missing_ok=True)
        write_lock(tmp_path, process=process_id()._replace(start_ticks=1))
        wins.value = 0
        gate.wait(60)
        gate.wait(60)
        won.append(wins.value)
        gate.wait(60)
    for taker in takers:
        taker.join()
    assert won == [1] * num_rounds
    assert os.listdir(tmp_path) == [LOCK]


def write_lock(folder: Path, *, process=None, nonce: str = "feed") -> Path:
    process = process or process_id()._replace(host="elsewhere")
    path = folder / LOCK
    path.write_text(json.dumps({"process": process, "nonce": nonce, "started": "long ago"}))
    return path


def test_a_job_on_another_host_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    path = write_lock(tmp_path)
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.1):
            os.utime(path)

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        with pytest.raises(ConfigError, match="on elsewhere, since long ago"):
            RunLock.acquire(tmp_path, stale_after_s=20)
    finally:
        done.set()
        heart.join()
    RunLock.acquire(tmp_path, stale_after_s=0.3).release()


@pytest.mark.parametrize("content", ["", "{", '{"nonce": "../../etc", "process": []}', "[]"])
def test_a_lock_file_without_sense_goes_by_its_time(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_text(content)
    lock = RunLock.acquire(tmp_path, stale_after_s=0.2)
    assert json.loads((tmp_path / LOCK).read_text())["nonce"] == lock.nonce
    lock.release()


def test_a_taker_that_died_between_its_two_steps_is_taken_over_from(tmp_path: Path) -> None:
    dead = process_id()._replace(start_ticks=1)
    write_lock(tmp_path, process=dead)
    (tmp_path / f"{LOCK}.feed").write_text(json.dumps({"process": dead, "nonce": "beef", "started": "then"}))
    lock = RunLock.acquire(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text())["nonce"] == lock.nonce
    assert not lock.is_lost
    lock.release()


def test_a_job_learns_that_it_lost_its_lock_and_leaves_the_others_alone(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path)
    lock.beat()
    assert not lock.is_lost
    write_lock(tmp_path)
    lock.beat()
    assert lock.is_lost
    lock.release()
    assert json.loads((tmp_path / LOCK).read_text())["nonce"] == "feed"


def test_a_removed_lock_is_taken_again(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path)
    (tmp_path / LOCK).unlink()
    lock.beat()
    assert not lock.is_lost
    with pytest.raises(ConfigError, match="in use"):
        RunLock.acquire(tmp_path)
    lock.release()


def test_a_heartbeat_survives_a_full_disk_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = RunLock.acquire(tmp_path)
    before_ns = (tmp_path / LOCK).stat().st_mtime_ns

    def no_write(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_lock.os, "write", no_write)
    time.sleep(0.01)
    lock.beat()
    assert (tmp_path / LOCK).stat().st_mtime_ns > before_ns
    (tmp_path / LOCK).unlink()
    lock.beat()
    assert not lock.is_lost
    lock.release()


def test_a_folder_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot lock the run directory .*choose another --run.dir"):
        RunLock.acquire(tmp_path / "file")


def proving_worker(ranks: RankInfo, shared: Path, other: Path) -> list[str]:
    node = RankInfo(ranks.rank, ranks.world_size, 0, ranks.device, ranks.num_threads)
    prove_shared(shared, nonce="n" if ranks.is_rank0 else "", ranks=node)
    said = []
    for own in (other, other / "missing"):
        try:
            prove_shared(shared if ranks.is_rank0 else own, nonce="n", ranks=node, seen_within_s=0.5)
        except ConfigError as error:
            said.append(str(error))
    return said


@pytest.mark.dist
def test_nodes_that_do_not_share_the_folder_are_found_and_nothing_stays_behind(tmp_path: Path) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    other.mkdir()
    first, second = run_ranks(proving_worker, shared, other, world_size=2, folder=tmp_path / "ranks")
    assert first == second
    assert "is not the same folder as on" in first[0]
    assert "cannot write to the run directory" in first[1]
    assert [*shared.iterdir(), *other.iterdir()] == []
