"""Import of checkpoints of NVIDIA's code (DeepLearningExamples, PyTorch): `checkpoint_last.pt`, `checkpoint_best.pt`.

The model is the same as in the original code, with three differences. The tensors of the softmax have other names, tied
tensors are stored once, and with `same_length` a query sees one key more. The file has the arguments of the model's
constructor, and its vocabulary. Optimizer state and memories are not imported.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from txl_dist.convert.import_checks import Imported, only_tensors, refuse
from txl_dist.convert.key_mapping import Weights
from txl_dist.convert.original import OriginalSettings, model_of
from txl_dist.convert.safe_unpickle import read_torch_file
from txl_dist.convert.vocabulary import tokenizer_of
from txl_dist.errors import CheckpointError

CHECKPOINTS = ("checkpoint_last.pt", "checkpoint_best.pt")
ALIAS = "crit.shared_out_projs."
MAX_CLUSTERS = 100
"""Largest number of clusters whose tensors this module can name. No known model has so many clusters."""


def _softmax_names() -> dict[str, str]:
    names: dict[str, str] = {}
    for i in range(MAX_CLUSTERS):
        names[f"crit.out_layers_weights.{i}"] = f"crit.out_layers.{i}.weight"
        names[f"crit.out_layers_biases.{i}"] = f"crit.out_layers.{i}.bias"
    return names


ORIGINAL = _softmax_names()
"""Dict from a tensor's name in NVIDIA's code to its name in the original code, for all tensors whose names differ."""
THEIRS = {original: nvidia for nvidia, original in ORIGINAL.items()}
"""Dict from a tensor's name in the original code to its name in NVIDIA's code, for all tensors whose names differ."""


def import_nvidia(path: Path, *, user_settings: dict[str, Any]) -> Imported:
    """Read a checkpoint of NVIDIA's code. Returns the model with the settings and names of txl_dist.

    If `path` is a folder, the last checkpoint in it is read, or the best checkpoint if there is no last one. Raises
    CheckpointError if the file cannot be read or does not fit the format.
    """
    file = path
    if path.is_dir():
        existing = [path / name for name in CHECKPOINTS if (path / name).is_file()]
        if existing:
            file = existing[0]
        else:
            file = path / CHECKPOINTS[0]
    if not file.is_file():
        raise CheckpointError(f"{path} holds neither {' nor '.join(CHECKPOINTS)}. Name the checkpoint file.")
    content = read_torch_file(file)
    keys = content.keys() if isinstance(content, dict) else ()
    missing = [key for key in ("model_state", "model_config") if key not in keys]
    if missing:
        raise CheckpointError(
            f"{file} lacks {' and '.join(missing)}: the file is not a checkpoint of NVIDIA's train.py."
        )
    if not isinstance(content["model_config"], dict):
        raise CheckpointError(f"{file}: model_config is not a dict of settings.")
    weights: Weights = {}
    for name, tensor in only_tensors(content["model_state"], where=str(file)).items():
        weights[ORIGINAL.get(name, name)] = tensor
    imported = model_of(
        _without_aliases(weights, where=str(file)),
        OriginalSettings.of(content["model_config"], user_settings, where=str(file)),
        same_length="memory_and_self",
        ties_are_listed=False,
        where=str(file),
        shown=lambda name: THEIRS.get(name, name),
    )
    if content.get("vocab") is None:
        return imported
    tokenizer = tokenizer_of(content["vocab"], where=f"{file}: vocab", vocab_size=imported.vocab_size)
    return dataclasses.replace(imported, tokenizer=tokenizer)


def _without_aliases(weights: Weights, *, where: str) -> Weights:
    """Drop the softmax's copies of input projections. NVIDIA's code saves these copies whether the projections are tied
    or not.

    Raises CheckpointError if a copy differs from its projection.
    """
    kept: Weights = {}
    problems = []
    for name, tensor in weights.items():
        if not name.startswith(ALIAS):
            kept[name] = tensor
            continue
        projection = name.replace(ALIAS, "word_emb.emb_projs.")
        if projection not in weights or not torch.equal(tensor, weights[projection]):
            problems.append(f"{name} differs from {projection}, to which it must be equal")
    refuse(problems, where=where)
    return kept
