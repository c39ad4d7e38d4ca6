"""A sweep: the meaning of a grid, the runs that it makes, what is compared, and the margin of the best run."""

import csv
import io
import json
import math
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from txl_dist.cli.sweep import run_sweep
from txl_dist.config.load import Config, changed, config_to_toml
from txl_dist.errors import ConfigError
from txl_dist.launcher import sweep as sweep_file
from txl_dist.launcher.sweep import (
    STOPPED,
    Axis,
    PointScore,
    Trial,
    best_point_lines,
    checked_trials,
    outcomes_of,
    parse_axis,
    reason_of,
    records_csv,
    run_trials,
    scores_of,
    table_of,
    trials_of,
)

RATES = Axis("optim.lr", (1e-3, 2e-3, 4e-3))


def score(rate: float, *losses: float, problem: str = "") -> PointScore:
    return PointScore(f"optim.lr={rate}", (rate,), losses, problem)


def finish(trial: Trial, *, loss: float) -> None:
    """What a run leaves behind that is done."""
    trial.run_dir.mkdir(parents=True)
    (trial.run_dir / "config.toml").write_text(config_to_toml(trial.config), encoding="utf-8")
    train = {"kind": "train", "step": 10, "loss": 3.0, "tokens_seen": 640}
    records = [{"kind": "event", "event": "start", "step": 0}, train]
    records += [{"kind": "eval", "step": step, "loss": loss + 1 - step / 10, "tokens": 900} for step in (5, 10)]
    (trial.run_dir / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    (trial.run_dir / "DONE").write_text("10\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "axis"),
    [
        ("optim.lr=1e-3,0.002", Axis("optim.lr", (0.001, 0.002))),
        ("--train.max-steps=5,6", Axis("train.max_steps", (5, 6))),
        ("model.cutoffs=512 2048,1000,", Axis("model.cutoffs", (("512", "2048"), ("1000",), ()))),
        ("model.pre_norm=True,False", Axis("model.pre_norm", (True, False))),
        ("optim.name=adamw,sgd", Axis("optim.name", ("adamw", "sgd"))),
    ],
)
def test_an_axis_has_values_of_its_settings_type(words: str, axis: Axis) -> None:
    found = parse_axis(words)
    expected = axis.values
    if axis.name == "model.cutoffs":
        expected = tuple(tuple(int(one) for one in value) for value in axis.values)
    assert found == Axis(axis.name, expected)
    assert [type(value) for value in found.values] == [type(value) for value in expected]


def test_every_point_is_run_with_every_seed_those_of_the_first_seed_first(tmp_path: Path) -> None:
    axes = [RATES, Axis("model.cutoffs", ((512, 2048), ()))]
    trials = trials_of(Config(), axes, num_seeds=2, out=tmp_path)
    assert len(trials) == 12
    assert [trial.config.run.seed for trial in trials] == [1] * 6 + [2] * 6
    assert {(trial.config.optim.lr, trial.config.model.cutoffs) for trial in trials[:6]} == {
        (rate, cutoffs) for rate in RATES.values for cutoffs in axes[1].values
    }
    assert len({trial.run_dir for trial in trials}) == 12
    assert trials[0].run_dir == tmp_path / "optim.lr=0.001,model.cutoffs=512+2048,seed=1"
    assert {trial.run_dir.parent for trial in trials} == {tmp_path}


def test_seeds_alone_are_a_sweep_and_one_run_is_none(tmp_path: Path) -> None:
    assert [trial.run_dir.name for trial in trials_of(Config(), [], num_seeds=2, out=tmp_path)] == ["seed=1", "seed=2"]
    with pytest.raises(ConfigError, match="a sweep needs two runs or more"):
        trials_of(Config(), [], num_seeds=1, out=tmp_path)


def test_values_that_are_one_folder_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the same folder name"):
        trials_of(Config(), [Axis("data.path", ("a/b", "a_b"))], num_seeds=1, out=tmp_path)


def test_a_run_made_with_other_settings_does_not_stand_beside_the_others(tmp_path: Path) -> None:
    trials = trials_of(Config(), [RATES], num_seeds=1, out=tmp_path)
    finish(trials[0], loss=3.0)
    checked_trials(trials, check=lambda config: None)
    longer = Config.model_validate({"train": {"max_steps": 7}})
    with pytest.raises(ConfigError, match=r"made with other settings \(train.max_steps \d+ -> 7\)"):
        checked_trials(trials_of(longer, [RATES], num_seeds=1, out=tmp_path), check=lambda config: None)


def test_a_run_that_has_replaced_auto_stands_beside_the_others(tmp_path: Path) -> None:
    base = Config.model_validate({"engine": {"precision": "auto"}})
    trial, *others = trials_of(base, [RATES], num_seeds=1, out=tmp_path)
    finish(trial._replace(config=changed(trial.config, {"engine.precision": "bf16"})), loss=3.0)
    assert checked_trials([trial, *others], check=lambda config: None)[0].config.engine.precision == "bf16"


def test_a_sweep_that_continues_on_another_processor_keeps_the_precision_of_its_runs(tmp_path: Path) -> None:
    base = Config.model_validate({"engine": {"precision": "auto"}})
    trials = trials_of(base, [RATES], num_seeds=2, out=tmp_path)
    assert {trial.config.engine.precision for trial in checked_trials(trials, check=lambda config: None)} == {"auto"}
    finish(trials[1]._replace(config=changed(trials[1].config, {"engine.precision": "bf16"})), loss=3.0)
    assert {trial.config.engine.precision for trial in checked_trials(trials, check=lambda config: None)} == {"bf16"}
    finish(trials[2]._replace(config=changed(trials[2].config, {"engine.precision": "fp32"})), loss=3.0)
    with pytest.raises(ConfigError, match=r"different precisions \(.* in bf16, .* in fp32\).* Choose another --out"):
        checked_trials(trials, check=lambda config: None)


def test_runs_of_a_new_sweep_that_have_chosen_different_precisions_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_trials(trials: list[Trial], **options: object) -> tuple[dict[Path, str], bool]:
        for trial, precision in zip(trials, ("bf16", "fp32", "bf16"), strict=True):
            finish(trial._replace(config=changed(trial.config, {"engine.precision": precision})), loss=3.0)
        return {}, False

    monkeypatch.setattr(sweep_file, "run_trials", run_trials)
    base = Config.model_validate({"engine": {"precision": "auto"}})
    with pytest.raises(ConfigError, match=r"different precisions \(.* in bf16, .* in fp32\)"):
        sweep_file.train_grid(
            base, [RATES], num_seeds=1, jobs=1, out=tmp_path, check=lambda config: None, devices=tuple
        )


def test_without_held_out_text_nothing_is_decided(tmp_path: Path) -> None:
    base = Config.model_validate({"data": {"eval_split": ""}})
    with pytest.raises(ConfigError, match=r"data.eval_split must not be empty"):
        checked_trials(trials_of(base, [RATES], num_seeds=1, out=tmp_path), check=lambda config: None)


def test_stages_that_cannot_be_are_refused_before_the_first_run(tmp_path: Path) -> None:
    base = Config.model_validate({"train": {"phases": ["until=0.5 num_lanes=3"]}})
    with pytest.raises(ConfigError, match=r"^train\.phases"):
        checked_trials(trials_of(base, [RATES], num_seeds=1, out=tmp_path), check=lambda config: None)


def test_points_are_judged_by_the_last_held_out_loss_and_only_with_all_their_seeds(tmp_path: Path) -> None:
    trials = trials_of(Config(), [RATES], num_seeds=2, out=tmp_path)
    for trial, loss in zip(trials, (4.2, 4.0, 3.0, 4.4, 4.2), strict=False):
        finish(trial, loss=loss)
    outcomes = outcomes_of(trials, {trials[5].run_dir: "the loss is not finite"})
    scores = scores_of(outcomes, column="loss")
    assert [one.values for one in scores] == [(2e-3,), (1e-3,), (4e-3,)]
    assert [one.losses for one in scores] == [pytest.approx((4.0, 4.2)), pytest.approx((4.2, 4.4)), (3.0,)]
    assert [one.problem for one in scores] == ["", "", "the loss is not finite"]
    assert best_point_lines(scores, [RATES])[0].startswith(
        "best: optim.lr=0.002 with 4.1000, 0.2000 below optim.lr=0.001"
    )
    *_, last = table_of(scores)
    assert last.split() == ["optim.lr=0.004", "3.0000", "-", "1", "the", "loss", "is", "not", "finite"]

    rows = list(csv.DictReader(io.StringIO(records_csv(outcomes))))
    assert [row["held_out_nats"] for row in rows] == ["4.2", "4.0", "3.0", "4.4", "4.2", ""]
    assert (rows[0]["steps"], rows[0]["tokens"], rows[0]["seed"]) == ("10", "640", "1")
    assert rows[5]["state"] == "the loss is not finite"


def test_a_run_that_was_not_reached_is_no_failure_of_its_settings(tmp_path: Path) -> None:
    scores = scores_of(outcomes_of(trials_of(Config(), [RATES], num_seeds=1, out=tmp_path), {}), column="loss")
    assert [one.problem for one in scores] == ["not started"] * 3
    assert "none is best" in best_point_lines(scores, [RATES])[0]


def test_the_margin_is_told_in_deviations_of_a_run() -> None:
    best, following = score(2e-3, 4.0, 4.1, 4.2), score(1e-3, 4.6, 4.7, 4.8)
    assert best.deviation == pytest.approx(0.1)
    (line,) = best_point_lines([best, following], [RATES])
    assert line.endswith("0.6000 below optim.lr=0.001: 6.0 times the deviation of a run (0.1000 over 3 seeds)")


def test_a_margin_that_seeds_alone_can_make_is_called_chance() -> None:
    (line,) = best_point_lines([score(2e-3, 4.0, 4.2), score(1e-3, 4.1, 4.3)], [RATES])
    assert "it may be chance" in line


def test_of_one_seed_nothing_is_known_about_chance() -> None:
    assert math.isnan(score(2e-3, 4.0).deviation)
    (line,) = best_point_lines([score(2e-3, 4.0), score(1e-3, 4.5)], [RATES])
    assert line.endswith("With one seed per point, chance cannot be estimated (give --seeds 3)")


def test_a_best_value_at_the_end_of_its_grid_asks_for_more_of_it() -> None:
    assert best_point_lines([score(4e-3, 4.0), score(1e-3, 4.5)], [RATES])[1] == (
        "optim.lr is best at the end of its grid, 0.004: add values beyond this one"
    )


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (2, "txl train: error: no such thing.\ntorch: goodbye\n", "no such thing."),
        (1, "Traceback ...\nValueError: a defect\n\n", "ValueError: a defect"),
        (-9, "step 1/2\n", "died of SIGKILL, see "),
        (3, "", "ended with exit code 3"),
    ],
)
def test_why_a_run_failed_is_what_it_said_itself(tmp_path: Path, code: int, said: str, reason: str) -> None:
    (tmp_path / "run.log").write_text(said, encoding="utf-8")
    assert reason_of(code, tmp_path / "run.log").startswith(reason)


