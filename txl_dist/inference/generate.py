"""Generation of many texts at once. Each step generates one token of every text. No text depends on the other texts.

    decoder = Decoder(model, memory_len=512, segment_len=64)
    decoder.add("a", Request(ids=(5, 17, 3), max_tokens=20))
    while decoder.keys:
        for token in decoder.step():             # its key, its id, its log_p
            if token.is_last:
                decoder.remove(token.key)

The method `add` reads a prompt up to its last token, in chunks of `segment_len` tokens. The prompt's last token runs in
the next step, in one batch with the last tokens of all other texts. So a text's memory never includes the text's last
token. Each text has its own row of the KV cache, so that it can begin and end at any step.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from txl_dist.errors import ConfigError
from txl_dist.inference.kv_cache import CacheState, FrozenModel
from txl_dist.inference.options import Sampling
from txl_dist.inference.sampling import choose, uniform_numbers
from txl_dist.model.transformer_xl import TransformerXL


class Request(NamedTuple):
    """Prompt to continue, with its limits and sampling settings. `Decoder.add` and `Decoder.read` take it."""

    ids: tuple[int, ...]
    """Ids of the prompt, which has at least one token."""
    max_tokens: int
    """Maximum number of tokens to generate."""
    past: CacheState | None = None
    """Memory of the text before `ids`. None if no text comes before, or if the model has no memory."""
    num_read: int = 0
    """Number of leading `ids` that `past` already includes. The last id is never one of them."""
    stop_at: int | None = None
    """Id of the token that ends the text, usually end-of-text. None means that only `max_tokens` ends it."""
    sampling: Sampling = Sampling()
    seed: int = 0
    """Seed of the random numbers for sampling."""
    sample: int = 0
    """Number of this text among the texts that one prompt and seed generate, from 0."""
    num_top: int = 0
    """Number of most probable ids to return with each token."""
    num_spare: int = 0
    """Number of newest tokens that `Decoder.past` can leave out without making the memory shorter. For this purpose the
    KV cache stores up to `num_spare` + 1 additional tokens."""


class Token(NamedTuple):
    """Next token of a text, as `Decoder.step` returns it."""

    key: Hashable
    """Key of the text, as `Decoder.add` got it."""
    id: int
    log_p: float
    """Log-probability in nats that the model gives to the token, before sampling settings apply. NaN if the model's
    probabilities are NaN."""
    top: list[tuple[int, float]]
    """Most probable ids at this position with their log-probabilities. `Request.num_top` is the number of these ids."""
    is_last: bool
    """Whether the text ends with this token: the text has `max_tokens` tokens, or the token is `stop_at`."""


class Scored(NamedTuple):
    """Token of a prompt with the log-probability that the model gives to it."""

    id: int
    log_p: float
    """Log-probability of the token in nats, given all tokens before it."""
    top: list[tuple[int, float]]
    """Most probable ids at this position with their log-probabilities. `Request.num_top` is the number of these ids."""


class PromptChunk(NamedTuple):
    """Part of a prompt that the model has read in one step."""

    num_tokens: int
    """Number of tokens of the prompt in this chunk."""
    scored: list[Scored]
    """Score of the token after each token of this chunk. Empty if scores were not requested."""


Reading = Generator[PromptChunk, None, CacheState | None]
"""Generator that reads a prompt, one chunk per step. It returns the memory, or None for a model without a memory."""


class _Text:
    """State of one text that the decoder generates."""

    def __init__(self, key: Hashable, request: Request) -> None:
        self.key = key
        self.request = request
        self.last = request.ids[-1]
        self.num_generated = 0
        self.numbers = uniform_numbers(request.seed, sample=request.sample)

    def take(self, i: int, log_p: float, likeliest: list[tuple[int, float]]) -> Token:
        """Append the token with id `i`. `likeliest` holds the most probable ids, at least as many as the request asks
        for."""
        self.last = i
        self.num_generated += 1
        is_last = self.num_generated >= self.request.max_tokens or i == self.request.stop_at
        return Token(self.key, i, log_p, likeliest[: self.request.num_top], is_last)


class Decoder:
    """Generator of many texts at once. The caller chooses a key for each text.

    A token sees `memory_len` tokens of the past, which can be more than in training. The KV cache has room for the
    longest text so far, and grows when a longer text is added. Prompts are read `segment_len` tokens at a time. If the
    model's positions support no memory, each new token runs the last `segment_len` tokens of its text again.
    """

    def __init__(self, model: TransformerXL | FrozenModel, *, memory_len: int, segment_len: int) -> None:
        if isinstance(model, FrozenModel):
            network = model.model
        else:
            network = model
        self._rows: _CachedRows | _WindowRows
        if network.section.scheme.uses_memory:
            if isinstance(model, FrozenModel):
                frozen = model
            else:
                frozen = FrozenModel(network)
            self._rows = _CachedRows(frozen, memory_len=memory_len, segment_len=segment_len)
        else:
            self._rows = _WindowRows(network, segment_len=segment_len)
        self._vocab_size = network.vocab_size
        self._device = network.embedding.weight(0).device
        self._texts: list[_Text | None] = []  # by row; None where a row is free
        self._seen_BV: Tensor | None = None  # tokens of each row, if any text has a repetition penalty

    @property
    def keys(self) -> list[Hashable]:
        """Keys of the texts that were added and not removed."""
        return [text.key for text in self._texts if text is not None]

    @property
    def remembers(self) -> bool:
        """Whether the model's positions support a memory, so that `read` and `past` can be called."""
        return isinstance(self._rows, _CachedRows)

    def read(self, request: Request) -> CacheState:
        """Read a prompt up to its last token and return the memory. Raises ConfigError for a model without a memory."""
        return self._rows.past_of(request)

    def reading(self, request: Request, *, with_scores: bool = False) -> Reading:
        """Return a generator that reads a prompt chunk by chunk, so that other texts can continue between two chunks.

        This method also works for models without a memory. With `with_scores`, log-probabilities of the prompt's tokens
        are computed too.
        """
        return self._rows.reading(request, with_scores=with_scores)

    def add(self, key: Hashable, request: Request) -> None:
        """Add a text: read its prompt up to the last token. Each following call of `step` generates one token of the
        text."""
        assert request.ids
        assert request.max_tokens > 0
        assert key not in self.keys
        if None not in self._texts:  # room for the next power of two: to make room is to copy the rows
            num_new = max(1, len(self._texts))
            rows = list(range(len(self._texts)))
            self._select(rows + [0] * num_new)
            self._texts += [None] * num_new
        row = self._texts.index(None)
        self._rows.read(row, request)
        self._texts[row] = _Text(key, request)
        if request.sampling.repetition_penalty != 1:
            if self._seen_BV is None:
                self._seen_BV = torch.zeros(len(self._texts), self._vocab_size, dtype=torch.bool, device=self._device)
            self._seen_BV[row] = False
            self._seen_BV[row, list(request.ids)] = True

    def remove(self, key: Hashable) -> None:
        """Stop generating a text.

        A later text can use its row of the KV cache. If at most half of the rows are in use, the unused rows are
        deleted.
        """
        row = self._row_of(key)
        self._texts[row] = None
        self._rows.forget(row)
        taken = [row for row, text in enumerate(self._texts) if text is not None]
        if 0 < len(taken) <= len(self._texts) // 2:
            self._select(taken)
            self._texts = [self._texts[row] for row in taken]

    def past(self, key: Hashable, *, without_last: int = 0) -> CacheState:
        """Return the memory of a text. It never includes the text's last token.

        `without_last` is a number of further tokens at the end that the memory leaves out. See `KVCache.past`.
        """
        return self._rows.past(self._row_of(key), without_last=without_last)

    @torch.inference_mode()
    def step(self) -> list[Token]:
        """Generate the next token of every text.

        The row of a text that has ended stays until `remove`, so that `past` works.
        """
        last_ids = [0 if text is None else text.last for text in self._texts]
        log_p_BV = self._rows.run(last_ids)
        groups: dict[Sampling, list[tuple[int, _Text]]] = {}
        for row, text in enumerate(self._texts):
            if text is not None:
                groups.setdefault(text.request.sampling, []).append((row, text))
        tokens: list[Token] = []
        for sampling, group in groups.items():
            tokens += self._step_of(group, sampling, log_p_BV)
        return tokens

    def _step_of(self, group: list[tuple[int, _Text]], sampling: Sampling, log_p_BV: Tensor) -> list[Token]:
        """Generate the next token for (row, text) pairs with the same sampling settings."""
        rows = [row for row, _ in group]
        texts = [text for _, text in group]
        if len(group) < len(self._texts):
            log_p_BV = log_p_BV[rows]
        numbers = np.stack([text.numbers.random(2) for text in texts])
        uniform_B2 = torch.from_numpy(numbers).to(self._device)
        seen_BV = None
        if sampling.repetition_penalty != 1 and self._seen_BV is not None:
            if len(group) == len(self._texts):
                seen_BV = self._seen_BV
            else:
                seen_BV = self._seen_BV[rows]
        ids_B = choose(log_p_BV, uniform_B2, sampling, seen_BV=seen_BV)
        if seen_BV is not None and self._seen_BV is not None:
            self._seen_BV[rows, ids_B] = True
        log_ps = log_p_BV.gather(1, ids_B[:, None])[:, 0].tolist()
        likeliest = _likeliest(log_p_BV, max(text.request.num_top for text in texts))
        tokens = []
        for text, token_id, log_p, top in zip(texts, ids_B.tolist(), log_ps, likeliest, strict=True):
            tokens.append(text.take(token_id, log_p, top))
        return tokens

    def _select(self, rows: list[int]) -> None:
        """Keep only the rows with these numbers, in this order. A repeated number makes an additional row, which a new
        text then overwrites."""
        self._rows.select(rows)
        if self._seen_BV is None or not len(self._texts):
            self._seen_BV = None
        else:
            self._seen_BV = self._seen_BV[rows]

    def _row_of(self, key: Hashable) -> int:
        return next(row for row, text in enumerate(self._texts) if text is not None and text.key == key)


