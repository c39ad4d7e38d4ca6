"""An error of a rank itself is told from an error that the loss of another rank may have caused."""

import sys
import threading
import types
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as torch_dist

from tests.helpers.tiny import tiny_config
from txl_dist.distributed.recovery.seat import Seat
from txl_dist.distributed.recovery.verdicts import Loss
from txl_dist.errors import ConfigError, LostRankError, TrainingError
from txl_dist.train import start
from txl_dist.train.callbacks import Callbacks
from txl_dist.train.monitoring import member as member_module
from txl_dist.train.monitoring.member import Member
from txl_dist.train.monitoring.watchdog import is_in_collective, may_come_from_loss


def raised_in(module: str, error: Exception) -> Exception:
    """An error with a traceback through a function of this module."""
    place = types.ModuleType(module)
    exec("def collective(error):\n    raise error", place.__dict__)
    with pytest.raises(type(error)) as caught:
        place.collective(error)
    return caught.value


@pytest.mark.parametrize(
    ("module", "function", "is_waiting"),
    [
        ("torch.distributed.distributed_c10d", "all_reduce", True),
        ("deepspeed.runtime.zero.partition_parameters", "wait", True),
        ("deepspeed.runtime.zero.partition_parameters", "partition", False),
        ("txl_dist.train.loop", "wait", False),
    ],
)
def test_a_rank_is_in_a_collective_if_it_waits_for_a_handle_of_deepspeed(
    module: str, function: str, is_waiting: bool
) -> None:
    place = types.ModuleType(module)
    exec(f"def {function}(inner):\n    return inner()", place.__dict__)
    assert getattr(place, function)(lambda: is_in_collective(sys._getframe())) is is_waiting


def test_a_phase_that_ends_again_without_a_step_does_not_end_a_row_of_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(Member, "_tell", lambda self, message: told.append(message))
    member: Any = object.__new__(Member)
    member.generation, member._repeat_until, member._met_s = 2, 12, 0.0
    for step in (12, 13):
        loss = Loss(rank=1, host="a", pid=10, cause="SIGKILL", step=12, phase="start", notice_s=0.1)
        member.recovered = {"losses": [loss], "world_size": 2, "reached": 12, "began_s": 0.0}
        assert member.mark_step(step, continued_from=12) is not None
    assert [message["step"] for message in told] == [13]


def test_steps_are_reported_until_one_is_finished_that_no_lost_rank_had_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(Member, "_tell", lambda self, message: told.append(message))
    member: Any = object.__new__(Member)
    member.generation, member._repeat_until, member.recovered = 2, 12, None
    for step in range(10, 16):
        member.mark_step(step, continued_from=9)
    assert [message["step"] for message in told] == [10, 11, 12, 13]


def test_errors_of_collectives_and_networks_may_come_from_a_loss() -> None:
    for error in (
        raised_in("torch.distributed.distributed_c10d", ValueError("no reason")),
        raised_in("deepspeed.comm.comm", RuntimeError("no reason")),
        RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"),
        RuntimeError("NCCL communicator was aborted on rank 1"),
        torch_dist.DistNetworkError("no reason"),
        ConnectionResetError(),
    ):
        assert may_come_from_loss(error), error


def test_errors_of_the_ranks_own_code_do_not() -> None:
    for error in (
        raised_in("txl_dist.train.loop", RuntimeError("injected fault")),
        ConfigError("train.max_steps=0 must be positive. Raise it."),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 16 bytes"),
        IndexError("index 300 is out of bounds for dimension 0 with size 257"),
    ):
        assert not may_come_from_loss(error), error


