"""A few cases of every group. `python -m tests.chaos all` runs all cases."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.chaos.arithmetic import SPIKES, SPIKY, not_finite, rewind, too_many
from tests.chaos.disks import can_mount, failing_write, full_disk, last_save, removed
from tests.chaos.elastic import journey
from tests.chaos.goodput import goodput
from tests.chaos.hangs import death, freeze
from tests.chaos.lab import Case, Lab
from tests.chaos.lock import second_job
from tests.chaos.oracle import differences_of
from tests.chaos.pickles import control, poisoned, sealed
from tests.chaos.recovery import (
    CARRIED,
    FOUR_IN_ROW,
    IN_PROGRESS,
    KINDS_OF_RUNS,
    PARTNER,
    REWINDS,
    THREE_IN_ROW,
    damaged,
    ended,
    failed,
    launched,
    locked,
    node_lost,
    recorded_once,
    replaced,
    shrunk,
    stopped,
    stopped_and_struck,
    storm,
)
from tests.chaos.report import tables
from tests.chaos.saves import crash_in_save, damaged_folder, verifier
from tests.chaos.stops import launcher, request
from tests.chaos.strikes import (
    NO_SPARE,
    REQUESTS,
    agent_lost,
    asked_to_stop,
    in_collective,
    node_paused,
    spare_struck,
    thawed,
)
from tests.helpers.launch import start_training

pytestmark = [pytest.mark.chaos, pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("chaos"), report=tmp_path_factory.mktemp("report") / "chaos.jsonl")


def assert_passed(case: Case) -> None:
    assert case.problems == []


def test_forked_ranks_are_those_of_the_launcher_bit_for_bit(lab: Lab) -> None:
    """Else nothing here would say anything about real jobs."""
    unbroken, run = lab.unbroken(), lab.new_run("launched")
    launcher = start_training(str(lab.config), "--run.dir", str(run.dir), cwd=lab.folder)
    assert launcher.wait(timeout=300) == 0
    assert differences_of(run, unbroken) == []


def test_the_oracle_sees_what_it_is_there_for(lab: Lab) -> None:
    other = lab.unbroken("--run.seed", "2")
    found = " ".join(differences_of(other, lab.unbroken()))
    for word in ("loss of step 1 ", "00000.safetensors", "00000-00001.safetensors", "config_fingerprint"):
        assert word in found
    nothing = lab.new_run("nothing")
    assert differences_of(nothing, other) == [f"{nothing.dir.name} is not done"]


@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        pytest.param("kill:0:9:save-copied", 3, marks=pytest.mark.smoke),
        pytest.param("kill:1:9:save-file-half#2", 1, marks=pytest.mark.nightly),
        pytest.param("kill:0:9:save-rename", 1, marks=pytest.mark.nightly),
        pytest.param("kill:0:9:prune-half", 3, marks=pytest.mark.nightly),
    ],
)
def test_a_crash_in_a_save_costs_no_checkpoint_and_changes_nothing(lab: Lab, fault: str, stage: int) -> None:
    assert_passed(crash_in_save(lab, stage=stage, fault=fault))


@pytest.mark.parametrize("kind", ["bits", "cuts"])
def test_every_flipped_bit_and_every_cut_is_found(lab: Lab, kind: str) -> None:
    assert_passed(verifier(lab, kind=kind))


@pytest.mark.nightly
def test_a_damaged_checkpoint_is_passed_over_and_moved_aside(lab: Lab) -> None:
    assert_passed(damaged_folder(lab, pattern="engine/00001.safetensors"))


def test_a_run_goes_on_with_other_ranks_at_other_stages(lab: Lab) -> None:
    assert_passed(journey(lab, name="both", leg_steps=4))


@pytest.mark.parametrize(
    ("kind", "moment"),
    [("SIGTERM to rank 1", "save"), pytest.param("STOP file", "evaluation", marks=pytest.mark.nightly)],
)
def test_a_request_to_stop_loses_nothing(lab: Lab, kind: str, moment: str) -> None:
    assert_passed(request(lab, kind=kind, moment=moment))


@pytest.mark.nightly
def test_a_signal_to_the_launcher_loses_nothing_either(lab: Lab) -> None:
    assert_passed(launcher(lab, kind="deepspeed", moment="training"))


def test_a_frozen_rank_is_found_and_named(lab: Lab) -> None:
    assert_passed(freeze(lab, kind="stop", rank=1))


def test_the_death_of_rank_0_ends_the_others_with_one_line(lab: Lab) -> None:
    assert_passed(death(lab, rank=0))


def test_a_failed_write_costs_that_checkpoint_only(lab: Lab) -> None:
    assert_passed(failing_write(lab, kind="enospc", phase="save-file-half", rank=1))


@pytest.mark.parametrize("kind", ["SIGTERM to rank 1", pytest.param("STOP file", marks=pytest.mark.nightly)])
def test_who_asks_to_stop_is_heard_while_the_last_save_waits_for_a_full_disk(lab: Lab, kind: str) -> None:
    assert_passed(last_save(lab, kind=kind))


def test_a_run_whose_directory_goes_away_ends_with_an_error_and_goes_on_where_it_was_moved_to(lab: Lab) -> None:
    assert_passed(removed(lab, moment="slow:*:12:save-file"))


@pytest.mark.nightly
def test_a_full_disk_is_survived(lab: Lab) -> None:
    if not can_mount(lab.folder):
        pytest.skip("mounting a small disk is not allowed here")
    assert_passed(full_disk(lab))


@pytest.mark.parametrize(
    ("fault", "stage", "ranks"),
    [
        pytest.param("kill:1:10:step", 1, 2, marks=pytest.mark.smoke),
        ("kill:0:10:updated", 3, 2),
        pytest.param("kill:0:10:step,kill:1:10:step", 0, 2, marks=pytest.mark.nightly),
        ("kill:1:10:step,kill:0:2:leave@2", 2, 2),
        pytest.param("kill:1:10:step,kill:0:2:meet@2", 1, 2, marks=pytest.mark.nightly),
        pytest.param("kill:3:10:half-stored", 3, 4, marks=pytest.mark.nightly),
        pytest.param("stop:1:10:step", 1, 2, marks=pytest.mark.nightly),
        pytest.param("kill:1:10:pass#3", 3, 2, marks=pytest.mark.nightly),
        pytest.param("kill:0:10:updating", 1, 2, marks=pytest.mark.nightly),
        pytest.param("kill:1:10:decided,kill:0:0:build@2", 3, 2, marks=pytest.mark.nightly),
        pytest.param("kill:1:10:decided,kill:0:10:step@2", 1, 2, marks=pytest.mark.nightly),
        pytest.param("kill:1:10:step,stop:0:2:leave@2", 1, 2, marks=pytest.mark.nightly),
        pytest.param(THREE_IN_ROW, 1, 2, marks=pytest.mark.nightly),
    ],
)
def test_a_lost_rank_is_replaced_and_changes_no_bit(lab: Lab, fault: str, stage: int, ranks: int) -> None:
    assert_passed(replaced(lab, fault, stage=stage, ranks=ranks))


@pytest.mark.nightly
@pytest.mark.parametrize("when", REWINDS)
def test_a_rank_lost_around_a_rewind_changes_no_bit(lab: Lab, when: str) -> None:
    assert_passed(replaced(lab, *REWINDS[when], *SPIKY, both=SPIKES))


@pytest.mark.nightly
@pytest.mark.parametrize(("point", "stage"), [("step", 3), ("decided", 1)])
def test_a_rank_killed_inside_a_collective_changes_no_bit(lab: Lab, point: str, stage: int) -> None:
    assert_passed(in_collective(lab, point, stage=stage))


@pytest.mark.nightly
def test_a_lost_spare_is_replaced_and_replaces_the_rank(lab: Lab) -> None:
    assert_passed(spare_struck(lab, signal.SIGKILL))


@pytest.mark.nightly
def test_a_rank_frozen_about_as_long_as_recovery_waits_changes_no_bit(lab: Lab) -> None:
    assert_passed(thawed(lab))


@pytest.mark.nightly
def test_a_node_that_continues_after_its_rank_was_given_away_changes_no_bit(lab: Lab) -> None:
    assert_passed(node_paused(lab))


@pytest.mark.nightly
def test_a_rank_is_replaced_while_other_nodes_keep_copies_too(lab: Lab) -> None:
    assert_passed(replaced(lab, "kill:1:10:sent", *PARTNER, nodes=2))


@pytest.mark.parametrize(
    ("work", "stage"),
    [
        ("sample, before it is written", 1),
        pytest.param("validation", 3, marks=pytest.mark.nightly),
        pytest.param("save beside later steps", 1, marks=pytest.mark.nightly),
        pytest.param("save of the best", 2, marks=pytest.mark.nightly),
        *(pytest.param(work, 0, marks=pytest.mark.nightly) for work in IN_PROGRESS),
    ],
)
def test_a_loss_during_a_validation_a_sample_or_a_save_changes_no_bit(lab: Lab, work: str, stage: int) -> None:
    assert_passed(replaced(lab, *IN_PROGRESS[work], stage=stage))


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("phases", 1),
        pytest.param("XLNet", 1, marks=pytest.mark.nightly),
        *(pytest.param(kind, stage, marks=pytest.mark.nightly) for kind in KINDS_OF_RUNS for stage in (0, 3)),
        pytest.param("phases, in the first step of one", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_loss_in_runs_of_all_kinds_changes_no_bit(lab: Lab, kind: str, stage: int) -> None:
    assert_passed(replaced(lab, *KINDS_OF_RUNS[kind], stage=stage))


@pytest.mark.parametrize(
    ("stage", "both_copies"),
    [(3, True), *(pytest.param(stage, False, marks=pytest.mark.nightly) for stage in (0, 3))],
)
def test_lost_copies_come_from_the_other_node_or_from_the_checkpoint(lab: Lab, stage: int, both_copies: bool) -> None:
    assert_passed(damaged(lab, stage=stage, both_copies=both_copies))


@pytest.mark.parametrize("what", CARRIED)
def test_a_loss_changes_nothing_that_is_known_beside_the_state(lab: Lab, what: str) -> None:
    assert_passed(replaced(lab, *CARRIED[what], both=SPIKES))


def test_after_a_loss_samples_and_saves_are_recorded_once(lab: Lab) -> None:
    assert_passed(recorded_once(lab))


def test_a_request_to_stop_outlives_the_rank_that_had_it(lab: Lab) -> None:
    assert_passed(stopped_and_struck(lab))


@pytest.mark.nightly
def test_a_logging_interval_continues_after_a_loss(lab: Lab) -> None:
    assert_passed(replaced(lab, "kill:0:10:decided", "--metrics.log_every_steps", "7"))


def test_recovery_changes_no_bit_of_a_run_that_nothing_befalls(lab: Lab) -> None:
    differences = differences_of(lab.unbroken("--recover.spares", "1"), lab.unbroken())
    assert [one for one in differences if "config" not in one] == []


def test_a_loss_that_comes_again_ends_the_job_with_its_reason(lab: Lab) -> None:
    assert_passed(ended(lab, "kill:1:10:step@*", reason="The same happened before at this step"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "reason"), [(NO_SPARE, "the spares there have failed"), (FOUR_IN_ROW, "(recover.max_in_row=3)")]
)
def test_a_job_that_cannot_go_on_ends_with_its_reason(lab: Lab, fault: str, reason: str) -> None:
    assert_passed(ended(lab, fault, reason=reason))


def test_an_error_of_a_rank_itself_ends_the_job_on_all_ranks_as_that_error(lab: Lab) -> None:
    assert_passed(failed(lab))


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_no_other_job_gets_the_lock_while_ranks_are_replaced(lab: Lab, rank: int) -> None:
    assert_passed(locked(lab, f"kill:{rank}:10,slow:{1 - rank}:2:leave@2"))


@pytest.mark.parametrize(
    ("lost", "left", "stage"),
    [([1], 2, 1), pytest.param([0, 2, 3], 1, 3, marks=pytest.mark.nightly)],
)
def test_a_job_whose_rank_cannot_be_replaced_continues_with_fewer(
    lab: Lab, lost: list[int], left: int, stage: int
) -> None:
    assert_passed(shrunk(lab, lost=lost, left=left, stage=stage))


def test_a_spare_node_takes_the_rank_of_a_lost_node_and_no_bit_changes(lab: Lab) -> None:
    assert_passed(node_lost(lab))


@pytest.mark.parametrize(
    "program", ["txl launch", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("deepspeed", "torchrun"))]
)
def test_under_a_real_launcher_a_killed_rank_is_replaced_bit_for_bit(lab: Lab, program: str) -> None:
    assert_passed(launched(lab, program))


@pytest.mark.nightly
def test_a_request_to_stop_is_heard_while_the_job_recovers(lab: Lab) -> None:
    assert_passed(stopped(lab, to_launcher=False))


@pytest.mark.nightly
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("how", REQUESTS)
def test_each_request_to_stop_is_heard_while_the_job_recovers(lab: Lab, how: str, waits: bool) -> None:
    assert_passed(asked_to_stop(lab, how, waits=waits))


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_of_an_agent_while_the_job_recovers_ends_the_job(lab: Lab, rank: int) -> None:
    assert_passed(agent_lost(lab, rank))


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_launcher_while_the_job_recovers_loses_nothing(lab: Lab, number: int) -> None:
    assert_passed(launcher(lab, kind="txl launch", moment="recovery", number=number))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", range(4))
def test_a_storm_of_kills_changes_no_bit(lab: Lab, stage: int) -> None:
    assert_passed(storm(lab, kills=25, stage=stage, ranks=4))


@pytest.mark.nightly  # tests/dist/test_skip.py has a smaller case
def test_nan_on_one_rank_is_a_skipped_step_on_all(lab: Lab) -> None:
    assert_passed(not_finite(lab, kind="nan", rank=1, stage=3))


def test_too_many_nans_stop_the_run_and_name_the_documents(lab: Lab) -> None:
    assert_passed(too_many(lab))


def test_a_spike_is_wound_back_the_same_way_whatever_happens(lab: Lab) -> None:
    assert_passed(rewind(lab, is_killed=True))


def test_a_second_job_is_refused_while_the_first_lives(lab: Lab) -> None:
    assert_passed(second_job(lab))


def test_no_crafted_pickle_is_executed(lab: Lab) -> None:
    assert_passed(control(lab))
    run = lab.unbroken()
    name = f"checkpoints/step_{run.checkpoints[-1]:09d}/engine/00000.safetensors"
    go_on = ["train", str(lab.config), "--run.dir", "{}", "--train.max_steps", "30"]
    commands = [go_on, ["export", "{}", str(lab.folder / "bundle")]]
    assert_passed(
        poisoned(lab, what="a checkpoint", source=run.dir, name=name, seal=sealed, commands=commands, kinds=("torch",))
    )


@pytest.mark.nightly
def test_half_a_minute_of_mixed_faults_ends_where_the_unbroken_run_ends(lab: Lab) -> None:
    assert_passed(goodput(lab, minutes=0.4, mean_s=2.0))


def test_the_report_becomes_tables(tmp_path: Path) -> None:
    report = tmp_path / "chaos.jsonl"
    line = {"case": "sweep", "stage": 1, "trials": 2, "problems": [], "steps_lost": 3, "tokens_lost": 0, "fault": "a"}
    line |= {"detect_s": 0.5, "recover_s": 1.5, "bytes_left": 0, "figures": {}}
    bad = line | {"case": "disk: eio", "problems": ["a tear"], "detect_s": None}
    storm = line | {"case": "goodput", "figures": {"steps_lost_p95": 21.0}}
    report.write_text("".join(json.dumps(one) + "\n" for one in (line, line, bad, storm)))
    text = "\n".join(tables(report))
    assert "| sweep: kill -9 at every point of a save, ZeRO-1 | 4 | 4 | 3 | 0 | 0.5 | 1.5 | 0 |" in text
    assert "| disk: eio | 2 | 0 | 3 | 0 |  | 1.5 | 0 |" in text
    assert "goodput (2 faults: a):\n\n| steps lost p95 |\n| --- |\n| 21.0 |" in text
    assert "FAILED: disk: eio ZeRO-1 a: a tear" in text
