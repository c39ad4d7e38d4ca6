"""Detection of the kind of artifact in a folder: corpus, run, checkpoint, bundle, export, or nothing.

The names of the files in a folder decide. Every command checks its paths here before torch is imported. A wrong kind is
refused by a message of one line, which names the kind and says how to use it. No file is opened or verified. A damaged
folder has its usual kind, and the code that reads it reports the damage.
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
"""Name of the file with the settings of a run. It is in the run directory and in each checkpoint."""
RECORDS, LOG, TENSORBOARD = "metrics.jsonl", "log.txt", "tensorboard"
CHECKPOINTS, STACKS, PROFILE = "checkpoints", "stacks", "profile"
LOCK, STOP, DONE = "RUN.lock", "STOP", "DONE"
"""Names of the other files and folders in a run directory."""
STATE, PROBE = "state.json", "probe.safetensors"
"""Names of files in a checkpoint."""
FORMAT_VERSION = 4
"""Format version of the checkpoints that this package writes."""
READABLE_VERSIONS = (2, 3, 4)
"""Format versions of the checkpoints that this package reads. Version 1, written by 0.1.0, held DeepSpeed's own files,
which are pickles. Version 2 has memories of one length. Version 3 has memories of different lengths
(`train.memory_lens`). Version 4 has another key in the stream state."""
GRAPHS, CODE = ("token.onnx", "chunk.onnx"), "modeling_txl.py"
"""Files of a folder of ONNX graphs, and the code in a Hugging Face folder."""
CHECKPOINT_NAME = re.compile(r"step_\d{9}")
"""Pattern of the name of a checkpoint's folder. The name contains the checkpoint's step."""
_MOST_NAMES = 4
"""Largest number of folders that a message names."""
_MOST_LOOKED_AT = 1000
"""Largest number of subfolders whose kind is checked."""


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
    ArtifactKind.CORPUS: "Train on it with `txl train CONFIG --data.path {path}`, score a model on it with `txl "
    "evaluate MODEL --data {path}`, look into it with `txl inspect {path}`.",
    ArtifactKind.RUN: "Continue it with `txl train {path}/config.toml`, score it with `txl evaluate {path}`, show it "
    "with `txl report {path}`, make a bundle of it with `txl export {path} BUNDLE`.",
    ArtifactKind.CHECKPOINT: "Score it with `txl evaluate {path}`, make a bundle of it with `txl export {path} "
    "BUNDLE`, look into it with `txl inspect {path}`.",
    ArtifactKind.BUNDLE: "Generate with `txl generate {path}`, score it with `txl evaluate {path} --data CORPUS`, "
    "begin a run with its weights: `txl train {path}/train.toml --init {path} --data.path CORPUS`.",
    ArtifactKind.HUGGINGFACE: "Make a bundle of it with `txl import {path} BUNDLE --format huggingface`.",
    ArtifactKind.HUGGINGFACE_CODE: "transformers loads it; use the run or the bundle that it was exported from.",
    ArtifactKind.ONNX: "ONNX Runtime runs it; use the run or the bundle that it was exported from.",
}
_MAKERS = {
    ArtifactKind.CORPUS: "`txl prepare` writes a corpus",
    ArtifactKind.RUN: "`txl train` writes a run, with its checkpoints in RUN/checkpoints",
    ArtifactKind.CHECKPOINT: "`txl train` writes a run, with its checkpoints in RUN/checkpoints",
    ArtifactKind.BUNDLE: "`txl export` writes a bundle",
    ArtifactKind.HUGGINGFACE: "save_pretrained writes a Hugging Face folder",
    ArtifactKind.HUGGINGFACE_CODE: "`txl export --format huggingface-code` writes a Hugging Face folder with code",
    ArtifactKind.ONNX: "`txl export --format onnx` writes a folder of ONNX graphs",
}
_MARKS = {
    ArtifactKind.CORPUS: "index.json",
    ArtifactKind.RUN: SETTINGS,
    ArtifactKind.CHECKPOINT: STATE,
    ArtifactKind.BUNDLE: "model.safetensors",
    ArtifactKind.HUGGINGFACE: "config.json",
    ArtifactKind.HUGGINGFACE_CODE: CODE,
    ArtifactKind.ONNX: GRAPHS[0],
}


def detect_artifact(path: str | Path) -> ArtifactKind:
    """Return the kind of artifact that a path holds. A URL can only be a corpus. A path that cannot be read is NOTHING.

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

    A `Path` is never a URL, because it would have lost a slash.
    """
    if not isinstance(path, str):
        return False
    return "://" in path or "::" in path or path.startswith("pipe:")


def require(
    path: str | Path, *wanted: ArtifactKind, what: str = "", remedies: Mapping[ArtifactKind, str] | None = None
) -> ArtifactKind:
    """Return the kind of artifact at a path. Raises ConfigError if it is not among `wanted`.

    `what` names the flag or setting in the message. `remedies` maps a wrong kind to a remedy that replaces the usual
    one. In a remedy `{path}` stands for the path. The message is one line that names the kind and a remedy.
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
    """Return the message for a path that holds no artifact. It says why, and which path to use instead."""
    makers = "; ".join(dict.fromkeys(_MAKERS[kind] for kind in wanted))
    if path.is_dir():
        inside = _subfolders_of_kind(path, wanted) or _subfolders_of_kind(path / CHECKPOINTS, wanted)
        if inside:
            return f"{where} is not {_either(wanted)} itself but holds {_listed(inside)}. Name one of them."
        marks = [f"{_MARKS[kind]} ({kind.value})" for kind in wanted]
        return f"{where} is not {_either(wanted)}: it has no {', '.join(marks)}. {makers}."
    if os.path.lexists(path):
        parent_kind = detect_artifact(path.parent)
        if parent_kind in wanted:
            return f"{where} is a file of {parent_kind.value}. Name the folder: {path.parent}."
        return f"{where} is a file, and {_either(wanted)} is a folder. {makers}."
    preparation = path.with_name(f".{path.name}.prepare")
    if os.path.isdir(preparation) and ArtifactKind.CORPUS in wanted:
        return f"{where} is not there yet: its preparation was not finished. The same `txl prepare` continues it."
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

    Only the last thousand subfolders are checked, because a home folder may hold a million of them.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return []
    paths = [folder / name for name in names[-_MOST_LOOKED_AT:]]
    return [path for path in paths if detect_artifact(path) in wanted]


