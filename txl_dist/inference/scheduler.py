"""From prompts to texts: tokens become pieces of text as they are made, and end at the strings that shall stop them.

for piece in write(decoder, tokenizer, prompts, writing): ...    # of prompts that are all there

writer = Writer(decoder, tokenizer, num_rows=64, read_len=64)    # of prompts that come and go
writer.add(7, prompt, writing)
while writer.is_busy:
    for piece in writer.step(): ...                              # a token of each text; prompts are read beside
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from txl_dist.errors import CheckpointError, TxlError
from txl_dist.inference.generate import Decoder, Reading, Request, Scored, Token
from txl_dist.inference.kv_cache import CacheState
from txl_dist.inference.options import SamplingParams
from txl_dist.tokenizers.base import StreamDecoder, Tokenizer

FinishReason = Literal["length", "stop", "end_of_text"]
LEAST_WORK = 16
"""To read any part of a prompt counts at least as so many tokens of it: a call costs what it costs."""

READ_PER_ROW = 2
"""So many tokens of prompts more are read beside each text in work: that takes about as long as their next tokens."""


class Prompt(NamedTuple):
    """What a text begins with, as ids."""

    ids: tuple[int, ...]
    """At least one; behind a past, the first is its last token."""
    past: CacheState | None = None
    """What was read before."""
    joint: str = ""
    """What stands between the prompt and its continuation."""
    num_led: int = 0
    """So many of `ids`, at the beginning, were put before what was given."""


class Completion(NamedTuple):
    """How a text ended."""

    finish: FinishReason
    tokens: Sequence[Token]
    """Of its text; those behind its end are left out."""
    past: CacheState | None
    """What is remembered of the prompt and of the text but its last token; only if asked for."""


class OutputChunk(NamedTuple):
    """Some more of a text."""

    prompt: int
    """Which prompt: from 0, or the number that it was added under."""
    sample: int
    """Which of its samples, from 0."""
    text: str
    ending: Completion | None
    """Only with the last piece."""
    tokens: Sequence[tuple[Token, int]] = ()
    """Those whose text has been shown with this piece, an end-of-text too, each with the characters of the text up to
    its end."""
    scored: Sequence[Scored] = ()
    """With the first piece, if asked for: the tokens of the prompt but the first of its ids."""
    error: TxlError | None = None
    """Why the prompt cannot be gone on with: the last piece of it and of all its samples."""


_NO_NUMBERS = "the model's probabilities are no numbers. Load it in fp32, or take another one."


class Scheduler:
    """Texts in work, of prompts that come and go. At most `num_rows` are written at once; `read_len` tokens of prompts
    are read between two tokens of those, so that a long prompt holds nobody up; None reads all that wait at once."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, *, num_rows: int, read_len: int | None = None) -> None:
        self._decoder, self._tokenizer, self._num_rows = decoder, tokenizer, num_rows
        self._read_len = math.inf if read_len is None else read_len
        self._to_read: deque[_Job] = deque()  # they take turns
        self._to_write: deque[tuple[_Job, int]] = deque()  # samples for which there is no row yet
        self._works: dict[Hashable, _Work] = {}

    @property
    def num_texts(self) -> int:
        """Texts that are read, wait for a row or are written."""
        return len(self._works) + len(self._to_write) + sum(job.writing.num_samples for job in self._to_read)

    @property
    def num_rows(self) -> int:
        """Texts that are written."""
        return len(self._works)

    @property
    def has_room(self) -> bool:
        """Whether one more prompt would be begun."""
        return self.num_texts < self._num_rows

    def add(
        self,
        key: int,
        prompt: Prompt,
        writing: SamplingParams,
        *,
        keeps_memory: bool = False,
        scores_prompt: bool = False,
    ) -> None:
        """Take a prompt, of which `writing.num_samples` texts are written; it is read once."""
        request = Request(
            ids=prompt.ids,
            past=prompt.past,
            max_tokens=writing.max_tokens,
            stop_at=self._tokenizer.end_of_text,
            sampling=writing.sampling(),
            seed=writing.seed,
            num_top=max(0, writing.log_probs),
            num_spare=writing.num_spare if keeps_memory else 0,
        )
        is_read = writing.max_tokens > 0 or keeps_memory or scores_prompt
        reading = self._decoder.reading(request, with_scores=scores_prompt) if is_read else None
        self._to_read.append(_Job(key, prompt, writing, request, reading, keeps_memory))

    def remove(self, key: int) -> None:
        """Stop work on a prompt and its texts, if there is any."""
        self._to_read = deque(job for job in self._to_read if job.key != key)
        self._to_write = deque(one for one in self._to_write if one[0].key != key)
        for work in self._works_of(key):
            self._free(work)

    def cut(self, key: int) -> list[OutputChunk]:
        """End the texts of a prompt as they are, with `length`."""
        pieces = [self._ended(work, work.cut()) for work in self._works_of(key)]
        cut = Completion("length", (), None)
        pieces += [
            OutputChunk(key, sample, job.prompt.joint, cut, scored=job.scored)
            for job, sample in self._to_write
            if job.key == key
        ]
        unread = [job for job in self._to_read if job.key == key]
        pieces += [OutputChunk(key, sample, "", cut) for job in unread for sample in range(job.writing.num_samples)]
        self.remove(key)
        return pieces

    def step(self) -> list[OutputChunk]:
        """Read some of the prompts, and make a token of each text in work."""
        return [*self._read(), *self._begin(), *self._go_on()]

    def _read(self) -> Iterator[OutputChunk]:
        room = self._read_len + READ_PER_ROW * len(self._works)
        while self._to_read and room > 0:
            job = self._to_read.popleft()
            if job.reading is None:
                yield from self._has_read(job, None)
                continue
            try:
                chunk = next(job.reading)
            except StopIteration as done:
                yield from self._has_read(job, done.value)
            except TxlError as error:
                yield OutputChunk(job.key, 0, "", None, error=error)
            else:
                if any(math.isnan(token.log_p) for token in chunk.scored):
                    yield OutputChunk(job.key, 0, "", None, error=CheckpointError(_NO_NUMBERS))
                    continue
                job.scored += chunk.scored
                room -= max(LEAST_WORK, chunk.num_tokens)
                (self._to_read.appendleft if room > 0 else self._to_read.append)(job)

    def _has_read(self, job: _Job, past: CacheState | None) -> Iterator[OutputChunk]:
        samples = range(job.writing.num_samples)
        if job.writing.max_tokens == 0:
            ending = Completion("length", (), past if job.keeps_memory else None)
            yield from (OutputChunk(job.key, n, job.prompt.joint, ending, scored=job.scored) for n in samples)
            return
        if past is not None:
            job.request = job.request._replace(past=past, num_read=len(job.request.ids) - 1)
        self._to_write.extend((job, sample) for sample in samples)

    def _begin(self) -> Iterator[OutputChunk]:
        while self._to_write and len(self._works) < self._num_rows:
            job, sample = self._to_write.popleft()
            decoder = self._tokenizer.decoder(after=job.prompt.ids)
            work = _Work(job, sample, decoder, end_of_text=self._tokenizer.end_of_text)
            try:
                self._decoder.add(work.key, job.request._replace(sample=sample))
            except TxlError as error:
                self.remove(job.key)
                yield OutputChunk(*work.key, "", None, error=error)
                continue
            self._works[work.key] = work
            yield OutputChunk(*work.key, job.prompt.joint, None, scored=job.scored)

    def _go_on(self) -> Iterator[OutputChunk]:
        for token in self._decoder.step() if self._works else ():
            work = self._works.get(token.key)
            if work is None:  # its prompt has just failed, by another of its texts
                continue
            if math.isnan(token.log_p):
                self.remove(work.job.key)
                yield OutputChunk(*work.key, "", None, error=CheckpointError(_NO_NUMBERS))
                continue
            text = work.take(token)
            if work.finish is not None:
                yield self._ended(work, text)
            elif text:
                yield OutputChunk(*work.key, text, None, tokens=work.told())

    def _ended(self, work: _Work, text: str) -> OutputChunk:
        """The last piece of a text, whose row is free then."""
        assert work.finish is not None
        kept, past = work.kept(), None
        if work.job.keeps_memory:
            past = self._decoder.past(work.key, without_last=len(work.tokens) - len(kept))
        self._free(work)
        return OutputChunk(*work.key, text, Completion(work.finish, kept, past), tokens=work.told())

    def _free(self, work: _Work) -> None:
        self._decoder.remove(work.key)
        del self._works[work.key]

    def _works_of(self, key: int) -> list[_Work]:
        return [work for work in self._works.values() if work.job.key == key]


