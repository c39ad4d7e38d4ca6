"""The recurrent memory as a value (Dai et al. 2019, section 3.2).

A `Memory` holds the last M inputs of every layer for every lane of a batch, and for each of these positions the
document it came from. Its shape is static from the first step: a position that holds nothing yet has document
`EMPTY` and is masked out of attention, never attended as zeros. The model owns no memory: whoever runs it passes
one in and gets the next one back, so training, evaluation and generation cannot disturb each other.

Shapes: L layers, B lanes, M memory length, T segment length, K = M + T, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

EMPTY = -1


class Memory(NamedTuple):
    """What every lane remembers. Never requires a gradient."""

    hidden: tuple[Tensor, ...]
    """hidden_BMD of each layer: its input at the last positions, oldest first. Layers may remember fewer than M."""
    document_BM: Tensor
    """int64: document of each of the last M positions, or EMPTY."""

    @property
    def memory_len(self) -> int:
        """M, in tokens: of the layers that remember most."""
        return self.document_BM.shape[1]

    def append(self, hidden_BTD: Sequence[Tensor], *, document_BT: Tensor) -> Memory:
        """The memory after a segment: its positions follow ours and the oldest fall out (paper, eq. of 3.2).

        `hidden_BTD` are the inputs of the layers. Every position of the new memory is written once, and nothing else.
        """
        num_tokens = document_BT.shape[1]
        hidden = tuple(torch.empty_like(old_BMD) for old_BMD in self.hidden)
        places, values = list[Tensor](), list[Tensor]()
        for old_BMD, new_BMD, given_BTD in zip(self.hidden, hidden, hidden_BTD, strict=True):
            num_kept = max(0, old_BMD.shape[1] - num_tokens)
            num_new = old_BMD.shape[1] - num_kept
            if num_kept:
                places.append(new_BMD[:, :num_kept])
                values.append(old_BMD[:, num_new:])
            places.append(new_BMD[:, num_kept:])
            values.append(given_BTD.detach()[:, num_tokens - num_new :])
        torch._foreach_copy_(places, values)
        num_new = min(self.memory_len, num_tokens)
        document_BM = torch.cat([self.document_BM[:, num_new:], document_BT[:, num_tokens - num_new :]], dim=1)
        return Memory(hidden, document_BM)


def empty_memory(memory_lens: Sequence[int], *, num_lanes: int, width: int, like: Tensor) -> Memory:
    """A memory that holds nothing, of so many tokens per layer, of the type and on the device of a weight, say."""
    document_BM = torch.full((num_lanes, max(memory_lens)), EMPTY, dtype=torch.int64, device=like.device)
    return Memory(tuple(like.new_zeros(num_lanes, length, width) for length in memory_lens), document_BM)


def attended(memory: Memory) -> Memory:
    """The same memory with every position visible: an empty one becomes zeros that are attended, as Hugging Face and
    the TensorFlow code begin. Only without document masks, where every token's document is 0."""
    return memory._replace(document_BM=torch.zeros_like(memory.document_BM))


class AttentionMask(NamedTuple):
    """Which keys each query may see: query i sees key j if j <= i + M, both are of one document, and, where the
    attended length is fixed, j is none of the oldest i keys."""

    query_document_BT: Tensor
    key_document_BK: Tensor
    """Of the memory, then of the segment itself. EMPTY equals no document; without borders all documents are 0."""
    oldest: int | None
    """None, or the first key that query 0 sees; query i begins i keys later."""

    @property
    def num_keys(self) -> int:
        """K = M + T."""
        return self.key_document_BK.shape[1]

    @property
    def memory_len(self) -> int:
        """M, in tokens."""
        return self.num_keys - self.query_document_BT.shape[1]

    def of_memory(self, memory_len: int) -> AttentionMask:
        """For a layer that remembers only the last so many of the M positions."""
        if memory_len == self.memory_len:
            return self
        return self._replace(key_document_BK=self.key_document_BK[:, self.memory_len - memory_len :])

    def mask(self, start: int = 0, stop: int | None = None) -> Tensor:
        """mask_BTK of the queries [start, stop), True where a key is seen. Keys are those up to the last one that
        query stop - 1 may see: [0, M + stop)."""
        stop = self.query_document_BT.shape[1] if stop is None else stop
        num_keys = self.memory_len + stop
        query_T1 = torch.arange(start, stop, device=self.key_document_BK.device)[:, None]
        key_1K = torch.arange(num_keys, device=self.key_document_BK.device)[None, :]
        near_TK = key_1K <= query_T1 + self.memory_len
        if self.oldest is not None:
            near_TK = near_TK & (key_1K >= query_T1 + self.oldest)
        query_BT1 = self.query_document_BT[:, start:stop, None]
        return (self.key_document_BK[:, None, :num_keys] == query_BT1) & near_TK


def build_mask(
    memory: Memory, document_BT: Tensor, *, same_length: Literal["off", "memory", "memory_and_self"] = "off"
) -> AttentionMask:
    """What a segment may see of the memory and of itself.

    `same_length` gives every query exactly M keys, itself included (memory), or M + 1 (memory_and_self), instead of
    M + 1 + i.
    """
    oldest = {"off": None, "memory": 1, "memory_and_self": 0}[same_length]
    return AttentionMask(document_BT, torch.cat([memory.document_BM, document_BT], dim=1), oldest)
