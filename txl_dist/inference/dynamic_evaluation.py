"""Losses of a model that adapts to the text that it has scored already, by gradient steps or by a cache.

Dynamic evaluation (Krause et al. 2018 and 2019) scores each segment first. Then one gradient step on the segment's mean
loss changes the weights. The step is scaled by the size of gradients on training text (`square_sums`), and the weights
are pulled back to the trained weights theta_0. Here g is the gradient of the segment's loss:

    theta <- theta - lr g / (sqrt(ss) + eps) - decay sqrt(ss) (theta - theta_0),        ss = sum of g^2 over batches

With the neural cache (Grave et al. 2017) the weights do not change. The last `window` hidden states of a lane (one
stream of text, a batch row) are kept, each with the word that followed. Such a word becomes more likely if the current
hidden state h_t is similar to the kept state h_j. Here l and theta are two settings, and w_j is the word that followed
h_j:

    p(w) = (1 - l) p_model(w) + l sum over j of softmax_j(theta h_t . h_j) [w_j = w]

Each token is scored before the model adapts to it. The weights of the given model are never written. Functions take and
return adapted weights as values, like memories. Dynamic evaluation costs a backward pass per segment, and memory for
about five times the weights. The cache costs `window` products of two hidden states per token, and memory for `window`
hidden states per lane.

Shapes: B lanes, T tokens of a segment, W window, K = W + T entries, D model width.
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
"""Largest number of cache scores that are computed at a time (lanes x queries x entries). A tensor of so many scores
has 16 MiB in fp32."""

Weights = Mapping[str, Tensor]
"""Weights by their parameter names in `SegmentLoss`. Each tied tensor occurs once."""


class DynamicRule(NamedTuple):
    """Rule by which dynamic evaluation changes the weights after each segment: the first equation of this module.

    The fields `lr`, `decay` and `eps` are the numbers with these names in the equation.
    """

    start: Weights
    """Trained weights: theta_0 in the equation."""
    root: Weights
    """Square root of ss (the summed squared gradients), from `square_sums`."""
    lr: float
    decay: float
    eps: float

    def step(self, weights: Weights, gradients: Weights) -> Weights:
        """Return the weights after one segment, from the weights before it and the gradients of its loss."""
        updated = {}
        for name, theta in weights.items():
            root = self.root[name]
            gradient_step = self.lr * gradients[name] / (root + self.eps)
            pull_back = self.decay * root * (theta - self.start[name])
            updated[name] = theta - gradient_step - pull_back
        return updated


def weights_of(module: SegmentLoss) -> Weights:
    """Return the weights of a model without copying them. The caller must not write to them."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def square_sums(model: TransformerXL, batches: Iterable[Batch], memory: Memory) -> Weights:
    """Return ss of each weight: the squared gradient of a batch's mean loss, summed over the batches.

    The memory after each batch is passed to the next batch. The model's weights do not change.
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
    """Return (nll_BT of a segment by the current weights, the weights after the segment, the memory after it).

    All lanes share the weights, so a step uses the mean loss over all lanes. The model must be in evaluation mode and
    in fp32 or fp64.
    """
    nll_BT, gradients, memory = _scored(module, weights, batch, memory)
    return nll_BT, rule.step(weights, gradients), memory


def _scored(
    module: SegmentLoss, weights: Weights, batch: Batch, memory: Memory
) -> tuple[Tensor, dict[str, Tensor], Memory]:
    """Return (nll_BT, gradients of the mean loss over the scored targets, the next memory)."""
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
    """Last W scored positions of each lane (batch row), oldest first."""

    hidden_BWD: Tensor
    """Hidden state at each position, which is the input of the softmax."""
    word_BW: Tensor
    """Id of the token that followed each position."""
    document_BW: Tensor
    """Document number of that following token, or EMPTY where the cache holds nothing."""

    def joined(self, other: NeuralCache) -> NeuralCache:
        """Return a cache with the positions of this cache, then the positions of `other`."""
        return NeuralCache(
            hidden_BWD=torch.cat([self.hidden_BWD, other.hidden_BWD], dim=1),
            word_BW=torch.cat([self.word_BW, other.word_BW], dim=1),
            document_BW=torch.cat([self.document_BW, other.document_BW], dim=1),
        )

    def newest(self, window: int) -> NeuralCache:
        """Return a cache with the last `window` positions only."""
        return NeuralCache(
            hidden_BWD=self.hidden_BWD[:, -window:],
            word_BW=self.word_BW[:, -window:],
            document_BW=self.document_BW[:, -window:],
        )


def empty_cache(*, num_lanes: int, window: int, width: int, like: Tensor) -> NeuralCache:
    """Make an empty neural cache for `num_lanes` lanes and at most `window` positions per lane.

    `width` is the model width. The cache is on the device of `like` and has its type, but at least fp32.
    """
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
    """Mix the model's probabilities with the probabilities of a neural cache.

    Returns (nll_BT of the mixture, the next cache).

    `nll_BT` are the model's losses of the words in `segment`, which holds the T positions to score. A position sees the
    W positions before it that are in its lane and document. A position that sees no cached position keeps the model's
    loss. Positions with the document EMPTY are never seen. `share` is l in the equation, in [0, 1). `theta` scales the
    similarity.
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
    """Return (log of a query's summed weights, log-probability of its word by the cache), both [B, Q].

    An entry that the query sees has the weight exp(score of query and entry).

    The first result is -inf for a query that sees no entry.
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
