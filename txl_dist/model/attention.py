"""The attention layer: projections of queries, keys and values around whatever scores them (`implementation`).

Keys and values are made apart from queries, so that the past may be kept as keys and values. Parameters stand in the
module whose `forward` uses them, because ZeRO-3 gathers them there. `positions` builds the layer of each scheme.

Shapes: B lanes, T queries, K keys, S any positions, D model width, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from txl_dist.config.schema import AttentionKernel, ModelSection
from txl_dist.errors import ConfigError, raised_everywhere
from txl_dist.model.fused_attention import fused_relative_attention
from txl_dist.model.kernels import launch
from txl_dist.model.memory import AttentionMask
from txl_dist.model.relative_attention import Terms, relative_attention
from txl_dist.model.rms_norm import rms_norm

QUERY_KEY_GAIN = 1.2
"""Of normed queries and keys (nanochat): their products would hardly tell one key from another without."""


class RelativeEncodings(NamedTuple):
    """What a layer knows of the distances K-1 ... 0, in that order."""

    key_KNH: Tensor
    """The encodings r as the layer sees them."""
    bias_KN: Tensor | None
    """Learned term (d); None where it is made with the bias v."""


class KeyValue(nn.Linear):
    """The projection to keys and values, with a bias on the values only, where the model has one."""

    def __init__(self, model: ModelSection) -> None:
        inner = model.num_heads * model.head_width
        super().__init__(model.width, 2 * inner, bias=False)
        self.value_bias = nn.Parameter(torch.empty(inner)) if model.value_bias else None

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        """Keys, then values, of any positions: [B, S, 2 N H]."""
        bias = None if self.value_bias is None else F.pad(self.value_bias, (self.value_bias.numel(), 0))
        return F.linear(hidden_BSD, self.weight, bias)


class Attention(nn.Module):
    """Scores by content and, with a module `distance` that makes `RelativeEncodings`, by distance.

    The biases u (content) and v (position) are given, since layers may share them.
    """

    def __init__(
        self,
        model: ModelSection,
        *,
        distance: nn.Module | None = None,
        content_bias_NH: nn.Parameter | None = None,
        position_bias_NH: nn.Parameter | None = None,
        mixes_values: bool = False,
        kernel: AttentionKernel = "auto",
    ) -> None:
        super().__init__()
        self.num_heads, self.head_width, self.dropout = model.num_heads, model.head_width, model.attention_dropout
        self.kernel, self.norm_eps = kernel, model.norm_eps if model.query_key_norm else None
        inner = model.num_heads * model.head_width
        self.query = nn.Linear(model.width, inner, bias=False)
        self.key_value = KeyValue(model)
        self.distance = distance
        self.output = nn.Linear(inner, model.width, bias=model.output_bias)
        # Registered in every layer that uses them, so that ZeRO-3 gathers them with the layer.
        self.content_bias, self.position_bias = content_bias_NH, position_bias_NH
        self.value_share = nn.Parameter(torch.empty(1)) if mixes_values else None
        self.uses_products = not model.query_key_norm and not mixes_values
        """Whether nothing happens to queries, keys and values between their products and attention."""

    def supports_fused_qkv(self, hidden: Tensor) -> bool:
        """Whether, in training, queries, keys and values are attended with as products make them, and are made of
        hidden states like these by few: the Triton kernels join them as they read."""
        if self.kernel not in ("auto", "triton") or not self.training or not self.uses_products:
            return False
        has_position_bias = self.position_bias is not None
        shape_reason = launch.unsupported_shape_reason(
            hidden.dtype, head_width=self.head_width, has_position_bias=has_position_bias
        )
        return shape_reason is None and launch.unsupported_device_reason(hidden) is None

    def project_segment(self, hidden_BTD: Tensor) -> Tensor:
        """query_key_value_BT3NH of one product, or of two where ZeRO-3 gathers weights for the module that has them."""
        if hasattr(self.query.weight, "ds_id"):
            products: Tensor = torch.cat([self.query(hidden_BTD), self.key_value(hidden_BTD)], dim=-1)
        else:
            products = joint_linear(hidden_BTD, self.query.weight, self.key_value.weight)
            if (bias := self.key_value.value_bias) is not None:
                products = products + F.pad(bias, (2 * bias.numel(), 0))
        return products.view(*products.shape[:-1], 3, self.num_heads, self.head_width)

    def project_query(self, hidden_BTD: Tensor) -> Tensor:
        """query_BTNH."""
        return self.qk_norm(self.query(hidden_BTD).unflatten(-1, (self.num_heads, self.head_width)))

    def project_key_value(self, hidden_BSD: Tensor) -> Tensor:
        """key_value_BS2NH of any positions, not `prepare_kv`."""
        key_value: Tensor = self.key_value(hidden_BSD)
        return key_value.view(*key_value.shape[:-1], 2, self.num_heads, self.head_width)

    def prepare_kv(self, key: Tensor, value: Tensor, first_value: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values [..., H] of any positions as they are attended to: normed, mixed with the values of the first
        layer there, where the model has it so."""
        if self.value_share is not None:
            assert first_value is not None
            value = torch.lerp(value, first_value, self.value_share.to(value.dtype))
        return self.qk_norm(key), value

    def prepare_fused_kv(self, key_value_BS2NH: Tensor, first_value_BSNH: Tensor | None) -> Tensor:
        """The same of both in one tensor."""
        if self.norm_eps is None and self.value_share is None:
            return key_value_BS2NH
        key, value = key_value_BS2NH.unbind(-3)
        return torch.stack(self.prepare_kv(key, value, first_value_BSNH), dim=-3)

    def qk_norm(self, heads: Tensor, *, gain: float = QUERY_KEY_GAIN) -> Tensor:
        """Queries or keys [..., H], each divided by its root mean square where the model has it so."""
        return heads if self.norm_eps is None else rms_norm(heads, eps=self.norm_eps, gain=gain)

    def _check(self, found: object, *, num_distances: int) -> None:
        """Raises ConfigError for anything but `RelativeEncodings` of so many distances: a plugin may have made it."""
        key_shape = (num_distances, self.num_heads, self.head_width)
        what = type(found).__name__
        if isinstance(found, RelativeEncodings):
            key_KNH, bias_KN = found
            if key_KNH.shape == key_shape and (bias_KN is None or bias_KN.shape == key_shape[:2]):
                return
            what = f"key_KNH {list(key_KNH.shape)} and bias_KN {None if bias_KN is None else list(bias_KN.shape)}"
        raise raised_everywhere(
            ConfigError(
                f"positions: {type(self.distance).__name__}.forward({num_distances}, ...) returned "
                f"{what}. It must return txl_dist.model.attention.RelativeEncodings with key_KNH "
                f"{list(key_shape)} and bias_KN {list(key_shape[:2])} or None."
            )
        )

    def distances(self, num_distances: int, *, encoding_KD: Tensor | None) -> RelativeEncodings | None:
        """What this layer knows of the distances K-1 ... 0, given their sinusoids where it uses them."""
        if self.distance is None:
            return None
        found = self.distance(num_distances, encoding_KD)
        self._check(found, num_distances=num_distances)
        key_KNH, bias_KN = found
        return RelativeEncodings(self.qk_norm(key_KNH, gain=1.0), bias_KN)

    def forward(
        self,
        hidden_BTD: Tensor,
        *,
        key_BKNH: Tensor | None = None,
        value_BKNH: Tensor | None = None,
        past_BMD: Tensor | None = None,
        distances: RelativeEncodings | None,
        visible: AttentionMask,
    ) -> Tensor:
        """Attend from `hidden_BTD` to given keys and values; or, where it `supports_fused_qkv`, to its own and those of
        `past_BMD`. Returns the projected context_BTD."""
        if past_BMD is not None:
            assert distances is not None
            products = self.project_segment(hidden_BTD), self.project_key_value(past_BMD)
            context_BTNH = self.attend_fused_qkv(*products, distance_KNH=distances.key_KNH, visible=visible)
            projected: Tensor = self.output(context_BTNH.flatten(2))
            return projected
        assert key_BKNH is not None
        assert value_BKNH is not None
        query_BTNH = self.project_query(hidden_BTD)
        terms = Terms(query_BTNH, key_BKNH, value_BKNH)
        if distances is not None:
            key_KNH, bias_KN = distances
            terms = Terms(*terms[:3], key_KNH, self.content_bias, self.position_bias, bias_KN)
        output: Tensor = self.output(self.attend(terms, visible=visible).flatten(2))
        return output

    def attend_fused_qkv(
        self, segment_BT3NH: Tensor, past_BM2NH: Tensor, *, distance_KNH: Tensor, visible: AttentionMask
    ) -> Tensor:
        """context_BTNH of what products made, in training, by the Triton kernels."""
        assert self.content_bias is not None
        assert self.position_bias is not None
        return launch.triton_attention_of_products(
            segment_BT3NH,
            past_BM2NH,
            distance_KNH=distance_KNH,
            content_bias_NH=self.content_bias,
            position_bias_NH=self.position_bias,
            visible=visible,
            dropout=self.dropout,
        )

    def attend(self, terms: Terms, *, visible: AttentionMask) -> Tensor:
        """context_BTNH."""
        dropout = self.dropout if self.training else 0.0
        return implementation(self.kernel, terms)(terms, visible=visible, dropout=dropout)


