"""The state from which a run continues after the loss of a rank, and the event that reports it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from txl_dist.artifacts import checkpoint_folder
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.errors import CheckpointError
from txl_dist.train import start
from txl_dist.train.checkpoint.read import Choice
from txl_dist.train.checkpoint.recovery import Recovery
from txl_dist.train.checkpoint.rewind import began_text
from txl_dist.train.loop import TrainingRun
from txl_dist.train.run_plan import RunPlan

PHASES = [SimpleNamespace(context=SimpleNamespace(steps=steps)) for steps in (range(12), range(12, 24))]


def continued(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *,
    stored: int | None,
    saved: int | None = None,
    damaged: int = 0,
    begins_phase: bool = False,
) -> tuple[int | None, int | None, int]:
    """Return (step of the copies or None, step of the checkpoint or None, number of the phase) of the choice.

    `stored` and `saved` are the steps of the newest copies and of the newest whole checkpoint, or None. `damaged` is
    the step of a damaged checkpoint. `begins_phase` says that the copies are of the beginning of a phase.
    """
    for step in filter(None, (saved, damaged)):
        checkpoint_folder(folder, step).mkdir(parents=True)
    choice = Choice(cast("Any", None if saved is None else SimpleNamespace(step=saved)), [])
    monkeypatch.setattr(start, "choose_together", lambda run_dir, resume, *, ranks: choice)
    monkeypatch.setattr(start, "run_on_rank0", lambda action: action())
    nothing: Any = None
    plan = RunPlan(nothing, folder, nothing, cast("Any", tuple(PHASES)), 0, nothing)
    copies = None if stored is None else SimpleNamespace(step=stored, begins_phase=begins_phase)
    recovery = SimpleNamespace(take_stored=lambda: copies)
    state, chosen, stage = start._choose_state(plan, cast("Any", recovery), None, resume="auto", is_start=True)
    checkpoint = None if chosen.saved is None else chosen.saved.step
    return None if state is None else state.step, checkpoint, PHASES.index(cast("Any", stage))


@pytest.mark.parametrize(("step", "phase"), [(1, 0), (11, 0), (12, 0), (13, 1), (24, 1)])
def test_no_stored_step_is_repeated_also_not_the_last_one_of_a_phase(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int, phase: int
) -> None:
    assert continued(monkeypatch, tmp_path, stored=step, saved=10 if step > 10 else None) == (step, None, phase)


def test_a_phase_whose_beginning_is_stored_begins_again_without_the_phase_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert continued(monkeypatch, tmp_path, stored=12, saved=12, begins_phase=True) == (12, None, 1)


def test_without_copies_the_run_continues_from_its_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert continued(monkeypatch, tmp_path, stored=None, saved=12) == (None, 12, 1)
    assert continued(monkeypatch, tmp_path, stored=None) == (None, None, 0)


@pytest.mark.parametrize(("step", "phase"), [(11, 0), (12, 1), (14, 1)])
def test_a_checkpoint_that_is_newer_than_the_copies_takes_their_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int, phase: int
) -> None:
    """Copies may be rarer than checkpoints: those on other nodes, by `recover.partner_every`."""
    assert continued(monkeypatch, tmp_path, stored=10, saved=step) == (None, step, phase)


def test_a_newer_checkpoint_that_is_damaged_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert continued(monkeypatch, tmp_path, stored=10, saved=8, damaged=11) == (10, None, 0)


def test_copies_are_used_if_every_checkpoint_is_damaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(run_dir: Path, resume: str, *, ranks: object) -> Choice:
        raise CheckpointError("all checkpoints are damaged")

    checkpoint_folder(tmp_path, 11).mkdir(parents=True)
    monkeypatch.setattr(start, "choose_together", refuse)
    monkeypatch.setattr(start, "run_on_rank0", lambda action: action())
    none: Any = None
    plan = RunPlan(none, tmp_path, none, cast("Any", tuple(PHASES)), 0, none)
    for stored in (SimpleNamespace(step=10, begins_phase=False), None):
        recovery: Any = SimpleNamespace(take_stored=lambda stored=stored: stored)
        if stored:
            assert start._choose_state(plan, recovery, None, resume="auto", is_start=True)[0] is stored
            continue
        with pytest.raises(CheckpointError):
            start._choose_state(plan, recovery, None, resume="auto", is_start=True)


def test_a_damaged_checkpoint_of_a_later_step_keeps_no_later_save_from_being_made(tmp_path: Path) -> None:
    for step in (8, 11):
        checkpoint_folder(tmp_path, step).mkdir(parents=True)
    corpora = SimpleNamespace(first=SimpleNamespace(tokenizer=SimpleNamespace(to_json=str)), first_kind="valid")
    context: Any = SimpleNamespace(run_dir=tmp_path, corpora=corpora)
    assert start._restart(context, step=10, stream=cast("Any", None)).newest == checkpoint_folder(tmp_path, 8)
    assert not checkpoint_folder(tmp_path, 11).exists()


def nothing(*_: object, **__: object) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("max_steps", "is_ended", "events"),
    [(12, False, ["recovered", "done"]), (24, False, ["recovered", "phase"]), (24, True, ["recovered"])],
)
def test_a_recovery_after_the_last_step_of_a_phase_is_reported_before_the_phase_ends(
    monkeypatch: pytest.MonkeyPatch, max_steps: int, is_ended: bool, events: list[str]
) -> None:
    """The event belongs to the phase whose last step the recovery has restored. An end that the records have is not
    written again."""
    run: Any = object.__new__(TrainingRun)
    for name in ("_is_best_to_keep", "_observe", "_repeat_validation", "_start_callbacks", "_report_clipping"):
        monkeypatch.setattr(TrainingRun, name, nothing)
    monkeypatch.setattr(TrainingRun, "_first_state", lambda self: SimpleNamespace(step=12))
    written: list[str] = []
    run.reporter = SimpleNamespace(write=lambda kind, record: written.append(record["event"]), close=lambda: None)
    run.start = SimpleNamespace(
        step=12,
        stored=True,
        origin="copies",
        is_inside_phase=True,
        lacks_saved=False,
        is_sampled=False,
        is_ended=is_ended,
    )
    run.recovery = Recovery()
    run.recovery.mark_step = lambda step, *, continued_from: {"why": "SIGKILL"}
    run.saving = SimpleNamespace(
        is_lacking=lambda step, since: False, finish_last=nothing, finish_mirror=nothing, abandon=lambda: None
    )
    run._began = began_text(0, StreamState(0, ()))
    run.observer = SimpleNamespace(should_evaluate=lambda step: False)
    run.evaluated, run.engine = {}, None
    run.stopped, run.last_step, run.max_steps = False, 12, max_steps
    run.go()
    assert written == events