def _listed(paths: list[Path]) -> str:
    """Return a list of the last paths, and the number of the other paths. The last checkpoints are the newest."""
    shown = ", ".join(str(path) for path in paths[-_MOST_NAMES:])
    num_hidden = len(paths) - _MOST_NAMES
    if num_hidden <= 0:
        return shown
    return f"{shown} and {num_hidden} more"


def _either(kinds: tuple[ArtifactKind, ...]) -> str:
    """Join the names of kinds by commas and "or"."""
    names = [str(kind.value) for kind in kinds if kind is not ArtifactKind.NOTHING]
    last = names.pop()
    if not names:
        return last
    return f"{', '.join(names)} or {last}"


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint at this step."""
    return run_dir / CHECKPOINTS / f"step_{step:09d}"


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint, as an integer, from the name of its folder."""
    return int(folder.name.removeprefix("step_"))


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders of a run's committed checkpoints, the oldest first, without verifying them.

    A file with the name of a checkpoint counts as a damaged checkpoint, so that no run overwrites it.
    """
    folder = run_dir / CHECKPOINTS
    if not os.path.isdir(folder):
        return []
    return sorted(path for path in folder.glob("step_*") if CHECKPOINT_NAME.fullmatch(path.name))


def steps_to_keep(steps: Sequence[int], *, keep_last: int, keep_every: int, best: Collection[int] = ()) -> set[int]:
    """Return the steps whose checkpoints are kept: the last ones, milestones, and those with the best scores.

    `steps` must be in ascending order.
    """
    newest = set(steps[-keep_last:])
    milestones = {step for step in steps if keep_every and step % keep_every == 0}
    existing_best = set(best).intersection(steps)
    return newest | milestones | existing_best
