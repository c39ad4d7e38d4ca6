"""The recurrent memory as a value (Dai et al. 2019, section 3.2).

A `Memory` holds the last M inputs of every layer for every lane (row) of a batch. It also holds the document of each of
these positions. The memory's shape is fixed from the first step. A position that holds nothing yet has the document
`EMPTY`, and attention ignores it. The model owns no memory. Its caller passes a memory in and receives the next memory.
So training, evaluation and generation cannot disturb each other.

Shapes: L layers, B lanes, M memory length, T segment length, K = M + T, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

EMPTY = -1
"""Document number of a position that holds no token yet."""


class Memory(NamedTuple):
    """Hidden states that the network remembers from earlier segments, for every lane (row) of a batch.

    A caller passes a memory to the model with a segment, and gets the next memory back. The tensors never require a
    gradient.
    """

    hidden: tuple[Tensor, ...]
    """Inputs hidden_BMD of each layer at the last positions, the oldest first. Some layers may remember fewer than M
    positions."""
    document_BM: Tensor
    """Document number of each of the last M positions, int64, or EMPTY."""

    @property
    def memory_len(self) -> int:
        """Length M of the memory in tokens. Single layers can remember fewer than M tokens."""
        return self.document_BM.shape[1]

    def append(self, hidden_BTD: Sequence[Tensor], *, document_BT: Tensor) -> Memory:
        """Return the memory after a segment.

        The segment's positions are appended, and the oldest are dropped (Dai et al. 2019, section 3.2). `hidden_BTD`
        holds the inputs of the layers, one tensor per layer. Every position of the new memory is written at most once:
        if a layer remembers exactly one segment, its input is its new memory, without a copy. So neither may be changed
        in place.
        """
        num_tokens = document_BT.shape[1]
        hidden: list[Tensor] = []
        places: list[Tensor] = []
        values: list[Tensor] = []
        for old_BMD, input_BTD in zip(self.hidden, hidden_BTD, strict=True):
            newest_BTD = input_BTD.detach()
            if _is_like(newest_BTD, old_BMD):
                hidden.append(newest_BTD)
                continue
            new_BMD = torch.empty_like(old_BMD)
            hidden.append(new_BMD)
            layer_len = old_BMD.shape[1]
            num_kept = max(0, layer_len - num_tokens)
            num_new = layer_len - num_kept
            if num_kept:
                places.append(new_BMD[:, :num_kept])
                values.append(old_BMD[:, num_new:])
            places.append(new_BMD[:, num_kept:])
            values.append(newest_BTD[:, num_tokens - num_new :])
        if places:
            torch._foreach_copy_(places, values)
        num_new = min(self.memory_len, num_tokens)
        kept_documents = self.document_BM[:, num_new:]
        new_documents = document_BT[:, num_tokens - num_new :]
        document_BM = torch.cat([kept_documents, new_documents], dim=1)
        return Memory(tuple(hidden), document_BM)


def _is_like(newest_BTD: Tensor, old_BMD: Tensor) -> bool:
    """Return whether the positions of a segment have the shape, the type and the layout of a layer's memory."""
    is_same = newest_BTD.shape == old_BMD.shape and newest_BTD.dtype == old_BMD.dtype
    return is_same and newest_BTD.is_contiguous()


def empty_memory(memory_lens: Sequence[int], *, num_lanes: int, width: int, like: Tensor) -> Memory:
    """Make a memory that contains no token yet. Its tensors have the type and the device of `like`.

    `memory_lens` holds the number of tokens that each layer remembers.
    """
    longest = max(memory_lens)
    document_BM = torch.full((num_lanes, longest), EMPTY, dtype=torch.int64, device=like.device)
    hidden = tuple(like.new_zeros(num_lanes, length, width) for length in memory_lens)
    return Memory(hidden, document_BM)


def attended(memory: Memory) -> Memory:
    """Return the memory with every position visible. Queries then also attend to the empty positions, which hold zeros.

    Hugging Face's model and the TensorFlow code begin with such a memory. All positions get the document 0. So the
    function works only without document masks, where all tokens have document 0.
    """
    return memory._replace(document_BM=torch.zeros_like(memory.document_BM))


class AttentionMask(NamedTuple):
    """Mask that says which keys each query may see. The attention functions take it.

    Query i sees key j if j <= i + M and query and key belong to one document. If the attended length is fixed
    (`same_length`), query i does not see keys before `oldest` + i.
    """

    query_document_BT: Tensor
    key_document_BK: Tensor
    """Document of each key: first of the memory, then of the segment. A key whose document is EMPTY is never seen.
    Without document masks all documents are 0."""
    oldest: int | None
    """First key that query 0 sees, if the attended length is fixed, else None. The first key of query i is i keys
    later."""

    @property
    def num_keys(self) -> int:
        """Number of keys K = M + T, in tokens."""
        return self.key_document_BK.shape[1]

    @property
    def segment_len(self) -> int:
        """Number T of positions in the segment."""
        return self.query_document_BT.shape[1]

    @property
    def memory_len(self) -> int:
        """Length M of the memory, in tokens."""
        return self.num_keys - self.segment_len

    @property
    def num_distances(self) -> int:
        """Number of the distances K-1 ... 0 between queries and the keys that they may see."""
        return self.num_keys

    def of_memory(self, memory_len: int) -> AttentionMask:
        """Return the mask of a layer that remembers only the last `memory_len` of the M positions."""
        if memory_len == self.memory_len:
            return self
        return self._replace(key_document_BK=self.key_document_BK[:, self.memory_len - memory_len :])

    def mask(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Build mask_BTK for the queries [start, stop). It is True where a query sees a key.

        The mask has the keys [0, M + stop). The last of these queries, stop - 1, sees no later key.
        """
        if stop is None:
            stop = self.query_document_BT.shape[1]
        num_keys = self.memory_len + stop
        device = self.key_document_BK.device
        query_T1 = torch.arange(start, stop, device=device)[:, None]
        key_1K = torch.arange(num_keys, device=device)[None, :]
        near_TK = key_1K <= query_T1 + self.memory_len
        if self.oldest is not None:
            near_TK = near_TK & (key_1K >= query_T1 + self.oldest)
        query_BT1 = self.query_document_BT[:, start:stop, None]
        key_B1K = self.key_document_BK[:, None, :num_keys]
        return (key_B1K == query_BT1) & near_TK


def build_mask(
    memory: Memory, document_BT: Tensor, *, same_length: Literal["off", "memory", "memory_and_self"] = "off"
) -> AttentionMask:
    """Build the mask of a segment whose queries see the memory and the segment itself.

    With `same_length` every query sees equally many keys, itself included: M keys for "memory", or M + 1 keys for
    "memory_and_self". For "off" query i sees M + 1 + i keys.
    """
    oldest = {"off": None, "memory": 1, "memory_and_self": 0}[same_length]
    key_document_BK = torch.cat([memory.document_BM, document_BT], dim=1)
    return AttentionMask(document_BT, key_document_BK, oldest)
