"""The engine is closed at the end of a phase and after errors, but not while a GPU may wait for a lost rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from txl_dist.errors import ConfigError, LostRankError
from txl_dist.train.start import _closing


@pytest.mark.parametrize(
    ("error", "device", "has_recovery", "expected"),
    [
        (None, "cuda", False, ["close"]),
        (RuntimeError(), "cpu", False, ["close"]),
        (ConfigError(), "cuda", False, ["close"]),  # raised on all ranks
        (RuntimeError(), "cuda", False, []),
        (LostRankError(), "cuda", False, []),
        (LostRankError(), "cuda", True, ["cut", "close"]),
        (RuntimeError(), "cuda", True, ["cut", "close"]),
    ],
)
def test_on_a_gpu_the_engine_is_closed_after_a_loss_only_once_collectives_are_cut(
    error: Exception | None, device: str, has_recovery: bool, expected: list[str]
) -> None:
    done: list[str] = []
    engine: Any = SimpleNamespace(close=lambda: done.append("close"))
    member: Any = SimpleNamespace(cut=lambda: done.append("cut")) if has_recovery else None
    ranks: Any = SimpleNamespace(device=SimpleNamespace(type=device))
    if error is None:
        with _closing(engine, ranks, member):
            pass
    else:
        with pytest.raises(type(error)), _closing(engine, ranks, member):
            raise error
    assert done == expected
