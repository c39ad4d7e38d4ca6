"""Widths that are padded in storage, so that every row of a matrix in half precision begins at a multiple of 16 bytes.

Matrix products on a GPU are several times slower if the rows of an operand begin at other places. The model of
configs/wt103_base.toml has a width of 410, heads of 41 and an inner width of 2100. Stored are 416, 48 and 2112. The
additional columns are zeros, and they stay zeros:

    forward     a padded column of the weights is 0, so a padded column of the hidden states is 0. Norms divide by the
                logical width, and attention scales by the logical width of a head
    backward    the gradient of a padded value is a sum of products with 0
    update      moments of gradients that are 0 are 0, and weight decay and averages keep a 0

The model is built and initialised with its logical widths. Then `pad_widths` replaces its parameters. Checkpoints,
names and shapes outside the engine are logical. `partitions` converts values at this border, by `PaddedAxes`.

Limitations: Plugins can use widths in any way. So a model with a plugin's positional scheme or optimizer is not padded.
Where the Triton kernels do not run, a layer norm copies hidden states twice, without and with the padding. Dropout on a
CPU draws other masks with padding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from txl_dist.config.schema import ModelSection, OptimizerKind, PositionScheme
from txl_dist.model.attention import Attention
from txl_dist.model.transformer_xl import TransformerXL

MULTIPLE = 16
"""Multiple to which widths are padded, in values. The attention kernels need heads of such widths."""
ALIGNED = 8
"""Values of half precision in 16 bytes. Widths that are multiples of it are not padded, except those of heads."""
_HEADS, _WIDTH, _OTHER = "h", "w", "o"
"""Kinds of axes: one or more heads (their number times the head width), a width, and an axis that is never padded."""
_AXES = (
    (r"(embedding|softmax)\.(cluster_)?weight(_\d+)?", _OTHER + _WIDTH),
    (r"softmax\.(cluster_)?bias(_\d+)?", _OTHER),
    (r".*\.(query|key_value|distance)\.weight", _HEADS + _WIDTH),
    (r".*\.attention\.output\.weight", _WIDTH + _HEADS),
    (r".*\.value_bias", _HEADS),
    (r".*\.(content|position|segment)_bias", _OTHER + _HEADS),
    (r".*\.segment_encoding", _OTHER + _OTHER + _HEADS),
    (r".*\.(scales|value_share)", _OTHER),
)
"""Kinds of the axes of parameters, by their names. All axes of other parameters are widths."""
_LEARNED_DISTANCES = {3: _OTHER + _OTHER + _HEADS, 2: _OTHER + _OTHER}
"""Kinds of the axes of learned distances: a vector for each distance and head, and a number."""


class PaddedAxes(NamedTuple):
    """Axes of a padded parameter, the outermost first. An axis of heads is split into heads and head width."""

    shape: tuple[int, ...]
    """Logical shape of the parameter."""
    sizes: tuple[int, ...]
    """Logical size of each axis."""
    stored: tuple[int, ...]
    """Stored size of each axis."""
    stored_shape: tuple[int, ...]
    """Shape of the padded parameter."""

    def pad(self, parameter: Tensor) -> Tensor:
        """Return a parameter of the logical shape with zeros added, in its stored shape."""
        return _grown(parameter.reshape(self.sizes), self.stored).reshape(self.stored_shape)

    def unpad(self, parameter: Tensor) -> Tensor:
        """Return the logical part of a parameter in its stored shape. It is a view if there are no heads."""
        return self._cut(parameter.view(self.stored)).reshape(self.shape)

    def num_before(self, place: int) -> int:
        """Return the number of logical values before a place in the flattened stored parameter."""
        count = 0
        for axis in range(len(self.sizes)):
            size = self.sizes[axis]
            index, place = divmod(place, math.prod(self.stored[axis + 1 :]))
            count += min(index, size) * math.prod(self.sizes[axis + 1 :])
            if index >= size:
                break
        return count

    def unpad_range(self, values: Tensor, *, start: int) -> Tensor:
        """Return the logical values in a range of the flattened stored parameter. They are consecutive values of the
        flattened logical parameter, from the value `num_before(start)` on.

        `values` are the stored values from the place `start` on.
        """
        row = math.prod(self.stored[1:])
        stop = start + len(values)
        first = start // row
        missing = (start - first * row, -stop % row)
        if any(missing):
            values = F.pad(values, missing)
        logical = self._cut(values.view(-1, *self.stored[1:])).reshape(-1)
        begin = self.num_before(start)
        skipped = begin - self.num_before(first * row)
        return logical[skipped : skipped + self.num_before(stop) - begin]

    def pad_range(self, values: Tensor, *, start: int, length: int) -> Tensor:
        """Return the range of the flattened stored parameter that begins at the place `start`, zeros included.

        `values` are the logical values in this range. It is the inverse of `unpad_range`.
        """
        row = math.prod(self.stored[1:])
        first = start // row
        num_rows = -(-(start + length) // row) - first
        row_len = math.prod(self.sizes[1:])
        skipped = self.num_before(start) - self.num_before(first * row)
        whole = F.pad(values, (skipped, num_rows * row_len - skipped - len(values)))
        stored = _grown(whole.view(num_rows, *self.sizes[1:]), (num_rows, *self.stored[1:])).reshape(-1)
        begin = start - first * row
        return stored[begin : begin + length]

    def _cut(self, rows: Tensor) -> Tensor:
        """Cut all axes to their logical sizes. The first axis may hold only some rows of the parameter."""
        for axis, size in enumerate(self.sizes):
            rows = rows.narrow(axis, 0, min(size, rows.shape[axis]))
        return rows


def _grown(tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the tensor with zeros at the end of each axis, so that the axes have these sizes."""
    missing: list[int] = []
    for size, wanted in zip(reversed(tensor.shape), reversed(sizes), strict=True):
        missing += [0, wanted - size]
    return F.pad(tensor, missing)