def test_a_request_to_stop_reaches_the_runs_and_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = trials_of(Config(), [RATES], num_seeds=1, out=tmp_path)
    started: list[Path] = []

    def start(trial: Trial, environment: object) -> subprocess.Popen[bytes]:
        started.append(trial.run_dir)
        return subprocess.Popen(["sleep", "60"], start_new_session=True)

    monkeypatch.setattr(sweep_file, "_start", start)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    before = signal.getsignal(signal.SIGTERM)
    problems, was_asked = run_trials(trials, jobs=2)
    assert was_asked
    assert started == [trial.run_dir for trial in trials[:2]]
    assert problems == dict.fromkeys(started, STOPPED)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_whose_records_are_gone_is_a_row_too(tmp_path: Path) -> None:
    trials = trials_of(Config(), [RATES], num_seeds=1, out=tmp_path)
    finish(trials[0], loss=3.0)
    (trials[0].run_dir / "metrics.jsonl").unlink()
    first, *_ = outcomes_of(trials, {})
    assert first.run is None
    assert "metrics.jsonl" in first.state


def test_a_setting_of_all_runs_is_none_of_the_grid(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    words = [str(recipe), "--grid", "optim.lr=1e-3,2e-3", "--out", str(tmp_path / "out")]
    for flag in (["--optim.lr", "5e-3"], ["--optim.lr=5e-3"]):
        with pytest.raises(ConfigError, match=r"^optim\.lr is set for all runs and also in --grid"):
            run_sweep([*words, *flag], read_settings=lambda words: Config())
    with pytest.raises(ConfigError, match=r"train\.max_steps is set for all runs"):
        run_sweep(
            [str(recipe), "--grid", "train.max_steps=1,2", "--train.max-steps", "3"],
            read_settings=lambda words: Config(),
        )
