"""Relative attention as one autograd function with a hand-written backward, for any device and floating type.

The signature and the result of `relative_attention`, in less time and memory, for these reasons:

    blocks   Queries are taken in blocks. The block [i, j) is itself a small relative attention of memory M + i, with
             the keys [0, M + j) and the last M + j distances: few masked pairs are ever computed.
    shift    The relative shift is a view of the buffer into which the product with the distances was written; in the
             backward, of the buffer from which the products with the scores' gradient are read.
    mask     A sum with 0 or -inf, made once per block for all heads: to fill by a mask takes longer than a product.
    heads    So few at a time that their scores stay in the cache, whatever the batch.

The probabilities of the visible blocks are kept for the backward: without them it would take a quarter more products.
Of its inputs it keeps no copies. Nothing waits for the device, and no order of sums is left to chance.

The shift, for one head and lane, a block of b = 3 queries and k = 5 keys (a digit is the place of a distance among the
last k, a dot is 0). Query i meets key j at place j - i + b - 1. What lies where a row ended is a future key, masked:

    unshifted: [b, k] behind zeros, rows S > k apart       shifted: the same cells, rows S - 1 apart
    . . . 0 1 2 3 4                                        2 3 4 . .
    . . . 0 1 2 3 4                                        1 2 3 4 .
    . . . 0 1 2 3 4                                        0 1 2 3 4

Products read and write rows that begin at multiples of 8 numbers (where k is one), as tensor cores want them; only
sums and copies see the shifted rows.

Shapes: B lanes, T queries, M memory, K = M + T keys, N heads, H head width. Within a block of some heads: n heads,
b queries, k keys, X = n B, R = B b.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from txl_dist.model.memory import AttentionMask
from txl_dist.model.relative_attention import Terms, at_least_fp32


def fused_relative_attention(terms: Terms, *, visible: AttentionMask, dropout: float = 0.0) -> Tensor:
    """Attend; see `relative_attention`. Returns context_BTNH.

    Dropout draws from the default generator. Gradients of gradients are not known.
    """
    if terms.position_bias_NH is None:
        assert terms.content_bias_NH is not None
        terms = terms._replace(position_bias_NH=torch.zeros_like(terms.content_bias_NH))
    attend: Callable[..., Tensor] = _RelativeAttention.apply
    return attend(*terms, visible, dropout, torch.is_grad_enabled())


class _Tile(NamedTuple):
    """How much is computed at a time."""

    block_len: int
    """Queries."""
    scores_bytes: int
    """Of the scores of a block and some heads: about what the cache holds."""


CPU, GPU = _Tile(64, 2**20), _Tile(128, 2**25)


class _Block(NamedTuple):
    """Queries [start, stop), and the number of keys from the first on that they may see."""

    start: int
    stop: int
    num_keys: int


class _Heads(NamedTuple):
    """What some heads bring to every block. Queries carry the scale H ** -0.5."""

    content_query_XTH: Tensor
    position_query_nBTH: Tensor
    key_XKH: Tensor
    value_XKH: Tensor
    distance_nKH: Tensor
    distance_bias_nK: Tensor | None


class _Inputs(NamedTuple):
    """`Terms` without a gap."""

    query_BTNH: Tensor
    key_BKNH: Tensor
    value_BKNH: Tensor
    distance_KNH: Tensor
    content_bias_NH: Tensor
    position_bias_NH: Tensor
    distance_bias_KN: Tensor | None

    def blocks(self) -> list[_Block]:
        """Of all queries."""
        num_queries, memory_len = self.query_BTNH.shape[1], self.key_BKNH.shape[1] - self.query_BTNH.shape[1]
        edges = [*range(0, num_queries, self.tile().block_len), num_queries]
        return [_Block(i, j, memory_len + j) for i, j in pairwise(edges)]

    def groups(self) -> list[slice]:
        """Of heads: at a time those whose scores fit the cache, but at least one."""
        (B, T, N, _), K = self.query_BTNH.shape, self.key_BKNH.shape[1]
        head_bytes = B * min(T, self.tile().block_len) * K * self.query_BTNH.element_size()
        size = max(1, self.tile().scores_bytes // head_bytes)
        return [slice(first, min(first + size, N)) for first in range(0, N, size)]

    def tile(self) -> _Tile:
        """For this device."""
        return GPU if self.query_BTNH.is_cuda else CPU

    def heads(self, group: slice) -> _Heads:
        """Of a group; keys and values are copied only if it has several heads."""
        query_nBTH, key_nBKH, value_nBKH = (_head_major(x[:, :, group]) for x in self[:3])
        u_n11H, v_n11H = (bias_NH[group, None, None] for bias_NH in self[4:6])
        scale = query_nBTH.shape[-1] ** -0.5
        s_KN = self.distance_bias_KN
        return _Heads(
            (query_nBTH + u_n11H).mul_(scale).flatten(0, 1),
            (query_nBTH + v_n11H).mul_(scale),
            key_nBKH.flatten(0, 1),
            value_nBKH.flatten(0, 1),
            self.distance_KNH[:, group].transpose(0, 1),
            None if s_KN is None else s_KN[:, group].t() * scale,
        )


class _ShiftBuffer:
    """Memory for the shift, used by one block after the other."""

    def __init__(self, inputs: _Inputs) -> None:
        rows = max(group.stop - group.start for group in inputs.groups()) * inputs.query_BTNH.shape[0]
        cells = max((block.stop - block.start) * _row(block.num_keys) for block in inputs.blocks())
        self.cells = inputs.query_BTNH.new_empty(rows * cells)
        self.shape: tuple[int, ...] = ()

    def views(self, block: _Block, heads: _Heads) -> tuple[Tensor, Tensor]:
        """(unshifted_nRk, shifted_Xbk) of the same cells. Those which no product or copy writes are read too: they are
        zero, and stay so from one group of heads to the next if these have the same shape."""
        n, B = heads.position_query_nBTH.shape[:2]
        b, k, row = block.stop - block.start, block.num_keys, _row(block.num_keys)
        cells = self.cells[: n * B * b * row]
        if self.shape != (n, b, k):
            self.shape = n, b, k
            cells.zero_()
        unshifted_nRk = cells.view(n, B * b, row)[:, :, row - k :]
        return unshifted_nRk, cells.as_strided((n * B, b, k), (b * row, row - 1, 1), row - k + b - 1)


class _Gradients:
    """Of the inputs, summed up block by block."""

    def __init__(self, inputs: _Inputs) -> None:
        (B, T, N, H), K, like = inputs.query_BTNH.shape, inputs.key_BKNH.shape[1], inputs.query_BTNH
        self.query_BTNH = like.new_empty(B, T, N, H)
        self.key_NBKH, self.value_NBKH = like.new_empty(N, B, K, H), like.new_empty(N, B, K, H)
        self.distance_NKH = like.new_empty(N, K, H)
        self.distance_bias_NK = None if inputs.distance_bias_KN is None else like.new_zeros(N, K)
        self.content_bias_NH, self.position_bias_NH = like.new_zeros(N, H), like.new_zeros(N, H)

    def add(
        self,
        d_scores_Xbk: Tensor,
        heads: _Heads,
        group: slice,
        block: _Block,
        *,
        views: tuple[Tensor, Tensor],
        beta: int,
    ) -> None:
        """What the scores of a block give to all but the values."""
        (i, j, k), (unshifted_nRk, shifted_Xbk) = block, views
        n, B, b, H = heads.position_query_nBTH[:, :, i:j].shape
        d_key_XKH, d_distance_nKH = self.key_NBKH[group].flatten(0, 1), self.distance_NKH[group]
        _add_product(d_key_XKH[:, :k], d_scores_Xbk.transpose(1, 2), heads.content_query_XTH[:, i:j], beta=beta)
        content_nBbH = torch.bmm(d_scores_Xbk, heads.key_XKH[:, :k]).view(n, B, b, H)
        shifted_Xbk.copy_(d_scores_Xbk)
        position_query_nRH = heads.position_query_nBTH[:, :, i:j].flatten(1, 2)
        _add_product(d_distance_nKH[:, -k:], unshifted_nRk.transpose(1, 2), position_query_nRH, beta=beta)
        position_nBbH = torch.bmm(unshifted_nRk, heads.distance_nKH[:, -k:]).view(n, B, b, H)
        if self.distance_bias_NK is not None:
            self.distance_bias_NK[group, -k:] += unshifted_nRk.sum(1)
        self.content_bias_NH[group] += content_nBbH.sum((1, 2))
        self.position_bias_NH[group] += position_nBbH.sum((1, 2))
        torch.add(content_nBbH, position_nBbH, out=_head_major(self.query_BTNH)[group, :, i:j])

    def scaled(self) -> tuple[Tensor | None, ...]:
        """In the order and the layout of the inputs."""
        scale = self.query_BTNH.shape[-1] ** -0.5
        return (
            self.query_BTNH.mul_(scale),
            self.key_NBKH.permute(1, 2, 0, 3),
            self.value_NBKH.permute(1, 2, 0, 3),
            self.distance_NKH.transpose(0, 1),
            self.content_bias_NH.mul_(scale),
            self.position_bias_NH.mul_(scale),
            None if self.distance_bias_NK is None else self.distance_bias_NK.t().mul_(scale),
        )


class _RelativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        inputs, (visible, dropout, keeps) = _Inputs(*arguments[:7]), arguments[7:]
        context_BTNH = inputs.query_BTNH.new_empty(inputs.query_BTNH.shape)
        context_NBTH, buffer, blocks = _head_major(context_BTNH), _ShiftBuffer(inputs), inputs.blocks()
        # What is added to the scores: 0 where a key is seen, else -inf.
        seen, unseen = context_BTNH.new_zeros(()), context_BTNH.new_full((), -math.inf)
        masks_Bbk = [torch.where(visible.mask(block.start, block.stop), seen, unseen) for block in blocks]
        kept: list[Tensor | None] = []
        for group in inputs.groups():
            heads = inputs.heads(group)
            for block, mask_Bbk in zip(blocks, masks_Bbk, strict=True):
                i, j, k = block
                scores_Xbk = _scores(heads, block, mask_Bbk, views=buffer.views(block, heads))
                probabilities = torch.softmax(scores_Xbk, -1, dtype=at_least_fp32(scores_Xbk.dtype))
                probabilities_Xbk = probabilities.to(scores_Xbk.dtype)
                keep_Xbk = torch.empty_like(scores_Xbk, dtype=torch.bool).bernoulli_(1 - dropout) if dropout else None
                weights_Xbk = _dropped(probabilities_Xbk, keep_Xbk, dropout)
                context_XbH = torch.bmm(weights_Xbk, heads.value_XKH[:, :k])
                context_NBTH[group, :, i:j] = context_XbH.unflatten(0, (-1, context_BTNH.shape[0]))
                kept += [probabilities_Xbk, keep_Xbk] if keeps else []
        ctx.save_for_backward(*inputs, *kept)
        ctx.dropout = dropout
        return context_BTNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_context_BTNH: Tensor) -> tuple[Tensor | None, ...]:
        saved_tensors = ctx.saved_tensors  # read once: activation checkpointing recomputes them then
        inputs, kept = _Inputs(*saved_tensors[:7]), saved_tensors[7:]
        gradients, buffer, blocks, dropout = _Gradients(inputs), _ShiftBuffer(inputs), inputs.blocks(), ctx.dropout
        saved = iter(zip(kept[::2], kept[1::2], strict=True))
        through_softmax = torch.ops.aten._softmax_backward_data.out
        for group in inputs.groups():
            heads, d_value_XKH = inputs.heads(group), gradients.value_NBKH[group].flatten(0, 1)
            d_context_XTH = _head_major(d_context_BTNH[:, :, group]).flatten(0, 1)
            # The last block comes first: it sees all keys, and so begins the sums.
            for block, (probabilities_Xbk, keep_Xbk) in reversed([(block, next(saved)) for block in blocks]):
                (i, j, k), beta = block, int(block is not blocks[-1])
                weights_Xbk, d_context_XbH = _dropped(probabilities_Xbk, keep_Xbk, dropout), d_context_XTH[:, i:j]
                _add_product(d_value_XKH[:, :k], weights_Xbk.transpose(1, 2), d_context_XbH, beta=beta)
                d_weights_Xbk = torch.bmm(d_context_XbH, heads.value_XKH[:, :k].transpose(1, 2))
                d_scores_Xbk = _dropped(d_weights_Xbk, keep_Xbk, dropout)
                through_softmax(d_scores_Xbk, probabilities_Xbk, -1, d_scores_Xbk.dtype, grad_input=d_scores_Xbk)
                gradients.add(d_scores_Xbk, heads, group, block, views=buffer.views(block, heads), beta=beta)
        return (*gradients.scaled(), None, None, None)


def _scores(heads: _Heads, block: _Block, mask_Bbk: Tensor, *, views: tuple[Tensor, Tensor]) -> Tensor:
    """Scores of a block, scaled and masked: terms (b)+(d), shifted, then (a)+(c)."""
    (i, j, k), (unshifted_nRk, shifted_Xbk) = block, views
    position_query_nRH = heads.position_query_nBTH[:, :, i:j].flatten(1, 2)
    torch.bmm(position_query_nRH, heads.distance_nKH[:, -k:].transpose(1, 2), out=unshifted_nRk)
    if heads.distance_bias_nK is not None:
        unshifted_nRk += heads.distance_bias_nK[:, None, -k:]
    scores_Xbk: Tensor = (shifted_Xbk.unflatten(0, (-1, len(mask_Bbk))) + mask_Bbk).flatten(0, 1)
    _add_product(scores_Xbk, heads.content_query_XTH[:, i:j], heads.key_XKH[:, :k].transpose(1, 2))
    return scores_Xbk


def _dropped(x: Tensor, keep: Tensor | None, rate: float) -> Tensor:
    """Those kept, scaled up, else 0; all of `x` itself without dropout."""
    return x if keep is None else (x * keep).mul_(1 / (1 - rate))


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, beta: int = 1) -> None:
    """total = beta total + left right, in place. Not by `baddbmm_`, whose operations torch's counter leaves out."""
    torch.baddbmm(total, left, right, beta=beta, out=total)


def _head_major(x_BSNH: Tensor) -> Tensor:
    """[N, B, S, H] of any positions, as a view."""
    return x_BSNH.permute(2, 0, 1, 3)


def _row(num_keys: int) -> int:
    """Cells in a row of the buffer: the next multiple of 8, at least one being a zero in front."""
    return (num_keys // 8 + 1) * 8
