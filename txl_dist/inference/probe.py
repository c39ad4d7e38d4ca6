"""Log-probabilities of given tokens, and the probe: tokens whose losses prove that weights are the trained ones.

The training engine computes the losses with its live weights at every checkpoint; whoever loads exported weights
computes them again. The tokens run as two segments, so that the memory is probed as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from txl_dist.model.memory import attended
from txl_dist.model.transformer_xl import TransformerXL

PROBE_LEN = 32


@torch.no_grad()
def log_probabilities(
    model: TransformerXL,
    tokens_BS: Tensor,
    *,
    segment_len: int,
    memory_len: int,
    zero_memory: bool = False,
    document_BS: Tensor | None = None,
) -> Tensor:
    """log p in nats of tokens 1 ... S-1 of each row, given all before them; [B, S - 1], at least fp32.

    `segment_len` tokens are run at a time over a memory of `memory_len`. With a memory as long as the text the
    result does not depend on `segment_len`. `zero_memory` begins with a memory of zeros that is attended, as Hugging
    Face and TensorFlow do, instead of one that holds nothing. `document_BS` confines each token to its own document.
    The model must be in evaluation mode.
    """
    assert not model.training
    memory = model.empty_memory(num_lanes=tokens_BS.shape[0], memory_len=memory_len)
    memory = attended(memory) if zero_memory else memory
    parts = [torch.empty(tokens_BS.shape[0], 0, device=tokens_BS.device)]  # fewer than two tokens have no scores
    for start in range(0, tokens_BS.shape[1] - 1, segment_len):
        stop = min(start + segment_len, tokens_BS.shape[1] - 1)
        document_BT = None if document_BS is None else document_BS[:, start:stop]
        hidden_BTD, memory = model(tokens_BS[:, start:stop], memory, document_BT=document_BT)
        parts.append(-model.softmax(hidden_BTD, tokens_BS[:, start + 1 : stop + 1]))
    return torch.cat(parts, dim=1)


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
