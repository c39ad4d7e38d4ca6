"""Weights that need not be in memory: read, rounded and written some rows at a time.

A tensor is known by its shape and gives its rows by slices. `Tensor` is such a thing; so is `Rows`, which reads from a
file what is asked for. Whoever goes through weights by `pieces` needs a few MiB, however large they are.

int8 is a way to store matrices: per row (per output of a matrix, per entry of a table) 127 steps to each side of zero,
as long as the scale beside them says. Scales are bf16, so that a narrow table is not half made of them; a value is off
by at most half a step. Norms, biases, u and v stay fp32. `stored_weights` gives such rows back in fp32.
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
"""Types of weights in a file."""
SCALE = ".scale"
"""What the name of a tensor's scales ends with."""
_PIECE_VALUES = 1 << 18
_STEPS = 127


class Sliced(Protocol):
    """A tensor, or what gives its rows."""

    @property
    def shape(self) -> torch.Size:
        """At least one axis."""

    def __getitem__(self, rows: slice, /) -> Tensor:
        """Some rows, on the host or wherever they are."""


Weights = Mapping[str, Sliced]


@dataclass(frozen=True)
class Rows:
    """A tensor whose rows are read when they are asked for."""

    shape: torch.Size
    read: Callable[[int, int], Tensor]
    """Rows start ... stop - 1."""

    def __getitem__(self, rows: slice, /) -> Tensor:
        """Raises what reading raises."""
        start, stop, _ = rows.indices(self.shape[0])
        return self.read(start, stop)


def pieces(shape: torch.Size) -> Iterator[slice]:
    """Consecutive rows, a MiB in fp32 at a time unless one row has more."""
    step = max(1, _PIECE_VALUES // max(1, shape[1:].numel()))
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


@torch.no_grad()
def copy_in_pieces(into: Tensor, weight: Sliced) -> Tensor:
    """Overwrite a tensor, casting to its type. Returns it."""
    for rows in pieces(into.shape):
        into[rows] = weight[rows]
    return into


def is_quantized(name: str, shape: torch.Size) -> bool:
    """Whether int8 stores this weight as such: a matrix or table, not a norm, a bias, u or v."""
    return len(shape) > 1 and "bias" not in name


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes, a bf16 scale per row) of rows in fp32. Of what was read back so it gives the same again."""
    flat = rows.flatten(1)
    scale = (flat.abs().amax(1) / _STEPS).bfloat16()
    step = scale.float().clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return (flat / step).round_().clamp_(-_STEPS, _STEPS).to(torch.int8).view(rows.shape), scale


def write_weights(path: Path, weights: Weights, *, dtype: str) -> None:
    """Write tensors to a new file in this type, some rows at a time.

    Raises CheckpointError where a number is not finite in it, OSError, and what reading the weights raises.
    """
    streams: dict[str, Stream] = {}
    for name, weight in weights.items():
        if dtype == "int8" and is_quantized(name, weight.shape):
            streams[name] = _stream(name, weight, dtype, lambda rows: quantized(rows)[0])
            scales = _stream(name, weight, "bf16", lambda rows: quantized(rows)[1])
            streams[name + SCALE] = scales._replace(shape=weight.shape[:1])
        else:
            streams[name] = _stream(name, weight, "fp32" if dtype == "int8" else dtype, lambda rows: rows)
    write_streams(path, streams)


def stored_weights(path: Path) -> dict[str, Sliced]:
    """What `write_weights` wrote, each tensor under its name. Raises OSError, ValueError or SafetensorError."""
    file = TensorFile(path)
    return {name: _stored(file, name) for name in file.shapes if not name.endswith(SCALE)}


def _stored(file: TensorFile, name: str) -> Rows:
    shape = file.shapes[name]

    def read(start: int, stop: int) -> Tensor:
        width = shape[1:].numel()
        values = file.read(name, start * width, stop * width).view(stop - start, *shape[1:])
        if values.dtype != torch.int8:
            return values
        scale = file.read(name + SCALE, start, stop).float()
        return values.float().mul_(scale.view(-1, *(1 for _ in shape[1:])))

    return Rows(shape, read)


def _stream(name: str, weight: Sliced, dtype: str, convert: Callable[[Tensor], Tensor]) -> Stream:
    """`convert` gets rows in fp32, and gives what they are in a file of this type."""

    @torch.no_grad()
    def converted() -> Iterator[Tensor]:
        for rows in pieces(weight.shape):
            piece = convert(weight[rows].float()).to(STORED[dtype])
            if not bool(piece.isfinite().all()):
                raise CheckpointError(f"{name} holds numbers that are not finite in {dtype}. Choose another --dtype.")
            yield piece.contiguous().cpu()

    return Stream(STORED[dtype], weight.shape, converted())
