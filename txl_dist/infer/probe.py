"""The probe: fixed tokens whose losses prove that weights are the ones that were trained.

The training engine computes the losses with its live weights at every checkpoint; whoever loads exported weights
computes them again. The tokens run as two segments, so that the memory is probed as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from txl_dist.infer.score import log_probabilities
from txl_dist.model.transformer_xl import TransformerXL

PROBE_LEN = 32


def probe_tokens(vocab_size: int) -> Tensor:
    """[1, 2 * PROBE_LEN + 1] ids spread over the whole vocabulary: a segment, a second one, the last target."""
    position = torch.arange(2 * PROBE_LEN + 1, dtype=torch.int64)
    return ((position * 7919 + 1) % vocab_size)[None, :]


def probe_of(model: TransformerXL, *, memory_len: int) -> dict[str, Tensor]:
    """A probe that weights make themselves: it proves what is written and loaded, not where they came from."""
    tokens = probe_tokens(model.vocab_size)
    losses = -log_probabilities(model, tokens, segment_len=PROBE_LEN, memory_len=memory_len)
    return {"tokens": tokens, "losses": losses}


def probe_error(model: TransformerXL, probe: dict[str, Tensor], *, memory_len: int) -> float:
    """Largest absolute difference in nats between the engine's `losses` on the probe's `tokens` and this model's."""
    ours = log_probabilities(model, probe["tokens"], segment_len=PROBE_LEN, memory_len=memory_len)
    return float((ours + probe["losses"]).abs().max())