def write(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Iterable[Prompt],
    writing: SamplingParams,
    *,
    keeps_memory: bool = False,
) -> Iterator[OutputChunk]:
    """Pieces of all texts as they come, those of several in turn; `writing.batch_size` texts are in work at once.

    Raises CheckpointError where the model's probabilities are no numbers, ConfigError where a memory has no room.
    """
    writer, numbered = Scheduler(decoder, tokenizer, num_rows=writing.batch_size), enumerate(prompts)
    while True:
        while writer.has_room and (found := next(numbered, None)) is not None:
            writer.add(*found, writing, keeps_memory=keeps_memory)
        if not writer.num_texts:
            return
        for piece in writer.step():
            if piece.error is not None:
                raise piece.error
            yield piece


@dataclass
class _Job:
    """A prompt in work."""

    key: int
    prompt: Prompt
    writing: SamplingParams
    request: Request
    reading: Reading | None
    """None where nothing of it is wanted."""
    keeps_memory: bool
    scored: list[Scored] = field(default_factory=list)


class _Work:
    """A text that is being written."""

    def __init__(self, job: _Job, sample: int, decoder: StreamDecoder, *, end_of_text: int | None) -> None:
        self.job, self.key = job, (job.key, sample)
        self.tokens: list[Token] = []
        self.finish: FinishReason | None = None
        self._decoder, self._stop, self._end_of_text = decoder, job.writing.stop, end_of_text
        self._lengths: list[int] = []  # of the text with each token
        self._shown, self._held, self._num_told = 0, "", 0

    def take(self, token: Token) -> str:
        """What may be shown with one more token. What could be the beginning of a stop string is held back."""
        self.tokens.append(token)
        is_end = token.id == self._end_of_text
        self._held += self._decoder.close() if is_end else self._decoder.push(token.id)
        if token.is_last and not is_end:
            self._held += self._decoder.close()
        self._lengths.append(self._shown + len(self._held))
        found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            self._held, self.finish = self._held[: min(found)], "stop"
        elif token.is_last:
            self.finish = "end_of_text" if is_end else "length"
        num_held = 0 if self.finish else self._num_suspect()
        return self._show(len(self._held) - num_held)

    def cut(self) -> str:
        """The rest of the text, which ends here."""
        self.finish = "length"
        self._held += self._decoder.close()
        if self._lengths:
            self._lengths[-1] = self._shown + len(self._held)
        return self._show(len(self._held))

    def kept(self) -> list[Token]:
        """The tokens whose text was shown; none that had only begun a character."""
        return self.tokens[: len(self.tokens) - 1 if self.finish == "end_of_text" else self._num_shown()]

    def told(self) -> list[tuple[Token, int]]:
        """Those, and an end-of-text, that it has not told yet, each with the length of the text up to its end."""
        first, self._num_told = self._num_told, max(self._num_told, self._num_shown())
        told = slice(first, self._num_told)
        return list(zip(self.tokens[told], self._lengths[told], strict=True))

    def _num_shown(self) -> int:
        """Tokens whose text was shown, with the end-of-text of a text that has ended so."""
        if self.finish in ("length", "end_of_text"):
            return len(self.tokens)
        num_reached = bisect_right(self._lengths, self._shown)
        reached = self._lengths[num_reached - 1] if num_reached else 0
        return bisect_left(self._lengths, reached) + 1 if reached else 0

    def _show(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        self._shown += len(shown)
        return shown

    def _num_suspect(self) -> int:
        """Characters at the end that begin a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
