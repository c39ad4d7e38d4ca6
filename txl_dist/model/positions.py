"""The ways to know positions, which `model.positions` names: encodings, learned tables, and the layer that uses them.

    relative           sinusoids of the distance, projected by W_R, biases u and v (the paper)
    learned_relative   a learned vector and number per distance, bias u (Shaw; labml)
    absolute           sinusoids of the position, added to the embedding (Vaswani; vanilla)

What the rest of the program must know of each is a row of `sections.SCHEMES`. Parameters stand in the module whose
`forward` uses them, because ZeRO-3 gathers them there.

Shapes: K keys, P rows of a table, D model width, N heads, H head width.
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


def distance_encoding(num_distances: int, *, width: int, clamp_len: int, like: Tensor) -> Tensor:
    """R_KD: sinusoids of the distances K-1 ... 0, [sin | cos] as in the original code.

    Built in at least fp32 and cast last: in bf16 the positions themselves would collapse (1,024 into 513 values).
    `clamp_len` > 0 makes all larger distances share one encoding.
    """
    dtype = at_least_fp32(like.dtype)
    distance_K = torch.arange(num_distances - 1, -1, -1, dtype=dtype, device=like.device)
    if clamp_len > 0:
        distance_K = distance_K.clamp(max=clamp_len)
    # In this order, as the peers have it: in fp32 the angle of a distance of thousands depends on the rounding.
    frequency_F = 1 / 10000 ** (torch.arange(0, width, 2, dtype=dtype, device=like.device) / width)
    angle_KF = distance_K[:, None] * frequency_F[None, :]
    return torch.cat([angle_KF.sin(), angle_KF.cos()], dim=1)[:, :width].to(like.dtype)


class SinusoidalDistances(nn.Linear):
    """W_R: the sinusoids of the distances as a layer sees them."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__(model.width, model.num_heads * model.head_width, bias=False)
        self.head_width = model.head_width

    def forward(self, num_distances: int, encoding_KD: Tensor | None) -> RelativeEncodings:  # type: ignore[override]
        """Of the distances K-1 ... 0, whose sinusoids are given; called as `LearnedDistances` is."""
        assert encoding_KD is not None
        assert encoding_KD.shape[0] == num_distances
        return RelativeEncodings(super().forward(encoding_KD).unflatten(-1, (-1, self.head_width)), None)


class LearnedDistances(nn.Module):
    """A table with a row per distance, shortest first; larger distances share the last row that may be read."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.num_rows = min(model.num_distances, model.clamp_len + 1) if model.clamp_len else model.num_distances
        self.weight = nn.Parameter(torch.empty(model.num_distances, model.num_heads, model.head_width))
        self.bias = nn.Parameter(torch.empty(model.num_distances, model.num_heads))

    def forward(self, num_distances: int, encoding_KD: Tensor | None) -> RelativeEncodings:
        """The rows of the distances K-1 ... 0; sinusoids are not used."""
        return RelativeEncodings(self._rows(self.weight, num_distances), self._rows(self.bias, num_distances))

    def _rows(self, table: Tensor, num_distances: int) -> Tensor:
        known = min(num_distances, self.num_rows)
        rows = table[:known].flip(0)
        # Not by index: the gradient of repeated rows would be a scatter, whose order of sums is not fixed on a GPU.
        far = rows[:1].expand(num_distances - known, *rows.shape[1:])
        return torch.cat([far, rows])


class AttentionBiases(NamedTuple):
    """The biases that layers may share: u (content), and v (position) where the distances are sinusoids."""

    content_NH: nn.Parameter
    position_NH: nn.Parameter


def attention_biases(model: ModelSection) -> AttentionBiases:
    """Not yet initialised."""
    shape = (model.num_heads, model.head_width)
    return AttentionBiases(nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape)))


def build_attention(
    model: ModelSection, *, biases: AttentionBiases, mixes_values: bool = False, kernel: AttentionKernel = "auto"
) -> Attention:
    """The attention layer that `model.positions` names; `kernel` computes relative ones. `mixes_values`: with those of
    the first layer."""
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
    assert scheme.build is not None, "register_positions has asked for it"
    v = position if scheme.has_position_bias else None
    with plugin_errors(SCHEMES, model.positions, what="positions"):
        module = scheme.build(model)
    return build(distance=module, content_bias_NH=content, position_bias_NH=v, kernel=kernel)
