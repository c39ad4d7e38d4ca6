"""The memories of a run as it begins, and those in a checkpoint, by global lanes, whichever ranks saved them.

A file holds those of some lanes: `hidden` [L, B, M, D], or `hidden.0` [B, M_0, D], `hidden.1` ... where the layers
remember differently, and `document` [B, M].
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from txl_dist.errors import CheckpointError
from txl_dist.model.memory import EMPTY, Memory, attended
from txl_dist.train.checkpoint.fragments import reading
from txl_dist.train.checkpoint.validate import hidden_names, lane_files, lanes_of
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.state import RunContext


def first_memories(engine: Engine, context: RunContext) -> tuple[Memory, ...]:
    """What the lanes of this rank remember before their first token, per micro-batch (`train.initial_memory`)."""
    train = context.config.train
    first = engine.empty_memory(num_lanes=train.microbatch_lanes, memory_len=train.memory_len)
    return (attended(first) if train.initial_memory == "zeros" else first,) * context.plan.num_microbatches


def memory_tensors(memories: Sequence[Memory]) -> dict[str, Tensor]:
    """The content of a file: the lanes of these memories, one after the other."""
    hidden = [torch.cat(parts) for parts in zip(*(memory.hidden for memory in memories), strict=True)]
    document = {"document": torch.cat([memory.document_BM for memory in memories])}
    if len({hidden_BMD.shape for hidden_BMD in hidden}) == 1:
        return {"hidden": torch.stack(hidden), **document}
    return {f"hidden.{layer}": hidden_BMD for layer, hidden_BMD in enumerate(hidden)} | document


def load_memories(folder: Path, *, lanes: range, like: Memory) -> tuple[Memory, ...]:
    """The memories of these lanes per micro-batch, of the lengths, type and device of `like`."""
    whole = resized(load_memory(folder, lanes=lanes), [hidden_BMD.shape[1] for hidden_BMD in like.hidden])
    size = like.document_BM.shape[0]
    return tuple(
        Memory(
            tuple(
                hidden_BMD[start : start + size].contiguous().to(own_BMD)
                for hidden_BMD, own_BMD in zip(whole.hidden, like.hidden, strict=True)
            ),
            whole.document_BM[start : start + size].contiguous().to(like.document_BM),
        )
        for start in range(0, len(lanes), size)
    )


def load_memory(folder: Path, *, lanes: range) -> Memory:
    """The memory of any range of lanes of a checkpoint. Raises CheckpointError if one is missing."""
    hidden: list[list[Tensor]] = []
    document: list[Tensor] = []
    wanted = lanes.start
    for path in lane_files(folder):
        held = lanes_of(path)
        if wanted >= lanes.stop or wanted not in held:
            continue
        rows = slice(wanted - held.start, min(lanes.stop, held.stop) - held.start)
        with reading("the memories", path) as file:
            names = hidden_names(file.keys())
            if names:
                hidden.append([file.get_slice(name)[rows] for name in names])
            else:
                hidden.append(list(file.get_slice("hidden")[:, rows]))
            document.append(file.get_slice("document")[rows])
        wanted = min(lanes.stop, held.stop)
    if wanted < lanes.stop:
        raise CheckpointError(f"{folder}/lanes has no memory of lane {wanted}. Use another checkpoint.")
    return Memory(tuple(torch.cat(parts) for parts in zip(*hidden, strict=True)), torch.cat(document))


def resized(memory: Memory, memory_lens: Sequence[int]) -> Memory:
    """The newest positions of a memory, so many per layer. What it lacks in front is empty; and since a position is
    empty in all layers or in none, so is what one layer lacks of what it must have."""
    lacking = [
        hidden_BMD.shape[1]
        for hidden_BMD, length in zip(memory.hidden, memory_lens, strict=True)
        if hidden_BMD.shape[1] < length
    ]
    known = min(lacking, default=memory.memory_len)
    return Memory(
        tuple(_newest(hidden_BMD, length) for hidden_BMD, length in zip(memory.hidden, memory_lens, strict=True)),
        _newest(_newest(memory.document_BM, known), max(memory_lens), missing=EMPTY),
    )


def _newest(positions: Tensor, length: int, *, missing: float = 0.0) -> Tensor:
    """So many along the second axis; in front of them what stands for missing ones."""
    held = min(length, positions.shape[1])
    in_front = (*(0, 0) * (positions.dim() - 2), length - held, 0)
    return F.pad(positions[:, positions.shape[1] - held :], in_front, value=missing)
