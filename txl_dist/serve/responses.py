"""Responses in OpenAI's form, made from the scheduler's output chunks: as a whole, or as a stream of events.

All code of this module runs in the event loop. Each event of a stream has all text since the previous event. So a slow
client gets fewer and longer events.
"""

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
from txl_dist.serve.api_schema import CompletionRequest
from txl_dist.serve.prometheus import Metrics
from txl_dist.serve.worker import LateError, StoppingError
from txl_dist.tokenizers.base import Tokenizer

PADDED_BYTES = 64
"""In a stream with `include_obfuscation`, the size in bytes of each event with a text is a multiple of this number."""


class ClientGoneError(Exception):
    """Disconnection of the client before its response was complete."""


class PreparedPrompt(NamedTuple):
    """A prompt of a request after tokenization, with its text."""

    prompt: Prompt
    text: str
    """Text of the prompt. If the client gave ids, the text is decoded from the ids."""


class OutputQueue:
    """Queue of the output chunks of all prompts of one request. Only the event loop uses it."""

    def __init__(self) -> None:
        self._chunks: list[tuple[int, OutputChunk]] = []
        self._has_news = asyncio.Event()
        self._is_closed = False

    def put(self, number: int, chunk: OutputChunk) -> None:
        """Add a chunk of the prompt with this number. The prompts of a request are counted from 0."""
        self._chunks.append((number, chunk))
        self._has_news.set()

    def close(self) -> None:
        """Make every waiting and every later call of `ready` and `take` raise ClientGoneError."""
        self._is_closed = True
        self._has_news.set()

    async def ready(self) -> None:
        """Wait for a chunk. Raises APIError if a chunk holds an error, and ClientGoneError after `close`."""
        await self._has_news.wait()
        if self._is_closed:
            raise ClientGoneError
        for _, chunk in self._chunks:
            if chunk.error is not None:
                raise _api_error(chunk.error)

    async def take(self) -> list[tuple[int, OutputChunk]]:
        """Wait for a chunk, and return all chunks in the queue, each with its prompt's number.

        Raises the errors of `ready`.
        """
        await self.ready()
        self._has_news.clear()
        chunks = self._chunks
        self._chunks = []
        return chunks


def _api_error(error: TxlError) -> APIError:
    """Return the API error for an error that ended a prompt."""
    if isinstance(error, LateError):
        return APIError(
            408, f"{error} Lower max_tokens, or try again when the server has fewer requests.", code="timeout"
        )
    if isinstance(error, StoppingError):
        return APIError(503, f"{error} Try another server, or try again later.", code="draining")
    if isinstance(error, ConfigError):  # no room for a memory
        return APIError(503, str(error), code="no_room")
    if isinstance(error, CheckpointError):
        return APIError(500, str(error), code="bad_numbers")
    return APIError(500, str(error), code="defect")


@dataclass
class _Choice:
    """State of one choice of a response, which is one text while it is generated."""

    index: int
    text: str = ""
    """Text that was not sent yet. In a response without a stream, it is the whole text."""
    start: int = 0
    """Number of characters of the text before the first generated token."""
    end: int = 0
    """Number of generated characters up to the end of the last complete token."""
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None
    memory: dict[str, Any] | None = None
    has_begun: bool = False
    first_at: float = 0.0
    """Time at which the first token was generated, as time.monotonic() counts it."""
    num_tokens: int = 0

    def payload(self) -> dict[str, Any]:
        """Return the choice in OpenAI's form. The result has the key `memory` only if a memory was stored."""
        values = {"index": self.index, "text": self.text, "logprobs": self.logprobs}
        values["finish_reason"] = self.finish_reason
        if self.memory is not None:
            values["memory"] = self.memory
        return values


