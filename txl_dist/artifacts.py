"""Detection of the kind of artifact in a folder: corpus, run, checkpoint, bundle, export, or nothing.

The names of the files in the folder decide the kind. No file is opened or verified. Every command checks its paths with
this module before it imports torch. If a path is of a wrong kind, the command ends with a message of one line. The
message names the kind of the path, and the commands that use this kind. A damaged folder keeps its kind, and the code
that reads the folder reports the damage.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path

from txl_dist.console.suggest import nearest
from txl_dist.errors import ConfigError

SETTINGS = "config.toml"
"""Name of the file with the settings of a run. The file is in the run directory and in each checkpoint."""
RECORDS, LOG, TENSORBOARD = "metrics.jsonl", "log.txt", "tensorboard"
"""Names in a run directory: the file of records, the log file, and the TensorBoard folder."""
CHECKPOINTS, STACKS, PROFILE = "checkpoints", "stacks", "profile"
"""Names of folders in a run directory: for checkpoints, for stack traces of a hang, and for profiler traces."""
LOCK, STOP, DONE, COORDINATOR = "RUN.lock", "STOP", "DONE", "COORDINATOR.json"
"""Names of files in a run directory: the lock of the running job, a stop request, the mark of a finished run, and the
address at which a running job hears agents that replace lost ones."""
STATE, PROBE = "state.json", "probe.safetensors"
"""Names of files in a checkpoint: the training state, and the losses on a few fixed tokens that a resume must
reproduce."""
FORMAT_VERSION = 4
"""Format version of the checkpoints that this package writes."""
READABLE_VERSIONS = (2, 3, 4)
"""Format versions of the checkpoints that this package reads. Version 1, written by 0.1.0, consisted of DeepSpeed's own
files, which are pickles. Version 2 has one memory length for all layers. Version 3 has a memory length for each layer
(`train.memory_lens`). Version 4 has a new name for one key in the state of the token stream."""
GRAPHS, CODE = ("token.onnx", "chunk.onnx"), "modeling_txl.py"
"""Names of files: the graphs in a folder of ONNX graphs, and the code in a Hugging Face folder."""
FROM_MIRROR = (
    "To download the newest checkpoint of a mirror, repeat the `txl train` command of its run with an empty --run.dir."
)
"""Remedy for messages about commands that read runs from local folders only."""
CHECKPOINT_NAME = re.compile(r"step_\d{9}")
"""Pattern of the name of a checkpoint's folder. The name contains the checkpoint's step."""
_MOST_NAMES = 4
"""Maximum number of folders that a message lists."""
_MOST_LOOKED_AT = 1000
"""Maximum number of subfolders that are examined in order to name a better path in a message."""


class ArtifactKind(Enum):
    """Kind of artifact that a path holds. The value is the kind's name in messages."""

    CORPUS = "a corpus"
    RUN = "a run"
    CHECKPOINT = "a checkpoint"
    BUNDLE = "a bundle"
    HUGGINGFACE = "a Hugging Face folder"
    HUGGINGFACE_CODE = "a Hugging Face folder with its own code"
    ONNX = "a folder of ONNX graphs"
    NOTHING = "none of them"


TRAINED = (ArtifactKind.RUN, ArtifactKind.CHECKPOINT, ArtifactKind.BUNDLE)
"""Kinds of artifacts that hold a trained model."""

