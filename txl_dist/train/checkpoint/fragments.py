"""The fragment files of a checkpoint. Each rank that saves writes one file: its pieces of parameters and optimizer
state.

`FragmentFiles` assembles any range of any parameter from the files. So a checkpoint can be loaded at any ZeRO stage, on
any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from txl_dist.errors import CheckpointError, translate_errors
from txl_dist.io.files import parse_object
from txl_dist.io.tensor_files import TensorFile, open_tensors
from txl_dist.train.engine.partitions import Fragment

_DAMAGE = (OSError, RuntimeError, SafetensorError, KeyError, ValueError)


@contextmanager
def reading(what: str, path: Path) -> Iterator[Any]:
    """Return a context manager that opens a file of tensors. Raises CheckpointError if the file cannot be opened, or
    cannot be read during the block.

    `what` names the file's content in the error's message.
    """
    damage = (OSError, RuntimeError, SafetensorError)
    with translate_errors(CheckpointError, f"cannot read {what} in {path}", "Use another checkpoint.", of=damage):
        yield open_tensors(path)


def fragment_tensors(fragments: list[Fragment]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (tensors, metadata) for a file of fragments. A fragment is a rank's piece of one parameter and of its
    optimizer state.

    Tensors are named `KIND/PARAMETER`. For each fragment the metadata contains the index of its first value in the
    flattened parameter, and the optimizer's update count.
    """
    tensors: dict[str, Tensor] = {}
    for fragment in fragments:
        for kind, values in fragment.values.items():
            tensors[f"{kind}/{fragment.parameter}"] = values
    starts = {fragment.parameter: fragment.start for fragment in fragments}
    steps = {fragment.parameter: fragment.step for fragment in fragments}
    return tensors, {"starts": json.dumps(starts), "steps": json.dumps(steps)}


class FragmentFiles:
    """Reader of a checkpoint's fragment files. Each file contains one rank's pieces of the parameters and of their
    optimizer state. An engine of any ZeRO stage, on any number of ranks, loads from this reader.

    The reader first opens file number `near`. It opens another file only if the open files lack a requested value, the
    nearest number first. So a rank that reads the fragments that it saved itself opens one file only, and on another
    number of ranks it opens a few neighbours.
    """

    def __init__(self, folder: Path, *, near: int = 0) -> None:
        """Open the first file that contains weights. Raises CheckpointError if no file contains weights, or if a file
        cannot be read."""
        self._folder = folder
        paths = sorted(folder.glob("*.safetensors"))
        by_distance = sorted(range(len(paths)), key=lambda number: abs(number - near))
        self._waiting = [paths[number] for number in by_distance]
        self._opened: list[_FragmentFile] = []
        self.kinds: list[str] = []
        while not self.kinds and self._open_next():  # a rank of a small model may hold nothing
            self.kinds = self._opened[-1].kinds
        if not self.kinds:
            raise CheckpointError(f"{folder} holds no weights. Use another checkpoint.")

    def read(self, kind: str, parameter: str, *, start: int, length: int) -> Tensor:
        """Return [length] values of the flattened parameter, from the value `start` on.

        Raises CheckpointError if the files together lack some of these values.
        """
        values = torch.empty(length)
        num_read = 0
        index = 0
        while num_read < length:
            if index == len(self._opened) and not self._open_next():
                raise CheckpointError(
                    f"{self._folder} lacks {length - num_read} of {length} values of the parameter {parameter} "
                    f"({kind}). The first missing value has index {start + num_read}. The checkpoint belongs to "
                    "another model. Use another checkpoint."
                )
            copied = self._opened[index].copy_into(values[num_read:], kind, parameter, start=start + num_read)
            num_read = num_read + copied
            index = 0 if copied else index + 1
        return values

    def kinds_of(self, parameter: str) -> list[str]:
        """Return the kinds of values that a parameter has, for example `weight` and `exp_avg`.

        Raises CheckpointError if no file contains the parameter.
        """
        return self._file_of(parameter).kinds_of(parameter)

    def step_of(self, parameter: str) -> float:
        """Return the optimizer's update count for a parameter. Raises CheckpointError if no file contains the
        parameter."""
        return self._file_of(parameter).steps[parameter]

    def _file_of(self, parameter: str) -> _FragmentFile:
        index = 0
        while index < len(self._opened) or self._open_next():
            if parameter in self._opened[index].steps:
                return self._opened[index]
            index += 1
        raise CheckpointError(
            f"{self._folder} does not contain the parameter {parameter}. The checkpoint belongs to another model. Use "
            "another checkpoint."
        )

    def _open_next(self) -> bool:
        if not self._waiting:
            return False
        self._opened.append(_FragmentFile(self._waiting.pop(0)))
        return True


class _FragmentFile:
    """One open file of fragments, as `FragmentFiles` reads it."""

    def __init__(self, path: Path) -> None:
        """Open the file and read its index. Raises CheckpointError if the file is damaged."""
        self._path = path
        with self._reading():
            self._file = TensorFile(path)
            self.kinds = sorted({name.partition("/")[0] for name in self._file.shapes})
        what = f"{path} has no valid list of the pieces of parameters in it"
        with translate_errors(CheckpointError, what, "Use another checkpoint.", of=(KeyError, ValueError)):
            self._starts: dict[str, int] = parse_object(self._file.metadata["starts"])
            self.steps: dict[str, float] = parse_object(self._file.metadata["steps"])

    def kinds_of(self, parameter: str) -> list[str]:
        """Return the kinds of values that this file contains for a parameter, for example `weight` and `exp_avg`."""
        return [kind for kind in self.kinds if f"{kind}/{parameter}" in self._file.shapes]

    def copy_into(self, values: Tensor, kind: str, parameter: str, *, start: int) -> int:
        """Copy values of a parameter from this file into `values`, beginning with the parameter's value `start`.

        Returns the number of copied values, which is 0 if the file lacks the value at `start`. Raises CheckpointError
        if the file lacks this kind of value.
        """
        if parameter not in self._starts:
            return 0
        name = f"{kind}/{parameter}"
        if name not in self._file.shapes:
            raise CheckpointError(
                f"{self._path} contains the parameter {parameter}, but not its {kind}. Use another checkpoint."
            )
        first = start - self._starts[parameter]
        count = min(len(values), self._file.shapes[name].numel() - first)
        if first < 0 or count <= 0:
            return 0
        with self._reading():
            values[:count] = self._file.read(name, first, first + count)
        return count

    def _reading(self) -> AbstractContextManager[None]:
        what = f"cannot read the weights in {self._path}"
        return translate_errors(CheckpointError, what, "Use another checkpoint.", of=_DAMAGE)
