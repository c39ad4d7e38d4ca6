"""Relative attention (Dai et al. 2019, section 3.3) as a function, in plain torch. The layer is in `attention`.

The score of query i for key j has four terms. Their distance is i - j, and positions are counted over memory and
segment:

    (a) q_i . k_j   +   (b) q_i . r_{i-j}   +   (c) u . k_j   +   (d) v . r_{i-j}

With learned encodings r, term (d) is a learned number s_{i-j} per distance (Shaw et al. 2018, as in the original code).

Terms (a) and (c) are one matrix product of q + u with the keys. Terms (b) and (d) are one product of q + v with the
encodings of all K distances, in descending order. Row i of the second product must be shifted left by T-1-i. With one
zero column in front, that relative shift is a *view* of the same buffer (row stride K, offset T): nothing is copied.
Where the view wraps around, the keys are in the future, so they are always masked. If the model predicts in any order
(XLNet), a query can see later keys, at the distances -1 to 1-T. Each row then gathers the terms of its distances by its
position in the segment.

Shapes: B lanes, T queries, M memory, K = M + T keys, D model width, N heads, H head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from txl_dist.model.memory import AttentionMask
from txl_dist.model.prediction_order import OrderedMask


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the type for normalisers, log-probabilities and encodings: fp64 for fp64, and fp32 for all other types."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32


class Terms(NamedTuple):
    """Inputs of an attention function. For plain dot products of queries and keys, the fields from `distance_KNH` to
    `distance_bias_KN` are None."""

    query_BTNH: Tensor
    key_BKNH: Tensor
    value_BKNH: Tensor
    distance_KNH: Tensor | None = None
    """Encodings r of the distances K-1 ... 0 in one layer. If the model predicts in any order (XLNet), they continue to
    1-T."""
    content_bias_NH: Tensor | None = None
    """Bias u, which term (c) uses."""
    position_bias_NH: Tensor | None = None
    """Bias v, which term (d) uses. It is None if term (d) is learned or missing."""
    distance_bias_KN: Tensor | None = None
    """Learned term (d): one score per distance and head. The first row is for the distance K-1, the last for 0."""
    head_width: int | None = None
    """Width H of a head without padding. None means that it is the width of the values."""

    @property
    def scale(self) -> float:
        """Factor of the scores, 1 / sqrt(H). Queries, keys and values can be wider than H by columns of zeros. Queries
        and keys can also have additional columns for XLNet's segment terms."""
        return float((self.head_width or self.value_BKNH.shape[-1]) ** -0.5)


def relative_attention(terms: Terms, *, visible: AttentionMask | OrderedMask, dropout: float = 0.0) -> Tensor:
    """Attend by content and distance, in plain torch. Returns context_BTNH.

    Every query must see at least one key. In a Transformer-XL each query sees itself. The scores are multiplied by
    `terms.scale`.
    """
    assert terms.distance_KNH is not None
    assert terms.content_bias_NH is not None
    B, T, N, H = terms.query_BTNH.shape
    K = terms.key_BKNH.shape[1]
    query_NBTH = terms.query_BTNH.permute(2, 0, 1, 3)
    u_N11H = terms.content_bias_NH[:, None, None]
    content_queries = query_NBTH + u_N11H
    content_queries = content_queries.reshape(N * B, T, H)
    position_queries = query_NBTH
    if terms.position_bias_NH is not None:
        v_N11H = terms.position_bias_NH[:, None, None]
        position_queries = query_NBTH + v_N11H
    position_queries = position_queries.reshape(N, B * T, H)

    # Terms (b) and (d), by a product with the distances. The zero column is in front.
    distance_NHK = terms.distance_KNH.permute(1, 2, 0)
    padded_distance = F.pad(distance_NHK, (1, 0))  # [N, H, K+1]
    terms_bd = torch.bmm(position_queries, padded_distance)  # [N, B*T, K+1]
    if terms.distance_bias_KN is not None:
        bias_NK = terms.distance_bias_KN.t()
        padded_bias = F.pad(bias_NK, (1, 0))
        terms_bd = terms_bd + padded_bias[:, None]

    if isinstance(visible, OrderedMask):
        shifted_bd = _select_by_place(terms_bd[..., 1:], visible)
    else:  # The relative shift: the same numbers as [T, K], begun T numbers later.
        flat_bd = terms_bd.view(N * B, T * (K + 1))
        shifted_bd = flat_bd[:, T:].view(N * B, T, K)

    # Terms (a) and (c) are added to them, and the sum is scaled.
    keys = terms.key_BKNH.permute(2, 0, 3, 1).reshape(N * B, H, K)
    value_width = terms.value_BKNH.shape[-1]
    scores = torch.baddbmm(shifted_bd, content_queries, keys, beta=terms.scale, alpha=terms.scale)

    scores_NBTK = scores.view(N, B, T, K)
    scores_NBTK.masked_fill_(~visible.mask(), float("-inf"))
    probabilities = torch.softmax(scores_NBTK, dim=-1, dtype=at_least_fp32(scores.dtype))
    probabilities = probabilities.to(scores.dtype)
    probabilities = F.dropout(probabilities, dropout, training=dropout > 0)
    values = terms.value_BKNH.permute(2, 0, 1, 3).reshape(N * B, K, value_width)
    context = torch.bmm(probabilities.view(N * B, T, K), values)
    return context.view(N, B, T, value_width).permute(1, 2, 0, 3)


def _select_by_place(terms_NRP: Tensor, visible: OrderedMask) -> Tensor:
    """Select, for each row and key, the term of the distance between their positions. Returns [N B, T, K].

    `terms_NRP` holds the terms of all P distances for each of the R = B T rows.
    """
    column_BTK = visible.distance_columns()
    terms_NBTP = terms_NRP.unflatten(1, column_BTK.shape[:2])
    selected_NBTK = terms_NBTP.gather(3, column_BTK.expand(len(terms_NBTP), *column_BTK.shape))
    selected: Tensor = selected_NBTK.flatten(0, 1)
    return selected
