"""Thread that runs the model. Each step generates one token of every running text, and sends chunks to the event loop.

    worker.submit([job, ...])       any thread: adds prompts to the queue, or raises QueueFullError
    worker.cancel([key, ...])       any thread: drops prompts whose output is not needed any more

The set of running prompts changes only between two steps. Prompts in the queue start as soon as there is room. At the
deadline of a prompt, its texts end with the tokens that they have. The thread never waits for the event loop. If a
client does not read its output, the client's connection buffers it.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from txl_dist.console.formatting import counted
from txl_dist.console.logging import logger
from txl_dist.errors import TxlError
from txl_dist.inference.language_model import LanguageModel
from txl_dist.inference.options import SamplingParams
from txl_dist.inference.scheduler import OutputChunk, Prompt, Scheduler

PIECE_S = 0.0004
"""Seconds between two deliveries to the event loop, per running text.

Sending a chunk takes the event loop half of this time, in which the worker thread cannot run. So the tokens of a single
text are delivered one by one, and the tokens of 64 texts are delivered every 25 ms.
"""


class QueueFullError(Exception):
    """Refusal of prompts because the worker's queue has no space for them."""


class LateError(TxlError):
    """Timeout of a request before any of its text was generated."""


class StoppingError(TxlError):
    """Shutdown of the server before any text of a request was generated."""


class DefectError(TxlError):
    """Error inside the server that the request did not cause."""


@dataclass
class GenerationRequest:
    """A prompt for the worker, with its sampling settings and the callback for its output."""

    key: int
    """Number of the prompt, which no other prompt of the server has."""
    prompt: Prompt
    writing: SamplingParams
    """Sampling settings and limits of the texts."""
    deliver: Callable[[OutputChunk], None]
    """Callback for each chunk. It runs in the event loop."""
    deadline: float
    """Time at which the texts end with the tokens they have, as time.monotonic() counts it."""
    keeps_memory: bool = False
    """Whether the last chunk of each text has the memory after the text."""
    scores_prompt: bool = False
    """Whether the first chunk has the log-probabilities of the prompt's tokens."""
    num_left: int = 0
    """Number of texts of the prompt that have not ended."""
    has_begun: bool = False
    """Whether a chunk of the prompt was delivered."""