class Answer:
    """Response to a completion request: all texts of all its prompts, as a whole (`whole`) or as a stream (`events`).

    `keep` is a function that stores the memory after a text and returns its description for the client.
    """

    def __init__(
        self,
        request: CompletionRequest,
        prompts: Sequence[PreparedPrompt],
        outputs: OutputQueue,
        *,
        name: str,
        tokenizer: Tokenizer,
        keep: Callable[[Completion, Prompt], dict[str, Any]],
        metrics: Metrics,
    ) -> None:
        self._request = request
        self._prompts = prompts
        self._outputs = outputs
        self._tokenizer = tokenizer
        self._keep = keep
        self._metrics = metrics
        self._received_at = time.monotonic()
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }
        self._choices = [_Choice(index) for index in range(len(prompts) * request.n)]
        self._has_token = False

    async def whole(self) -> bytes:
        """Wait until all texts have ended, and return the response as JSON.

        Raises APIError if a prompt failed, and ClientGoneError if the client has disconnected.
        """
        while not self._has_ended:
            for number, chunk in await self._outputs.take():
                self._add(number, chunk)
        choices = [choice.payload() for choice in self._choices]
        return json.dumps({**self._head, "choices": choices, "usage": self._usage()}, allow_nan=False).encode()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events while texts are generated. Raises ClientGoneError if the client has disconnected.

        Chunks of one text that arrive together become one event. An error becomes the last event before [DONE].
        """
        options = self._request.stream_options
        wants_usage = options is not None and options.include_usage
        make_event = _event
        if options is not None and options.include_obfuscation:
            make_event = _padded_event
        if wants_usage:
            no_usage = {"usage": None}
        else:
            no_usage = {}
        try:
            while not self._has_ended:
                changed: dict[int, _Choice] = {}  # by index, in the order of their first chunk
                for number, chunk in await self._outputs.take():
                    choice = self._add(number, chunk)
                    changed[choice.index] = choice
                events = []
                for choice in changed.values():
                    has_log_probs = choice.logprobs is not None and bool(choice.logprobs["tokens"])
                    if choice.text or choice.finish_reason or has_log_probs:
                        events.append(make_event({**self._head, "choices": [choice.payload()], **no_usage}))
                    choice.text = ""
                    choice.logprobs = None
                if events:
                    yield b"".join(events)
            if wants_usage:
                yield _event({**self._head, "choices": [], "usage": self._usage()})
        except APIError as refusal:
            yield _event(refusal.body())
        yield b"data: [DONE]\n\n"

    @property
    def _has_ended(self) -> bool:
        return all(choice.finish_reason for choice in self._choices)

    def _add(self, number: int, chunk: OutputChunk) -> _Choice:
        """Add a chunk to its choice, and return the choice. `number` is the number of the chunk's prompt in the
        request."""
        choice = self._choices[number * self._request.n + chunk.sample]
        prepared = self._prompts[number]
        if self._request.logprobs is not None and choice.logprobs is None:
            choice.logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if not choice.has_begun:
            choice.has_begun = True
            if self._request.echo:
                choice.text = prepared.text
            else:
                choice.text = ""
            choice.start = len(choice.text) + len(chunk.text)  # the first chunk's text joins prompt and continuation
            if self._request.echo and choice.logprobs is not None:
                self._add_prompt(choice.logprobs, prepared, chunk.scored)
        choice.text += chunk.text
        self._measure(choice, chunk)
        for token, end in chunk.tokens:
            choice.num_tokens += 1
            if choice.logprobs is not None:
                self._add_token(choice.logprobs, token, offset=choice.start + choice.end)
            choice.end = end
        if chunk.ending is not None:
            if chunk.ending.finish == "length":
                choice.finish_reason = "length"
            else:
                choice.finish_reason = "stop"
            if chunk.ending.past is not None:
                choice.memory = self._keep(chunk.ending, prepared.prompt)
        return choice

    def _measure(self, choice: _Choice, chunk: OutputChunk) -> None:
        """Record metrics of a chunk: the time to the request's first token, the time per further token, and the number
        of tokens.
        """
        now = time.monotonic()
        if chunk.tokens and not self._has_token:
            self._has_token = True
            self._metrics.first_token_s.observe(now - self._received_at)
        if chunk.tokens and not choice.num_tokens:
            choice.first_at = now
        num_further = choice.num_tokens + len(chunk.tokens) - 1
        if chunk.ending is not None and num_further > 0:
            self._metrics.per_token_s.observe((now - choice.first_at) / num_further)
        self._metrics.made_tokens.inc(len(chunk.tokens))

    def _add_prompt(self, logprobs: dict[str, list[Any]], prepared: PreparedPrompt, scored: Sequence[Scored]) -> None:
        """Add the tokens of a prompt that is echoed, with their log-probabilities.

        The first token has no log-probability if neither an end-of-text token nor a memory precedes it.
        """
        prompt = prepared.prompt
        decoder = self._tokenizer.decoder()
        offset = 0
        if not prompt.num_led:
            logprobs["tokens"].append(self._token_text(prompt.ids[0]))
            logprobs["token_logprobs"].append(None)
            logprobs["top_logprobs"].append(None)
            logprobs["text_offset"].append(0)
            offset = len(decoder.push(prompt.ids[0]))
        for token in scored:
            self._add_token(logprobs, token, offset=min(offset, len(prepared.text)))
            offset += len(decoder.push(token.id))

    def _add_token(self, logprobs: dict[str, list[Any]], token: Any, *, offset: int) -> None:
        text = self._token_text(token.id)
        top: dict[str, float] = {}
        for i, log_p in token.top[: self._request.logprobs]:
            top.setdefault(self._token_text(i), log_p)
        logprobs["tokens"].append(text)
        logprobs["token_logprobs"].append(token.log_p)
        logprobs["top_logprobs"].append(top | {text: token.log_p})
        logprobs["text_offset"].append(offset)

    def _token_text(self, i: int) -> str:
        r"""Return the text of a token.

        A part of a character is returned as bytes in OpenAI's form, such as `bytes:\xc3`.
        """
        if self._tokenizer.spellings is None:
            return self._tokenizer.decode([i])
        spelling = self._tokenizer.spellings[i]
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)

    def _usage(self) -> dict[str, int]:
        num_prompt = sum(num_tokens_of(prepared.prompt) for prepared in self._prompts)
        num_generated = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }


def num_tokens_of(prompt: Prompt) -> int:
    """Return the number of tokens of a prompt as the client counts them.

    An end-of-text token that was put before the text counts. A token that is taken from a memory does not count.
    """
    has_token_of_memory = prompt.past is not None
    return len(prompt.ids) - has_token_of_memory


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, allow_nan=False).encode() + b"\n\n"


def _padded_event(content: dict[str, Any]) -> bytes:
    """Return a server-sent event with random characters in `obfuscation`, so that its size is a multiple of
    PADDED_BYTES.
    """
    num_missing = -len(_event({**content, "obfuscation": ""})) % PADDED_BYTES
    return _event({**content, "obfuscation": secrets.token_hex(PADDED_BYTES)[:num_missing]})
