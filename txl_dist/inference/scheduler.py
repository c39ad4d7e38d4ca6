"""Scheduler of prompts and texts: it turns new tokens into chunks of text, and ends texts at stop strings.

for chunk in stream(decoder, tokenizer, prompts, params): ... # if all prompts are known

scheduler = Scheduler(decoder, tokenizer, num_rows=64, read_len=64)    # if prompts come and go
scheduler.add(7, prompt, params)
while scheduler.num_texts:
    for chunk in scheduler.step(): ...                                 # a token of each text, and part of a prompt
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
"""Smallest number of prompt tokens that a part of a prompt counts as, because each call of the model has a fixed cost.
A step reads a limited number of prompt tokens, and a shorter part counts as this number of tokens."""

READ_PER_ROW = 2
"""Number of additional prompt tokens that a step reads per text in generation. Reading them takes about as long as
generating the next token of each text."""


class Prompt(NamedTuple):
    """Prompt of a text as ids, with the memory before it. `LanguageModel.prompt` makes it."""

    ids: tuple[int, ...]
    """Ids of the prompt, which has at least one token. If there is a `past`, the first id is the last token of the text
    before."""
    past: CacheState | None = None
    """Memory of the text before the prompt. None if no text comes before."""
    joint: str = ""
    """Text to show between the prompt and its continuation, for example a blank."""
    num_led: int = 0
    """Number of leading `ids` that are not part of the prompt's text: an end-of-text token, or the last token of the
    text before."""


class Completion(NamedTuple):
    """End of a text: the reason, the tokens, and the memory if it was requested."""

    finish: FinishReason
    """Reason why the text ended: a stop string, its length, or an end-of-text token."""
    tokens: Sequence[Token]
    """Tokens of the text. Tokens after the text's end are left out."""
    past: CacheState | None
    """Memory of the prompt and the text, without the text's last token. None unless the memory was requested."""


class OutputChunk(NamedTuple):
    """Next part of a text, as `Scheduler.step` and `stream` return it."""

    prompt: int
    """Number of the prompt from 0, or the key that `Scheduler.add` got."""
    sample: int
    """Number of the text among the texts of that prompt, from 0."""
    text: str
    """New text since the last chunk of this text."""
    ending: Completion | None
    """End of the text. None unless this is the last chunk of the text."""
    tokens: Sequence[tuple[Token, int]] = ()
    """Tokens whose text is complete with this chunk, each with the length, in characters, of the text up to the token's
    end. An end-of-text token is included."""
    scored: Sequence[Scored] = ()
    """Scores of the prompt's tokens except the first. Only the first chunk of a text has them, and only if they were
    requested."""
    error: TxlError | None = None
    """Reason why the prompt failed. A chunk with an error is the last chunk of the prompt and of all its texts."""


_NO_NUMBERS = "the model's probabilities are not numbers (NaN). Load the model in fp32, or use another model."


