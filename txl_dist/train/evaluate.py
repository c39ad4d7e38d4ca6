"""The loss of a held-out split: each target scored once, weighted by tokens, with a memory of its own.

The split is cut into `eval.num_lanes` stripes that every rank count scores alike; each stripe begins with an empty
memory. The training memories are not touched: memory is a value.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from txl_dist.config import Config
from txl_dist.data.corpus import Split
from txl_dist.data.evaluation import EvalStream
from txl_dist.dist import Ranks, all_reduce_sum
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch
from txl_dist.train.batch import BatchMaker, to_device

Losses = Callable[[Batch, Memory], tuple[Tensor, Memory]]


class Evaluation(NamedTuple):
    """The result over a split."""

    loss: float
    """Nats per token."""
    tokens: int
    """Targets that were scored."""
    bits_per_byte: float
    bits_per_character: float
    seconds: float

    def record(self, step: int) -> dict[str, float]:
        """As metrics."""
        return {"step": step, **self._asdict(), "ppl": math.exp(min(self.loss, 700.0))}


def evaluate(
    losses: Losses,
    empty_memory: Callable[..., Memory],
    split: Split,
    *,
    maker: BatchMaker,
    config: Config,
    ranks: Ranks,
    memory_len: int | None = None,
    before_segment: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Score a held-out split. All ranks call it together and get the same result.

    `losses` gives nll_BT and the next memory without gradients; `memory_len` overrides the configuration. What
    `before_segment` raises, on all ranks together, ends the evaluation.
    """
    start_s = time.perf_counter()
    if memory_len is None:
        memory_len = config.train.memory_len if config.eval.memory_len < 0 else config.eval.memory_len
    stream = EvalStream(
        split,
        num_lanes=config.eval.num_lanes,
        segment_len=config.eval.segment_len or config.train.segment_len,
        overlap_len=config.eval.overlap_len,
        rank=ranks.rank,
        world_size=ranks.world_size,
        max_tokens=config.eval.max_tokens,
    )
    memory = empty_memory(num_lanes=len(stream.lanes), memory_len=memory_len)
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for segment in stream:
        before_segment()
        batch = to_device(maker.batch(segment), ranks.device)
        nll_BT, memory = losses(batch, memory)
        total += torch.stack([(nll_BT.double() * batch.scored_BT).sum(), batch.scored_BT.sum().double()])
    nats, count = all_reduce_sum(total).tolist()
    loss = nats / max(1.0, count)
    bits = split.bits_per_unit(loss)
    return Evaluation(loss=loss, tokens=int(count), **bits, seconds=time.perf_counter() - start_s)
