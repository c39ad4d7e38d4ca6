"""The cut on a GPU aborts each communicator once, within one group of NCCL. Fakes take the place of NCCL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

from txl_dist.errors import ConfigError
from txl_dist.train.engine import regroup
from txl_dist.train.engine.regroup import NcclCut, check_regroup, device_works, new_cut, set_nccl_variables
from txl_dist.train.monitoring import member


class FakeGroup:
    """A process group, with a communicator of NCCL or without."""

    def __init__(self, name: str, calls: list[str], *, on_gpu: bool = True) -> None:
        self._name, self._calls, self._on_gpu = name, calls, on_gpu

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        if not self._on_gpu:
            raise RuntimeError("No backend type associated with device type cuda")

        def note(what: str) -> Any:
            return lambda: self._calls.append(f"{what} {self._name}")

        return SimpleNamespace(abort=note("abort"), _group_start=note("start"), _group_end=note("end"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    names = {FakeGroup(name, calls, on_gpu=name != "host"): name for name in ("0", "host", "1")}
    monkeypatch.setattr(torch_dist.distributed_c10d, "_world", SimpleNamespace(pg_names=names))
    return calls


def test_all_communicators_are_aborted_once_the_newest_first(calls: list[str]) -> None:
    cut = NcclCut()
    assert cut.cut() == 2
    assert calls == ["start 0", "abort 1", "abort 0", "end 0"]
    assert cut.cut() == 0
    assert len(calls) == 4


def test_a_group_that_is_made_after_the_first_cut_is_aborted_too(calls: list[str]) -> None:
    cut = NcclCut()
    cut.cut()
    late = FakeGroup("2", calls)
    torch_dist.distributed_c10d._world.pg_names[late] = "2"  # type: ignore[index]
    assert cut.cut() == 1
    assert calls[4:] == ["start 2", "abort 2", "end 2"]


def test_the_kind_of_cut_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(new_cut(), NcclCut)
    monkeypatch.setattr(regroup, "uses_gpu", lambda: True)
    assert isinstance(new_cut(), NcclCut)


def test_a_torch_without_the_names_of_nccl_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regroup, "_GPU_NAMES", (("torch.distributed", "ProcessGroupNCCL.no_such_abort"),))
    check_regroup()
    with pytest.raises(ConfigError, match=r"torch \S+ has no torch.distributed.ProcessGroupNCCL.no_such_abort"):
        check_regroup(on_gpu=True)


def test_the_variables_of_nccl_are_set_unless_the_user_has_set_them() -> None:
    environment = {"NCCL_NVLS_ENABLE": "1"}
    set_nccl_variables(environment)
    assert environment["NCCL_NVLS_ENABLE"] == "1"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_a_device_that_does_not_work_after_an_abort_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_works()
    monkeypatch.setattr(regroup, "uses_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def fail() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert device_works()  # a replacement has not begun to use its device
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not device_works()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert device_works()


def test_recovery_on_a_gpu_is_refused_unless_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "uses_gpu", lambda: True)
    monkeypatch.setattr(member, "set_nccl_variables", lambda environment: None)
    with pytest.raises(ConfigError, match=r"has run on CPUs only so far.*recover\.allow_gpu"):
        member.preload(allow_gpu=False, on_loss="stop")
    with pytest.raises(ConfigError, match=r"recover\.on_loss=shrink works only on CPUs.*Set it to stop or wait"):
        member.preload(allow_gpu=True, on_loss="shrink")
    monkeypatch.setattr(member, "import_deepspeed", lambda: None)
    monkeypatch.setattr(member, "_MODULES", ())
    monkeypatch.setattr(member, "check_regroup", lambda *, on_gpu: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="an import has started CUDA"):
        member.preload(allow_gpu=True, on_loss="stop")
