"""The attention layer. It projects hidden states to queries, keys and values, attends, and projects the result.

The function `implementation` chooses how attention is computed from the queries, keys and values. Keys and values are
projected separately from queries, so that generation can cache the keys and values of past tokens. Each parameter is
registered in the module whose `forward` uses it, because ZeRO-3 gathers a module's parameters before its `forward`. The
module `positions` builds the layer for each positional scheme.

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
from txl_dist.model.kernels import attention_launch
from txl_dist.model.memory import AttentionMask
from txl_dist.model.prediction_order import NUM_SEGMENT_TYPES, OrderedMask
from txl_dist.model.relative_attention import Terms, relative_attention
from txl_dist.model.rms_norm import rms_norm

QUERY_KEY_GAIN = 1.2
"""Factor on normed queries and keys, as in nanochat. Without the factor, all keys would have nearly the same score."""


class RelativeEncodings(NamedTuple):
    """Encodings of the distances between queries and keys, in one layer. Their rows are in the order of the distances
    K-1 ... 0. If the model predicts in any order (XLNet), the rows continue to the distance 1-T."""

    key_KNH: Tensor
    """Encodings r of the distances, after the layer's projection."""
    bias_KN: Tensor | None
    """Learned number for each distance and head, which is term (d) of the score (see `relative_attention`). It is None
    if term (d) is computed from the bias v."""


class KeyValue(nn.Linear):
    """Linear layer that projects hidden states to keys and values. With `model.value_bias`, values get a bias and keys
    do not."""

    def __init__(self, model: ModelSection) -> None:
        inner = model.num_heads * model.head_width
        super().__init__(model.width, 2 * inner, bias=False)
        self.value_bias = nn.Parameter(torch.empty(inner)) if model.value_bias else None

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        """Project hidden states of any positions. Returns [B, S, 2 N H]: the keys, then the values."""
        bias: Tensor | None = self.value_bias
        if bias is not None:
            bias = F.pad(bias, (bias.numel(), 0))
        return F.linear(hidden_BSD, self.weight, bias)


