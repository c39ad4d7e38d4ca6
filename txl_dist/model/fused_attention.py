"""Relative attention as one autograd function with a hand-written backward, for any device and floating type.

`fused_relative_attention` has the signature and the result of `relative_attention`. It takes less time and memory for
these reasons:

    blocks   Queries are processed in blocks. The block [i, j) is itself a small relative attention: its memory has
             M + i keys, its keys are [0, M + j), and its distances are the last M + j. So few of the pairs that are
             computed are masked.
    shift    The relative shift is a view of the buffer that the product with the distances is written to. In the
             backward pass it is a view of the buffer that the products with the scores' gradient read.
    mask     The mask is added as 0 or -inf, and made once per block for all heads. Filling by a boolean mask takes
             longer than a matrix product.
    heads    Heads are processed in groups that are small enough for the scores of a group to fit the cache.

The probabilities of the visible blocks are kept for the backward pass. Computing them again would take a quarter more
products. Inputs are kept without copies. No operation waits for the device, and the order of all sums is fixed.

This example shows the shift for one head and one lane (row of the batch), in a block of b = 3 queries and k = 5 keys. A
digit is the index of a distance among the last k distances, and a dot is 0. Query i meets key j at index j - i + b - 1.
The keys after the end of a row are in the future and are masked:

    unshifted: [b, k] after zeros, rows S > k apart        shifted: the same cells, rows S - 1 apart
    . . . 0 1 2 3 4                                        2 3 4 . .
    . . . 0 1 2 3 4                                        1 2 3 4 .
    . . . 0 1 2 3 4                                        0 1 2 3 4

Matrix products use the unshifted rows. If k is a multiple of 8, these rows begin at multiples of 8 numbers, as tensor
cores need. Only sums and copies use the shifted rows.

If the model predicts in any order (XLNet), queries can see later keys. A block then has all K keys, and the K + b - 1
distances between these keys and the block's queries. Every cell of the shifted rows is then a distance.

Shapes: B lanes, T queries, M memory, K = M + T keys, P distances, N heads, H head width. Within a block of a group of
heads: n heads, b queries, k keys, c distances, X = n B, R = B b.
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
from txl_dist.model.prediction_order import OrderedMask
from txl_dist.model.relative_attention import Terms


def fused_relative_attention(terms: Terms, *, visible: AttentionMask | OrderedMask, dropout: float = 0.0) -> Tensor:
    """Attend by content and distance, in blocks. Returns context_BTNH, the same as `relative_attention`.

    Query i must be at position i of the segment. So the function can compute the content rows of an `OrderedMask`
    (XLNet), but not its query rows. Dropout draws from the default generator. Second derivatives are not supported.
    """
    if terms.position_bias_NH is None:
        assert terms.content_bias_NH is not None
        terms = terms._replace(position_bias_NH=torch.zeros_like(terms.content_bias_NH))
    attend: Callable[..., Tensor] = _RelativeAttention.apply
    return attend(*terms[:7], terms.scale, visible, dropout, torch.is_grad_enabled())


class _Tile(NamedTuple):
    """Limits of the work that is computed at a time: queries in a block, and bytes of scores."""

    block_len: int
    """Number of queries in a block."""
    scores_bytes: int
    """Largest size of the scores of one block of queries and one group of heads, in bytes. It is about the size of the
    cache."""


CPU = _Tile(64, 2**20)
"""Limits of the work that a CPU computes at a time."""
GPU = _Tile(128, 2**25)
"""Limits of the work that a GPU computes at a time."""


class _Block(NamedTuple):
    """Block of queries [start, stop), which may see the keys [0, num_keys)."""

    start: int
    stop: int
    num_keys: int
    distances: slice
    """Slice of the list of all distances: the distances between the block's queries and keys."""

    @property
    def num_distances(self) -> int:
        """Number of distances in the block, c in the legend of shapes."""
        return int(self.distances.stop - self.distances.start)

    @property
    def num_queries(self) -> int:
        """Number of queries in the block, b in the legend of shapes."""
        return self.stop - self.start


class _Heads(NamedTuple):
    """Inputs of attention for one group of heads. All blocks of queries use them. Queries and `distance_bias_nK` are
    already multiplied by H ** -0.5, and the queries include the biases u and v."""

    content_query_XTH: Tensor
    position_query_nBTH: Tensor
    key_XKH: Tensor
    value_XKH: Tensor
    distance_nKH: Tensor
    distance_bias_nK: Tensor | None


