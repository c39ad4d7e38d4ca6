"""`txl sweep`: short runs over a grid of settings, to find the best point and its margin over the second-best point.
The margin is compared with the spread of the seeds.

    axes, seeds -> trials, each with its whole configuration -> checks -> run the trials that are not done -> table

A trial is a process `txl train OUT/NAME.toml`, with its run in OUT/NAME and its output in OUT/NAME.log. The sweep
stores no state of its own, so the same command continues an interrupted sweep. Trials with the first seed run first. A
point of the grid is ranked by the mean of its validation losses at the end of training. A point is ranked only if the
runs of all seeds are done. A mean over only the seeds that did not diverge would favour a high learning rate. A sweep
cannot run a trial on several ranks (`txl launch`), and it does not stop bad runs early.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from txl_dist.artifacts import DONE, SETTINGS
from txl_dist.config.load import (
    Config,
    changed,
    config_changes,
    config_to_toml,
    load_config,
    plan_batch,
    setting_names,
    settle_lanes,
    unknown_setting,
    value_of,
)
from txl_dist.config.phases import check_phases, each_phase
from txl_dist.config.schema import PrecisionSetting
from txl_dist.console.echo import echo
from txl_dist.console.formatting import bounded, counted, format_duration, format_table
from txl_dist.distributed.processes import process_id
from txl_dist.errors import REQUEUE, ConfigError, DataError, translate_errors
from txl_dist.io.files import atomic_replace
from txl_dist.report.compare import MAX_RUNS, unit_of, write_comparison
from txl_dist.report.summary import RunRecords, read_run
from txl_dist.train.monitoring.preemption import LAUNCHED_BY, SIGNALS

FAILED = 1
"""Exit code of a sweep in which a run failed."""
DECISIVE = 2.0
"""Margin between two points, in standard deviations of one run. A smaller margin is reported as possible chance."""
STOPPED = "stopped (the same command continues)"
TABLE, PAGE = "sweep.csv", "compare.html"
_NOT_AN_AXIS = {"run.dir": "--out sets the folder of the runs", "run.seed": "--seeds sets the number of seeds"}
"""Settings that the sweep sets itself, with the flag that controls each setting."""
_POLL_S = 0.2
_LOG_TAIL_BYTES = 20_000
"""Number of bytes at the end of a run's log that are read to find the reason why the run ended."""


class Axis(NamedTuple):
    """Setting that a sweep varies, with its values in the order given."""

    name: str
    values: tuple[Any, ...]


class Trial(NamedTuple):
    """One run of a sweep: a point of the grid (one combination of settings), with one seed."""

    point: str
    """Settings of the grid with their values, as a file name. Empty if only the seed varies."""
    values: tuple[Any, ...]
    """Values of the settings, in the order of the axes."""
    config: Config
    """Whole configuration of the run."""

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.config.run.dir)

    @property
    def is_done(self) -> bool:
        """Return whether the run has reached its end."""
        return (self.run_dir / DONE).is_file()


class Outcome(NamedTuple):
    """Result of one trial (run) of a sweep."""

    trial: Trial
    run: RunRecords | None
    """Records of the run, or None if the run is not done."""
    state: str
    """Either "done", or the reason why the run is not done."""


class PointScore(NamedTuple):
    """Validation losses of one point of the grid, which is one combination of settings, over its seeds."""

    point: str
    values: tuple[Any, ...]
    losses: tuple[float, ...]
    """Losses at the end of training of the finished runs, in the order of the seeds."""
    problem: str
    """Reason why a run of this point is not done. The point is then not ranked. The text is empty if all runs of the
    point are done."""

    @property
    def mean(self) -> float:
        """Mean of the losses. There must be at least one loss."""
        return statistics.fmean(self.losses)

    @property
    def deviation(self) -> float:
        """Standard deviation of one run in nats or bits, estimated from the n seeds with the divisor n - 1. It is NaN
        for a single seed."""
        if len(self.losses) < 2:
            return math.nan
        return statistics.stdev(self.losses)


