"""A process leaves its groups and its engine and joins again, ten times, and computes the same bits each time."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed import Store, TCPStore

from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config, train_engine
from txl_dist.distributed.collectives import (
    RankInfo,
    all_reduce_sum,
    barrier,
    broadcast_object,
    distributed_context,
    gather_objects,
    is_waiting,
)
from txl_dist.distributed.socket_cut import SocketCut
from txl_dist.errors import ConfigError
from txl_dist.train.engine import regroup
from txl_dist.train.engine.regroup import check_regroup, end_waits_if, leave_groups
from txl_dist.train.engine.zero import ZeroEngine

pytestmark = pytest.mark.dist

TIMES = 10
NUM_VALUES = 2**27
"""Number of values of a message of 512 MiB, of which only `ARRIVED_BYTES` and a bit more arrive."""
ARRIVED_BYTES = 16 * 2**20


def _numbers(*values: Any) -> list[Any]:
    return [torch.as_tensor(value).tolist() for value in values]


def resident_bytes(pid: int | str = "self") -> int:
    """Bytes of host memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


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


def leave_behind_worker(ranks: RankInfo, source: int, folder: Path) -> tuple[str, float]:
    """The error of a broadcast from `source` of which only a part arrives, and a sum that the same processes make then.

    Rank 0 freezes rank 1 in the middle of the message, and cuts its own sockets.
    """
    is_lost, port_file = folder / "lost", folder / "port"
    pids = gather_objects(os.getpid())
    has_left = threading.Event()
    end_waits_if(lambda: is_lost.exists() and not has_left.is_set())
    cut = SocketCut()
    with cut.collecting():
        group = torch_dist.new_group(backend="gloo", timeout=timedelta(seconds=100))
    values = torch.empty(NUM_VALUES)  # memory grows as the message arrives
    receiver = pids[1 - source]
    first_bytes = resident_bytes(receiver)
    barrier()

    def strike() -> None:
        while resident_bytes(receiver) < first_bytes + ARRIVED_BYTES:
            time.sleep(0.001)
        os.kill(pids[1], signal.SIGSTOP)
        cut.cut()
        is_lost.touch()

    if ranks.is_rank0:
        threading.Thread(target=strike).start()
    with pytest.raises((ConnectionError, RuntimeError)) as problem:
        torch_dist.broadcast(values, source, group=group)
    del group
    leave_groups()
    has_left.set()
    if ranks.is_rank0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port_file.with_suffix(".new").write_text(str(store.port))
        port_file.with_suffix(".new").rename(port_file)
        os.kill(pids[1], signal.SIGCONT)
    else:
        while not port_file.exists():
            time.sleep(0.01)
        store = TCPStore("127.0.0.1", int(port_file.read_text()), is_master=False, wait_for_workers=False)
    distributed_context(timeout_s=60, store=store).__enter__()
    return problem.typename, all_reduce_sum(torch.ones(1)).item()


@pytest.mark.parametrize("source", [1, 0])
def test_a_collective_whose_message_went_only_in_part_is_left_behind(source: int, tmp_path: Path) -> None:
    results = run_ranks(leave_behind_worker, source, tmp_path, world_size=2, folder=tmp_path)
    assert results[0] == ("ConnectionError", 2.0)
    assert results[1][1] == 2.0


def late_worker(ranks: RankInfo, has_left: Path) -> list[Any]:
    """Results of a sum, a sum of pieces and a message that rank 1 joins late, and errors where rank 1 never comes."""
    has_lost = threading.Event()
    end_waits_if(has_lost.is_set)
    values, piece, message = torch.ones(2), torch.zeros(1), torch.ones(1)
    late_s = 3 * regroup.POLL_S * ranks.rank
    time.sleep(late_s)
    torch_dist.all_reduce(values)
    time.sleep(late_s)
    torch_dist.reduce_scatter_single(piece, values)
    time.sleep(late_s)
    if ranks.is_rank0:
        torch_dist.recv(message, src=1)
    else:
        torch_dist.send(3 * message, dst=0)
    results: list[Any] = [*values.tolist(), piece.item(), message.item()]
    if ranks.rank == 1:
        while not has_left.exists():
            time.sleep(0.01)
        return results
    has_lost.set()
    for collective in (torch_dist.all_reduce, partial(torch_dist.reduce_scatter_single, piece)):
        with pytest.raises(ConnectionError) as problem:
            collective(values)
        results.append(str(problem.value))
    leave_groups()
    has_left.touch()
    os.environ.update(WORLD_SIZE="1", LOCAL_SIZE="1")
    own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    distributed_context(timeout_s=60, store=own).__enter__()
    return results