class Attention(nn.Module):
    """Attention layer that scores keys by their content and, if it has a module `distance`, also by their distance.

    The module `distance` computes `RelativeEncodings`. The biases u (content) and v (position) are arguments, because
    several layers can share them. With `mixes_values` the layer mixes the first layer's values into its own values.
    `kernel` is the setting `engine.attention`.
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
        self.num_heads = model.num_heads
        self.head_width = model.head_width
        self.stored_head_width = model.head_width
        """Width of a head in storage. It is larger than the head width if the engine pads widths."""
        self.dropout = model.attention_dropout
        self.kernel = kernel
        self.norm_eps = model.norm_eps if model.query_key_norm else None
        inner = model.num_heads * model.head_width
        self.query = nn.Linear(model.width, inner, bias=False)
        self.key_value = KeyValue(model)
        self.distance = distance
        self.output = nn.Linear(inner, model.width, bias=model.output_bias)
        # Registered in every layer that uses them, so that ZeRO-3 gathers them with the layer.
        self.content_bias = content_bias_NH
        self.position_bias = position_bias_NH
        self.value_share = nn.Parameter(torch.empty(1)) if mixes_values else None
        self.segment_bias: nn.Parameter | None = None
        self.segment_encoding: nn.Parameter | None = None
        if model.segment_terms:
            self.segment_bias = nn.Parameter(torch.empty(model.num_heads, model.head_width))
            self.segment_encoding = nn.Parameter(torch.empty(2, model.num_heads, model.head_width))
        self.keeps_scores = False
        """True if the Triton kernels keep distance scores from the forward to the backward pass."""
        self.uses_products = not model.query_key_norm and not mixes_values
        """True if attention uses queries, keys and values as the projections return them, without norms or mixes."""

    def supports_fused_qkv(self, hidden: Tensor) -> bool:
        """Return True if training can use the fused projection to queries, keys and values for these hidden states.

        The Triton kernels read queries, keys and values directly from the projection's result. So this is possible only
        if the layer neither norms queries and keys nor mixes values.
        """
        if self.kernel not in ("auto", "triton") or not self.training or not self.uses_products:
            return False
        has_position_bias = self.position_bias is not None
        shape_reason = attention_launch.unsupported_shape_reason(
            hidden.dtype, head_width=self.head_width, has_position_bias=has_position_bias
        )
        return shape_reason is None and attention_launch.unsupported_device_reason(hidden) is None

    def project_segment(self, hidden_BTD: Tensor, past_BMD: Tensor) -> tuple[Tensor, Tensor]:
        """Project a segment to queries, keys and values in one tensor, query_key_value_BT3NH. Project a memory to keys
        and values, key_value_BM2NH.

        The projection of the segment is one matrix product. With ZeRO-3 it is two products, because ZeRO-3 gathers the
        weights of each module separately.
        """
        if hasattr(self.query.weight, "ds_id"):
            products: Tensor = torch.cat([self.query(hidden_BTD), self.key_value(hidden_BTD)], dim=-1)
            past: Tensor = self.key_value(past_BMD)
        else:
            products, past = joint_linear(hidden_BTD, past_BMD, self.query.weight, self.key_value.weight)
            bias = self.key_value.value_bias
            if bias is not None:
                products = products + F.pad(bias, (2 * bias.numel(), 0))
                past = past + F.pad(bias, (bias.numel(), 0))
        segment_BT3NH = products.view(*products.shape[:-1], 3, self.num_heads, self.stored_head_width)
        return segment_BT3NH, past.view(*past.shape[:-1], 2, self.num_heads, self.stored_head_width)

    def project_query(self, hidden_BTD: Tensor) -> Tensor:
        """Project hidden states to query_BTNH. The queries are normed if the model norms queries."""
        query_BTNH = self.query(hidden_BTD).unflatten(-1, (self.num_heads, self.stored_head_width))
        return self.qk_norm(query_BTNH)

    def project_key_value(self, hidden_BSD: Tensor) -> Tensor:
        """Project hidden states of any positions to key_value_BS2NH.

        `prepare_kv` then makes the result ready for attention.
        """
        key_value: Tensor = self.key_value(hidden_BSD)
        return key_value.view(*key_value.shape[:-1], 2, self.num_heads, self.stored_head_width)

    def prepare_kv(self, key: Tensor, value: Tensor, first_value: Tensor | None) -> tuple[Tensor, Tensor]:
        """Apply the norm of keys and the mix of values to keys and values [..., H] of any positions.

        Keys are normed if the model norms keys. Values are mixed with `first_value`, the first layer's values at the
        same positions, if `first_value` is not None. The results are ready for attention.
        """
        if self.value_share is not None:
            assert first_value is not None
            value = torch.lerp(value, first_value, self.value_share.to(value.dtype))
        return self.qk_norm(key), value

    def prepare_fused_kv(self, key_value_BS2NH: Tensor, first_value_BSNH: Tensor | None) -> Tensor:
        """Apply `prepare_kv` to keys and values that are in one tensor."""
        if self.norm_eps is None and self.value_share is None:
            return key_value_BS2NH
        key, value = key_value_BS2NH.unbind(-3)
        return torch.stack(self.prepare_kv(key, value, first_value_BSNH), dim=-3)

    def qk_norm(self, heads: Tensor, *, gain: float = QUERY_KEY_GAIN) -> Tensor:
        """Divide queries or keys [..., H] by their root mean square, and multiply them by `gain`.

        If the model does not norm queries and keys, return them unchanged.
        """
        if self.norm_eps is None:
            return heads
        return rms_norm(heads, eps=self.norm_eps, gain=gain, width=self.head_width)

    def _check_encodings(self, encodings: object, *, num_distances: int) -> None:
        """Raise ConfigError if the result of the module `distance` cannot be used. A plugin can provide this module.

        The result must be a `RelativeEncodings` with `num_distances` distances.
        """
        key_shape = (num_distances, self.num_heads, self.stored_head_width)
        what = type(encodings).__name__
        if isinstance(encodings, RelativeEncodings):
            key_KNH, bias_KN = encodings
            is_key_right = key_KNH.shape == key_shape
            is_bias_right = bias_KN is None or bias_KN.shape == key_shape[:2]
            if is_key_right and is_bias_right:
                return
            if bias_KN is None:
                bias_shape = None
            else:
                bias_shape = list(bias_KN.shape)
            what = f"key_KNH {list(key_KNH.shape)} and bias_KN {bias_shape}"
        raise raised_everywhere(
            ConfigError(
                f"positions: {type(self.distance).__name__}.forward({num_distances}, ...) returned "
                f"{what}. forward must return txl_dist.model.attention.RelativeEncodings with key_KNH "
                f"{list(key_shape)} and bias_KN {list(key_shape[:2])} or None."
            )
        )

    def distances(self, num_distances: int, *, encoding_KD: Tensor | None) -> RelativeEncodings | None:
        """Compute the layer's encodings of the distances K-1 ... 0.

        Returns None if the layer does not score by distance. `encoding_KD` holds the sinusoids of these distances.
        Positional schemes without sinusoids ignore `encoding_KD`.
        """
        if self.distance is None:
            return None
        encodings = self.distance(num_distances, encoding_KD)
        self._check_encodings(encodings, num_distances=num_distances)
        key_KNH, bias_KN = encodings
        return RelativeEncodings(self.qk_norm(key_KNH, gain=1.0), bias_KN)

    def forward(
        self,
        hidden_BTD: Tensor,
        *,
        key_BKNH: Tensor | None = None,
        value_BKNH: Tensor | None = None,
        past_BMD: Tensor | None = None,
        distances: RelativeEncodings | None,
        visible: AttentionMask | OrderedMask,
    ) -> Tensor:
        """Attend from the positions of `hidden_BTD`. Returns the context after the output projection, [B, T, D].

        `key_BKNH` and `value_BKNH` are the keys and values of memory and segment. If `past_BMD` (the hidden states of
        the memory) is given, this method computes the keys and values itself. `past_BMD` can be given only if
        `supports_fused_qkv` returns True.
        """
        if past_BMD is not None:
            assert distances is not None
            assert isinstance(visible, AttentionMask)
            segment_BT3NH, past_BM2NH = self.project_segment(hidden_BTD, past_BMD)
            context_BTNH = self.attend_fused_qkv(
                segment_BT3NH, past_BM2NH, distance_KNH=distances.key_KNH, visible=visible
            )
            projected: Tensor = self.output(context_BTNH.flatten(2))
            return projected
        assert key_BKNH is not None
        assert value_BKNH is not None
        query_BTNH = self.project_query(hidden_BTD)
        terms = Terms(query_BTNH, key_BKNH, value_BKNH, head_width=self.head_width)
        if distances is not None:
            key_KNH, bias_KN = distances
            terms = terms._replace(
                distance_KNH=key_KNH,
                content_bias_NH=self.content_bias,
                position_bias_NH=self.position_bias,
                distance_bias_KN=bias_KN,
            )
        output: Tensor = self.output(self.attend(terms, visible=visible).flatten(2))
        return output

    def attend_fused_qkv(
        self, segment_BT3NH: Tensor, past_BM2NH: Tensor, *, distance_KNH: Tensor, visible: AttentionMask
    ) -> Tensor:
        """Attend with the Triton kernels to keys and values that are in one tensor with the queries. Training uses this
        method.

        Returns context_BTNH, before the output projection.
        """
        assert self.content_bias is not None
        assert self.position_bias is not None
        return attention_launch.triton_attention_of_products(
            segment_BT3NH,
            past_BM2NH,
            distance_KNH=distance_KNH,
            content_bias_NH=self.content_bias,
            position_bias_NH=self.position_bias,
            visible=visible,
            head_width=self.head_width,
            dropout=self.dropout,
            keeps_scores=self.keeps_scores,
        )

    def attend(self, terms: Terms, *, visible: AttentionMask | OrderedMask) -> Tensor:
        """Attend with the function that `implementation` chooses.

        Returns context_BTNH, before the output projection.
        """
        if self.training:
            dropout = self.dropout
        else:
            dropout = 0.0
        if not isinstance(visible, OrderedMask):
            attention = implementation(self.kernel, terms)
            if self.keeps_scores and self.training and attention is attention_launch.triton_relative_attention:
                return attention(terms, visible=visible, dropout=dropout, keeps_scores=True)
            return attention(terms, visible=visible, dropout=dropout)
        if self.segment_bias is not None and self.segment_encoding is not None and visible.row_type_BQ is not None:
            assert visible.key_type_BK is not None
            terms = with_segment_terms(
                terms,
                self.segment_bias,
                self.segment_encoding,
                row_type_BQ=visible.row_type_BQ,
                key_type_BK=visible.key_type_BK,
            )
        attention = implementation(self.kernel, terms, in_any_order=True)
        if attention is relative_attention:
            return attention(terms, visible=visible, dropout=dropout)
        # Query rows are few and at any places. So their distances are gathered in plain torch.
        content, queries = terms.query_BTNH.tensor_split([visible.num_content_rows], dim=1)
        content_context = attention(terms._replace(query_BTNH=content), visible=visible.content(), dropout=dropout)
        query_context = relative_attention(
            terms._replace(query_BTNH=queries), visible=visible.queries(), dropout=dropout
        )
        return torch.cat([content_context, query_context], dim=1)


def with_segment_terms(
    terms: Terms, bias_NH: Tensor, encoding_2NH: Tensor, *, row_type_BQ: Tensor, key_type_BK: Tensor
) -> Terms:
    """Add XLNet's segment terms to the scores. A segment type is the number of a text: first or second text of a pair,
    separator and so on. Returns terms whose queries and keys are wider than H.

    The segment term of row i and key j is (q_i + bias) . e_0 if row and key have the same segment type, else (q_i +
    bias) . e_1. Only the difference of the two matters to a softmax over the keys. So the term is (q_i + bias) . (e_0 -
    e_1) for keys of the row's type, and 0 for all other keys.

    A key gets additional columns with the one-hot vector of its type. A query gets the same columns, with the one-hot
    vector of its type times (q_i + bias) . (e_0 - e_1). So the product of query and key includes the term.
    """
    difference_NH = encoding_2NH[0] - encoding_2NH[1]
    term_BQN = ((terms.query_BTNH + bias_NH) * difference_NH).sum(dim=-1)
    row_BQ1S = F.one_hot(row_type_BQ, NUM_SEGMENT_TYPES).to(term_BQN.dtype)[:, :, None]
    key_BK1S = F.one_hot(key_type_BK, NUM_SEGMENT_TYPES).to(term_BQN.dtype)[:, :, None]
    key_BKNS = key_BK1S.expand(*terms.key_BKNH.shape[:3], NUM_SEGMENT_TYPES)
    assert terms.distance_KNH is not None
    assert terms.content_bias_NH is not None
    assert terms.position_bias_NH is not None
    widening = (0, NUM_SEGMENT_TYPES)
    return terms._replace(
        query_BTNH=torch.cat([terms.query_BTNH, term_BQN[..., None] * row_BQ1S], dim=-1),
        key_BKNH=torch.cat([terms.key_BKNH, key_BKNS], dim=-1),
        distance_KNH=F.pad(terms.distance_KNH, widening),
        content_bias_NH=F.pad(terms.content_bias_NH, widening),
        position_bias_NH=F.pad(terms.position_bias_NH, widening),
    )


def joint_linear(x: Tensor, past: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply x [..., D] by two matrices [n, D] and [m, D] in one product, and `past` [..., D] by the second matrix.
    Returns ([..., n + m], [..., m]).

    The backward pass takes one product for the gradient of x, and one for the gradients of both matrices. A third
    product adds the part of `past` to the gradient of the second matrix. If the second matrix follows the first in
    memory, as in a flat parameter, the matrices are not copied.
    """
    products: tuple[Tensor, Tensor] = _JointLinear.apply(x, past, first, second)  # type: ignore[no-untyped-call]
    return products


