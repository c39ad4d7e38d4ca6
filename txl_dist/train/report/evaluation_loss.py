"""Mean loss over a validation split. Each target token of the split is scored exactly once.

`evaluate_stream` takes a function that computes losses, and the memory (hidden states of earlier segments) with which
the evaluation begins. During training this function runs the engine. In `txl evaluate` it runs a model with a cache of
keys and values. The split is cut into stripes of consecutive text, one per lane (batch row). The stripes do not depend
on the number of ranks. Each stripe begins with the given memory. Evaluation never changes the memories of training.
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
from txl_dist.data.loader.evaluation import EvalStream, EvaluationText
from txl_dist.data.loader.shards import Split
from txl_dist.distributed.collectives import RankInfo, all_reduce_sum, run_on_all_ranks
from txl_dist.model.transformer_xl import Batch
from txl_dist.train.batch import BatchMaker, to_device
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.report.loggers import Record
from txl_dist.train.state import EvaluationPlan

POSITION_BINS = 32
"""Maximum number of parts into which the positions of a segment are grouped, for losses by position."""

State = TypeVar("State")
"""Type of the memory that the function `losses` of `evaluate_stream` takes and returns. The function returns a new
memory, or changes the given memory and returns it."""


class ScoredPart(NamedTuple):
    """Mean loss over a part of the targets: the targets in one cluster of the vocabulary, or the targets at some
    positions of the segments."""

    first: int
    """First token id of the cluster, or first position in the segment."""
    last: int
    """Last token id of the cluster, or last position in the segment."""
    loss: float
    """Mean loss in nats per token. It is NaN if no target was scored."""
    tokens: int
    """Number of scored targets."""


class Means(NamedTuple):
    """Mean losses and accuracy over the scored targets of all ranks, as `LossSums.means` returns them."""

    loss: float
    """Mean loss in nats per token."""
    tokens: int
    """Number of scored targets."""
    accuracy: float | None
    """Share of the scored targets that were the model's most probable token. It is None if it was not measured."""
    accuracy_by_position: list[float]
    """Accuracy for each part of `by_position`: the share of targets that were the model's most probable token. The list
    is empty if accuracy was not measured."""
    by_position: list[ScoredPart]
    """Losses by position in the segment, in at most `POSITION_BINS` parts. They show the effect of more context."""
    by_cluster: list[ScoredPart]
    """Losses by cluster of the vocabulary, in the order of the clusters."""


class Evaluation(NamedTuple):
    """Result of the evaluation of one text: mean losses, units of the text, and duration."""

    means: Means
    units: TextUnits
    """Bytes and characters per token of the text. Bits per byte and bits per character are computed from the loss by
    these numbers."""
    seconds: float
    """Duration of the evaluation in seconds."""

    def numbers(self) -> dict[str, float]:
        """Return the metrics by name, without the losses by position and by cluster.

        Bits per byte and bits per character are included only if the scored tokens are the whole text.
        """
        loss = self.means.loss
        tokens = self.means.tokens
        if self.means.accuracy is None:
            accuracy = {}
        else:
            accuracy = {"accuracy_pct": 100 * self.means.accuracy}
        return {"loss": loss, "tokens": float(tokens), "seconds": self.seconds, **accuracy} | self.units.metrics(loss)

    def record(self, step: int) -> Record:
        """Return the result as a record for the loggers. `step` is the number of steps after which the model was
        evaluated."""
        accuracies = self.means.accuracy_by_position
        clusters = {f"loss_cluster_{index}": part.loss for index, part in enumerate(self.means.by_cluster)}
        return {
            "step": step,
            **self.numbers(),
            "tokens": self.means.tokens,
            **(clusters if len(clusters) > 1 else {}),
            "loss_by_position": [part.loss for part in self.means.by_position],
            **({"accuracy_by_position": accuracies} if accuracies else {}),
        }


