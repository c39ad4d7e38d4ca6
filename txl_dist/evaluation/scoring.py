"""Scores of one model on a validation split, and scores of counting tables on the same text.

Each row of the printed table is one evaluation, with its own combination of lengths. On request the table also has a
row with memory off, and a row in which the model adapts to the text.

    rows_of      list the evaluations that the flags request, with checked settings
    score_model  return a result per row, on all ranks, and score rows with equal lengths once
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from txl_dist.config.load import Config, check_config, config_from_dict, values_to_give
from txl_dist.config.schema import ModelSection, memory_of_layers
from txl_dist.console.formatting import counted
from txl_dist.console.logging import warn_for_all
from txl_dist.console.progress import Progress
from txl_dist.data.loader.bits_per_byte import TextUnits
from txl_dist.data.loader.evaluation import EvalStream, EvaluationText
from txl_dist.data.loader.protocols import PeerRows, RandomCrops
from txl_dist.data.loader.shards import Split
from txl_dist.data.verify.baselines import order0_and_bigram
from txl_dist.distributed.collectives import RankInfo, distributed_context, run_on_all_ranks, run_on_rank0
from txl_dist.errors import ConfigError, raised_everywhere
from txl_dist.evaluation.cores import Losses, core_of, dynamic, static, train_cut, with_cache
from txl_dist.evaluation.log_probs import LogProbs
from txl_dist.evaluation.options import CROP_SEED, NUM_CROP_BATCHES, AdaptationOptions, Outputs, Overrides
from txl_dist.evaluation.target import Target, require_same
from txl_dist.inference.kv_cache import is_out_of_memory
from txl_dist.inference.options import InferencePrecision
from txl_dist.model.transformer_xl import Batch, TransformerXL
from txl_dist.train.batch import batch_maker
from txl_dist.train.engine.precision import warn_of_slow_inference
from txl_dist.train.report.evaluation_loss import Evaluation, ScoredPart, evaluate_stream

Result = dict[str, Any]
"""Result of one evaluation: its numbers, and lists with the losses of parts of the text."""

MEMORY_OFF = "memory off"
"""Name of the table row that is scored without memory. The difference between the loss of this row and the loss of
another row is the gain from memory."""
TELL_EVERY_S = 30.0
"""Seconds between two lines of progress in the log."""


class ScoredRow(NamedTuple):
    """One evaluation, which is one row of the printed table."""

    config: Config
    """Config of the model with the settings of this evaluation."""
    memory_len: int
    """Length of the memory in tokens. A value of 0 means that memory is off."""
    name: str = ""
    """Name of the row. If it is empty, `score_model` makes a name from the lengths in which rows differ."""
    adapts: bool = False
    """Whether the model adapts to text after it has scored it (flag --adapt)."""


def rows_of(target: Target, overrides: Overrides, adaptation: AdaptationOptions) -> list[ScoredRow]:
    """List the evaluations that the command-line flags request. Raises ConfigError if settings contradict each other.

    Combinations of lengths with equal clamp_len follow each other, because each clamp_len needs its own model.
    """
    lengths = itertools.product(overrides.clamp_len, overrides.segment_len, overrides.memory_len)
    configs = [
        _with_overrides(target, overrides, clamp_len=clamp, segment_len=segment, memory_len=memory)
        for clamp, segment, memory in lengths
    ]
    rows = [ScoredRow(config, config.eval.memory_len) for config in configs]
    if overrides.without_memory:
        rows.append(ScoredRow(configs[0], 0, MEMORY_OFF))
    if adaptation.adapt != "off":
        rows.append(ScoredRow(configs[0], configs[0].eval.memory_len, f"adapted: {adaptation.adapt}", adapts=True))
    return rows


def _with_overrides(
    target: Target, overrides: Overrides, *, memory_len: int, segment_len: int, clamp_len: int
) -> Config:
    """Return the model's config with the settings of one evaluation. Raises ConfigError if the settings do not fit."""
    config = target.config
    if memory_len < 0:
        memory_len = config.train.memory_len
    if overrides.peer is not None and overrides.peer.cut == "crops":
        memory_len = 0
    same_length = _same_length(config, overrides, memory_len=memory_len)
    values = values_to_give(config)
    if overrides.split:
        values["data"]["eval_split"] = overrides.split
    eval_values = _eval_values(config, overrides, memory_len=memory_len, segment_len=segment_len)
    values["eval"].update(eval_values)
    # The training lengths too, so that the rules between settings are checked for this evaluation.
    train_values = values["train"]
    train_values["memory_len"] = memory_len
    if config.train.memory_lens:
        train_values["memory_lens"] = memory_of_layers(
            memory_len,
            config.train.memory_lens,
            num_layers=config.model.num_layers,
        )
    model_values = values["model"]
    if clamp_len >= 0:
        model_values["clamp_len"] = clamp_len
    if same_length != "trained":
        model_values["same_length"] = same_length
    changed = config_from_dict(values, source=f"evaluation of {target.path}")
    _check_memory_off(changed, overrides, memory_len=memory_len)
    check_config(changed)
    return changed