class Worker:
    """Thread that generates the texts of all requests, from `start` to `stop`.

    `num_rows` is the largest number of texts at once, and `max_queue` the largest number of waiting prompts.
    `memory_len` is the number of past tokens that a text sees. The value -1 means as many as in training.
    """

    def __init__(self, model: LanguageModel, *, num_rows: int, max_queue: int, memory_len: int = -1) -> None:
        self._model = model
        self._num_rows = num_rows
        self._memory_len = memory_len
        self._max_queue = max_queue
        self._changed = threading.Condition()  # guards the next three attributes
        self._waiting: deque[GenerationRequest] = deque()
        self._cancelled: set[int] = set()
        self._is_stopped = False
        self._deadline_of_all = math.inf  # by time.monotonic()
        self._jobs: dict[int, GenerationRequest] = {}  # running prompts; only the thread uses this
        self._undelivered: list[tuple[Callable[[OutputChunk], None], OutputChunk]] = []
        self._delivered_at = 0.0
        self._scheduler = self._new_scheduler()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_failure: Callable[[], object] = lambda: None
        self.has_failed = False
        """Whether the worker has ended because it cannot generate any more."""

    @property
    def num_waiting(self) -> int:
        """Number of prompts that wait in the queue."""
        return len(self._waiting)

    @property
    def num_rows(self) -> int:
        """Number of texts that are being generated."""
        return self._scheduler.num_rows

    def start(self, loop: asyncio.AbstractEventLoop, *, on_failure: Callable[[], object]) -> None:
        """Start the thread. Chunks are delivered in the event loop `loop`.

        `on_failure` is called in `loop` if the worker ends because no new scheduler can be made, for instance without
        enough GPU memory.
        """
        self._loop = loop
        self._on_failure = on_failure
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current step, and wait for its end."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, jobs: Sequence[GenerationRequest]) -> None:
        """Add prompts to the queue. If the queue has no space for all of them, add none and raise QueueFullError."""
        with self._changed:
            if len(self._waiting) + len(jobs) > self._max_queue:
                raise QueueFullError
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, keys: Sequence[int]) -> None:
        """Stop generation for the prompts with these keys. Keys of prompts that have ended are ignored."""
        with self._changed:
            self._cancelled.update(keys)
            self._changed.notify()

    def set_deadline(self, *, by: float) -> None:
        """Set a deadline for all prompts, as time.monotonic() counts it.

        Earlier deadlines of single prompts still apply.
        """
        self._deadline_of_all = by

    def _new_scheduler(self) -> Scheduler:
        return self._model.writer(num_rows=self._num_rows, memory_len=self._memory_len)

    def _run(self) -> None:
        while True:
            try:
                if not self._update_jobs():
                    return
                chunks = self._end_late_jobs()
                chunks += self._scheduler.step()
            except Exception as error:  # noqa: BLE001  a defect, or no memory left: running prompts are lost, later ones not
                logger.exception("generation for %s failed", counted(len(self._jobs), "prompt"))
                self._fail_jobs(error)
                try:
                    self._scheduler = self._new_scheduler()
                except Exception as final_error:  # noqa: BLE001  waiting clients get the error; then the server ends
                    logger.exception("no text can be generated any more")
                    self._fail_for_good(final_error)
                    return
            else:
                self._deliver_or_collect(chunks)

    def _fail_jobs(self, error: Exception) -> None:
        """Deliver an error to the callback of every running prompt."""
        if isinstance(error, TxlError):
            failure = error
        else:
            failure = DefectError("the server failed. The server's log contains the reason.")
        self._deliver_or_collect([OutputChunk(key, 0, "", None, error=failure) for key in self._jobs])

    def _fail_for_good(self, error: Exception) -> None:
        """Deliver an error to the callback of every running and waiting prompt, and call `on_failure`."""
        with self._changed:
            self._jobs |= {job.key: job for job in self._waiting}
            self._waiting.clear()
        self._fail_jobs(error)
        self.has_failed = True
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_failure)

    def _update_jobs(self) -> bool:
        """Wait for prompts, drop cancelled prompts, and start waiting prompts. Returns False to stop the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._waiting or self._jobs or self._cancelled)
            cancelled = self._cancelled
            self._cancelled = set()
            if cancelled:
                self._waiting = deque(job for job in self._waiting if job.key not in cancelled)
            if self._is_stopped:
                return False
        # Not under the lock, because the event loop may wait for it: removing a row may copy the other rows.
        for key in cancelled & self._jobs.keys():
            self._scheduler.remove(key)
            del self._jobs[key]
        while self._scheduler.has_room:
            job = self._pop_waiting()
            if job is None:
                break
            self._jobs[job.key] = job
            job.num_left = job.writing.num_samples
            self._scheduler.add(
                job.key, job.prompt, job.writing, keeps_memory=job.keeps_memory, scores_prompt=job.scores_prompt
            )
        return True

    def _pop_waiting(self) -> GenerationRequest | None:
        with self._changed:
            if self._waiting:
                return self._waiting.popleft()
            return None

    def _end_late_jobs(self) -> list[OutputChunk]:
        """End the prompts that are past their deadline.

        A prompt ends with the text that it has, or with an error if nothing was delivered.
        """
        now = time.monotonic()
        with self._changed:
            late_waiting = [job for job in self._waiting if self._is_late(job, now)]
            if late_waiting:
                self._waiting = deque(job for job in self._waiting if not self._is_late(job, now))
        self._jobs |= {job.key: job for job in late_waiting}
        late_jobs = [job for job in self._jobs.values() if self._is_late(job, now)]
        chunks: list[OutputChunk] = []
        for job in late_jobs:
            last_chunks = self._scheduler.cut(job.key)
            if job.has_begun:
                chunks += last_chunks
                continue
            error: TxlError = LateError("the request timed out.")
            if self._deadline_of_all < job.deadline:
                error = StoppingError("the server is stopping.")
            chunks.append(OutputChunk(job.key, 0, "", None, error=error))
        return chunks

    def _is_late(self, job: GenerationRequest, now: float) -> bool:
        return min(job.deadline, self._deadline_of_all) < now

    def _deliver_or_collect(self, chunks: list[OutputChunk]) -> None:
        """Deliver chunks to the event loop, or keep them for the next step if the last delivery is recent."""
        num_texts = max(1, len(self._jobs))
        for chunk in chunks:
            job = self._jobs.get(chunk.prompt)
            if job is None:
                continue
            job.has_begun = True
            job.num_left -= chunk.ending is not None
            if chunk.error is not None or job.num_left == 0:
                del self._jobs[job.key]
            self._undelivered.append((job.deliver, chunk))
        now = time.monotonic()
        next_delivery = self._delivered_at + PIECE_S * num_texts
        is_due = now >= next_delivery or not self._jobs
        if self._undelivered and is_due:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_deliver, self._undelivered)
            self._undelivered = []
            self._delivered_at = now


def _deliver(chunks: list[tuple[Callable[[OutputChunk], None], OutputChunk]]) -> None:
    for deliver, chunk in chunks:
        deliver(chunk)
