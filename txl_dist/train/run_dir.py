"""The run directory: whose it is, and whether this configuration may continue it.

runs/NAME/  config.toml  metrics.jsonl  log.txt  tensorboard/  checkpoints/  stacks/  RUN.lock  STOP  DONE
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from txl_dist.artifacts import (
    CHECKPOINT_NAME,
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
)
from txl_dist.config.load import Config, config_changes, load_config
from txl_dist.config.phases import whole
from txl_dist.errors import ConfigError, translate_errors
from txl_dist.io.files import atomic_replace, open_regular, parse_object, read_text, unique_path
from txl_dist.io.hub import local_model
from txl_dist.io.manifest import problems_of


def require_corpora(paths: Sequence[str]) -> None:
    """Check the paths of `data`. Raises ConfigError if one is no corpus."""
    its = "Its own corpus is the data.path in {path}/config.toml."
    init = "Begin with its weights by --init {path}, and name a corpus with --data.path."
    for path in paths:
        require(
            path,
            ArtifactKind.CORPUS,
            what="data.path",
            remedies={ArtifactKind.RUN: its, ArtifactKind.CHECKPOINT: its, ArtifactKind.BUNDLE: init},
        )


def check_paths(corpora: Sequence[str], *, run_dir: str, init: str, resume: str) -> None:
    """Check the paths of a run: its corpora, its folder, and those of `--init` and `--resume`.

    Raises ConfigError if one is something else than its setting takes.
    """
    require_corpora(corpora)
    if detect_artifact(run_dir) not in (ArtifactKind.RUN, ArtifactKind.NOTHING):
        another = "Choose another --run.dir."
        instead = dict.fromkeys(ArtifactKind, another) | {
            ArtifactKind.CHECKPOINT: f"{another} A run is the folder above checkpoints/."
        }
        require(run_dir, ArtifactKind.RUN, what="run.dir", remedies=instead)
    if init and not list_checkpoints(Path(run_dir)):  # a run that goes on does not need it any more
        export = "Make one of it with `txl export {path} BUNDLE`."
        corpus = "Give the corpus with --data.path."
        instead = {ArtifactKind.RUN: export, ArtifactKind.CHECKPOINT: export, ArtifactKind.CORPUS: corpus}
        require(local_model(init), ArtifactKind.BUNDLE, what="--init", remedies=instead)
    if resume not in ("auto", "must", "never") and os.path.isdir(resume):  # whether it is there, rank 0 says for all
        checkpoints = list_checkpoints(Path(resume))
        name = f"Name a checkpoint of it: {checkpoints[-1]}." if checkpoints else "It has no checkpoint."
        begin = "Begin a run with its weights by --init {path}."
        require(
            resume,
            ArtifactKind.CHECKPOINT,
            what="--resume",
            remedies={ArtifactKind.RUN: name, ArtifactKind.BUNDLE: begin},
        )


def check_run_dir(run_dir: Path, config: Config) -> None:
    """Raise ConfigError if another configuration made it (with the differences), or if it is something else.

    Where its settings are lost, those in the checkpoint that it goes on from decide (`check_checkpoint`).
    """
    path = run_dir / SETTINGS
    with _using(run_dir):
        if run_dir.exists() and not run_dir.is_dir():
            raise ConfigError(f"{run_dir} is a file, and no run directory. Choose another --run.dir.")
        if path.is_file():
            refuse_frozen_changes(load_config(path), config, made=str(run_dir))
        elif (
            run_dir.is_dir()
            and detect_artifact(run_dir) is not ArtifactKind.RUN
            and not all(_is_early(one.name) for one in run_dir.iterdir())
        ):
            raise ConfigError(f"{run_dir} is not empty and is no run directory. Choose another --run.dir.")


def finished_lines(run_dir: Path, config: Config, *, command: str) -> list[str]:
    """Return what to say of a run that has nothing left to do; nothing for any other. Imports no torch.

    A run is finished where DONE names a step not before `train.max_steps` and the checkpoint of that step is whole.
    With another corpus, or with a damaged checkpoint, nothing is returned: the training itself decides what happens.
    `command`: what continues it, without the number of steps. Raises ConfigError as `check_run_dir`.
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
    return [reached, f"to go on: {command} --train.max_steps {2 * step}", next_commands(run_dir, config.run.plugins)]


def next_commands(run_dir: Path, plugins: Sequence[str]) -> str:
    """Return what one types after a training is done. Evaluation and export need the plugins of the run too."""
    run = shlex.quote(str(run_dir))
    bundle = shlex.quote(f"bundles/{run_dir.resolve().name}")
    flag = f" --plugins {shlex.join(plugins)}" if plugins else ""
    return f"next: txl report {run}   txl evaluate {run}{flag}   txl export {run} {bundle}{flag}"


def _is_early(name: str) -> bool:
    """What a run that ended before it began may have left, and the wish that it stop."""
    return name.startswith(LOCK) or name in (STOP, f"{SETTINGS}.tmp")


def open_run_dir(run_dir: Path, settings_toml: str) -> None:
    """Make the directory, or continue one: write the settings, clear what crashed saves left behind.

    Rank 0 only, after `check_run_dir`. Raises ConfigError if it cannot be written.
    """
    with _using(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        atomic_replace(run_dir / SETTINGS, settings_toml.encode())
        (run_dir / DONE).unlink(missing_ok=True)
    for leftover in (run_dir / CHECKPOINTS).glob("step_*.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for proof in run_dir.glob(f"{LOCK}.*.rank*"):
        proof.unlink(missing_ok=True)


def refuse_frozen_changes(old: Config, new: Config, *, made: str) -> list[str]:
    """Compare settings by their resume policy: ConfigError for frozen differences, a sentence for each warned one."""
    changes = config_changes(whole(old), whole(new))
    frozen = [f"  {change.key}: {change.old} -> {change.new}" for change in changes if change.policy == "frozen"]
    if frozen:
        raise ConfigError(
            f"{made} was made by another configuration:",
            *frozen,
            "Restore these settings to continue it, or choose another --run.dir.",
        )
    return [
        f"{change.key} changed from {change.old} to {change.new}" for change in changes if change.policy == "warned"
    ]


def evaluated_losses(run_dir: Path, *, up_to: int) -> dict[int, float]:
    """Loss of each evaluation of the run's first corpus by step, up to a step; none if metrics.jsonl cannot be read."""
    losses: dict[int, float] = {}
    try:
        with open_regular(run_dir / RECORDS) as stream:
            lines = [line for line in stream if b'"eval"' in line]
    except OSError:
        return {}
    for line in lines:
        try:
            record = parse_object(line)
            if record["kind"] == "eval" and record["step"] <= up_to and type(record["loss"]) in (int, float):
                losses[record["step"]] = record["loss"]
        except (ValueError, KeyError, TypeError):
            continue  # a line that a crash tore
    return losses


def quarantine(run_dir: Path, *, newer_than: Path, word: str) -> None:
    """Rename newer checkpoints, damaged or left behind by a rewind: no place to resume, but kept for people. Rank 0."""
    for path in sorted((run_dir / CHECKPOINTS).glob("step_*")):
        if path.name > newer_than.name and CHECKPOINT_NAME.fullmatch(path.name):
            path.rename(unique_path(path, word))


def _using(run_dir: Path) -> AbstractContextManager[None]:
    remedy = "Mend its permissions or choose another --run.dir."
    return translate_errors(ConfigError, f"cannot use the run directory {run_dir}", remedy)
