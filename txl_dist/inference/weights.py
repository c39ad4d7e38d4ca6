"""Weights that need not be in memory as a whole. Code reads, rounds and writes a few rows at a time.

The type `Sliced` is a tensor from which code takes rows by slices: a `Tensor`, or `Rows`, which reads the rows from a
file. Code that processes weights by `pieces` needs only a few MiB of memory for weights of any size.

The type int8 is for storing matrices only. A row is an output of a matrix or an entry of a table. Each row has 127
steps on each side of zero, and a scale that is the size of a step. Scales are bf16, so that they take little space in
narrow tables. A stored value is wrong by at most half a step. Norms, biases, u and v stay in fp32. `stored_weights`
returns the rows in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from txl_dist.errors import CheckpointError
from txl_dist.io.tensor_files import Stream, TensorFile, write_streams

STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
"""Number types that weights in a file can have."""
SCALE = ".scale"
"""Suffix in the name of a tensor that holds the int8 scales of another tensor."""
_PIECE_VALUES = 1 << 18
"""Number of values that are read at a time."""
_STEPS = 127
"""Number of int8 steps on each side of zero."""


class Sliced(Protocol):
    """Tensor, or an object that returns rows of a tensor by slices."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor, with at least one axis."""

    def __getitem__(self, rows: slice, /) -> Tensor:
        """Return a range of rows, on the device on which they are stored."""


Weights = Mapping[str, Sliced]


@dataclass(frozen=True)
class Rows:
    """Tensor whose rows are read from their source each time that they are used."""

    shape: torch.Size
    read: Callable[[int, int], Tensor]
    """Function that returns a range of rows, from its first argument up to, but not including, its second argument."""

    def __getitem__(self, rows: slice, /) -> Tensor:
        """Read and return a range of rows. Raises the errors of `read`."""
        start, stop, _ = rows.indices(self.shape[0])
        return self.read(start, stop)


def pieces(shape: torch.Size) -> Iterator[slice]:
    """Yield consecutive ranges of rows, each of 1 MiB in fp32, or of one row if a row is larger."""
    num_rows = shape[0]
    row_len = max(1, shape[1:].numel())
    step = max(1, _PIECE_VALUES // row_len)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


@torch.no_grad()
def copy_in_pieces(into: Tensor, weight: Sliced) -> Tensor:
    """Overwrite the tensor `into` with a weight, some rows at a time and cast to its type. Returns `into`."""
    for rows in pieces(into.shape):
        into[rows] = weight[rows]
    return into


def is_quantized(name: str, shape: torch.Size) -> bool:
    """Return whether the type int8 stores this weight as int8. Only matrices and tables are stored as int8.

    Norms, biases, u and v stay in fp32.
    """
    return len(shape) > 1 and "bias" not in name


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (int8 codes, a bf16 scale per row) for rows in fp32.

    Rows that were quantized before and read back give the same codes and scales again.
    """
    flat = rows.flatten(1)
    scale = (flat.abs().amax(1) / _STEPS).bfloat16()
    tiniest = torch.finfo(torch.float32).tiny
    step = scale.float().clamp(min=tiniest)[:, None]
    codes = (flat / step).round_().clamp_(-_STEPS, _STEPS).to(torch.int8)
    return codes.view(rows.shape), scale


def write_weights(path: Path, weights: Weights, *, dtype: str) -> None:
    """Write weights to a new file in the type `dtype` (a key of `STORED`), some rows at a time.

    Raises CheckpointError if a number is not finite in this type, and OSError if the file cannot be written. Errors of
    reading the weights are passed on.
    """
    streams: dict[str, Stream] = {}
    if dtype == "int8":
        other_dtype = "fp32"
    else:
        other_dtype = dtype
    for name, weight in weights.items():
        if dtype == "int8" and is_quantized(name, weight.shape):
            streams[name] = _stream(name, weight, dtype, lambda rows: quantized(rows)[0])
            scales = _stream(name, weight, "bf16", lambda rows: quantized(rows)[1])
            streams[name + SCALE] = scales._replace(shape=weight.shape[:1])
        else:
            streams[name] = _stream(name, weight, other_dtype, lambda rows: rows)
    write_streams(path, streams)


def stored_weights(path: Path) -> dict[str, Sliced]:
    """Open a file that `write_weights` wrote, and return its weights by name. Their values are read when they are used.

    Raises OSError, ValueError or SafetensorError if the file is missing or damaged.
    """
    file = TensorFile(path)
    weights: dict[str, Sliced] = {}
    for name in file.shapes:
        if not name.endswith(SCALE):
            weights[name] = _stored(file, name)
    return weights


def _stored(file: TensorFile, name: str) -> Rows:
    shape = file.shapes[name]
    width = shape[1:].numel()
    shape_of_scales = [1] * len(shape)
    shape_of_scales[0] = -1

    def read(start: int, stop: int) -> Tensor:
        flat = file.read(name, start * width, stop * width)
        values = flat.view(stop - start, *shape[1:])
        if values.dtype != torch.int8:
            return values
        scale = file.read(name + SCALE, start, stop).float()
        return values.float().mul_(scale.view(shape_of_scales))

    return Rows(shape, read)


def _stream(name: str, weight: Sliced, dtype: str, convert: Callable[[Tensor], Tensor]) -> Stream:
    """Make the stream by which a weight is written to a file as `dtype`.

    `convert` maps rows in fp32 to rows in the file.
    """

    @torch.no_grad()
    def converted() -> Iterator[Tensor]:
        for rows in pieces(weight.shape):
            rows_fp32 = weight[rows].float()
            piece = convert(rows_fp32).to(STORED[dtype])
            if not bool(piece.isfinite().all()):
                raise CheckpointError(f"{name} holds numbers that are not finite in {dtype}. Choose another --dtype.")
            yield piece.contiguous().cpu()

    return Stream(STORED[dtype], weight.shape, converted())
