"""Generation: many texts go on at once, a token of each at a time, and none depends on the others.

    decoder = Decoder(model, memory_len=512, segment_len=64)
    decoder.add("a", Request(ids=(5, 17, 3), max_tokens=20))
    while decoder.keys:
        for token in decoder.step():             # its key, its id, its log_p
            if token.is_last:
                decoder.remove(token.key)

A text is read alone, in chunks of a segment as in training, up to its last token. That one is run like those that are
generated: beside the last tokens of all other texts, behind the past that each has in its row of the ring. So every
text may begin and end when it likes, and a memory is always what lies before a last token.
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
    """A text to go on with."""

    ids: tuple[int, ...]
    """At least one."""
    max_tokens: int
    past: CacheState | None = None
    """What was read before; only of a model whose positions know a memory."""
    num_read: int = 0
    """So many of `ids`, but not the last, are in `past` already."""
    stop_at: int | None = None
    """Id that ends the text and is not part of it."""
    sampling: Sampling = Sampling()
    seed: int = 0
    sample: int = 0
    """Which of several samples of one prompt and seed."""
    num_top: int = 0
    """So many of the likeliest tokens are told with each."""
    num_spare: int = 0
    """So many tokens may be taken back, one more in fact, with nothing of the memory lost (`Decoder.past`)."""


class Token(NamedTuple):
    """One more token of a text."""

    key: Hashable
    id: int
    log_p: float
    """In nats, of the model as it is; no number where its probabilities are none."""
    top: list[tuple[int, float]]
    """The likeliest ids with their log-probabilities, as many as were asked for."""
    is_last: bool
    """Whether the text ends with it: it has `max_tokens`, or this is `stop_at`."""


class Scored(NamedTuple):
    """A token of a prompt, in its place."""

    id: int
    log_p: float
    """In nats, behind all that stands before it."""
    top: list[tuple[int, float]]
    """The likeliest ids in its place with their log-probabilities, as many as were asked for."""


class PromptChunk(NamedTuple):
    """What was read of a text at a time."""

    num_tokens: int
    scored: list[Scored]
    """The tokens that follow those of the chunk, if asked for: of a whole text all but the first."""


Reading = Generator[PromptChunk, None, CacheState | None]
"""A text that is being read, a chunk at each step; then its value is what is remembered, if anything is."""


class _Text:
    """A text that is being generated, and what of it changes."""

    def __init__(self, key: Hashable, request: Request) -> None:
        self.key, self.request, self.last, self.num_made = key, request, request.ids[-1], 0
        self.numbers = uniform_numbers(request.seed, sample=request.sample)

    def take(self, i: int, log_p: float, likeliest: list[tuple[int, float]]) -> Token:
        """Go on with a token."""
        self.last, self.num_made = i, self.num_made + 1
        is_last = self.num_made >= self.request.max_tokens or i == self.request.stop_at
        return Token(self.key, i, log_p, likeliest[: self.request.num_top], is_last)


class Decoder:
    """Texts in work, under keys that their owner chooses.

    `memory_len` tokens of the past are seen, which may be more than in training; there is room for as many as the texts
    can come to, and more is made when one comes that can be longer. `segment_len` are read at a time. A model whose
    positions know no memory runs the last `segment_len` tokens of each text anew for each token.
    """

    def __init__(self, model: TransformerXL | FrozenModel, *, memory_len: int, segment_len: int) -> None:
        network = model.model if isinstance(model, FrozenModel) else model
        self._rows: _CachedRows | _WindowRows
        if network.section.scheme.uses_memory:
            frozen = model if isinstance(model, FrozenModel) else FrozenModel(network)
            self._rows = _CachedRows(frozen, memory_len=memory_len, segment_len=segment_len)
        else:
            self._rows = _WindowRows(network, segment_len=segment_len)
        self._vocab_size, self._device = network.vocab_size, network.embedding.weight(0).device
        self._texts: list[_Text | None] = []  # by row; None where a row is free
        self._seen_BV: Tensor | None = None  # tokens of each row's prompt and text, where a text pays for them

    @property
    def keys(self) -> list[Hashable]:
        """Of the texts in work."""
        return [text.key for text in self._texts if text is not None]

    @property
    def remembers(self) -> bool:
        """Whether there is a past to keep: whether the model's positions know a memory."""
        return isinstance(self._rows, _CachedRows)

    def read(self, request: Request) -> CacheState:
        """What is remembered of a text up to its last token. Raises ConfigError where nothing is."""
        return self._rows.past_of(request)

    def reading(self, request: Request, *, with_scores: bool = False) -> Reading:
        """As `read`, chunk by chunk, so that others may go on between; also for models that remember nothing."""
        return self._rows.reading(request, with_scores=with_scores)

    def add(self, key: Hashable, request: Request) -> None:
        """Read a text up to its last token, and go on with it from the next step."""
        assert request.ids
        assert request.max_tokens > 0
        assert key not in self.keys
        if None not in self._texts:  # room for the next power of two: to make room is to copy the rows
            more = max(1, len(self._texts))
            self._select([*range(len(self._texts)), *[0] * more])
            self._texts += [None] * more
        row = self._texts.index(None)
        self._rows.read(row, request)
        self._texts[row] = _Text(key, request)
        if request.sampling.repetition_penalty != 1:
            if self._seen_BV is None:
                self._seen_BV = torch.zeros(len(self._texts), self._vocab_size, dtype=torch.bool, device=self._device)
            self._seen_BV[row] = False
            self._seen_BV[row, list(request.ids)] = True

    def remove(self, key: Hashable) -> None:
        """Stop work on a text. Half the rows are given back when the other half is enough."""
        row = self._row_of(key)
        self._texts[row] = None
        self._rows.forget(row)
        taken = [row for row, text in enumerate(self._texts) if text is not None]
        if 0 < len(taken) <= len(self._texts) // 2:
            self._select(taken)
            self._texts = [self._texts[row] for row in taken]

    def past(self, key: Hashable, *, without_last: int = 0) -> CacheState:
        """What is remembered of a text but its last token; as if the last so many had not been made (see
        `KVCache.past`)."""
        return self._rows.past(self._row_of(key), without_last=without_last)

    @torch.inference_mode()
    def step(self) -> list[Token]:
        """The next token of every text. Those that end stay in work, for `past`, until they are removed."""
        log_p_BV = self._rows.run([0 if text is None else text.last for text in self._texts])
        groups: dict[Sampling, list[tuple[int, _Text]]] = {}
        for row, text in enumerate(self._texts):
            if text is not None:
                groups.setdefault(text.request.sampling, []).append((row, text))
        return [token for sampling, group in groups.items() for token in self._step_of(group, sampling, log_p_BV)]

    def _step_of(self, group: list[tuple[int, _Text]], sampling: Sampling, log_p_BV: Tensor) -> list[Token]:
        """Of texts that choose alike."""
        rows, texts = [row for row, _ in group], [text for _, text in group]
        if len(group) < len(self._texts):
            log_p_BV = log_p_BV[rows]
        uniform_B2 = torch.from_numpy(np.stack([text.numbers.random(2) for text in texts])).to(self._device)
        seen_BV = None
        if sampling.repetition_penalty != 1 and self._seen_BV is not None:
            seen_BV = self._seen_BV if len(group) == len(self._texts) else self._seen_BV[rows]
        ids_B = choose(log_p_BV, uniform_B2, sampling, seen_BV=seen_BV)
        if seen_BV is not None and self._seen_BV is not None:
            self._seen_BV[rows, ids_B] = True
        log_ps = log_p_BV.gather(1, ids_B[:, None])[:, 0].tolist()
        likeliest = _likeliest(log_p_BV, max(text.request.num_top for text in texts))
        return [text.take(*told) for text, *told in zip(texts, ids_B.tolist(), log_ps, likeliest, strict=True)]

    def _select(self, rows: list[int]) -> None:
        """Keep these rows only, in this order; of a free one, any will do."""
        self._rows.select(rows)
        self._seen_BV = None if self._seen_BV is None or not len(self._texts) else self._seen_BV[rows]

    def _row_of(self, key: Hashable) -> int:
        return next(row for row, text in enumerate(self._texts) if text is not None and text.key == key)


