"""Recoveries of a run are shown with what they cost, and with what restarts would have cost by a stated formula."""

import json
from pathlib import Path
from typing import Any

import pytest

from txl_dist.cli.main import main
from txl_dist.report.records import read_history
from txl_dist.report.recoveries import goodput_of, lost_time, recoveries_of
from txl_dist.report.report import write_report
from txl_dist.report.summary import facts_of, read_run
from txl_dist.train.report.event_text import event_details

WHY = "rank 1 on node-a (pid 7) was lost at step 13, in phase `step`: SIGKILL"


def event(name: str, step: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "event", "event": name, "step": step, **fields}


def recovered(step: int, time_s: float, **fields: Any) -> dict[str, Any]:
    seconds = {"generation": 2, "notice_s": 0.25, "regroup_s": 0.5, "restore_s": 0.125, "redo_s": 0.125}
    origin = {"restored_from": "copies", "repeated_steps": 1}
    losses = {"ranks": [1], "hosts": ["node-a"], "why": WHY}
    return event("recovered", step, time_s=time_s, **losses | origin | seconds | fields)


def write(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return folder


def train(step: int, time_s: float) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 2.0, "step_ms": 500.0, "tokens_per_s": 10.0, "time_s": time_s}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 100 s with two recoveries from copies, in the 4th and the 6th step after the last checkpoint."""
    return write(
        tmp_path / "run",
        event("start", 0, startup_s=8.0, time_s=1000.0),
        train(10, 1020.0),
        event("saved", 10, time_s=1021.0),
        recovered(13, 1030.0),
        train(15, 1050.0),
        event("saved", 20, time_s=1060.0),
        recovered(25, 1070.0),
        train(30, 1100.0),
    )


def test_the_goodput_is_that_of_the_stated_formula(run: Path) -> None:
    history = read_history(run)
    goodput = goodput_of(history, step_ms=500.0)
    assert goodput is not None
    assert goodput.lost_s == pytest.approx(2.0)
    assert goodput.with_pct == pytest.approx(98.0)
    # Notice twice 0.25 s, a start twice 8 s, and 4 + 6 repeated steps of 0.5 s.
    assert goodput.restarts_s == pytest.approx(0.5 + 16.0 + 5.0)
    assert goodput.without_pct == pytest.approx(100 * 98 / (98 + 21.5))
    assert goodput_of(history, step_ms=None) is None


@pytest.mark.parametrize(
    ("events", "ranks"),
    [
        ([recovered(13, 1.0, world_size=4)], ("4", "hosts: 2")),
        ([recovered(13, 1.0, world_size=3), recovered(15, 2.0, world_size=2)], ("2", "at the start: 4, hosts: 2")),
        ([recovered(13, 1.0, world_size=3), event("start", 13, ranks=4, hosts=2)], ("4", "hosts: 2")),
        ([recovered(13, 1.0, world_size="3")], ("4", "hosts: 2")),
    ],
)
def test_a_job_that_shrank_is_shown_with_the_ranks_that_it_has(
    events: list[dict[str, Any]], ranks: tuple[str, str], tmp_path: Path
) -> None:
    run = read_run(write(tmp_path / "run", event("start", 0, ranks=4, hosts=2, time_s=1000.0), *events))
    (fact,) = (fact for fact in facts_of(run) if fact.name == "Ranks")
    assert (fact.value, fact.note) == ranks


@pytest.fixture
def returned(tmp_path: Path) -> Path:
    """A run of 100 s that lost a rank in step 16, and returned to its checkpoint of step 4."""
    why = WHY.replace("13", "16")
    return write(
        tmp_path / "returned",
        event("start", 0, startup_s=8.0, time_s=1000.0),
        event("saved", 4, time_s=1005.0),
        train(15, 1020.0),
        event("saved", 15, time_s=1021.0),  # it was damaged
        recovered(4, 1030.0, restored_from="checkpoint", repeated_steps=12, why=why),
        train(30, 1100.0),
    )


def test_all_repeated_steps_count_as_lost_with_recovery_and_with_a_restart(returned: Path) -> None:
    goodput = goodput_of(read_history(returned), step_ms=500.0)
    assert goodput is not None
    # The four phases take 1 s. They contain the first of 12 steps. The other steps take 0.5 s each.
    assert goodput.lost_s == pytest.approx(1.0 + 11 * 0.5)
    assert goodput.with_pct == pytest.approx(100 - 6.5)
    assert goodput.restarts_s == pytest.approx(0.25 + 8.0 + 12 * 0.5)
    assert goodput.without_pct == pytest.approx(100 * 93.5 / (93.5 + 14.25))


def test_a_checkpoint_that_is_newer_than_the_copies_counts_for_a_restart(tmp_path: Path) -> None:
    run = write(
        tmp_path / "run",
        event("start", 0, startup_s=8.0, time_s=1000.0),
        event("saved", 10, time_s=1010.0),
        recovered(8, 1030.0, repeated_steps=4),  # lost in step 12
        train(30, 1100.0),
    )
    goodput = goodput_of(read_history(run), step_ms=500.0)
    assert goodput is not None
    assert goodput.restarts_s == pytest.approx(0.25 + 8.0 + 2 * 0.5)


def test_all_views_say_the_same_about_a_return_to_the_checkpoint(
    returned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = "6.5 s (5.5 s of it estimated for 11 further repeated steps)"
    assert main(["inspect", str(returned)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"1 recovery, which took {lost}" in lines
    (row,) = [line.split() for line in lines if line.split()[:1] == ["4"]]
    assert row[3:11] == ["checkpoint", "12", "0.25", "0.50", "0.12", "0.12", "5.50", "6.50"]
    facts = {fact.name: fact for fact in facts_of(read_run(returned))}
    assert facts["Recoveries"].note == f"lost: {lost}, goodput 93.50 %, with restarts at most 86.77 % (estimate)"
    assert facts["Resumed"].value == "never"
    write_report(returned)
    html = (returned / "report.html").read_text(encoding="utf-8")
    assert f"Recoveries took {lost}, so 93.50 % of the working time was spent on new steps." in html
    assert "The job continued in generation 2 from a checkpoint after 0.25 s to notice" in html
    assert "0.12 s for the first of 12 repeated steps" in html


def test_without_the_time_of_a_step_the_repeated_steps_are_named_and_not_counted(tmp_path: Path) -> None:
    run = write(tmp_path / "run", recovered(4, 1030.0, repeated_steps=3))
    assert lost_time(recoveries_of(read_history(run).events, step_ms=None)) == (
        "1.0 s (without 2 further repeated steps, because the time of a step is unknown)"
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "in generation 2 from copies after 0.25 s to notice"),
        ({}, "0.50 s to regroup, 0.12 s to restore and 0.12 s to repeat the step"),
        ({"repeated_steps": 0}, "0.12 s for the next step"),
        ({"repeated_steps": 2}, "0.12 s for the first of 2 repeated steps"),
        ({"repeated_steps": 9, "restored_from": "start"}, "in generation 2 from the start of the run after"),
        ({"repeated_steps": None, "restored_from": None}, "in generation 2 after 0.25 s to notice"),
    ],
)
def test_a_recovery_says_where_the_state_came_from_and_which_step_was_measured(
    fields: dict[str, Any], said: str
) -> None:
    assert said in event_details("recovered", recovered(12, 0.0, **fields))


def test_a_start_that_recovery_made_in_an_old_process_does_not_count_as_a_start(run: Path) -> None:
    late = event("start", 30, startup_s=4000.0, time_s=1100.0)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(late) + "\n")
    goodput = goodput_of(read_history(run), step_ms=500.0)
    assert goodput is not None
    assert goodput.start_s == 8.0


def test_the_page_has_a_table_of_recoveries_and_the_estimate_with_its_formula(run: Path) -> None:
    write_report(run)
    html = (run / "report.html").read_text(encoding="utf-8")
    assert "<h2>Recoveries</h2>" in html
    table = html.split('aria-label="Recoveries"')[1].split("</table>")[0]
    assert table.count("<tr>") == 3
    for cell in ("13", "node-a", "0.25", "0.50", "1.00", WHY):
        assert f">{cell}</t" in table
    assert "Estimate: restarts from the last checkpoint would have taken at least" in html
    assert "seconds to notice + 8.0 s of a start + steps since the last checkpoint x 500 ms" in html


def test_the_facts_have_the_number_the_seconds_and_the_goodput(run: Path) -> None:
    (fact,) = [fact for fact in facts_of(read_run(run)) if fact.name == "Recoveries"]
    assert fact.value == "2"
    assert fact.note == "lost: 2.0 s, goodput 98.00 %, with restarts at most 82.01 % (estimate)"


def test_a_run_without_recoveries_says_nothing_about_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", event("start", 0, startup_s=8.0, time_s=1.0), train(10, 20.0))
    write_report(run)
    assert "ecoveries" not in (run / "report.html").read_text(encoding="utf-8")
    assert main(["inspect", str(run)]) == 0
    assert "which took" not in capsys.readouterr().out


def test_inspect_lists_the_recoveries_for_people_and_for_programs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(run), "--json", str(tmp_path / "facts.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 recoveries, which took 2.0 s" in lines
    (row,) = [line.split() for line in lines if line.split()[:1] == ["13"]]
    assert row[:7] == ["13", "1", "node-a", "copies", "1", "0.25", "0.50"]
    assert row[7:11] == ["0.12", "0.12", "0.00", "1.00"]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert [one["step"] for one in facts["recoveries"]] == [13, 25]
    assert facts["recoveries"][0]["why"] == WHY


def test_events_that_lack_values_or_have_wrong_ones_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    odd = event("recovered", 4, ranks="no", hosts=[3], why=None, notice_s="soon", regroup_s=-1, restore_s=1e99)
    odd |= {"restored_from": ["copies"], "repeated_steps": -3}
    run = write(tmp_path / "run", odd, event("recovered", 5))
    first, second = recoveries_of(read_history(run).events, step_ms=500.0)
    assert (first.ranks, first.hosts, first.lost_s) == ([], ["3"], 0.0)
    assert (second.why, second.restored_from, second.repeated_steps) == ("", "", 1)
    write_report(run)
