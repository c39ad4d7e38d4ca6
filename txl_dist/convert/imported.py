"""What every importer gives, and the checks that all of them make.

A peer's file is read into tensors under the original's names (`names`), and its settings, under the names of the
original's arguments, into a dict. From both comes a `ModelSection`; what the shapes can tell is taken from them and
held against the settings. A file that does not fit says which key, what was expected and what was found.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from txl_dist.config import check_vocabulary
from txl_dist.convert.names import Weights, from_original, partners, shapes_of
from txl_dist.errors import CheckpointError
from txl_dist.sections import ModelSection
from txl_dist.text.tokenizer import Tokenizer

S = TypeVar("S", bound=BaseModel)
BUFFERS = ("inv_freq",)
"""Ends of names that are recomputed, not read."""


@dataclass(frozen=True)
class Imported:
    """A peer's model in our words."""

    model: ModelSection
    weights: Weights
    """Under our names, fp32."""
    vocab_size: int
    segment_len: int
    """Tokens per segment in training; 0 where neither file nor settings say."""
    memory_len: int
    """Tokens of memory in training; -1 where neither file nor settings say."""
    tokenizer: Tokenizer | None
    """None where the file holds no vocabulary."""


class PeerSettings(BaseModel):
    """Settings under a peer's own names; those that are not listed tell nothing of the model. None: not told."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def of(cls: type[S], values: Mapping[str, Any], *, where: str) -> S:
        """Raises CheckpointError for a value of another type."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _explained(error, where=where) from error


def read_json(path: Path | None) -> dict[str, Any]:
    """A JSON object; an empty one without a path. Raises CheckpointError."""
    if path is None:
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}. Name a JSON object of settings.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f'{path} holds no JSON object. Write the settings as {{"n_layer": 12, ...}}.')
    return values


def only_tensors(values: Any, *, where: str) -> Weights:
    """The tensors of a state dict, in fp32, without buffers and without the prefix that (Distributed)DataParallel puts
    before names. Raises CheckpointError for anything else."""
    if not isinstance(values, dict) or not values or not all(isinstance(name, str) for name in values):
        raise CheckpointError(f"{where} holds no state dict (names and tensors). Save the model's state_dict().")
    weights = {}
    for name, value in values.items():
        if name.rpartition(".")[2] in BUFFERS:
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise CheckpointError(f"{where}: {name} is {_kind(value)}, not a tensor of floating-point numbers.")
        if not bool(value.isfinite().all()):
            raise CheckpointError(f"{where}: {name} holds numbers that are not finite. Use a sound checkpoint.")
        weights[name.removeprefix("module.")] = value.detach().float()
    return weights


def section(values: dict[str, Any], *, where: str) -> ModelSection:
    """A model section of values found in a file. Raises CheckpointError if they make no model."""
    try:
        return ModelSection.model_validate(values)
    except ValidationError as error:
        raise _explained(error, where=where) from error


def weights_of(theirs: Weights, model: ModelSection, *, vocab_size: int, where: str) -> Weights:
    """Tensors under the original's names as ours, after a check of names, shapes and ties. Raises CheckpointError."""
    check_vocabulary(model, vocab_size=vocab_size)
    expected, tied = shapes_of(model, vocab_size=vocab_size), partners(model)
    tied = {name: other for name, other in tied.items() if name in expected}
    problems = shape_problems(theirs, expected, optional=tied)
    problems += [
        f"{name} differs from {other}, to which the settings tie it"
        for name, other in tied.items()
        if not problems and name in theirs and not torch.equal(theirs[name], theirs[other])
    ]
    refuse(problems, where=where)
    return from_original({tied.get(name, name): theirs[name] for name in theirs}, model)


def shape_problems(
    theirs: Weights, expected: Mapping[str, tuple[int, ...]], *, optional: Container[str] = ()
) -> list[str]:
    """What is missing (`optional` may be), surplus or of another shape."""
    problems = [
        f"{name} is missing (expected {list(shape)})"
        for name, shape in expected.items()
        if name not in theirs and name not in optional
    ]
    problems += [f"{name} {list(theirs[name].shape)} is surplus" for name in theirs if name not in expected]
    return problems + [
        f"{name} has shape {list(theirs[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in theirs and tuple(theirs[name].shape) != shape
    ]


def settings_problems(settings: PeerSettings, found: Mapping[str, int]) -> list[str]:
    """What settings say of sizes must be what the weights have."""
    return [
        f"the settings say {name}={getattr(settings, name)}, the weights have {value}"
        for name, value in found.items()
        if getattr(settings, name) not in (None, value)
    ]


def refuse(problems: list[str], *, where: str) -> None:
    """Raise CheckpointError if there are any, naming the first few."""
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise CheckpointError(
            f"{where} does not fit: {'; '.join(problems[:4])}{more}. "
            "Is it of this format and architecture, and are its settings right?"
        )


def _explained(error: ValidationError, *, where: str) -> CheckpointError:
    problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"])
    return CheckpointError(f"{where}: {name} = {problem['input']!r}: {problem['msg']}. Correct the settings.")


def _kind(value: Any) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