class LossSums:
    """Accumulator of losses in nats and of numbers of scored targets. `means` divides the sums.

    There is one sum over all targets, one sum for each position in the segment, and one sum for each cluster of the
    vocabulary. `edges` are the first token id of each cluster, then the vocabulary size.
    """

    def __init__(self, *, segment_len: int, edges: Sequence[int], device: torch.device) -> None:
        self._segment_len = segment_len
        self._edges = edges
        self._total_2X = torch.zeros(2, 1 + segment_len + len(edges) - 1, dtype=torch.float64, device=device)
        self._correct_T: Tensor | None = None

    def add(self, nll_BT: Tensor, batch: Batch, *, correct_BT: Tensor | None = None) -> None:
        """Add the losses of a batch in nats. Only the last `segment_len` positions count, because earlier positions are
        context.

        A batch may have fewer positions than `segment_len`. `correct_BT` is 1 where the target was the most probable
        token, and must be given for all batches or for none.
        """
        if correct_BT is not None:
            if self._correct_T is None:
                self._correct_T = self._total_2X.new_zeros(self._segment_len)
            correct_T = (correct_BT.double() * batch.scored_BT)[:, -self._segment_len :].sum(0)
            self._correct_T += F.pad(correct_T, (0, self._segment_len - len(correct_T)))
        nll_BT, scored_BT, targets_BT = (
            values[:, -self._segment_len :] for values in (nll_BT.double(), batch.scored_BT.double(), batch.targets_BT)
        )
        for row, values_BT in enumerate((nll_BT * scored_BT, scored_BT)):
            clusters = [
                (values_BT * ((targets_BT >= low) & (targets_BT < high))).sum()
                for low, high in itertools.pairwise(self._edges)
            ]
            by_position_T = F.pad(values_BT.sum(0), (0, self._segment_len - values_BT.shape[1]))
            self._total_2X[row] += torch.cat([values_BT.sum()[None], by_position_T, torch.stack(clusters)])

    def means(self) -> Means:
        """Return the means over all added batches of all ranks. All ranks call this method together."""
        nats_X, counts_X = all_reduce_sum(self._total_2X).cpu().numpy()
        position = slice(1, 1 + self._segment_len)
        cluster = slice(1 + self._segment_len, None)
        edges = np.linspace(0, self._segment_len, min(POSITION_BINS, self._segment_len) + 1).astype(int)
        nats_by_position, counts_by_position = (
            np.add.reduceat(sums_X[position], edges[:-1]) for sums_X in (nats_X, counts_X)
        )
        accuracy = None
        accuracy_by_position: list[float] = []
        if self._correct_T is not None:
            correct_T = all_reduce_sum(self._correct_T).cpu().numpy()
            accuracy = float(correct_T.sum()) / max(1.0, counts_X[0])
            correct_by_position = np.add.reduceat(correct_T, edges[:-1])
            accuracy_by_position = (correct_by_position / np.maximum(1.0, counts_by_position)).tolist()
        return Means(
            loss=float(nats_X[0] / max(1.0, counts_X[0])),
            tokens=int(counts_X[0]),
            accuracy=accuracy,
            accuracy_by_position=accuracy_by_position,
            by_position=_parts(edges.tolist(), nats_by_position, counts_by_position),
            by_cluster=_parts(self._edges, nats_X[cluster], counts_X[cluster]),
        )


def _parts(edges: Sequence[int], nats: np.ndarray, counts: np.ndarray) -> list[ScoredPart]:
    """Return the mean loss of each part of the targets, as a `ScoredPart`.

    Part i contains the token ids, or positions, from `edges[i]` to `edges[i + 1] - 1`. `nats` has the sum of the losses
    of each part, and `counts` the number of its targets.
    """
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
    """Compute the mean loss of a text. All ranks call this function together and get the same result.

    `losses` is a function that takes a batch and a memory. It returns nll_BT, the loss of each target in nats, and the
    next memory, computed without gradients. In place of nll_BT it may return score_2BT: the losses, then 1 where the
    target is the most probable token. The first segment gets `memory`.

    `before_segment` is called before each segment. An error that it raises on all ranks together ends the evaluation.
    `after_segment` is called with each batch and its losses. `is_local` says that `losses` does not use collectives. An
    error on one rank is then raised on all ranks.
    """
    start_s = time.perf_counter()
    sums = LossSums(segment_len=stream.segment_len, edges=maker.softmax_edges, device=ranks.device)

    def score() -> None:
        last = memory
        for segment in stream:
            before_segment()
            batch = to_device(maker.batch(segment), ranks.device)
            scores, last = losses(batch, last)
            if scores.dim() == 3:
                nll_BT, correct_BT = scores
            else:
                nll_BT, correct_BT = (scores, None)
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
    """Compute the mean loss of a validation split with the engine's present weights. All ranks call it together.

    `plan` has the lengths and options of the evaluation. `before_segment` is called before each segment, as in
    `evaluate_stream`.
    """
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
