"""From prompts to texts: tokens become pieces of text as they are made, and end at the strings that shall stop them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from txl_dist.infer.cached import Past
from txl_dist.infer.generate import Decoder, Request, Token
from txl_dist.infer.settings import Writing
from txl_dist.text.base import StreamDecoder, Tokenizer

Finish = Literal["length", "stop", "end_of_text"]


class Prompt(NamedTuple):
    """What a text begins with, as ids."""

    ids: tuple[int, ...]
    """At least one; behind a past, the first is its last token."""
    past: Past | None = None
    """What was read before."""
    joint: str = ""
    """What stands between the prompt and its continuation."""


class Ending(NamedTuple):
    """How a text ended."""

    finish: Finish
    tokens: list[Token]
    """Of its text; those behind its end are left out."""
    past: Past | None
    """What is remembered of the prompt and of the text but its last token; only if asked for."""


class Piece(NamedTuple):
    """Some more of a text."""

    prompt: int
    """Which prompt, from 0."""
    sample: int
    """Which of its samples, from 0."""
    text: str
    ending: Ending | None
    """Only with the last piece."""


def write(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Iterable[Prompt],
    writing: Writing,
    *,
    keeps_memory: bool = False,
) -> Iterator[Piece]:
    """Pieces of all texts as they come, those of several in turn; `writing.batch_size` texts are in work at once."""
    waiting = _requests(decoder, tokenizer, prompts, writing, num_spare=writing.num_spare if keeps_memory else 0)
    works: dict[Hashable, _Work] = {}
    while True:
        while len(works) < writing.batch_size and (found := next(waiting, None)) is not None:
            key, prompt, request = found
            work = _Work(key, tokenizer.decoder(after=prompt.ids), writing.stop, tokenizer.end_of_text)
            if request.max_tokens == 0:
                past = decoder.read(request) if keeps_memory else None
                yield Piece(*key, prompt.joint, Ending("length", [], past))
                continue
            decoder.add(key, request)
            works[key] = work
            yield Piece(*key, prompt.joint, None)
        if not works:
            return
        for token in decoder.step():
            work = works[token.key]
            text = work.take(token)
            if work.finish is None:
                if text:
                    yield Piece(*work.key, text, None)
                continue
            kept, past = work.kept(), None
            if keeps_memory:
                past = decoder.past(token.key, without_last=len(work.tokens) - len(kept))
            decoder.remove(token.key)
            del works[token.key]
            yield Piece(*work.key, text, Ending(work.finish, kept, past))


def _requests(
    decoder: Decoder, tokenizer: Tokenizer, prompts: Iterable[Prompt], writing: Writing, *, num_spare: int
) -> Iterator[tuple[tuple[int, int], Prompt, Request]]:
    """One per prompt and sample; a prompt of several samples is read once."""
    sampling = writing.sampling()
    for index, prompt in enumerate(prompts):
        request = Request(
            ids=prompt.ids,
            past=prompt.past,
            max_tokens=writing.max_tokens,
            stop_at=tokenizer.end_of_text,
            sampling=sampling,
            seed=writing.seed,
            num_top=max(0, writing.log_probs),
            num_spare=num_spare,
        )
        if writing.num_samples > 1 and decoder.remembers:
            request = request._replace(past=decoder.read(request), num_read=len(prompt.ids) - 1)
        for sample in range(writing.num_samples):
            yield (index, sample), prompt, request._replace(sample=sample)


@dataclass
class _Work:
    """A text that is being written."""

    key: tuple[int, int]
    decoder: StreamDecoder
    stop: Sequence[str]
    end_of_text: int | None

    def __post_init__(self) -> None:
        self.tokens: list[Token] = []
        self.finish: Finish | None = None
        self._lengths: list[int] = []  # of the text with each token
        self._shown, self._held = 0, ""

    def take(self, token: Token) -> str:
        """What may be shown with one more token. What could be the beginning of a stop string is held back."""
        self.tokens.append(token)
        is_end = token.id == self.end_of_text
        self._held += self.decoder.close() if is_end else self.decoder.push(token.id)
        if token.is_last and not is_end:
            self._held += self.decoder.close()
        self._lengths.append(self._shown + len(self._held))
        found = [place for stop in self.stop if (place := self._held.find(stop)) >= 0]
        if found:
            self._held, self.finish = self._held[: min(found)], "stop"
        elif token.is_last:
            self.finish = "end_of_text" if is_end else "length"
        num_held = 0 if self.finish else self._num_suspect()
        shown, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        self._shown += len(shown)
        return shown

    def kept(self) -> list[Token]:
        """The tokens whose text was shown; none that had only begun a character."""
        if self.finish == "stop":
            reached = max((length for length in self._lengths if length <= self._shown), default=0)
            return self.tokens[: self._lengths.index(reached) + 1 if reached else 0]
        return self.tokens[:-1] if self.finish == "end_of_text" else self.tokens

    def _num_suspect(self) -> int:
        """Characters at the end that begin a stop string."""
        longest = max((len(stop) for stop in self.stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self.stop):
                return length
        return 0
