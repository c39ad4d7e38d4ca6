"""Scores of a model that adapts to the text that it has scored already: gradient steps, or a cache of hidden states.

Dynamic evaluation (Krause et al. 2018 and 2019): each segment is scored first, then one step on its mean loss changes
the weights, scaled by how large gradients were on training text (`square_sums`), and pulled back to where they began:

    theta <- theta - lr g / (sqrt(ss) + eps) - decay sqrt(ss) (theta - theta_0),        ss = sum of g^2 over batches

The neural cache (Grave et al. 2017): weights stay; what the last `window` hidden states of a lane were followed by is
likely again where the hidden state is like theirs:

    p(w) = (1 - l) p_model(w) + l sum over j of softmax_j(theta h_t . h_j) [w_j = w]

No token is seen before it was scored. The weights of the model that is given are never written: adapted ones are values
that come in and go out, like memory. What it costs: a backward pass per segment and about five times the weights in
memory; of the cache, `window` products per token, and `window` hidden states per lane.

Shapes: B lanes, T segment, W window, K = W + T entries, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from txl_dist.model.memory import EMPTY, Memory
from txl_dist.model.relative_attention import at_least_fp32
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL

MOST_SCORES = 2**22
"""Of the cache, at a time, in lanes times queries times entries: 16 MiB in fp32, a few times over."""

Weights = Mapping[str, Tensor]
"""By the names of `SegmentLoss`, each tied tensor once."""


class DynamicRule(NamedTuple):
    """How weights follow the text."""

    start: Weights
    """theta_0."""
    root: Weights
    """sqrt(ss), from `square_sums`."""
    lr: float
    decay: float
    eps: float

    def step(self, weights: Weights, gradients: Weights) -> Weights:
        """theta after one segment."""
        return {
            name: theta
            - self.lr * gradients[name] / (self.root[name] + self.eps)
            - self.decay * self.root[name] * (theta - self.start[name])
            for name, theta in weights.items()
        }


def weights_of(module: SegmentLoss) -> Weights:
    """The weights of a model, as they are: they are read only."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def square_sums(model: TransformerXL, batches: Iterable[Batch], memory: Memory) -> Weights:
    """ss: the squares of the gradients of the mean loss of each batch, summed over the batches, with memory carried on.

    The weights stay those of the model.
    """
    module = SegmentLoss(model)
    weights = weights_of(module)
    sums = {name: torch.zeros_like(theta) for name, theta in weights.items()}
    for batch in batches:
        _, gradients, memory = _scored(module, weights, batch, memory)
        for name, gradient in gradients.items():
            sums[name].addcmul_(gradient, gradient)
    return sums


def dynamic_losses(
    module: SegmentLoss, batch: Batch, weights: Weights, memory: Memory, *, rule: DynamicRule
) -> tuple[Tensor, Weights, Memory]:
    """(nll_BT of a segment by the weights so far, the weights behind it, the memory behind it).

    All lanes share the weights: a step follows the mean over what all of them scored. Gradients are those of fp32 at
    least; the model must be in evaluation mode, and of such a type.
    """
    nll_BT, gradients, memory = _scored(module, weights, batch, memory)
    return nll_BT, rule.step(weights, gradients), memory


def _scored(
    module: SegmentLoss, weights: Weights, batch: Batch, memory: Memory
) -> tuple[Tensor, dict[str, Tensor], Memory]:
    """(nll_BT, gradients of the mean loss of what is scored, the next memory)."""
    assert not module.model.training
    with torch.enable_grad():
        leaves = {name: theta.detach().requires_grad_() for name, theta in weights.items()}
        nll_BT, memory = functional_call(module, leaves, (batch, memory))
        loss = (nll_BT * batch.scored_BT).sum() / batch.scored_BT.sum().clamp(min=1)
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return nll_BT.detach(), dict(zip(leaves, gradients, strict=True)), memory


class NeuralCache(NamedTuple):
    """The last W positions of each lane, oldest first."""

    hidden_BWD: Tensor
    """What the softmax was given there."""
    word_BW: Tensor
    """The token that followed."""
    document_BW: Tensor
    """Its document, or EMPTY where there is nothing to remember."""

    def joined(self, other: NeuralCache) -> NeuralCache:
        """With the positions of another one behind ours."""
        return NeuralCache(*(torch.cat(pair, dim=1) for pair in zip(self, other, strict=True)))


def empty_cache(*, num_lanes: int, window: int, width: int, like: Tensor) -> NeuralCache:
    """A cache that holds nothing, for hidden states of the type and on the device of `like`, in at least fp32."""
    return NeuralCache(
        torch.zeros(num_lanes, window, width, dtype=at_least_fp32(like.dtype), device=like.device),
        torch.zeros(num_lanes, window, dtype=torch.int64, device=like.device),
        torch.full((num_lanes, window), EMPTY, dtype=torch.int64, device=like.device),
    )


@torch.inference_mode()
def cache_losses(
    nll_BT: Tensor, segment: NeuralCache, cache: NeuralCache, *, share: float, theta: float
) -> tuple[Tensor, NeuralCache]:
    """(nll_BT of the mixture, the cache behind the segment).

    `nll_BT` are the model's losses of the words in `segment`, which holds the T positions that are scored. A position
    sees the W before it, of its own lane and document; one that sees none has the model's loss, and one without
    document (EMPTY) is nobody's. `share` is l, in [0, 1).
    """
    window, num_tokens = cache.word_BW.shape[1], nll_BT.shape[1]
    segment = segment._replace(hidden_BWD=segment.hidden_BWD.to(cache.hidden_BWD.dtype))
    hidden_BKD, word_BK, document_BK = known = cache.joined(segment)
    log_share = math.log(share) if share > 0 else -math.inf
    step = max(1, min(window, MOST_SCORES // (2 * window * max(1, nll_BT.shape[0]))))
    parts = []
    for start in range(0, num_tokens, step):
        stop = min(start + step, num_tokens)
        entries = slice(start, window + stop - 1)  # the last query's newest entry is the one before it
        queries = slice(window + start, window + stop)
        age_QE = torch.arange(queries.start, queries.stop, device=nll_BT.device)[:, None] - torch.arange(
            entries.start, entries.stop, device=nll_BT.device
        )
        document_BQ1 = document_BK[:, queries, None]
        seen_BQE = (document_BK[:, None, entries] == document_BQ1) & (document_BQ1 != EMPTY)
        seen_BQE &= (age_QE >= 1) & (age_QE <= window)
        scores_BQE = theta * hidden_BKD[:, queries] @ hidden_BKD[:, entries].transpose(1, 2)
        scores_BQE = scores_BQE.masked_fill(~seen_BQE, -math.inf)
        is_word_BQE = word_BK[:, None, entries] == word_BK[:, queries, None]
        total_BQ = scores_BQE.logsumexp(-1)
        log_cached_BQ = scores_BQE.masked_fill(~is_word_BQE, -math.inf).logsumexp(-1) - total_BQ
        own_BQ = nll_BT[:, start:stop]
        mixed_BQ = torch.logaddexp(math.log1p(-share) - own_BQ, log_share + log_cached_BQ)
        parts.append(torch.where(total_BQ.isneginf(), own_BQ, -mixed_BQ))
    return torch.cat(parts, dim=1), NeuralCache(*(one[:, -window:] for one in known))
