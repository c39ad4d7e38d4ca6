"""The plugin of examples/ outside the repository with real commands: prepare, train, kill, resume and export."""

from __future__ import annotations

import json
import runpy
import shutil
import sqlite3
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from random import Random

import pytest

from tests.helpers import forked

pytestmark = [pytest.mark.dist, pytest.mark.slow]

EXAMPLE = forked.REPOSITORY / "examples" / "plugin"
SETTINGS = """
[run]
plugins = ["txl_example.training"]
[data]
path = "corpus"
[model]
positions = "alibi"
num_layers = 2
width = 32
num_heads = 2
head_width = 16
ff_width = 64
[optim]
name = "lion"
lr = 1e-3
betas = [0.9, 0.99]
[train]
num_lanes = 4
microbatch_lanes = 2
segment_len = 16
memory_len = 16
max_steps = 24
[eval]
every_steps = 12
[checkpoint]
every_steps = 4
[metrics]
log_every_steps = 1
tensorboard = false
"""
TRAINING, TEXT = ("--plugins", "txl_example.training"), ("--plugins", "txl_example.text")


def run_with_plugin(program: str, *words: str) -> None:
    """Do what `python program words` does where the plugin can be imported, or `txl words` without a program."""
    sys.path.insert(0, str(Path("elsewhere").resolve()))
    if not program:
        return forked.run_txl(*words)
    sys.argv = [program, *words]
    runpy.run_path(program, run_name="__main__")
    return None


