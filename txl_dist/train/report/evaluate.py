"""The loss of a held-out split: each target scored once, weighted by tokens, with a memory of its own.

The split is cut into `eval.num_lanes` stripes that every rank count scores alike; each stripe begins with an empty
memory. The training memories are not touched: memory is a value.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from txl_dist.config import Config
from txl_dist.data.read.corpus import Split
from txl_dist.data.read.evaluation import EvalStream
from txl_dist.data.read.units import TextUnits, text_units
from txl_dist.dist import Ranks, all_reduce_sum
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch
from txl_dist.train.batch import BatchMaker, to_device
from txl_dist.train.report.sinks import Record

POSITION_BINS = 32

Losses = Callable[[Batch, Memory], tuple[Tensor, Memory]]


class Evaluation(NamedTuple):
    """The result over a split."""

    loss: float
    """Nats per token."""
    tokens: int
    """Targets that were scored."""
    units: TextUnits
    """In which the loss may be told."""
    seconds: float
    loss_by_position: list[float]
    """Of the targets of a segment, joined to `POSITION_BINS` parts at most: what context within it brings."""
    loss_by_cluster: list[float]
    """Of the targets of each cluster of the vocabulary; NaN where there was none."""

    def numbers(self) -> dict[str, float]:
        """Without the two lists; bits per byte and character only where they are the cost of the text."""
        numbers = {"loss": self.loss, "tokens": float(self.tokens), "seconds": self.seconds}
        return numbers | self.units.told(self.loss)

    def record(self, step: int) -> Record:
        """As metrics."""
        clusters = {f"loss_cluster_{index}": loss for index, loss in enumerate(self.loss_by_cluster)}
        return {
            "step": step,
            **self.numbers(),
            "tokens": self.tokens,
            **(clusters if len(clusters) > 1 else {}),
            "loss_by_position": self.loss_by_position,
        }


class LossSums:
    """Nats and targets that were scored: in all, by position in the segment, by cluster of the target."""

    def __init__(self, *, segment_len: int, edges: Sequence[int], device: torch.device) -> None:
        self._segment_len, self._edges = segment_len, edges
        self._total_2X = torch.zeros(2, 1 + segment_len + len(edges) - 1, dtype=torch.float64, device=device)

    def add(self, nll_BT: Tensor, batch: Batch) -> None:
        """The losses of a batch, of which context before the segment is left out."""
        nll_BT, scored_BT, targets_BT = (
            one[:, -self._segment_len :] for one in (nll_BT.double(), batch.scored_BT.double(), batch.targets_BT)
        )
        for row, values_BT in enumerate((nll_BT * scored_BT, scored_BT)):
            clusters = [
                (values_BT * ((targets_BT >= low) & (targets_BT < high))).sum()
                for low, high in itertools.pairwise(self._edges)
            ]
            self._total_2X[row] += torch.cat([values_BT.sum()[None], values_BT.sum(0), torch.stack(clusters)])

    def means(self) -> tuple[float, int, list[float], list[float]]:
        """(loss, targets, loss by position, loss by cluster) over all ranks, which call it together."""
        nats_X, counts_X = all_reduce_sum(self._total_2X).cpu().numpy()
        position, cluster = slice(1, 1 + self._segment_len), slice(1 + self._segment_len, None)
        starts = np.linspace(0, self._segment_len, min(POSITION_BINS, self._segment_len), endpoint=False).astype(int)
        by_position = _quotients(*(np.add.reduceat(one[position], starts) for one in (nats_X, counts_X)))
        by_cluster = _quotients(nats_X[cluster], counts_X[cluster])
        return float(nats_X[0] / max(1.0, counts_X[0])), int(counts_X[0]), by_position, by_cluster


def _quotients(nats: np.ndarray, counts: np.ndarray) -> list[float]:
    return [nat / count if count else math.nan for nat, count in zip(nats.tolist(), counts.tolist(), strict=True)]


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
    sums = LossSums(segment_len=stream.segment_len, edges=maker.softmax_edges, device=ranks.device)
    for segment in stream:
        before_segment()
        batch = to_device(maker.batch(segment), ranks.device)
        nll_BT, memory = losses(batch, memory)
        sums.add(nll_BT, batch)
    loss, tokens, by_position, by_cluster = sums.means()
    return Evaluation(
        loss=loss,
        tokens=tokens,
        units=text_units([split], mask_documents=maker.mask_documents, max_tokens=config.eval.max_tokens),
        seconds=time.perf_counter() - start_s,
        loss_by_position=by_position,
        loss_by_cluster=by_cluster,
    )