class _JointLinear(torch.autograd.Function):
    """Autograd function of `joint_linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, past: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, past, first, second)
        return F.linear(x, _joint(first, second)), F.linear(past, second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, past, first, second = ctx.saved_tensors
        d_product, d_past_product = (gradient.flatten(0, -2) for gradient in gradients)
        inputs = x.flatten(0, -2)
        d_matrices = d_product.t() @ inputs
        d_first, d_second = d_matrices.split([len(first), len(second)])
        torch.addmm(d_second, d_past_product.t(), past.flatten(0, -2), out=d_second)
        d_inputs = d_product @ _joint(first, second)
        d_past: Tensor | None = None
        if ctx.needs_input_grad[1]:  # the norm before attention is trained, although the memory is not
            d_past = (d_past_product @ second).view_as(past)
        return d_inputs.view_as(x), d_past, d_first, d_second


def _joint(first: Tensor, second: Tensor) -> Tensor:
    """Return two matrices as one, [n + m, D]. The result is a view if they are adjacent in memory, else a copy."""
    shares_storage = first.untyped_storage()._cdata == second.untyped_storage()._cdata
    follows = second.storage_offset() == first.storage_offset() + first.numel()
    if shares_storage and follows and first.is_contiguous() and second.is_contiguous():
        return first.detach().as_strided((len(first) + len(second), first.shape[1]), first.stride())
    return torch.cat([first, second])


def implementation(kernel: AttentionKernel, terms: Terms, *, in_any_order: bool = False) -> Callable[..., Tensor]:
    """Return the function that computes attention of `terms`, as the setting `engine.attention` says.

    All attention functions have the same signature. With `in_any_order` queries can see later keys (XLNet). Raises
    ConfigError if the setting is "triton" but the Triton kernels cannot run.
    """
    if terms.distance_KNH is None:
        return dot_product_attention
    if kernel == "plain":
        return relative_attention
    if kernel == "fused":
        return fused_relative_attention
    reason = attention_launch.unsupported_reason(
        terms.query_BTNH, has_position_bias=terms.position_bias_NH is not None, in_any_order=in_any_order
    )
    if kernel == "triton" and reason is not None:
        raise ConfigError(
            f'engine.attention = "triton" cannot run: {reason}. Set engine.attention to "auto" or "fused".'
        )
    if reason is None:
        return attention_launch.triton_relative_attention
    return fused_relative_attention


def dot_product_attention(terms: Terms, *, visible: AttentionMask, dropout: float = 0.0) -> Tensor:
    """Attend by scaled dot products of queries and keys, without distances. Returns context_BTNH.

    The function calls torch's `scaled_dot_product_attention`.
    """
    query = terms.query_BTNH.transpose(1, 2)
    key = terms.key_BKNH.transpose(1, 2)
    value = terms.value_BKNH.transpose(1, 2)
    is_padded = terms.head_width not in (None, value.shape[-1])
    scale = terms.scale if is_padded else None
    # Without cuDNN, which torch might choose: its backward gives NaN for some masked lengths (pytorch #196678).
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        context_BNTH = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible.mask()[:, None], dropout_p=dropout, scale=scale
        )
    return context_BNTH.transpose(1, 2)