def read(
    frozen: FrozenModel, ids: Sequence[int], past: CacheState | None = None, *, memory_len: int, segment_len: int
) -> CacheState:
    """What is remembered of `ids` behind a past, read in chunks of `segment_len` over `memory_len`."""
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
    """As `read`, yielding behind each chunk. `targets`, the tokens that follow each of `ids`, are scored, if given."""
    most = len(ids) + (0 if past is None else past.document_S.shape[0])  # a longer ring would hold no more
    memory_len = max(1, min(memory_len, most)) if memory_len else 0
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
        for first in range(start, stop if targets else start, _SCORED_AT_A_TIME):
            last = min(first + _SCORED_AT_A_TIME, stop)
            log_p_SV = frozen.log_probabilities(hidden_1TD[0, first - start : last - start])
            scored += _scored(log_p_SV, targets[first:last], num_top=num_top)
        yield PromptChunk(stop - start, scored)
    return ring.past(0)


_SCORED_AT_A_TIME = 64
"""Tokens of a prompt for which the probabilities of the whole vocabulary are held."""


def _scored(log_p_SV: Tensor, targets: Sequence[int], *, num_top: int) -> list[Scored]:
    target_S1 = torch.tensor(list(targets), dtype=torch.int64, device=log_p_SV.device)[:, None]
    log_ps = log_p_SV.gather(1, target_S1)[:, 0].tolist()
    return [Scored(*told) for told in zip(targets, log_ps, _likeliest(log_p_SV, num_top), strict=True)]