def read(
    frozen: FrozenModel, ids: Sequence[int], past: CacheState | None = None, *, memory_len: int, segment_len: int
) -> CacheState:
    """Run the tokens `ids` after the memory `past`, in chunks of `segment_len` tokens. Returns the memory after them.

    The returned memory holds the last `memory_len` tokens. If `past` is None, no text comes before `ids`.
    """
    reading = read_by_chunks(frozen, ids, past, memory_len=memory_len, segment_len=segment_len)
    while True:
        try:
            next(reading)
        except StopIteration as done:
            value: CacheState = done.value
            return value


@torch.inference_mode()
def read_by_chunks(
    frozen: FrozenModel,
    ids: Sequence[int],
    past: CacheState | None = None,
    *,
    memory_len: int,
    segment_len: int,
    targets: Sequence[int] = (),
    num_top: int = 0,
) -> Generator[PromptChunk, None, CacheState]:
    """Read `ids` as `read` does, and yield after each chunk. The generator returns the memory.

    `targets` has, for each of `ids`, the token that follows it. If `targets` are given, each chunk has the scores of
    its targets, with the `num_top` most probable ids.
    """
    if past is None:
        past_len = 0
    else:
        past_len = past.document_S.shape[0]
    most = len(ids) + past_len  # a longer ring would hold no more
    if memory_len:
        memory_len = max(1, min(memory_len, most))
    else:
        memory_len = 0
    ring = frozen.ring(
        num_rows=1,
        memory_len=memory_len,
        chunk_len=max(1, min(segment_len, len(ids))),
        least_len=segment_len - 1,
    )
    if past is not None:
        ring.put(0, past)
    for start in range(0, len(ids), ring.chunk_len):
        stop = min(start + ring.chunk_len, len(ids))
        chunk_1T = torch.tensor([list(ids[start:stop])], dtype=torch.int64, device=ring.key_values[0].device)
        hidden_1TD = frozen.run(chunk_1T, ring)
        scored: list[Scored] = []
        if targets:
            scored_stop = stop
        else:
            scored_stop = start
        for first in range(start, scored_stop, _SCORED_AT_A_TIME):
            last = min(first + _SCORED_AT_A_TIME, stop)
            log_p_SV = frozen.log_probabilities(hidden_1TD[0, first - start : last - start])
            scored += _scored(log_p_SV, targets[first:last], num_top=num_top)
        yield PromptChunk(stop - start, scored)
    return ring.past(0)


