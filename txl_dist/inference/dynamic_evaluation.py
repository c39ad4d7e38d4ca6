"""Scores of a model that adapts to the text that it has scored already: gradient steps, or a cache of hidden states.

Dynamic evaluation (Krause et al. 2018 and 2019): each segment is scored first, then one step on its mean loss changes
the weights, scaled by how large gradients were on training text (`square_sums`), and pulled back to where they began:

    theta <- theta - lr g / (sqrt(ss) + eps) - decay sqrt(ss) (theta - theta_0),        ss = sum of g^2 over batches

The neural cache (Grave et al. 2017): the weights stay. The last `window` hidden states of a lane are kept, with the
word that followed each. Such a word becomes more likely where the present hidden state is similar:

    p(w) = (1 - l) p_model(w) + l sum over j of softmax_j(theta h_t . h_j) [w_j = w]

No token is seen before it was scored. The weights of the given model are never written: adapted ones are values that
come in and go out, like memory. Dynamic evaluation costs a backward pass per segment, and memory for about five times
the weights. The cache costs `window` products per token, and `window` hidden states per lane.

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
"""Largest number of scores of the cache at a time (lanes x queries x entries): 16 MiB in fp32, for a few tensors."""

Weights = Mapping[str, Tensor]
"""Weights by their names in `SegmentLoss`, each tied tensor once."""


class DynamicRule(NamedTuple):
    """Update of the weights after each segment."""

    start: Weights
    """Trained weights, theta_0 in the equation."""
    root: Weights
    """Square root of ss, from `square_sums`."""
    lr: float
    decay: float
    eps: float

    def step(self, weights: Weights, gradients: Weights) -> Weights:
        """Return the weights after one segment."""
        updated = {}
        for name, theta in weights.items():
            root = self.root[name]
            gradient_step = self.lr * gradients[name] / (root + self.eps)
            pull_back = self.decay * root * (theta - self.start[name])
            updated[name] = theta - gradient_step - pull_back
        return updated


def weights_of(module: SegmentLoss) -> Weights:
    """Return the weights of a model without copying them. They must not be written."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def square_sums(model: TransformerXL, batches: Iterable[Batch], memory: Memory) -> Weights:
    """Return ss: the squared gradients of the mean loss of each batch, summed over the batches.

    The memory is carried from batch to batch. The weights stay those of the model.
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
    """Return (nll_BT of a segment by the weights so far, the weights after it, the memory after it).

    All lanes share the weights: a step follows the mean loss of all of them. The model must be in evaluation mode, and
    of fp32 or fp64.
    """
    nll_BT, gradients, memory = _scored(module, weights, batch, memory)
    return nll_BT, rule.step(weights, gradients), memory


def _scored(
    module: SegmentLoss, weights: Weights, batch: Batch, memory: Memory
) -> tuple[Tensor, dict[str, Tensor], Memory]:
    """Return (nll_BT, gradients of the mean scored loss, the next memory)."""
    assert not module.model.training
    with torch.enable_grad():
        leaves = {name: theta.detach().requires_grad_() for name, theta in weights.items()}
        nll_BT, memory = functional_call(module, leaves, (batch, memory))
        num_scored = batch.scored_BT.sum().clamp(min=1)
        loss = (nll_BT * batch.scored_BT).sum() / num_scored
        parameters = list(leaves.values())
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return nll_BT.detach(), dict(zip(leaves, gradients, strict=True)), memory


class NeuralCache(NamedTuple):
    """Last W positions of each lane, oldest first."""

    hidden_BWD: Tensor
    """Input of the softmax at each position."""
    word_BW: Tensor
    """Id of the token that followed."""
    document_BW: Tensor
    """Document of that token, or EMPTY where the cache holds nothing."""

    def joined(self, other: NeuralCache) -> NeuralCache:
        """Return the positions of this cache followed by those of another one."""
        return NeuralCache(
            hidden_BWD=torch.cat([self.hidden_BWD, other.hidden_BWD], dim=1),
            word_BW=torch.cat([self.word_BW, other.word_BW], dim=1),
            document_BW=torch.cat([self.document_BW, other.document_BW], dim=1),
        )

    def newest(self, window: int) -> NeuralCache:
        """Return the last `window` positions."""
        return NeuralCache(
            hidden_BWD=self.hidden_BWD[:, -window:],
            word_BW=self.word_BW[:, -window:],
            document_BW=self.document_BW[:, -window:],
        )


def empty_cache(*, num_lanes: int, window: int, width: int, like: Tensor) -> NeuralCache:
    """Make a cache that holds nothing, on the device of `like`, for hidden states of its type, fp32 or higher."""
    device = like.device
    return NeuralCache(
        hidden_BWD=torch.zeros(num_lanes, window, width, dtype=at_least_fp32(like.dtype), device=device),
        word_BW=torch.zeros(num_lanes, window, dtype=torch.int64, device=device),
        document_BW=torch.full((num_lanes, window), EMPTY, dtype=torch.int64, device=device),
    )


@torch.inference_mode()
def cache_losses(
    nll_BT: Tensor, segment: NeuralCache, cache: NeuralCache, *, share: float, theta: float
) -> tuple[Tensor, NeuralCache]:
    """Return (nll_BT of the mixture, the cache after the segment).

    `nll_BT` are the model's losses of the words in `segment`, which holds the T positions that are scored. A position
    sees the W before it, in its lane and document. A position that sees none keeps the model's loss. Positions without
    a document (EMPTY) are seen by none. `share` is l, in [0, 1).
    """
    num_lanes, num_tokens = nll_BT.shape
    window = cache.word_BW.shape[1]
    segment = segment._replace(hidden_BWD=segment.hidden_BWD.to(cache.hidden_BWD.dtype))
    known = cache.joined(segment)
    if share > 0:
        log_share = math.log(share)
    else:
        log_share = -math.inf
    step = MOST_SCORES // (2 * window * max(1, num_lanes))
    step = max(1, min(window, step))
    parts = []
    for start in range(0, num_tokens, step):
        stop = min(start + step, num_tokens)
        entries = slice(start, window + stop - 1)  # the last query's newest entry is the one before it
        queries = slice(window + start, window + stop)
        total_BQ, log_cached_BQ = _cached(known, queries, entries, window=window, theta=theta)
        own_BQ = nll_BT[:, start:stop]
        mixed_BQ = torch.logaddexp(math.log1p(-share) - own_BQ, log_share + log_cached_BQ)
        parts.append(torch.where(total_BQ.isneginf(), own_BQ, -mixed_BQ))
    return torch.cat(parts, dim=1), known.newest(window)


def _cached(known: NeuralCache, queries: slice, entries: slice, *, window: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return (log of the sum of the scores that a query sees, log probability of its word by the cache), both [B, Q].

    The first is -inf for a query that sees no entry.
    """
    hidden_BKD, word_BK, document_BK = known
    device = word_BK.device
    query_Q1 = torch.arange(queries.start, queries.stop, device=device)[:, None]
    age_QE = query_Q1 - torch.arange(entries.start, entries.stop, device=device)
    document_BQ1 = document_BK[:, queries, None]
    seen_BQE = (document_BK[:, None, entries] == document_BQ1) & (document_BQ1 != EMPTY)
    seen_BQE &= (age_QE >= 1) & (age_QE <= window)
    scores_BQE = theta * hidden_BKD[:, queries] @ hidden_BKD[:, entries].transpose(1, 2)
    scores_BQE = scores_BQE.masked_fill(~seen_BQE, -math.inf)
    total_BQ = scores_BQE.logsumexp(-1)
    is_word_BQE = word_BK[:, None, entries] == word_BK[:, queries, None]
    of_word_BQE = scores_BQE.masked_fill(~is_word_BQE, -math.inf)
    return total_BQ, of_word_BQE.logsumexp(-1) - total_BQ
