"""The thread that owns the model: it takes prompts as they come, makes a token of every text at each step, and hands
the pieces to the event loop, which it never waits for.

    worker.submit([job, ...])       any thread: into the queue, or QueueFullError
    worker.cancel([key, ...])       any thread: nobody wants these any more

Between two steps, and only there, prompts come and go: those that wait are begun while there is room, those whose time
is over end as they are. What a client does not read waits with the client's connection, not here.
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
"""Seconds per text between two times that pieces are handed out. To send a piece takes the event loop half of that, in
which this thread does not get on; so of one text every token is sent at once, and of 64 those of 25 ms together."""


class QueueFullError(Exception):
    """There are too many prompts already."""


class LateError(TxlError):
    """The time of a request was over before its text had begun."""


class StoppingError(TxlError):
    """The server ended before a text had begun."""


class DefectError(TxlError):
    """A defect of ours."""


@dataclass
class GenerationRequest:
    """A prompt, how it is gone on with, and who wants to know."""

    key: int
    prompt: Prompt
    writing: SamplingParams
    deliver: Callable[[OutputChunk], None]
    """Called in the event loop."""
    deadline: float
    """By time.monotonic()."""
    keeps_memory: bool = False
    scores_prompt: bool = False
    num_left: int = 0
    """Texts that have not ended."""
    has_begun: bool = False
    """Whether anything of it was delivered."""


class Worker:
    """A thread that writes. Started by `start`, and ended by `stop`."""

    def __init__(self, model: LanguageModel, *, num_rows: int, max_queue: int, memory_len: int = -1) -> None:
        self._model, self._num_rows, self._memory_len = model, num_rows, memory_len
        self._max_queue = max_queue
        self._changed = threading.Condition()  # guards the three that follow
        self._waiting: deque[GenerationRequest] = deque()
        self._unwanted: set[int] = set()
        self._is_stopped = False
        self._end_of_all = math.inf  # by time.monotonic()
        self._jobs: dict[int, GenerationRequest] = {}  # in work; of the thread alone
        self._to_hand_out: list[tuple[Callable[[OutputChunk], None], OutputChunk]] = []
        self._handed_out_at = 0.0
        self._writer = self._new_writer()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_failure: Callable[[], object] = lambda: None
        self.has_failed = False
        """Whether nothing can be written any more."""

    @property
    def num_waiting(self) -> int:
        """Prompts that wait."""
        return len(self._waiting)

    @property
    def num_rows(self) -> int:
        """Texts that are written."""
        return self._writer.num_rows

    def start(self, loop: asyncio.AbstractEventLoop, *, on_failure: Callable[[], object]) -> None:
        """Begin; pieces are delivered in this loop, and where nothing can be written any more it is told so."""
        self._loop, self._on_failure = loop, on_failure
        self._thread.start()

    def stop(self) -> None:
        """End after the step that is going on."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, jobs: Sequence[GenerationRequest]) -> None:
        """Take prompts, all or none. Raises QueueFullError."""
        with self._changed:
            if len(self._waiting) + len(jobs) > self._max_queue:
                raise QueueFullError
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, keys: Sequence[int]) -> None:
        """Stop work on prompts, if there is any."""
        with self._changed:
            self._unwanted.update(keys)
            self._changed.notify()

    def set_deadline(self, *, by: float) -> None:
        """Nothing takes longer than until then."""
        self._end_of_all = by

    def _new_writer(self) -> Scheduler:
        return self._model.writer(num_rows=self._num_rows, memory_len=self._memory_len)

    def _run(self) -> None:
        while True:
            try:
                if not self._take_orders():
                    return
                pieces = [*self._cut_late(), *self._writer.step()]
            except Exception as error:  # noqa: BLE001  a defect, or no memory left: those in work are lost, the next are not
                logger.exception("work on %s failed", counted(len(self._jobs), "prompt"))
                self._fail(error)
                try:
                    self._writer = self._new_writer()
                except Exception as why:  # noqa: BLE001  who waits is told; then the server ends
                    logger.exception("nothing can be written any more")
                    self._end(why)
                    return
            else:
                self._hand_out(pieces)

    def _fail(self, error: Exception) -> None:
        """Tell those in work."""
        failure = error if isinstance(error, TxlError) else DefectError("the server failed; its log says why.")
        self._hand_out([OutputChunk(key, 0, "", None, error=failure) for key in self._jobs])

    def _end(self, error: Exception) -> None:
        with self._changed:
            self._jobs |= {job.key: job for job in self._waiting}
            self._waiting.clear()
        self._fail(error)
        self.has_failed = True
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_failure)

    def _take_orders(self) -> bool:
        """Wait until there is something to do; whether there is. Who is unwanted leaves, who fits is begun."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._waiting or self._jobs or self._unwanted)
            unwanted, self._unwanted = self._unwanted, set()
            if unwanted:
                self._waiting = deque(job for job in self._waiting if job.key not in unwanted)
            if self._is_stopped:
                return False
        # Without the lock, for the event loop waits for it: to drop a row may be to copy the others.
        for key in unwanted & self._jobs.keys():
            self._writer.remove(key)
            del self._jobs[key]
        while self._writer.has_room and (job := self._next()) is not None:
            self._jobs[job.key], job.num_left = job, job.writing.num_samples
            self._writer.add(
                job.key, job.prompt, job.writing, keeps_memory=job.keeps_memory, scores_prompt=job.scores_prompt
            )
        return True

    def _next(self) -> GenerationRequest | None:
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def _cut_late(self) -> list[OutputChunk]:
        now = time.monotonic()
        with self._changed:
            late = [job for job in self._waiting if self._is_late(job, now)]
            if late:
                self._waiting = deque(job for job in self._waiting if not self._is_late(job, now))
        self._jobs |= {job.key: job for job in late}
        pieces: list[OutputChunk] = []
        for job in [job for job in self._jobs.values() if self._is_late(job, now)]:
            ended = self._writer.cut(job.key)
            if job.has_begun:
                pieces += ended
            else:
                is_end = self._end_of_all < job.deadline
                error = (
                    StoppingError("the server is stopping.")
                    if is_end
                    else LateError("the time of this request is over.")
                )
                pieces.append(OutputChunk(job.key, 0, "", None, error=error))
        return pieces

    def _is_late(self, job: GenerationRequest, now: float) -> bool:
        return min(job.deadline, self._end_of_all) < now

    def _hand_out(self, pieces: list[OutputChunk]) -> None:
        """To the event loop, unless it was given something just now and more is to come."""
        num_texts = max(1, len(self._jobs))
        for piece in pieces:
            job = self._jobs.get(piece.prompt)
            if job is None:
                continue
            job.has_begun = True
            job.num_left -= piece.ending is not None
            if piece.error is not None or job.num_left == 0:
                del self._jobs[job.key]
            self._to_hand_out.append((job.deliver, piece))
        now = time.monotonic()
        if self._to_hand_out and (now >= self._handed_out_at + PIECE_S * num_texts or not self._jobs):
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_deliver, self._to_hand_out)
            self._to_hand_out, self._handed_out_at = [], now


def _deliver(pieces: list[tuple[Callable[[OutputChunk], None], OutputChunk]]) -> None:
    for deliver, piece in pieces:
        deliver(piece)
