"""`txl recl`: the relative effective context length of a group of models (Dai et al. 2019, section 4.3, appendix C).

The RECL says how many past tokens still improve a model. The improvement is measured against the best short-context
loss in the group, on the targets that are hard for the whole group. So models of different strength can be compared.
With l_i(c, t) the loss of model i on target t given exactly the c tokens before it, and contexts c < c' = c + step, the
paper defines:

    b(c, t)    = min over i of l_i(c, t)                                 the group's baseline
    T          = the share r of the targets with the largest b(c, t)     the hard targets
    f_i(c, c') = mean over t in T of min(b(c, t), l_i(c', t))            only losses below the baseline count
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)        relative gain in perplexity

The context c begins at the shortest context, and grows by a step as long as g_i(c, c') >= 0.01. The RECL of model i is
the first c with a gain below 0.01. Gains at longer contexts do not count. f_i(c, c) is the mean of b over T, which is
the same for all models.

The paper leaves some choices open. This module makes these choices:
- The shortest context is one step, so one step is the smallest RECL, even for a model that never gains.
- T is selected again for each c. It has round(r * targets) targets, at least one. If two
  targets have equal losses, the earlier target is taken first.
- If no gain of a model is below 0.01, the longest context and the words "or more" are reported as the model's RECL.
- The targets are a sample of the split without replacement, the same for all models and contexts. Each target has at
  least as many tokens before it as the longest context. Borders of documents are ignored.
- Each target's context is run alone, from an empty memory. The context is cut into segments of the model's training
  length. The last segment ends at the target, so the first segment can be shorter. The memory is as long as in training
  by default. A model without memory sees its last segment only.

A model's RECL depends on the other models of the group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from txl_dist.console.formatting import bounded, counted, format_table
from txl_dist.console.logging import start_logging, warn_for_all
from txl_dist.console.progress import Progress
from txl_dist.data.loader.shards import Split
from txl_dist.distributed.collectives import (
    all_reduce_sum,
    distributed_context,
    get_rank,
    run_on_all_ranks,
    run_on_rank0,
)
from txl_dist.errors import ConfigError
from txl_dist.evaluation.options import ReclOutputs, ReclSettings
from txl_dist.evaluation.scoring import TELL_EVERY_S, enough_memory
from txl_dist.evaluation.target import Target, open_target, require_same
from txl_dist.inference.kv_cache import FrozenModel
from txl_dist.inference.options import InferencePrecision
from txl_dist.io.files import write_output
from txl_dist.report.figures import Chart, Line, draw_png
from txl_dist.train.engine.precision import warn_of_slow_inference

Losses = npt.NDArray[np.float64]

THRESHOLD = 0.01
"""Relative gain in perplexity below which a longer context does not count (the paper's value)."""


class Recl(NamedTuple):
    """Relative effective context length (RECL) of a model, as `compute_recl` returns it."""

    context: int
    """Relative effective context length in tokens."""
    is_longest: bool
    """Whether the model still gained at the longest context, so that its true value may be larger than `context`."""
    gains: list[float]
    """Relative gains g_i(c, c + step) of every context c except the longest, including contexts that are longer than
    the RECL."""

    def __str__(self) -> str:
        if self.is_longest:
            return f"{self.context:,} or more"
        return f"{self.context:,}"


def relative_gain(losses_NCS: Losses, *, model: int, context: int, r: float) -> float:
    """Return g_i(c, c'), the relative gain in perplexity of a model from a context to the next longer context.

    `losses_NCS` are the losses l_i(c, t) of N models, C contexts and S targets. `model` and `context` are indices of
    the first two axes. `r` is the share of the targets that count as hard.
    """
    baseline_S = losses_NCS[:, context].min(axis=0)
    num_hard = max(1, round(r * len(baseline_S)))
    hard = np.argsort(-baseline_S, kind="stable")[:num_hard]

    def hard_perplexity(index: int) -> float:
        """Return the perplexity of the hard targets at a context. A loss above the baseline counts as the baseline."""
        counted_S = np.minimum(baseline_S, losses_NCS[model, index])
        mean = counted_S[hard].mean()
        return float(np.exp(mean))

    short = hard_perplexity(context)
    longer = hard_perplexity(context + 1)
    return (short - longer) / short


def compute_recl(losses_NCS: Losses, contexts: Sequence[int], *, model: int, r: float) -> Recl:
    """Compute the RECL of one model of a group.

    `losses_NCS` are the losses of N models, C `contexts` (in tokens) and S targets. `model` is the index of the model.
    `r` is the share of the targets that count as hard.
    """
    gains = []
    for index in range(len(contexts) - 1):
        gain = relative_gain(losses_NCS, model=model, context=index, r=r)
        gains.append(gain)
    stop = 0
    while stop < len(gains) and not gains[stop] < THRESHOLD:
        stop += 1
    is_longest = stop == len(gains)
    return Recl(contexts[stop], is_longest, gains)


def compare_contexts(
    paths: Sequence[Path], *, data: str | Path, settings: ReclSettings, outputs: ReclOutputs
) -> list[str]:
    """Measure the RECL of several models on the same targets, and return lines of text with the results.

    The models are runs, checkpoints or bundles. `data` is the path of the corpus. If it is empty, the first model's
    corpus is used. The corpora of the other models are not read. All ranks call this function and share the targets.
    Only rank 0 returns lines.

    Raises ConfigError if the settings leave nothing to measure, a file cannot be written, or tokenizers differ. Also
    raises ConfigError for a model with document masks, and for a model whose queries would see no key. Raises
    CheckpointError or DataError if a model or the corpus cannot be read.
    """
    start_logging(rank=get_rank())
    settings.check()
    outputs.check()
    first = open_target(paths[0], data=data)
    targets = [first, *(open_target(path, data=first.config.data.path) for path in paths[1:])]
    targets = [_in_precision(target, settings.precision) for target in targets]
    split = _same_text(targets, settings)
    starts = _sample(split, settings)
    losses_NCS = _losses(targets, split, starts, settings, outputs)
    if get_rank() > 0:
        return []  # rank 0 speaks
    names = [str(path) for path in paths]
    contexts = settings.contexts
    found = []
    for index in range(len(targets)):
        found.append([compute_recl(losses_NCS, contexts, model=index, r=r) for r in settings.r])
    mean_NC = losses_NCS.mean(axis=2)
    if outputs.json is not None:
        rows = []
        for target, results, mean_C in zip(targets, found, mean_NC, strict=True):
            by_share = {}
            for r, result in zip(settings.r, results, strict=True):
                by_share[f"{r:g}"] = {
                    "context": result.context,
                    "or_more": result.is_longest,
                    "gains": result.gains,
                }
            row = {
                "model": str(target.path),
                "scored": target.where,
                "precision": target.bundle.precision,
                "recl": by_share,
                "loss": mean_C.tolist(),
            }
            rows.append(row)
        values = {"contexts": contexts, "targets": len(starts), "split": split.name, "models": rows}
        write_output(outputs.json, json.dumps(values, indent=1).encode() + b"\n")
    if outputs.plot is not None:
        x = np.array(contexts, dtype=np.float64)
        lines = [Line(name, x, mean_C) for name, mean_C in zip(names, mean_NC, strict=True)]
        chart = Chart("recl", lines, "tokens of context", "nats/token", is_log=True)
        write_output(outputs.plot, draw_png(chart))
    shares = [f"r = {r:g}" for r in settings.r]
    head = ["RECL, tokens", *shares, f"nats at {contexts[0]}", f"nats at {contexts[-1]}"]
    table_rows = []
    for name, results, mean_C in zip(names, found, mean_NC, strict=True):
        loss_of_shortest = bounded(float(mean_C[0]))
        loss_of_longest = bounded(float(mean_C[-1]))
        table_rows.append([name, *map(str, results), loss_of_shortest, loss_of_longest])
    about = (
        f"{len(starts):,} targets of {split.corpus.name} ({split.name}), contexts of {contexts[0]} to {contexts[-1]}"
    )
    in_precision = ""
    if settings.precision != "stored":
        in_precision = f", in {settings.precision}"
    return [
        *(f"scored: {target.where}{in_precision}" for target in targets),
        f"{about} tokens in steps of {settings.step}",
        *format_table([head, *table_rows]),
    ]


def _in_precision(target: Target, precision: InferencePrecision) -> Target:
    """Return the target with a model that computes in this precision."""
    return target._replace(bundle=target.bundle.in_precision(precision, where=target.where))


def _same_text(targets: Sequence[Target], settings: ReclSettings) -> Split:
    """Return the split on which all models are scored.

    Raises ConfigError or DataError if the models cannot be scored on the same text.
    """
    for target in targets:
        if target.config.data.document_mask:
            raise ConfigError(
                f"{target.path} was trained with data.document_mask=True, so a query attends only within its "
                "document. The contexts of RECL cross the borders of documents. Remove this model from the command."
            )
        if target.config.model.same_length != "off" and _memory_len(target, settings) == 0:
            raise ConfigError(
                f"{target.path} has same_length={target.config.model.same_length!r}, which needs a memory, but this "
                "measurement uses no memory. Give a --memory-len of 1 or more, or remove this model from the command."
            )
        if target.bundle.tokenizer.fingerprint != targets[0].bundle.tokenizer.fingerprint:
            raise ConfigError(
                f"{target.path} and {targets[0].path} have different tokenizers, so losses per token cannot be "
                "compared. Compare models with the same tokenizer."
            )
    first = targets[0].config
    if settings.split:
        first = first.model_copy(update={"data": first.data.model_copy(update={"eval_split": settings.split})})
    return targets[0].held_out(first)


def _sample(split: Split, settings: ReclSettings) -> npt.NDArray[np.int64]:
    """Draw the targets. Returns, for each target, the position in the split at which its longest context begins."""
    num_places = split.tokens - settings.max_context
    if num_places < 1:
        raise ConfigError(
            f"split {split.name!r} has {counted(split.tokens, 'token')}, but must have more than --max-context "
            f"{settings.max_context} tokens. Give a smaller --max-context, or score a longer split (--split, --data)."
        )
    if num_places < settings.num_tokens:
        warn_for_all(
            "split %r has only %s targets with enough context. All of them are scored, fewer than --num-tokens %s",
            split.name,
            f"{num_places:,}",
            f"{settings.num_tokens:,}",
        )
    generator = np.random.default_rng(settings.seed)
    return np.sort(generator.choice(num_places, min(num_places, settings.num_tokens), replace=False))


def _memory_len(target: Target, settings: ReclSettings) -> int:
    if not target.config.model.takes_memory:
        return 0
    if settings.memory_len < 0:
        return target.config.train.memory_len
    return settings.memory_len


def _losses(
    targets: Sequence[Target],
    split: Split,
    starts: npt.NDArray[np.int64],
    settings: ReclSettings,
    outputs: ReclOutputs,
) -> Losses:
    """Return the losses losses_NCS of every model and context, on every rank."""
    contexts = settings.contexts
    target_S = starts + settings.max_context
    engine = targets[0].config.engine
    with distributed_context(timeout_s=engine.timeout_s, num_threads=engine.num_threads) as ranks, enough_memory():
        run_on_rank0(outputs.check_files)
        require_same(targets)
        for precision in sorted({target.bundle.precision for target in targets}):
            warn_of_slow_inference(precision, ranks.device)
        own = range(ranks.rank, len(starts), ranks.world_size)
        total = len(targets) * len(own) * sum(contexts)
        losses_NCS = torch.zeros(len(targets), len(contexts), len(starts), dtype=torch.float64)

        def score_own() -> None:
            tokens = split.read_all()
            with Progress("scoring", total=total, every_s=TELL_EVERY_S, unit="tokens") as progress:
                for model, target in enumerate(targets):
                    score = _scorer(target, memory_len=_memory_len(target, settings), device=ranks.device)
                    for first in range(0, len(own), settings.num_lanes):
                        rows = list(own[first : first + settings.num_lanes])
                        for index, context in enumerate(contexts):
                            piece_BX = tokens[target_S[rows, None] + np.arange(-context, 1)].astype(np.int64)
                            losses_NCS[model, index, rows] = (
                                score(torch.from_numpy(piece_BX).to(ranks.device)).double().cpu()
                            )
                            if ranks.is_rank0:
                                progress.advance(len(rows) * context)

        run_on_all_ranks(score_own)
        return all_reduce_sum(losses_NCS).numpy()


def _scorer(target: Target, *, memory_len: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that computes nll_B, the loss of the last token of each row, given all tokens before it.

    A model without memory sees at most one segment.
    """
    model = target.bundle.model.to(device).eval()
    segment_len = target.config.train.segment_len
    if not model.section.scheme.uses_memory:

        @torch.no_grad()
        def plain(piece_BX: Tensor) -> Tensor:
            if not memory_len:
                piece_BX = piece_BX[:, -segment_len - 1 :]
            memory = model.empty_memory(num_lanes=len(piece_BX), memory_len=memory_len)
            for here in _segments(piece_BX.shape[1] - 1, segment_len):
                hidden_BTD, memory = model(piece_BX[:, here], memory)
            return model.softmax.losses(hidden_BTD[:, -1:], piece_BX[:, -1:])[:, 0]

        return plain
    frozen = FrozenModel(model)

    def recurrent(piece_BX: Tensor) -> Tensor:
        num_rows = len(piece_BX)
        context = piece_BX.shape[1] - 1
        ring = frozen.ring(num_rows=num_rows, memory_len=min(memory_len, context), chunk_len=segment_len)
        for here in _segments(context, segment_len):
            hidden_BTD = frozen.run(piece_BX[:, here], ring)
        return frozen.losses(hidden_BTD[:, -1:], piece_BX[:, -1:])[:, 0]

    return recurrent


def _segments(context: int, segment_len: int) -> list[slice]:
    """Cut a context into segments. Only the first segment may be shorter than `segment_len`."""
    return [slice(max(0, stop - segment_len), stop) for stop in range(context, 0, -segment_len)][::-1]
