"""When recovery copies the state of a rank, and when it checks that the copies fit."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.unit.train.checkpoint.test_slots import engine_of, state_of
from txl_dist.errors import ConfigError
from txl_dist.train.checkpoint import recovery as recovery_file
from txl_dist.train.checkpoint import slots
from txl_dist.train.checkpoint.recovery import InJobRecovery
from txl_dist.train.checkpoint.slots import Share


def recovery_in(folder: Path, *, generation: int = 1, copy_every: int = 1) -> InJobRecovery:
    """Return the recovery of the only rank of a job."""
    paths = [folder / str(number) for number in range(3)]
    for path in paths:
        path.touch()
    place = {"generation": generation, "partner_address": None, "others": [], "collecting": nullcontext}
    member = SimpleNamespace(slots=[str(path) for path in paths], **place)
    ranks = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    share = Share(0, 1)
    return InJobRecovery(cast("Any", member), cast("Any", ranks), share=share, copy_every=copy_every, partner_every=1)


def stored_steps(
    folder: Path, steps: list[int], *, monkeypatch: pytest.MonkeyPatch, copy_every: int, phase_begins: int = 0
) -> list[int]:
    """Return those of the steps after which the state was copied. A phase begins after step `phase_begins`."""
    recovery = recovery_in(folder, copy_every=copy_every)
    stored: list[int] = []
    recovery._slots.store = lambda state, *_, **__: stored.append(state.step)  # type: ignore[method-assign]
    monkeypatch.setattr(recovery_file, "barrier", lambda: None)
    for step in steps:
        state = cast("Any", SimpleNamespace(step=step))
        store = recovery.store_beginning if step == phase_begins else recovery.store
        store(state, cast("Any", None), {})
    recovery.close()
    return stored


def test_the_state_is_copied_after_each_nth_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert stored_steps(tmp_path, list(range(1, 10)), copy_every=1, monkeypatch=monkeypatch) == list(range(1, 10))
    assert stored_steps(tmp_path, list(range(1, 10)), copy_every=4, monkeypatch=monkeypatch) == [4, 8]


def test_the_first_step_after_a_rewind_is_copied_because_the_copies_are_of_steps_that_were_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert stored_steps(tmp_path, [7, 8, 9, 10, 6, 7, 8], copy_every=4, monkeypatch=monkeypatch) == [8, 6, 8]


def test_a_rewind_before_the_first_copy_after_a_recovery_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slots, "gather_objects", lambda value: [value])
    before = recovery_in(tmp_path, copy_every=4)
    before.store(state_of(8), engine_of(8), {})
    before.close()
    recovery = recovery_in(tmp_path, generation=2, copy_every=4)
    assert recovery.take_stored() is not None
    recovery.store(state_of(6), engine_of(6), {})
    recovery.wait()
    assert max(slot.head.serial for slot in recovery._slots._slots) == 2
    recovery.close()


def test_the_state_with_which_a_phase_begins_is_copied_after_any_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert stored_steps(tmp_path, [6, 7], copy_every=4, phase_begins=6, monkeypatch=monkeypatch) == [6]


@pytest.mark.parametrize("generation", [1, 2])
def test_a_job_that_has_made_a_step_is_not_refused_because_its_own_slots_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, generation: int
) -> None:
    monkeypatch.setattr(slots, "gather_objects", lambda value: [value])
    recovery = recovery_in(tmp_path)
    recovery.check_room(state_of(0), engine_of(0), with_average=False)
    recovery.store(state_of(1), engine_of(1), {})
    recovery.wait()
    if generation == 2:
        recovery = recovery_in(tmp_path)
        assert recovery._slots.newest_common() is not None
    monkeypatch.setattr(slots, "host_room_bytes", lambda: 0.0)
    recovery.check_room(state_of(1), engine_of(1), with_average=False)
    recovery.close()


def test_a_job_that_lost_a_rank_before_its_first_step_is_still_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slots, "gather_objects", lambda value: [value])
    monkeypatch.setattr(slots, "host_room_bytes", lambda: 0.0)
    recovery = recovery_in(tmp_path)
    assert recovery._slots.newest_common() is None
    with pytest.raises(ConfigError, match=r"recover\.spares"):
        recovery.check_room(state_of(0), engine_of(0), with_average=False)
    recovery.close()
