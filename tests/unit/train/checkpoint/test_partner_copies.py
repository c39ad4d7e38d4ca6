"""Slots with partner copies: a node lost with all its memory loses no version that was acknowledged."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch

from tests.unit.train.checkpoint.test_slots import engine_of, state_of, store
from txl_dist.distributed.recovery.partner import PartnerAddress, PartnerServer
from txl_dist.distributed.recovery.slot_file import HEAD_BYTES, SlotFile, Version
from txl_dist.errors import ConfigError, LostRankError, TrainingError
from txl_dist.train.checkpoint import partner as partner_module
from txl_dist.train.checkpoint import slots as slots_module
from txl_dist.train.checkpoint.partner import Partner, find_partner
from txl_dist.train.checkpoint.recovery import InJobRecovery
from txl_dist.train.checkpoint.slots import Share, StateSlots, StoredState

T = TypeVar("T")
LENGTH = 10


class Nodes:
    """Nodes with one rank each, as threads of this process. Each has slots in a folder, and the server of an agent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, count: int, *, every: int) -> None:
        for module in (slots_module, partner_module):
            monkeypatch.setattr(module, "gather_objects", self.gather)
            monkeypatch.setattr(module, "node_name", self.name)
        self.count, self._folder, self._every = count, folder, every
        self.servers: list[PartnerServer] = []
        self.idle: list[PartnerServer] = []
        self.slots: list[StateSlots] = []
        self._values: list[Any] = [None] * count
        self._barrier = threading.Barrier(count, timeout=20)
        self._here = threading.local()
        for rank in range(count):
            self.servers.append(self._boot(rank))
        self.begin()

    def _boot(self, rank: int) -> PartnerServer:
        """Make the empty slots and the server of an agent."""
        for path in self.paths(rank):
            path.touch()
        server = PartnerServer(unreachable_s=60.0)
        server.offer([SlotFile(str(path)) for path in self.paths(rank)])
        return server

    def paths(self, rank: int) -> list[Path]:
        return [self._folder / f"{rank}.{slot}" for slot in range(3)]

    def begin(self) -> None:
        """Begin a generation: all ranks connect to their partners."""
        for slots in self.slots:
            slots.close()
        self.slots = self.together(self._open)

    def _open(self, rank: int) -> StateSlots:
        server = self.servers[rank]
        own = PartnerAddress("127.0.0.1", server.port, server.key)
        idle = [PartnerAddress("127.0.0.1", server.port, server.key) for server in self.idle]
        partner = find_partner(own, rank=rank, every=self._every, idle=idle)
        paths = [str(path) for path in self.paths(rank)]
        return StateSlots(paths, share=Share(0, 1), rank=rank, world_size=self.count, partner=partner)

    def step(self, number: int, *, ranks: range | None = None) -> None:
        for rank in ranks or range(self.count):
            store(self.slots[rank], number, start=LENGTH * rank, rank=rank)

    def lose(self, rank: int) -> None:
        """Lose a node with its memory. Another one takes its place."""
        self.servers[rank].close()
        for path in self.paths(rank):
            path.unlink()
        self.servers[rank] = self._boot(rank)

    def shrink(self, count: int, *, num_idle: int = 0) -> None:
        """Continue with the first nodes. The last nodes are idle, and the others are lost with their memory."""
        self.idle = self.servers[self.count - num_idle : self.count]
        for slots in self.slots[count:]:
            slots.close()
        del self.slots[count:]
        self.count = count
        self._values = [None] * count
        self._barrier = threading.Barrier(count, timeout=20)

    def newest(self) -> list[StoredState | None]:
        """What each rank loads in a new generation."""
        self.begin()
        return self.together(lambda rank: self.slots[rank].newest_common())

    def together(self, action: Callable[[int], T]) -> list[T]:
        def run(rank: int) -> T:
            self._here.rank = rank
            return action(rank)

        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(run, range(self.count)))

    def gather(self, value: Any) -> list[Any]:
        self._values[self._here.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def name(self) -> str:
        return f"node{self._here.rank}"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make_nodes(count: int, *, every: int = 1) -> Nodes:
        made.append(Nodes(monkeypatch, tmp_path, count, every=every))
        return made[0]

    yield make_nodes
    for server in made[0].servers:
        server.close()
    for slots in made[0].slots:
        slots.close()


def assert_loaded(stored: list[StoredState | None], step: int) -> None:
    """Each rank has its weights and its memories of the step."""
    for rank, one in enumerate(stored):
        assert one is not None
        assert one.step == step
        start = LENGTH * rank
        expected = torch.arange(start, start + LENGTH, dtype=torch.float32) + step
        assert torch.equal(one.source.read("weight", "w", start=start, length=LENGTH), expected)
        state = one.load(engine_of(0))
        assert torch.equal(state.memories[0].hidden[0], state_of(step, rank).memories[0].hidden[0])


@pytest.mark.parametrize("rank", range(3))
def test_a_lost_node_loses_no_step(make: Callable[..., Nodes], rank: int) -> None:
    nodes = make(3)
    for step in (1, 2, 3):
        nodes.step(step)
    nodes.lose(rank)
    assert_loaded(nodes.newest(), 3)


def test_a_job_that_shrinks_to_one_node_has_the_copies_that_its_agent_keeps_for_the_lost_one(
    make: Callable[..., Nodes],
) -> None:
    nodes = make(2)
    nodes.step(1)
    nodes.step(2)
    nodes.shrink(1)
    (stored,) = nodes.newest()
    assert stored is not None
    assert stored.step == 2
    assert torch.equal(stored.source.read("weight", "w", start=0, length=2 * LENGTH), torch.arange(2.0 * LENGTH) + 2)
    assert [memory.hidden[0][0, 0, 0].item() for memory in stored.memories] == [20, 20, 21, 21]
    nodes.step(3)  # which no other node keeps
    (stored,) = nodes.newest()
    assert stored is not None
    assert stored.step == 3


@pytest.mark.parametrize("every", [1, 2])
def test_an_agent_that_has_no_rank_any_more_sends_its_own_copies_and_those_of_a_lost_node(
    every: int, make: Callable[..., Nodes]
) -> None:
    nodes = make(4, every=every)
    for step in (1, 2, 3):
        nodes.step(step)
    nodes.shrink(2, num_idle=1)  # node 2 is lost, and node 3 is idle
    for rank, stored in enumerate(nodes.newest()):
        assert stored is not None
        assert stored.step == 3
        expected = torch.arange(4.0 * LENGTH) + 3
        assert torch.equal(stored.source.read("weight", "w", start=0, length=4 * LENGTH), expected)
        first = 30 + 2 * rank
        assert [memory.hidden[0][0, 0, 0].item() for memory in stored.memories] == [first, first, first + 1, first + 1]


def test_of_the_ranks_of_a_node_one_fetches_the_versions_of_other_nodes(
    make: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = make(4)
    nodes.step(1)
    fetched: list[int] = []
    fetch = Partner.fetch

    def count(self: Partner, version: Version, keeper: int, into: SlotFile) -> bool:
        fetched.append(version.rank)
        return fetch(self, version, keeper, into)

    monkeypatch.setattr(Partner, "fetch", count)
    nodes.shrink(3, num_idle=1)
    nodes.begin()
    monkeypatch.setattr(slots_module, "node_name", lambda: "a" if nodes.name() in ("node0", "node1") else "b")
    for stored in nodes.together(lambda rank: nodes.slots[rank].newest_common()):
        assert stored is not None
        expected = torch.arange(4.0 * LENGTH) + 1
        assert torch.equal(stored.source.read("weight", "w", start=0, length=4 * LENGTH), expected)
    assert sorted(fetched) == [0, 1, 2, 3, 3]  # 2 and 3 by node a, the others by node b


def test_the_partner_gets_the_first_version_after_a_rewind_at_once(make: Callable[..., Nodes]) -> None:
    nodes = make(2, every=5)
    for step in (1, 2, 3):
        nodes.step(step)
    for rank, slots in enumerate(nodes.slots):
        slots.store(state_of(2, rank), engine_of(2, start=LENGTH * rank, length=LENGTH), {}, after_rewind=True)
        slots.wait()
    nodes.step(3)
    nodes.lose(1)
    assert_loaded(nodes.newest(), 2)


def test_at_stage_0_a_rank_that_moves_to_another_node_has_all_weights(
    make: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = make(3)
    for rank, share in enumerate((Share(0, 1), Share(0, 2), Share(1, 2))):  # ranks 1 and 2 were on one node
        monkeypatch.setattr(nodes.slots[rank], "_share", share)
        store(nodes.slots[rank], 1, rank=rank)
    nodes.lose(2)
    for rank, stored in enumerate(nodes.newest()):
        assert stored is not None
        assert torch.equal(stored.source.read("weight", "w", start=0, length=LENGTH), torch.arange(float(LENGTH)) + 1)
        assert [memory.hidden[0][0, 0, 0].item() for memory in stored.memories] == [10 + rank] * 2


def test_a_node_lost_before_its_version_was_sent_takes_all_ranks_to_the_version_before(
    make: Callable[..., Nodes],
) -> None:
    nodes = make(3)
    nodes.step(1)
    nodes.step(2)
    nodes.step(3, ranks=range(2))
    nodes.lose(2)
    assert_loaded(nodes.newest(), 2)


def test_another_node_may_be_lost_before_the_next_step(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    nodes.step(1)
    nodes.step(2)
    nodes.lose(0)
    assert_loaded(nodes.newest(), 2)
    for slots in nodes.slots:
        slots.wait()  # as before the reduction of the next step
    nodes.lose(1)
    assert_loaded(nodes.newest(), 2)


def test_two_neighbours_lost_at_once_leave_no_version(make: Callable[..., Nodes]) -> None:
    nodes = make(3)
    nodes.step(1)
    nodes.lose(0)
    nodes.lose(1)
    assert nodes.newest() == [None, None, None]


@pytest.mark.parametrize("last", [4, 5, 6, 7])
def test_with_rare_copies_a_lost_process_repeats_no_finished_step(make: Callable[..., Nodes], last: int) -> None:
    nodes = make(2, every=3)
    for step in range(1, last + 1):
        nodes.step(step)
    assert_loaded(nodes.newest(), last)


@pytest.mark.parametrize(("last", "loaded"), [(5, 1), (6, 6), (10, 6), (11, 11), (15, 11)])
def test_a_lost_node_repeats_at_most_the_steps_since_the_last_copy(
    make: Callable[..., Nodes], last: int, loaded: int
) -> None:
    nodes = make(2, every=5)
    for step in range(1, last + 1):
        nodes.step(step)
    nodes.lose(1)
    assert_loaded(nodes.newest(), loaded)


def test_a_damaged_version_is_fetched_from_the_other_copy(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    nodes.step(1)
    nodes.step(2)
    flip(nodes, rank=1, step=2)
    assert_loaded(nodes.newest(), 2)


def test_if_both_copies_are_damaged_the_version_before_is_loaded(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    nodes.step(1)
    nodes.step(2)
    flip(nodes, rank=1, step=2)
    for slot in nodes.servers[0]._slots():
        if slot.head.serial == 2:
            slot.mapped(0)[HEAD_BYTES] ^= 1
    assert_loaded(nodes.newest(), 1)


def test_a_partner_that_is_gone_is_a_lost_rank(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    nodes.step(1)
    nodes.slots[0]._partner._connection._peer.shutdown(2)  # type: ignore[union-attr]
    with pytest.raises(LostRankError, match=r"the agent of rank 1 at \S+ keeps no copy of the state of rank 0"):
        store(nodes.slots[0], 2)


def damage_in_transit(monkeypatch: pytest.MonkeyPatch, *, times: int) -> None:
    """Let so many copies arrive with another hash than they were sent with."""
    damages = iter(range(times))
    holds = SlotFile.holds
    monkeypatch.setattr(SlotFile, "holds", lambda slot, head: next(damages, None) is None and holds(slot, head))


def test_a_copy_that_is_damaged_on_its_way_is_sent_again(
    make: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = make(2)
    nodes.step(1)
    damage_in_transit(monkeypatch, times=1)
    nodes.step(2)
    nodes.lose(0)
    assert_loaded(nodes.newest(), 2)


def test_a_copy_that_always_arrives_damaged_is_no_lack_of_memory(
    make: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = make(2)
    damage_in_transit(monkeypatch, times=2)
    with pytest.raises(TrainingError, match=r"arrived damaged twice\. Test the memory and the network of both nodes"):
        nodes.step(1)


def flip(nodes: Nodes, *, rank: int, step: int) -> None:
    """Flip one bit of a stored version."""
    for path in nodes.paths(rank):
        if SlotFile(str(path)).head.serial == step:
            with path.open("r+b") as file:
                file.seek(HEAD_BYTES)
                byte = file.read(1)[0]
                file.seek(HEAD_BYTES)
                file.write(bytes([byte ^ 1]))
                os.fsync(file.fileno())


@pytest.mark.parametrize("generation", [1, 2])
def test_a_job_on_one_node_is_refused_at_its_start_but_goes_on_after_a_loss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, generation: int
) -> None:
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        path.touch()
    member = SimpleNamespace(
        generation=generation,
        collecting=nullcontext,
        slots=[str(path) for path in paths],
        idle_addresses=[],
        partner_address=PartnerAddress("127.0.0.1", 1, ""),
        others=[],
    )
    monkeypatch.setattr(partner_module, "gather_objects", lambda value: [value, value])
    ranks: Any = SimpleNamespace(rank=0, world_size=2, device=torch.device("cpu"))
    starting = ConfigError if generation == 1 else None
    with pytest.raises(starting, match=r"set recover\.copies to node") if starting else nullcontext():
        InJobRecovery(cast("Any", member), ranks, share=Share(0, 1), copy_every=1, partner_every=1).close()
