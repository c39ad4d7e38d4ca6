"""`txl doctor` on several ranks reports each node once, measures the network, and names missing ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import forked
from tests.helpers.ranks import run_ranks
from txl_dist.distributed.rendezvous import free_port
from txl_dist.planning.doctor import fabric

pytestmark = pytest.mark.dist


class Doctor(NamedTuple):
    """A rank of `txl doctor`, and where it speaks to."""

    process: ForkServerProcess
    out: Path
    err: Path


def frozen_after_the_meeting(*words: str) -> None:
    fabric.measure_reduce = lambda ranks: os.kill(os.getpid(), signal.SIGSTOP)
    forked.run_txl(*words)


def start(
    *words: str,
    rank: int,
    world_size: int,
    local_rank: int,
    local_size: int,
    port: int,
    cwd: Path,
    program: Callable[..., None] = forked.run_txl,
) -> Doctor:
    """`txl doctor words` as a launcher starts it."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    variables = forked.environment(**place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    out, err = cwd / f"out-{rank}", cwd / f"err-{rank}"
    return Doctor(forked.start(program, "doctor", *words, variables=variables, cwd=cwd, out=out, err=err), out, err)


def ends(doctors: list[Doctor]) -> list[tuple[int | None, str, str]]:
    """(exit code, output, errors) of each."""
    for doctor in doctors:
        doctor.process.join(120)
    return [(one.process.exitcode, one.out.read_text(), one.err.read_text()) for one in doctors]


def test_two_nodes_are_reported_once_each_and_what_is_between_them_by_rank_0(tmp_path: Path) -> None:
    port, folders = free_port(), [tmp_path / "node0", tmp_path / "node1"]
    processes = []
    for rank, folder in enumerate(folders):
        folder.mkdir()
        words = ["--run-dir", str(tmp_path / "shared"), "--json", str(folder / "d.json")]
        processes.append(start(*words, rank=rank, world_size=2, local_rank=0, local_size=1, port=port, cwd=folder))
    (code, out, err), (other_code, other_out, _) = ends(processes)
    assert (other_code, other_out) == (0, "")
    assert "Traceback" not in err
    assert code == int("\nproblem" in "\n" + out), out
    host = os.uname().nodename
    lines = [line.split() for line in out.splitlines()]
    assert [line[1] for line in lines if line[2] == "versions"] == [f"{host}/rank0", f"{host}/rank1"]
    between = {words[2]: words[0] for words in lines if words[1] == "all"}
    assert between["meeting"] == between["differences"] == between["shared"] == "ok", out
    assert "all-reduce" in between
    reduces = json.loads((folders[0] / "d.json").read_text())["all_reduce"]
    assert reduces[0]["num_bytes"] == 4096
    assert all(one["bus_gb_s"] > 0 for one in reduces)
    assert list(tmp_path.glob("*RUN*")) == []


def test_who_does_not_come_is_named_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    port = free_port()
    processes = [
        start("--timeout-s", "4", rank=rank, world_size=4, local_rank=rank % 2, local_size=2, port=port, cwd=tmp_path)
        for rank in (0, 1, 2)
    ]
    (code, out, err), (silent_code, silent, _), (other_code, other, _) = ends(processes)
    assert "Traceback" not in err
    assert (code, other_code, silent_code, silent) == (1, 1, 0, "")
    for text in (out, other):
        (line,) = [line for line in text.splitlines() if line.startswith("problem  all ")]
        assert "rank 3 of 4 did not arrive within 4 s" in line
        assert "(ranks 0-2)" in line


def test_without_rank_0_the_others_say_so(tmp_path: Path) -> None:
    words = ["--timeout-s", "2"]
    process = start(*words, rank=1, world_size=2, local_rank=0, local_size=1, port=free_port(), cwd=tmp_path)
    ((code, out, err),) = ends([process])
    assert code == 1
    assert "found no rank 0 at 127.0.0.1" in out
    assert "Traceback" not in err


def test_a_rank_that_freezes_after_the_meeting_is_not_waited_for(tmp_path: Path) -> None:
    port, words = free_port(), ["--timeout-s", "4"]
    first = start(*words, rank=0, world_size=2, local_rank=0, local_size=1, port=port, cwd=tmp_path)
    frozen = start(
        *words,
        rank=1,
        world_size=2,
        local_rank=0,
        local_size=1,
        port=port,
        cwd=tmp_path,
        program=frozen_after_the_meeting,
    )
    try:
        ((code, out, err),) = ends([first])
    finally:
        frozen.process.kill()
    assert code == 1
    assert "problem  all " in out
    assert "communication" in out
    assert "Traceback" not in err


@pytest.mark.nightly  # the ranks of the other tests are forked
@pytest.mark.slow
def test_the_deepspeed_launcher_runs_it_and_its_exit_code_tells(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", "2", "--master_port"]
    command += [str(free_port()), "--module", "txl_dist", "doctor"]
    good = subprocess.run(command, cwd=tmp_path, env=forked.environment(), capture_output=True, text=True, timeout=120)
    assert "2 ranks on 1 node" in good.stdout, good.stdout + good.stderr
    assert good.stdout.count("  versions  ") == 1
    assert good.returncode == int("\nproblem" in good.stdout)


def test_all_reduces_are_measured_the_same_for_all_ranks(tmp_path: Path) -> None:
    results = run_ranks(fabric.measure_reduce, world_size=3, folder=tmp_path)
    assert results[1] == results[2] == results[0]
    for one in results[0]:
        assert one.bus_gb_s == pytest.approx(2 * 2 / 3 * one.num_bytes / (one.ms / 1000) / 1e9)
