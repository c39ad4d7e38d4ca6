"""The positional schemes that `model.positions` names: encodings, learned tables and attention layers.

    relative           sinusoids of the distance, projected by W_R, biases u and v (Dai et al. 2019)
    learned_relative   a learned vector and number per distance, bias u (Shaw; labml)
    absolute           sinusoids of the position, added to the embedding (Vaswani; vanilla)

`config.schema.SCHEMES` describes the properties of each scheme for the rest of the program. Each parameter is
registered in the module whose `forward` uses it, because ZeRO-3 gathers a module's parameters before its `forward`.

Shapes: K keys, P rows of a table, D model width, N heads, H head width, I = N H.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from txl_dist.config.registry import plugin_errors
from txl_dist.config.schema import SCHEMES, AttentionKernel, ModelSection
from txl_dist.model.attention import Attention, RelativeEncodings
from txl_dist.model.relative_attention import at_least_fp32


def distance_encoding(num_distances: int, *, width: int, clamp_len: int, like: Tensor, num_negative: int = 0) -> Tensor:
    """Compute R_KD, the sinusoids of the distances K-1 ... 0, as [sin | cos] like the original code.

    The last `num_negative` of the distances are below 0. They are the distances to keys after a query (XLNet). The
    sinusoids are computed in at least fp32 and then cast, because bf16 has only 513 different values for 1,024
    positions. If `clamp_len` is above 0, all distances above `clamp_len` have the encoding of `clamp_len`, and all
    distances below `-clamp_len` have the encoding of `-clamp_len`.
    """
    dtype = at_least_fp32(like.dtype)
    largest = num_distances - num_negative - 1
    distance_K = torch.arange(largest, -num_negative - 1, -1, dtype=dtype, device=like.device)
    if clamp_len > 0:
        distance_K = distance_K.clamp(-clamp_len, clamp_len)
    # In the same order of operations as peers: in fp32 the angle of a distance of thousands depends on rounding.
    column_F = torch.arange(0, width, 2, dtype=dtype, device=like.device)
    exponent_F = column_F / width
    frequency_F = 1 / 10000**exponent_F
    angle_KF = distance_K[:, None] * frequency_F[None, :]
    encoding = torch.cat([angle_KF.sin(), angle_KF.cos()], dim=1)
    return encoding[:, :width].to(like.dtype)


class SinusoidalDistances(nn.Linear):
    """Projection W_R that turns sinusoids of the distances into one layer's encodings."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__(model.width, model.num_heads * model.head_width, bias=False)
        self.num_heads = model.num_heads

    def forward(self, num_distances: int, encoding_KD: Tensor | None) -> RelativeEncodings:  # type: ignore[override]
        """Project `encoding_KD`, the sinusoids of the distances. `num_distances` is the number of its rows."""
        assert encoding_KD is not None
        assert encoding_KD.shape[0] == num_distances
        projected_KI = super().forward(encoding_KD)
        key_KNH = projected_KI.unflatten(-1, (self.num_heads, -1))
        return RelativeEncodings(key_KNH, None)


class LearnedDistances(nn.Module):
    """Learned table of encodings with a row per distance, the shortest distance first.

    Distances beyond the table's end use the last row.
    """

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.num_rows = model.num_distances
        if model.clamp_len:
            self.num_rows = min(model.num_distances, model.clamp_len + 1)
        self.weight = nn.Parameter(torch.empty(model.num_distances, model.num_heads, model.head_width))
        self.bias = nn.Parameter(torch.empty(model.num_distances, model.num_heads))

    def forward(self, num_distances: int, encoding_KD: Tensor | None) -> RelativeEncodings:
        """Return the learned encodings of the distances K-1 ... 0. `encoding_KD`, the sinusoids, is ignored."""
        key_KNH = self._rows(self.weight, num_distances)
        bias_KN = self._rows(self.bias, num_distances)
        return RelativeEncodings(key_KNH, bias_KN)

    def _rows(self, table: Tensor, num_distances: int) -> Tensor:
        """Return the row of the table for each of the distances K-1 ... 0."""
        num_own_rows = min(num_distances, self.num_rows)
        rows = table[:num_own_rows].flip(0)
        # Without indexing: the gradient of repeated rows is a scatter, whose order of sums is not fixed on a GPU.
        far = rows[:1].expand(num_distances - num_own_rows, *rows.shape[1:])
        return torch.cat([far, rows])


class AttentionBiases(NamedTuple):
    """Biases u (content) and v (position) of attention, which several layers can share.

    Layers without sinusoids of the distances do not use the bias v.
    """

    content_NH: nn.Parameter
    position_NH: nn.Parameter


def attention_biases(num_heads: int, head_width: int) -> AttentionBiases:
    """Make the biases u and v of attention as parameters that have no initial values yet."""
    shape = (num_heads, head_width)
    content = nn.Parameter(torch.empty(shape))
    position = nn.Parameter(torch.empty(shape))
    return AttentionBiases(content, position)


def build_attention(
    model: ModelSection, *, biases: AttentionBiases, mixes_values: bool = False, kernel: AttentionKernel = "auto"
) -> Attention:
    """Build the attention layer for the positional scheme that `model.positions` names.

    `kernel` is the setting `engine.attention`. Layers without distances ignore it. With `mixes_values` the layer mixes
    the first layer's values into its own values. Raises ConfigError if a plugin's scheme fails.
    """
    content, position = biases
    build = partial(Attention, model, mixes_values=mixes_values)
    match model.positions:
        case "relative":
            distance = SinusoidalDistances(model)
            return build(distance=distance, content_bias_NH=content, position_bias_NH=position, kernel=kernel)
        case "learned_relative":
            return build(distance=LearnedDistances(model), content_bias_NH=content, kernel=kernel)
        case "absolute":
            return build()
    scheme = model.scheme
    if not scheme.has_distance_terms:
        return build()
    assert scheme.build is not None, "register_positions requires it"
    if scheme.has_position_bias:
        v = position
    else:
        v = None
    with plugin_errors(SCHEMES, model.positions, what="positions"):
        module = scheme.build(model)
    return build(distance=module, content_bias_NH=content, position_bias_NH=v, kernel=kernel)
