"""The long run's plan, and what its page says of a run that was killed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tools import long_run
from tools.long_run import KILLED, MOVED, RANKS, UNBROKEN, Record, kills_of, records_in, table_of


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
    monkeypatch.setattr(long_run, "weights_of", lambda place: "x" if place.name in ("base", "same") else "y")
    said = {name: long_run.compare(tmp_path / name, tmp_path / "base") for name in ("same", "other", "short")}
    assert said["same"] == "all 3 training losses and weights bit for bit"
    assert said["other"] == "training losses bit for bit as far as step 2"
    assert said["short"] == "lacks the training loss of step 3"
    assert records_in(tmp_path / "same", "train").keys() == {1, 2, 3}


def test_the_table_has_a_row_per_run_with_its_kills_and_the_seeds_beside_them() -> None:
    def row(run: str, kind: str, step: int, value: str, ranks: int = 2) -> Record:
        return Record(run, kind, step, ranks, value, "recipe", 100, "c", "cpu", "2026-11-23")

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
