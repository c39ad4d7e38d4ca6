"""Tensors on disk as safetensors: written as a stream that is hashed while it is written, and read in slices.

The library safetensors writes a file in one call from tensors that are all in memory, and a hash needs a second pass.
Here each chunk is made, hashed and written once, in the calling thread. Hashing and writing release the interpreter
lock, so training continues at the same time. The library reads by mapping a file, whose pages count as memory of the
process as long as the file is mapped. `TensorFile` reads only the requested values and keeps no map.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from txl_dist.io.files import fsync, open_new, open_regular, parse_object

_CHUNK_BYTES = 16 << 20
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int8: "I8",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


class Stream(NamedTuple):
    """Tensor that is written to a file in pieces, so that the whole tensor need not be in memory."""

    dtype: torch.dtype
    shape: torch.Size
    pieces: Iterable[Tensor]
    """Contiguous host tensors of this dtype, which together have as many values as the shape."""

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor in the file."""
        return self.shape.numel() * self.dtype.itemsize


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, Any]:
    """Write contiguous tensors in host memory to a new safetensors file.

    Returns the size (`bytes`) and the `sha256` of the file. `on_progress` is called with the size of each chunk in
    bytes.
    """
    streams = {name: Stream(tensor.dtype, tensor.shape, (tensor,)) for name, tensor in tensors.items()}
    return write_streams(path, streams, metadata=metadata, on_progress=on_progress)


def write_streams(
    path: Path,
    streams: Mapping[str, Stream],
    *,
    metadata: Mapping[str, str] | None = None,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, Any]:
    """Write tensors piece by piece to a new safetensors file, and flush the file to the disk.

    Returns the size (`bytes`) and the `sha256` of the file. `on_progress` is called with the size of each chunk in
    bytes. Raises OSError, and any exception that a stream raises while its pieces are read.
    """
    digest = hashlib.sha256()
    num_bytes = 0
    with open_new(path, buffering=0) as file:
        for chunk in _chunks(streams, metadata or {}):
            digest.update(chunk)
            written = 0
            while written < len(chunk):  # an unbuffered file may write a part only
                written += file.write(chunk[written:])
            num_bytes += len(chunk)
            on_progress(len(chunk))
        fsync(file)
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return an estimate of the bytes that `write_tensors` needs on the disk. The estimate is never too low."""
    return sum(tensor.nbytes + 256 for tensor in tensors.values()) + 4096


def open_tensors(path: Path) -> Any:
    """Open a safetensors file with `safe_open`, for reading on the CPU.

    Raises OSError if the path is not a regular file, because `safe_open` would wait forever at a FIFO. Raises
    SafetensorError if the file is damaged.
    """
    open_regular(path).close()
    return safe_open(path, "pt", device="cpu")


class TensorFile:
    """Safetensors file from which parts of tensors are read on request. No file is kept open."""

    def __init__(self, path: Path) -> None:
        """Read the header of the file. Raises OSError if it cannot be read, ValueError or SafetensorError for
        damage."""
        self._path = path
        file = open_tensors(path)
        self.metadata: dict[str, str] = file.metadata() or {}
        self.shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        with open_regular(path) as stream:
            header_len = int.from_bytes(stream.read(8), "little")
            self._header = parse_object(stream.read(header_len))
        self._first_byte = 8 + header_len

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor. Raises ValueError for a type that this package does not write."""
        dtype_name = self._header[name]["dtype"]
        if dtype_name not in _DTYPES:
            raise ValueError(f"{name} is of type {dtype_name}")
        return _DTYPES[dtype_name]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return the values from `start` to `stop` - 1 of the flattened tensor. Raises OSError, KeyError or ValueError
        if they cannot be read."""
        num_values = self.shapes[name].numel()
        if stop > num_values:
            raise ValueError(f"{name} has {num_values} values, but {stop} values are needed")
        values = torch.empty(stop - start, dtype=self.dtype(name))
        buffer = memoryview(values.view(torch.uint8).numpy().data)
        with open_regular(self._path) as stream:
            stream.seek(self._first_byte + self._header[name]["data_offsets"][0] + start * values.itemsize)
            if stream.readinto(buffer) != len(buffer):
                raise OSError(f"{self._path} ends early")
        return values


def _chunks(streams: Mapping[str, Stream], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """Yield the bytes of the file: the header, then the tensors in chunks of at most 16 MiB."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    # Wide types first, so that every tensor begins at a multiple of its type's size.
    in_order = sorted(streams.items(), key=lambda item: -item[1].dtype.itemsize)
    offset = 0
    for name, stream in in_order:
        end = offset + stream.num_bytes
        header[name] = {
            "dtype": _DTYPE_NAMES[stream.dtype],
            "shape": list(stream.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for aligned data
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name, stream in in_order:
        num_bytes = 0
        for piece in stream.pieces:
            data = memoryview(piece.detach().view(-1).view(torch.uint8).numpy().data)
            num_bytes += len(data)
            for start in range(0, len(data), _CHUNK_BYTES):
                yield data[start : start + _CHUNK_BYTES]
        assert num_bytes == stream.num_bytes, name
