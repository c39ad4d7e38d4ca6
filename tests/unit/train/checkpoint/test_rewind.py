"""To which checkpoint a run returns after a spike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from txl_dist.train.checkpoint import rewind


@pytest.mark.parametrize(("first_bad", "expected"), [(100, None), (101, 100), (131, 120)])
def test_a_rewind_stays_in_its_phase_because_a_resume_would_take_the_settings_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch, first_bad: int, expected: int | None
) -> None:
    checkpoints = [Path(f"step_{step:09d}") for step in (80, 100, 120, 140)]
    monkeypatch.setattr(rewind, "list_checkpoints", lambda run_dir: checkpoints)
    monkeypatch.setattr(rewind, "run_on_rank0", lambda function: function())
    monkeypatch.setattr(rewind, "examine_together", lambda path, ranks: SimpleNamespace(problems=[]))
    monkeypatch.setattr(rewind, "read_state", lambda path: SimpleNamespace(step=rewind.step_of(path)))
    stream = SimpleNamespace(advanced=lambda count: stream, with_skip=lambda begin, end: stream)
    monkeypatch.setattr(rewind, "stream_of", lambda *_, **__: stream)
    train = SimpleNamespace(step_len=8)
    context: Any = SimpleNamespace(run_dir=None, ranks=None, steps=range(100, 200), config=SimpleNamespace(train=train))
    state: Any = SimpleNamespace(stream=stream)
    found = rewind.find_rewind(context, state, first_bad=first_bad, began=(0, stream))  # type: ignore[arg-type]
    assert (found and found.saved.step) == expected
