"""The slots of a rank's state: what is stored is what is read, and a half-written version is never chosen."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.open_files import open_files
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.distributed.recovery.slot_file import SlotFile
from txl_dist.errors import CheckpointError, ConfigError, TrainingError
from txl_dist.model.memory import Memory
from txl_dist.train.checkpoint import slots as slots_module
from txl_dist.train.checkpoint.slots import Share, StateSlots
from txl_dist.train.engine.partitions import PartitionPiece, PartitionState
from txl_dist.train.stability import Health
from txl_dist.train.state import TrainState


class Ranks:
    """The ranks of a job as threads of one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, world_size: int, *, shares: bool = False) -> None:
        self.paths = [[str(folder / f"{rank}.{slot}") for slot in range(2)] for rank in range(world_size)]
        for path in (path for paths in self.paths for path in paths):
            Path(path).touch()
        self.slots: list[StateSlots] = []
        self._monkeypatch = monkeypatch
        self.begin(world_size, shares=shares)

    def begin(self, world_size: int, *, shares: bool = False) -> None:
        """Begin a generation of so many ranks. The first one gets the slots of ranks that are left."""
        for slots in self.slots:
            slots.close()
        count = world_size if shares else 1
        left = [path for paths in self.paths[world_size:] for path in paths]
        self.slots = []
        for rank, paths in enumerate(self.paths[:world_size]):
            share, others = Share(rank % count, count), left if rank == 0 else []
            self.slots.append(StateSlots(paths, share=share, rank=rank, world_size=world_size, others=others))

    def newest_of_all(self) -> list[Any]:
        """What `newest_common` returns on each rank."""
        count = len(self.slots)
        barrier = threading.Barrier(count, timeout=20)
        given: list[Any] = [None] * count
        here = threading.local()

        def gather(value: Any) -> list[Any]:
            given[here.rank] = value
            barrier.wait()
            values = list(given)
            barrier.wait()
            return values

        def newest(rank: int) -> Any:
            here.rank = rank
            return self.slots[rank].newest_common()

        self._monkeypatch.setattr(slots_module, "gather_objects", gather)
        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(newest, range(count)))

    def newest(self, rank: int) -> Any:
        """What `newest_common` returns on one rank."""
        return self.newest_of_all()[rank]


STREAM = StreamState(1, ())


def state_of(step: int, rank: int = 0) -> TrainState:
    hidden_BMD = torch.full((2, 3, 4), float(10 * step + rank))
    memory = Memory((hidden_BMD, hidden_BMD.bfloat16()), torch.full((2, 3), step))
    return TrainState(step=step, tokens_seen=7 * step, health=Health(losses=(0.1, step / 3)), stream=STREAM,
                      memories=(memory, memory))  # fmt: skip


def engine_of(step: int, *, start: int = 0, length: int = 10) -> Any:
    values = torch.arange(start, start + length, dtype=torch.float32)
    piece = PartitionPiece("w", start, offset=0, length=length)
    state = PartitionState([piece], {"weight": values + step, "exp_avg": values - step}, float(step))
    loaded: dict[str, Any] = {}
    return SimpleNamespace(
        partition_states=lambda: [state],
        loss_scale=lambda: {"cur_scale": 2.0},
        load=lambda source, *, loss_scale: loaded.update(source=source, loss_scale=loss_scale),
        loaded=loaded,
    )


def store(slots: StateSlots, step: int, *, start: int = 0, length: int = 10, rank: int = 0) -> None:
    slots.store(state_of(step, rank), engine_of(step, start=start, length=length), {})
    slots.wait()


def test_what_is_stored_is_read_bit_for_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 1)
    store(ranks.slots[0], 1)
    store(ranks.slots[0], 2)
    stored = ranks.newest(0)
    engine = engine_of(0)
    source = stored.source
    state = stored.load(engine)
    assert (state.step, state.tokens_seen, state.health) == (2, 14, state_of(2).health)
    assert torch.equal(source.read("exp_avg", "w", start=3, length=4), torch.arange(3.0, 7.0) - 2)
    assert source.kinds_of("w") == ["weight", "exp_avg"]
    assert source.step_of("w") == 2.0
    assert engine.loaded["loss_scale"] == {"cur_scale": 2.0}
    for memory, expected in zip(state.memories, state_of(2).memories, strict=True):
        for one, other in zip(
            (*memory.hidden, memory.document_BM), (*expected.hidden, expected.document_BM), strict=True
        ):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_the_newest_version_that_all_have_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 2)
    for step in (1, 2, 3):
        store(ranks.slots[0], step, rank=0)
    for step in (1, 2):
        store(ranks.slots[1], step, rank=1)
    assert [ranks.newest(rank).step for rank in (0, 1)] == [2, 2]


