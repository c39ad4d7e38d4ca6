"""`txl sweep`: short runs over a grid of settings; which is best, by how much, beside what seeds alone make of it.

    axes, seeds -> trials, each with its whole configuration -> refuse what cannot be -> run what is not done -> table

A trial is a process `txl train OUT/NAME.toml`, with its run in OUT/NAME and what it said in OUT/NAME.log. Nothing is
kept in this process, so the same command goes on wherever the last one ended. Trials with the first seed come first. A
point of the grid is judged by its held-out losses at the end of training, and only if all of its seeds are done: the
mean over those that did not diverge would flatter a rate that is too high. What it gives up: several ranks per run
(`txl launch`), and stopping bad runs early.
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
    unknown_setting,
    value_of,
)
from txl_dist.config.phases import check_phases, each_phase
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
"""A margin of fewer deviations than this may be chance."""
STOPPED = "stopped; the same command goes on"
TABLE, PAGE = "sweep.csv", "compare.html"
_OWN = {"run.dir": "--out says where the runs lie", "run.seed": "--seeds says how many there are"}
_LOOK_EVERY_S = 0.2
_LAST_WORDS = 20_000
"""Bytes at the end of what a run said that are looked into for the reason of its end."""


class Axis(NamedTuple):
    """A setting and its values, in the order given."""

    name: str
    values: tuple[Any, ...]


class Trial(NamedTuple):
    """One run: a point of the grid with a seed."""

    point: str
    """Settings of the grid with their values; a file name. Empty where only seeds differ."""
    values: tuple[Any, ...]
    """The same, as the axes come."""
    config: Config

    @property
    def run_dir(self) -> Path:
        """Its folder."""
        return Path(self.config.run.dir)

    @property
    def is_done(self) -> bool:
        """Whether it came to its end."""
        return (self.run_dir / DONE).is_file()


class Outcome(NamedTuple):
    """What became of a trial."""

    trial: Trial
    run: RunRecords | None
    """Its records, if it is done."""
    state: str
    """done, or why not."""


class Score(NamedTuple):
    """Of a point of the grid."""

    point: str
    values: tuple[Any, ...]
    losses: tuple[float, ...]
    """At the end of training, by seed; of those that are done."""
    problem: str
    """Why it is not judged: the first run that is not done. Empty if all are."""

    @property
    def mean(self) -> float:
        """Of the losses; there must be one."""
        return statistics.fmean(self.losses)

    @property
    def deviation(self) -> float:
        """Of one run, estimated from the seeds (n - 1); NaN of a single one."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else math.nan


def parse_axis(words: str) -> Axis:
    """`optim.lr=1e-3,2e-3`; entries of a list stand apart by blanks: `model.cutoffs=512 2048,1000`.

    Raises ConfigError for an unknown setting, a value that it cannot have, no value, or the same value twice.
    """
    spelt, _, text = words.partition("=")
    name = spelt.strip().removeprefix("--").replace("-", "_")
    if name not in setting_names():
        raise ConfigError(f"--grid {words}: {unknown_setting(name)}")
    if name in _OWN:
        raise ConfigError(f"--grid {words}: {name} is no axis: {_OWN[name]}.")
    if not text.strip():
        raise ConfigError(f"--grid {words} has no values. Write --grid {name}=VALUE,VALUE.")
    values = tuple(value_of(name, one.split()) for one in text.split(","))
    if len(set(values)) < len(values):
        raise ConfigError(f"--grid {words} has a value twice. Give each once.")
    return Axis(name, values)


