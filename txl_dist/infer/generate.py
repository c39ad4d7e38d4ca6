"""Sampling, token by token, over a cache of projected keys and values.

A token costs the same however long the past is: each layer keeps the keys and values of the last `memory_len`
positions and the projected encodings of all distances, since the weights do not change. A model with absolute
positions cannot: it runs a whole segment for each token (what the paper's table 9 measures).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from txl_dist.errors import ConfigError
from txl_dist.model.transformer_xl import TransformerXL


def generate(
    model: TransformerXL,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    segment_len: int,
    memory_len: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_at: int | None = None,
) -> Iterator[int]:
    """Up to `max_tokens` ids that continue `prompt` (not empty), ending before `stop_at`.

    temperature 0 takes the likeliest token; top_k keeps the k likeliest (0: all); top_p the fewest whose
    probabilities sum to at least top_p. Raises ConfigError for values out of range.
    """
    if not (0 <= temperature < math.inf and top_k >= 0 and 0 < top_p <= 1 and max_tokens >= 0 and 0 <= seed < 2**63):
        raise ConfigError(
            f"temperature={temperature}, top_k={top_k}, max_tokens={max_tokens} and seed={seed} must be >= 0 (the seed "
            f"below 2**63) and top_p={top_p} in (0, 1]. Correct them."
        )
    assert len(prompt) > 0
    draw = functools.partial(
        sample, temperature=temperature, top_k=top_k, top_p=top_p, generator=torch.Generator().manual_seed(seed)
    )
    if model.section.scheme.uses_memory:
        ids = _continue(model, prompt, draw=draw, segment_len=segment_len, memory_len=memory_len)
    else:
        ids = _continue_anew(model, prompt, draw=draw, segment_len=segment_len)
    return itertools.takewhile(lambda token: token != stop_at, itertools.islice(ids, max_tokens))


@torch.no_grad()
def _continue_anew(
    model: TransformerXL, prompt: Sequence[int], *, draw: Callable[[Tensor], int], segment_len: int
) -> Iterator[int]:
    """Endless; without relative positions nothing of the past can be kept: each token runs a whole segment again."""
    device = next(model.parameters()).device
    memory = model.empty_memory(num_lanes=1, memory_len=0)
    past = list(prompt)
    while True:
        past = past[-segment_len:]
        hidden_1TD, _ = model(torch.tensor([past], dtype=torch.int64, device=device), memory)
        past.append(draw(model.softmax.log_probabilities(hidden_1TD[:, -1])[0].cpu()))
        yield past[-1]


@torch.no_grad()
def _continue(
    model: TransformerXL,
    prompt: Sequence[int],
    *,
    draw: Callable[[Tensor], int],
    segment_len: int,
    memory_len: int,
) -> Iterator[int]:
    """Endless."""
    device = next(model.parameters()).device
    cache = model.empty_cache(num_lanes=1, memory_len=memory_len)
    distances = model.project_distances(memory_len + max(segment_len, 1))
    pending = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
    while True:
        for piece_1T in pending.split(segment_len, dim=1):
            hidden_1TD, cache = model.forward_cached(piece_1T, cache, distances=distances)
        token = draw(model.softmax.log_probabilities(hidden_1TD[:, -1])[0].cpu())
        yield token
        pending = torch.tensor([[token]], dtype=torch.int64, device=device)


def sample(log_p_V: Tensor, *, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """Draw one id from log-probabilities, restricted as `generate` says."""
    if temperature == 0:
        return int(log_p_V.argmax())
    # The likeliest is moved to 0 first: a tiny temperature must not overflow.
    ordered_V, ids_V = ((log_p_V - log_p_V.max()) / temperature).sort(descending=True, stable=True)
    if top_k:
        ordered_V, ids_V = ordered_V[:top_k], ids_V[:top_k]
    p_V = ordered_V.softmax(-1)
    # Keep a token if those before it have not yet reached top_p; the first always stays.
    p_V = torch.where(p_V.cumsum(-1) - p_V < top_p, p_V, 0.0)
    return int(ids_V[torch.multinomial(p_V, 1, generator=generator)])