def _same_length(config: Config, overrides: Overrides, *, memory_len: int) -> str:
    """Return the setting same_length of an evaluation: the flag's value, else the protocol's value. A protocol without
    a memory uses "off".

    Raises ConfigError for a protocol if the model was trained with document masks.
    """
    peer = overrides.peer
    if peer is None:
        return overrides.same_length
    if config.data.document_mask:
        raise ConfigError(
            f"--protocol {overrides.protocol} reads across document boundaries, but this model's queries attend only "
            "within their document (data.document_mask=True). Remove --protocol."
        )
    if overrides.same_length != "trained":
        return overrides.same_length
    if memory_len:
        return peer.same_length
    return "off"


def _eval_values(config: Config, overrides: Overrides, *, memory_len: int, segment_len: int) -> dict[str, Any]:
    """Return the settings of section [eval] that this evaluation changes, with their new values."""
    peer = overrides.peer
    if peer is None:
        num_lanes = config.eval.num_lanes
    else:
        num_lanes = peer.num_lanes
    if memory_len or peer is not None:
        overlap_len = 0
    else:
        overlap_len = config.eval.overlap_len
    return {
        "memory_len": memory_len,
        "segment_len": segment_len or config.eval.segment_len,
        "num_lanes": overrides.num_lanes or num_lanes,
        "accuracy": overrides.accuracy or config.eval.accuracy,
        "overlap_len": overrides.overlap_len or overlap_len,
        "max_tokens": 0,  # the whole split, as the baselines score it
    }


def _check_memory_off(config: Config, overrides: Overrides, *, memory_len: int) -> None:
    """Raise ConfigError if memory is off but a setting needs it, or if document masks would hide a memory of zeros."""
    is_off = memory_len == 0
    if config.model.same_length != "off" and (is_off or overrides.without_memory):
        raise ConfigError(
            f"same_length={config.model.same_length!r} needs a memory, but memory is off in this evaluation. Give "
            "--same-length off, or remove --memory-len 0 and --without-memory."
        )
    if overrides.zero_memory and is_off:
        raise ConfigError("--zero-memory needs a memory. Remove --zero-memory, or give a --memory-len above 0.")
    if overrides.zero_memory and config.data.document_mask:
        raise ConfigError(
            "--zero-memory cannot be used with this model. The model's queries attend only within their document "
            "(data.document_mask=True), and a memory of zeros belongs to no document. Remove --zero-memory."
        )


class Scores(NamedTuple):
    """Results of all rows, which are the same on every rank."""

    results: dict[str, Result]
    """Result of each row by the name of the row."""
    log_p_N: Tensor | None
    """Log-probability in nats of each target in the order of the corpus. None without --log-probs."""