_SCORED_AT_A_TIME = 64
"""Number of prompt tokens whose probabilities over the whole vocabulary are computed at a time."""


def _scored(log_p_SV: Tensor, targets: Sequence[int], *, num_top: int) -> list[Scored]:
    """Return the scores of given tokens, with the `num_top` most probable ids at each position."""
    target_S1 = torch.tensor(list(targets), dtype=torch.int64, device=log_p_SV.device)[:, None]
    log_ps = log_p_SV.gather(1, target_S1)[:, 0].tolist()
    scored = []
    for target, log_p, top in zip(targets, log_ps, _likeliest(log_p_SV, num_top), strict=True):
        scored.append(Scored(target, log_p, top))
    return scored


def _likeliest(log_p_SV: Tensor, num_top: int) -> list[list[tuple[int, float]]]:
    """Return the `num_top` most probable ids of each row with their log-probabilities.

    If the vocabulary has fewer ids, all ids are returned.
    """
    if not num_top:
        return [[] for _ in log_p_SV]
    values, ids = log_p_SV.topk(min(num_top, log_p_SV.shape[1]))
    likeliest = []
    for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True):
        likeliest.append(list(zip(row_ids, row_values, strict=True)))
    return likeliest


class _CachedRows:
    """Memories of the decoder's texts, one row of a KV cache per text, for a model whose positions support a memory."""

    def __init__(self, frozen: FrozenModel, *, memory_len: int, segment_len: int) -> None:
        self._frozen = frozen
        self._memory_len = memory_len
        self._segment_len = segment_len
        # The ring grows with the texts. A token sees at least as much as within a segment in training.
        self._ring = frozen.ring(num_rows=0, memory_len=min(memory_len, 1), least_len=segment_len - 1)
        self._device = frozen.model.embedding.weight(0).device

    def select(self, rows: list[int]) -> None:
        if self._ring.num_rows:
            self._ring.select(rows)
        else:
            self._ring = self._frozen.ring(
                num_rows=len(rows),
                memory_len=self._ring.memory_len,
                chunk_len=self._ring.chunk_len,
                least_len=self._ring.least_len,
            )

    def past_of(self, request: Request) -> CacheState:
        ids = request.ids[request.num_read : -1]
        if not ids and request.past is not None:
            return request.past
        return read(self._frozen, ids, request.past, memory_len=self._memory_len, segment_len=self._segment_len)

    def reading(self, request: Request, *, with_scores: bool) -> Reading:
        ids = request.ids[request.num_read : -1]
        if not ids and request.past is not None:
            return request.past
        if with_scores:
            targets = request.ids[request.num_read + 1 :]
        else:
            targets = ()
        past = yield from read_by_chunks(
            self._frozen,
            ids,
            request.past,
            memory_len=self._memory_len,
            segment_len=self._segment_len,
            targets=targets,
            num_top=request.num_top,
        )
        return past

    def read(self, row: int, request: Request) -> None:
        past = self.past_of(request)
        ring = self._ring
        longest = past.document_S.shape[0] + 1 + request.max_tokens
        memory_len = min(longest, self._memory_len)
        chunk_len = 1 + min(request.num_spare, longest)
        if memory_len > ring.memory_len:  # twice as long at least, because growing copies the ring
            memory_len = min(max(memory_len, 2 * ring.memory_len), self._memory_len)
        if memory_len > ring.memory_len or chunk_len > ring.chunk_len:
            self._ring = ring.copied(
                memory_len=max(memory_len, ring.memory_len), chunk_len=max(chunk_len, ring.chunk_len)
            )
        self._ring.put(row, past)

    def forget(self, row: int) -> None:
        self._ring.forget(row)

    def past(self, row: int, *, without_last: int) -> CacheState:
        return self._ring.past(row, without_last=without_last)

    def run(self, tokens: list[int]) -> Tensor:
        tokens_B1 = torch.tensor(tokens, device=self._device)[:, None]
        hidden_B1D = self._frozen.run(tokens_B1, self._ring)
        return self._frozen.log_probabilities(hidden_B1D[:, 0])


