"""The plan of the long run, and the page's description of a killed run."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tools.experiments import long_run
from tools.experiments.long_run import KILLED, MOVED, RANKS, UNBROKEN, Kill, Record, kills_of, records_in, table_of
from tools.experiments.recording import ROOT
from tools.experiments.trainings import records_of
from txl_dist.config.load import load_config
from txl_dist.errors import TxlError

CHILD = """
import json, pathlib, sys, time
place = pathlib.Path(sys.argv[1])
for name in ("step_000000100", "step_000000200.tmp-0a1b2c"):
    (place / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
with (place / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"kind": "train", "step": 150, "loss": 1.0}) + "\\n")
time.sleep(float(sys.argv[2]))
"""
"""In place of a training: it writes a step down, a checkpoint and half of the next, and lives for so many seconds."""


@pytest.mark.parametrize("seed", range(20))
def test_kills_lie_within_the_run_and_two_of_the_moved_one_change_the_number_of_ranks(seed: int) -> None:
    for run in (KILLED, MOVED):
        kills = kills_of(run, steps=2_000, count=5, seed=seed)
        assert len(kills) == len({kill.step for kill in kills}) == 5
        assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
        assert all(100 <= kill.step < 1_900 for kill in kills)
        ranks = [RANKS, *(kill.ranks for kill in kills)]
        assert sum(before != after for before, after in pairwise(ranks)) == (2 if run == MOVED else 0)
    assert kills_of(UNBROKEN, steps=2_000, count=5, seed=seed) == []


def start_children(place: Path, lives_s: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    lives = iter(lives_s)
    monkeypatch.setattr(
        long_run, "_start", lambda *_, **__: subprocess.Popen([sys.executable, "-c", CHILD, place, str(next(lives))])
    )


def test_a_run_goes_on_from_its_last_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, place = load_config(ROOT / "configs/quickstart.toml"), tmp_path / "killed"
    start_children(place, [600.0, 0.0], monkeypatch)
    kill = Kill(120, RANKS)
    assert long_run.train(config, [kill], place=place) == [(kill, 100)]


def test_a_run_that_ends_before_its_kill_is_no_run_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, place = load_config(ROOT / "configs/quickstart.toml"), tmp_path / "killed"
    start_children(place, [0.0, 0.0], monkeypatch)
    with pytest.raises(TxlError, match="killed ended with 0 before it was killed after step 900"):
        long_run.train(config, [Kill(900, RANKS)], place=place)


def write_run(place: Path, losses: list[float], *, torn: bool = False) -> None:
    place.mkdir()
    lines = [json.dumps({"kind": "train", "step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (place / "metrics.jsonl").write_text("\n".join([*lines, '{"kind": "tr' * torn, ""]))


def test_runs_are_compared_step_by_step_and_then_by_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [3.0, 2.0, 1.0]
    write_run(tmp_path / "base", losses)
    write_run(tmp_path / "same", losses, torn=True)
    write_run(tmp_path / "other", [3.0, 2.0, 1.0 + 2**-52])
    write_run(tmp_path / "short", losses[:2])
    write_run(tmp_path / "heavier", losses)
    monkeypatch.setattr(long_run, "weights_of", lambda place: "x" if place.name in ("base", "same", "other") else "y")
    names = ("same", "other", "short", "heavier")
    said = {name: long_run.compare(tmp_path / name, base=tmp_path / "base") for name in names}
    assert said["same"] == "all 3 training losses and weights bit for bit"
    assert said["other"] == "training losses bit for bit as far as step 2, weights bit for bit"
    assert said["short"] == "lacks the training loss of step 3, weights not"
    assert said["heavier"] == "all 3 training losses bit for bit, weights not"


def test_of_a_run_that_went_on_the_last_record_of_a_step_counts_and_a_torn_line_none(tmp_path: Path) -> None:
    assert records_in(tmp_path / "not yet begun", "train") == {}
    write_run(tmp_path / "run", [3.0, 2.0, 1.5], torn=True)
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"kind": "eval", "step": 2, "loss": 9.0}\n{"kind": "train", "step": 3, "loss": 1.0}\n')
    found = records_in(tmp_path / "run", "train")
    assert [(step, one["loss"]) for step, one in found.items()] == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert records_of(tmp_path / "run")[-1]["loss"] == 1.0


def test_runs_of_other_steps_or_texts_stand_beside_their_own_unbroken_run() -> None:
    rows = [
        Record(run, "evaluated", steps, 2, value, recipe, steps, corpus, 1, "c", "cpu", "2026-11-23")
        for run, value, recipe, steps, corpus in (
            (UNBROKEN, "4.0", "recipe", 100, "text 01"),
            (UNBROKEN, "3.0", "recipe", 200, "text 01"),
            ("seed 2", "3.5", "recipe", 200, "text 01"),
            ("seed 2", "4.1", "recipe", 100, "text 01"),
            (UNBROKEN, "2.0", "recipe", 100, "text 02"),
        )
    ]
    _, _, *lines = table_of(rows)
    assert [line.split(" | ")[::3] for line in lines[:5]] == [
        ["| unbroken", "4.0000"],
        ["| seed 2", "4.1000"],
        ["| unbroken, recipe, 200 steps, text 01", "3.0000"],
        ["| seed 2, recipe, 200 steps, text 01", "3.5000"],
        ["| unbroken, recipe, 100 steps, text 02", "2.0000"],
    ]
    assert "+0.1000 at the end" in lines[1]
    assert "+0.5000 at the end" in lines[3]
    assert lines[6::2] == [
        "Unbroken runs of all seeds: 4.0500 +- 0.0707.",
        "Unbroken runs of all seeds, recipe, 200 steps, text 01: 3.2500 +- 0.3536.",
        "Unbroken runs of all seeds, recipe, 100 steps, text 02: 2.0000.",
    ]


def test_the_table_has_a_row_per_run_with_its_kills_and_the_seeds_beside_them() -> None:
    def row(run: str, kind: str, step: int, value: str, ranks: int = 2) -> Record:
        return Record(run, kind, step, ranks, value, "recipe", 100, "text 01", 1, "c", "cpu", "2026-11-23")

    records = [
        *(row(UNBROKEN, "evaluated", step, value) for step, value in ((50, "5.0"), (100, "4.0"))),
        *(row(MOVED, "evaluated", step, value) for step, value in ((50, "5.0"), (100, "4.01"))),
        row(MOVED, "killed", 60, "50", ranks=1),
        row(MOVED, "same", 100, "training losses bit for bit as far as step 50"),
        row("seed 2", "evaluated", 100, "4.2"),
    ]
    _, _, unbroken, moved, seed, _, spread = table_of(records)
    assert unbroken == "| unbroken | 2 |  | 4.0000 |  |"
    wanted = "2, 1 | 60 (on from 50) | 4.0100 | training losses bit for bit as far as step 50; +0.0100 at the end"
    assert moved == f"| moved | {wanted} |"
    assert seed.endswith("| +0.2000 at the end |")
    assert spread == "Unbroken runs of all seeds: 4.1000 +- 0.1414."