_USES = {
    ArtifactKind.CORPUS: "Train on the corpus with `txl train CONFIG --data.path {path}`, evaluate a model on it with "
    "`txl evaluate MODEL --data {path}`, or inspect it with `txl inspect {path}`.",
    ArtifactKind.RUN: "Continue the run with `txl train {path}/config.toml`, evaluate it with `txl evaluate {path}`, "
    "show it with `txl report {path}`, or export it with `txl export {path} BUNDLE`.",
    ArtifactKind.CHECKPOINT: "Evaluate the checkpoint with `txl evaluate {path}`, export it with `txl export {path} "
    "BUNDLE`, or inspect it with `txl inspect {path}`.",
    ArtifactKind.BUNDLE: "Generate text with `txl generate {path}`, evaluate the bundle with `txl evaluate {path} "
    "--data CORPUS`, or begin a run with its weights: `txl train {path}/train.toml --init {path} --data.path CORPUS`.",
    ArtifactKind.HUGGINGFACE: "Convert the folder to a bundle with `txl import {path} BUNDLE --format huggingface`.",
    ArtifactKind.HUGGINGFACE_CODE: "The library transformers loads this folder. Use the run or bundle from which it "
    "was exported.",
    ArtifactKind.ONNX: "ONNX Runtime runs these graphs. Use the run or bundle from which they were exported.",
}
"""Sentences for messages, one per kind of artifact. A sentence names the commands that use artifacts of this kind.
`{path}` stands for the path of the artifact."""
_MAKERS = {
    ArtifactKind.CORPUS: "`txl prepare` writes a corpus",
    ArtifactKind.RUN: "`txl train` writes a run, with its checkpoints in RUN/checkpoints",
    ArtifactKind.CHECKPOINT: "`txl train` writes a run, with its checkpoints in RUN/checkpoints",
    ArtifactKind.BUNDLE: "`txl export` writes a bundle",
    ArtifactKind.HUGGINGFACE: "save_pretrained writes a Hugging Face folder",
    ArtifactKind.HUGGINGFACE_CODE: "`txl export --format huggingface-code` writes a Hugging Face folder with code",
    ArtifactKind.ONNX: "`txl export --format onnx` writes a folder of ONNX graphs",
}
"""Clauses for messages, one per kind of artifact. A clause names the command that writes artifacts of this kind."""
_MARKS = {
    ArtifactKind.CORPUS: "index.json",
    ArtifactKind.RUN: SETTINGS,
    ArtifactKind.CHECKPOINT: STATE,
    ArtifactKind.BUNDLE: "model.safetensors",
    ArtifactKind.HUGGINGFACE: "config.json",
    ArtifactKind.HUGGINGFACE_CODE: CODE,
    ArtifactKind.ONNX: GRAPHS[0],
}
"""File names for messages, one per kind of artifact: a file by which a folder of this kind is recognized, for instance
index.json for a corpus."""


def detect_artifact(path: str | Path) -> ArtifactKind:
    """Return the kind of artifact that a path holds. A URL can only be a corpus. The kind of a path that cannot be read
    is NOTHING.

    A folder with a checkpoint under checkpoints/ is a run, even without its config.toml. A folder with two of the three
    files that `inference.bundle.load` needs is a bundle.
    """
    if is_url(path):
        return ArtifactKind.CORPUS

    def has(*names: str) -> bool:
        return any(os.path.isfile(os.path.join(path, name)) for name in names)

    if has(STATE) or os.path.isdir(os.path.join(path, "engine")):
        return ArtifactKind.CHECKPOINT
    if has("index.json", "train-000000.tar.idx"):
        return ArtifactKind.CORPUS
    if has(CODE):
        return ArtifactKind.HUGGINGFACE_CODE
    if has(*GRAPHS):
        return ArtifactKind.ONNX
    if has("txl_tokenizer.json"):
        return ArtifactKind.HUGGINGFACE
    has_weights = has("model.safetensors", "pytorch_model.bin")
    if has("config.json") and has_weights and not has("MANIFEST.json", "train.toml"):
        return ArtifactKind.HUGGINGFACE
    if sum(map(has, ("config.json", "model.safetensors", "MANIFEST.json"))) > 1:
        return ArtifactKind.BUNDLE
    if has("MANIFEST.json") and CHECKPOINT_NAME.fullmatch(Path(path).name):
        return ArtifactKind.CHECKPOINT
    if has(SETTINGS, RECORDS):
        return ArtifactKind.RUN
    for checkpoint in list_checkpoints(Path(path)):
        if detect_artifact(checkpoint) is ArtifactKind.CHECKPOINT:
            return ArtifactKind.RUN
    return ArtifactKind.NOTHING


def is_url(path: str | Path) -> bool:
    """Return True if a path is a URL, or a shell command that produces bytes.

    A `Path` object is never a URL, because `Path` turns `//` into `/`.
    """
    if not isinstance(path, str):
        return False
    return "://" in path or "::" in path or path.startswith("pipe:")


def require(
    path: str | Path, *wanted: ArtifactKind, what: str = "", remedies: Mapping[ArtifactKind, str] | None = None
) -> ArtifactKind:
    """Return the kind of artifact at a path. Raises ConfigError if the kind is not among `wanted`.

    The error's message is one line that names the kind and a remedy. `what` is the flag or setting that the message
    names. `remedies` maps a wrong kind to a remedy that replaces the usual remedy. In a remedy `{path}` stands for the
    path.
    """
    kind = detect_artifact(path)
    if kind in wanted:
        return kind
    if what:
        where = f"{what} {path}"
    else:
        where = f"{path}"
    remedy_of_kind = {**_USES, **(remedies or {})}
    if kind not in remedy_of_kind:  # NOTHING, and the caller has no remedy for it
        raise ConfigError(_why_nothing(Path(path), where, wanted))
    remedy = remedy_of_kind[kind].format(path=path)
    raise ConfigError(f"{where} is {kind.value}, not {_either(wanted)}. {remedy}")