class _WindowRows:
    """Tokens of the decoder's texts, one row per text, for a model without relative positions.

    Such a model cannot keep keys and values of the past (table 9 of Dai et al. 2019), so each step runs the last tokens
    again.
    """

    def __init__(self, model: TransformerXL, *, segment_len: int) -> None:
        self._model = model
        self._segment_len = segment_len
        self._device = model.embedding.weight(0).device
        self._windows: list[list[int]] = []

    def select(self, rows: list[int]) -> None:
        if self._windows:
            self._windows = [list(self._windows[row]) for row in rows]
        else:
            self._windows = [[] for _ in rows]

    def read(self, row: int, request: Request) -> None:
        assert request.past is None
        self._windows[row] = list(request.ids[:-1])

    def forget(self, row: int) -> None:
        self._windows[row] = []

    def past_of(self, request: Request) -> CacheState:
        raise ConfigError(
            f"a model with {self._model.section.positions} positions has no memory. Pass the whole text in each call, "
            "and no memory."
        )

    @torch.inference_mode()
    def reading(self, request: Request, *, with_scores: bool) -> Reading:
        if with_scores:
            memory = self._model.empty_memory(num_lanes=1, memory_len=0)
            for start in range(0, len(request.ids) - 1, self._segment_len):
                ids = request.ids[start : start + self._segment_len + 1]
                hidden_1TD, _ = self._model(torch.tensor([ids[:-1]], device=self._device), memory)
                log_p_TV = self._model.softmax.log_probabilities(hidden_1TD[0])
                yield PromptChunk(len(ids) - 1, _scored(log_p_TV, ids[1:], num_top=request.num_top))
        return None

    def past(self, row: int, *, without_last: int) -> CacheState:
        return self.past_of(Request(ids=(), max_tokens=0))

    def run(self, tokens: list[int]) -> Tensor:
        memory = self._model.empty_memory(num_lanes=1, memory_len=0)
        log_ps = []
        for window, token in zip(self._windows, tokens, strict=True):
            window[:] = [*window, token][-self._segment_len :]
            hidden_1TD, _ = self._model(torch.tensor([window], device=self._device), memory)
            log_ps.append(self._model.softmax.log_probabilities(hidden_1TD[:, -1]))
        return torch.cat(log_ps)