def test_the_next_version_replaces_neither_the_one_chosen_nor_repeats_a_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank that had stored more than was chosen must not mix its old version with the new ones of others."""
    ranks = Ranks(monkeypatch, tmp_path, 2)
    for step in (1, 2, 3):
        store(ranks.slots[0], step)
    for step in (1, 2):
        store(ranks.slots[1], step)
    assert [ranks.newest(rank).step for rank in (0, 1)] == [2, 2]
    store(ranks.slots[1], 30)  # step 3 again, on another way
    assert [ranks.newest(rank).step for rank in (0, 1)] == [2, 2]
    for slots in ranks.slots:
        store(slots, 31)
    assert [ranks.newest(rank).step for rank in (0, 1)] == [31, 31]


@pytest.mark.parametrize("place", [100, -20])
def test_a_version_with_a_wrong_bit_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: int) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 1)
    store(ranks.slots[0], 1)
    store(ranks.slots[0], 2)
    path = max((Path(path) for path in ranks.paths[0]), key=lambda path: SlotFile(str(path)).head.serial)
    size = SlotFile(str(path)).head.num_bytes
    content = bytearray(path.read_bytes())
    content[place if place > 0 else size + place] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    assert ranks.newest(0).step == 1


def test_a_version_that_is_half_written_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 1)
    store(ranks.slots[0], 1)
    store(ranks.slots[0], 2)

    def stop(phase: str, *, step: int) -> str:
        if phase == "half-stored":
            raise RuntimeError("killed here")
        return ""

    monkeypatch.setattr(slots_module, "failpoint", stop)
    with pytest.raises(RuntimeError, match=r"^killed here$"):  # and not a lack of memory
        store(ranks.slots[0], 3)
    assert ranks.newest(0).step == 2


def test_at_stage_0_each_rank_stores_a_share_and_all_read_the_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 3, shares=True)
    for slots in ranks.slots:
        store(slots, 1)
    read = ranks.newest(2).source.read("weight", "w", start=0, length=10)
    assert torch.equal(read, torch.arange(10.0) + 1)


def test_a_share_that_ends_within_a_parameter_is_read_with_the_shares_of_the_other_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A flat tensor with three pieces of parameters, and values between them that belong to none."""
    pieces = [PartitionPiece("a", 0, 1, 4), PartitionPiece("b", 5, 6, 7), PartitionPiece("c", 0, 13, 2)]
    flat = torch.arange(100.0, 116.0)
    engine = engine_of(1)
    engine.partition_states = lambda: [PartitionState(pieces, {"weight": flat, "exp_avg": -flat}, 1.0)]
    ranks = Ranks(monkeypatch, tmp_path, 3, shares=True)
    for slots in ranks.slots:
        slots.store(state_of(1), engine, {})
        slots.wait()
    source = ranks.newest(1).source
    for name, start, offset, length in pieces:
        expected = flat[offset : offset + length]
        assert torch.equal(source.read("weight", name, start=start, length=length), expected)
        assert torch.equal(source.read("exp_avg", name, start=start, length=length), -expected)


def test_a_value_that_no_rank_of_the_node_has_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 1)
    store(ranks.slots[0], 1)
    with pytest.raises(CheckpointError, match="7 of 8 values of w"):
        ranks.newest(0).source.read("weight", "w", start=3, length=8)


def test_without_a_version_of_all_ranks_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 2)
    store(ranks.slots[0], 1)
    assert ranks.newest(0) is None


@pytest.mark.parametrize("num_left", [2, 1])
def test_versions_with_the_same_number_of_different_steps_are_never_taken_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_left: int
) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 2)
    for step_of_rank_1 in (1, 3):
        store(ranks.slots[0], min(step_of_rank_1, 2), length=6)
        store(ranks.slots[1], step_of_rank_1, start=6, length=6)
    ranks.begin(num_left)
    assert [one.step for one in ranks.newest_of_all()] == [1] * num_left


