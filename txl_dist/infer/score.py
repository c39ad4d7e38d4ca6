"""Log-probabilities of given tokens, segment by segment, with memory."""

from __future__ import annotations

import torch
from torch import Tensor

from txl_dist.model.memory import attended
from txl_dist.model.transformer_xl import TransformerXL


@torch.no_grad()
def log_probabilities(
    model: TransformerXL, tokens_BS: Tensor, *, segment_len: int, memory_len: int, zero_memory: bool = False
) -> Tensor:
    """log p in nats of tokens 1 ... S-1 of each row, given all before them; [B, S - 1], at least fp32.

    `segment_len` tokens are run at a time over a memory of `memory_len`. With a memory as long as the text the
    result does not depend on `segment_len`. `zero_memory` begins with a memory of zeros that is attended, as Hugging
    Face and TensorFlow do, instead of one that holds nothing. The model must be in evaluation mode.
    """
    assert not model.training
    memory = model.empty_memory(num_lanes=tokens_BS.shape[0], memory_len=memory_len)
    memory = attended(memory) if zero_memory else memory
    parts = [torch.empty(tokens_BS.shape[0], 0, device=tokens_BS.device)]  # fewer than two tokens have no scores
    for start in range(0, tokens_BS.shape[1] - 1, segment_len):
        stop = min(start + segment_len, tokens_BS.shape[1] - 1)
        hidden_BTD, memory = model(tokens_BS[:, start:stop], memory)
        parts.append(-model.softmax(hidden_BTD, tokens_BS[:, start + 1 : stop + 1]))
    return torch.cat(parts, dim=1)