def test_a_late_rank_is_waited_for_and_a_lost_one_is_not(tmp_path: Path) -> None:
    first, second = run_ranks(late_worker, tmp_path / "left", world_size=2, folder=tmp_path)
    assert first[:4] == [2.0, 2.0, 4.0, 3.0]
    assert second == [2.0, 2.0, 4.0, 1.0]
    assert len(first) == 6
    assert all("was lost" in error for error in first[4:])


def handle_worker(ranks: RankInfo) -> bool:
    """Whether rank 0 counts as waiting while it waits for the handle of a sum, for which it has no other frame."""
    end_waits_if(lambda: False)
    values, main = torch.ones(2), threading.get_ident()
    seen = []
    if ranks.is_rank0:
        looking = threading.Timer(0.5, lambda: seen.append(is_waiting(main)))
        looking.start()
        torch_dist.all_reduce(values, async_op=True).wait()
        looking.join()
    else:
        time.sleep(1.5)
        torch_dist.all_reduce(values, async_op=True).wait()
    return bool(seen and seen[0])


def test_a_rank_that_waits_for_the_handle_of_a_collective_counts_as_waiting(tmp_path: Path) -> None:
    assert run_ranks(handle_worker, world_size=2, folder=tmp_path)[0]


class StoreWithLostRank(Store):
    """A store in which rank 1 has written an address, and from which it never connects.

    Of two ranks the one with the higher port connects to the other. So the address is that of rank 0 at a high port.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = bytes(value)
        for port in listening_ports():
            value = bytes(value).replace(address_bytes(port), address_bytes(65535))
        self.values[key.removesuffix("0") + "1"] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        assert set(keys) <= set(self.values)


def address_bytes(port: int) -> bytes:
    """Return the beginning of a `sockaddr_in`."""
    return struct.pack("=H", socket.AF_INET) + struct.pack(">H", port)


def listening_ports() -> list[int]:
    """Return the ports at which this process listens."""
    ports = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as own:
            if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.append(own.getsockname()[1])
    return ports


def new_group_worker(ranks: RankInfo) -> str:
    """The error of a group that is made with a rank that was lost before it connected."""
    has_lost = threading.Event()
    end_waits_if(has_lost.is_set)
    cut = SocketCut()

    def lose() -> None:
        has_lost.set()
        cut.cut()

    threading.Timer(0.5, lose).start()
    with cut.collecting(), pytest.raises((ConnectionError, RuntimeError)) as problem:
        torch_dist.ProcessGroupGloo(StoreWithLostRank(), 0, 2, timeout=timedelta(seconds=20))
    assert has_lost.is_set()
    return problem.typename


def test_a_group_to_which_a_lost_rank_does_not_connect_is_left_behind(tmp_path: Path) -> None:
    assert run_ranks(new_group_worker, world_size=1, folder=tmp_path) == ["ConnectionError"]


@pytest.mark.parametrize("name", [*regroup._NAMES, *regroup._GPU_NAMES], ids=lambda name: name[1])
def test_a_version_without_one_of_the_names_is_refused_by_name(
    name: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    present = regroup._attribute

    def find(module: str, path: str) -> Any:
        if (module, path) == name:
            raise AttributeError
        return present(module, path) if (module, path) in regroup._NAMES else None

    monkeypatch.setattr(regroup, "_attribute", find)
    module, path = name
    package = module.partition(".")[0]
    with pytest.raises(
        ConfigError, match=rf"{package} {re.escape(version(package))} has no {re.escape(module)}\.{path}"
    ):
        check_regroup(on_gpu=True)


def test_the_installed_versions_have_the_names() -> None:
    check_regroup()


def test_the_installed_versions_have_the_modules_that_a_spare_imports_early() -> None:
    assert [name for name in regroup._LATE_MODULES if find_spec(name) is None] == []


def test_an_engine_ends_without_an_error_under_a_version_that_lacks_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without recovery closes its engine too, and must not fail in its last moment."""
    monkeypatch.setattr(regroup, "_MODULE_STACK", ("deepspeed.no_such_module", "STACK"))
    module = torch.nn.Linear(2, 2)
    calls: list[str] = []
    engine = SimpleNamespace(module=module, destroy=lambda: calls.append("destroy"))
    regroup.empty_engine(engine)
    assert calls == ["destroy"]
    assert vars(engine) == {}
    assert module.weight.numel() == 0
