"""Checkpoints of NVIDIA's code (DeepLearningExamples, PyTorch): `checkpoint_last.pt`, `checkpoint_best.pt`.

The model is the original's, with other names in the softmax, tied tensors stored once, and a same-length window one key
wider. The file holds its constructor's arguments and its vocabulary. Optimizer state and memories are left behind.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from txl_dist.convert.checks import Imported, only_tensors, refuse
from txl_dist.convert.key_mapping import Weights
from txl_dist.convert.original import OriginalSettings, model_of
from txl_dist.convert.safe_unpickle import read_torch_file
from txl_dist.convert.vocabulary import tokenizer_of
from txl_dist.errors import CheckpointError

CHECKPOINTS = ("checkpoint_last.pt", "checkpoint_best.pt")
ALIAS = "crit.shared_out_projs."
ORIGINAL = {
    f"crit.out_layers_{theirs}.{i}": f"crit.out_layers.{i}.{original}"
    for theirs, original in (("weights", "weight"), ("biases", "bias"))
    for i in range(100)  # more clusters than anybody has
}
"""{NVIDIA's name: the original's} where they differ."""
THEIRS = {original: theirs for theirs, original in ORIGINAL.items()}


def import_nvidia(path: Path, *, told: dict[str, Any]) -> Imported:
    """Read a checkpoint, or of a folder the last one, else the best one. Raises CheckpointError."""
    file = path
    if path.is_dir():
        file = next((path / name for name in CHECKPOINTS if (path / name).is_file()), path / CHECKPOINTS[0])
    if not file.is_file():
        raise CheckpointError(f"{path} holds neither {' nor '.join(CHECKPOINTS)}. Name the checkpoint itself.")
    content = read_torch_file(file)
    missing = [key for key in ("model_state", "model_config") if not isinstance(content, dict) or key not in content]
    if missing:
        raise CheckpointError(f"{file} lacks {' and '.join(missing)}: it is no checkpoint of NVIDIA's train.py.")
    if not isinstance(content["model_config"], dict):
        raise CheckpointError(f"{file}: model_config is no dict of settings.")
    weights = only_tensors(content["model_state"], where=str(file))
    found = model_of(
        _without_aliases({ORIGINAL.get(name, name): tensor for name, tensor in weights.items()}, where=str(file)),
        OriginalSettings.of(content["model_config"], told, where=str(file)),
        same_length="memory_and_self",
        ties_are_listed=False,
        where=str(file),
        shown=lambda name: THEIRS.get(name, name),
    )
    if content.get("vocab") is None:
        return found
    tokenizer = tokenizer_of(content["vocab"], where=f"{file}: vocab", vocab_size=found.vocab_size)
    return dataclasses.replace(found, tokenizer=tokenizer)


def _without_aliases(theirs: Weights, *, where: str) -> Weights:
    """The softmax lists the input projections a second time, whether it is tied to them or not."""
    aliases = {name: name.replace(ALIAS, "word_emb.emb_projs.") for name in theirs if name.startswith(ALIAS)}
    refuse(
        [
            f"{name} differs from {other}, whose alias it is"
            for name, other in aliases.items()
            if other not in theirs or not torch.equal(theirs[name], theirs[other])
        ],
        where=where,
    )
    return {name: tensor for name, tensor in theirs.items() if name not in aliases}
