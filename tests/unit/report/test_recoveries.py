"""Recoveries of a run are shown with what they cost, and with what restarts would have cost by a stated formula."""

import json
from pathlib import Path
from typing import Any

import pytest

from txl_dist.cli.main import main
from txl_dist.report.records import read_history
from txl_dist.report.recoveries import goodput_of, recoveries_of
from txl_dist.report.report import write_report
from txl_dist.report.summary import facts_of, read_run

WHY = "rank 1 on node-a (pid 7) was lost at step 13, in phase `step`: SIGKILL"


def event(name: str, step: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "event", "event": name, "step": step, **fields}


def recovered(step: int, time_s: float, **fields: Any) -> dict[str, Any]:
    seconds = {"notice_s": 0.25, "regroup_s": 0.5, "restore_s": 0.125, "redo_s": 0.125}
    return event("recovered", step, ranks=[1], hosts=["node-a"], why=WHY, time_s=time_s, **seconds | fields)


def write(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return folder


def train(step: int, time_s: float) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 2.0, "step_ms": 500.0, "tokens_per_s": 10.0, "time_s": time_s}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 100 s with two recoveries, 3 and 5 steps after the last checkpoint."""
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
    # Notice twice 0.25 s, a start twice 8 s, and 3 + 5 repeated steps of 0.5 s.
    assert goodput.restarts_s == pytest.approx(0.5 + 16.0 + 4.0)
    assert goodput.without_pct == pytest.approx(100 * 98 / (98 + 20.5))
    assert goodput_of(history, step_ms=None) is None


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
    assert fact.note == "2.0 s lost, goodput 98.00 %, with restarts at most 82.70 % (estimate)"


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
    assert row[:8] == ["13", "1", "node-a", "0.25", "0.50", "0.12", "0.12", "1.00"]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert [one["step"] for one in facts["recoveries"]] == [13, 25]
    assert facts["recoveries"][0]["why"] == WHY


def test_events_that_lack_values_or_have_wrong_ones_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    odd = event("recovered", 4, ranks="no", hosts=[3], why=None, notice_s="soon", regroup_s=-1, restore_s=1e99)
    run = write(tmp_path / "run", odd, event("recovered", 5))
    first, second = recoveries_of(read_history(run).events)
    assert (first.ranks, first.hosts, first.lost_s) == ([], ["3"], 0.0)
    assert second.why == ""
    write_report(run)
