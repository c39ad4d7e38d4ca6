"""What all requests to a server share: the model, the thread that owns it, the memories, and the limits.

Requests are checked here, in the event loop; ids are made of long texts in other threads; the worker does the rest. A
prompt that nobody waits for any more leaves the worker.
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
from txl_dist.serve.memories import MemoryStore, StoredMemory
from txl_dist.serve.metrics import Metrics
from txl_dist.serve.options import Serving
from txl_dist.serve.responses import OutputQueue, PreparedPrompt, num_tokens_of
from txl_dist.serve.worker import GenerationRequest, QueueFullError, Worker

LONG_TEXT = 4_000
"""Characters of a text whose ids are made in another thread."""


class Service:
    """A model that is served, with all that its requests share."""

    def __init__(self, model: LanguageModel, serving: Serving, *, name: str) -> None:
        self.model, self.serving, self.name = model, serving, name
        self.worker = Worker(model, num_rows=serving.rows, max_queue=serving.queue, memory_len=serving.memory_len)
        self.memories = MemoryStore(
            most=serving.memories, most_bytes=serving.memory_bytes, most_age_s=serving.memory_age
        )
        self.metrics, self.created = Metrics(), int(time.time())
        self.is_draining = False
        _ = model.fingerprint  # now, for it reads all weights
        self.memory_len = model.window(serving.memory_len)
        self._keys = itertools.count()
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "txl_rows": ("Texts that are written.", lambda: self.worker.num_rows),
            "txl_queued": ("Prompts that wait.", lambda: self.worker.num_waiting),
            "txl_memories": ("Memories that are kept.", lambda: len(self.memories)),
            "txl_memory_bytes": ("Bytes of them.", lambda: self.memories.num_bytes),
        }
        for gauge, (meaning, value) in gauges.items():
            self.metrics.watch(gauge, meaning, value)

    @property
    def largest_memory(self) -> int:
        """Bytes of a memory that is full."""
        section, itemsize = self.model.network.section, self.model.network.embedding.weight(0).itemsize
        key_value = 2 * section.num_layers * section.num_heads * section.head_width * itemsize
        return self.memory_len * (key_value + 8)  # and a document

    @property
    def remembers(self) -> bool:
        """Whether the model's positions know a memory."""
        return self.model.network.section.scheme.uses_memory

    def check_name(self, name: str) -> None:
        """Raises RefusalError for a model that is not here."""
        if name not in ("", self.name):
            message = f"there is no model {name!r} here, but {self.name!r}. Ask for that, or leave `model` out."
            raise APIError(404, message, param="model", code="model_not_found")

    def memory(self, name: str) -> StoredMemory:
        """A memory by its handle. Raises RefusalError."""
        held = self.memories.get(name)
        if held is None:
            raise APIError(
                404,
                f"there is no memory {name!r}: it expired, gave way to newer ones or was never here. Give the whole "
                "text again, or make a memory of it with POST /v1/memories.",
                param="memory",
                code="memory_not_found",
            )
        return held

    def check_room(self, *, num_memories: int) -> None:
        """Raises RefusalError where so many memories of this model could not be kept."""
        if not self.remembers:
            positions = self.model.network.section.positions
            raise APIError(400, f"a model with {positions} positions remembers nothing. Give whole texts.")
        if not self.memories.fits(num_memories * self.largest_memory, num_memories=num_memories):
            message = (
                f"this server has no room for {num_memories} memories at a time (--memories, --memory-bytes). "
                "Ask for fewer, or give whole texts."
            )
            raise APIError(400, message, code="too_many_memories")

    async def prompt(self, text: Text, memory: TextMemory | None) -> PreparedPrompt:
        """A prompt's ids. Raises RefusalError for one that the model cannot begin with, or that is too long."""

        def begin() -> PreparedPrompt:
            shown = text if isinstance(text, str) else self.model.decode(text)
            return PreparedPrompt(self.model.prompt(text, memory), shown)

        if not isinstance(text, str):
            self._check_length(len(text))
        try:
            begun = await run_in_threadpool(begin) if len(text) > LONG_TEXT else begin()
        except TxlError as error:
            raise APIError(400, str(error), param="prompt", code="invalid_value") from error
        self._check_length(num_tokens_of(begun.prompt))
        return begun

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self.serving.max_prompt:
            raise APIError(
                400,
                f"the prompt has {counted(num_tokens, 'token')}; this server takes {self.serving.max_prompt:,}. "
                "Shorten it, or give its beginning to POST /v1/memories, and go on from there.",
                param="prompt",
                code="context_length_exceeded",
            )

    @asynccontextmanager
    async def at_work(self, jobs: Sequence[dict[str, Any]], receive: Receive) -> AsyncIterator[OutputQueue]:
        """Prompts in work while the block goes on. Raises RefusalError if there are too many."""
        inbox, deadline = OutputQueue(), time.monotonic() + self.serving.timeout
        made = [
            GenerationRequest(next(self._keys), deliver=partial(inbox.put, number), deadline=deadline, **values)
            for number, values in enumerate(jobs)
        ]
        try:
            self.worker.submit(made)
        except QueueFullError:
            raise APIError(429, "too many prompts wait already. Come again later.", code="queue_full") from None
        watch = asyncio.ensure_future(_until_gone(receive, inbox))
        try:
            yield inbox
        finally:
            watch.cancel()
            self.worker.cancel([job.key for job in made])

    def keep(self, ending: Completion, prompt: Prompt) -> StoredMemory:
        """What is remembered behind a text."""
        memory = self.model.generation("", ending, prompt).memory
        assert memory is not None
        return self.memories.put(memory)

    def told(self, held: StoredMemory) -> dict[str, Any]:
        """What clients are told of a memory."""
        return {"id": held.id, "tokens": len(held.memory), "expires": self.memories.expires(held)}

    def facts(self, held: StoredMemory) -> dict[str, Any]:
        """All of it."""
        facts = {"object": "memory", "model": self.name, "bytes": held.memory.num_bytes, "created": int(held.created)}
        return {**self.told(held), **facts}


async def _until_gone(receive: Receive, inbox: OutputQueue) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    inbox.close()
