"""Text that the model writes during training, through the engine, so that it works at every ZeRO stage.

A token is a segment of one behind a memory, which every rank runs: no cache of keys and values, as `infer.generate`
has, but the same text. Memory and generator are the sample's own; training is not disturbed.
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
"""In place of a token that could not be drawn."""


def sample_text(engine: Engine, tokenizer: Tokenizer, config: Config, *, device: torch.device, seed: int) -> str:
    """What the model writes behind `metrics.sample_prompt`: `metrics.sample_len` tokens, or up to the end of the
    document, or to where its probabilities are no numbers. All ranks call it together."""
    prompt, end_of_text = config.metrics.sample_prompt, tokenizer.end_of_text
    start = [end_of_text] if end_of_text is not None else []
    ids = start + [int(token) for token in tokenizer.encode_prompt(prompt)] or [0]
    written = _continue(engine, ids, config, device=device, seed=seed)
    ends = [written.index(token) for token in (end_of_text, _NOT_A_NUMBER) if token in written]
    written = written[: min(ends, default=len(written))]
    return tokenizer.joint(prompt) + "".join(tokenizer.decode_stream(written, after=ids))


def _continue(engine: Engine, ids: Sequence[int], config: Config, *, device: torch.device, seed: int) -> list[int]:
    """Always as many tokens as are asked for, so that all ranks make the same number of passes."""
    train, remembers = config.train, config.model.scheme.uses_memory
    # No less context than a segment gives in training; where the memory's length is the window, no more.
    longest = train.memory_len if config.model.same_length != "off" else max(train.memory_len, train.segment_len - 1)
    memory = engine.empty_memory(num_lanes=1, memory_len=longest if remembers else 0)
    numbers, sampling = uniform_numbers(seed), Sampling(temperature=1.0, top_k=0)
    past, written = list(ids), list[int]()
    pieces = [past[at : at + train.segment_len] for at in range(0, len(past), train.segment_len)]
    while len(written) < config.metrics.sample_len:
        for piece in pieces if remembers else [past[-train.segment_len :]]:
            log_p_BV, memory = engine.predict(_prompt(piece, device), memory)
        log_p_V = log_p_BV[0].float().cpu()
        if log_p_V.isnan().any():  # a model that has diverged: that is for `guard` to say
            written.append(_NOT_A_NUMBER)
            continue
        uniform_12 = torch.from_numpy(numbers.random((1, 2)))
        past.append(int(choose(log_p_V[None], uniform_12, sampling)))
        written.append(past[-1])
        pieces = [past[-1:]]
    return written


def _prompt(ids: list[int], device: torch.device) -> Batch:
    tokens_BT = torch.tensor([ids], dtype=torch.int64, device=device)
    return Batch(tokens_BT, targets_BT=tokens_BT, scored_BT=torch.ones_like(tokens_BT), document_BT=None)