def score_model(
    target: Target,
    split: Split,
    rows: list[ScoredRow],
    overrides: Overrides,
    adaptation: AdaptationOptions,
    outputs: Outputs,
    *,
    train: Split | None,
    units: TextUnits,
) -> Scores:
    """Score every row of the printed table on a split. All ranks call this function and share the lanes (streams of
    text). Returns results by row name.

    Rows with the same settings are scored once. `train` is the training text on which --adapt dynamic measures
    gradients.

    Raises ConfigError if a file cannot be written, the split is too short for a protocol, --plot has only one length,
    memory is exhausted, or adapted weights diverge. Raises CheckpointError if ranks have read different models.
    """
    engine = rows[0].config.engine
    with distributed_context(timeout_s=engine.timeout_s, num_threads=engine.num_threads) as ranks, enough_memory():
        run_on_rank0(outputs.check_files)
        require_same([target])

        def plan_rows() -> list[_Plan]:
            plans = []
            for row in rows:
                cut = _cut(split, row, overrides, ranks=ranks)
                plans.append(_plan_row(row, cut, overrides, train=train))
            return plans

        plans = run_on_all_ranks(plan_rows)
        if outputs.plot is not None:
            _require_several_lengths(plans)
        _warn_of_limits(rows, plans, overrides)

        distinct_plans: dict[tuple[int, ...], _Plan] = {}
        for plan in plans:
            distinct_plans.setdefault(plan.lengths, plan)
        total = 0
        for plan in distinct_plans.values():
            total += plan.num_passes(adaptation) * pass_tokens(plan.cut, ranks)

        model_opener = ModelOpener(target, overrides.precision, device=ranks.device)
        log_probs: LogProbs | None = None
        results: dict[tuple[int, ...], Result] = {}
        with Progress("scoring", total=total, every_s=TELL_EVERY_S, unit="tokens") as progress:
            for lengths, plan in distinct_plans.items():
                # Weights that follow the text are fp32: half precision would round their steps away.
                dtype = "" if plan.train is None else "fp32"
                model = model_opener.open(plan.config.model, dtype=dtype).to(ranks.device).eval()
                if outputs.log_probs is not None:
                    assert isinstance(plan.cut, EvalStream)
                    log_probs = LogProbs(plan.cut)
                result = _score(
                    model,
                    plan,
                    adaptation,
                    units=units,
                    ranks=ranks,
                    progress=progress,
                    log_probs=log_probs,
                    with_zeros=overrides.zero_memory,
                )
                results[lengths] = result | {"precision": model_opener.precision}
        results_by_name = {plan.name: dict(results[plan.lengths]) for plan in plans}
        if log_probs is None:
            log_p_N = None
        else:
            log_p_N = log_probs.joined()
        return Scores(results_by_name, log_p_N)


class _Plan(NamedTuple):
    """Evaluation for one row of the printed table, with the text and the lengths that it uses."""

    name: str
    """Name of the row: the name that the row was given, or else the protocol and the lengths in which rows differ."""
    config: Config
    memory_len: int
    cut: EvaluationText
    adapts: bool
    train: EvalStream | None
    """Training text on which --adapt dynamic measures gradients. None for other evaluations."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Key of the evaluation: all settings in which rows of one model differ.

        Rows with the same key have the same scores.
        """
        return self.memory_len, self.cut.segment_len, self.cut.overlap_len, self.config.model.clamp_len, self.adapts

    def num_passes(self, adaptation: AdaptationOptions) -> int:
        """Return the number of batches that this evaluation runs. Batches that only measure gradients are included."""
        if self.train is None:
            return len(self.cut)
        return len(self.cut) + min(adaptation.adapt_batches, len(self.train))


def _plan_row(row: ScoredRow, cut: EvaluationText, overrides: Overrides, *, train: Split | None) -> _Plan:
    """Return the plan for a row of the printed table: its name, its text and the length of its memory. The length is at
    most the number of tokens that the split can put into the memory."""
    memory_len = min(row.memory_len, _largest_memory_len(cut, overrides))
    words: list[str] = []
    if overrides.peer is not None:
        words.append(overrides.protocol)
    if len(overrides.memory_len) > 1:
        words.append(f"memory {memory_len}")
    if len(overrides.segment_len) > 1:
        words.append(f"segment {cut.segment_len}")
    if len(overrides.clamp_len) > 1:
        words.append(f"clamp {row.config.model.clamp_len}")
    name = row.name or ", ".join(words) or "model"
    if row.adapts and train is not None:
        train_stream = train_cut(train, cut)
    else:
        train_stream = None
    return _Plan(name, row.config, memory_len, cut, row.adapts, train_stream)


def _require_several_lengths(plans: list[_Plan]) -> None:
    """Raise ConfigError on all ranks if a plot would have only one point."""
    names = {plan.name for plan in plans}
    if len(names - {MEMORY_OFF}) >= 2:
        return
    first = plans[0]
    raise raised_everywhere(
        ConfigError(
            "--plot draws losses over several lengths, but the given lengths all result in the same evaluation: memory "
            f"of {first.memory_len:,} tokens, segments of {first.cut.segment_len:,} tokens, "
            f"clamp_len={first.config.model.clamp_len}. Give other lengths, or remove --plot."
        )
    )