class Place:
    """A folder with the plugin in it, the commands that run there, and a database of text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(EXAMPLE, folder / "elsewhere", ignore=shutil.ignore_patterns("__pycache__"))
        generator = Random(1)
        pairs = [f"{generator.randrange(256):02x}" for _ in range(40)]
        with sqlite3.connect(folder / "texts.db") as database:
            database.execute("CREATE TABLE pages (body TEXT)")
            for _ in range(300):
                text = " ".join(generator.choices(pairs, k=generator.randint(5, 60)))
                database.execute("INSERT INTO pages VALUES (?)", (text,))
        (folder / "tiny.toml").write_text(SETTINGS, encoding="utf-8")

    def start(
        self, *words: str, program: str = "", out: Path | None = None, err: Path | None = None
    ) -> ForkServerProcess:
        return forked.start(
            run_with_plugin, program, *words, variables=forked.environment(), cwd=self.folder, out=out, err=err
        )

    def run(self, *words: str, code: int = 0, program: str = "") -> tuple[str, str]:
        """(standard output, standard error) of a command that exits with this code."""
        out, err = self.folder / "out.txt", self.folder / "err.txt"
        for file in (out, err):
            file.write_text("")
        process = self.start(*words, program=program, out=out, err=err)
        process.join(300)
        said, complained = (file.read_text(encoding="utf-8") for file in (out, err))
        assert process.exitcode == code, f"{words}: {process.exitcode}\n{said}\n{complained[-3000:]}"
        return said, complained

    def losses(self, run: str) -> dict[int, float]:
        lines = (self.folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(tmp_path_factory.mktemp("plugins"))
    words = ["sqlite:texts.db?pages.body", "--out", "corpus", "--tokenizer", "hex", "--num-workers", "2"]
    made.run("prepare", *words, *TEXT)
    made.run("train", "tiny.toml", "--run.dir", "whole")
    return made


def test_a_run_with_a_plugin_is_killed_resumed_exported_and_asked(place: Place) -> None:
    process = place.start("train", "tiny.toml", "--run.dir", "killed", err=place.folder / "killed.log")
    end_s = time.monotonic() + 120
    while not (place.folder / "killed/checkpoints/step_000000008").is_dir():
        assert process.exitcode is None
        assert time.monotonic() < end_s
        time.sleep(0.02)
    process.kill()
    process.join()
    assert not (place.folder / "killed/DONE").exists()
    place.run("train", "tiny.toml", "--run.dir", "killed", "--resume", "must")
    assert place.losses("killed") == place.losses("whole")
    state = json.loads((place.folder / "killed/checkpoints/step_000000024/state.json").read_text(encoding="utf-8"))
    assert [plugin["name"] for plugin in state["plugins"]] == ["txl_example.training"]

    _, refused = place.run("export", "killed", "bundle", code=2)
    assert refused.splitlines()[-1].startswith("txl export: error: killed/checkpoints/step_000000024/config.toml names")
    assert "--plugins txl_example.training" in refused
    place.run("export", "killed", "bundle", *TRAINING)
    _, refused = place.run("generate", "bundle", "--prompt", "0e 0b", code=2)
    assert "bundle was made with the plugin txl_example.training" in refused
    words = ["generate", "bundle", "--prompt", "", "--max-tokens", "20", *TRAINING]
    (text, _), (again, _) = place.run(*words), place.run(*words)
    assert text == again
    assert set(text) <= set("0123456789abcdef \n")
    assert len(text) > 10
    out, _ = place.run("evaluate", "bundle", "--data", "corpus", *TRAINING)
    assert "nats/token" in out


def test_a_metric_of_a_plugin_is_in_the_records_and_on_the_console(place: Place) -> None:
    text = (place.folder / "whole/metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert all(row["pages_per_s"] > 0 for row in rows if row["kind"] == "train")
    assert not any("pages_per_s" in row for row in rows if row["kind"] == "eval")
    assert "pages/s" in (place.folder / "whole/log.txt").read_text(encoding="utf-8")


def test_a_changed_plugin_is_one_line_at_the_resume(place: Place) -> None:
    shutil.copytree(place.folder / "whole", place.folder / "changed")
    file = place.folder / "elsewhere/txl_example/metric.py"
    before = file.read_text(encoding="utf-8")
    file.write_text(before + "# changed\n", encoding="utf-8")
    try:
        _, said = place.run("train", "tiny.toml", "--run.dir", "changed", "--train.max_steps", "26")
    finally:
        file.write_text(before, encoding="utf-8")
    lines = [line for line in said.splitlines() if "has changed since then: now" in line]
    assert len(lines) == 1
    assert "step_000000024 was made with the plugin txl_example.training" in lines[0]


def test_a_missing_plugin_is_one_line_at_the_resume(place: Place) -> None:
    _, said = place.run("train", "tiny.toml", "--run.dir", "whole", "--run.plugins", "txl_gone.training", code=2)
    assert said.splitlines()[-1].startswith("txl train: error: the plugin txl_gone.training is not installed for")
    settings = SETTINGS.replace('plugins = ["txl_example.training"]', "")
    (place.folder / "without.toml").write_text(settings, encoding="utf-8")
    _, said = place.run("train", "without.toml", "--run.dir", "whole", code=2)
    assert "model.positions = 'alibi': it can be relative, learned_relative, absolute" in said
    assert "Traceback" not in said


def test_a_source_that_fails_is_one_line(place: Place) -> None:
    for given, reason in (
        ("sqlite:texts.db?pages", "ValueError: 'texts.db?pages' is not FILE?TABLE.COLUMN"),
        ("sqlite:texts.db?pages.absent", "OperationalError: no such column: absent"),
        ("sqlite:gone.db?pages.body", "OperationalError: unable to open database file"),
    ):
        _, said = place.run("prepare", given, "--out", "other", *TEXT, code=2)
        assert f"the plugin's text source raised an error: {reason}" in said
        assert "Traceback" not in said
    _, said = place.run("prepare", "sqlite:texts.db?pages.body", "--out", "other", code=2)
    assert "no file matches sqlite:texts.db" in said


def test_the_example_of_a_callback_runs_alone_and_goes_on(place: Place) -> None:
    text = (place.folder / "tiny.toml").read_text(encoding="utf-8").replace("[run]\n", '[run]\ndir = "called"\n')
    (place.folder / "called.toml").write_text(text.replace("max_steps = 24", "max_steps = 12"), encoding="utf-8")
    program = str(place.folder / "elsewhere/best_loss.py")
    out, _ = place.run("called.toml", program=program)
    assert out.startswith("best validation loss ")
    assert out.endswith(" at step 12 of 12\n")
    (place.folder / "called.toml").write_text(text, encoding="utf-8")
    out, said = place.run("called.toml", program=program)
    assert out.endswith(" of 24\n")
    assert "no state" not in said