def test_only_an_error_of_the_rank_itself_is_noted_as_the_end_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first generation loses the agent of another rank, and the second one ends with an error of this rank."""
    errors = [LostRankError("the agent of rank 1 keeps no copy"), ConfigError("train.max_steps=0 must be positive")]
    notes: list[str] = []

    def train(*_: object, **__: object) -> None:
        raise errors.pop(0)

    def note(text: str) -> None:
        notes.append(text)

    monkeypatch.setattr(start, "_train", train)
    monkeypatch.setattr(start, "note_in_file", note)
    monkeypatch.setattr(member_module, "note_in_file", note)
    monkeypatch.setattr(start, "distributed_context", lambda **_: nullcontext(types.SimpleNamespace(rank=0)))
    monkeypatch.setattr(start, "start_logging", lambda **_: None)
    monkeypatch.setattr(start, "check_ranks_alike", lambda config, *, code: None)
    monkeypatch.setattr(start, "gather_objects", lambda value: [value])
    monkeypatch.setattr(Member, "_is_caused_by_loss", lambda self, error: isinstance(error, LostRankError))
    for name in ("leave", "close", "limit", "open_store", "_tell"):
        monkeypatch.setattr(Member, name, lambda *_, **__: None)
    monkeypatch.setattr(Member, "collecting", lambda self: nullcontext())
    member: Any = object.__new__(Member)
    member.generation, member._is_ended, member._seat = 2, False, Seat("", 0, 0, [], [], {})
    member.has_opened = False
    config = tiny_config(run={"dir": str(tmp_path)})
    with pytest.raises(ConfigError):
        start._pretrain_with_recovery(
            config, member, cast("Callbacks", None), resume="auto", max_time_s=0.0, profile=range(0)
        )
    assert notes == ["the run ends: train.max_steps=0 must be positive"]


@pytest.mark.parametrize(
    ("resume", "has_opened", "then"),
    [("never", False, "never"), ("must", False, "must"), ("never", True, "auto"), ("must", True, "auto")],
)
def test_after_a_loss_the_word_resume_still_counts_unless_the_run_had_begun(
    resume: str, has_opened: bool, then: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[str] = []
    monkeypatch.setattr(start, "_train", lambda *_, resume: given.append(resume) or SimpleNamespace(exit_code=0))
    monkeypatch.setattr(start, "distributed_context", lambda **_: nullcontext(SimpleNamespace(rank=0)))
    for name in ("start_logging", "check_ranks_alike"):
        monkeypatch.setattr(start, name, lambda *_, **__: None)
    monkeypatch.setattr(start, "gather_objects", lambda value: [value])
    for name in ("leave", "close", "limit", "open_store", "share_coordinator"):
        monkeypatch.setattr(Member, name, lambda *_, **__: None)
    monkeypatch.setattr(Member, "collecting", lambda self: nullcontext())
    member: Any = object.__new__(Member)
    member.generation, member.has_opened, member._seat = 2, has_opened, Seat("", 0, 0, [], [], {})
    start._pretrain_with_recovery(
        tiny_config(run={"dir": str(tmp_path)}),
        member,
        cast("Callbacks", None),
        resume=resume,
        max_time_s=0.0,
        profile=range(0),
    )
    assert given == [then]


@pytest.mark.parametrize(
    ("cause", "waits"),
    [(RuntimeError("Connection closed by peer [127.0.0.1]:1234"), True), (ValueError("of the plugin itself"), False)],
)
def test_an_error_of_a_plugin_in_a_collective_may_come_from_a_loss(
    cause: Exception, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_s: list[float] = []
    member: Any = object.__new__(Member)
    member._cut = SimpleNamespace(cut=lambda: None)
    member._seat = Seat("", 0, 0, [], [], {}, silent_s=6.0)
    member._page = SimpleNamespace(read=lambda: SimpleNamespace(limit_s=60.0))
    member._condition = threading.Condition()
    monkeypatch.setattr(member._condition, "wait_for", lambda _, seconds: waited_s.append(seconds), raising=False)
    monkeypatch.setattr(Member, "beat", lambda self, phase: None)
    monkeypatch.setattr(Member, "_is_superseded", lambda self: True)
    error = TrainingError("the plugin's optimizer failed")
    error.__cause__ = cause
    assert member._is_caused_by_loss(error)
    assert bool(waited_s) == waits


def test_a_rank_that_waits_for_the_others_of_a_generation_can_count_as_frozen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a limit on its status page a rank counts as one that has not started."""
    calls: list[str] = []

    def leave(*_: object, **__: object) -> None:
        calls.append("leave")
        raise LostRankError("the job ends")

    monkeypatch.setattr(Member, "leave", leave)
    monkeypatch.setattr(Member, "limit", lambda self, limit_s: calls.append(f"limit {limit_s:g}"))
    monkeypatch.setattr(Member, "close", lambda self: None)
    member: Any = object.__new__(Member)
    member._seat = Seat("", 0, 0, [], [], {})
    config = tiny_config(run={"dir": str(tmp_path)}, engine={"start_timeout_s": 90})
    with pytest.raises(LostRankError):
        start._pretrain_with_recovery(
            config, member, cast("Callbacks", None), resume="auto", max_time_s=0.0, profile=range(0)
        )
    assert calls == ["limit 90", "leave"]
