"""From the pieces of texts to OpenAI's objects: whole, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from txl_dist.errors import CheckpointError, ConfigError, TxlError
from txl_dist.inference.generate import Scored
from txl_dist.inference.scheduler import Completion, OutputChunk, Prompt
from txl_dist.serve.api_errors import APIError
from txl_dist.serve.metrics import Metrics
from txl_dist.serve.schema import CompletionRequest
from txl_dist.serve.worker import LateError, StoppingError
from txl_dist.tokenizers.base import Tokenizer

PADDED_BYTES = 64
"""Bytes of which each event is a multiple, in a stream with `include_obfuscation`."""


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


class PreparedPrompt(NamedTuple):
    """A prompt of a request."""

    prompt: Prompt
    text: str
    """As it was given, or of the ids that were."""


class OutputQueue:
    """Pieces of the prompts of one request, as the worker makes them. Of the event loop alone."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, OutputChunk]] = []
        self._came, self._is_gone = asyncio.Event(), False

    def put(self, number: int, piece: OutputChunk) -> None:
        """One more, of the prompt of this number."""
        self._pieces.append((number, piece))
        self._came.set()

    def close(self) -> None:
        """Who waits here need not."""
        self._is_gone = True
        self._came.set()

    async def ready(self) -> None:
        """Wait for the first piece. Raises RefusalError if it is one, ClientGoneError if nobody waits any more."""
        await self._came.wait()
        self._check()

    async def take(self) -> list[tuple[int, OutputChunk]]:
        """All that has come, once something has. Raises as `ready`."""
        await self.ready()
        self._came.clear()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _check(self) -> None:
        if self._is_gone:
            raise ClientGoneError
        error = next((piece.error for _, piece in self._pieces if piece.error is not None), None)
        if error is not None:
            raise _refusal_of(error)


def _refusal_of(error: TxlError) -> APIError:
    if isinstance(error, LateError):
        return APIError(408, f"{error} Ask for less, or again when there is less to do.", code="timeout")
    if isinstance(error, StoppingError):
        return APIError(503, f"{error} Ask another one, or again later.", code="draining")
    if isinstance(error, ConfigError):  # no room for a memory
        return APIError(503, str(error), code="no_room")
    return APIError(500, str(error), code="bad_numbers" if isinstance(error, CheckpointError) else "defect")