class _Inputs(NamedTuple):
    """Inputs of attention, with the tensors of `Terms`. Only `distance_bias_KN` may be None."""

    query_BTNH: Tensor
    key_BKNH: Tensor
    value_BKNH: Tensor
    distance_KNH: Tensor
    content_bias_NH: Tensor
    position_bias_NH: Tensor
    distance_bias_KN: Tensor | None
    scale: float
    """Factor of the scores, `Terms.scale`."""

    def blocks(self) -> list[_Block]:
        """Divide the queries into blocks of at most `block_len`."""
        num_queries = self.query_BTNH.shape[1]
        num_keys = self.key_BKNH.shape[1]
        num_distances = self.distance_KNH.shape[0]
        sees_later_keys = num_distances > num_keys
        edges = [*range(0, num_queries, self.tile().block_len), num_queries]
        blocks = []
        for start, stop in pairwise(edges):
            nearest = num_queries - stop
            if sees_later_keys:
                distances = slice(nearest, nearest + num_keys + stop - start - 1)
                blocks.append(_Block(start, stop, num_keys, distances))
            else:
                distances = slice(nearest, num_distances)
                blocks.append(_Block(start, stop, num_keys - nearest, distances))
        return blocks

    def groups(self) -> list[slice]:
        """Divide the heads into groups whose scores fit the cache. Every group has at least one head."""
        B, T, N, _ = self.query_BTNH.shape
        K = self.key_BKNH.shape[1]
        tile = self.tile()
        num_scores = B * min(T, tile.block_len) * K
        head_bytes = num_scores * self.query_BTNH.element_size()
        size = max(1, tile.scores_bytes // head_bytes)
        return [slice(first, min(first + size, N)) for first in range(0, N, size)]

    def tile(self) -> _Tile:
        """Return the limits of work for the inputs' device."""
        if self.query_BTNH.is_cuda:
            return GPU
        return CPU

    def heads(self, group: slice) -> _Heads:
        """Prepare the inputs of a group of heads. Keys and values are copied only if the group has several heads."""
        query_nBTH = _head_major(self.query_BTNH[:, :, group])
        key_nBKH = _head_major(self.key_BKNH[:, :, group])
        value_nBKH = _head_major(self.value_BKNH[:, :, group])
        u_n11H = self.content_bias_NH[group, None, None]
        v_n11H = self.position_bias_NH[group, None, None]
        scale = self.scale
        content_query_nBTH = (query_nBTH + u_n11H).mul_(scale)
        position_query_nBTH = (query_nBTH + v_n11H).mul_(scale)
        distance_bias_nK = None
        if self.distance_bias_KN is not None:
            distance_bias_nK = self.distance_bias_KN[:, group].t() * scale
        return _Heads(
            content_query_XTH=content_query_nBTH.flatten(0, 1),
            position_query_nBTH=position_query_nBTH,
            key_XKH=key_nBKH.flatten(0, 1),
            value_XKH=value_nBKH.flatten(0, 1),
            distance_nKH=self.distance_KNH[:, group].transpose(0, 1),
            distance_bias_nK=distance_bias_nK,
        )


class _ShiftBuffer:
    """Buffer for the relative shift. All blocks use it, one after the other."""

    def __init__(self, inputs: _Inputs) -> None:
        num_lanes = inputs.query_BTNH.shape[0]
        most_heads = max(group.stop - group.start for group in inputs.groups())
        most_cells = max(block.num_queries * _row(block.num_distances) for block in inputs.blocks())
        self.cells = inputs.query_BTNH.new_empty(most_heads * num_lanes * most_cells)
        self.shape: tuple[int, ...] = ()

    def views(self, block: _Block, heads: _Heads) -> tuple[Tensor, Tensor]:
        """Return (unshifted_nRc, shifted_Xbk), two views of the same cells.

        Products and copies read some cells that no product and no copy writes. These cells must be zero. They are set
        to zero only when the shape changes. So groups of heads with the same shape use the same zeros.
        """
        n, B = heads.position_query_nBTH.shape[:2]
        b = block.num_queries
        k = block.num_keys
        c = block.num_distances
        row = _row(c)
        cells = self.cells[: n * B * b * row]
        if self.shape != (n, b, k, c):
            self.shape = (n, b, k, c)
            cells.zero_()
        rows_nRS = cells.view(n, B * b, row)
        unshifted_nRc = rows_nRS[:, :, row - c :]
        shifted_Xbk = cells.as_strided(
            size=(n * B, b, k),
            stride=(b * row, row - 1, 1),
            storage_offset=row - c + b - 1,
        )
        return unshifted_nRc, shifted_Xbk


class _Gradients:
    """Gradients of the inputs. Each block of queries adds its contribution."""

    def __init__(self, inputs: _Inputs) -> None:
        like = inputs.query_BTNH
        B, T, N, H = like.shape
        K = inputs.key_BKNH.shape[1]
        num_distances = inputs.distance_KNH.shape[0]
        self.scale = inputs.scale
        self.query_BTNH = like.new_empty(B, T, N, H)
        self.key_NBKH = like.new_empty(N, B, K, H)
        self.value_NBKH = like.new_empty(N, B, K, inputs.value_BKNH.shape[-1])
        self.distance_NKH = like.new_zeros(N, num_distances, H)
        if inputs.distance_bias_KN is None:
            self.distance_bias_NK = None
        else:
            self.distance_bias_NK = like.new_zeros(N, num_distances)
        self.content_bias_NH = like.new_zeros(N, H)
        self.position_bias_NH = like.new_zeros(N, H)

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
        """Add the gradients that flow through a block's scores, for all inputs except the values.

        `views` holds the two views of the shift buffer. `beta` is 0 for the block that is added first. This block sees
        all keys, and its contribution overwrites the gradient of the keys. `beta` is 1 for all other blocks, whose
        contribution is added.
        """
        i, j, k, distances = block
        unshifted_nRc, shifted_Xbk = views
        content_query_XbH = heads.content_query_XTH[:, i:j]
        position_query_nBbH = heads.position_query_nBTH[:, :, i:j]
        n, B, b, H = position_query_nBbH.shape
        # Terms (a) and (c).
        d_key_XkH = self.key_NBKH[group].flatten(0, 1)[:, :k]
        _add_product(d_key_XkH, d_scores_Xbk.transpose(1, 2), content_query_XbH, beta=beta)
        d_content_query = torch.bmm(d_scores_Xbk, heads.key_XKH[:, :k]).view(n, B, b, H)
        # Terms (b) and (d), through the shift.
        shifted_Xbk.copy_(d_scores_Xbk)
        d_distance_ncH = self.distance_NKH[group][:, distances]
        position_query_nRH = position_query_nBbH.flatten(1, 2)
        _add_product(d_distance_ncH, unshifted_nRc.transpose(1, 2), position_query_nRH)
        d_position_query = torch.bmm(unshifted_nRc, heads.distance_nKH[:, distances]).view(n, B, b, H)
        if self.distance_bias_NK is not None:
            self.distance_bias_NK[group, distances] += unshifted_nRc.sum(1)
        self.content_bias_NH[group] += d_content_query.sum((1, 2))
        self.position_bias_NH[group] += d_position_query.sum((1, 2))
        d_query_nBbH = _head_major(self.query_BTNH)[group, :, i:j]
        torch.add(d_content_query, d_position_query, out=d_query_nBbH)

    def scaled(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs, in the order and the layout of the inputs.

        The queries in `_Heads` include the scale, so the queries' gradients are multiplied by the scale here.
        """
        scale = self.scale
        distance_bias_KN = None
        if self.distance_bias_NK is not None:
            distance_bias_KN = self.distance_bias_NK.t().mul_(scale)
        return (
            self.query_BTNH.mul_(scale),
            self.key_NBKH.permute(1, 2, 0, 3),
            self.value_NBKH.permute(1, 2, 0, 3),
            self.distance_NKH.transpose(0, 1),
            self.content_bias_NH.mul_(scale),
            self.position_bias_NH.mul_(scale),
            distance_bias_KN,
        )


class _RelativeAttention(torch.autograd.Function):
    """Autograd function of `fused_relative_attention`.

    Its arguments are the seven tensors, the scale, the mask, the dropout rate, and a flag. The flag says whether to
    keep the values that the backward pass needs.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        inputs = _Inputs(*arguments[:8])
        visible, dropout, keeps = arguments[8:]
        context_BTNH = inputs.query_BTNH.new_empty(*inputs.query_BTNH.shape[:3], inputs.value_BKNH.shape[-1])
        context_NBTH = _head_major(context_BTNH)
        num_lanes = context_BTNH.shape[0]
        buffer = _ShiftBuffer(inputs)
        blocks = inputs.blocks()
        masks_Bbk = [_additive_mask(visible, block, like=context_BTNH) for block in blocks]
        kept: list[Tensor | None] = []
        for group in inputs.groups():
            heads = inputs.heads(group)
            for block, mask_Bbk in zip(blocks, masks_Bbk, strict=True):
                views = buffer.views(block, heads)
                scores_Xbk = _scores(heads, block, mask_Bbk, views=views)
                probabilities_Xbk = torch.softmax(scores_Xbk, -1)  # in half precision torch computes it in fp32
                keep_Xbk = None
                if dropout:
                    # A CPU multiplies by uint8 several times as fast as by bool.
                    keep_Xbk = torch.empty_like(scores_Xbk, dtype=torch.uint8).bernoulli_(1 - dropout)
                weights_Xbk = _dropped(probabilities_Xbk, keep_Xbk, dropout)
                value_XkH = heads.value_XKH[:, : block.num_keys]
                context_XbH = torch.bmm(weights_Xbk, value_XkH)
                context_nBbH = context_XbH.unflatten(0, (-1, num_lanes))
                context_NBTH[group, :, block.start : block.stop] = context_nBbH
                if keeps:
                    kept.append(probabilities_Xbk)
                    kept.append(keep_Xbk)
        ctx.save_for_backward(*inputs[:7], *kept)
        ctx.scale = inputs.scale
        ctx.dropout = dropout
        return context_BTNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_context_BTNH: Tensor) -> tuple[Tensor | None, ...]:
        saved_tensors = ctx.saved_tensors  # read once: activation checkpointing recomputes them then
        inputs = _Inputs._make((*saved_tensors[:7], ctx.scale))
        kept = saved_tensors[7:]
        dropout = ctx.dropout
        gradients = _Gradients(inputs)
        buffer = _ShiftBuffer(inputs)
        blocks = inputs.blocks()
        saved = iter(zip(kept[::2], kept[1::2], strict=True))
        through_softmax = torch.ops.aten._softmax_backward_data.out
        for group in inputs.groups():
            heads = inputs.heads(group)
            d_value_XKH = gradients.value_NBKH[group].flatten(0, 1)
            d_context_XTH = _head_major(d_context_BTNH[:, :, group]).flatten(0, 1)
            saved_blocks = [(block, next(saved)) for block in blocks]
            # The last block comes first. It sees all keys, so it begins the sums.
            for block, (probabilities_Xbk, keep_Xbk) in reversed(saved_blocks):
                i, j, k, _ = block
                beta = int(block is not blocks[-1])
                d_context_XbH = d_context_XTH[:, i:j]
                weights_Xbk = _dropped(probabilities_Xbk, keep_Xbk, dropout)
                _add_product(d_value_XKH[:, :k], weights_Xbk.transpose(1, 2), d_context_XbH, beta=beta)
                d_weights_Xbk = torch.bmm(d_context_XbH, heads.value_XKH[:, :k].transpose(1, 2))
                d_scores_Xbk = _dropped(d_weights_Xbk, keep_Xbk, dropout)
                through_softmax(d_scores_Xbk, probabilities_Xbk, -1, d_scores_Xbk.dtype, grad_input=d_scores_Xbk)
                views = buffer.views(block, heads)
                gradients.add(d_scores_Xbk, heads, group, block, views=views, beta=beta)
        return (*gradients.scaled(), None, None, None, None)


def _additive_mask(visible: AttentionMask | OrderedMask, block: _Block, *, like: Tensor) -> Tensor:
    """Build mask_Bbk, which is added to scores. It is 0 where a query sees a key, else -inf."""
    seen = like.new_zeros(())
    unseen = like.new_full((), -math.inf)
    return torch.where(visible.mask(block.start, block.stop), seen, unseen)


def _scores(heads: _Heads, block: _Block, mask_Bbk: Tensor, *, views: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the scaled and masked scores of a block, scores_Xbk.

    Terms (b) + (d), which depend on the distance, are computed and shifted first. Then terms (a) + (c), which depend on
    the key's content, are added.
    """
    i, j, k, distances = block
    unshifted_nRc, shifted_Xbk = views
    num_lanes = len(mask_Bbk)
    position_query_nRH = heads.position_query_nBTH[:, :, i:j].flatten(1, 2)
    distance_nHc = heads.distance_nKH[:, distances].transpose(1, 2)
    torch.bmm(position_query_nRH, distance_nHc, out=unshifted_nRc)
    if heads.distance_bias_nK is not None:
        unshifted_nRc += heads.distance_bias_nK[:, None, distances]
    shifted_nBbk = shifted_Xbk.unflatten(0, (-1, num_lanes))
    scores_nBbk = shifted_nBbk + mask_Bbk
    scores_Xbk: Tensor = scores_nBbk.flatten(0, 1)
    _add_product(scores_Xbk, heads.content_query_XTH[:, i:j], heads.key_XKH[:, :k].transpose(1, 2))
    return scores_Xbk


def _dropped(x: Tensor, keep: Tensor | None, rate: float) -> Tensor:
    """Set numbers to 0 where `keep` is 0, and scale up the other numbers. If `keep` is None, return `x` itself."""
    if keep is None:
        return x
    return (x * keep).mul_(1 / (1 - rate))


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, beta: int = 1) -> None:
    """Compute total = beta total + left right, in place.

    `baddbmm_` does the same, but torch's FLOP counter ignores it.
    """
    torch.baddbmm(total, left, right, beta=beta, out=total)


def _head_major(x_BSNH: Tensor) -> Tensor:
    """Return a view of x as [N, B, S, H], for any number of positions S."""
    return x_BSNH.permute(2, 0, 1, 3)


def _row(num_keys: int) -> int:
    """Return the length of a buffer row: the next multiple of 8 that leaves at least one zero at its start."""
    return (num_keys // 8 + 1) * 8
