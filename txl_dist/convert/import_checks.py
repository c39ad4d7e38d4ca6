"""Result type of every importer, and the checks that all importers make.

An importer reads the file of another program (a peer): its tensors, and its settings as `PeerSettings`. Tensors and
settings together give a `ModelSection`. Settings that the file lacks are computed from the tensors' shapes. Then all
names and shapes are compared with the names and shapes that the model must have. An error names the tensor, and the
expected and the actual shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
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
"""Last parts of the names of tensors that are buffers. Buffers are not imported, because they can be computed again."""
WRAPPERS = frozenset(
    {
        "module",  # DataParallel, DeepSpeed
        "_orig_mod",  # torch.compile
        "model",  # Lightning
        "_forward_module",  # Fabric
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
    }
)
"""Parts that wrappers such as DDP add to tensors' names. In a supported program, a tensor's name has such a part only
if a wrapper added the part."""


@dataclass(frozen=True)
class Imported:
    """Model of another program with this package's settings and names. Every importer returns an `Imported`."""

    model: ModelSection
    weights: Weights
    """Weights in fp32 by this package's names."""
    vocab_size: int
    segment_len: int
    """Tokens per segment in training. It is 0 if neither the file nor the settings contain the number."""
    memory_len: int
    """Tokens of memory in training. It is -1 if neither the file nor the settings contain the number."""
    reuse_len: int = field(default=0, kw_only=True)
    """For models that predict in any order: the number of a segment's first tokens that the memory stores. A value of 0
    means all tokens."""
    tokenizer: Tokenizer | None
    """Tokenizer made from the file's vocabulary. It is None if the file has no vocabulary."""


class PeerSettings(BaseModel):
    """Settings of another program's model, by that program's own names. None means that a setting is not given.

    Each importer has a subclass, whose fields are the settings that affect the model.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def of(cls: type[S], from_file: Mapping[str, Any], from_user: Mapping[str, Any], *, where: str) -> S:
        """Merge the settings in a file with the settings that a user gives. The user's settings take precedence.

        Raises CheckpointError if a value has the wrong type, or if a user's setting looks like a misspelt field name.
        """
        for name in sorted(from_user.keys() - cls.model_fields.keys()):
            similar = nearest(name, cls.model_fields, least_alike=0.8)
            if similar:
                raise CheckpointError(f"the settings contain an unknown name {name}. Did you mean {similar[0]}?")
            logger.warning("the setting %s does not describe the model and is not used", name)
        settings = {**from_file, **from_user}
        try:
            # Strict, so that "yes" is not accepted as a bool. From JSON, so that a list is accepted as a tuple.
            return cls.model_validate_json(json.dumps(settings, default=str), strict=True)
        except (ValidationError, ValueError, RecursionError) as error:
            raise _settings_error(error, where=where) from error


def read_peer_settings(path: Path | None) -> dict[str, Any]:
    """Read a JSON file with settings by another program's names. Returns an empty dict if there is no path.

    Raises CheckpointError if the file cannot be read or is not an object.
    """
    if path is None:
        return {}
    remedy = 'The file must contain one JSON object, such as {"n_layer": 12, ...}.'
    with translate_errors(CheckpointError, f"{path} cannot be read as JSON", remedy, of=(OSError, ValueError)):
        return parse_object(read_bytes(path))


def plain_name(name: str) -> str:
    """Return a tensor's name without the parts that wrappers add. For `module._orig_mod.layers.0` it is `layers.0`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def only_tensors(values: Any, *, where: str) -> Weights:
    """Return the tensors of a state dict in fp32, by their plain names and without buffers.

    Raises CheckpointError if there are values that are not tensors, or two different tensors with the same plain name.
    """
    is_state_dict = isinstance(values, dict) and all(isinstance(name, str) for name in values)
    if not is_state_dict or not values:
        raise CheckpointError(f"{where} holds no state dict (names and tensors). Save the model's state_dict().")
    weights: Weights = {}
    names: dict[str, str] = {}
    for name, value in values.items():
        if name.rpartition(".")[2] in BUFFERS:
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            if isinstance(value, Tensor):
                kind = f"{value.dtype} tensor"
            else:
                kind = type(value).__name__
            raise CheckpointError(f"{where}: {name} is a {kind}, not a tensor of floating-point numbers.")
        weight = value.detach().float()
        if not bool(weight.isfinite().all()):
            raise CheckpointError(
                f"{where}: {name} contains numbers that are not finite in fp32. Use another checkpoint."
            )
        plain = plain_name(name)
        first = names.setdefault(plain, name)
        if first != name and not torch.equal(weights[plain], weight):
            raise CheckpointError(
                f"{where}: {first} and {name} must be the same tensor, but have different values. Remove "
                "one of these two tensors from the file."
            )
        weights[plain] = weight
    return weights


