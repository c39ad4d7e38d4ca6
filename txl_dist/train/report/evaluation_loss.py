"""The loss of held-out text: each target scored once, weighted by tokens, with a memory of its own.

`evaluate_stream` takes whatever gives losses and a first memory: live weights in a training, the cached core
afterwards. The split is cut into stripes that every rank count scores alike; each stripe begins with the first memory.
The training memories are not touched: memory is a value.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from txl_dist.data.loader.bits_per_byte import TextUnits, text_units
from txl_dist.data.loader.corpus import Split
from txl_dist.data.loader.evaluation import EvalStream, EvaluationText
from txl_dist.distributed.collectives import RankInfo, all_reduce_sum, run_on_all_ranks
from txl_dist.model.transformer_xl import Batch
from txl_dist.train.batch import BatchMaker, to_device
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.report.loggers import Record
from txl_dist.train.state import EvaluationPlan

POSITION_BINS = 32

State = TypeVar("State")
"""A memory: a value that comes back as another one, or one that is changed in place and comes back itself."""


class ScoredPart(NamedTuple):
    """The loss of some of the targets."""

    first: int
    last: int
    """Of the ids of a cluster, or of the positions in a segment."""
    loss: float
    """Nats per token; NaN where there was none."""
    tokens: int


class Means(NamedTuple):
    """Of the targets that were scored."""

    loss: float
    """Nats per token."""
    tokens: int
    accuracy: float | None
    """Share of them that were the most probable token; None where nobody looked."""
    by_position: list[ScoredPart]
    """In the segment, joined to `POSITION_BINS` parts at most: what context within it brings."""
    by_cluster: list[ScoredPart]
    """Of the vocabulary."""


class Evaluation(NamedTuple):
    """The result over held-out text."""

    means: Means
    units: TextUnits
    """In which the loss may be told."""
    seconds: float

    def numbers(self) -> dict[str, float]:
        """Without the parts; bits per byte and character only where they are the cost of the text."""
        loss, tokens = self.means.loss, self.means.tokens
        accuracy = {} if self.means.accuracy is None else {"accuracy_pct": 100 * self.means.accuracy}
        return {"loss": loss, "tokens": float(tokens), "seconds": self.seconds, **accuracy} | self.units.metrics(loss)

    def record(self, step: int) -> Record:
        """As metrics."""
        clusters = {f"loss_cluster_{index}": part.loss for index, part in enumerate(self.means.by_cluster)}
        return {
            "step": step,
            **self.numbers(),
            "tokens": self.means.tokens,
            **(clusters if len(clusters) > 1 else {}),
            "loss_by_position": [part.loss for part in self.means.by_position],
        }


class LossSums:
    """Nats and targets that were scored: in all, by position in the segment, by cluster of the target."""

    def __init__(self, *, segment_len: int, edges: Sequence[int], device: torch.device) -> None:
        self._segment_len, self._edges = segment_len, edges
        self._total_2X = torch.zeros(2, 1 + segment_len + len(edges) - 1, dtype=torch.float64, device=device)
        self._num_correct: Tensor | None = None

    def add(self, nll_BT: Tensor, batch: Batch, *, correct_BT: Tensor | None = None) -> None:
        """The losses of a batch, of which context before the segment is left out; it may be shorter than others.
        `correct_BT`: 1 where the target was the most probable token, of all batches or none."""
        if correct_BT is not None:
            num_correct = (correct_BT.double() * batch.scored_BT)[:, -self._segment_len :].sum()
            self._num_correct = num_correct if self._num_correct is None else self._num_correct + num_correct
        nll_BT, scored_BT, targets_BT = (
            one[:, -self._segment_len :] for one in (nll_BT.double(), batch.scored_BT.double(), batch.targets_BT)
        )
        for row, values_BT in enumerate((nll_BT * scored_BT, scored_BT)):
            clusters = [
                (values_BT * ((targets_BT >= low) & (targets_BT < high))).sum()
                for low, high in itertools.pairwise(self._edges)
            ]
            by_position_T = F.pad(values_BT.sum(0), (0, self._segment_len - values_BT.shape[1]))
            self._total_2X[row] += torch.cat([values_BT.sum()[None], by_position_T, torch.stack(clusters)])

    def means(self) -> Means:
        """Over all ranks, which call it together."""
        nats_X, counts_X = all_reduce_sum(self._total_2X).cpu().numpy()
        position, cluster = slice(1, 1 + self._segment_len), slice(1 + self._segment_len, None)
        num_correct = None if self._num_correct is None else float(all_reduce_sum(self._num_correct))
        edges = np.linspace(0, self._segment_len, min(POSITION_BINS, self._segment_len) + 1).astype(int)
        by_position = (np.add.reduceat(one[position], edges[:-1]) for one in (nats_X, counts_X))
        return Means(
            loss=float(nats_X[0] / max(1.0, counts_X[0])),
            tokens=int(counts_X[0]),
            accuracy=None if num_correct is None else num_correct / max(1.0, counts_X[0]),
            by_position=_parts(edges.tolist(), *by_position),
            by_cluster=_parts(self._edges, nats_X[cluster], counts_X[cluster]),
        )


def _parts(edges: Sequence[int], nats: np.ndarray, counts: np.ndarray) -> list[ScoredPart]:
    return [
        ScoredPart(first, stop - 1, nat / count if count else math.nan, int(count))
        for (first, stop), nat, count in zip(itertools.pairwise(edges), nats.tolist(), counts.tolist(), strict=True)
    ]


def evaluate_stream(
    losses: Callable[[Batch, State], tuple[Tensor, State]],
    memory: State,
    stream: EvaluationText,
    *,
    maker: BatchMaker,
    units: TextUnits,
    ranks: RankInfo,
    before_segment: Callable[[], None] = lambda: None,
    after_segment: Callable[[Batch, Tensor], None] = lambda batch, nll_BT: None,
    is_local: bool = False,
) -> Evaluation:
    """Score held-out text, beginning with this memory. All ranks call it together and get the same result.

    `losses` gives nll_BT, or score_2BT with 1 for each correct top-1 prediction after it, and the next memory, without
    gradients. What `before_segment` raises, on all ranks together, ends the evaluation; `after_segment` gets each batch
    with its losses. `is_local`: losses are made without the other ranks, so what fails on one of them alone is told to
    all.
    """
    start_s = time.perf_counter()
    sums = LossSums(segment_len=stream.segment_len, edges=maker.softmax_edges, device=ranks.device)

    def score() -> None:
        last = memory
        for segment in stream:
            before_segment()
            batch = to_device(maker.batch(segment), ranks.device)
            scores, last = losses(batch, last)
            nll_BT, correct_BT = scores if scores.dim() == 3 else (scores, None)
            sums.add(nll_BT, batch, correct_BT=correct_BT)
            after_segment(batch, nll_BT)

    run_on_all_ranks(score) if is_local else score()
    return Evaluation(sums.means(), units, time.perf_counter() - start_s)


def evaluate_split(
    engine: Engine,
    split: Split,
    *,
    maker: BatchMaker,
    plan: EvaluationPlan,
    ranks: RankInfo,
    before_segment: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Score a split with live weights by a plan; `before_segment` is that of `evaluate_stream`."""
    stream = EvalStream(
        split,
        num_lanes=plan.num_lanes,
        segment_len=plan.segment_len,
        overlap_len=plan.overlap_len,
        rank=ranks.rank,
        world_size=ranks.world_size,
        max_tokens=plan.max_tokens,
    )
    return evaluate_stream(
        partial(engine.losses, with_top1_correct=True) if plan.with_accuracy else engine.losses,
        engine.empty_memory(num_lanes=len(stream.lanes), memory_len=plan.memory_len),
        stream,
        maker=maker,
        units=text_units([split], mask_documents=maker.mask_documents, max_tokens=plan.max_tokens),
        ranks=ranks,
        before_segment=before_segment,
    )
