"""Every later version must load, verify, export and resume the golden checkpoint of each format version."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.golden_checkpoint import facts_of, losses_of
from tests.helpers.launch import txl
from txl_dist.cli.main import main
from txl_dist.config.load import load_config
from txl_dist.config.renamed import RENAMED
from txl_dist.convert.export import export_bundle
from txl_dist.errors import CheckpointError
from txl_dist.io.files import write_hashed_json
from txl_dist.io.manifest import MANIFEST, describe_file, files_of, problems_of, write_manifest
from txl_dist.report.records import read_history
from txl_dist.train.checkpoint.validate import checkpoint_problems, read_state
from txl_dist.version import __version__

STEP = "step_000000016"
GOLDENS = [Path(__file__).parents[2] / "golden" / f"checkpoint_v{version}" for version in (2, 3, 4)]
RUN = Path(__file__).parents[2] / "golden" / "run_0.2"
"""A run that version 0.2 began and that was killed, with its corpus and its settings file in the names of 0.2."""
CHECKPOINT = GOLDENS[0] / STEP
"""Of what is no matter of the version."""


def expected_of(golden: Path) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads((golden / "expected.json").read_text(encoding="utf-8"))
    return expected


OLD_SETTINGS = [renamed.old for renamed in RENAMED]
"""All settings that have another name since 0.2; the settings file of `RUN` has each."""

each_golden = pytest.mark.parametrize("golden", GOLDENS, ids=[golden.name for golden in GOLDENS])


@each_golden
def test_it_is_whole_and_small_and_holds_every_part_of_the_format(golden: Path) -> None:
    checkpoint, expected = golden / STEP, expected_of(golden)
    assert problems_of(checkpoint) == checkpoint_problems(checkpoint) == []
    assert sum(path.stat().st_size for path in golden.rglob("*") if path.is_file()) < 200_000
    config, state = load_config(checkpoint / "config.toml"), read_state(checkpoint).values
    assert golden.name == f"checkpoint_v{state['format_version']}"
    assert bool(config.train.memory_lens) == (state["format_version"] >= 3)
    assert (state["zero_stage"], state["world_size"], len(config.model.cutoffs)) == (1, 2, 2)
    assert len(list((checkpoint / "lanes").iterdir())) == 2
    assert state["stream"]["corpora"][0]["skips"]
    assert expected["values"].keys() == {"weight", "exp_avg", "exp_avg_sq"}
    assert (expected["skipped_steps"], expected["rewinds"]) == (1, 1)


@each_golden
def test_its_weights_moments_memories_and_counts_are_those_that_were_saved(golden: Path) -> None:
    expected = expected_of(golden)
    del expected["next_losses"]
    assert facts_of(golden / STEP) == expected


@each_golden
def test_its_export_agrees_with_the_engine_that_wrote_it(tmp_path: Path, golden: Path) -> None:
    made = export_bundle(golden / STEP, tmp_path / "bundle")
    assert made.source == golden / STEP
    assert made.error < 1e-4
    assert problems_of(tmp_path / "bundle") == []


@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 3])
@each_golden
def test_training_goes_on_from_it_as_it_did_then(tmp_path: Path, golden: Path, stage: int) -> None:
    words = ["train", str(golden / "settings.toml"), "--data.path", str(golden / "corpus"), "--run.dir", "run"]
    done = txl(*words, "--resume", str(golden / STEP), "--engine.zero_stage", str(stage), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step_000000016: the weights reproduce the saved losses of the probe to " in done.stderr
    losses = losses_of(tmp_path / "run")
    assert sorted(losses) == [17, 18, 19, 20]
    # One rank adds up in another order than two, and another machine may round otherwise.
    assert list(losses.values()) == pytest.approx(expected_of(golden)["next_losses"], rel=1e-5)


@pytest.mark.dist
def test_a_killed_run_of_0_2_continues_by_the_same_command(tmp_path: Path) -> None:
    shutil.copytree(RUN, tmp_path, dirs_exist_ok=True)
    done = txl("train", "settings.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resume: from run/checkpoints/step_000000016" in done.stderr
    warnings = [line for line in done.stderr.splitlines() if " W " in line or "warning" in line]
    assert len(warnings) == len(OLD_SETTINGS), warnings
    for name in OLD_SETTINGS:
        assert f"settings.toml: {name} is named " in done.stderr

    expected = expected_of(RUN)
    history = read_history(tmp_path / "run")
    assert history.train["step"].tolist() == list(range(1, 25))  # steps 17 and 18 of before the kill are replaced
    losses = dict(zip(history.train["step"].tolist(), history.train["loss"].tolist(), strict=True))
    # Without the memory the loss of step 17 would differ by more. Another machine may round otherwise.
    for step, loss in expected["next_losses"].items():
        assert losses[int(step)] == pytest.approx(loss, rel=1e-5)
    assert history.held_out["step"].tolist() == history.memory["step"].tolist() == [8, 16, 24]
    assert history.held_out.last("loss") == pytest.approx(expected["eval_loss"], rel=1e-5)
    saved = read_state(tmp_path / "run/checkpoints/step_000000024")
    assert saved.values["code_version"] == __version__
    assert saved.values["config_fingerprint"] == expected["config_fingerprint"]
    assert [corpus.position for corpus in saved.stream.corpora] == expected["position"]


def with_version(version: Any, folder: Path) -> Path:
    """A whole copy that says it has another format version."""
    shutil.copytree(CHECKPOINT, folder)
    state = json.loads((folder / "state.json").read_text(encoding="utf-8")) | {"format_version": version}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    (folder / MANIFEST).unlink()
    write_manifest(folder, {name: describe_file(folder / name) for name in files_of(folder)})
    assert problems_of(folder) == []
    return folder


@pytest.mark.parametrize("version", [1, 5, None])
def test_another_version_is_refused_with_the_way_out(
    tmp_path: Path, version: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_version(version, tmp_path / "step_000000016")
    sentence = f"has format version {version}, but this version of txl_dist reads 2, 3 and 4. Use the version"
    with pytest.raises(CheckpointError, match=sentence):
        read_state(folder)
    for words in (["inspect", str(folder)], ["export", str(folder), str(tmp_path / "bundle")]):
        assert main(words) == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


@pytest.mark.dist
def test_a_run_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    folder = with_version(5, tmp_path / "run" / "checkpoints" / CHECKPOINT.name)
    before = folder.stat().st_mtime_ns, sorted(folder.rglob("*"))
    settings = tmp_path / "run" / "config.toml"
    shutil.copy(GOLDENS[0] / "settings.toml", settings)
    done = txl("train", str(settings), "--data.path", str(GOLDENS[0] / "corpus"), "--run.dir", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "has format version 5, but this version of txl_dist reads 2, 3 and 4" in done.stderr
    assert (folder.stat().st_mtime_ns, sorted(folder.rglob("*"))) == before


def test_a_manifest_of_a_later_version_is_a_problem_that_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(CHECKPOINT, folder)
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    write_hashed_json(folder / MANIFEST, content | {"format_version": 7})
    assert problems_of(folder) == [f"{folder / MANIFEST} has format version 7, but this version of txl_dist reads 1"]


@pytest.mark.slow
def test_inspect_verify_and_export_need_no_deepspeed(tmp_path: Path) -> None:
    code = """
import sys
from txl_dist.cli.main import main
for words in sys.argv[1:]:
    assert main(words.split()) == 0
assert "torch" in sys.modules
assert not any(name.partition(".")[0] == "deepspeed" for name in sys.modules)
"""
    copy = tmp_path / "copy"
    shutil.copytree(CHECKPOINT, copy)
    words = [f"inspect {copy}", f"verify {copy}", f"export {copy} {tmp_path / 'bundle'}"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