@dataclass
class _Choice:
    """One text of an answer, as far as it has come."""

    index: int
    text: str = ""
    place: int = 0
    """Characters before the first token that is made."""
    end: int = 0
    """Characters of the text up to the end of the last token, without those."""
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None
    memory: dict[str, Any] | None = None
    has_begun: bool = False
    first_at: float = 0.0
    """When its first token came, by time.monotonic()."""
    num_tokens: int = 0

    def told(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        values = {"index": self.index, "text": self.text, "logprobs": self.logprobs}
        values["finish_reason"] = self.finish_reason
        return values if self.memory is None else {**values, "memory": self.memory}


class Answer:
    """The texts of a request. `keep` keeps what is remembered of one, and gives what its client is told of that."""

    def __init__(
        self,
        order: CompletionRequest,
        begun: Sequence[PreparedPrompt],
        inbox: OutputQueue,
        *,
        name: str,
        tokenizer: Tokenizer,
        keep: Callable[[Completion, Prompt], dict[str, Any]],
        metrics: Metrics,
    ) -> None:
        self._order, self._begun, self._inbox, self._tokenizer = order, begun, inbox, tokenizer
        self._keep, self._metrics, self._asked_at = keep, metrics, time.monotonic()
        identity = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion"}
        self._head = {**identity, "created": int(time.time()), "model": name}
        self._choices = [_Choice(index) for index in range(len(begun) * order.n)]
        self._has_token = False

    async def whole(self) -> bytes:
        """All texts. Raises RefusalError where one cannot be gone on with, ClientGoneError where nobody waits."""
        while not self._has_ended:
            for number, piece in await self._inbox.take():
                self._add(number, piece)
        choices = [choice.told() for choice in self._choices]
        return json.dumps({**self._head, "choices": choices, "usage": self._usage()}, allow_nan=False).encode()

    async def events(self) -> AsyncIterator[bytes]:
        """Pieces of texts as they come; those of a text that came together are one. Raises ClientGoneError."""
        options = self._order.stream_options
        wants_usage = options is not None and options.include_usage
        make_event = _padded_event if options is not None and options.include_obfuscation else _event
        beside = {"usage": None} if wants_usage else {}
        try:
            while not self._has_ended:
                changed = {id(choice): choice for choice in [self._add(*one) for one in await self._inbox.take()]}
                chunks = []
                for choice in changed.values():
                    if choice.text or choice.finish_reason or (choice.logprobs and choice.logprobs["tokens"]):
                        chunks.append(make_event({**self._head, "choices": [choice.told()], **beside}))
                    choice.text, choice.logprobs = "", None
                if chunks:
                    yield b"".join(chunks)
            if wants_usage:
                yield _event({**self._head, "choices": [], "usage": self._usage()})
        except APIError as refusal:
            yield _event(refusal.body())
        yield b"data: [DONE]\n\n"

    @property
    def _has_ended(self) -> bool:
        return all(choice.finish_reason for choice in self._choices)

    def _add(self, number: int, piece: OutputChunk) -> _Choice:
        """To the choice that it is of."""
        choice, begun = self._choices[number * self._order.n + piece.sample], self._begun[number]
        if self._order.logprobs is not None and choice.logprobs is None:
            choice.logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if not choice.has_begun:  # with what joins the text to its prompt
            choice.has_begun = True
            choice.text = begun.text if self._order.echo else ""
            choice.place = len(choice.text) + len(piece.text)
            if self._order.echo and choice.logprobs is not None:
                self._add_prompt(choice.logprobs, begun, piece.scored)
        choice.text += piece.text
        self._clock(choice, piece)
        for token, end in piece.tokens:
            choice.num_tokens += 1
            if choice.logprobs is not None:
                self._add_token(choice.logprobs, token, offset=choice.place + choice.end)
            choice.end = end
        if piece.ending is not None:
            choice.finish_reason = "length" if piece.ending.finish == "length" else "stop"
            if piece.ending.past is not None:
                choice.memory = self._keep(piece.ending, begun.prompt)
        return choice

    def _clock(self, choice: _Choice, piece: OutputChunk) -> None:
        now = time.monotonic()
        if piece.tokens and not self._has_token:
            self._has_token = True
            self._metrics.first_token_s.observe(now - self._asked_at)
        if piece.tokens and not choice.num_tokens:
            choice.first_at = now
        others = choice.num_tokens + len(piece.tokens) - 1
        if piece.ending is not None and others > 0:
            self._metrics.per_token_s.observe((now - choice.first_at) / others)
        self._metrics.made_tokens.inc(len(piece.tokens))

    def _add_prompt(self, logprobs: dict[str, list[Any]], begun: PreparedPrompt, scored: Sequence[Scored]) -> None:
        """The tokens of a prompt that is told with its text; nothing stands before the first of a text without a
        beginning."""
        prompt, decoder, offset = begun.prompt, self._tokenizer.decoder(), 0
        if not prompt.num_led:
            logprobs["tokens"].append(self._spelt(prompt.ids[0]))
            for name, value in (("token_logprobs", None), ("top_logprobs", None), ("text_offset", 0)):
                logprobs[name].append(value)
            offset = len(decoder.push(prompt.ids[0]))
        for token in scored:
            self._add_token(logprobs, token, offset=min(offset, len(begun.text)))
            offset += len(decoder.push(token.id))

    def _add_token(self, logprobs: dict[str, list[Any]], token: Any, *, offset: int) -> None:
        spelt = self._spelt(token.id)
        top: dict[str, float] = {}
        for i, log_p in token.top[: self._order.logprobs]:
            top.setdefault(self._spelt(i), log_p)
        logprobs["tokens"].append(spelt)
        logprobs["token_logprobs"].append(token.log_p)
        logprobs["top_logprobs"].append(top | {spelt: token.log_p})
        logprobs["text_offset"].append(offset)

    def _spelt(self, i: int) -> str:
        """A token's text; of one that is part of a character its bytes, as OpenAI writes them."""
        if self._tokenizer.spellings is None:
            return self._tokenizer.decode([i])
        spelling = self._tokenizer.spellings[i]
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)

    def _usage(self) -> dict[str, int]:
        num_prompt = sum(num_tokens_of(begun.prompt) for begun in self._begun)
        num_made = sum(choice.num_tokens for choice in self._choices)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_made, "total_tokens": num_prompt + num_made}


def num_tokens_of(prompt: Prompt) -> int:
    """Tokens that a client is told to have given: with an end-of-text before them, without what a memory held."""
    return len(prompt.ids) - (prompt.past is not None)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, allow_nan=False).encode() + b"\n\n"


def _padded_event(content: dict[str, Any]) -> bytes:
    """An event with a field `obfuscation` of random characters, so that its size is a multiple of PADDED_BYTES."""
    num_missing = -len(_event({**content, "obfuscation": ""})) % PADDED_BYTES
    return _event({**content, "obfuscation": secrets.token_hex(PADDED_BYTES)[:num_missing]})
