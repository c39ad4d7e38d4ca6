"""The callbacks' states in a checkpoint: one file, `callbacks.safetensors`, without a pickle.

Each tensor of a state has the name `CALLBACK/KEY`. All other values are JSON in the file's metadata. If no callback has
a state, the checkpoint has no such file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from txl_dist.console.formatting import format_bytes
from txl_dist.errors import CheckpointError, TrainingError, translate_errors
from txl_dist.io.files import parse_object
from txl_dist.train.callbacks import States
from txl_dist.train.checkpoint.validate import CALLBACKS

MAX_TENSOR_BYTES, MAX_JSON_BYTES = 256 << 20, 16 << 20
"""Maximum number of bytes of tensors, and of JSON, in the states of all callbacks together. Rank 0 holds a copy of the
states while it saves."""
_STATES_KEY, _VALIDATED_KEY = "callbacks", "validated_step"


class CallbackStates(NamedTuple):
    """States of a run's callbacks, as the checkpoint file `callbacks.safetensors` stores them."""

    states: States
    """Result of each callback's `state_dict`, by its `state_key`."""
    validated_step: int = -1
    """Step of the last validation before these states were taken. It is -1 if there was no validation."""


NO_STATES = CallbackStates({})


def packed_states(callbacks: CallbackStates) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Return (tensors, metadata) of the file of callbacks' states, or None if no callback has a state. The tensors are
    copies.

    Raises TrainingError for values that are neither JSON nor tensors, and if the tensors or the JSON values are too
    large for a checkpoint (`MAX_TENSOR_BYTES`, `MAX_JSON_BYTES`).
    """
    if not callbacks.states:
        return None
    states = callbacks.states
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for name, state in states.items():
        if not isinstance(state, Mapping):
            raise _unfit(name, "", state, "return a dictionary")
        plain[name] = {}
        for key, value in state.items():
            if not isinstance(key, str):
                raise _unfit(name, f"key {key!r:.80}", key, "use text as keys")
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value.detach().cpu().contiguous().clone()
            else:
                _check_json(name, key, value, depth=0)
                plain[name][key] = value
    metadata = {_STATES_KEY: json.dumps(plain), _VALIDATED_KEY: str(callbacks.validated_step)}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    for what, size, limit in (
        ("tensors", num_bytes, MAX_TENSOR_BYTES),
        ("JSON", len(metadata[_STATES_KEY]), MAX_JSON_BYTES),
    ):
        if size > limit:
            raise TrainingError(
                f"the states of callbacks ({', '.join(states)}) hold {format_bytes(size)} of {what}, but a "
                f"checkpoint stores {format_bytes(limit)} at most. Store large values in a separate file, and the "
                f"file's name in the state."
            )
    return tensors, metadata


def read_states(folder: Path) -> CallbackStates:
    """Return the callbacks' states in a checkpoint.

    The result is empty if the checkpoint has no file of states. Raises CheckpointError if the file cannot be read.
    """
    path = folder / CALLBACKS
    if not path.is_file():
        return NO_STATES
    reasons = (OSError, ValueError, KeyError, SafetensorError)
    with translate_errors(CheckpointError, f"{path} cannot be read", "Use another checkpoint.", of=reasons):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            plain = parse_object(metadata[_STATES_KEY])
            states: dict[str, dict[str, Any]] = {name: dict(state) for name, state in plain.items()}
            for full_name in file.keys():  # noqa: SIM118  no mapping
                name, _, key = full_name.partition("/")
                states[name][key] = file.get_tensor(full_name)
        return CallbackStates(dict(states), int(metadata[_VALIDATED_KEY]))


_DEEPEST = 20


def _check_json(name: str, where: str, value: object, *, depth: int) -> None:
    """Raise TrainingError if a value would change when it is written as JSON and read again."""
    if depth > _DEEPEST:
        raise _unfit(name, where, value, f"nest lists and dictionaries at most {_DEEPEST} levels deep")
    if value is None or type(value) in (bool, int, float, str):
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(name, f"{where}[{index}]", item, depth=depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise _unfit(name, f"{where}, key {key!r:.80}", key, "use text as keys")
            _check_json(name, f"{where}.{key}", item, depth=depth + 1)
    elif isinstance(value, Tensor):
        raise _unfit(name, where, value, "put tensors at the top level")
    else:
        raise _unfit(name, where, value, "use None, bool, int, float, str, lists, dictionaries, or a tensor")


def _unfit(name: str, where: str, value: object, remedy: str) -> TrainingError:
    """Return the error for a value that a checkpoint cannot store. `where` is the place of the value inside the
    callback's state, or empty for the whole state."""
    if where:
        place = f" at {where}"
    else:
        place = ""
    return TrainingError(
        f"callback {name}: a checkpoint cannot store the {type(value).__name__} that state_dict() returned{place}. "
        f"{remedy[0].upper()}{remedy[1:]}."
    )
