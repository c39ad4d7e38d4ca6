"""Copies from a GPU into a slot: pinned memory, a stream of its own, and no version of aborted collectives.

No GPU is needed: fakes take the place of CUDA. They show the order of the calls, and not that CUDA accepts them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from txl_dist.distributed.recovery.slot_file import Version
from txl_dist.model.memory import Memory
from txl_dist.train.checkpoint.slot_copy import PinnedSlotCopy
from txl_dist.train.checkpoint.slots import Share, _lay_out, _Slot
from txl_dist.train.engine.partitions import PartitionPiece, PartitionState


class FakeCuda:
    """Calls of CUDA in their order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pinned: set[int] = set()
        self.code = 0

    def Event(self) -> Any:  # noqa: N802
        return SimpleNamespace(record=lambda: self.calls.append("mark"))

    def Stream(self) -> Any:  # noqa: N802
        self.calls.append("new stream")
        return SimpleNamespace(
            wait_event=lambda event: self.calls.append("wait for the mark"),
            synchronize=lambda: self.calls.append("wait for the copy"),
        )

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append("enter stream")
        yield
        self.calls.append("leave stream")

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        assert device.type == "cuda"
        yield

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self.pinned.remove)

    def _register(self, pointer: int, num_bytes: int, flags: int) -> int:
        if not self.code:
            self.pinned.add(pointer)
        return self.code


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("Event", "Stream", "stream", "device", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def slot_of(folder: Path, copy: PinnedSlotCopy) -> _Slot:
    path = folder / "slot"
    path.touch()
    return _Slot(str(path), copy=copy)


def write(slot: _Slot, copy: PinnedSlotCopy, serial: int, *, length: int = 5) -> None:
    weight = torch.full((length,), float(serial))
    state = PartitionState([PartitionPiece("a", 0, 0, length)], {"weight": weight}, 1.0)
    layout = _lay_out([state], [], Share(0, 1))
    slot.write(Version(serial, 1, 0), layout, [weight], b"{}", copy.mark(), lambda: None)


def test_a_copy_waits_for_the_work_before_it_and_runs_on_a_stream_of_its_own(tmp_path: Path, cuda: FakeCuda) -> None:
    copy = PinnedSlotCopy(torch.device("cuda", 1), is_void=lambda: False)
    slot = slot_of(tmp_path, copy)
    for serial in (2, 4):
        write(slot, copy, serial)
        assert slot.head.serial == serial
        assert slot.is_whole()
    steps = ["enter stream", "wait for the mark", "leave stream", "wait for the copy"]
    assert cuda.calls == ["mark", "new stream", *steps, "mark", *steps]


def test_a_memory_is_copied_on_the_device_before_a_later_step_overwrites_it() -> None:
    memory = Memory((torch.ones(2, 3, 4), torch.ones(2, 3, 4)), torch.zeros(2, 3, dtype=torch.int64))
    (kept,) = PinnedSlotCopy(torch.device("cuda", 0), is_void=lambda: False).unchanging([memory])
    for tensor in (*memory.hidden, memory.document_BM):
        tensor.fill_(7)
    assert all((hidden_BMD == 1).all() for hidden_BMD in kept.hidden)
    assert (kept.document_BM == 0).all()


def test_the_memory_of_a_slot_is_pinned_once_and_released_when_it_grows_or_closes(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    copy = PinnedSlotCopy(torch.device("cuda", 0), is_void=lambda: False)
    slot = slot_of(tmp_path, copy)
    write(slot, copy, 2)
    (first,) = cuda.pinned
    write(slot, copy, 4)
    assert cuda.pinned == {first}
    write(slot, copy, 6, length=100_000)
    assert len(cuda.pinned) == 1
    assert slot.is_whole()
    slot.close()
    assert cuda.pinned == set()


def test_a_copy_that_ends_after_a_newer_plan_never_becomes_a_version(tmp_path: Path, cuda: FakeCuda) -> None:
    """An abort leaves any values behind, and the plan comes before the abort."""
    is_void = [False]
    copy = PinnedSlotCopy(torch.device("cuda", 0), is_void=lambda: is_void[0])
    slot = slot_of(tmp_path, copy)
    write(slot, copy, 2)
    is_void[0] = True
    with pytest.raises(RuntimeError, match="a rank was lost"):
        write(slot, copy, 4)
    assert slot.head.serial == 0


def test_memory_that_cannot_be_pinned_is_an_error_of_the_copy(tmp_path: Path, cuda: FakeCuda) -> None:
    cuda.code = 2
    copy = PinnedSlotCopy(torch.device("cuda", 0), is_void=lambda: False)
    with pytest.raises(OSError, match=r"cannot pin the memory \(error 2\)"):
        write(slot_of(tmp_path, copy), copy, 2)
    assert os.path.exists(tmp_path / "slot")
