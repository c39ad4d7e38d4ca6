"""A folder that is not a valid checkpoint is skipped like a damaged one, whatever its manifest says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import GOLDEN_CHECKPOINT, change_state, golden_at, sign
from txl_dist.cli.main import main
from txl_dist.errors import CheckpointError
from txl_dist.io.manifest import problems_of
from txl_dist.train.checkpoint.memories import load_lane_memory
from txl_dist.train.checkpoint.read import choose_checkpoint, newest_checkpoint
from txl_dist.train.checkpoint.validate import checkpoint_problems, read_state

STATE = json.loads((GOLDEN_CHECKPOINT / "state.json").read_text(encoding="utf-8"))


FLOAT_VERSION = json.dumps(STATE | {"format_version": 2.0})


def with_corpus(**values: Any) -> dict[str, Any]:
    (corpus,) = STATE["stream"]["corpora"]
    return {"stream": STATE["stream"] | {"corpora": [corpus | values]}}


WRONG = {
    "a step that is text": {"step": "16"},
    "a step that is true": {"step": True},
    "a step below 0": {"step": -1},
    "a step of more than nine digits": {"step": 10**30},
    "the step of another folder": {"step": 17},
    "no tokens": {"tokens_seen": None},
    "tokens beyond counting": {"tokens_seen": 2**80},
    "no ranks": {"world_size": 0},
    "a stage that there is not": {"zero_stage": 4},
    "a type that there is not": {"precision": "fp8"},
    "a loss scale that is not a number": {"loss_scale": {"cur_scale": "large"}},
    "parameters without shapes": {"parameters": ["embedding"]},
    "a shape beyond memory": {"parameters": STATE["parameters"] | {next(iter(STATE["parameters"])): [10**12, 10**5]}},
    "a negative shape": {"parameters": STATE["parameters"] | {next(iter(STATE["parameters"])): [-1]}},
    "a parameter that no file has": {"parameters": STATE["parameters"] | {"extra": [1]}},
    "no vocabulary": {"vocab_size": 0},
    "health that is a list": {"health": []},
    "health with text for a count": {"health": STATE["health"] | {"skipped_steps": "1"}},
    "no stream": {"stream": None},
    "another number of lanes": with_corpus(num_lanes=5),
    "lanes beyond counting": with_corpus(num_lanes=10**15),
    "a negative position": with_corpus(position=-8),
    "a position beyond counting": with_corpus(position=10**30),
    "skips that go back": with_corpus(skips="5 -3"),
    "skips that are half": with_corpus(skips="5"),
    "a rest beyond counting": with_corpus(rest=f"{10**25} 1"),
    "a rest whose sum is beyond counting": with_corpus(rest=f"{2**62} {2**62}"),
}


@pytest.mark.parametrize("values", WRONG.values(), ids=list(WRONG))
def test_a_state_of_wrong_types_or_ranges_is_passed_over_for_the_checkpoint_before(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    before, wrong = golden_at(tmp_path, 12), golden_at(tmp_path, 16)
    change_state(wrong, **values)
    assert problems_of(wrong) == [], "the manifest alone sees nothing"
    found, _, (reason,) = newest_checkpoint(tmp_path)
    assert found == before
    assert reason.startswith("step_000000016: ")


NO_STATES = ["", "[]", "null", "{", '"' + 9 * "x", "[" * 100_000, '{"format_version": 2}', FLOAT_VERSION, "\xff"]


@pytest.mark.parametrize("text", NO_STATES)
def test_a_state_that_is_none_is_an_error_with_a_remedy(tmp_path: Path, text: str) -> None:
    folder = golden_at(tmp_path, 16)
    (folder / "state.json").write_text(text, encoding="latin-1")
    sign(folder)
    (problem,) = checkpoint_problems(folder)
    assert problem.endswith("Use another checkpoint.")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_state(folder)


def test_the_golden_checkpoint_is_sound_also_under_another_name(tmp_path: Path) -> None:
    assert checkpoint_problems(GOLDEN_CHECKPOINT) == []
    shutil.copytree(GOLDEN_CHECKPOINT, tmp_path / "elsewhere")
    assert checkpoint_problems(tmp_path / "elsewhere") == []


def test_a_folder_named_for_another_step_is_refused_where_it_is_the_only_one_and_verify_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = golden_at(tmp_path, 16)
    folder = folder.rename(folder.with_name("step_000000099"))
    reason = "the folder is named for step 99, and its state.json is of step 16"
    with pytest.raises(CheckpointError, match=reason):
        choose_checkpoint(tmp_path, "auto")
    with pytest.raises(SystemExit, match="1"):
        main(["verify", str(folder)])
    assert capsys.readouterr().out == f"{reason}\n"


def change_tensors(path: Path, **tensors: torch.Tensor) -> None:
    save_file(load_file(path) | tensors, path)


def test_files_of_lanes_of_other_names_or_shapes_are_passed_over(tmp_path: Path) -> None:
    def renamed(folder: Path) -> None:
        (folder / "lanes" / "00002-00003.safetensors").rename(folder / "lanes" / "none.safetensors")

    def missing(folder: Path) -> None:
        (folder / "lanes" / "00002-00003.safetensors").unlink()

    def overlapping(folder: Path) -> None:
        shutil.copy(folder / "lanes" / "00000-00001.safetensors", folder / "lanes" / "00001-00002.safetensors")

    def of_another_width(folder: Path) -> None:
        change_tensors(folder / "lanes" / "00002-00003.safetensors", hidden=torch.zeros(2, 2, 12, 99))

    def of_another_lane(folder: Path) -> None:
        change_tensors(folder / "lanes" / "00002-00003.safetensors", hidden=torch.zeros(2, 1, 12, 16))

    def torn(folder: Path) -> None:
        (folder / "lanes" / "00002-00003.safetensors").write_bytes(b"torn")

    def without_engine(folder: Path) -> None:
        (folder / "engine" / "00001.safetensors").unlink()

    changes = (renamed, missing, overlapping, of_another_width, of_another_lane, torn, without_engine)
    for number, change in enumerate(changes):
        folder = golden_at(tmp_path / str(number), 16)
        change(folder)
        sign(folder)
        assert problems_of(folder) == []
        found, _, (reason,) = newest_checkpoint(tmp_path / str(number))
        assert found is None, change
        assert "lanes/" in reason or "engine/" in reason


def test_files_of_lanes_follow_each_other_by_number_also_where_names_grow_longer(tmp_path: Path) -> None:
    folder = golden_at(tmp_path, 16)
    shutil.rmtree(folder / "lanes")
    (folder / "lanes").mkdir()
    for first, last in ((0, 10_000), (10_001, 99_999), (100_000, 100_001)):
        document = torch.arange(first, last + 1)[:, None]
        memories = {"hidden": torch.zeros(1, last - first + 1, 1, 1), "document": document}
        save_file(memories, folder / "lanes" / f"{first:05d}-{last:05d}.safetensors")
    change_state(folder, **with_corpus(num_lanes=100_002))
    assert checkpoint_problems(folder) == []
    assert load_lane_memory(folder, lanes=range(9_998, 100_002)).document_BM.flatten().tolist() == [
        *range(9_998, 100_002)
    ]


@pytest.mark.parametrize("name", ["config.toml", "tokenizer.json"])
def test_a_checkpoint_without_its_settings_or_its_tokenizer_is_none_whoever_wrote_it(tmp_path: Path, name: str) -> None:
    folder = golden_at(tmp_path, 16)
    (folder / name).unlink()
    sign(folder)
    (problem,) = checkpoint_problems(folder)
    assert name in problem