def store_all(ranks: Ranks, step: int) -> None:
    """All ranks store a step: 12 values, and the memories of their lanes."""
    length = 12 // len(ranks.slots)
    for rank, slots in enumerate(ranks.slots):
        store(slots, step, start=rank * length, length=length, rank=rank)


def hidden_of(stored: Any) -> list[float]:
    return [memory.hidden[0].flatten()[0].item() for memory in stored.memories]


def test_fewer_ranks_read_all_weights_and_divide_the_memories_in_the_order_of_the_lanes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 4)
    store_all(ranks, 1)
    store_all(ranks, 2)
    ranks.begin(2)
    stored = ranks.newest_of_all()
    for one in stored:
        assert torch.equal(one.source.read("weight", "w", start=1, length=10), torch.arange(1.0, 11.0) + 2)
    assert [hidden_of(one) for one in stored] == [[20, 20, 21, 21], [22, 22, 23, 23]]


def test_slots_of_an_agent_that_ends_after_they_were_opened_are_still_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 4)
    store_all(ranks, 1)
    ranks.begin(2)
    for path in (path for paths in ranks.paths[2:] for path in paths):
        Path(path).unlink()
    assert [hidden_of(one) for one in ranks.newest_of_all()] == [[10, 10, 11, 11], [12, 12, 13, 13]]


def test_fewer_ranks_continue_the_damaged_documents_of_the_ranks_whose_lanes_they_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 4)
    for rank, slots in enumerate(ranks.slots):
        carried = {"skipped": [rank, [[f"shard {rank}", 7]], 1], "began": f"rank {rank}"}
        slots.store(state_of(1, rank), engine_of(1, start=3 * rank, length=3), carried)
        slots.wait()
    ranks.begin(2)
    assert [one.facts["carried"] for one in ranks.newest_of_all()] == [
        {"skipped": [1, [["shard 0", 7], ["shard 1", 7]], 2], "began": "rank 0"},
        {"skipped": [5, [["shard 2", 7], ["shard 3", 7]], 2], "began": "rank 2"},
    ]


def test_the_documents_of_a_rank_whose_lanes_are_divided_count_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 3)
    for rank, slots in enumerate(ranks.slots):
        carried = {"skipped": [10**rank, [[f"shard {rank}", 7]], 1]}
        slots.store(state_of(1, rank), engine_of(1, start=4 * rank, length=4), carried)
        slots.wait()
    ranks.begin(2)
    assert [one.facts["carried"]["skipped"] for one in ranks.newest_of_all()] == [
        [11, [["shard 0", 7], ["shard 1", 7]], 2],
        [100, [["shard 1", 7], ["shard 2", 7]], 1],
    ]


def test_after_a_shrink_the_old_version_is_valid_until_all_new_ranks_have_stored_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 4)
    store_all(ranks, 1)
    store_all(ranks, 2)
    ranks.begin(2)
    assert [one.step for one in ranks.newest_of_all()] == [2, 2]
    store(ranks.slots[0], 3, length=6)
    ranks.begin(2)
    stored = ranks.newest_of_all()
    assert [one.step for one in stored] == [2, 2]
    assert [hidden_of(one) for one in stored] == [[20, 20, 21, 21], [22, 22, 23, 23]]
    store_all(ranks, 30)
    ranks.begin(2)
    stored = ranks.newest_of_all()
    assert [one.step for one in stored] == [30, 30]
    assert [hidden_of(one) for one in stored] == [[300, 300], [301, 301]]


def test_ranks_whose_earlier_version_lacks_a_part_have_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 4)
    store_all(ranks, 1)
    del ranks.paths[3]  # its agent has ended
    ranks.begin(2)
    assert ranks.newest_of_all() == [None, None]


