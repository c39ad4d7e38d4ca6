"""Ranks that hang, freeze, die or fail are found in time and named correctly, and all processes end."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.helpers import forked
from txl_dist.console.logging import logger, start_logging
from txl_dist.distributed.collectives import (
    RankInfo,
    StepFlags,
    all_reduce_sum,
    barrier,
    distributed_context,
    is_waiting,
    waiting,
)
from txl_dist.distributed.processes import process_id
from txl_dist.distributed.rendezvous import free_port
from txl_dist.errors import HANG
from txl_dist.fault_injection import failpoint
from txl_dist.train.monitoring.heartbeats import Beat
from txl_dist.train.monitoring.watchdog import Watchdog, end_frozen, ranks_waited_for
from txl_dist.train.stepper import reduce_step

pytestmark = pytest.mark.dist

LIMIT_S = 2.0
FAULT_STEP = 5


def worker(limit_s: float, num_steps: int) -> None:
    with distributed_context(timeout_s=60) as ranks:
        start_logging(rank=ranks.rank)
        watchdog = Watchdog(ranks, limit_s=60)
        watchdog.write_stacks_to(Path("stacks"))
        try:
            steps(ranks, watchdog, limit_s=limit_s, num_steps=num_steps)
            watchdog.close()
        except BaseException as error:  # noqa: BLE001  whatever it is
            line = watchdog.first_cause(error)
            if line is None:
                watchdog.report(error)
                os.write(2, f"own error: {error}\n".encode())
                os._exit(1)
            if line:
                logger.error(line)
            os._exit(HANG)
    os._exit(0)


def steps(ranks: RankInfo, watchdog: Watchdog, *, limit_s: float, num_steps: int) -> None:
    for step in range(num_steps):
        watchdog.beat("step", step=step)
        Path(f"at-{ranks.rank}").write_text(str(time.time()))
        if step == 2:
            watchdog.limit(limit_s)
        if failpoint("step", step=step) == "flip":
            while True:
                pass
        all_reduce_sum(torch.ones(1))
        time.sleep(0.01)
    barrier()


class Outcome(NamedTuple):
    codes: list[int]
    lines: list[str]
    """What people see, of all ranks."""
    after_s: float
    """From the last step to the end of the last rank."""
    folder: Path


def outcome_of(
    fault: str, folder: Path, *, world_size: int, limit_s: float = LIMIT_S, num_steps: int = 10**6
) -> Outcome:
    port, ranks = free_port(), []
    for rank in range(world_size):
        variables = forked.environment(**forked.place(rank, world_size, port), TXL_FAILPOINTS=fault)
        err = folder / f"stderr-{rank}"
        ranks.append(forked.start(worker, limit_s, num_steps, variables=variables, cwd=folder, err=err))
    try:
        for process in ranks:
            process.join(60)
    finally:
        for process in ranks:
            process.kill()
    codes = [process.exitcode for process in ranks]
    last_s = max(float((folder / f"at-{rank}").read_text()) for rank in range(world_size))
    text = "".join((folder / f"stderr-{rank}").read_text() for rank in range(world_size))
    lines = [line for line in text.splitlines() if not line.startswith("TXL_FAILPOINTS")]
    return Outcome(codes, lines, time.time() - last_s, folder)


CASES = [
    ("stop", 0, 2),
    pytest.param("stop", 1, 3, marks=pytest.mark.nightly),
    ("hang", 0, 3),
    ("flip", 1, 2),
    pytest.param("spin", 0, 2, marks=pytest.mark.nightly),
    ("spin", 1, 3),
]
"""Each kind, on the rank that keeps the store of the job and on others, of 2 and of 3."""


@pytest.mark.parametrize(("kind", "culprit", "world_size"), CASES)
def test_the_rank_that_stands_still_is_named_and_all_end(
    kind: str, culprit: int, world_size: int, tmp_path: Path
) -> None:
    outcome = outcome_of(f"{kind}:{culprit}:{FAULT_STEP}", tmp_path, world_size=world_size)
    (line,) = outcome.lines
    assert re.search(rf"rank {culprit} on \S+ \(pid \d+\) has ", line)
    assert f"step {FAULT_STEP}, in phase `step`" in line
    assert "--engine.timeout_s" in line
    others = [code for rank, code in enumerate(outcome.codes) if rank != culprit]
    assert others == [HANG] * len(others)
    assert outcome.codes[culprit] in (HANG, -signal.SIGABRT, -signal.SIGKILL)
    assert outcome.after_s < LIMIT_S + 5
    for rank in range(world_size):
        if rank != culprit or kind != "stop":  # a stopped process cannot write
            assert "most recent call first" in (tmp_path / "stacks" / f"rank_{rank:05d}.txt").read_text()
    if kind in ("hang", "flip"):
        assert re.search(r", at \S+:\d+ \(\S+\)", line)


WRITES_SLOWLY = """
import os, signal, time
def write(number, frame):
    signal.signal(signal.SIGABRT, signal.SIG_DFL)  # as faulthandler does
    time.sleep(1)
    print("written", flush=True)
    os._exit(3)