def trials_of(base: Config, axes: Sequence[Axis], *, num_seeds: int, out: Path) -> list[Trial]:
    """All runs, those of the first seed first; seeds are base.run.seed and the numbers behind it.

    Raises ConfigError for an axis twice, no seed, or fewer than two runs.
    """
    names = [axis.name for axis in axes]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ConfigError(f"--grid has {twice} twice. Give all of its values at once: --grid {twice}=VALUE,VALUE.")
    if num_seeds < 1:
        raise ConfigError(f"--seeds {num_seeds}: it must be 1 or more.")
    trials = []
    for seed in range(base.run.seed, base.run.seed + num_seeds):
        for values in itertools.product(*(axis.values for axis in axes)):
            point = ",".join(f"{name}={_spelt(value)}" for name, value in zip(names, values, strict=True))
            run_dir = str(out / f"{point},seed={seed}".lstrip(","))
            settings = dict(zip(names, values, strict=True)) | {"run.seed": seed, "run.dir": run_dir}
            trials.append(Trial(point, values, changed(base, settings)))
    if len(trials) < 2:
        raise ConfigError("one run is no sweep. Give --grid section.key=VALUE,VALUE, or more --seeds.")
    if len({trial.run_dir for trial in trials}) < len(trials):
        raise ConfigError("two values of --grid give the same folder name. Leave one out.")
    return trials


def _spelt(value: Any) -> str:
    """A value as a part of a file name."""
    text = "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return re.sub(r"[^\w.+-]", "_", text)


def check_trials(trials: Sequence[Trial], *, check: Callable[[Config], None]) -> None:
    """Refuse what can be seen wrong before the first run; `check` looks at the paths of one. Raises ConfigError."""
    for trial in trials:
        if not trial.config.data.eval_split:
            raise ConfigError("a sweep is decided by held-out text: data.eval_split must not be empty.")
        check_phases(trial.config)
        for _, staged in each_phase(trial.config):
            plan_batch(staged.train, world_size=1)
    for trial in trials:
        check(trial.config)
        made = trial.run_dir / SETTINGS
        if made.is_file() and (changes := config_changes(load_config(made), trial.config)):
            listed = ", ".join(f"{one.key} {one.old} -> {one.new}" for one in changes)
            raise ConfigError(
                f"{trial.run_dir} was made with other settings ({listed}), and its loss would stand beside others. "
                "Restore them, or choose another --out."
            )


def run_trials(trials: Sequence[Trial], *, jobs: int, devices: Sequence[str] = ()) -> tuple[dict[Path, str], bool]:
    """Train what is not done, so many at a time. Main thread only.

    `devices`: GPUs by their name in CUDA_VISIBLE_DEVICES, which the jobs take in turn; none leaves that as it is.
    Returns why those failed that did, by run directory, and whether we were asked to stop: then the runs have been
    asked too, have saved, and no others were started.
    """
    waiting = [trial for trial in trials if not trial.is_done]
    running: dict[int, tuple[Trial, subprocess.Popen[bytes]]] = {}
    problems: dict[Path, str] = {}
    asked: list[int] = []
    told: set[int] = set()
    before = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in SIGNALS}
    try:
        while running or (waiting and not asked):
            for slot in sorted(set(range(jobs)) - running.keys()):
                if waiting and not asked:
                    trial = waiting.pop(0)
                    running[slot] = trial, _start(trial, _environment(slot, jobs=jobs, devices=devices))
            time.sleep(_LOOK_EVERY_S)
            if asked and running and not told:
                name = signal.Signals(asked[0]).name
                echo(f"{name}: {counted(len(running), 'run')} to save and exit; no further one starts", to=sys.stderr)
            for slot, (trial, process) in list(running.items()):
                if asked and process.pid not in told:
                    process.terminate()
                    told.add(process.pid)
                if (code := process.poll()) is not None:
                    del running[slot]
                    if not trial.is_done:
                        was_stopped = code == REQUEUE or (process.pid in told and code == -signal.SIGTERM)
                        problems[trial.run_dir] = STOPPED if was_stopped else reason_of(code, _log_of(trial))
                    left = len(waiting) + len(running)
                    echo(f"{trial.run_dir.name}: {problems.get(trial.run_dir, 'done')}; {left} to go", to=sys.stderr)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return problems, bool(asked)