def count(peer_weights: Weights, prefix: str) -> int:
    """Count the numbered parts, such as layers, that tensor names contain after `prefix`.

    Returns one more than the largest number, or 0 if no name begins with the prefix and a number.
    """
    largest = -1
    for name in peer_weights:
        if not name.startswith(prefix):
            continue
        number = name.removeprefix(prefix).partition(".")[0]
        if number.isdecimal() and len(number) < 4:
            largest = max(largest, int(number))
    return largest + 1


def dim_size(peer_weights: Weights, name: str, axis: int, *, dims: int, where: str) -> int:
    """Return the size of a tensor along an axis.

    Raises CheckpointError if the tensor is missing, or if its number of dimensions is not `dims`.
    """
    if name not in peer_weights:
        first_names = ", ".join(list(peer_weights)[:3])
        if f"transformer.{name}" in peer_weights:
            hint = " Names that begin with `transformer.` are from Hugging Face."
        else:
            hint = ""
        raise CheckpointError(
            f"{where} does not fit the format: {name} is missing. The file contains {first_names}, ... Check "
            f"--format.{hint}"
        )
    shape = peer_weights[name].shape
    if len(shape) != dims:
        raise CheckpointError(
            f"{where} does not fit the format: {name} has shape {list(shape)}, but must have {dims} dimensions."
        )
    return int(shape[axis])


def section(values: dict[str, Any], *, where: str) -> ModelSection:
    """Build a model section from the values in a file. Raises CheckpointError if the values do not describe a model."""
    try:
        return ModelSection.model_validate(values)
    except ValidationError as error:
        raise _settings_error(error, where=where) from error


def shape_problems(
    peer_weights: Weights,
    expected: Mapping[str, tuple[int, ...]],
    *,
    optional: Container[str] = (),
    shown: Callable[[str], str] = str,
) -> list[str]:
    """Return one sentence for each tensor that is missing, not expected, or of the wrong shape.

    Args:
        optional: Names of tensors that may be missing.
        shown: Function that returns the name in the file for a tensor's name, for messages.
    """
    missing = []
    surplus = []
    of_other_shape = []
    for name, shape in expected.items():
        if name in peer_weights:
            actual = peer_weights[name].shape
            if tuple(actual) != shape:
                problem = f"{shown(name)} has shape {list(actual)}, expected {list(shape)}"
                of_other_shape.append(problem)
        elif name not in optional:
            missing.append(f"{shown(name)} is missing (expected {list(shape)})")
    for name, tensor in peer_weights.items():
        if name not in expected:
            surplus.append(f"{shown(name)} {list(tensor.shape)} is surplus")
    return missing + surplus + of_other_shape


def refuse(problems: list[str], *, where: str) -> None:
    """Raise CheckpointError with the first few problems of a file, if it has any."""
    if problems:
        if len(problems) > 4:
            more = f" and {len(problems) - 4} more"
        else:
            more = ""
        raise CheckpointError(
            f"{where} does not fit the settings: {'; '.join(problems[:4])}{more}. "
            "Check the format, the architecture and the settings."
        )


def _settings_error(error: Exception, *, where: str) -> CheckpointError:
    """Return the error for settings that are not valid. Its message names only the first problem."""
    if not isinstance(error, ValidationError):
        return CheckpointError(f"{where}: the settings cannot be read: {error}.")
    problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"])
    value = problem["input"]
    reason = problem["msg"]
    return CheckpointError(f"{where}: {name} = {value!r}: {reason}. Correct the settings.")
