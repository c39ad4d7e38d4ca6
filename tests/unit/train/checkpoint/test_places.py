"""A run's corpora are found from any working folder, and the comparison of settings does not depend on the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from txl_dist.config.load import Config, config_fingerprint, config_from_dict
from txl_dist.errors import DataError
from txl_dist.train.checkpoint.read import absolute_paths, require_corpus, with_corpora_found

GOLDEN = Path(__file__).parents[3] / "golden/checkpoint_v2/step_000000016/state.json"
STATE = json.loads(GOLDEN.read_text(encoding="utf-8"))


def config_of(path: str, *more: str) -> Config:
    return config_from_dict({"data": {"path": path, "more_paths": list(more)}}, source="test")


def checkpoint_of(folder: Path, config: Config | None) -> Path:
    """The state.json of a checkpoint that knows its corpora, or of one of before."""
    folder.mkdir(parents=True)
    state = STATE | ({"corpora": absolute_paths(config.data.paths)} if config else {})
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two corpora."""
    for name in ("first", "second"):
        (tmp_path / "project/data" / name).mkdir(parents=True)
        (tmp_path / "project/data" / name / "index.json").touch()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def test_relative_corpora_are_found_from_any_working_directory(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("data/first", "data/second", "s3://bucket/third")
    checkpoint = checkpoint_of(project / "c", config)
    assert with_corpora_found(config, checkpoint) == config, "as given, where they are found so"
    monkeypatch.chdir("/")
    found = with_corpora_found(config, checkpoint)
    assert found.data.path == str(project / "data/first")
    assert found.data.more_paths == (str(project / "data/second"), "s3://bucket/third")
    assert config_fingerprint(found) == config_fingerprint(config)
    assert require_corpus(checkpoint, config) == str(project / "data/first")


def test_a_corpus_that_moved_along_with_its_run_is_found_as_it_was_given(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("data/first")
    checkpoint_of(project / "c", config)
    project.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert require_corpus(Path("c"), config) == "data/first"


def test_a_corpus_that_is_gone_is_looked_for_with_data(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("data/first")
    checkpoint = checkpoint_of(project / "c", config)
    os.rename("data", "elsewhere")
    with pytest.raises(DataError, match=f"no longer at {project}/data/first. Name the corpus's new path with --data"):
        require_corpus(checkpoint, config)
    monkeypatch.chdir("/")
    with pytest.raises(DataError, match=f"no longer at {project}/data/first or /data/first. Name the corpus"):
        require_corpus(checkpoint, config)


@pytest.mark.parametrize("known", [None, [], ["/a", "/b"]])
def test_a_checkpoint_that_knows_no_places_or_wrong_ones_leaves_the_given_paths(
    known: object, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("data/first")
    checkpoint = checkpoint_of(project / "c", None)
    if known is not None:
        (checkpoint / "state.json").write_text(json.dumps(STATE | {"corpora": known}))
    assert with_corpora_found(config, checkpoint) == config
    assert require_corpus(checkpoint, config) == "data/first"
    monkeypatch.chdir("/")
    with pytest.raises(DataError, match="Name the corpus's new path with --data"):
        require_corpus(checkpoint, config)