def _environment(slot: int, *, jobs: int, devices: Sequence[str]) -> Mapping[str, str]:
    """Of a run: its share of cores and GPUs, and whose end is a request to stop."""
    own = {LAUNCHED_BY: json.dumps(process_id())}
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        own["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    if devices:
        own["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return os.environ | own


def _start(trial: Trial, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    settings = trial.run_dir.with_name(f"{trial.run_dir.name}.toml")
    with translate_errors(ConfigError, f"cannot write to {settings.parent}", "Choose another --out."):
        settings.parent.mkdir(parents=True, exist_ok=True)
        atomic_replace(settings, config_to_toml(trial.config).encode())
        path = _log_of(trial)
        path.unlink(missing_ok=True)  # so that nothing is written through a link
        with path.open("xb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "txl_dist", "train", str(settings)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is passed on once, by us
            )


def _log_of(trial: Trial) -> Path:
    return trial.run_dir.with_name(f"{trial.run_dir.name}.log")


def reason_of(code: int, log: Path) -> str:
    """Why a run is not done: what its process said last, an error before others."""
    if code < 0:
        return f"died of {signal.Signals(-code).name}; see {log}"
    said = log.read_bytes()[-_LAST_WORDS:].decode(errors="replace")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.partition(" error: ")[2] for line in lines if line.startswith("txl train: error: ")]
    return (errors or lines or [f"ended with {code}"])[-1]


def outcomes_of(trials: Sequence[Trial], problems: Mapping[Path, str]) -> list[Outcome]:
    """What became of all trials."""
    outcomes = []
    for trial in trials:
        run, state = None, problems.get(trial.run_dir, "not started")
        if trial.is_done:
            try:
                run, state = read_run(trial.run_dir), "done"
            except DataError as error:  # its records were taken away
                state = str(error)
        outcomes.append(Outcome(trial, run, state))
    return outcomes


def scores_of(outcomes: Sequence[Outcome], *, column: str) -> list[Score]:
    """One per point: those that are judged first, best first, then the others as the grid has them."""
    scores = []
    for point, values in dict.fromkeys((trial.point, trial.values) for trial, _, _ in outcomes):
        losses, problems = [], []
        for _, run, state in (outcome for outcome in outcomes if outcome.trial.point == point):
            loss = run.history.held_out.last(column) if run else None
            if loss is None:
                problems.append("no held-out loss is on record" if run else state)
            else:
                losses.append(loss)
        scores.append(Score(point, values, tuple(losses), problems[0] if problems else ""))
    return sorted(scores, key=lambda score: (bool(score.problem), 0.0 if score.problem else score.mean))


def verdict(scores: Sequence[Score], axes: Sequence[Axis]) -> list[str]:
    """The best point with its margin over the next, in deviations of a run; and where the grid may end too early."""
    judged = [score for score in scores if not score.problem]
    if not judged:
        return ["no point of the grid has all of its runs: none is best"]
    best, num_seeds = judged[0], len(judged[0].losses)
    line = f"best: {best.point or 'the settings as they are'} with {bounded(best.mean)}"
    if len(judged) > 1:
        following, margin = judged[1], judged[1].mean - best.mean
        line += f", {bounded(margin)} below {following.point}"
        deviation = math.sqrt((best.deviation**2 + following.deviation**2) / 2)
        if num_seeds == 1:
            line += "; of one seed each, so how much is chance is not known (--seeds 3)"
        elif margin < DECISIVE * deviation:
            line += (
                f": within {DECISIVE:g} deviations of a run ({bounded(deviation)} over {counted(num_seeds, 'seed')}), "
            )
            line += "it may be chance"
        else:
            times = f"{margin / deviation:.1f} times " if deviation else "beyond "
            line += f": {times}the deviation of a run ({bounded(deviation)} over {counted(num_seeds, 'seed')})"
    ends = [
        f"{axis.name} is best at the end of its grid, {value}: look beyond it"
        for axis, value in zip(axes, best.values, strict=True)
        if len(axis.values) > 2 and isinstance(value, int | float) and value in (min(axis.values), max(axis.values))
    ]
    return [line, *ends]


def table_of(scores: Sequence[Score]) -> list[str]:
    """A line per point, the best first; a point that is not judged says why."""
    rows = [["settings", "held-out", "deviation", "seeds", ""]]
    for score in scores:
        mean = bounded(score.mean) if score.losses else "-"
        deviation = bounded(score.deviation) if len(score.losses) > 1 else "-"
        rows.append([score.point or "as they are", mean, deviation, str(len(score.losses)), score.problem])
    return format_table(rows)


def records_of(outcomes: Sequence[Outcome]) -> str:
    """CSV, a row per run, as the trials come: losses at the end in nats per token and in bits per byte."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        ["settings", "seed", "state", "steps", "tokens", "seconds", "held_out_nats", "held_out_bits_per_byte"]
    )
    for trial, run, state in outcomes:
        numbers: list[object] = [""] * 5
        if run:
            losses = [run.history.held_out.last(column) for column in ("loss", "bits_per_byte")]
            seconds = round(3600 * run.history.hours, 1)
            numbers = [run.history.step, int(run.history.train.last("tokens_seen") or 0), seconds, *losses]
        writer.writerow([trial.point, trial.config.run.seed, state, *numbers])
    return stream.getvalue()


def sweep(
    base: Config,
    axes: Sequence[Axis],
    *,
    num_seeds: int,
    jobs: int,
    out: Path,
    check: Callable[[Config], None],
    devices: Callable[[], Sequence[str]],
) -> tuple[list[str], int]:
    """Run the grid. Returns lines for people and the exit code: 0, REQUEUE if asked to stop, else FAILED if a run was.

    Raises ConfigError before the first run for all that can be seen wrong then.
    """
    trials = trials_of(base, axes, num_seeds=num_seeds, out=out)
    check_trials(trials, check=check)
    num_done = sum(trial.is_done for trial in trials)
    echo(f"txl sweep: {counted(len(trials), 'run')} in {out}, {num_done} of them done, {jobs} at a time", to=sys.stderr)
    problems, was_stopped = run_trials(trials, jobs=jobs, devices=devices() if num_done < len(trials) else ())
    outcomes = outcomes_of(trials, problems)
    runs = [outcome.run for outcome in outcomes if outcome.run]
    with translate_errors(ConfigError, f"cannot write to {out}", "Choose another --out."):
        out.mkdir(parents=True, exist_ok=True)
        atomic_replace(out / TABLE, records_of(outcomes).encode())
    unit = unit_of(runs) if runs else None
    lines = [unit.sentence] if unit else []
    if unit is None or unit.column:
        scores = scores_of(outcomes, column=unit.column if unit else "loss")
        lines = [*table_of(scores), *lines, *(verdict(scores, axes) if unit and unit.is_fair else ())]
        shown = _most_telling(outcomes, scores)
        lines += [write_comparison(shown, out=out / PAGE)[-1]] if len(shown) > 1 else []
    hours = sum(run.history.hours for run in runs)
    lines.append(f"records: {out / TABLE}; {format_duration(3600 * hours)} of work in {counted(len(runs), 'run')}")
    return lines, REQUEUE if was_stopped else FAILED if len(runs) < len(trials) else 0


def _most_telling(outcomes: Sequence[Outcome], scores: Sequence[Score]) -> list[Path]:
    """Runs for a page that has room for so many: of the best points, the first seed of each before the second."""
    place = {score.point: number for number, score in enumerate(scores)}
    done = [trial for trial, run, _ in outcomes if run]
    return [trial.run_dir for trial in sorted(done, key=lambda one: (one.config.run.seed, place[one.point]))][:MAX_RUNS]
