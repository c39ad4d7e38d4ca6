"""Scores of one model, beside those of counting tables.

Each row of the table is one combination of lengths; then, if asked for, one with memory off, and one that adapts.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from txl_dist.config.load import Config, check_config, config_from_dict
from txl_dist.config.schema import memory_of_layers
from txl_dist.console.formatting import counted
from txl_dist.console.logging import warn_for_all
from txl_dist.console.progress import Progress
from txl_dist.data.loader.bits_per_byte import TextUnits
from txl_dist.data.loader.corpus import Split
from txl_dist.data.loader.evaluation import EvalStream, EvaluationText
from txl_dist.data.loader.protocols import PeerRows, RandomCrops
from txl_dist.data.verify.baselines import order0_and_bigram
from txl_dist.distributed.collectives import RankInfo, distributed_context, run_on_all_ranks, run_on_rank0
from txl_dist.errors import ConfigError, raised_everywhere
from txl_dist.evaluation.cores import Losses, core_of, dynamic, static, train_cut, with_cache
from txl_dist.evaluation.log_probs import LogProbs
from txl_dist.evaluation.options import CROP_SEED, NUM_CROP_BATCHES, Adapting, Outputs, Overrides
from txl_dist.evaluation.target import Target, require_same
from txl_dist.inference.kv_cache import is_out_of_memory
from txl_dist.model.transformer_xl import Batch, TransformerXL
from txl_dist.train.batch import batch_maker
from txl_dist.train.report.evaluate import ScoredPart, evaluate

Result = dict[str, Any]
"""Numbers, and lists of parts, of one score."""

MEMORY_OFF = "memory off"
"""The row that shows what memory brings."""
TELL_EVERY_S = 30.0
"""Between two lines of a log that tell how far scoring is."""


class ScoredRow(NamedTuple):
    """One evaluation of several."""

    config: Config
    memory_len: int
    name: str = ""
    """Empty: by what differs from the others."""
    adapts: bool = False


def rows_of(target: Target, overrides: Overrides, adapting: Adapting) -> list[ScoredRow]:
    """The evaluations that are asked for. Raises ConfigError if their settings contradict each other.

    Clamps change slowest: a model is built for each.
    """
    lengths = itertools.product(overrides.clamp_len, overrides.segment_len, overrides.memory_len)
    configs = [
        _with_overrides(target, overrides, clamp_len=clamp, segment_len=segment, memory_len=memory)
        for clamp, segment, memory in lengths
    ]
    rows = [ScoredRow(config, config.eval.memory_len) for config in configs]
    if overrides.without_memory:
        rows.append(ScoredRow(configs[0], 0, MEMORY_OFF))
    if adapting.adapt != "off":
        rows.append(ScoredRow(configs[0], configs[0].eval.memory_len, f"adapted: {adapting.adapt}", adapts=True))
    return rows


def _with_overrides(
    target: Target, overrides: Overrides, *, memory_len: int, segment_len: int, clamp_len: int
) -> Config:
    config, peer = target.config, overrides.peer
    values = config.model_dump(mode="json")
    memory_len = config.train.memory_len if memory_len < 0 else memory_len
    same_length = overrides.same_length
    if peer is not None:
        if config.data.document_mask:
            raise ConfigError(
                f"--protocol {overrides.protocol} runs on over document borders, and this model's queries see their "
                "own document only (data.document_mask=True). Leave out --protocol."
            )
        memory_len = 0 if peer.cut == "crops" else memory_len
        if same_length == "trained":
            same_length = peer.same_length if memory_len else "off"
    values["data"]["eval_split"] = overrides.split or config.data.eval_split
    values["eval"] |= {
        "memory_len": memory_len,
        "segment_len": segment_len or config.eval.segment_len,
        "num_lanes": overrides.num_lanes or (config.eval.num_lanes if peer is None else peer.num_lanes),
        "accuracy": overrides.accuracy or config.eval.accuracy,
        "overlap_len": overrides.overlap_len or (0 if memory_len or peer is not None else config.eval.overlap_len),
        "max_tokens": 0,  # the whole split, as the baselines score it
    }
    # So that the rules are held against this evaluation.
    lens = config.train.memory_lens and memory_of_layers(
        memory_len, config.train.memory_lens, num_layers=config.model.num_layers
    )
    values["train"] |= {"memory_len": memory_len, "memory_lens": lens}
    if clamp_len >= 0:
        values["model"]["clamp_len"] = clamp_len
    if same_length != "trained":
        values["model"]["same_length"] = same_length
    changed = config_from_dict(values, source=f"evaluation of {target.path}")
    is_off = memory_len == 0
    if changed.model.same_length != "off" and (is_off or overrides.without_memory):
        raise ConfigError(
            f"same_length={changed.model.same_length!r} counts its window in memory, which is off here. "
            "Give --same-length off, or leave out --memory-len 0 and --without-memory."
        )
    if overrides.zero_memory and is_off:
        raise ConfigError("--zero-memory has no meaning without memory. Leave it out, or give a --memory-len above 0.")
    if overrides.zero_memory and changed.data.document_mask:
        raise ConfigError(
            "--zero-memory is no document, and this model's queries see their own document only "
            "(data.document_mask=True). Leave it out."
        )
    check_config(changed)
    return changed


class Scores(NamedTuple):
    """What came out, the same on every rank."""

    results: dict[str, Result]
    """By the name of the row."""
    log_p_N: Tensor | None
    """Of the targets in the order of the corpus, if they were asked for."""


def score_model(
    target: Target,
    split: Split,
    rows: list[ScoredRow],
    overrides: Overrides,
    adapting: Adapting,
    outputs: Outputs,
    *,
    train: Split | None,
    units: TextUnits,
) -> Scores:
    """A result per row; ranks share the lanes. Rows that come to the same are scored once. `train` is the text that
    --adapt dynamic measures gradients on.

    Raises ConfigError where a file cannot be written, the split is too short for a protocol, a picture would be of one
    length only, there is no memory for the evaluation, or weights that follow the text diverge; CheckpointError if the
    ranks have read different models.
    """
    engine, network, opened = rows[0].config.engine, target.bundle.model, target.bundle.dtype
    log_probs: LogProbs | None = None
    with distributed_context(timeout_s=engine.timeout_s, num_threads=engine.num_threads) as ranks, enough_memory():
        run_on_rank0(outputs.check_files)
        require_same([target])
        plans = run_on_all_ranks(
            lambda: [_planned(row, _cut(split, row, overrides, ranks=ranks), overrides, train=train) for row in rows]
        )
        names = dict.fromkeys(plan.name for plan in plans)
        if outputs.plot is not None and len(names.keys() - {MEMORY_OFF}) < 2:
            only = f"memory {plans[0].memory_len:,}, segment {plans[0].cut.segment_len:,}"
            raise raised_everywhere(
                ConfigError(
                    "--plot draws losses over several lengths, and those that are given come to one evaluation: "
                    f"{only}, clamp {plans[0].config.model.clamp_len:,}. Give others, or leave out --plot."
                )
            )
        told = itertools.chain(*(_shortened(row, plan.cut, overrides) for row, plan in zip(rows, plans, strict=True)))
        for message in dict.fromkeys(told):
            warn_for_all("%s", message)
        if num_equal := len(rows) - len(names):
            warn_for_all("%d of %d rows come to the same as others, and are scored once", num_equal, len(rows))
        distinct: dict[tuple[int, ...], _Plan] = {}
        for plan in plans:
            distinct.setdefault(plan.lengths, plan)
        total = sum(plan.num_passes(adapting) * _pass_tokens(plan.cut, ranks) for plan in distinct.values())
        scored: dict[tuple[int, ...], Result] = {}
        with Progress("scoring", total=total, every_s=TELL_EVERY_S, unit="tokens") as progress:
            for lengths, plan in distinct.items():
                # Steps of half precision would be rounded away: weights that follow the text are fp32.
                dtype = "fp32" if plan.train is not None else target.bundle.dtype
                if (plan.config.model, dtype) != (network.section, opened):  # built anew: layers took old settings in
                    changed = dataclasses.replace(target.bundle, section=plan.config.model)
                    network, opened = changed.open(dtype, where=target.where).model, dtype
                network.to(ranks.device).eval()
                if outputs.log_probs is not None:
                    assert isinstance(plan.cut, EvalStream)
                    log_probs = LogProbs(plan.cut)
                scored[lengths] = _score(
                    network, plan, adapting, units=units, ranks=ranks, progress=progress,
                    log_probs=log_probs, with_zeros=overrides.zero_memory,
                )  # fmt: skip
        results = {plan.name: dict(scored[plan.lengths]) for plan in plans}
        return Scores(results, None if log_probs is None else log_probs.joined())


class _Plan(NamedTuple):
    """A row as it is run on a split."""

    name: str
    """By the protocol and what differs from other rows."""
    config: Config
    memory_len: int
    cut: EvaluationText
    adapts: bool
    train: EvalStream | None
    """Text on which --adapt dynamic measures gradients."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """In which evaluations of a target may differ, and whether it adapts."""
        return self.memory_len, self.cut.segment_len, self.cut.overlap_len, self.config.model.clamp_len, self.adapts

    def num_passes(self, adapting: Adapting) -> int:
        """Batches that are run."""
        return len(self.cut) + (0 if self.train is None else min(adapting.adapt_batches, len(self.train)))


def _planned(row: ScoredRow, cut: EvaluationText, overrides: Overrides, *, train: Split | None) -> _Plan:
    """With no more memory than the split can fill."""
    memory_len = min(row.memory_len, _most_memory(cut, overrides))
    lengths = (
        ("memory", overrides.memory_len, memory_len),
        ("segment", overrides.segment_len, cut.segment_len),
        ("clamp", overrides.clamp_len, row.config.model.clamp_len),
    )
    words: list[str] = [overrides.protocol] if overrides.peer is not None else []
    words += [f"{word} {length}" for word, asked, length in lengths if len(asked) > 1]
    name = row.name or ", ".join(words) or "model"
    text = train_cut(train, cut) if row.adapts and train is not None else None
    return _Plan(name, row.config, memory_len, cut, row.adapts, text)


def _pass_tokens(cut: EvaluationText, ranks: RankInfo) -> int:
    return len(cut.lanes) * ranks.world_size * cut.segment_len


def _cut(split: Split, row: ScoredRow, overrides: Overrides, *, ranks: RankInfo) -> EvaluationText:
    evaluation, peer = row.config.eval, overrides.peer
    num_lanes, segment_len = evaluation.num_lanes, evaluation.segment_len or row.config.train.segment_len
    place = {"rank": ranks.rank, "world_size": ranks.world_size}
    if peer is None:
        return EvalStream(
            split, num_lanes=num_lanes, segment_len=segment_len, overlap_len=evaluation.overlap_len, **place
        )
    if peer.cut == "crops":
        batches = {"num_batches": NUM_CROP_BATCHES, "seed": CROP_SEED}
        return RandomCrops(split, num_lanes=num_lanes, segment_len=segment_len, **batches, **place)
    warm_up_len = row.memory_len if peer.cut == "warm rows" else 0
    return PeerRows(split, num_lanes=num_lanes, segment_len=segment_len, warm_up_len=warm_up_len, **place)


def _score(
    model: TransformerXL,
    plan: _Plan,
    adapting: Adapting,
    *,
    units: TextUnits,
    ranks: RankInfo,
    progress: Progress,
    log_probs: LogProbs | None,
    with_zeros: bool,
) -> Result:
    config, cut = plan.config, plan.cut
    maker = batch_maker(model, mask_documents=config.data.document_mask)

    def advance() -> None:
        if ranks.is_rank0:
            progress.advance(_pass_tokens(cut, ranks))

    def keep(batch: Batch, nll_BT: Tensor) -> None:
        if log_probs is not None:
            log_probs.add(batch, nll_BT)

    def begin() -> tuple[Losses, Any]:
        memory_len = plan.memory_len
        if plan.train is not None:
            return dynamic(
                model, cut, plan.train, adapting, maker=maker, memory_len=memory_len, with_zeros=with_zeros,
                before_segment=advance,
            )  # fmt: skip
        core = core_of(model, cut, memory_len=memory_len, with_documents=maker.mask_documents, with_zeros=with_zeros)
        return with_cache(core, model, cut, adapting) if plan.adapts else static(core, with_hits=config.eval.accuracy)

    losses, memory = run_on_all_ranks(begin)
    evaluation = evaluate(
        losses,
        memory,
        cut,
        maker=maker,
        units=units,
        ranks=ranks,
        before_segment=advance,
        after_segment=keep,
        is_local=True,
    )
    means = evaluation.means
    lengths = {
        "memory_len": plan.memory_len,
        "segment_len": cut.segment_len,
        "clamp_len": config.model.clamp_len,
    }
    told = evaluation.numbers() | {
        "by_cluster": [_told(part) for part in means.by_cluster],
        "by_position": [_told(part) for part in means.by_position],
    }
    if not plan.adapts:
        return told | lengths
    if plan.train is not None:
        lengths["adapt_batches"] = min(adapting.adapt_batches, len(plan.train))  # of those that there are
    return told | {"adapted": adapting.told() | lengths}  # apart, so that no picture over lengths takes it for static


def _told(part: ScoredPart) -> Result:
    return part._asdict() | {"loss": part.loss if part.tokens else None}


def score_baselines(split: Split, config: Config, *, units: TextUnits) -> dict[str, Result]:
    """Counting tables of the training split, on the same text."""
    corpus = split.corpus
    scores = order0_and_bigram(
        corpus.split(config.data.train_split).read_all(), split.read_all(), vocab_size=corpus.vocab_size
    )
    return {
        name: {"loss": loss, "tokens": float(scores.num_targets), **units.told(loss)}
        for name, loss in (("order 0", scores.order0), (f"bigram (k = {scores.best_k:g})", scores.bigram))
    }


@contextmanager
def enough_memory() -> Iterator[None]:
    """Raises ConfigError where memory could not be allocated."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"not enough memory for this evaluation: {' '.join(str(error).split()):.200}. Give fewer lanes "
            "(--num-lanes), shorter segments (--segment-len), less memory (--memory-len) or a shorter --cache-window."
        ) from error


