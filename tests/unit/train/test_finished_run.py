"""`txl train` on a finished run says so and what to type next, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.corpora import tiny_corpus
from txl_dist.cli.main import train
from txl_dist.config.load import Config, config_to_toml, load_config
from txl_dist.errors import ConfigError
from txl_dist.io.manifest import describe_file, write_manifest
from txl_dist.train.run_dir import finished_lines, next_commands


def a_finished_run(folder: Path, *, step: int = 200, done: str = "200\n", corpus: Path = Path("c")) -> Config:
    text = f"[run]\ndir = '{folder / 'run'}'\n[data]\npath = '{corpus}'\n[train]\nmax_steps = 200\n"
    (folder / "c.toml").write_text(text, encoding="utf-8")
    config = load_config(folder / "c.toml")
    checkpoint = folder / f"run/checkpoints/step_{step:09d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").touch()
    write_manifest(checkpoint, {"state.json": describe_file(checkpoint / "state.json")})
    (folder / "run/config.toml").write_text(config_to_toml(config), encoding="utf-8")
    (folder / "run/DONE").write_text(done, encoding="utf-8")
    return config


def test_a_finished_run_names_its_step_and_the_next_commands(tmp_path: Path) -> None:
    config = a_finished_run(tmp_path)
    run = tmp_path / "run"
    reached, go_on, next_line = finished_lines(run, config, command="txl train c.toml")
    assert reached == f"{run} is done: it has reached step 200 of train.max_steps=200"
    assert go_on == "to continue: txl train c.toml --train.max_steps 400"
    assert [f"txl {command} {run}" in next_line for command in ("report", "evaluate", "export")] == [True] * 3


def test_the_next_commands_of_a_run_with_plugins_name_them_where_they_are_needed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    report, evaluate, export = next_commands(run, ["a.b", "c"]).removeprefix("next: ").split("   ")
    assert report == f"txl report {run}"
    assert evaluate == f"txl evaluate {run} --plugins a.b c"
    assert export == f"txl export {run} bundles/run --plugins a.b c"


@pytest.mark.parametrize(("step", "done"), [(100, "200\n"), (200, "100\n"), (200, "soon"), (200, "")])
def test_a_run_that_lacks_its_last_checkpoint_or_its_mark_is_not_finished(tmp_path: Path, step: int, done: str) -> None:
    config = a_finished_run(tmp_path, step=step, done=done)
    assert finished_lines(tmp_path / "run", config, command="txl train c.toml") == []


def test_a_damaged_last_checkpoint_or_another_corpus_is_left_to_the_training(tmp_path: Path) -> None:
    config = a_finished_run(tmp_path)
    other = config.model_copy(update={"data": config.data.model_copy(update={"path": "other"})})
    assert finished_lines(tmp_path / "run", other, command="txl train c.toml") == []
    (tmp_path / "run/checkpoints/step_000000200/state.json").write_text("{}", encoding="utf-8")
    assert finished_lines(tmp_path / "run", config, command="txl train c.toml") == []


def test_more_steps_are_trained_and_another_model_is_refused(tmp_path: Path) -> None:
    config = a_finished_run(tmp_path)
    longer = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 300})})
    assert finished_lines(tmp_path / "run", longer, command="txl train c.toml") == []
    wider = config.model_copy(update={"model": config.model.model_copy(update={"width": 64})})
    with pytest.raises(ConfigError, match=r"model\.width"):
        finished_lines(tmp_path / "run", wider, command="txl train c.toml")


def test_the_command_answers_without_torch_and_keeps_its_other_words(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path).folder
    a_finished_run(tmp_path, corpus=corpus)
    code = (
        "import sys\nfrom txl_dist.cli.main import main\n"
        "code = main(sys.argv[1:])\nprint(code, *{'torch', 'deepspeed'} & set(sys.modules))"
    )
    words = ["train", str(tmp_path / "c.toml"), "--data.path", str(corpus), "--train.max_steps=200"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.stdout == "0\n", done.stderr
    assert f"to continue: txl train {tmp_path / 'c.toml'} --data.path {corpus} --train.max_steps 400\n" in done.stderr


def test_a_wrong_time_limit_is_refused_for_a_finished_run_too(tmp_path: Path) -> None:
    a_finished_run(tmp_path, corpus=tiny_corpus(tmp_path).folder)
    with pytest.raises(ConfigError, match="'3x' is not a duration"):
        train([str(tmp_path / "c.toml"), "--max-time", "3x"])
