"""What a path is, told by the names that lie in it: corpus, run, checkpoint, bundle, an export, or nothing.

Every verb asks here, before torch is imported, and refuses the wrong kind in one line that names what it is and what
one does with that. Nothing is opened or proven: a damaged folder is still of its kind, and what reads it says so.
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
"""Of a run, and in each of its checkpoints."""
RECORDS, LOG, TENSORBOARD = "metrics.jsonl", "log.txt", "tensorboard"
CHECKPOINTS, STACKS, PROFILE = "checkpoints", "stacks", "profile"
LOCK, STOP, DONE = "RUN.lock", "STOP", "DONE"
"""What else lies in a run directory."""
STATE, PROBE = "state.json", "probe.safetensors"
"""Of a checkpoint."""
FORMAT_VERSION = 2
PER_LAYER_VERSION = 3
"""Of checkpoints whose layers remember differently (`train.memory_lens`), which older programs do not know."""
"""Of a checkpoint. 1, of version 0.1.0, held DeepSpeed's own files, which are pickles."""
GRAPHS, CODE = ("token.onnx", "chunk.onnx"), "modeling_txl.py"
"""Of a folder of ONNX graphs, and of a Hugging Face folder with its own code."""
CHECKPOINT_NAME = re.compile(r"step_\d{9}")
"""Of the folder of a checkpoint: its step."""
_MOST_NAMES = 4
"""Folders that a message names at most."""
_MOST_LOOKED_AT = 1000
"""Folders of a folder that are looked into to find those."""


class ArtifactKind(Enum):
    """What a path is; the value is its name in messages."""

    CORPUS = "a corpus"
    RUN = "a run"
    CHECKPOINT = "a checkpoint"
    BUNDLE = "a bundle"
    HUGGINGFACE = "a Hugging Face folder"
    HUGGINGFACE_CODE = "a Hugging Face folder with its own code"
    ONNX = "a folder of ONNX graphs"
    NOTHING = "none of them"


TRAINED = (ArtifactKind.RUN, ArtifactKind.CHECKPOINT, ArtifactKind.BUNDLE)
"""What holds a trained model."""

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
    """What a path is. A URL can only be a corpus; whatever cannot be looked into is nothing.

    A folder with a checkpoint under checkpoints/ is a run even when its config.toml is gone, and one with two of the
    three files that `infer.bundle.load` needs is a bundle.
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
    if has("txl_tokenizer.json") or (
        has("config.json") and has("model.safetensors", "pytorch_model.bin") and not has("MANIFEST.json", "train.toml")
    ):
        return ArtifactKind.HUGGINGFACE
    if sum(map(has, ("config.json", "model.safetensors", "MANIFEST.json"))) > 1:
        return ArtifactKind.BUNDLE
    if has("MANIFEST.json") and CHECKPOINT_NAME.fullmatch(Path(path).name):
        return ArtifactKind.CHECKPOINT
    if has(SETTINGS, RECORDS) or ArtifactKind.CHECKPOINT in map(detect_artifact, list_checkpoints(Path(path))):
        return ArtifactKind.RUN
    return ArtifactKind.NOTHING


def is_url(path: str | Path) -> bool:
    """A URL, or a shell command that gives bytes; never a `Path`, which would have lost a slash."""
    return isinstance(path, str) and ("://" in path or "::" in path or path.startswith("pipe:"))


def require(
    path: str | Path, *wanted: ArtifactKind, what: str = "", remedies: Mapping[ArtifactKind, str] | None = None
) -> ArtifactKind:
    """The kind of a path, which must be among `wanted`.

    `what` names the flag or setting in the message. `remedies`: what to say of a wrong kind in place of what one does
    with it anywhere; `{path}` in it is the path.
    Raises ConfigError, a line that names the kind and a remedy.
    """
    kind = detect_artifact(path)
    if kind in wanted:
        return kind
    where = f"{what} {path}" if what else f"{path}"
    if kind is ArtifactKind.NOTHING and kind not in (remedies or {}):
        raise ConfigError(_why_nothing(Path(path), where, wanted))
    remedy = {**_USES, **(remedies or {})}[kind].format(path=path)
    raise ConfigError(f"{where} is {kind.value}, not {_either(wanted)}. {remedy}")


def _why_nothing(path: Path, where: str, wanted: tuple[ArtifactKind, ...]) -> str:
    makers = "; ".join(dict.fromkeys(_MAKERS[kind] for kind in wanted))
    if path.is_dir():
        inside = _of_kind(path, wanted) or _of_kind(path / CHECKPOINTS, wanted)
        if inside:
            return f"{where} is not {_either(wanted)} itself but holds {_listed(inside)}. Name one of them."
        lacks = ", ".join(f"{_MARKS[kind]} ({kind.value})" for kind in wanted)
        return f"{where} is not {_either(wanted)}: it has no {lacks}. {makers}."
    if os.path.lexists(path):
        if detect_artifact(path.parent) in wanted:
            return f"{where} is a file of {detect_artifact(path.parent).value}. Name the folder: {path.parent}."
        return f"{where} is a file, and {_either(wanted)} is a folder. {makers}."
    if os.path.isdir(path.with_name(f".{path.name}.prepare")) and ArtifactKind.CORPUS in wanted:
        return f"{where} is not there yet: its preparation was not finished. The same `txl prepare` goes on."
    beside = _of_kind(path.parent, wanted)
    near = nearest(path.name, [other.name for other in beside])
    if near:
        return f"{where} does not exist. Did you mean {_listed([path.with_name(name) for name in near])}?"
    others = f"{path.parent} has {_listed(beside)}" if beside else makers
    return f"{where} does not exist. Name {_either(wanted)}: {others}."


def _of_kind(folder: Path, wanted: tuple[ArtifactKind, ...]) -> list[Path]:
    """The folders in it that are one of these, of so many of the last by name: a home may hold a million others."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return []
    return [folder / name for name in names[-_MOST_LOOKED_AT:] if detect_artifact(folder / name) in wanted]


def _listed(paths: list[Path]) -> str:
    """The newest checkpoints and the last of others."""
    shown = ", ".join(str(path) for path in paths[-_MOST_NAMES:])
    return shown if len(paths) <= _MOST_NAMES else f"{shown} and {len(paths) - _MOST_NAMES} more"


def _either(kinds: tuple[ArtifactKind, ...]) -> str:
    *first, last = (kind.value for kind in kinds if kind is not ArtifactKind.NOTHING)
    return f"{', '.join(first)} or {last}" if first else last


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / CHECKPOINTS / f"step_{step:09d}"


def step_of(folder: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(folder.name.removeprefix("step_"))


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Committed checkpoints by step, oldest first; not verified. What is no folder is a damaged one, not none: nothing
    is trained over it."""
    folder = run_dir / CHECKPOINTS
    if not os.path.isdir(folder):
        return []
    return sorted(path for path in folder.glob("step_*") if CHECKPOINT_NAME.fullmatch(path.name))


def steps_to_keep(steps: Sequence[int], *, keep_last: int, keep_every: int, best: Collection[int] = ()) -> set[int]:
    """Which of the steps, in ascending order, to keep: the last ones, milestones and the best."""
    milestones = {step for step in steps if keep_every and step % keep_every == 0}
    return set(steps[-keep_last:]) | milestones | (set(best) & set(steps))