class Scheduler:
    """Scheduler that generates texts from prompts, which can be added and removed at any time.

    At most `num_rows` texts are generated at once. Between two tokens of these texts, `read_len` tokens of waiting
    prompts are read, so that a long prompt does not delay other texts. A `read_len` of None reads all waiting prompts
    at once.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, *, num_rows: int, read_len: int | None = None) -> None:
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._num_rows = num_rows
        if read_len is None:
            self._read_len = math.inf
        else:
            self._read_len = read_len
        self._to_read: deque[_Job] = deque()  # they take turns
        self._to_write: deque[tuple[_Job, int]] = deque()  # samples for which there is no row yet
        self._works: dict[Hashable, _Work] = {}

    @property
    def num_texts(self) -> int:
        """Number of texts that have not ended. Their prompt is being read, or they wait for a row, or they are being
        generated."""
        num_unread = sum(job.writing.num_samples for job in self._to_read)
        return len(self._works) + len(self._to_write) + num_unread

    @property
    def num_rows(self) -> int:
        """Number of texts that are being generated."""
        return len(self._works)

    @property
    def has_room(self) -> bool:
        """Whether a new prompt would start at once, without waiting for other texts."""
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
        """Add a prompt under a key. The prompt is read once, and `writing.num_samples` texts continue it.

        With `keeps_memory` the last chunk of each text has the memory after the text. With `scores_prompt` the first
        chunk has the scores of the prompt's tokens.
        """
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
        if is_read:
            reading = self._decoder.reading(request, with_scores=scores_prompt)
        else:
            reading = None
        self._to_read.append(_Job(key, prompt, writing, request, reading, keeps_memory))

    def remove(self, key: int) -> None:
        """Remove the prompt with this key and its texts. A key that does not exist is ignored."""
        self._to_read = deque(job for job in self._to_read if job.key != key)
        self._to_write = deque((job, sample) for job, sample in self._to_write if job.key != key)
        for work in self._works_of(key):
            self._free(work)

    def cut(self, key: int) -> list[OutputChunk]:
        """End the texts of a prompt with the tokens they have, for the reason `length`. Returns their last chunks."""
        chunks = [self._ended(work, work.cut()) for work in self._works_of(key)]
        empty = Completion("length", (), None)
        for job, sample in self._to_write:
            if job.key == key:
                chunks.append(OutputChunk(key, sample, job.prompt.joint, empty, scored=job.scored))
        for job in self._to_read:
            if job.key == key:
                chunks += [OutputChunk(key, sample, "", empty) for sample in range(job.writing.num_samples)]
        self.remove(key)
        return chunks

    def step(self) -> list[OutputChunk]:
        """Read some of the prompts, generate one token of each running text, and return the new chunks of text."""
        chunks = list(self._read())
        chunks += self._start_texts()
        chunks += self._generate()
        return chunks

    def _read(self) -> Iterator[OutputChunk]:
        """Read waiting prompts in turn, until this step's number of prompt tokens is used up."""
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
                if room > 0:
                    self._to_read.appendleft(job)
                else:
                    self._to_read.append(job)

    def _has_read(self, job: _Job, past: CacheState | None) -> Iterator[OutputChunk]:
        """Put the texts of a prompt that has been read into the queue of texts that wait for a row.

        If `max_tokens` is 0, the texts end immediately.
        """
        samples = range(job.writing.num_samples)
        if job.writing.max_tokens == 0:
            ending = Completion("length", (), past if job.keeps_memory else None)
            for sample in samples:
                yield OutputChunk(job.key, sample, job.prompt.joint, ending, scored=job.scored)
            return
        if past is not None:
            job.request = job.request._replace(past=past, num_read=len(job.request.ids) - 1)
        self._to_write.extend((job, sample) for sample in samples)

    def _start_texts(self) -> Iterator[OutputChunk]:
        """Start waiting texts while the decoder has fewer than `num_rows` texts."""
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

    def _generate(self) -> Iterator[OutputChunk]:
        """Generate one token of each running text."""
        if self._works:
            tokens = self._decoder.step()
        else:
            tokens = []
        for token in tokens:
            work = self._works.get(token.key)
            if work is None:  # another text of its prompt has just failed
                continue
            if math.isnan(token.log_p):
                self.remove(work.job.key)
                yield OutputChunk(*work.key, "", None, error=CheckpointError(_NO_NUMBERS))
                continue
            text = work.take(token)
            if work.finish is not None:
                yield self._ended(work, text)
            elif text:
                yield OutputChunk(*work.key, text, None, tokens=work.new_tokens())

    def _ended(self, work: _Work, text: str) -> OutputChunk:
        """Return the last chunk of a text, and remove the text from the decoder."""
        assert work.finish is not None
        tokens = work.text_tokens()
        past = None
        if work.job.keeps_memory:
            past = self._decoder.past(work.key, without_last=len(work.tokens) - len(tokens))
        self._free(work)
        completion = Completion(work.finish, tokens, past)
        return OutputChunk(*work.key, text, completion, tokens=work.new_tokens())

    def _free(self, work: _Work) -> None:
        self._decoder.remove(work.key)
        del self._works[work.key]

    def _works_of(self, key: int) -> list[_Work]:
        return [work for work in self._works.values() if work.job.key == key]