signal.signal(signal.SIGABRT, write)
print("ready", flush=True)
while True:
    time.sleep(1)
"""


def test_two_ranks_that_end_a_frozen_one_let_it_write_its_stacks() -> None:
    with subprocess.Popen([sys.executable, "-c", WRITES_SLOWLY], stdout=subprocess.PIPE, text=True) as frozen:
        assert frozen.stdout is not None
        assert frozen.stdout.readline() == "ready\n"
        processes = [process_id(frozen.pid)]
        ranks = [threading.Thread(target=end_frozen, args=(processes,), kwargs={"asks": one}) for one in (True, False)]
        for rank in ranks:
            rank.start()
            time.sleep(0.2)
        for rank in ranks:
            rank.join(10)
        assert frozen.stdout.read() == "written\n"
    assert frozen.returncode == 3


@pytest.mark.parametrize("culprit", [0, 1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_rank_that_was_killed_is_named_once_and_the_others_leave_at_once(culprit: int, tmp_path: Path) -> None:
    outcome = outcome_of(f"kill:{culprit}:{FAULT_STEP}", tmp_path, world_size=3, limit_s=60)
    (line,) = outcome.lines
    assert re.search(rf"rank {culprit} on \S+ \(pid \d+\) was lost at step {FAULT_STEP}, in phase `step`", line)
    assert [code for rank, code in enumerate(outcome.codes) if rank != culprit] == [HANG, HANG]
    assert outcome.after_s < 10


@pytest.mark.parametrize("culprit", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_an_error_of_a_ranks_own_is_the_only_thing_said(culprit: int, tmp_path: Path) -> None:
    outcome = outcome_of(f"raise:{culprit}:{FAULT_STEP}", tmp_path, world_size=2, limit_s=60)
    assert outcome.lines == ["own error: ordered by TXL_FAILPOINTS"]
    assert outcome.codes == [1 if rank == culprit else HANG for rank in (0, 1)]


def test_a_run_that_ends_well_says_nothing_and_leaves_no_files(tmp_path: Path) -> None:
    outcome = outcome_of("", tmp_path, world_size=2, num_steps=150)
    assert (outcome.codes, outcome.lines) == ([0, 0], [])
    assert not (tmp_path / "stacks").exists()


def test_a_single_rank_watches_itself(tmp_path: Path) -> None:
    outcome = outcome_of(f"flip:0:{FAULT_STEP}", tmp_path, world_size=1)
    assert outcome.codes == [HANG]
    assert "has made no progress for 2 s" in outcome.lines[0]


def test_the_net_below_ends_a_single_rank_that_holds_the_interpreter_lock(tmp_path: Path) -> None:
    outcome = outcome_of(f"spin:0:{FAULT_STEP}", tmp_path, world_size=1)
    assert outcome.codes == [1]
    assert "_inject" in (tmp_path / "stacks" / "rank_00000.txt").read_text()


def beat(step: int, *, is_waiting: bool) -> Beat:
    return Beat(process_id(), step, "step", "somewhere", is_waiting, True, False)


def test_the_rank_behind_is_the_lowest_step_and_then_who_is_not_waiting() -> None:
    assert ranks_waited_for(
        {0: beat(7, is_waiting=True), 1: beat(6, is_waiting=True), 2: beat(7, is_waiting=False)}
    ) == [1]
    assert ranks_waited_for(
        {0: beat(7, is_waiting=True), 1: beat(7, is_waiting=False), 2: beat(8, is_waiting=True)}
    ) == [1]
    assert ranks_waited_for({0: beat(7, is_waiting=True), 1: beat(7, is_waiting=True)}) == [0, 1]


def test_a_thread_waits_where_it_says_so() -> None:
    here = threading.get_ident()
    with waiting():
        with waiting():
            pass
        assert is_waiting(here)
        assert not is_waiting(here + 1)
    assert not is_waiting(here)


def test_a_rank_that_decides_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the collective has returned, and the host waits where it reads what was decided."""
    said: list[bool] = []

    def read(values: torch.Tensor) -> list[float]:
        said.append(is_waiting(threading.get_ident()))
        return [0.0] * len(values)

    monkeypatch.setattr("txl_dist.train.stepper.all_reduce_sum", lambda votes: votes)
    monkeypatch.setattr(torch.Tensor, "tolist", read)
    reduce_step(torch.tensor(1.0), torch.tensor(2.0), skip=False, votes=StepFlags(), world_size=1)
    assert said == [True]
