"""Measurements of the effect of the memory on a few segments of a validation split.

The memory holds the hidden states of earlier segments. For each layer two values are measured. The first value is the
size of these hidden states. The second value is the share of the attention that goes to the memory and not to the
present segment. For the whole model there are the losses by position in the segment, with the memory and with an empty
memory. The measurement costs one forward pass over each segment that fills the memory, and two passes over each of the
next `NUM_SEGMENTS` segments.

To measure the share, attention runs once more with other values: 1 for the keys of the memory, 0 for the keys of the
segment. So the measurement works with every implementation of attention, including kernels that never store the
probabilities.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from txl_dist.data.loader.evaluation import EvalStream
from txl_dist.data.loader.shards import Split
from txl_dist.distributed.collectives import RankInfo, all_reduce_sum
from txl_dist.model.attention import Attention
from txl_dist.model.memory import EMPTY, AttentionMask, Memory
from txl_dist.model.relative_attention import Terms
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.train.batch import BatchMaker, to_device
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.report.evaluation_loss import LossSums
from txl_dist.train.report.loggers import Record

NUM_SEGMENTS = 4
"""Number of segments of each lane (batch row) that are measured."""


def measure_memory(
    engine: Engine,
    split: Split,
    *,
    maker: BatchMaker,
    num_lanes: int,
    segment_len: int,
    memory_len: int,
    ranks: RankInfo,
    step: int,
    before_segment: Callable[[], None] = lambda: None,
) -> Record | None:
    """Measure the effect of the memory on a validation split, and return its record. All ranks call it together.

    Returns None if the split is too short to fill any part of the memory. The split is cut into `num_lanes` stripes,
    which are read in segments of `segment_len` tokens with a memory of `memory_len` tokens. Padding does not count, so
    the record does not depend on the number of ranks.

    `before_segment` is called before each segment. An error that it raises on all ranks together ends the measurement.
    """
    start_s = time.perf_counter()
    stream = EvalStream(
        split,
        num_lanes=num_lanes,
        segment_len=segment_len,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    # After these segments the memory is full, if the split is long enough.
    num_before = min(-(-memory_len // segment_len), max(0, len(stream) - NUM_SEGMENTS))
    empty = engine.empty_memory(num_lanes=len(stream.lanes), memory_len=memory_len)
    with_memory, without = (
        LossSums(segment_len=stream.segment_len, edges=maker.softmax_edges, device=ranks.device) for _ in range(2)
    )
    memory = empty
    squares = list[Tensor]()
    attended = _AttentionWatch()
    for index, segment in zip(range(num_before + NUM_SEGMENTS), stream, strict=False):
        before_segment()
        batch = to_device(maker.batch(segment), ranks.device)
        if index < num_before:
            _, memory = engine.losses(batch, memory)
            continue
        squares.append(_squares(memory, width=engine.model.section.width, scored_BT=batch.scored_BT))
        with attended.over(engine.model, scored_BT=batch.scored_BT):
            nll_BT, after = engine.losses(batch, memory)
        with_memory.add(nll_BT, batch)
        without.add(engine.losses(batch, empty)[0], batch)
        memory = after
    remembering = with_memory.means()
    forgetting = without.means()
    counts_L, squares_L = all_reduce_sum(torch.stack(squares).sum(0)).tolist()
    num_seen, *shares_L = all_reduce_sum(attended.sums()).tolist()
    if not any(counts_L):
        return None
    return {
        "step": step,
        "seconds": time.perf_counter() - start_s,
        "tokens": remembering.tokens,
        "memory_gain": forgetting.loss - remembering.loss,
        **{
            f"memory_norm_{layer}": math.sqrt(square / max(1.0, count))
            for layer, (square, count) in enumerate(zip(squares_L, counts_L, strict=True))
        },
        **{f"memory_attention_pct_{layer}": 100 * share / num_seen for layer, share in enumerate(shares_L)},
        "loss_by_position": [part.loss for part in remembering.by_position],
        "loss_by_position_without_memory": [part.loss for part in forgetting.by_position],
    }


def _squares(memory: Memory, *, width: int, scored_BT: Tensor) -> Tensor:
    """Return [2, L], two numbers for each layer: the number of filled positions of its memory, and the sum of these
    positions' mean squares.

    Only lanes (batch rows) that score a token in this segment count. `width` is the model width. Columns after it are
    padding.
    """
    is_filled_BM = (memory.document_BM > EMPTY) & (scored_BT.sum(1, keepdim=True) > 0)
    counts = []
    squares = []
    for hidden_BMD in memory.hidden:
        layer_filled_BM = is_filled_BM[:, memory.memory_len - hidden_BMD.shape[1] :]
        counts.append(layer_filled_BM.sum().double())
        squares.append((hidden_BMD[..., :width].double().square().mean(-1) * layer_filled_BM).sum())
    return torch.stack([torch.stack(counts), torch.stack(squares)])


class _AttentionWatch:
    """Accumulator of the share of attention that goes to the memory: one sum over the scored queries for each layer."""

    def __init__(self) -> None:
        self._shares: dict[int, Tensor] = {}
        self._num_scored: Tensor | float = 0.0

    def sums(self) -> Tensor:
        """Return [1 + L]: the number of scored queries, then for each layer the sum of the queries' shares."""
        shares_L = torch.stack([share for _, share in sorted(self._shares.items())])
        return torch.cat([torch.as_tensor(self._num_scored).to(shares_L)[None], shares_L])

    @contextmanager
    def over(self, model: TransformerXL, *, scored_BT: Tensor) -> Iterator[None]:
        """Return a context manager that measures the attention layers of a model in its block. The block must run the
        model once, without gradients."""
        layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
        self._num_scored = self._num_scored + scored_BT.double().sum()
        try:
            for index, layer in enumerate(layers):
                layer.attend = self._watched(index, layer.attend, scored_BT)  # type: ignore[method-assign]
            yield
        finally:
            for layer in layers:
                del layer.attend

    def _watched(self, index: int, attend: Callable[..., Tensor], scored_BT: Tensor) -> Callable[..., Tensor]:
        """Return a function that measures the share of attention on the memory and then calls the layer's own
        `attend`."""

        def watched(terms: Terms, *, visible: AttentionMask) -> Tensor:
            is_memory = torch.zeros_like(terms.value_BKNH)
            is_memory[:, : visible.memory_len] = 1.0
            share_BT = attend(terms._replace(value_BKNH=is_memory), visible=visible).double().mean((2, 3))
            self._shares[index] = self._shares.get(index, 0.0) + (share_BT * scored_BT).sum()
            return attend(terms, visible=visible)

        return watched