def test_slots_whose_agent_has_ended_are_missing_and_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An agent without a rank may end between the plan and the opening of its slots, or while they are read."""
    ranks = Ranks(monkeypatch, tmp_path, 4)
    store_all(ranks, 1)
    for path in ranks.paths[3]:
        Path(path).unlink()
    ranks.begin(2)
    for path in ranks.paths[2]:
        Path(path).unlink()
    assert ranks.newest_of_all() == [None, None]


def test_a_slot_grows_with_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 1)
    store(ranks.slots[0], 1)
    store(ranks.slots[0], 2, length=100_000)
    store(ranks.slots[0], 3, length=200_000)
    assert torch.equal(
        ranks.newest(0).source.read("weight", "w", start=199_990, length=10), torch.arange(199_990.0, 200_000.0) + 3
    )


def test_a_version_with_other_kinds_and_another_memory_than_the_last_is_read_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first version has no moments, and a memory may grow."""
    ranks = Ranks(monkeypatch, tmp_path, 1)
    first = engine_of(1)
    (state,) = first.partition_states()
    first.partition_states = lambda: [state._replace(values={"weight": state.values["weight"]})]
    ranks.slots[0].store(state_of(1), first, {})
    ranks.slots[0].wait()
    assert ranks.newest(0).source.kinds_of("w") == ["weight"]
    hidden_BMD = torch.arange(40.0).view(2, 5, 4)
    memory = Memory((hidden_BMD, hidden_BMD.bfloat16()), torch.full((2, 5), 2))
    ranks.slots[0].store(replace(state_of(2), memories=(memory,)), engine_of(2), {})
    ranks.slots[0].wait()
    stored = ranks.newest(0)
    assert torch.equal(stored.source.read("exp_avg", "w", start=0, length=10), torch.arange(10.0) - 2)
    assert len(stored.memories) == 1
    assert torch.equal(stored.memories[0].hidden[0], hidden_BMD)
    assert torch.equal(stored.memories[0].hidden[1], hidden_BMD.bfloat16())


def test_memory_that_is_missing_is_an_error_and_no_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 1)

    def no_room(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(TrainingError, match=r"Free host memory, or set recover.spares to 0"):
        store(ranks.slots[0], 1)


def test_copies_that_do_not_fit_are_refused_with_their_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 1)
    monkeypatch.setattr(slots_module, "gather_objects", lambda value: [value])
    ranks.slots[0].check_room(state_of(1), engine_of(1), with_average=False)
    monkeypatch.setattr(slots_module, "host_room_bytes", lambda: 1000.0)
    with pytest.raises(ConfigError, match=r"They need \S+ KiB on \S+, but 1 KiB are free\..*set recover\.spares to 0"):
        ranks.slots[0].check_room(state_of(1), engine_of(1), with_average=False)


def test_the_average_of_the_weights_counts_before_it_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 1)
    sizes: list[int] = []
    monkeypatch.setattr(slots_module, "gather_objects", lambda value: sizes.append(value.num_bytes) or [value])
    for with_average in (False, True):
        ranks.slots[0].check_room(state_of(1), engine_of(1, length=10), with_average=with_average)
    assert sizes[1] - sizes[0] == 4 * 10


@pytest.mark.parametrize("world_size", [2, 1])
def test_a_loaded_version_keeps_neither_memories_nor_slots_of_other_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world_size: int
) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 2)
    store_all(ranks, 1)
    ranks.begin(world_size)
    stored = ranks.newest(0)
    state = stored.load(SimpleNamespace(load=lambda source, *, loss_scale: None))
    memory = weakref.ref(state.memories[0].hidden[0])
    del state
    ranks.slots.clear()
    gc.collect()
    assert memory() is None
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert stored.step == 1


def test_a_rank_that_is_lost_while_others_read_leaves_no_descriptor_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 2)
    store_all(ranks, 1)
    ranks.begin(1)

    def gather(value: Any) -> list[Any]:
        if value is True:  # this rank has opened the slots of all ranks
            raise ConnectionError("another rank was lost")
        return [value]

    monkeypatch.setattr(slots_module, "gather_objects", gather)
    counts = []
    for _ in range(2):  # the first time also maps slots that stay open
        with pytest.raises(ConnectionError):
            ranks.slots[0].newest_common()
        counts.append(len(open_files(str(tmp_path))))
    assert counts[0] == counts[1]


def test_reading_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(monkeypatch, tmp_path, 2)
    for rank, slots in enumerate(ranks.slots):
        store(slots, 1, start=10 * rank)
    read = ranks.newest(0)
    for slots in ranks.slots:
        slots.close()
    assert read.source.read("weight", "w", start=0, length=1).tolist() == [1.0]
    del read, slots
    ranks.slots.clear()
    assert open_files(str(tmp_path)) == []
