"""Sample texts that the model writes during training. The engine computes them, so they work at every ZeRO stage.

For each new token the model runs a segment of length 1 on every rank. The memory holds the hidden states of the tokens
before the new token. Unlike `inference`, sampling here uses no cache of keys and values, but the text is the same. A
sample has a memory and a random generator of its own, so it does not change training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from txl_dist.config.load import Config
from txl_dist.inference.options import Sampling
from txl_dist.inference.sampling import choose, uniform_numbers
from txl_dist.model.transformer_xl import Batch
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.train.engine.protocol import Engine

_NOT_A_NUMBER = -1
"""Id that is stored in place of a token if the model's probabilities are NaN."""


def sample_text(engine: Engine, tokenizer: Tokenizer, config: Config, *, device: torch.device, seed: int) -> str:
    """Return the text that the model writes after `metrics.sample_prompt`. All ranks call this function together.

    The text has `metrics.sample_len` tokens. It is shorter if the model ends the document, or if its probabilities are
    NaN.
    """
    prompt = config.metrics.sample_prompt
    end_of_text = tokenizer.end_of_text
    if end_of_text is not None:
        start = [end_of_text]
    else:
        start = []
    prompt_ids = [int(token) for token in tokenizer.encode_prompt(prompt)]
    ids = start + prompt_ids or [0]
    written = _continue(engine, ids, config, device=device, seed=seed)
    ends = [written.index(token) for token in (end_of_text, _NOT_A_NUMBER) if token in written]
    written = written[: min(ends, default=len(written))]
    return tokenizer.joint(prompt) + "".join(tokenizer.decode_stream(written, after=ids))


def _continue(engine: Engine, ids: Sequence[int], config: Config, *, device: torch.device, seed: int) -> list[int]:
    """Draw `metrics.sample_len` tokens after `ids`, and return their ids.

    All ranks make the same number of passes, because the number of tokens is always the same.
    """
    train = config.train
    segment_len = train.segment_len
    uses_memory = config.model.scheme.uses_memory
    memory_len = train.memory_len
    if config.model.same_length == "off":  # at least the context that a segment gives in training
        memory_len = max(train.memory_len, segment_len - 1)
    memory = engine.empty_memory(num_lanes=1, memory_len=memory_len if uses_memory else 0)
    numbers = uniform_numbers(seed)
    sampling = Sampling(temperature=1.0, top_k=0)
    past = list(ids)
    written: list[int] = []
    unread = [past[start : start + segment_len] for start in range(0, len(past), segment_len)]
    while len(written) < config.metrics.sample_len:
        if not uses_memory:
            unread = [past[-segment_len:]]
        for piece in unread:
            log_p_BV, memory = engine.predict(_prompt(piece, device), memory)
        log_p_V = log_p_BV[0].float().cpu()
        if log_p_V.isnan().any():  # the model has diverged, which `guard` reports
            written.append(_NOT_A_NUMBER)
            continue
        uniform_12 = torch.from_numpy(numbers.random((1, 2)))
        token = int(choose(log_p_V[None], uniform_12, sampling))
        past.append(token)
        written.append(token)
        unread = [[token]]
    return written


def _prompt(ids: list[int], device: torch.device) -> Batch:
    """Return a batch of one row with these token ids, on the device."""
    tokens_BT = torch.tensor([ids], dtype=torch.int64, device=device)
    return Batch(tokens_BT, targets_BT=tokens_BT, scored_BT=torch.ones_like(tokens_BT), document_BT=None)