def _warn_of_limits(rows: list[ScoredRow], plans: list[_Plan], overrides: Overrides) -> None:
    """Warn once for each flag whose value exceeds the number of tokens of the split. Also warn once if several rows
    have the same scores."""
    messages: dict[str, None] = {}
    for row, plan in zip(rows, plans, strict=True):
        messages |= dict.fromkeys(_limit_messages(row, plan.cut, overrides))
    for message in messages:
        warn_for_all("%s", message)
    num_equal = len(rows) - len({plan.name for plan in plans})
    if num_equal:
        warn_for_all(
            "%d of %d rows have the same settings as other rows, and are not scored again", num_equal, len(rows)
        )


class ModelOpener:
    """Opener of the scored model. It builds the model again only if the next row needs other model settings."""

    def __init__(self, target: Target, precision: InferencePrecision, *, device: torch.device) -> None:
        """Open models of `target` in a precision. Warns if a rank's device is slow in it. All ranks call this."""
        self._target = target
        self._bundle = target.bundle
        self._default_dtype = target.bundle.dtype if precision == "stored" else precision
        warn_of_slow_inference(self._default_dtype, device)

    def open(self, section: ModelSection, *, dtype: str = "") -> TransformerXL:
        """Return the model with these settings. Layers cannot change their settings, so other settings need a new
        model.

        `dtype` is the number type of the weights. Empty means the evaluation's precision.
        """
        dtype = dtype or self._default_dtype
        if section != self._bundle.section or dtype != self._bundle.dtype:
            bundle = dataclasses.replace(self._target.bundle, section=section)
            self._bundle = bundle.open(dtype, where=self._target.where)
        return self._bundle.model

    @property
    def precision(self) -> str:
        """Number type in which the model computes that `open` has returned last."""
        return self._bundle.precision


def pass_tokens(cut: EvaluationText, ranks: RankInfo) -> int:
    """Return the number of tokens that all ranks together score in one batch."""
    return len(cut.lanes) * ranks.world_size * cut.segment_len