def _shortened(row: ScoredRow, cut: EvaluationText, overrides: Overrides) -> Iterator[str]:
    """Which flags ask for more than the split has: the same scores come of less work."""
    if not isinstance(cut, EvalStream):
        return
    name, segment_len, lane_len = cut.split.name, row.config.eval.segment_len, cut.stripe_len
    if overrides.num_lanes > cut.num_lanes:
        yield (
            f"split {name!r} has {counted(cut.num_targets, 'token')} to score: --num-lanes "
            f"{overrides.num_lanes:,} is cut to "
            "that"
        )
    if segment_len in overrides.segment_len and segment_len > cut.segment_len:
        yield f"a lane of split {name!r} has {counted(lane_len, 'token')}: --segment-len {segment_len:,} is cut to that"
    if row.memory_len > _most_memory(cut, overrides):
        longer = " --num-lanes 1 makes it longer." if cut.num_lanes > 1 else ""
        yield (
            f"a lane of split {name!r} has {counted(lane_len, 'token')}, and a memory of {row.memory_len:,} "
            "never holds more: it "
            f"is cut to that.{longer}"
        )


def _most_memory(cut: EvaluationText, overrides: Overrides) -> int:
    """What a lane of the split can put into a memory; zeros are attended, as many as there are."""
    return cut.stripe_len if isinstance(cut, EvalStream) and not overrides.zero_memory else sys.maxsize