def padded_width(width: int) -> int:
    """Return the width in storage: the width itself if it is aligned, else the next multiple of `MULTIPLE`."""
    if width % ALIGNED == 0:
        return width
    return padded_head_width(width)


def padded_head_width(width: int) -> int:
    """Return the width of a head in storage, the next multiple of `MULTIPLE`."""
    return -(-width // MULTIPLE) * MULTIPLE


def pads_widths(setting: str, *, on_gpu: bool, kinds: Sequence[PositionScheme | OptimizerKind]) -> bool:
    """Return True if the engine pads widths. `setting` is `engine.pad_widths`, and `on_gpu` is the device of training.

    `kinds` are the model's positional scheme and the optimizer. Those of plugins have a function that builds them.
    """
    is_chosen = setting == "on" or (setting == "auto" and on_gpu)
    return is_chosen and all(kind.build is None for kind in kinds)


def pad_widths(model: TransformerXL) -> dict[str, PaddedAxes]:
    """Pad the parameters of an initialised model, in place. Returns the axes of the padded parameters, by name."""
    padded: dict[str, PaddedAxes] = {}
    replaced: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        axes = _padded_axes(name, tuple(parameter.shape), model.section)
        if axes.stored != axes.sizes:
            padded[name] = axes
            replaced[id(parameter)] = nn.Parameter(axes.pad(parameter.detach()))
    for module in model.modules():
        for leaf, shared in module._parameters.items():
            if shared is not None and id(shared) in replaced:  # a tied parameter has several modules
                module._parameters[leaf] = replaced[id(shared)]
    model.stored_width = padded_width(model.section.width)
    for module in model.modules():
        if isinstance(module, Attention):
            module.stored_head_width = padded_head_width(model.section.head_width)
    return padded


def stored_shapes(shapes: Mapping[str, list[int]], padded: Mapping[str, PaddedAxes]) -> dict[str, list[int]]:
    """Return the shapes in storage of all parameters. `shapes` are their logical shapes."""
    return {name: list(padded[name].stored_shape) if name in padded else shape for name, shape in shapes.items()}


def _padded_axes(name: str, shape: tuple[int, ...], model: ModelSection) -> PaddedAxes:
    """Return the axes of a parameter. If `stored` equals `sizes`, the parameter needs no padding."""
    sizes: list[int] = []
    stored: list[int] = []
    stored_shape: list[int] = []
    for kind, size in zip(_kinds_of(name, len(shape), model), shape, strict=True):
        if kind == _HEADS:
            num_heads = size // model.head_width
            sizes += [num_heads, model.head_width]
            stored += [num_heads, padded_head_width(model.head_width)]
            stored_shape.append(num_heads * stored[-1])
        else:
            sizes.append(size)
            stored.append(size if kind == _OTHER else padded_width(size))
            stored_shape.append(stored[-1])
    return PaddedAxes(shape, tuple(sizes), tuple(stored), tuple(stored_shape))


def _kinds_of(name: str, num_axes: int, model: ModelSection) -> str:
    """Return the kind of each axis of a parameter."""
    if ".distance." in name and model.positions == "learned_relative":
        return _LEARNED_DISTANCES[num_axes]
    for pattern, kinds in _AXES:
        if re.fullmatch(pattern, name):
            return kinds
    return _WIDTH * num_axes