def parse_axis(words: str) -> Axis:
    """Parse the text of an axis, such as `optim.lr=1e-3,2e-3`. Values are separated by commas.

    If a value is a list, its entries are separated by blanks: `model.cutoffs=512 2048,1000` has two values. Raises
    ConfigError for an unknown setting, an impossible value, no value, or the same value twice.
    """
    spelt, _, text = words.partition("=")
    name = spelt.strip().removeprefix("--").replace("-", "_")
    if name not in setting_names():
        raise ConfigError(f"--grid {words}: {unknown_setting(name)}")
    if name in _NOT_AN_AXIS:
        raise ConfigError(f"--grid {words}: a sweep cannot vary {name}: {_NOT_AN_AXIS[name]}.")
    if not text.strip():
        raise ConfigError(f"--grid {words} has no values. Write --grid {name}=VALUE,VALUE.")
    values = tuple(value_of(name, entry.split()) for entry in text.split(","))
    if len(set(values)) < len(values):
        raise ConfigError(f"--grid {words} has a value twice. Give each value once.")
    return Axis(name, values)


def trials_of(base: Config, axes: Sequence[Axis], *, num_seeds: int, out: Path) -> list[Trial]:
    """Return all trials (runs) of a sweep. The trials of the first seed come first. The seeds count up from
    base.run.seed.

    Raises ConfigError if an axis is given twice, if there is no seed, or if there are fewer than two runs.
    """
    names = [axis.name for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--grid has {name} twice. Give all of its values at once: --grid {name}=VALUE,VALUE.")
    if num_seeds < 1:
        raise ConfigError(f"--seeds {num_seeds}: it must be 1 or more.")
    grid = list(itertools.product(*[axis.values for axis in axes]))
    trials = []
    for seed in range(base.run.seed, base.run.seed + num_seeds):
        for values in grid:
            settings = dict(zip(names, values, strict=True))
            point = ",".join(f"{name}={_file_name_part(value)}" for name, value in settings.items())
            folder_name = f"{point},seed={seed}".lstrip(",")
            settings["run.seed"] = seed
            settings["run.dir"] = str(out / folder_name)
            config = settle_lanes(changed(base, settings), given=settings)
            trials.append(Trial(point, values, config))
    if len(trials) < 2:
        raise ConfigError("a sweep needs two runs or more. Give --grid section.key=VALUE,VALUE, or --seeds 2 or more.")
    run_dirs = {trial.run_dir for trial in trials}
    if len(run_dirs) < len(trials):
        raise ConfigError(
            "two values of --grid give the same folder name, because special characters become _ in folder names. "
            "Remove one of the two values."
        )
    return trials


def _file_name_part(value: Any) -> str:
    """Write a value as a part of a file name."""
    if isinstance(value, tuple):
        text = "+".join(map(str, value))
    else:
        text = str(value)
    return re.sub(r"[^\w.+-]", "_", text)


def checked_trials(trials: Sequence[Trial], *, check: Callable[[Config], None]) -> list[Trial]:
    """Check the trials and return them. Raise ConfigError, before the first run, for settings that are certainly wrong.

    `check` checks the paths of one configuration. If a run exists already, its settings must be the same as in its
    trial. If runs have replaced engine.precision = "auto", the other trials get their precision, because losses in
    different precisions cannot be compared.
    """
    for trial in trials:
        if not trial.config.data.eval_split:
            raise ConfigError(
                "a sweep compares losses on the validation split, so data.eval_split must not be empty. "
                "Give --data.eval_split the name of the validation split."
            )
        check_phases(trial.config)
        for _, staged in each_phase(trial.config):
            plan_batch(staged.train, world_size=1)
    for trial in trials:
        check(trial.config)
        settings_file = trial.run_dir / SETTINGS
        if not settings_file.is_file():
            continue
        saved = load_config(settings_file)
        wanted = trial.config
        if wanted.engine.precision == "auto":
            wanted = changed(wanted, {"engine.precision": saved.engine.precision})
        changes = config_changes(saved, wanted)
        if changes:
            listed = ", ".join(f"{change.key} {change.old} -> {change.new}" for change in changes)
            raise ConfigError(
                f"{trial.run_dir} was made with other settings ({listed}), so its loss cannot be compared with the "
                "losses of the other runs. Restore these settings, or choose another --out."
            )
    kept = _precision_of_runs(trials)
    return [_with_precision(trial, kept) for trial in trials]


def _precision_of_runs(trials: Sequence[Trial]) -> PrecisionSetting | None:
    """Return the precision that runs have put in place of engine.precision = "auto", or None if there is no such run.

    Raises ConfigError if runs have different ones.
    """
    kept: dict[PrecisionSetting, Path] = {}
    for trial in trials:
        settings_file = trial.run_dir / SETTINGS
        if trial.config.engine.precision == "auto" and settings_file.is_file():
            kept.setdefault(load_config(settings_file).engine.precision, trial.run_dir)
    if len(kept) > 1:
        listed = ", ".join(f"{run_dir} in {precision}" for precision, run_dir in kept.items())
        raise ConfigError(
            f'runs of this sweep were made in different precisions ({listed}), because engine.precision is "auto" and '
            "their processors differ, so their losses cannot be compared. Choose another --out, or remove the runs of "
            "one precision and set engine.precision to the other."
        )
    return next(iter(kept), None)


def _with_precision(trial: Trial, kept: PrecisionSetting | None) -> Trial:
    """Return the trial with the precision `kept`, if there is one and its own is "auto"."""
    if kept is None or trial.config.engine.precision != "auto":
        return trial
    return trial._replace(config=changed(trial.config, {"engine.precision": kept}))


def run_trials(trials: Sequence[Trial], *, jobs: int, devices: Sequence[str] = ()) -> tuple[dict[Path, str], bool]:
    """Train the trials that are not done, `jobs` at a time. Call this function in the main thread only.

    `devices` are GPUs by their names in CUDA_VISIBLE_DEVICES, which the jobs use in turn. Without `devices` that
    variable is not changed. Returns (problems, was_stopped). `problems` maps the directory of each run that is not done
    to the reason. `was_stopped` says whether this process was asked to stop. In that case the running trials save and
    exit before this function returns.
    """
    waiting = [trial for trial in trials if not trial.is_done]
    running: dict[int, tuple[Trial, subprocess.Popen[bytes]]] = {}
    problems: dict[Path, str] = {}
    received_signals: list[int] = []
    stopped_pids: set[int] = set()

    def on_signal(number: int, frame: FrameType | None) -> None:
        received_signals.append(number)

    handlers_before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        while running or (waiting and not received_signals):
            for slot in sorted(set(range(jobs)) - running.keys()):
                if waiting and not received_signals:
                    trial = waiting.pop(0)
                    environment = _environment(slot, jobs=jobs, devices=devices)
                    running[slot] = trial, _start(trial, environment)
            time.sleep(_POLL_S)
            if received_signals and running and not stopped_pids:
                name = signal.Signals(received_signals[0]).name
                num_running = counted(len(running), "run")
                echo(f"{name}: {num_running} will save and exit, and no further run starts", to=sys.stderr)
            for slot, (trial, process) in list(running.items()):
                if received_signals and process.pid not in stopped_pids:
                    process.terminate()
                    stopped_pids.add(process.pid)
                code = process.poll()
                if code is None:
                    continue
                del running[slot]
                state = "done"
                if not trial.is_done:
                    state = _why_not_done(trial, code, was_asked_to_stop=process.pid in stopped_pids)
                    problems[trial.run_dir] = state
                num_left = len(waiting) + len(running)
                echo(f"{trial.run_dir.name}: {state}. Runs left: {num_left}", to=sys.stderr)
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
    return problems, bool(received_signals)


def _why_not_done(trial: Trial, code: int, *, was_asked_to_stop: bool) -> str:
    """Return the reason why a trial is not done, from the exit code of its process."""
    died_of_request = was_asked_to_stop and code == -signal.SIGTERM
    if code == REQUEUE or died_of_request:
        return STOPPED
    return reason_of(code, _log_of(trial))


def _environment(slot: int, *, jobs: int, devices: Sequence[str]) -> Mapping[str, str]:
    """Return the environment variables of a run: its share of cores and GPUs, and the identity of the sweep's process.
    The run stops when the sweep's process ends."""
    variables = {LAUNCHED_BY: json.dumps(process_id())}
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        num_cores = len(os.sched_getaffinity(0))
        variables["OMP_NUM_THREADS"] = str(max(1, num_cores // jobs))
    if devices:
        variables["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return os.environ | variables


def _start(trial: Trial, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Write the settings of a trial, and start its process with the output in its log.

    Raises ConfigError if these files cannot be written.
    """
    settings = trial.run_dir.with_name(f"{trial.run_dir.name}.toml")
    with translate_errors(ConfigError, f"cannot write to {settings.parent}", "Choose another --out."):
        settings.parent.mkdir(parents=True, exist_ok=True)
        atomic_replace(settings, config_to_toml(trial.config).encode())
        path = _log_of(trial)
        path.unlink(missing_ok=True)  # a link of this name must not be written through
        with path.open("xb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "txl_dist", "train", str(settings)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # this process passes a Ctrl-C on, once
            )


def _log_of(trial: Trial) -> Path:
    """Return the file that gets the output of a trial."""
    return trial.run_dir.with_name(f"{trial.run_dir.name}.log")


def reason_of(code: int, log: Path) -> str:
    """Return why a run is not done: the last error that its process printed, or else its last line, or else its exit
    code."""
    if code < 0:
        return f"died of {signal.Signals(-code).name}, see {log}"
    tail = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    errors = [line.partition(" error: ")[2] for line in lines if line.startswith("txl train: error: ")]
    if errors:
        return errors[-1]
    if lines:
        return lines[-1]
    return f"ended with exit code {code}"


def outcomes_of(trials: Sequence[Trial], problems: Mapping[Path, str]) -> list[Outcome]:
    """Return the outcome of every trial, in the order of the trials."""
    outcomes = []
    for trial in trials:
        run = None
        state = problems.get(trial.run_dir, "not started")
        if trial.is_done:
            try:
                run = read_run(trial.run_dir)
                state = "done"
            except DataError as error:  # the run's records were removed
                state = str(error)
        outcomes.append(Outcome(trial, run, state))
    return outcomes


def scores_of(outcomes: Sequence[Outcome], *, column: str) -> list[PointScore]:
    """Return one score per point of the grid: ranked points first, with the best first, then the other points.

    `column` is the name of the validation loss in the records.
    """
    ranked = []
    unranked = []
    points = dict.fromkeys((trial.point, trial.values) for trial, _, _ in outcomes)
    for point, values in points:
        score = _score_of(point, values, outcomes, column=column)
        if score.problem:
            unranked.append(score)
        else:
            ranked.append(score)
    ranked.sort(key=lambda score: score.mean)
    return ranked + unranked


def _score_of(point: str, values: tuple[Any, ...], outcomes: Sequence[Outcome], *, column: str) -> PointScore:
    """Return the score of one point of the grid. `outcomes` contains the outcomes of all trials."""
    losses = []
    problems = []
    for trial, run, state in outcomes:
        if trial.point != point:
            continue
        if run is None:
            problems.append(state)
            continue
        loss = run.history.held_out.last(column)
        if loss is None:
            problems.append("no validation loss was recorded")
        else:
            losses.append(loss)
    if problems:
        problem = problems[0]
    else:
        problem = ""
    return PointScore(point, values, tuple(losses), problem)


def best_point_lines(scores: Sequence[PointScore], axes: Sequence[Axis]) -> list[str]:
    """Return lines that name the best point, its margin over the second-best point, and axes whose grid may be too
    short.

    The margin is compared with the standard deviation of a run.
    """
    ranked = [score for score in scores if not score.problem]
    if not ranked:
        return ["no point of the grid has finished all of its runs, so none is best"]
    best = ranked[0]
    line = f"best: {best.point or 'the settings as they are'} with {bounded(best.mean)}"
    if len(ranked) > 1:
        line += _margin(best, ranked[1])
    lines = [line]
    for axis, value in zip(axes, best.values, strict=True):
        if len(axis.values) <= 2 or not isinstance(value, int | float):
            continue
        if value in (min(axis.values), max(axis.values)):
            lines.append(f"{axis.name} is best at the end of its grid, {value}: add values beyond this one")
    return lines


def _margin(best: PointScore, second: PointScore) -> str:
    """Return a text with the margin of the best point over the second-best point, and whether the margin may be
    chance."""
    margin = second.mean - best.mean
    text = f", {bounded(margin)} below {second.point}"
    num_seeds = len(best.losses)
    if num_seeds == 1:
        return f"{text}. With one seed per point, chance cannot be estimated (give --seeds 3)"
    deviation = math.sqrt((best.deviation**2 + second.deviation**2) / 2)
    spread = f"{bounded(deviation)} over {counted(num_seeds, 'seed')}"
    if margin < DECISIVE * deviation:
        return f"{text}: within {DECISIVE:g} deviations of a run ({spread}), it may be chance"
    if deviation:
        times = f"{margin / deviation:.1f} times "
    else:
        times = "beyond "
    return f"{text}: {times}the deviation of a run ({spread})"


def table_of(scores: Sequence[PointScore]) -> list[str]:
    """Return a table with one line per point, the best first. For an unranked point the line contains the reason."""
    rows = [["settings", "validation", "deviation", "seeds", ""]]
    for score in scores:
        if score.losses:
            mean = bounded(score.mean)
        else:
            mean = "-"
        if len(score.losses) > 1:
            deviation = bounded(score.deviation)
        else:
            deviation = "-"
        num_seeds = str(len(score.losses))
        rows.append([score.point or "as they are", mean, deviation, num_seeds, score.problem])
    return format_table(rows)


_RECORD_COLUMNS = ("settings", "seed", "state", "steps", "tokens", "seconds", "held_out_nats", "held_out_bits_per_byte")


def records_csv(outcomes: Sequence[Outcome]) -> str:
    """Return CSV with one row per run, in the order of the trials.

    The losses at the end are in nats per token and in bits per byte.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_RECORD_COLUMNS)
    for trial, run, state in outcomes:
        numbers: list[object] = [""] * 5
        if run:
            history = run.history
            num_tokens = int(history.train.last("tokens_seen") or 0)
            seconds = round(3600 * history.hours, 1)
            nats = history.held_out.last("loss")
            bits_per_byte = history.held_out.last("bits_per_byte")
            numbers = [history.step, num_tokens, seconds, nats, bits_per_byte]
        writer.writerow([trial.point, trial.config.run.seed, state, *numbers])
    return stream.getvalue()


def train_grid(
    base: Config,
    axes: Sequence[Axis],
    *,
    num_seeds: int,
    jobs: int,
    out: Path,
    check: Callable[[Config], None],
    devices: Callable[[], Sequence[str]],
) -> tuple[list[str], int]:
    """Run a whole sweep. Returns (lines for people, exit code).

    The exit code is 0, REQUEUE if the sweep was asked to stop, or FAILED if a run failed. `check` checks the paths of a
    configuration, and `devices` returns the GPUs. Raises ConfigError before the first run for settings that are
    certainly wrong, and after the last run if runs have chosen different precisions.
    """
    trials = checked_trials(trials_of(base, axes, num_seeds=num_seeds, out=out), check=check)
    num_done = sum(trial.is_done for trial in trials)
    num_trials = counted(len(trials), "run")
    echo(f"txl sweep: {num_trials} in {out}, {num_done} of them done, {jobs} at a time", to=sys.stderr)
    if num_done < len(trials):
        gpus = devices()
    else:
        gpus = ()
    problems, was_stopped = run_trials(trials, jobs=jobs, devices=gpus)
    outcomes = outcomes_of(trials, problems)
    runs = [outcome.run for outcome in outcomes if outcome.run]
    with translate_errors(ConfigError, f"cannot write to {out}", "Choose another --out."):
        out.mkdir(parents=True, exist_ok=True)
        atomic_replace(out / TABLE, records_csv(outcomes).encode())
    _precision_of_runs(trials)  # with engine.precision = "auto" each run of a new sweep has chosen its own
    lines = _summary_lines(outcomes, axes, page=out / PAGE)
    duration = format_duration(3600 * sum(run.history.hours for run in runs))
    lines.append(f"records: {out / TABLE}, with {duration} of work in {counted(len(runs), 'run')}")
    if was_stopped:
        return lines, REQUEUE
    if len(runs) < len(trials):
        return lines, FAILED
    return lines, 0


def _summary_lines(outcomes: Sequence[Outcome], axes: Sequence[Axis], *, page: Path) -> list[str]:
    """Return the table of points with its explanation, and write the page with the curves of the best runs."""
    runs = [outcome.run for outcome in outcomes if outcome.run]
    if runs:
        unit = unit_of(runs)
    else:
        unit = None
    if unit is not None and not unit.column:
        return [unit.sentence]
    scores = scores_of(outcomes, column=unit.column if unit else "loss")
    lines = table_of(scores)
    if unit is not None:
        lines.append(unit.sentence)
        if unit.is_fair:
            lines += best_point_lines(scores, axes)
    shown = _best_run_dirs(outcomes, scores)
    if len(shown) > 1:
        lines.append(write_comparison(shown, out=page)[-1])
    return lines


def _best_run_dirs(outcomes: Sequence[Outcome], scores: Sequence[PointScore]) -> list[Path]:
    """Return up to MAX_RUNS finished runs for the page: runs with the first seed first, and the best points first."""
    rank_of_point = {score.point: rank for rank, score in enumerate(scores)}
    done = [trial for trial, run, _ in outcomes if run]
    done.sort(key=lambda trial: (trial.config.run.seed, rank_of_point[trial.point]))
    return [trial.run_dir for trial in done[:MAX_RUNS]]