def joint_linear(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """x [..., D] times matrices [n, D] and [m, D], side by side [..., n + m], of one product, as is each gradient.

    Nothing is copied where the second matrix lies behind the first, as in a flat parameter.
    """
    product: Tensor = _JointLinear.apply(x, first, second)  # type: ignore[no-untyped-call]
    return product


class _JointLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(x, first, second)
        return F.linear(x, _joint(first, second))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, first, second = ctx.saved_tensors
        d_product, inputs = (y.flatten(0, -2) for y in (gradients[0], x))
        d_first, d_second = (d_product.t() @ inputs).split([len(first), len(second)])
        return (d_product @ _joint(first, second)).view_as(x), d_first, d_second


def _joint(first: Tensor, second: Tensor) -> Tensor:
    """Both matrices as one, [n + m, D]."""
    storages = [x.untyped_storage()._cdata for x in (first, second)]
    follows = second.storage_offset() == first.storage_offset() + first.numel()
    if storages[0] == storages[1] and follows and first.is_contiguous() and second.is_contiguous():
        return first.detach().as_strided((len(first) + len(second), first.shape[1]), first.stride())
    return torch.cat([first, second])


def implementation(kernel: AttentionKernel, terms: Terms) -> Callable[..., Tensor]:
    """What computes attention of these terms, by the setting `engine.attention`; all are called alike.

    Raises ConfigError if the Triton kernels are asked for and cannot run.
    """
    if terms.distance_KNH is None:
        return dot_product_attention
    if kernel in ("plain", "fused"):
        return relative_attention if kernel == "plain" else fused_relative_attention
    reason = launch.unsupported_reason(terms.query_BTNH, has_position_bias=terms.position_bias_NH is not None)
    if kernel == "triton" and reason is not None:
        raise ConfigError(f'engine.attention = "triton" cannot run: {reason}. Set it to "auto" or "fused".')
    return launch.triton_relative_attention if reason is None else fused_relative_attention


def dot_product_attention(terms: Terms, *, visible: AttentionMask, dropout: float = 0.0) -> Tensor:
    """Scaled dot products of queries and keys alone, by torch. Returns context_BTNH."""
    query, key, value = (x.transpose(1, 2) for x in terms[:3])
    # Not cuDNN's, whose backward gives NaN for some lengths with a mask (pytorch #196678), and torch would choose.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        context_BNTH = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible.mask()[:, None], dropout_p=dropout
        )
    return context_BNTH.transpose(1, 2)
