"""Reading `metrics.jsonl` after crashes and rewinds, and from other versions."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.made_runs import make_run, records
from txl_dist.errors import DataError
from txl_dist.report.records import History, read_history


def write(folder: Path, *lines: dict[str, Any] | str, end: str = "\n") -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "metrics.jsonl").write_text(text + end, encoding="utf-8")
    return folder


def train(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": loss, **more}


def event(name: str, step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "event", "event": name, "step": step, **more}


def losses(history: History) -> dict[int, float]:
    return dict(zip(history.train["step"].astype(int).tolist(), history.train["loss"].tolist(), strict=True))


def test_the_later_record_of_a_step_holds(tmp_path: Path) -> None:
    first = [train(step, 1.0) for step in (10, 20, 30)]
    history = read_history(write(tmp_path, event("start", 0), *first, train(20, 2.0), train(30, 3.0)))
    assert losses(history) == {10: 1.0, 20: 2.0, 30: 3.0}
    assert history.num_superseded == 2


@pytest.mark.parametrize("name", ["start", "rewound", "recovered"])
def test_what_a_start_or_rewind_gave_up_is_left_out_even_before_it_is_made_again(tmp_path: Path, name: str) -> None:
    before = [train(step, 1.0) for step in (10, 20, 30, 40)]
    lost = {"kind": "eval", "step": 40, "loss": 9.0}
    path = write(tmp_path, event("start", 0), *before, lost, event(name, 20), train(25, 2.0))
    history = read_history(path)
    assert losses(history) == {10: 1.0, 20: 1.0, 25: 2.0}  # with another interval 30 and 40 never come again
    assert history.evals == {}
    assert history.step == 25


@pytest.mark.parametrize(("name", "steps"), [("recovered", [20, 40]), ("start", [20, 40]), ("rewound", [20, 40, 40])])
def test_a_skip_or_spike_of_a_repeated_step_counts_once(tmp_path: Path, name: str, steps: list[int]) -> None:
    spikes = [event("spike", 20), event("spike", 40)]
    history = read_history(write(tmp_path, event("start", 0), *spikes, event(name, 30), event("spike", 40)))
    assert [one.step for one in history.events if one.name == "spike"] == steps


def test_the_spikes_that_a_rewind_gave_up_are_still_counted_after_a_loss(tmp_path: Path) -> None:
    spikes = [event("spike", step) for step in (50, 51)]
    history = read_history(write(tmp_path, event("start", 0), *spikes, event("rewound", 40), event("recovered", 44)))
    assert [one.name for one in history.events] == ["start", "spike", "spike", "rewound", "recovered"]


def test_a_run_that_began_anew_keeps_nothing_of_the_old_one(tmp_path: Path) -> None:
    old = [event("start", 0), train(10, 1.0), {"kind": "sample", "step": 10, "prompt": "a", "text": "b"}]
    history = read_history(write(tmp_path, *old, event("start", 0)))
    assert (len(history.train), history.samples, history.step) == (0, [], 0)
    assert [one.name for one in history.events] == ["start", "start"]


def test_records_hold_as_a_plain_replay_of_the_file_says(tmp_path: Path) -> None:
    chance = random.Random(5)
    lines: list[dict[str, Any]] = [event("start", 0)]
    truth: dict[int, float] = {}
    step = 0
    for number in range(600):
        if chance.random() < 0.05:
            step = chance.randint(0, step)
            lines.append(event(chance.choice(["start", "rewound"]), step))
            truth = {at: loss for at, loss in truth.items() if at <= step}
        step += chance.randint(1, 4)
        lines.append(train(step, float(number)))
        truth[step] = float(number)
    history = read_history(write(tmp_path, *lines))
    assert losses(history) == truth
    assert history.num_superseded == 600 - len(truth)


def test_a_torn_last_line_and_damage_in_the_middle_are_counted_and_passed_over(tmp_path: Path) -> None:
    damage = ["{", "[1]", '"text"', '{"kind": "train"}', '{"kind": 3, "step": 1}', "\ufffd\x00", "[" * 100_000, "null"]
    torn = json.dumps(train(30, 1.0))[:-9]
    history = read_history(write(tmp_path, event("start", 0), train(10, 1.0), *damage, train(20, 2.0), torn, end=""))
    assert losses(history) == {10: 1.0, 20: 2.0}
    assert history.num_damaged == len(damage) + 1


def test_a_whole_last_line_counts_without_its_line_feed(tmp_path: Path) -> None:
    assert losses(read_history(write(tmp_path, train(10, 1.0), train(20, 2.0), end=""))) == {10: 1.0, 20: 2.0}


def test_nulls_and_unknown_kinds_and_fields_do_no_harm(tmp_path: Path) -> None:
    strange = {"kind": "dance", "step": 15, "loss": "high", "more": {"a": [1]}}
    odd = train(20, 2.0, colour="red", rank_ms="fast", slowest_rank=None, nested={"x": 1}, huge=10**400, yes=True)
    history = read_history(write(tmp_path, event("new", 0, why=None), train(10, None), strange, odd))
    assert math.isnan(history.train["loss"][0])
    assert history.train.last("loss") == 2.0
    assert not history.train.has("yes")
    assert not history.train.has("never recorded")
    assert history.events[0].fields == {"why": None}


def test_hours_are_those_of_work_without_the_pauses_before_starts(tmp_path: Path) -> None:
    hour = 3600.0
    lines = [
        event("start", 0, time_s=0.0),
        train(10, 1.0, time_s=1 * hour),
        event("start", 10, time_s=101 * hour),
        train(20, 1.0, time_s=103 * hour),
        train(30, 1.0, time_s=102 * hour),  # somebody set the clock back
        train(40, 1.0, time_s=104 * hour),
    ]
    assert read_history(write(tmp_path, *lines)).train["hours"].tolist() == [1.0, 3.0, 3.0, 5.0]


def test_of_times_per_rank_the_extremes_and_the_middle_are_kept(tmp_path: Path) -> None:
    few, many = [40.0, 44.0, 42.0], [float(rank) for rank in range(100)]
    lines = [train(10, 1.0, rank_ms=few, slowest_rank=1, slowest_host="b"), train(20, 1.0, rank_ms=many)]
    history = read_history(write(tmp_path, *lines))
    table, hosts = history.train, history.hosts
    assert [table[f"{word}_rank_ms"].tolist() for word in ("fastest", "median", "slowest")] == [
        [40.0, 0.0],
        [42.0, 50.0],
        [44.0, 99.0],
    ]
    assert hosts == {1: "b"}


def test_losses_per_position_are_those_of_the_newest_record_that_holds(tmp_path: Path) -> None:
    evaluation = {"kind": "eval", "step": 30, "loss": 1.0, "loss_by_position": [5.0, 4.0]}
    measured = [
        {"kind": "memory", "step": step, "loss_by_position": [3.0, None], "loss_by_position_without_memory": [4.0, 3.5]}
        for step in (20, 40)
    ]
    memory = read_history(write(tmp_path, event("start", 0), *measured, evaluation, event("rewound", 30))).memory
    assert memory["step"].tolist() == [20.0]
    assert np.array_equal(memory.newest("loss_by_position_"), [3.0, math.nan], equal_nan=True)
    assert memory.newest("loss_by_position_without_memory_").tolist() == [4.0, 3.5]
    alone = read_history(write(tmp_path, evaluation))
    assert alone.held_out.newest("loss_by_position_").tolist() == [5.0, 4.0]
    assert len(alone.memory.newest("loss_by_position_")) == 0


def test_a_run_that_another_version_began_keeps_one_curve(tmp_path: Path) -> None:
    """Version 0.2 named the record of the memory `look`, and the event at the end of a phase `stage`."""
    old = {"kind": "look", "step": 10, "memory_gain": 0.5}
    new = {"kind": "memory", "step": 20, "memory_gain": 0.75}
    history = read_history(write(tmp_path, event("start", 0), old, event("stage", 10), event("start", 10), new))
    assert history.memory["step"].tolist() == [10.0, 20.0]
    assert history.memory["memory_gain"].tolist() == [0.5, 0.75]
    assert [happened.name for happened in history.events] == ["start", "phase", "start"]


def test_all_kinds_of_a_whole_run_are_found(tmp_path: Path) -> None:
    history = read_history(make_run(tmp_path / "run"))
    assert set(history.evals) == {"eval", "eval_code"}
    assert history.train["step"].tolist() == list(range(10, 2001, 10))
    assert history.memory.numbered("memory_norm_") == [f"memory_norm_{layer}" for layer in range(4)]
    assert [sample.step for sample in history.samples] == list(range(200, 2001, 200))
    given_up = sum(record["kind"] == "train" for record in records(seed=1, num_ranks=4, max_steps=2000, lr=1e-3)) - 200
    assert history.num_superseded == given_up > 0


def test_missing_records_are_errors_that_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such folder.*--run\.dir"):
        read_history(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"metrics\.jsonl: No such file.*--run\.dir"):
        read_history(tmp_path)
    with pytest.raises(DataError, match=r"no complete record yet.*Wait for that record"):
        read_history(write(tmp_path, '{"kind": "ev', end=""))


def test_without_times_hours_are_those_that_the_steps_took(tmp_path: Path) -> None:
    lines = [event("start", 0), *(train(step, 1.0, step_ms=36_000.0) for step in (100, 200)), event("start", 100)]
    history = read_history(write(tmp_path, *lines, train(200, 1.0, step_ms=72_000.0, time_s=5.0)))
    assert np.allclose(history.train["hours"], [1.0, 4.0])
    assert history.last_time_s == 5.0
