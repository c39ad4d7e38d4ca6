"""Log-probabilities of given tokens, and the probe: tokens whose recorded losses show that weights are the trained
ones.

At every checkpoint the training engine computes and records the losses. Code that loads exported weights computes the
losses again and compares. The tokens run as two segments, so that the losses also depend on the memory. A model that
predicts in any order (XLNet) predicts them by query rows, in an order that is always the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from txl_dist.model.memory import attended
from txl_dist.model.prediction_order import PredictionOrder
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
    """Return [B, S - 1] log-probabilities in nats of the tokens 1 ... S-1 of each row, in fp32 or higher.

    Each token is scored given all tokens before it. The model runs `segment_len` tokens at a time with a memory of
    `memory_len` tokens. If the memory is as long as the text, the result does not depend on `segment_len`. With
    `zero_memory` the text begins with a memory of zeros that is attended to, as in Hugging Face and TensorFlow, instead
    of an empty memory. `document_BS` is the document number of each token, which sees only its own document. The model
    must be in evaluation mode.
    """
    assert not model.training
    num_rows, num_tokens = tokens_BS.shape
    memory = model.empty_memory(num_lanes=num_rows, memory_len=memory_len)
    if zero_memory:
        memory = attended(memory)
    parts = [torch.empty(num_rows, 0, device=tokens_BS.device)]  # fewer than two tokens have no scores
    num_scored = num_tokens - 1
    for start in range(0, num_scored, segment_len):
        stop = min(start + segment_len, num_scored)
        inputs_BT = tokens_BS[:, start:stop]
        targets_BT = tokens_BS[:, start + 1 : stop + 1]
        document_BT = None
        if document_BS is not None:
            document_BT = document_BS[:, start:stop]
        hidden_BTD, memory = model(inputs_BT, memory, document_BT=document_BT)
        nll_BT = model.softmax(hidden_BTD, targets_BT)
        parts.append(-nll_BT)
    return torch.cat(parts, dim=1)


def probe_tokens(vocab_size: int) -> Tensor:
    """Return the tokens of a probe: [1, 2 * PROBE_LEN + 1] ids that are spread over the whole vocabulary.

    The ids are two segments, followed by the target of the last position.
    """
    position = torch.arange(2 * PROBE_LEN + 1, dtype=torch.int64)
    ids = (position * 7919 + 1) % vocab_size
    return ids[None, :]


def probe_order(*, with_types: bool, device: torch.device | None = None) -> PredictionOrder:
    """Return the order in which a model that predicts in any order (XLNet) predicts a segment of the probe.

    The segment has PROBE_LEN + 1 tokens. The first token is known, and all others are targets. The memory stores all
    tokens but the last, which begins the next segment. With `with_types` the tokens have the segment types 0 and 1 in
    turn, so that the losses also depend on the segment terms.
    """
    place_T = torch.arange(PROBE_LEN + 1, device=device)
    rank_T = place_T * 13 % PROBE_LEN  # each rank from 0 to PROBE_LEN - 1 once, because 13 and 32 have no common factor
    level_T = torch.where(place_T == 0, 0, 1 + rank_T)
    query_level_T = level_T.clamp(min=1)
    type_BT = None
    if with_types:
        type_BT = (place_T % 2)[None]
    return PredictionOrder(query_level_T[None], level_T[None], place_T[None, 1:], PROBE_LEN, type_BT)


@torch.no_grad()
def _probe_losses(model: TransformerXL, tokens: Tensor, *, memory_len: int) -> Tensor:
    """Return a model's losses on the tokens of a probe in nats, [1, 2 * PROBE_LEN]."""
    if not model.section.any_order:
        return -log_probabilities(model, tokens, segment_len=PROBE_LEN, memory_len=memory_len)
    order = probe_order(with_types=model.section.segment_terms, device=tokens.device)
    memory = model.empty_memory(num_lanes=1, memory_len=memory_len)
    losses = []
    for start in (0, PROBE_LEN):
        tokens_BT = tokens[:, start : start + PROBE_LEN + 1]
        hidden_BmD, memory = model(tokens_BT, memory, order=order)
        losses.append(model.softmax(hidden_BmD, tokens_BT[:, 1:]))
    return torch.cat(losses, dim=1)


def probe_of(model: TransformerXL, *, memory_len: int) -> dict[str, Tensor]:
    """Compute a probe with the model itself, for weights without a probe of the engine that trained them.

    Such a probe proves that the weights are written and loaded correctly. It does not prove where the weights come
    from.
    """
    tokens = probe_tokens(model.vocab_size)
    return {"tokens": tokens, "losses": _probe_losses(model, tokens, memory_len=memory_len)}


def probe_error(model: TransformerXL, probe: dict[str, Tensor], *, memory_len: int) -> float:
    """Return the largest difference in nats between the losses in a probe and this model's losses on its tokens."""
    ours = _probe_losses(model, probe["tokens"], memory_len=memory_len)
    return float((ours - probe["losses"]).abs().max())
