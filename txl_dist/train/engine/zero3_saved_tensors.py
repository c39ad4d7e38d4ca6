"""Lets go of weights between the passes of ZeRO-3: of a gathered weight the forward pass saves which one it is.

DeepSpeed gathers the weights of a layer for its forward pass, frees them behind it, and gathers them again for its
backward pass. But a linear function saves its transposed weight, a view, and the view keeps the values alive: all
layers would stay gathered from one pass to the other. Here such a view is saved as its parameter and its place in it,
and made again from the values that are gathered then. (DeepSpeed's own answer replaces torch's linear function in the
whole process by a slower one.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class _View(NamedTuple):
    """A part of a parameter."""

    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def saves_no_weights() -> Iterator[None]:
    """Around a forward pass whose weights are there again in the backward pass."""
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield


def _pack(tensor: Tensor) -> Tensor | _View:
    parameter = tensor._base
    if not isinstance(parameter, nn.Parameter):  # a parameter itself is saved as such
        return tensor
    offset = int(tensor.storage_offset() - parameter.storage_offset())
    return _View(parameter, tensor.size(), tensor.stride(), offset)


def _unpack(saved: Tensor | _View) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    values = saved.parameter.detach()
    return values.as_strided(saved.size, saved.stride, values.storage_offset() + saved.offset)
