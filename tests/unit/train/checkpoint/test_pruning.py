"""A checkpoint can be read while its run continues and removes old checkpoints."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import golden_at
from txl_dist.artifacts import checkpoint_folder, list_checkpoints, step_of
from txl_dist.cli.main import main
from txl_dist.console.logging import logger
from txl_dist.convert import export
from txl_dist.convert.export import read_trained
from txl_dist.errors import CheckpointError
from txl_dist.train.checkpoint.manager import prune_checkpoints
from txl_dist.train.checkpoint.read import choose_checkpoint
from txl_dist.train.checkpoint.validate import read_state


def save_and_prune(run: Path, step: int) -> None:
    """What a run with keep_last = 1 does."""
    newest = golden_at(run, step)
    for folder in prune_checkpoints(run, keep={step}, newest=newest):
        shutil.rmtree(folder)


def steps_of(run: Path) -> list[int]:
    return [step_of(folder) for folder in list_checkpoints(run)]


@pytest.mark.parametrize("as_folder", [False, True])
def test_what_is_being_read_stays_until_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_folder: bool
) -> None:
    first = golden_at(tmp_path, 1)
    consolidated = export.consolidated_weights

    def prune_first(folder: Path, **named: Any) -> Any:
        save_and_prune(tmp_path, 2)
        return consolidated(folder, **named)

    monkeypatch.setattr(export, "consolidated_weights", prune_first)
    assert read_trained(first if as_folder else tmp_path).package.source["step"] == 1
    assert steps_of(tmp_path) == [1, 2]
    monkeypatch.undo()
    save_and_prune(tmp_path, 3)
    assert steps_of(tmp_path) == [3]


@pytest.mark.parametrize("moment", ["checkpoint_problems", "consolidated_weights"])
def test_where_a_checkpoint_vanishes_while_it_is_read_the_next_newest_is_taken_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    golden_at(tmp_path, 1)
    original, steps = getattr(export, moment), [2, 3]

    def prune_first(folder: Path, **named: Any) -> Any:
        if steps:
            save_and_prune(tmp_path, steps.pop(0))
        return original(folder, **named)

    monkeypatch.setattr(export, moment, prune_first)
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # a file system without locks
    monkeypatch.setattr(logger, "propagate", True)
    assert read_trained(tmp_path).package.source["step"] == 3
    assert "skipped a damaged" not in caplog.text
    assert steps_of(tmp_path) == [3]


def test_an_export_of_a_run_that_prunes_meanwhile_is_of_the_checkpoint_that_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, consolidated = golden_at(tmp_path / "run", 1), export.consolidated_weights

    def prune_first(folder: Path, **named: Any) -> Any:
        save_and_prune(tmp_path / "run", 2)
        return consolidated(folder, **named)

    monkeypatch.setattr(export, "consolidated_weights", prune_first)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "bundle")]) == 0
    assert f"written from {first}; largest difference" in capsys.readouterr().out


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_with_the_damage(tmp_path: Path) -> None:
    (golden_at(tmp_path, 1) / "state.json").write_text("torn")
    with pytest.raises(CheckpointError, match=r"has no undamaged checkpoint \(step_000000001: state.json has 4 bytes"):
        read_trained(tmp_path)


@pytest.mark.parametrize("with_link", [False, True])
def test_what_is_named_like_a_checkpoint_and_is_no_folder_is_a_damaged_one_for_all_who_look(
    tmp_path: Path, with_link: bool
) -> None:
    stray = checkpoint_folder(tmp_path, 2)
    stray.parent.mkdir()
    stray.symlink_to("nowhere") if with_link else stray.touch()
    with pytest.raises(CheckpointError, match=r"has no undamaged checkpoint \(step_000000002: "):
        read_trained(tmp_path)
    with pytest.raises(CheckpointError, match=r"its only checkpoint is damaged \(step_000000002: "):
        choose_checkpoint(tmp_path, "auto")
    first = golden_at(tmp_path, 1)
    assert read_trained(tmp_path).folder == first
    assert choose_checkpoint(tmp_path, "auto").saved == read_state(first)
