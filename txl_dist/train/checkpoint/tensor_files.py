"""Tensors on disk as safetensors: written as a stream that is hashed on its way, read in slices.

The library writes a file in one call and leaves hashing to a second pass over it; here each chunk is hashed and written
once, in whichever thread calls, and both let go of the interpreter lock, so that training runs on meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from txl_dist.errors import CheckpointError, explained
from txl_dist.files import flush_to_disk, open_new, open_regular, parse_object
from txl_dist.train.engine.partitions import Fragment

_CHUNK_BYTES = 16 << 20
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, Any]:
    """Write contiguous host tensors to a new file and wait until the disk has it. Returns its bytes and sha256.

    `on_progress` is told of each chunk how long it was. Raises OSError.
    """
    digest, num_bytes = hashlib.sha256(), 0
    with open_new(path, buffering=0) as file:
        for chunk in _chunks(tensors, metadata or {}):
            digest.update(chunk)
            written = 0
            while written < len(chunk):  # an unbuffered file may take a part
                written += file.write(chunk[written:])
            num_bytes += len(chunk)
            on_progress(len(chunk))
        flush_to_disk(file)
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


def open_tensors(path: Path) -> Any:
    """`safe_open` of a regular file: at a FIFO the library would wait for ever. Raises OSError or SafetensorError."""
    open_regular(path).close()
    return safe_open(path, "pt", device="cpu")


@contextmanager
def reading(what: str, path: Path) -> Iterator[Any]:
    """`open_tensors` for a block that reads of it. Raises CheckpointError, which says what cannot be read and where."""
    damage = (OSError, RuntimeError, SafetensorError)
    with explained(CheckpointError, f"cannot read {what} in {path}", "Use another checkpoint.", of=damage):
        yield open_tensors(path)


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """About what `write_tensors` needs on the disk."""
    return sum(tensor.nbytes + 256 for tensor in tensors.values()) + 4096


def _chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    # Wide types first, so that every tensor begins at a multiple of its type's size.
    in_order = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    offset = 0
    for name, tensor in in_order:
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for aligned data
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in in_order:
        data = memoryview(tensor.detach().view(-1).view(torch.uint8).numpy().data)
        for start in range(0, len(data), _CHUNK_BYTES):
            yield data[start : start + _CHUNK_BYTES]


def fragment_tensors(fragments: list[Fragment]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a file of fragments."""
    tensors = {f"{kind}/{one.parameter}": values for one in fragments for kind, values in one.values.items()}
    starts = {one.parameter: one.start for one in fragments}
    steps = {one.parameter: one.step for one in fragments}
    return tensors, {"starts": json.dumps(starts), "steps": json.dumps(steps)}


class FragmentFiles:
    """The files of fragments that all ranks wrote: a `Source` for an engine of any stage on any number of ranks.

    Files are opened when a value is asked for that those before do not hold, beginning with the one of rank `near`, so
    that a rank which finds its own parts again opens no other file.
    """

    def __init__(self, folder: Path, *, near: int = 0) -> None:
        """Raises CheckpointError if the folder has no such file, or it cannot be read."""
        self._folder = folder
        paths = sorted(folder.glob("*.safetensors"))
        near = min(near, max(len(paths) - 1, 0))
        self._waiting = paths[near:] + paths[:near]
        self._opened: list[_FragmentFile] = []
        self.kinds: list[str] = []
        while not self.kinds and self._open_next():  # a rank of a small model may hold nothing
            self.kinds = self._opened[-1].kinds
        if not self.kinds:
            raise CheckpointError(f"{folder} holds no weights. Use another checkpoint.")

    def read(self, kind: str, parameter: str, *, start: int, length: int) -> Tensor:
        """Raises CheckpointError if no file holds it all."""
        values, found, index = torch.empty(length), 0, 0
        while found < length:
            if index == len(self._opened) and not self._open_next():
                raise CheckpointError(
                    f"{self._folder} lacks {length - found} of {length} values {kind} of {parameter} from "
                    f"{start + found} on. It belongs to another model; use another checkpoint."
                )
            copied = self._opened[index].copy_into(values[found:], kind, parameter, start=start + found)
            found, index = found + copied, 0 if copied else index + 1
        return values

    def step_of(self, parameter: str) -> float:
        """Updates that the optimizer had counted for it."""
        index = 0
        while index < len(self._opened) or self._open_next():
            if parameter in self._opened[index].steps:
                return self._opened[index].steps[parameter]
            index += 1
        raise CheckpointError(
            f"{self._folder} has no {parameter}. It belongs to another model; use another checkpoint."
        )

    def _open_next(self) -> bool:
        if not self._waiting:
            return False
        self._opened.append(_FragmentFile(self._waiting.pop(0)))
        return True


class _FragmentFile:
    def __init__(self, path: Path) -> None:
        with reading("the weights", path) as self._file:
            metadata = self._file.metadata() or {}
            self.kinds = sorted({name.partition("/")[0] for name in self._file.keys()})  # noqa: SIM118  no mapping
        what = f"{path} does not say which parts of which parameters it holds"
        with explained(CheckpointError, what, "Use another checkpoint.", of=(KeyError, ValueError)):
            self._starts: dict[str, int] = parse_object(metadata["starts"])
            self.steps: dict[str, float] = parse_object(metadata["steps"])

    def copy_into(self, values: Tensor, kind: str, parameter: str, *, start: int) -> int:
        """Copy what this file has of a parameter from `start` on. Returns how much that is: 0 if it lacks `start`."""
        if parameter not in self._starts:
            return 0
        what, remedy = f"{parameter} has no {kind}", "Use another checkpoint."
        with explained(CheckpointError, what, remedy, of=(SafetensorError,)):
            saved = self._file.get_slice(f"{kind}/{parameter}")
        first = start - self._starts[parameter]
        count = min(len(values), int(saved.get_shape()[0]) - first)
        if first < 0 or count <= 0:
            return 0
        values[:count] = saved[first : first + count]
        return count
