"""State that all requests to a server share: the model, the worker thread, the stored memories, and the limits.

Requests are checked here, in the event loop. Long texts are tokenized in other threads. The worker thread generates
texts. When a client disconnects, the worker drops the client's prompts.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.types import Receive

from txl_dist.console.formatting import counted
from txl_dist.errors import TxlError
from txl_dist.inference.language_model import LanguageModel, Text
from txl_dist.inference.scheduler import Completion, Prompt
from txl_dist.inference.text_memory import TextMemory
from txl_dist.serve.api_errors import APIError
from txl_dist.serve.memory_store import MemoryStore, StoredMemory
from txl_dist.serve.options import Serving
from txl_dist.serve.prometheus import Metrics
from txl_dist.serve.responses import OutputQueue, PreparedPrompt, num_tokens_of
from txl_dist.serve.worker import GenerationRequest, QueueFullError, Worker

LONG_TEXT = 4_000
"""Number of characters above which a text is tokenized in another thread, so that other requests are not delayed."""


class Service:
    """A served model, with the worker, memories, limits and metrics that all requests use."""

    def __init__(self, model: LanguageModel, serving: Serving, *, name: str) -> None:
        self.model = model
        self.serving = serving
        self.name = name
        self.worker = Worker(
            model, num_rows=serving.max_num_seqs, max_queue=serving.max_queue, memory_len=serving.memory_len
        )
        self.memories = MemoryStore(
            most=serving.memories, most_bytes=serving.memory_bytes, most_age_s=serving.memory_ttl
        )
        self.metrics = Metrics()
        self.created = int(time.time())
        self.is_draining = False
        _ = model.fingerprint  # computed now and cached, because it reads all weights
        self.memory_len = model.window(serving.memory_len)
        self._keys = itertools.count()
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "txl_requests_running": ("Number of texts that are being generated.", lambda: self.worker.num_rows),
            "txl_requests_waiting": ("Number of prompts that are waiting.", lambda: self.worker.num_waiting),
            "txl_memories": ("Number of stored memories.", lambda: len(self.memories)),
            "txl_memory_bytes": ("Bytes of all stored memories.", lambda: self.memories.num_bytes),
        }
        for gauge, (meaning, value) in gauges.items():
            self.metrics.watch(gauge, meaning, value)

    @property
    def largest_memory(self) -> int:
        """Size in bytes of a full memory, which has `memory_len` tokens."""
        section = self.model.network.section
        itemsize = self.model.network.embedding.weight(0).itemsize
        key_and_value_bytes = 2 * section.num_layers * section.num_heads * section.head_width * itemsize
        document_bytes = 8
        return self.memory_len * (key_and_value_bytes + document_bytes)

    @property
    def remembers(self) -> bool:
        """Whether the model's positions support a memory of past tokens."""
        return self.model.network.section.scheme.uses_memory

    def check_name(self, name: str) -> None:
        """Raise APIError 404 if a request names another model. An empty name means the served model."""
        if name not in ("", self.name):
            message = f"this server has no model {name!r}. Set `model` to {self.name!r}, or omit `model`."
            raise APIError(404, message, param="model", code="model_not_found")

    def memory(self, name: str) -> StoredMemory:
        """Return the stored memory with this id. Raises APIError 404 if there is none."""
        stored = self.memories.get(name)
        if stored is None:
            raise APIError(
                404,
                f"there is no memory {name!r}: the memory expired, was removed for newer memories, or never existed. "
                "Send the whole text again, or store a memory of the text with POST /v1/memories.",
                param="memory",
                code="memory_not_found",
            )
        return stored

    def check_room(self, *, num_memories: int) -> None:
        """Raise APIError if this number of full memories cannot be stored, or if the model has no memory."""
        if not self.remembers:
            positions = self.model.network.section.positions
            raise APIError(400, f"a model with {positions} positions has no memory. Send whole texts.")
        if not self.memories.fits(num_memories * self.largest_memory, num_memories=num_memories):
            message = (
                f"this server has no space for {num_memories} memories at a time (--memories, --memory-bytes). "
                "Request fewer memories, or send whole texts."
            )
            raise APIError(400, message, code="too_many_memories")

    async def prompt(self, text: Text, memory: TextMemory | None) -> PreparedPrompt:
        """Tokenize a prompt. Raises APIError if it is too long, or cannot be used with this model and memory."""

        def prepare() -> PreparedPrompt:
            if isinstance(text, str):
                shown_text = text
            else:
                shown_text = self.model.decode(text)
            return PreparedPrompt(self.model.prompt(text, memory), shown_text)

        if not isinstance(text, str):
            self._check_length(len(text))
        try:
            if len(text) > LONG_TEXT:
                prepared = await run_in_threadpool(prepare)
            else:
                prepared = prepare()
        except TxlError as error:
            raise APIError(400, str(error), param="prompt", code="invalid_value") from error
        self._check_length(num_tokens_of(prepared.prompt))
        return prepared

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self.serving.max_prompt_len:
            raise APIError(
                400,
                f"the prompt has {counted(num_tokens, 'token')}, but this server accepts at most "
                f"{self.serving.max_prompt_len:,}. Shorten the prompt, or send its beginning to POST /v1/memories and "
                "continue from that memory.",
                param="prompt",
                code="context_length_exceeded",
            )

    @asynccontextmanager
    async def at_work(self, jobs: Sequence[dict[str, Any]], receive: Receive) -> AsyncIterator[OutputQueue]:
        """Run prompts in the worker during the block, and yield the queue of their output.

        Each item of `jobs` holds fields of a `GenerationRequest`: `prompt`, `writing`, and any fields that differ from
        their default. At the end of the block the prompts are cancelled. If the client disconnects, the queue is
        closed. Raises APIError 429 if the worker's queue is full.
        """
        outputs = OutputQueue()
        deadline = time.monotonic() + self.serving.timeout
        requests = []
        for number, values in enumerate(jobs):
            deliver = partial(outputs.put, number)
            requests.append(GenerationRequest(next(self._keys), deliver=deliver, deadline=deadline, **values))
        try:
            self.worker.submit(requests)
        except QueueFullError:
            raise APIError(429, "too many prompts are waiting. Try again later.", code="queue_full") from None
        watch = asyncio.ensure_future(_close_on_disconnect(receive, outputs))
        try:
            yield outputs
        finally:
            watch.cancel()
            self.worker.cancel([job.key for job in requests])

    def keep(self, ending: Completion, prompt: Prompt) -> StoredMemory:
        """Store the memory after a prompt and its generated text. Returns the stored memory."""
        memory = self.model.generation("", ending, prompt).memory
        assert memory is not None
        return self.memories.put(memory)

    def payload(self, stored: StoredMemory) -> dict[str, Any]:
        """Return the short description of a stored memory, which is part of a completion (`api_schema.Kept`)."""
        return {"id": stored.id, "tokens": len(stored.memory), "expires": self.memories.expires(stored)}

    def metadata(self, stored: StoredMemory) -> dict[str, Any]:
        """Return the full description of a stored memory (`api_schema.MemoryObject`)."""
        return {
            **self.payload(stored),
            "object": "memory",
            "model": self.name,
            "bytes": stored.memory.num_bytes,
            "created": int(stored.created),
        }


async def _close_on_disconnect(receive: Receive, outputs: OutputQueue) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    outputs.close()
