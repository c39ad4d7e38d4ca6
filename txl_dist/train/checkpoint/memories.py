"""The memories (cached hidden states) of lanes, which are batch rows: for a new run, and in the files of a checkpoint.

Checkpoints store memories by lane and not by rank, so another number of ranks can read them. A file has the memories of
some lanes: `hidden` [L, B, M, D] and `document` [B, M]. Here L is the number of layers, B the number of lanes, M the
memory length and D the width. If the layers have different memory lengths, the file has `hidden.0` [B, M_0, D],
`hidden.1` and so on instead of `hidden`. If the engine pads hidden states (`engine.pad_widths`), files contain no
padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from txl_dist.config.load import BatchPlan
from txl_dist.errors import CheckpointError
from txl_dist.model.layer_norm import with_zero_columns
from txl_dist.model.memory import EMPTY, Memory, attended
from txl_dist.train.checkpoint.fragments import reading
from txl_dist.train.checkpoint.validate import hidden_names, lane_files, lanes_of
from txl_dist.train.engine.protocol import Engine


def first_memories(engine: Engine, plan: BatchPlan, *, memory_len: int, initial: str) -> tuple[Memory, ...]:
    """Return the memories (cached hidden states) with which this rank's lanes (batch rows) begin a new run, one memory
    per micro-batch.

    `memory_len` and `initial` are the settings `train.memory_len` and `train.initial_memory`.
    """
    memory = engine.empty_memory(num_lanes=plan.microbatch_lanes, memory_len=memory_len)
    if initial == "zeros":
        memory = attended(memory)
    return (memory,) * plan.num_microbatches


def memory_tensors(memories: Sequence[Memory], *, width: int) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint file that stores these memories, joined along the lanes (batch rows) in order.

    `width` is the model width D. Columns after it are padding, and are not stored.
    """
    hidden_of_memories = [memory.hidden for memory in memories]
    hidden = []
    for parts in zip(*hidden_of_memories, strict=True):
        hidden.append(torch.cat([hidden_BMD[..., :width] for hidden_BMD in parts]))
    document_BM = torch.cat([memory.document_BM for memory in memories])
    shapes = {hidden_BMD.shape for hidden_BMD in hidden}
    if len(shapes) == 1:
        tensors = {"hidden": torch.stack(hidden)}
    else:
        tensors = {f"hidden.{layer}": hidden_BMD for layer, hidden_BMD in enumerate(hidden)}
    return tensors | {"document": document_BM}


def load_memories(folder: Path, *, lanes: range, like: Memory) -> tuple[Memory, ...]:
    """Read the memories of these lanes from a checkpoint, one memory per micro-batch.

    The results have the same lengths, type, device and padding as the memory `like`.
    """
    memory_lens = [hidden_BMD.shape[1] for hidden_BMD in like.hidden]
    memory = resized(load_lane_memory(folder, lanes=lanes), memory_lens)
    microbatch_lanes = like.document_BM.shape[0]
    memories = []
    for start in range(0, len(lanes), microbatch_lanes):
        rows = slice(start, start + microbatch_lanes)
        hidden = []
        for hidden_BMD, like_BMD in zip(memory.hidden, like.hidden, strict=True):
            padded_BMD = with_zero_columns(hidden_BMD[rows], like_BMD.shape[-1])
            hidden.append(padded_BMD.contiguous().to(like_BMD))
        document_BM = memory.document_BM[rows].contiguous().to(like.document_BM)
        memories.append(Memory(tuple(hidden), document_BM))
    return tuple(memories)


def load_lane_memory(folder: Path, *, lanes: range) -> Memory:
    """Read the memory of any range of lanes from a checkpoint, as one memory. Raises CheckpointError if a lane is
    missing."""
    hidden: list[list[Tensor]] = []
    document: list[Tensor] = []
    next_lane = lanes.start
    for path in lane_files(folder):
        file_lanes = lanes_of(path)
        if next_lane >= lanes.stop or next_lane not in file_lanes:
            continue
        stop = min(lanes.stop, file_lanes.stop)
        rows = slice(next_lane - file_lanes.start, stop - file_lanes.start)
        with reading("the memories", path) as file:
            names = hidden_names(file.keys())
            if names:
                hidden.append([file.get_slice(name)[rows] for name in names])
            else:
                hidden.append(list(file.get_slice("hidden")[:, rows]))
            document.append(file.get_slice("document")[rows])
        next_lane = stop
    if next_lane < lanes.stop:
        raise CheckpointError(
            f"{folder}/lanes contains no memory of lane (batch row) {next_lane}. Use another checkpoint."
        )
    return Memory(tuple(torch.cat(parts) for parts in zip(*hidden, strict=True)), torch.cat(document))


def resized(memory: Memory, memory_lens: Sequence[int]) -> Memory:
    """Return the newest positions of a memory, `memory_lens[i]` positions in layer i. Positions that are missing are
    empty in the result.

    A position is empty in all layers or in none. So a position that one layer lacks becomes empty in all layers.
    """
    num_known = memory.memory_len
    hidden = []
    for hidden_BMD, length in zip(memory.hidden, memory_lens, strict=True):
        layer_len = hidden_BMD.shape[1]
        if layer_len < length:
            num_known = min(num_known, layer_len)
        hidden.append(_newest(hidden_BMD, length))
    document_BM = _newest(memory.document_BM, num_known)
    return Memory(tuple(hidden), _newest(document_BM, max(memory_lens), missing=EMPTY))


def _newest(positions: Tensor, length: int, *, missing: float = 0.0) -> Tensor:
    """Return the last `length` positions along a tensor's second axis. If the tensor has fewer positions, the value
    `missing` fills the front."""
    num_kept = min(length, positions.shape[1])
    num_missing = length - num_kept
    newest = positions[:, positions.shape[1] - num_kept :]
    later_axes = [0, 0] * (positions.dim() - 2)
    return F.pad(newest, [*later_axes, num_missing, 0], value=missing)
