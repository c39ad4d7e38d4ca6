"""What every importer gives, and the checks that all of them make.

A peer's file is read into tensors, and its settings into a `PeerSettings`; from both comes a `ModelSection`. Whatever
is told is believed, the rest is taken from the shapes; then all names and shapes are held against those that the model
must have. A file that does not fit says which key, what was expected and what was found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from txl_dist.config.schema import ModelSection
from txl_dist.console.logging import logger
from txl_dist.console.suggest import nearest
from txl_dist.convert.key_mapping import Weights
from txl_dist.errors import CheckpointError, translate_errors
from txl_dist.io.files import parse_object, read_bytes
from txl_dist.tokenizers.base import Tokenizer

S = TypeVar("S", bound="PeerSettings")
BUFFERS = ("inv_freq",)
"""Ends of names that are recomputed, not read."""
WRAPPERS = frozenset(
    {
        *("module", "_orig_mod", "model", "_forward_module"),  # DataParallel and DeepSpeed, compile, Lightning, Fabric
        *("_fsdp_wrapped_module", "_checkpoint_wrapped_module"),
    }
)
"""Parts of tensors' names that wrappers add; no peer's model has a part of such a name."""


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
    def of(cls: type[S], found: Mapping[str, Any], told: Mapping[str, Any], *, where: str) -> S:
        """Settings found in a file, under those that a user tells. Raises CheckpointError for a value of another type,
        and for a name in `told` that nearly is a known one."""
        for name in sorted(told.keys() - cls.model_fields.keys()):
            if near := nearest(name, cls.model_fields, least_alike=0.8):
                raise CheckpointError(f"the settings have an unknown {name}. Did you mean {near[0]}?")
            logger.warning("the setting %s tells nothing of the model and is not used", name)
        try:
            # Strict, so that "yes" is no bool; by way of JSON, so that a list is a tuple all the same.
            return cls.model_validate_json(json.dumps({**found, **told}, default=str), strict=True)
        except (ValidationError, ValueError, RecursionError) as error:
            raise _explained(error, where=where) from error


def read_json(path: Path | None) -> dict[str, Any]:
    """A JSON object; an empty one without a path. Raises CheckpointError."""
    if path is None:
        return {}
    remedy = 'It must hold one JSON object, such as {"n_layer": 12, ...}.'
    with translate_errors(CheckpointError, f"{path} cannot be read as JSON", remedy, of=(OSError, ValueError)):
        return parse_object(read_bytes(path))


def plain_name(name: str) -> str:
    """A tensor's name without what wrappers put before it or into it: `module._orig_mod.layers.0` is `layers.0`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def only_tensors(values: Any, *, where: str) -> Weights:
    """The tensors of a state dict, in fp32, under their plain names and without buffers.

    Raises CheckpointError for anything else, and where two tensors have one plain name.
    """
    if not isinstance(values, dict) or not values or not all(isinstance(name, str) for name in values):
        raise CheckpointError(f"{where} holds no state dict (names and tensors). Save the model's state_dict().")
    weights: Weights = {}
    names: dict[str, str] = {}
    for name, value in values.items():
        if name.rpartition(".")[2] in BUFFERS:
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = f"{value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(f"{where}: {name} is a {kind}, not a tensor of floating-point numbers.")
        weight = value.detach().float()
        if not bool(weight.isfinite().all()):
            raise CheckpointError(f"{where}: {name} holds numbers that are not finite in fp32. Use a sound checkpoint.")
        plain = plain_name(name)
        first = names.setdefault(plain, name)
        if first != name and not torch.equal(weights[plain], weight):
            raise CheckpointError(f"{where}: {first} and {name} are one tensor of different values. Keep one of them.")
        weights[plain] = weight
    return weights


def count(theirs: Weights, prefix: str) -> int:
    """One more than the largest number that follows `prefix` in a name; 0 where none does."""
    numbers = [name.removeprefix(prefix).partition(".")[0] for name in theirs if name.startswith(prefix)]
    return 1 + max((int(number) for number in numbers if number.isdecimal() and len(number) < 4), default=-1)


def size(theirs: Weights, name: str, axis: int, *, dims: int, where: str) -> int:
    """One size of a tensor. Raises CheckpointError if it is missing or has another number of dimensions."""
    if name not in theirs:
        found = ", ".join(list(theirs)[:3])
        hint = " A name with `transformer.` is Hugging Face's." if f"transformer.{name}" in theirs else ""
        raise CheckpointError(
            f"{where} does not fit: {name} is missing. Found: {found}, ... Is it of this format?{hint}"
        )
    if theirs[name].dim() != dims:
        raise CheckpointError(
            f"{where} does not fit: {name} has shape {list(theirs[name].shape)}, expected {dims} dimensions."
        )
    return int(theirs[name].shape[axis])


def section(values: dict[str, Any], *, where: str) -> ModelSection:
    """A model section of values found in a file. Raises CheckpointError if they make no model."""
    try:
        return ModelSection.model_validate(values)
    except ValidationError as error:
        raise _explained(error, where=where) from error


def shape_problems(
    theirs: Weights,
    expected: Mapping[str, tuple[int, ...]],
    *,
    optional: Container[str] = (),
    shown: Callable[[str], str] = str,
) -> list[str]:
    """What is missing (`optional` may be), surplus or of another shape; `shown` is a key as the file has it."""
    problems = [
        f"{shown(name)} is missing (expected {list(shape)})"
        for name, shape in expected.items()
        if name not in theirs and name not in optional
    ]
    problems += [f"{shown(name)} {list(theirs[name].shape)} is surplus" for name in theirs if name not in expected]
    return problems + [
        f"{shown(name)} has shape {list(theirs[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in theirs and tuple(theirs[name].shape) != shape
    ]


def refuse(problems: list[str], *, where: str) -> None:
    """Raise CheckpointError if there are any, naming the first few."""
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise CheckpointError(
            f"{where} does not fit: {'; '.join(problems[:4])}{more}. "
            "Is it of this format and architecture, and are its settings right?"
        )


def _explained(error: Exception, *, where: str) -> CheckpointError:
    if not isinstance(error, ValidationError):
        return CheckpointError(f"{where}: the settings cannot be read: {error}.")
    problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"])
    return CheckpointError(f"{where}: {name} = {problem['input']!r}: {problem['msg']}. Correct the settings.")
