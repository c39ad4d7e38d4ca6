"""The run directory: its files, and the checks that a configuration can use or continue the directory.

runs/NAME/ config.toml metrics.jsonl log.txt tensorboard/ checkpoints/ stacks/ RUN.lock STOP DONE
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from txl_dist.artifacts import (
    CHECKPOINTS,
    DONE,
    LOCK,
    RECORDS,
    SETTINGS,
    STOP,
    ArtifactKind,
    detect_artifact,
    list_checkpoints,
    require,
    step_of,
)
from txl_dist.config.load import Config, config_changes, load_config
from txl_dist.config.phases import whole
from txl_dist.config.schema import Precision
from txl_dist.errors import ConfigError, translate_errors
from txl_dist.io.files import atomic_replace, open_regular, parse_object, read_text, unique_path
from txl_dist.io.hub import local_model
from txl_dist.io.manifest import problems_of


def require_corpora(paths: Sequence[str]) -> None:
    """Raise ConfigError if one of `paths`, the values of `data.path` and `data.more_paths`, is not a corpus."""
    its = "Give the path of its corpus, which is the data.path in {path}/config.toml."
    init = "To begin with the weights of the bundle, use --init {path}, and give a corpus with --data.path."
    for path in paths:
        require(
            path,
            ArtifactKind.CORPUS,
            what="data.path",
            remedies={ArtifactKind.RUN: its, ArtifactKind.CHECKPOINT: its, ArtifactKind.BUNDLE: init},
        )


def check_paths(corpora: Sequence[str], *, run_dir: str, init: str, resume: str) -> None:
    """Raise ConfigError if a path of a run holds another kind of artifact than its setting needs.

    Each path in `corpora` must hold a corpus, `run_dir` a run or nothing, `init` a bundle, and `resume` a checkpoint.
    Instead of a path, `resume` can be auto, must or never.
    """
    require_corpora(corpora)
    if detect_artifact(run_dir) not in (ArtifactKind.RUN, ArtifactKind.NOTHING):
        another = "Choose another --run.dir."
        instead = dict.fromkeys(ArtifactKind, another) | {
            ArtifactKind.CHECKPOINT: f"{another} The directory of a run is the folder that contains checkpoints/."
        }
        require(run_dir, ArtifactKind.RUN, what="run.dir", remedies=instead)
    if init and not list_checkpoints(Path(run_dir)):  # a resumed run does not need the bundle
        export = "Export a bundle with `txl export {path} BUNDLE`, and use --init BUNDLE."
        corpus = "Give the corpus with --data.path."
        instead = {ArtifactKind.RUN: export, ArtifactKind.CHECKPOINT: export, ArtifactKind.CORPUS: corpus}
        require(local_model(init), ArtifactKind.BUNDLE, what="--init", remedies=instead)
    if resume not in ("auto", "must", "never") and os.path.isdir(resume):  # rank 0 refuses a missing one for all ranks
        checkpoints = list_checkpoints(Path(resume))
        if checkpoints:
            name = f"Give a checkpoint of the run: --resume {checkpoints[-1]}."
        else:
            name = "The run has no checkpoint yet."
        begin = "To begin a new run with the weights of the bundle, use --init {path}."
        require(
            resume,
            ArtifactKind.CHECKPOINT,
            what="--resume",
            remedies={ArtifactKind.RUN: name, ArtifactKind.BUNDLE: begin},
        )


def check_run_dir(run_dir: Path, config: Config) -> None:
    """Raise ConfigError if this configuration must not use the folder as its run directory.

    The folder must be missing, empty, or the directory of a run with the same frozen settings. A frozen setting must
    not change when a run resumes. The message lists the settings that differ. If config.toml is missing in the folder,
    `check_checkpoint` later compares the settings of the checkpoint.
    """
    path = run_dir / SETTINGS
    with _using(run_dir):
        if run_dir.exists() and not run_dir.is_dir():
            raise ConfigError(f"{run_dir} is a file, not a run directory. Choose another --run.dir.")
        if path.is_file():
            refuse_frozen_changes(load_config(path), config, made=str(run_dir))
        elif (
            run_dir.is_dir()
            and detect_artifact(run_dir) is not ArtifactKind.RUN
            and not all(_is_early(path.name) for path in run_dir.iterdir())
        ):
            raise ConfigError(f"{run_dir} is not empty and is not a run directory. Choose another --run.dir.")


def finished_lines(run_dir: Path, config: Config, *, command: str) -> list[str]:
    """Return the lines to print for a finished run, or an empty list for any other run. Imports no torch.

    A run is finished if the file DONE names a step of at least `train.max_steps`, and the checkpoint of that step is
    complete. With another corpus or a damaged checkpoint the list is empty, and the caller starts training as usual.
    `command` is the command that continues the run, without `--train.max_steps`. Raises ConfigError if frozen settings
    differ.
    """
    try:
        step = int(read_text(run_dir / DONE))
    except (OSError, ValueError):
        return []
    if step < config.train.max_steps or not (run_dir / SETTINGS).is_file():
        return []
    with _using(run_dir):
        old = load_config(run_dir / SETTINGS)
    refuse_frozen_changes(old, config, made=str(run_dir))
    if old.data != config.data:
        return []
    last = [path for path in list_checkpoints(run_dir) if path.name == f"step_{step:09d}"]
    if not last or problems_of(last[0]):
        return []
    reached = f"{run_dir} is done: it has reached step {step:,} of train.max_steps={config.train.max_steps:,}"
    return [reached, f"to continue: {command} --train.max_steps {2 * step}", next_commands(run_dir, config.run.plugins)]


def next_commands(run_dir: Path, plugins: Sequence[str]) -> str:
    """Return a line that lists the commands to type after training: report, evaluate and export.

    `plugins` are the plugins of the run. Evaluation and export need them too, so those commands contain `--plugins`.
    """
    run = shlex.quote(str(run_dir))
    bundle = shlex.quote(f"bundles/{run_dir.resolve().name}")
    if plugins:
        flag = f" --plugins {shlex.join(plugins)}"
    else:
        flag = ""
    return f"next: txl report {run}   txl evaluate {run}{flag}   txl export {run} {bundle}{flag}"


def _is_early(name: str) -> bool:
    """Return whether a run can have this file before it writes config.toml: a lock, a stop request, or an unfinished
    config.toml."""
    return name.startswith(LOCK) or name in (STOP, f"{SETTINGS}.tmp")


def kept_precision(run_dir: Path, *, resume: str = "auto") -> Precision | None:
    """Return the precision of the run that continues, or None if there is no run yet. Imports no torch.

    A run that ended before its first checkpoint begins again with its precision: the ranks of a recovery ask here too,
    and continue from copies in memory.

    If `resume` is the folder of a checkpoint, its precision is returned. Otherwise, or if the folder is gone, which a
    recovery does not need any more, the run directory is read. If it has no config.toml, its newest undamaged
    checkpoint is read, with the hashes of all its files. Raises ConfigError if the settings cannot be read.
    """
    kept = None
    if resume not in ("auto", "must", "never"):
        kept = _precision_in(Path(resume))
    kept = kept or _precision_in(run_dir)
    for checkpoint in reversed(list_checkpoints(run_dir)):
        if kept is not None:
            break
        if not problems_of(checkpoint):
            kept = _precision_in(checkpoint)
    return kept


def _precision_in(folder: Path) -> Precision | None:
    """Return the precision in the settings of a run or checkpoint, or None if there are no settings or it is "auto"."""
    path = folder / SETTINGS
    precision = load_config(path).engine.precision if path.is_file() else "auto"
    return None if precision == "auto" else precision


def open_run_dir(run_dir: Path, settings_toml: str) -> None:
    """Create or reopen the run directory: write config.toml, and remove DONE and the files that crashed processes left.

    Only rank 0 calls this function, after `check_run_dir`. Raises ConfigError if the directory cannot be written.
    """
    with _using(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        atomic_replace(run_dir / SETTINGS, settings_toml.encode())
        (run_dir / DONE).unlink(missing_ok=True)
    tidy_checkpoints(run_dir, newest=None)
    for proof in run_dir.glob(f"{LOCK}.*.rank*"):
        proof.unlink(missing_ok=True)


def tidy_checkpoints(run_dir: Path, *, newest: Path | None) -> None:
    """Remove the unfinished checkpoints that crashed processes left, and rename those that are newer than `newest`.

    None renames none. One rank per run directory calls it.
    """
    for leftover in (run_dir / CHECKPOINTS).glob("step_*.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if newest is not None:
        quarantine(run_dir, after_step=step_of(newest), word="damaged")


def refuse_frozen_changes(old: Config, new: Config, *, made: str, choose: str = "--run.dir") -> list[str]:
    """Raise ConfigError if two configurations differ in a frozen setting, which must not change when a run resumes.

    Other settings may change. Returns a sentence for each changed setting for which a warning is required. `made` names
    the run or checkpoint that has the old settings, and `choose` the settings to change for another run.
    """
    changes = config_changes(whole(old), whole(new))
    frozen = [f"  {change.key}: {change.old} -> {change.new}" for change in changes if change.policy == "frozen"]
    if frozen:
        raise ConfigError(
            f"{made} was made by another configuration:",
            *frozen,
            f"To continue the run, restore these settings. To start another run, choose another {choose}.",
        )
    return [
        f"{change.key} changed from {change.old} to {change.new}" for change in changes if change.policy == "warned"
    ]


_ENDS = ("phase", "done")
"""Events that end a phase or the run."""


class RunHistory(NamedTuple):
    """Part of the records in metrics.jsonl, up to a step. Those that a rewind gave up are left out."""

    evaluated: dict[int, float]
    """Losses of the first validation split in nats per token, by step."""
    sampled: set[int]
    """Steps with a sample text."""
    saved: set[int]
    """Steps whose checkpoint was reported as saved."""
    ended: set[int]
    """Steps whose end of a phase or of the run was reported."""


def read_run_history(run_dir: Path, *, up_to: int, kind: str = "eval") -> RunHistory:
    """Read metrics.jsonl up to the step `up_to`. `kind` is the kind of the records of the first validation split.

    The history is empty if metrics.jsonl cannot be read.
    """
    history = RunHistory({}, set(), set(), set())
    words = [re.escape(json.dumps(word)) for word in (kind, "sample", "saved", "rewound", *_ENDS)]
    wanted = re.compile("|".join(words).encode())
    try:
        with open_regular(run_dir / RECORDS) as stream:
            lines = [line for line in stream if wanted.search(line)]
    except OSError:
        return history
    for line in lines:
        try:
            record = parse_object(line)
            _add_to(history, record, step=record["step"], up_to=up_to, kind=kind)
        except (ValueError, KeyError, TypeError):
            continue  # a crash left an incomplete line
    return history


def _add_to(history: RunHistory, record: dict[str, Any], *, step: int, up_to: int, kind: str) -> None:
    """Add a record of metrics.jsonl to the history."""
    if record["kind"] == "event" and record["event"] == "rewound":
        for given_up in [other for other in history.evaluated if other > step]:
            del history.evaluated[given_up]
        for steps in (history.sampled, history.saved, history.ended):
            steps.difference_update([other for other in steps if other > step])
    elif step > up_to:
        return
    elif record["kind"] == "sample":
        history.sampled.add(step)
    elif record["kind"] == "event" and record["event"] == "saved":
        history.saved.add(step)
    elif record["kind"] == "event" and record["event"] in _ENDS:
        history.ended.add(step)
    elif record["kind"] == kind and type(record["loss"]) in (int, float):
        history.evaluated[step] = record["loss"]


def quarantine(run_dir: Path, *, after_step: int, word: str) -> None:
    """Rename the checkpoints of steps after `after_step`, so that no run resumes them. Only rank 0 calls it.

    These checkpoints are damaged, or the run has rewound to an older checkpoint. They are kept for inspection, with
    `word` in their names.
    """
    for path in list_checkpoints(run_dir):
        if step_of(path) > after_step:
            path.rename(unique_path(path, word))


def _using(run_dir: Path) -> AbstractContextManager[None]:
    """Return a context manager that turns an error of the file system in its block into a ConfigError about the run
    directory."""
    remedy = "Correct the permissions of the directory, or choose another --run.dir."
    return translate_errors(ConfigError, f"cannot use the run directory {run_dir}", remedy)
