"""Attention in any order (XLNet, Yang et al. 2019): which positions of a segment each row of a layer may see.

XLNet predicts some tokens of a segment, the targets, in a random order. The text keeps its order. Only the attention
mask follows the random order. A layer computes two streams with the same weights:

    content rows   One row per token of the segment, h of the paper. A content row sees its own token.
    query rows     One row per target, g of the paper. A query row knows the place of its target, but not the token.
                   No row sees a query row. So keys and values exist for content rows only.

Two integers per position replace a mask of T x T numbers. Position i sees position j if the key level of j is below the
query level of i. A content row also sees itself. A memory has the key level -1, which all positions see. Causal order
has the key levels j and the query levels j + 1. Prediction from left to right by query rows has the levels j and j.

Shapes: B lanes, T segment, m targets, Q = T + m rows, M memory, K = M + T keys, P = K + T - 1 distances.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from txl_dist.model.memory import Memory

NUM_SEGMENT_TYPES = 5
"""Number of segment types: first text, second text, classification token, separator, padding."""
MEMORY_LEVEL = -1
"""Key level of all positions of a memory. Every query level is above it."""


class PredictionOrder(NamedTuple):
    """Order in which the targets of a segment are predicted. It is an argument of `TransformerXL.forward`."""

    query_level_BT: Tensor
    """Level of each position as a query, int64 and at least 0. A query sees the keys whose key level is below its own
    level. The query row of a target has the level of its place."""
    key_level_BT: Tensor
    """Level of each position as a key, int64. Queries with a higher level see the key."""
    place_Bm: Tensor
    """Positions of the targets in the segment, int64. There is a query row for each of them."""
    reuse_len: int
    """Number R of positions that the memory stores, from the first position on. The next segment begins after them."""
    type_BT: Tensor | None = None
    """Number of the text (first or second text of a pair, separator) to which each token belongs, int64 from 0 to 4, as
    in BERT's token types. Tokens of a memory have type 0. The field is None if the model does not score by token
    type."""


class OrderedMask(NamedTuple):
    """Mask that says which keys each row may see, in any order. It has the methods of `AttentionMask`."""

    query_document_BQ: Tensor
    key_document_BK: Tensor
    """Document of each key: first of the memory, then of the segment. A key whose document is EMPTY is never seen."""
    query_level_BQ: Tensor
    key_level_BK: Tensor
    place_BQ: Tensor
    """Position of each row in the segment."""
    segment_len: int
    """Number T of positions in the segment."""
    num_content_rows: int
    """Number of rows at the beginning that see themselves. The other rows are query rows."""
    row_type_BQ: Tensor | None = None
    """Number of the text (first or second text of a pair, separator) to which each row belongs, as in BERT's token
    types. It is None if the model does not score by token type."""
    key_type_BK: Tensor | None = None
    """Number of the text to which each key belongs, as in `row_type_BQ`. It is None if the model does not score by
    token type."""

    @property
    def num_keys(self) -> int:
        """Number of keys K = M + T, in tokens."""
        return self.key_document_BK.shape[1]

    @property
    def memory_len(self) -> int:
        """Length M of the memory, in tokens."""
        return self.num_keys - self.segment_len

    @property
    def num_distances(self) -> int:
        """Number P of the distances K-1 ... 1-T. The distance to a key after the row's position is negative."""
        return self.num_keys + self.segment_len - 1

    def content(self) -> OrderedMask:
        """Return the mask of the content rows."""
        return self._rows(slice(0, self.num_content_rows), num_content_rows=self.num_content_rows)

    def queries(self) -> OrderedMask:
        """Return the mask of the query rows."""
        return self._rows(slice(self.num_content_rows, None), num_content_rows=0)

    def _rows(self, rows: slice, *, num_content_rows: int) -> OrderedMask:
        row_type_BQ = self.row_type_BQ
        if row_type_BQ is not None:
            row_type_BQ = row_type_BQ[:, rows]
        return self._replace(
            query_document_BQ=self.query_document_BQ[:, rows],
            query_level_BQ=self.query_level_BQ[:, rows],
            place_BQ=self.place_BQ[:, rows],
            num_content_rows=num_content_rows,
            row_type_BQ=row_type_BQ,
        )

    def of_memory(self, memory_len: int) -> OrderedMask:
        """Return the mask of a layer that remembers only the last `memory_len` of the M positions."""
        num_dropped = self.memory_len - memory_len
        if num_dropped == 0:
            return self
        key_type_BK = self.key_type_BK
        if key_type_BK is not None:
            key_type_BK = key_type_BK[:, num_dropped:]
        return self._replace(
            key_document_BK=self.key_document_BK[:, num_dropped:],
            key_level_BK=self.key_level_BK[:, num_dropped:],
            key_type_BK=key_type_BK,
        )

    def mask(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Build mask_BQK for the rows [start, stop). It is True where a row sees a key. The mask contains all K
        keys."""
        rows = slice(start, stop)
        device = self.key_level_BK.device
        key_K = torch.arange(self.num_keys, device=device)
        row_Q = torch.arange(self.place_BQ.shape[1], device=device)[rows]
        place_BQ1 = self.place_BQ[:, rows, None]
        is_before_BQK = self.key_level_BK[:, None] < self.query_level_BQ[:, rows, None]
        is_content_Q1 = (row_Q < self.num_content_rows)[:, None]
        is_itself_BQK = (key_K == place_BQ1 + self.memory_len) & is_content_Q1
        is_same_document_BQK = self.key_document_BK[:, None] == self.query_document_BQ[:, rows, None]
        return (is_before_BQK | is_itself_BQK) & is_same_document_BQK

    def distance_columns(self) -> Tensor:
        """Return the index, among the P distances, of the distance between each row and key. The shape is [B, Q, K]."""
        key_K = torch.arange(self.num_keys, device=self.place_BQ.device)
        return self.segment_len - 1 - self.place_BQ[:, :, None] + key_K


def build_ordered_mask(memory: Memory, document_BT: Tensor, order: PredictionOrder) -> OrderedMask:
    """Build the mask of a segment whose targets are predicted in an order.

    The rows are the T content rows, then the m query rows.
    """
    num_tokens = document_BT.shape[1]
    position_BT = torch.arange(num_tokens, device=document_BT.device).expand_as(document_BT)
    memory_level_BM = torch.full_like(memory.document_BM, MEMORY_LEVEL)
    row_type_BQ = None
    key_type_BK = None
    if order.type_BT is not None:
        row_type_BQ = with_targets(order.type_BT, order.place_Bm)
        key_type_BK = torch.cat([torch.zeros_like(memory.document_BM), order.type_BT], dim=1)
    return OrderedMask(
        query_document_BQ=with_targets(document_BT, order.place_Bm),
        key_document_BK=torch.cat([memory.document_BM, document_BT], dim=1),
        query_level_BQ=with_targets(order.query_level_BT, order.place_Bm),
        key_level_BK=torch.cat([memory_level_BM, order.key_level_BT], dim=1),
        place_BQ=torch.cat([position_BT, order.place_Bm], dim=1),
        segment_len=num_tokens,
        num_content_rows=num_tokens,
        row_type_BQ=row_type_BQ,
        key_type_BK=key_type_BK,
    )


def with_targets(values_BT: Tensor, place_Bm: Tensor) -> Tensor:
    """Append each target's value to the values of a segment. Returns [B, T + m]."""
    return torch.cat([values_BT, values_BT.gather(1, place_Bm)], dim=1)
