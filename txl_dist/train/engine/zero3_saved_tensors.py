"""Saved tensors at ZeRO stage 3: the forward pass saves references to gathered weights, and not their values.

DeepSpeed gathers the weights of a layer for the layer's forward pass, frees them afterwards, and gathers them again for
the backward pass. But a linear function saves its transposed weight. The transposed weight is a view that keeps the
values alive. So all layers would stay gathered between the passes. Here such a view is saved as a reference: its
parameter and the place in the parameter. The backward pass makes the view again from the values that are gathered then.
DeepSpeed's own solution replaces torch's linear function in the whole process by a slower function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class _View(NamedTuple):
    """Reference to a view of a parameter: the parameter, and the view's size, strides and offset in values."""

    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def saves_no_weights() -> Iterator[None]:
    """Return a context manager for a forward pass at ZeRO stage 3, in which autograd saves no values of weights.

    The backward pass gathers the weights again.
    """
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield


def _pack(tensor: Tensor) -> Tensor | _View:
    """Return a reference for a view of a parameter, a leaf itself, and the values of any other tensor.

    An operation may save its own output. If that were returned with its `grad_fn`, the graph of a pass without a
    backward pass would hold itself in memory.
    """
    parameter = tensor._base
    if not isinstance(parameter, nn.Parameter):
        if tensor.is_leaf:  # also a parameter, whose values are gathered again
            return tensor
        return tensor.detach()
    offset = int(tensor.storage_offset() - parameter.storage_offset())
    return _View(parameter, tensor.size(), tensor.stride(), offset)


def _unpack(saved: Tensor | _View) -> Tensor:
    """Return the tensor that `_pack` received, made from the present values of its parameter."""
    if isinstance(saved, Tensor):
        return saved
    values = saved.parameter.detach()
    return values.as_strided(saved.size, saved.stride, values.storage_offset() + saved.offset)