def _why_nothing(path: Path, where: str, wanted: tuple[ArtifactKind, ...]) -> str:
    """Return the message for a path that holds no artifact. The message says why, and which path or command to use
    instead."""
    makers = ", and ".join(dict.fromkeys(_MAKERS[kind] for kind in wanted))
    if path.is_dir():
        inside = _subfolders_of_kind(path, wanted) or _subfolders_of_kind(path / CHECKPOINTS, wanted)
        if inside:
            return f"{where} is not {_either(wanted)} itself, but contains {_listed(inside)}. Give one of these paths."
        marks = [f"{_MARKS[kind]} ({kind.value})" for kind in wanted]
        return f"{where} is not {_either(wanted)}: it has no {', '.join(marks)}. {makers}."
    if os.path.lexists(path):
        parent_kind = detect_artifact(path.parent)
        if parent_kind in wanted:
            return f"{where} is a file of {parent_kind.value}. Name the folder: {path.parent}."
        return f"{where} is a file, and {_either(wanted)} is a folder. {makers}."
    preparation = path.with_name(f".{path.name}.prepare")
    if os.path.isdir(preparation) and ArtifactKind.CORPUS in wanted:
        return (
            f"{where} does not exist yet, because its preparation is not finished. "
            "Repeat the same `txl prepare` command."
        )
    siblings = _subfolders_of_kind(path.parent, wanted)
    similar_names = nearest(path.name, [sibling.name for sibling in siblings])
    if similar_names:
        similar_paths = [path.with_name(name) for name in similar_names]
        return f"{where} does not exist. Did you mean {_listed(similar_paths)}?"
    if siblings:
        hint = f"{path.parent} has {_listed(siblings)}"
    else:
        hint = makers
    return f"{where} does not exist. Name {_either(wanted)}: {hint}."


def _subfolders_of_kind(folder: Path, wanted: tuple[ArtifactKind, ...]) -> list[Path]:
    """Return the subfolders that are of one of these kinds, in the order of their names.

    Only the last thousand subfolders are checked, because a home folder may hold a million subfolders.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return []
    paths = [folder / name for name in names[-_MOST_LOOKED_AT:]]
    return [path for path in paths if detect_artifact(path) in wanted]


def _listed(paths: list[Path]) -> str:
    """Return a text that lists the last paths, and the number of earlier paths. The last checkpoints are the newest."""
    shown = ", ".join(str(path) for path in paths[-_MOST_NAMES:])
    num_hidden = len(paths) - _MOST_NAMES
    if num_hidden <= 0:
        return shown
    return f"{shown} and {num_hidden} more"


def _either(kinds: tuple[ArtifactKind, ...]) -> str:
    """Return the names of the kinds, joined by commas and "or"."""
    names = [str(kind.value) for kind in kinds if kind is not ArtifactKind.NOTHING]
    last = names.pop()
    if not names:
        return last
    return f"{', '.join(names)} or {last}"


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint at this step."""
    return run_dir / CHECKPOINTS / f"step_{step:09d}"


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder, for instance 200 for `step_000000200`."""
    return int(folder.name.removeprefix("step_"))


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders of a run's committed checkpoints, the oldest first, without verifying them.

    A file with the name of a checkpoint counts as a damaged checkpoint, so that no run overwrites it.
    """
    folder = run_dir / CHECKPOINTS
    if not os.path.isdir(folder):
        return []
    return sorted(path for path in folder.glob("step_*") if CHECKPOINT_NAME.fullmatch(path.name))


def newest_step(run_dir: Path) -> int:
    """Return the step of a run's newest checkpoint, which may be damaged. The result is 0 without a checkpoint."""
    return max(map(step_of, list_checkpoints(run_dir)), default=0)


def best_step(steps: Collection[int], losses: Mapping[int, float]) -> set[int]:
    """Return the step in `steps` with the lowest validation loss, as a set, which is empty if no step was evaluated."""
    evaluated = {step: loss for step, loss in losses.items() if step in steps}
    if evaluated:
        return {min(evaluated, key=evaluated.__getitem__)}
    return set()


def steps_to_keep(steps: Sequence[int], *, keep_last: int, keep_every: int, best: Collection[int] = ()) -> set[int]:
    """Return the steps whose checkpoints are kept: the last `keep_last` steps, the multiples of `keep_every`, and the
    steps in `best`.

    `steps` are the steps of all checkpoints, in ascending order. With `keep_every` 0 no multiples are kept. The result
    contains only steps that have a checkpoint.
    """
    newest = set(steps[-keep_last:])
    milestones = {step for step in steps if keep_every and step % keep_every == 0}
    existing_best = set(best).intersection(steps)
    return newest | milestones | existing_best