def stream(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Iterable[Prompt],
    writing: SamplingParams,
    *,
    keeps_memory: bool = False,
) -> Iterator[OutputChunk]:
    """Generate from prompts, `writing.batch_size` texts at once, and yield chunks of all texts as they are made.

    With `keeps_memory` the last chunk of each text has the memory after the text. Raises CheckpointError if the model's
    probabilities are NaN, and ConfigError if a memory does not fit on the device.
    """
    scheduler = Scheduler(decoder, tokenizer, num_rows=writing.batch_size)
    numbered_prompts = enumerate(prompts)
    while True:
        while scheduler.has_room:
            numbered = next(numbered_prompts, None)
            if numbered is None:
                break
            number, prompt = numbered
            scheduler.add(number, prompt, writing, keeps_memory=keeps_memory)
        if not scheduler.num_texts:
            return
        for chunk in scheduler.step():
            if chunk.error is not None:
                raise chunk.error
            yield chunk


@dataclass
class _Job:
    """Prompt that is being read, or whose texts are being generated."""

    key: int
    prompt: Prompt
    writing: SamplingParams
    request: Request
    reading: Reading | None
    """Generator that reads the prompt. None if the prompt is not read, because no requested result needs its memory or
    scores."""
    keeps_memory: bool
    scored: list[Scored] = field(default_factory=list)


class _Work:
    """State of one text that is being generated: its tokens, and the characters that are not shown yet."""

    def __init__(self, job: _Job, sample: int, decoder: StreamDecoder, *, end_of_text: int | None) -> None:
        self.job = job
        self.key = (job.key, sample)
        self.tokens: list[Token] = []
        self.finish: FinishReason | None = None
        self._decoder = decoder
        self._stop = job.writing.stop
        self._end_of_text = end_of_text
        self._lengths: list[int] = []  # of the text up to and with each token
        self._num_shown_chars = 0
        self._pending = ""  # text that is not shown yet, because it may begin a stop string
        self._num_reported = 0  # tokens that `new_tokens` has returned

    def take(self, token: Token) -> str:
        """Append a token and return the new text to show. Characters that may begin a stop string are held back."""
        self.tokens.append(token)
        is_end = token.id == self._end_of_text
        if not is_end:
            self._pending += self._decoder.push(token.id)
        if is_end or token.is_last:
            self._pending += self._decoder.close()
        self._lengths.append(self._num_shown_chars + len(self._pending))
        stop_places = [self._pending.find(stop) for stop in self._stop]
        stop_places = [place for place in stop_places if place >= 0]
        if stop_places:
            self._pending = self._pending[: min(stop_places)]
            self.finish = "stop"
        elif token.is_last:
            if is_end:
                self.finish = "end_of_text"
            else:
                self.finish = "length"
        if self.finish:
            num_held = 0
        else:
            num_held = self._num_suspect()
        return self._show(len(self._pending) - num_held)

    def cut(self) -> str:
        """End the text with the tokens that it has, and return the characters that were held back."""
        self.finish = "length"
        self._pending += self._decoder.close()
        if self._lengths:
            self._lengths[-1] = self._num_shown_chars + len(self._pending)
        return self._show(len(self._pending))

    def text_tokens(self) -> list[Token]:
        """Return the tokens whose text was shown. An end-of-text token and incomplete characters are left out."""
        num_tokens = self._num_shown()
        if self.finish == "end_of_text":
            num_tokens = len(self.tokens) - 1
        return self.tokens[:num_tokens]

    def new_tokens(self) -> list[tuple[Token, int]]:
        """Return the tokens shown since the last call, each with the length of the text up to the token's end.

        An end-of-text token counts as shown.
        """
        first = self._num_reported
        self._num_reported = max(first, self._num_shown())
        new = slice(first, self._num_reported)
        return list(zip(self.tokens[new], self._lengths[new], strict=True))

    def _num_shown(self) -> int:
        """Count the tokens whose text was shown. An end-of-text token that ended the text counts too."""
        if self.finish in ("length", "end_of_text"):
            return len(self.tokens)
        num_reached = bisect_right(self._lengths, self._num_shown_chars)
        if not num_reached:
            return 0
        reached = self._lengths[num_reached - 1]
        if reached:
            return bisect_left(self._lengths, reached) + 1
        return 0

    def _show(self, length: int) -> str:
        """Remove the first `length` characters from the pending text, and return them."""
        shown = self._pending[:length]
        self._pending = self._pending[length:]
        self._num_shown_chars += len(shown)
        return shown

    def _num_suspect(self) -> int:
        """Count the characters at the end of the pending text that may begin a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._pending)), 0, -1):
            end = self._pending[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
