"""Functions that compute the losses of segments in order. Each segment starts from the state after the previous
segment.

`static` is for fixed weights, `with_cache` for a neural cache, and `dynamic` for weights that learn. These three
functions return `(losses, first)`. `losses` computes the losses of one segment, and `first` is the state before the
first segment. The call `losses(batch, state)` returns `(nll_BT, next state)`, as `train.report.evaluate` expects. For
`static` and `with_cache` the state holds keys and values of the past if the positional scheme supports a memory, else
hidden states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from txl_dist.data.loader.evaluation import EvalStream, EvaluationText
from txl_dist.data.loader.shards import Split
from txl_dist.errors import ConfigError
from txl_dist.evaluation.options import AdaptationOptions
from txl_dist.inference.dynamic_evaluation import (
    DynamicRule,
    NeuralCache,
    Weights,
    cache_losses,
    dynamic_losses,
    empty_cache,
    square_sums,
    weights_of,
)
from txl_dist.inference.kv_cache import FrozenModel
from txl_dist.model.memory import EMPTY, Memory, attended
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL
from txl_dist.train.batch import BatchMaker, to_device

Losses = Callable[[Batch, Any], tuple[Tensor, Any]]


class Core(NamedTuple):
    """Functions of a model with frozen weights, and the memory before the first segment. `core_of` makes a core."""

    hidden: Callable[[Batch, Any], tuple[Tensor, Any]]
    """Function that takes a segment and the memory before the segment. The function returns the hidden states
    hidden_BTD and the memory after the segment."""
    losses: Callable[[Tensor, Batch], Tensor]
    """Function that returns the losses nll_BT from hidden_BTD."""
    top1_correct: Callable[[Tensor, Batch], Tensor]
    """Function that returns correct_BT from hidden_BTD: 1.0 where the target is the most probable token, else 0.0."""
    memory: Any
    """Memory before the first segment, in the form that `hidden` takes."""


def core_of(
    model: TransformerXL, cut: EvaluationText, *, memory_len: int, with_documents: bool, with_zeros: bool
) -> Core:
    """Build the core that runs a model over the lanes (streams of text, one per batch row) of an evaluation text.

    `memory_len` is in tokens. With `with_documents` a token sees only its own document. With `with_zeros` the text
    begins with a memory of zeros that is attended to, instead of an empty memory.
    """
    if model.section.scheme.uses_memory:
        begin = _cached
    else:
        begin = _plain
    return begin(model, cut, memory_len=memory_len, with_documents=with_documents, with_zeros=with_zeros)


@torch.inference_mode()
def _cached(
    model: TransformerXL, cut: EvaluationText, *, memory_len: int, with_documents: bool, with_zeros: bool
) -> Core:
    """Build a core whose memory is keys and values of the past."""
    frozen = FrozenModel(model)
    num_rows = len(cut.lanes)
    ring = frozen.ring(
        num_rows=num_rows,
        memory_len=memory_len,
        chunk_len=cut.overlap_len + cut.segment_len,
        with_documents=with_documents,
    )
    if with_zeros and memory_len:
        zeros = attended(model.empty_memory(num_lanes=1, memory_len=memory_len))
        for lane in range(num_rows):
            ring.put(lane, frozen.past_of(zeros)[0])
    return Core(
        lambda batch, ring: (
            frozen.run(batch.tokens_BT, ring, document_BT=batch.document_BT, partition=batch.token_partition),
            ring,
        ),
        lambda hidden_BTD, batch: frozen.losses(hidden_BTD, batch.targets_BT, partition=batch.target_partition),
        lambda hidden_BTD, batch: frozen.top1_correct(hidden_BTD, batch.targets_BT),
        ring,
    )


def _plain(
    model: TransformerXL, cut: EvaluationText, *, memory_len: int, with_documents: bool, with_zeros: bool
) -> Core:
    """Build a core for a positional scheme that supports no KV cache. The core's memory holds hidden states, or is
    empty."""
    memory = model.empty_memory(num_lanes=len(cut.lanes), memory_len=memory_len)

    @torch.no_grad()
    def hidden(batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        hidden_BTD, memory = model(
            batch.tokens_BT, memory, document_BT=batch.document_BT, partition=batch.token_partition
        )
        return hidden_BTD, memory

    @torch.no_grad()
    def losses(hidden_BTD: Tensor, batch: Batch) -> Tensor:
        return model.softmax.losses(hidden_BTD, batch.targets_BT, partition=batch.target_partition)

    @torch.no_grad()
    def top1_correct(hidden_BTD: Tensor, batch: Batch) -> Tensor:
        return model.softmax.top1_correct(hidden_BTD, batch.targets_BT)

    return Core(hidden, losses, top1_correct, attended(memory) if with_zeros else memory)


def static(core: Core, *, with_top1_correct: bool = False) -> tuple[Losses, Any]:
    """Return (function that computes losses with fixed weights, the memory before the first segment).

    With `with_top1_correct` the function returns score_2BT: the losses, then 1.0 where the target is the most probable
    token, else 0.0.
    """

    def losses(batch: Batch, memory: Any) -> tuple[Tensor, Any]:
        hidden_BTD, memory = core.hidden(batch, memory)
        nll_BT = core.losses(hidden_BTD, batch)
        if with_top1_correct:
            return torch.stack([nll_BT, core.top1_correct(hidden_BTD, batch)]), memory
        return nll_BT, memory

    return losses, core.memory


def with_cache(
    core: Core, model: TransformerXL, cut: EvaluationText, adaptation: AdaptationOptions
) -> tuple[Losses, Any]:
    """Return (function that computes losses with a neural cache per lane, the state before the first segment).

    The cache holds scored positions. Overlap tokens, which are run a second time as context, are not added again.
    """
    like = model.embedding.weight(0)
    width = model.section.width
    cache = empty_cache(num_lanes=len(cut.lanes), window=adaptation.cache_window, width=width, like=like)

    def losses(batch: Batch, state: tuple[Any, NeuralCache]) -> tuple[Tensor, tuple[Any, NeuralCache]]:
        memory, cache = state
        hidden_BTD, memory = core.hidden(batch, memory)
        nll_BT = core.losses(hidden_BTD, batch)
        if batch.document_BT is None:
            documents_BT = torch.zeros_like(batch.targets_BT)
        else:
            documents_BT = batch.document_BT
        documents_BT = torch.where(batch.scored_BT > 0, documents_BT, EMPTY)
        new = slice(-cut.segment_len, None)
        segment = NeuralCache(hidden_BTD[:, new], batch.targets_BT[:, new], documents_BT[:, new])
        mixed_BT, cache = cache_losses(
            nll_BT[:, new], segment, cache, share=adaptation.cache_share, theta=adaptation.cache_theta
        )
        return torch.cat([nll_BT[:, : -cut.segment_len], mixed_BT], dim=1), (memory, cache)

    return losses, (core.memory, cache)


def dynamic(
    model: TransformerXL,
    cut: EvaluationText,
    train: EvalStream,
    adaptation: AdaptationOptions,
    *,
    maker: BatchMaker,
    memory_len: int,
    with_zeros: bool,
    before_segment: Callable[[], None],
) -> tuple[Losses, Any]:
    """Return (function that computes losses by dynamic evaluation, its first state). A state is weights and a memory.

    Gradients on the first batches of `train` give the scale of the steps. `maker` turns segments into batches, and
    `before_segment` is called before each of these batches. The model's own weights do not change. The returned
    function raises ConfigError if a loss is not finite.
    """
    memory = model.empty_memory(num_lanes=len(cut.lanes), memory_len=memory_len)
    if with_zeros:
        memory = attended(memory)
    module = SegmentLoss(model)
    device = memory.document_BM.device

    def batches() -> Iterator[Batch]:
        for segment in itertools.islice(train, adaptation.adapt_batches):
            before_segment()
            yield to_device(maker.batch(segment), device)

    first = model.empty_memory(num_lanes=len(train.lanes), memory_len=memory_len)
    sums = square_sums(model, batches(), attended(first) if with_zeros else first)
    start = weights_of(module)
    root = {name: total.sqrt_() for name, total in sums.items()}
    rule = DynamicRule(start, root, lr=adaptation.adapt_lr, decay=adaptation.adapt_decay, eps=adaptation.adapt_eps)

    def losses(batch: Batch, state: tuple[Weights, Memory]) -> tuple[Tensor, tuple[Weights, Memory]]:
        nll_BT, weights, memory = dynamic_losses(module, batch, *state, rule=rule)
        if not nll_BT.isfinite().all():
            raise ConfigError(
                "--adapt dynamic reached a loss that is not finite, because its steps are too large. Lower --adapt-lr "
                "or --adapt-decay, or raise --adapt-eps."
            )
        return nll_BT, (weights, memory)

    return losses, (start, memory)


def train_cut(train: Split, cut: EvaluationText) -> EvalStream:
    """Cut a training split into as many lanes as the validation split `cut` has, and into segments of the same length
    as in `cut`."""
    return EvalStream(train, num_lanes=len(cut.lanes), segment_len=cut.segment_len, overlap_len=cut.overlap_len)
