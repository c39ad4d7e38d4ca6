"""A run folder belongs to the configuration that made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import golden_at
from txl_dist.artifacts import ArtifactKind, detect_artifact
from txl_dist.config.load import Config, config_from_dict, config_to_toml, load_config
from txl_dist.errors import ConfigError
from txl_dist.train.checkpoint.read import choose_checkpoint
from txl_dist.train.checkpoint.validate import read_state
from txl_dist.train.run_dir import (
    check_run_dir,
    open_run_dir,
    quarantine,
    read_run_history,
    refuse_frozen_changes,
)


def with_values(**sections: dict[str, Any]) -> Config:
    return config_from_dict(sections, source="test")


def test_a_new_directory_gets_the_resolved_configuration(tmp_path: Path) -> None:
    config = with_values(model={"width": 64})
    open_run_dir(tmp_path / "runs" / "new", config_to_toml(config))
    assert load_config(tmp_path / "runs" / "new" / "config.toml") == config
    (tmp_path / "empty").mkdir()
    open_run_dir(tmp_path / "empty", config_to_toml(config))
    assert load_config(tmp_path / "empty" / "config.toml") == config


def test_another_configuration_is_refused_with_the_differences_and_changes_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    open_run_dir(run_dir, config_to_toml(with_values(model={"width": 64, "cutoffs": [5]})))
    (run_dir / "DONE").write_text("7\n")
    before = (run_dir / "config.toml").read_bytes()
    with pytest.raises(ConfigError) as caught:
        check_run_dir(run_dir, with_values(model={"width": 32, "cutoffs": [6]}, checkpoint={"keep_last": 9}))
    message = str(caught.value)
    assert f"{run_dir} was made by another configuration" in message
    assert "  model.width: 64 -> 32\n" in message
    assert "  model.cutoffs: [5] -> [6]\n" in message
    assert "keep_last" not in message, "a free change is not an obstacle"
    assert "--run.dir" in message
    assert (run_dir / "config.toml").read_bytes() == before
    assert (run_dir / "DONE").exists()


def test_free_changes_pass_silently_and_are_written_down(tmp_path: Path) -> None:
    open_run_dir(tmp_path / "run", config_to_toml(Config()))
    changed = with_values(checkpoint={"every_steps": 7}, metrics={"log_every_steps": 3}, data={"path": "moved"})
    check_run_dir(tmp_path / "run", changed)
    open_run_dir(tmp_path / "run", config_to_toml(changed))
    assert load_config(tmp_path / "run" / "config.toml") == changed
    assert refuse_frozen_changes(Config(), changed, made="it") == []


def test_changes_of_the_optimizer_pass_with_a_sentence_that_names_both_values(tmp_path: Path) -> None:
    old, new = with_values(optim={"lr": 0.5}), with_values(optim={"lr": 0.25})
    open_run_dir(tmp_path / "run", config_to_toml(old))
    check_run_dir(tmp_path / "run", new)
    assert refuse_frozen_changes(old, new, made="it") == ["optim.lr changed from 0.5 to 0.25"]


def test_what_a_crashed_save_left_behind_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in ("step_000000005", "step_000000010.tmp-1a2b3c4d", "step_000000003.damaged-1"):
        (checkpoints / name / "engine").mkdir(parents=True)
    open_run_dir(tmp_path / "run", config_to_toml(Config()))
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_000000003.damaged-1", "step_000000005"]


def test_continuing_a_run_takes_its_done_mark_away(tmp_path: Path) -> None:
    open_run_dir(tmp_path / "run", config_to_toml(Config()))
    (tmp_path / "run" / "DONE").write_text("7\n")
    open_run_dir(tmp_path / "run", config_to_toml(Config()))
    assert not (tmp_path / "run" / "DONE").exists()


def test_a_foreign_folder_with_content_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("meow")
    with pytest.raises(ConfigError, match="is not empty and is not a run directory"):
        check_run_dir(tmp_path / "photos", Config())
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_a_run_directory_whose_configuration_is_damaged_is_refused_by_its_name(tmp_path: Path) -> None:
    open_run_dir(tmp_path / "run", config_to_toml(Config()))
    (tmp_path / "run" / "config.toml").write_text("[model\nwidth")
    with pytest.raises(ConfigError, match=r"config\.toml is not valid TOML"):
        check_run_dir(tmp_path / "run", Config())


def test_a_directory_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"cannot use the run directory .* choose another --run\.dir"):
            open_run_dir(path, config_to_toml(Config()))


def test_what_a_run_left_that_ended_before_it_began_is_no_obstacle(tmp_path: Path) -> None:
    for name in ("RUN.lock", "RUN.lock.5f1c.rank0", "STOP", "config.toml.tmp"):
        (tmp_path / name).touch()
    check_run_dir(tmp_path, Config())
    open_run_dir(tmp_path, config_to_toml(Config()))
    assert not list(tmp_path.glob("RUN.lock.*"))
    (tmp_path / "config.toml").unlink()
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="is not a run directory"):
        check_run_dir(tmp_path, Config())


def test_a_folder_with_a_whole_checkpoint_is_a_run_and_goes_on_whatever_else_was_lost(tmp_path: Path) -> None:
    folder = golden_at(tmp_path, 16)
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "RUN.lock").touch()
    assert detect_artifact(tmp_path) is ArtifactKind.RUN
    check_run_dir(tmp_path, Config())
    assert choose_checkpoint(tmp_path, "must") == (read_state(folder), [])
    config = load_config(folder / "config.toml")
    open_run_dir(tmp_path, config_to_toml(config))
    assert load_config(tmp_path / "config.toml") == config


def test_a_folder_named_checkpoints_that_holds_none_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_000000016").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000000016.damaged-1").mkdir()
    (tmp_path / "checkpoints" / "step_000000016.damaged-1" / "MANIFEST.json").touch()
    assert detect_artifact(tmp_path) is ArtifactKind.NOTHING
    with pytest.raises(ConfigError, match="is not empty and is not a run directory"):
        check_run_dir(tmp_path, Config())


def test_newer_checkpoints_are_set_aside_under_a_name_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in ("step_000000010", "step_000000020", "step_000000030", "step_000000030.damaged-1"):
        (folder / name).mkdir(parents=True)
    quarantine(tmp_path, after_step=10, word="damaged")
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_000000010",
        "step_000000020.damaged-1",
        "step_000000030.damaged-1",
        "step_000000030.damaged-2",
    ]


def test_evaluations_are_known_by_step_but_for_later_ones_and_torn_lines(tmp_path: Path) -> None:
    assert read_run_history(tmp_path, up_to=9).evaluated == {}
    lines = [
        '{"kind": "train", "step": 3, "loss": 9.0}',
        '{"kind": "eval", "step": 3, "loss": 2.5}',
        '{"kind": "eval_books", "step": 3, "loss": 7.0}',
        '{"kind": "eval", "step": 6, "loss": nul',
        '{"kind": "eval", "step": 8, "loss": null}',
        '{"kind": "eval", "step": 9, "loss": 2.25}',
        '{"kind": "eval", "step": 12, "loss": 2.0}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_run_history(tmp_path, up_to=9).evaluated == {3: 2.5, 9: 2.25}


def test_the_history_has_evaluations_samples_saves_and_ends_but_none_that_a_rewind_gave_up(tmp_path: Path) -> None:
    lines = [
        '{"kind": "eval", "step": 3, "loss": 2.5}',
        '{"kind": "sample", "step": 4, "text": "saved"}',
        '{"kind": "event", "event": "saved", "step": 5}',
        '{"kind": "eval", "step": 6, "loss": 9.0}',
        '{"kind": "eval", "step": 8, "loss": 9.5}',
        '{"kind": "sample", "step": 6, "text": "rewound"}',
        '{"kind": "event", "event": "saved", "step": 7}',
        '{"kind": "event", "event": "phase", "step": 7}',
        '{"kind": "event", "event": "rewound", "step": 5, "from": 8}',
        '{"kind": "eval", "step": 6, "loss": 2.25}',
        '{"kind": "event", "event": "phase", "step": 9}',
        '{"kind": "sample", "step": 12, "text": "rewound"}',
        '{"kind": "event", "event": "saved", "step": 12}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_run_history(tmp_path, up_to=9) == ({3: 2.5, 6: 2.25}, {4}, {5}, {9})
