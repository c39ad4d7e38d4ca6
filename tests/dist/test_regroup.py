"""A process leaves its groups and its engine and joins again, ten times, and computes the same bits each time."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed import TCPStore

from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config, train_engine
from txl_dist.distributed.collectives import RankInfo, barrier, broadcast_object, distributed_context
from txl_dist.distributed.socket_cut import SocketCut
from txl_dist.errors import ConfigError
from txl_dist.train.engine import regroup
from txl_dist.train.engine.regroup import check_regroup, leave_groups
from txl_dist.train.engine.zero import ZeroEngine

pytestmark = pytest.mark.dist

TIMES = 10


def _numbers(*values: Any) -> list[Any]:
    return [torch.as_tensor(value).tolist() for value in values]


def resident_bytes() -> int:
    """Bytes of host memory that this process holds."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_modules() -> int:
    """Number of modules that exist in this process."""
    return sum(isinstance(each, torch.nn.Module) for each in gc.get_objects())


def rebuild_worker(ranks: RankInfo, stage: int) -> list[tuple[Any, int, int, int]]:
    """Per generation: losses of three steps and on fixed tokens, the numbers of open descriptors and of modules, and
    the memory."""
    engines: list[ZeroEngine] = []

    class Kept(ZeroEngine):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            engines.append(self)

    tiny.ZeroEngine = Kept  # type: ignore[misc]
    config = tiny_config(engine={"zero_stage": stage})
    seen = []
    gc.freeze()
    for generation in range(TIMES + 1):
        if generation:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks.is_rank0 else None
            port = broadcast_object(store.port if store else 0)
            leave_groups()
            store = store or TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            ranks = distributed_context(timeout_s=60, store=store).__enter__()
        losses, _, fixed_loss = train_engine(ranks, config, num_steps=3)
        barrier()
        engines.pop().close()
        num_descriptors = len(os.listdir("/proc/self/fd"))
        seen.append((_numbers(losses, fixed_loss), num_descriptors, num_modules(), resident_bytes()))
    return seen


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.nightly) for stage in (0, 2, 3))])
def test_ten_rebuilds_in_one_process_give_the_same_bits_and_leak_no_socket_and_no_memory(
    tmp_path: Path, stage: int
) -> None:
    for seen in run_ranks(rebuild_worker, stage, world_size=2, folder=tmp_path):
        results, descriptors, modules, memory = zip(*seen, strict=True)
        assert list(results) == [results[0]] * (TIMES + 1)
        assert modules[-1] <= modules[1]
        assert descriptors[-1] <= max(descriptors[1:4])
        assert memory[-1] <= 1.03 * max(memory[1:4])


def mixed_worker(ranks: RankInfo, stage: int) -> Any:
    """Rank 1 has built an engine before, and rank 0 has not: as a survivor beside a replacement."""
    config = tiny_config(engine={"zero_stage": stage})
    if ranks.rank == 1:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    ports: list[Any] = [None, None]
    torch_dist.all_gather_object(ports, port if ranks.rank == 1 else None)
    if ranks.rank == 1:  # alone in a job of one rank
        regroup.leave_groups()
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        train_engine(distributed_context(timeout_s=60, store=own).__enter__(), config, num_steps=2)
        os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    else:
        store = TCPStore("127.0.0.1", ports[1], is_master=False, wait_for_workers=False)
    leave_groups()
    again = distributed_context(timeout_s=60, store=store).__enter__()
    losses, *_ = train_engine(again, config, num_steps=3)
    barrier()
    return _numbers(losses)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_survivor_and_a_new_process_count_the_same(tmp_path: Path, stage: int) -> None:
    first, second = run_ranks(mixed_worker, stage, world_size=2, folder=tmp_path)
    assert first == second


def cut_worker(ranks: RankInfo) -> float:
    """Seconds until an all-reduce ends for which rank 1 never comes."""
    cut = SocketCut()
    with cut.collecting():
        group = torch_dist.new_group(backend="gloo")
    if ranks.rank == 1:
        time.sleep(3)
        return 0.0
    threading.Timer(0.5, cut.cut).start()
    begin_s = time.monotonic()
    with pytest.raises(RuntimeError):
        torch_dist.all_reduce(torch.zeros(4), group=group)
    return time.monotonic() - begin_s


def test_a_pending_collective_ends_when_its_sockets_are_cut(tmp_path: Path) -> None:
    waited_s, _ = run_ranks(cut_worker, world_size=2, folder=tmp_path)
    assert waited_s < 30  # the timeout of the group is two minutes


def test_a_version_without_the_names_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*regroup._NAMES, ("torch.distributed.distributed_c10d", "_world.no_such_name"))
    monkeypatch.setattr(regroup, "_NAMES", names)
    with pytest.raises(ConfigError, match=r"torch \S+ has no torch.distributed.distributed_c10d._world.no_such_name"):
        check_regroup()


def test_the_installed_versions_have_the_names() -> None:
    check_regroup()