def _cut(split: Split, row: ScoredRow, overrides: Overrides, *, ranks: RankInfo) -> EvaluationText:
    """Cut a split into the lanes (batch rows) and segments of one evaluation, by its protocol. Each rank gets its share
    of the lanes."""
    evaluation = row.config.eval
    peer = overrides.peer
    num_lanes = evaluation.num_lanes
    segment_len = evaluation.segment_len or row.config.train.segment_len
    if peer is None:
        return EvalStream(
            split,
            num_lanes=num_lanes,
            segment_len=segment_len,
            overlap_len=evaluation.overlap_len,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
    if peer.cut == "crops":
        return RandomCrops(
            split,
            num_lanes=num_lanes,
            segment_len=segment_len,
            num_batches=NUM_CROP_BATCHES,
            seed=CROP_SEED,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
    return PeerRows(
        split,
        num_lanes=num_lanes,
        segment_len=segment_len,
        warm_up_len=row.memory_len if peer.cut == "warm rows" else 0,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )


def _score(
    model: TransformerXL,
    plan: _Plan,
    adaptation: AdaptationOptions,
    *,
    units: TextUnits,
    ranks: RankInfo,
    progress: Progress,
    log_probs: LogProbs | None,
    with_zeros: bool,
) -> Result:
    """Run one evaluation on all ranks and return its result. If `log_probs` is given, every loss is added to it."""
    config = plan.config
    maker = batch_maker(model, mask_documents=config.data.document_mask)

    def advance() -> None:
        if ranks.is_rank0:
            progress.advance(pass_tokens(plan.cut, ranks))

    def keep_log_probs(batch: Batch, nll_BT: Tensor) -> None:
        if log_probs is not None:
            log_probs.add(batch, nll_BT)

    def make_losses() -> tuple[Losses, Any]:
        if plan.train is not None:
            return dynamic(
                model,
                plan.cut,
                plan.train,
                adaptation,
                maker=maker,
                memory_len=plan.memory_len,
                with_zeros=with_zeros,
                before_segment=advance,
            )
        core = core_of(
            model,
            plan.cut,
            memory_len=plan.memory_len,
            with_documents=maker.mask_documents,
            with_zeros=with_zeros,
        )
        if plan.adapts:
            return with_cache(core, model, plan.cut, adaptation)
        return static(core, with_top1_correct=config.eval.accuracy)

    losses, first_state = run_on_all_ranks(make_losses)
    evaluation = evaluate_stream(
        losses,
        first_state,
        plan.cut,
        maker=maker,
        units=units,
        ranks=ranks,
        before_segment=advance,
        after_segment=keep_log_probs,
        is_local=True,
    )
    return _result(evaluation, plan, adaptation)


def _result(evaluation: Evaluation, plan: _Plan, adaptation: AdaptationOptions) -> Result:
    """Return the numbers of an evaluation, the losses of parts of the text, and the lengths that were used."""
    result: Result = evaluation.numbers()
    result["by_cluster"] = [part_values(part) for part in evaluation.means.by_cluster]
    result["by_position"] = [part_values(part) for part in evaluation.means.by_position]
    lengths = {
        "memory_len": plan.memory_len,
        "segment_len": plan.cut.segment_len,
        "clamp_len": plan.config.model.clamp_len,
    }
    if not plan.adapts:
        return result | lengths
    if plan.train is not None:
        lengths["adapt_batches"] = min(adaptation.adapt_batches, len(plan.train))  # no more than the split has
    # Under a key of their own, so that a picture over lengths does not take this for a static evaluation.
    result["adapted"] = adaptation.metadata() | lengths
    return result


def part_values(part: ScoredPart) -> Result:
    """Return the numbers of a part of the text for JSON. The loss of a part without tokens is None."""
    values: Result = part._asdict()
    if not part.tokens:
        values["loss"] = None
    return values


def score_baselines(split: Split, config: Config, *, units: TextUnits) -> dict[str, Result]:
    """Score baselines on the same text: tables that count tokens (order 0) and pairs of tokens (bigram) in the training
    split.

    The result holds each baseline's numbers by its name. `units` are the units in which losses are shown.
    """
    corpus = split.corpus
    train_tokens = corpus.split(config.data.train_split).read_all()
    scores = order0_and_bigram(train_tokens, split.read_all(), vocab_size=corpus.vocab_size)
    losses = {"order 0": scores.order0, f"bigram (k = {scores.best_k:g})": scores.bigram}
    results = {}
    for name, loss in losses.items():
        results[name] = {"loss": loss, "tokens": float(scores.num_targets), **units.metrics(loss)}
    return results


@contextmanager
def enough_memory() -> Iterator[None]:
    """Return a context manager that raises ConfigError if memory is exhausted in its block, on the CPU or a GPU."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"not enough memory for this evaluation: {reason:.200}. Give fewer lanes "
            "(--num-lanes), shorter segments (--segment-len), a shorter memory (--memory-len) or a shorter "
            "--cache-window."
        ) from error


def _limit_messages(row: ScoredRow, cut: EvaluationText, overrides: Overrides) -> Iterator[str]:
    """Yield a message for each flag whose value exceeds the number of tokens of the split or of a lane (batch row).

    The evaluation reduces such a value to the number of tokens that exist.
    """
    if not isinstance(cut, EvalStream):
        return
    split_name = cut.split.name
    segment_len = row.config.eval.segment_len
    lane_tokens = counted(cut.stripe_len, "token")
    if overrides.num_lanes > cut.num_lanes:
        yield (
            f"split {split_name!r} has {counted(cut.num_targets, 'token')} to score, so --num-lanes "
            f"{overrides.num_lanes:,} is reduced to this number"
        )
    if segment_len in overrides.segment_len and segment_len > cut.segment_len:
        yield (
            f"a lane of split {split_name!r} has {lane_tokens}, so --segment-len {segment_len:,} is reduced to this "
            "number"
        )
    if row.memory_len > _largest_memory_len(cut, overrides):
        if cut.num_lanes > 1:
            longer = " With --num-lanes 1 the lane is longer."
        else:
            longer = ""
        yield (
            f"a lane of split {split_name!r} has {lane_tokens}, so the memory of {row.memory_len:,} tokens is reduced "
            f"to this number.{longer}"
        )


def _largest_memory_len(cut: EvaluationText, overrides: Overrides) -> int:
    """Return the largest number of tokens that a lane (batch row) can have in memory.

    With --zero-memory there is no limit, because queries attend to all zeros.
    """
    if isinstance(cut, EvalStream) and not overrides.zero_memory:
        return cut.stripe_len
    return sys.maxsize