def _likeliest(log_p_SV: Tensor, num_top: int) -> list[list[tuple[int, float]]]:
    """So many ids with their log-probabilities, or all."""
    if not num_top:
        return [[] for _ in log_p_SV]
    values, ids = log_p_SV.topk(min(num_top, log_p_SV.shape[1]))
    return [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]


class _CachedRows:
    """Rows of one ring."""

    def __init__(self, frozen: FrozenModel, *, memory_len: int, segment_len: int) -> None:
        self._frozen, self._lengths = frozen, {"memory_len": memory_len, "segment_len": segment_len}
        # It grows by the texts. A token sees no less than in a segment.
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
        return read(self._frozen, ids, request.past, **self._lengths)

    def reading(self, request: Request, *, with_scores: bool) -> Reading:
        ids, following = request.ids[request.num_read : -1], request.ids[request.num_read + 1 :]
        if not ids and request.past is not None:
            return request.past
        targets = following if with_scores else ()
        return (
            yield from read_by_chunks(
                self._frozen, ids, request.past, **self._lengths, targets=targets, num_top=request.num_top
            )
        )

    def read(self, row: int, request: Request) -> None:
        past, ring = self.past_of(request), self._ring
        longest = past.document_S.shape[0] + 1 + request.max_tokens
        memory_len, chunk_len = min(longest, self._lengths["memory_len"]), 1 + min(request.num_spare, longest)
        if memory_len > ring.memory_len:  # twice as long at least: to make room is to copy
            memory_len = min(max(memory_len, 2 * ring.memory_len), self._lengths["memory_len"])
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
        hidden_B1D = self._frozen.run(torch.tensor(tokens, device=self._device)[:, None], self._ring)
        return self._frozen.log_probabilities(hidden_B1D[:, 0])


class _WindowRows:
    """Rows of tokens. Without relative positions nothing of the past can be kept (the paper's table 9 measures it)."""

    def __init__(self, model: TransformerXL, *, segment_len: int) -> None:
        self._model, self._segment_len = model, segment_len
        self._device = model.embedding.weight(0).device
        self._windows: list[list[int]] = []

    def select(self, rows: list[int]) -> None:
        self._windows = [list(self._windows[row]) if self._windows else [] for row in rows]

    def read(self, row: int, request: Request) -> None:
        assert request.past is None
        self._windows[row] = list(request.ids[:-1])

    def forget(self, row: int) -> None:
        self._windows[row] = []

    def past_of(self, request: Request) -> CacheState:
        raise ConfigError(
            f"a model with {self._model.section.positions} positions remembers nothing. Give the whole text again."
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
