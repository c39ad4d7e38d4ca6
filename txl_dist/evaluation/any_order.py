"""Scores of a model that predicts in any order (XLNet) on a validation split.

Such a model has no single loss, so `txl evaluate --prediction` names one or more of three ways to predict:

    random_order       Some tokens of each segment, in fixed random orders, as in training. The later a token comes in
                       its order, the more tokens it sees, and the lower its loss should be.
    left_to_right      Every token from the tokens before it. This loss covers the whole text, so it has bits per byte.
    pseudo_likelihood  One token at a time, from all other tokens of its segment (Salazar et al. 2020, Masked Language
                       Model Scoring). One token in 64 is scored, because each of these tokens needs its own
                       forward pass.

All predictions use query rows. See `model.prediction_order` for query rows and levels. In shapes, B is the
number of lanes, T the segment length, and m the number of targets.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from txl_dist.config.load import Config
from txl_dist.config.schema import Half
from txl_dist.console.formatting import bounded
from txl_dist.console.progress import Progress
from txl_dist.data.loader.bits_per_byte import TextUnits, text_units
from txl_dist.data.loader.evaluation import EvalStream
from txl_dist.data.loader.shards import Split
from txl_dist.data.loader.stream import Segment
from txl_dist.data.loader.target_sampler import Bools, Int64s, TargetBatch
from txl_dist.distributed.collectives import RankInfo, distributed_context, run_on_all_ranks, run_on_rank0
from txl_dist.errors import ConfigError
from txl_dist.evaluation.options import AdaptationOptions, Outputs, Overrides, Prediction
from txl_dist.evaluation.scoring import (
    TELL_EVERY_S,
    ModelOpener,
    Result,
    ScoredRow,
    Scores,
    enough_memory,
    part_values,
    pass_tokens,
)
from txl_dist.evaluation.target import Target, require_same
from txl_dist.model.memory import Memory, attended
from txl_dist.model.transformer_xl import Batch, TransformerXL
from txl_dist.rng import derive_seed
from txl_dist.train.batch import BatchMaker, batch_maker, to_device
from txl_dist.train.report.evaluation_loss import Evaluation, LossSums
from txl_dist.train.report.permutation_loss import OrderLosses, evaluate_orders, whole_segments

TOKENS_PER_SCORED = 64
"""Pseudo-likelihood scores one token out of this number of tokens."""
_PRINTED_RANKS = 4
"""Largest number of losses that are printed for one half. Each loss is over a range of places in the order of
prediction."""
_TITLES: dict[Prediction, str] = {
    "random_order": "random orders",
    "left_to_right": "left to right",
    "pseudo_likelihood": "pseudo-likelihood",
}


def check_options(overrides: Overrides, adaptation: AdaptationOptions, outputs: Outputs) -> None:
    """Raise ConfigError for flags of `txl evaluate` that need a model that predicts the next token."""
    given = {
        "--adapt": adaptation.adapt != "off",
        "--protocol": overrides.peer is not None,
        "--segment-len": any(overrides.segment_len),
        "--overlap-len": overrides.overlap_len > 0,
        "--same-length": overrides.same_length != "trained",
        "--log-probs": outputs.log_probs is not None,
    }
    wrong = [flag for flag, is_given in given.items() if is_given]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} cannot be given for a model that predicts tokens in any order (model.any_order). "
            f"Remove {', '.join(wrong)}."
        )


def score_any_order(
    target: Target, split: Split, rows: list[ScoredRow], overrides: Overrides, outputs: Outputs
) -> Scores:
    """Score every row of the printed table on a split, once for each kind of `overrides.prediction`. All ranks call
    this function.

    Returns results by row name. Raises ConfigError if a file cannot be written or memory is exhausted, DataError if the
    split is shorter than a segment, and CheckpointError if ranks have read different models.
    """
    engine = rows[0].config.engine
    with distributed_context(timeout_s=engine.timeout_s, num_threads=engine.num_threads) as ranks, enough_memory():
        run_on_rank0(outputs.check_files)
        require_same([target])
        plans = run_on_all_ranks(lambda: _plans(split, rows, overrides, ranks=ranks))
        total = sum(plan.num_passes * pass_tokens(plan.text, ranks) for plan in plans)
        opener = ModelOpener(target, overrides.precision, device=ranks.device)
        results: dict[str, Result] = {}
        with Progress("scoring", total=total, every_s=TELL_EVERY_S, unit="tokens") as progress:
            for plan in plans:
                if plan.name in results:
                    continue
                model = opener.open(plan.config.model).to(ranks.device).eval()
                result = _score(model, plan, ranks=ranks, progress=progress, with_zeros=overrides.zero_memory)
                results[plan.name] = result | {"precision": opener.precision}
        return Scores(results, None)


class _Plan(NamedTuple):
    """Evaluation for one row of the printed table, by one kind of prediction."""

    name: str
    prediction: Prediction
    config: Config
    memory_len: int
    num_orders: int
    text: EvalStream

    @property
    def num_passes(self) -> int:
        """Number of forward passes on each rank."""
        if self.prediction == "random_order":
            return self.num_orders * len(self.text)
        if self.prediction == "pseudo_likelihood":
            return len(self.text) * _scored_per_segment(self.config.train.halves()[-1])
        return len(self.text)


def _plans(split: Split, rows: list[ScoredRow], overrides: Overrides, *, ranks: RankInfo) -> list[_Plan]:
    """Return the plan for each row of the printed table and each kind of prediction. Raises DataError if the split is
    too short."""
    plans = []
    for row, prediction in itertools.product(rows, overrides.prediction):
        train = row.config.train
        num_lanes = row.config.eval.num_lanes
        if prediction == "left_to_right":
            text = EvalStream(
                split,
                num_lanes=num_lanes,
                segment_len=train.segment_len,
                rank=ranks.rank,
                world_size=ranks.world_size,
            )
        else:
            text = whole_segments(split, train=train, num_lanes=num_lanes, ranks=ranks)
        words = [_TITLES[prediction]]
        if row.name:
            words.append(row.name)
        if len(overrides.memory_len) > 1:
            words.append(f"memory {row.memory_len}")
        if len(overrides.clamp_len) > 1:
            words.append(f"clamp {row.config.model.clamp_len}")
        num_orders = overrides.orders or row.config.eval.orders
        plans.append(_Plan(", ".join(words), prediction, row.config, row.memory_len, num_orders, text))
    return plans


def _score(model: TransformerXL, plan: _Plan, *, ranks: RankInfo, progress: Progress, with_zeros: bool) -> Result:
    """Run one evaluation on all ranks and return its result."""
    config = plan.config
    maker = batch_maker(model, mask_documents=config.data.document_mask)
    memory = model.empty_memory(num_lanes=len(plan.text.lanes), memory_len=plan.memory_len)
    if with_zeros:
        memory = attended(memory)

    def advance() -> None:
        if ranks.is_rank0:
            progress.advance(pass_tokens(plan.text, ranks))

    losses = _losses_of(model)
    if plan.prediction == "random_order":
        evaluation = evaluate_orders(
            losses,
            memory,
            plan.text,
            train=config.train,
            num_orders=plan.num_orders,
            maker=maker,
            ranks=ranks,
            before_segment=advance,
        )
    elif plan.prediction == "left_to_right":
        evaluation = _left_to_right(losses, memory, plan.text, maker=maker, ranks=ranks, before_segment=advance)
    else:
        evaluation = _pseudo_likelihood(
            losses,
            memory,
            plan.text,
            halves=config.train.halves(),
            maker=maker,
            ranks=ranks,
            before_segment=advance,
        )
    return _result(evaluation, plan)


def _losses_of(model: TransformerXL) -> OrderLosses:
    """Return the function that computes the losses of a batch with a model, without gradients."""

    @torch.no_grad()
    def losses(batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        hidden_BmD, memory = model(
            batch.tokens_BT,
            memory,
            document_BT=batch.document_BT,
            partition=batch.token_partition,
            order=batch.order,
        )
        nll_Bm = model.softmax.losses(hidden_BmD, batch.targets_BT, partition=batch.target_partition)
        correct_Bm = model.softmax.top1_correct(hidden_BmD, batch.targets_BT)
        return torch.stack([nll_Bm, correct_Bm.to(nll_Bm)]), memory

    return losses


def _left_to_right(
    losses: OrderLosses,
    memory: Memory,
    text: EvalStream,
    *,
    maker: BatchMaker,
    ranks: RankInfo,
    before_segment: Callable[[], None],
) -> Evaluation:
    """Compute the mean loss of every token from the tokens before it. All ranks call this function together.

    The targets are those of a model that predicts the next token: all tokens of each lane (batch row) except its first
    token. With document masks the first token of a document is not scored, because no token before it can be seen.
    """
    start_s = time.perf_counter()
    sums = LossSums(segment_len=text.segment_len, edges=maker.softmax_edges, device=ranks.device)
    last = memory
    for index, segment in enumerate(text):
        before_segment()
        # Without a memory the token before the segment is not known, so it is read again.
        if index == 0 or memory.memory_len == 0:
            segment = with_token_before(segment)
        targets = left_to_right_targets(segment, num_targets=text.segment_len, mask_documents=maker.mask_documents)
        batch = to_device(maker.ordered_batch(segment, targets), ranks.device)
        (nll_Bm, correct_Bm), last = losses(batch, last)
        sums.add(_of_scored(nll_Bm, batch), batch, correct_BT=correct_Bm)
    unscored = ""
    if maker.mask_documents:
        unscored = "the first token of each document sees no text, so it is not scored (data.document_mask)"
    units = text_units([text.split], mask_documents=maker.mask_documents, unscored=unscored)
    return Evaluation(sums.means(), units, time.perf_counter() - start_s)


def with_token_before(segment: Segment) -> Segment:
    """Return a segment whose inputs begin with the token before its first target.

    `BatchMaker.ordered_batch` reads the last T of a segment's T + 1 tokens. The result has one token more, so that all
    tokens of `segment` are read. The first of them is not scored.
    """

    def extended(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[:, :1], values], axis=1)

    scored = extended(segment.scored)
    scored[:, 0] = False
    return Segment(
        tokens=extended(segment.tokens),
        documents=extended(segment.documents),
        opens=extended(segment.opens),
        scored=scored,
    )


def left_to_right_targets(segment: Segment, *, num_targets: int, mask_documents: bool) -> TargetBatch:
    """Return the last `num_targets` tokens of a segment as targets, each predicted from the tokens before it."""
    num_lanes = len(segment.tokens)
    num_tokens = segment.tokens.shape[1] - 1
    place_T = np.arange(num_tokens)
    level_BT = np.tile(place_T, (num_lanes, 1))
    place_Bm = level_BT[:, num_tokens - num_targets :]
    is_drawn_Bm = np.ones_like(place_Bm, dtype=bool)
    if mask_documents:
        sees_text_BT = segment.documents[:, 1:] == segment.documents[:, :-1]
        is_drawn_Bm = sees_text_BT[:, num_tokens - num_targets :]
    return TargetBatch(
        place_Bm=np.ascontiguousarray(place_Bm),
        is_drawn_Bm=is_drawn_Bm,
        query_level_BT=level_BT,
        key_level_BT=level_BT,
        reuse_len=num_tokens,
    )


def _pseudo_likelihood(
    losses: OrderLosses,
    memory: Memory,
    text: EvalStream,
    *,
    halves: tuple[Half, ...],
    maker: BatchMaker,
    ranks: RankInfo,
    before_segment: Callable[[], None],
) -> Evaluation:
    """Compute the mean loss of a sample of tokens, each predicted from all other tokens of its segment.

    All ranks call this function together. The scored tokens are in the last half of the segment, and they are also
    predicted from the first half. Which tokens are scored depends only on the lane (batch row) and the position. Only
    whole segments are scored.
    """
    start_s = time.perf_counter()
    split = text.split
    sums = LossSums(segment_len=1, edges=maker.softmax_edges, device=ranks.device)
    last = memory
    for index, segment in enumerate(text):
        places_BN = scored_places(segment, halves[-1], lanes=text.lanes, position=index * text.step_len)
        before = last
        for place_B in places_BN.T:
            before_segment()
            targets = single_token_targets(place_B, halves)
            targets.is_drawn_Bm[~segment.scored.all(axis=1)] = False
            batch = to_device(maker.ordered_batch(segment, targets), ranks.device)
            (nll_Bm, correct_Bm), last = losses(batch, before)
            sums.add(_of_scored(nll_Bm, batch), batch, correct_BT=correct_Bm)
    unscored = f"one in {TOKENS_PER_SCORED} tokens is scored, from the text on both sides"
    units = text_units([split], mask_documents=maker.mask_documents, unscored=unscored)
    return Evaluation(sums.means(), units, time.perf_counter() - start_s)


def _scored_per_segment(half: Half) -> int:
    """Return the number of tokens that pseudo-likelihood scores in each segment of a lane (batch row)."""
    return math.ceil((half.stop - half.start) / TOKENS_PER_SCORED)


def scored_places(segment: Segment, half: Half, *, lanes: range, position: int) -> Int64s:
    """Draw the positions in a segment of the tokens that pseudo-likelihood scores. The shape is [B, N], with N tokens
    for each of the B lanes (batch rows).

    `position` is the lanes' position in the text. The first token of the segment and the first token of a document are
    not drawn. If fewer than N tokens of a row can be drawn, the rest of the row is -1.
    """
    num_scored = _scored_per_segment(half)
    places_BN = np.full((len(lanes), num_scored), -1, np.int64)
    begins_document_BT: Bools = segment.documents[:, 1:] != segment.documents[:, :-1]
    begins_document_BT[:, 0] = True
    for row, lane in enumerate(lanes):
        rng = np.random.Generator(np.random.Philox(key=derive_seed(0, "pseudo-likelihood", lane, position)))
        order = half.start + rng.permutation(half.stop - half.start)
        eligible = order[~begins_document_BT[row, order]][:num_scored]
        places_BN[row, : len(eligible)] = eligible
    return places_BN


def single_token_targets(place_B: Int64s, halves: tuple[Half, ...]) -> TargetBatch:
    """Return one target for each lane (batch row). The target sees all other tokens of its half and of earlier halves.

    No other token sees the target. A place of -1 stands for a row without a target.
    """
    num_lanes = len(place_B)
    half_T = np.concatenate([np.full(half.stop - half.start, index) for index, half in enumerate(halves)])
    key_level_BT = np.tile(2 * half_T, (num_lanes, 1))
    query_level_BT = key_level_BT + 1
    is_drawn_B = place_B >= 0
    drawn_rows = np.flatnonzero(is_drawn_B)
    key_level_BT[drawn_rows, place_B[drawn_rows]] += 1
    return TargetBatch(
        place_Bm=np.maximum(place_B, 0)[:, None],
        is_drawn_Bm=is_drawn_B[:, None],
        query_level_BT=query_level_BT,
        key_level_BT=key_level_BT,
        reuse_len=halves[0].stop,
    )


def _of_scored(nll_Bm: Tensor, batch: Batch) -> Tensor:
    """Return the losses with 0 for targets that are not scored.

    Such a target may see no token at all, and attention over nothing is NaN. Such a target changes no other row.
    """
    return torch.where(batch.scored_BT > 0, nll_Bm, 0.0)


def _result(evaluation: Evaluation, plan: _Plan) -> Result:
    """Return the numbers of an evaluation, the losses of parts of the text, and the lengths that were used."""
    result: Result = evaluation.numbers()
    result["by_cluster"] = [part_values(part) for part in evaluation.means.by_cluster]
    parts = [part_values(part) for part in evaluation.means.by_position]
    accuracies = evaluation.means.accuracy_by_position
    for part, accuracy in zip(parts, accuracies, strict=True):
        if part["tokens"]:
            part["accuracy_pct"] = 100 * accuracy
    if plan.prediction == "random_order":
        result["by_rank"] = parts
        result["orders"] = plan.num_orders
    elif plan.prediction == "left_to_right":
        result["by_position"] = parts
    result |= {
        "prediction": plan.prediction,
        "memory_len": plan.memory_len,
        "segment_len": plan.text.segment_len,
        "clamp_len": plan.config.model.clamp_len,
    }
    return result


def units_of(split: Split, overrides: Overrides, config: Config) -> TextUnits:
    """Return the units of the printed table. They include bits per byte only if the text is predicted from left to
    right."""
    if "left_to_right" in overrides.prediction and not config.data.document_mask:
        return text_units([split], mask_documents=False)
    return text_units([split], mask_documents=config.data.document_mask, unscored=config.train.unscored)


def rank_lines(result: dict[str, Any], halves: tuple[Half, ...]) -> list[str]:
    """Return a line for each half of the segment with the loss and accuracy by place in the order of prediction."""
    parts = result["by_rank"]
    lines = []
    first = 0
    for index, half in enumerate(halves):
        stop = first + half.num_targets
        of_half = [part for part in parts if first <= part["first"] and part["last"] < stop and part["tokens"]]
        shown = of_half
        if len(of_half) > _PRINTED_RANKS:
            picks = np.linspace(0, len(of_half) - 1, _PRINTED_RANKS).round().astype(int)
            shown = [of_half[pick] for pick in picks]
        texts = []
        for part in shown:
            place = f"{part['first'] - first + 1}"
            if part["last"] > part["first"]:
                place += f"-{part['last'] - first + 1}"
            texts.append(f"{place}: {bounded(part['loss'])} ({part['accuracy_pct']:.1f} %)")
        if texts:
            name = f"half {index + 1}" if len(halves) > 1 else "segment"
            lines.append(f"nats/token (accuracy) by place in the order, {name}: {', '.join(texts)}")
        first = stop
    return lines
