"""Validation loss of XLNet's objective: mean loss in nats per predicted token, over fixed random orders.

Which tokens are predicted, and in which order, depends on the position in the split and on the number of the order. The
choice does not depend on the run's seed, so losses of runs can be compared. Only a part of the text is predicted. So
the loss has no bits per byte, and it depends on the number of predicted tokens. Tokens that are predicted later in an
order see more of the segment, so their loss should be lower.

Shape suffixes: T tokens of a segment, m predicted tokens (targets).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from torch import Tensor

from txl_dist.config.schema import TrainSection
from txl_dist.console.formatting import counted
from txl_dist.data.loader.bits_per_byte import text_units
from txl_dist.data.loader.evaluation import EvalStream
from txl_dist.data.loader.shards import Split
from txl_dist.data.loader.target_sampler import TargetSampler, TargetSettings
from txl_dist.distributed.collectives import RankInfo
from txl_dist.errors import DataError
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch
from txl_dist.tokenizers.word_starts import word_starts
from txl_dist.train.batch import BatchMaker, to_device
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.report.evaluation_loss import Evaluation, LossSums
from txl_dist.train.state import EvaluationPlan

OrderLosses = Callable[[Batch, Memory], tuple[Tensor, Memory]]
"""Type of a function that takes a batch with an order and the memory before it. It returns score_2Bm and the next
memory. score_2Bm holds the losses in nats, then 1 where the target is the most probable token."""


def evaluate_permutation(
    engine: Engine,
    split: Split,
    *,
    train: TrainSection,
    num_orders: int,
    maker: BatchMaker,
    plan: EvaluationPlan,
    ranks: RankInfo,
    before_segment: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Compute the mean loss of the predicted tokens of a split with the engine's present weights. All ranks call it
    together.

    The result is that of `evaluate_orders`. Raises DataError if the split is shorter than a segment.
    """
    stream = whole_segments(split, train=train, num_lanes=plan.num_lanes, max_tokens=plan.max_tokens, ranks=ranks)
    return evaluate_orders(
        partial(engine.losses, with_top1_correct=True),
        engine.empty_memory(num_lanes=len(stream.lanes), memory_len=plan.memory_len),
        stream,
        train=train,
        num_orders=num_orders,
        maker=maker,
        ranks=ranks,
        before_segment=before_segment,
    )


def whole_segments(
    split: Split, *, train: TrainSection, num_lanes: int, max_tokens: int = 0, ranks: RankInfo
) -> EvalStream:
    """Cut a split into segments of the training length, which advance by `train.step_len` tokens.

    There are at most `num_lanes` lanes (batch rows), and fewer if a lane would be shorter than a segment. Raises
    DataError if the split is shorter than a segment.
    """
    num_tokens = min(split.tokens, max_tokens or split.tokens)
    num_lanes = min(num_lanes, (num_tokens - 1) // train.segment_len)
    if num_lanes < 1:
        raise DataError(
            f"split {split.name!r} of {split.corpus.location} gives {counted(num_tokens, 'token')} to evaluate, but "
            f"a segment needs {train.segment_len} tokens and one token before them. Prepare more text for this "
            "split, or lower train.segment_len."
        )
    return EvalStream(
        split,
        num_lanes=num_lanes,
        segment_len=train.segment_len,
        step_len=train.step_len,
        rank=ranks.rank,
        world_size=ranks.world_size,
        max_tokens=max_tokens,
    )


def evaluate_orders(
    losses: OrderLosses,
    memory: Memory,
    stream: EvalStream,
    *,
    train: TrainSection,
    num_orders: int,
    maker: BatchMaker,
    ranks: RankInfo,
    before_segment: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Compute the mean loss of the predicted tokens of a text, in `num_orders` fixed orders. All ranks call it
    together.

    The whole text is read once for each order, and each reading begins with `memory`. In the result `by_position` has
    the losses by the place of a target in the order of prediction. The targets of the first half of the segment come
    first, then the targets of the second half. Only whole segments are scored. `before_segment` is called before each
    segment, as in `evaluate_stream`.
    """
    start_s = time.perf_counter()
    split = stream.split
    settings = TargetSettings.of(train)
    begins_word_V = word_starts(split.corpus.tokenizer)
    sums = LossSums(segment_len=train.num_predicted, edges=maker.softmax_edges, device=ranks.device)
    for order in range(num_orders):
        sampler = TargetSampler(settings, seed=order, begins_word_V=begins_word_V)
        last = memory
        for index, segment in enumerate(stream):
            before_segment()
            positions = [index * stream.step_len] * len(stream.lanes)
            targets = sampler.draw(segment, lanes=stream.lanes, positions=positions)
            is_whole_B = segment.scored.all(axis=1)
            targets.is_drawn_Bm[~is_whole_B] = False
            batch = to_device(maker.ordered_batch(segment, targets), ranks.device)
            (nll_Bm, correct_Bm), last = losses(batch, last)
            sums.add(nll_Bm, batch, correct_BT=correct_Bm)
    units = text_units([split], mask_documents=maker.mask_documents, unscored=train.unscored)
    return Evaluation(sums.means(), units, time.perf_counter() - start_s)
