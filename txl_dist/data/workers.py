"""Worker processes of preparing and verifying: results come in the order of the tasks, and few tasks are in flight.

Processes are spawned, not forked, since threads of the tokenizer library do not survive a fork. One worker means the
present process, without the cost of a start. A worker that is killed is an error, not a wait. Workers end with the
process that started them, even if that one is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import TypeVar

from txl_dist.config.registry import load_plugins, loaded_plugins
from txl_dist.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers:
    """Pool in which tasks run."""

    def __init__(self, executor: ProcessPoolExecutor | None, num_workers: int) -> None:
        self._executor = executor
        self._max_in_flight = num_workers + 2

    def in_order(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield `function` of each task, in the order of the tasks. Tasks are taken only as fast as they are done.

        `function` and the tasks have to be picklable. Raises what `function` raises, for the first task that fails,
        and DataError if a worker died.
        """
        if self._executor is None:
            yield from map(function, tasks)
            return
        in_flight: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                in_flight.append(self._executor.submit(function, task))
                if len(in_flight) >= self._max_in_flight:
                    yield in_flight.popleft().result()
            while in_flight:
                yield in_flight.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process was killed, perhaps because memory ran out. What is finished is kept: run the same "
                "command again, with fewer --num-workers if memory was short."
            ) from error


@contextmanager
def start_workers(num_workers: int) -> Iterator[Workers]:
    """Start processes that end with the block; with 1, tasks run in the present process."""
    if num_workers == 1:
        yield Workers(None, 1)
        return
    context = multiprocessing.get_context("spawn")
    plugins = [plugin.name for plugin in loaded_plugins()]
    executor = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin_worker, initargs=(plugins,))
    try:
        yield Workers(executor, num_workers)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _begin_worker(plugins: Sequence[str]) -> None:
    """Set up a worker process."""
    # The tokenizer library starts a thread per core in each process; there is a process per core already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the first one decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    load_plugins(plugins)  # a spawned process knows none


def _end_with_parent() -> None:
    """End this worker when its parent ends.

    A worker holds both ends of the queue that it reads, so it would wait for a killed parent for ever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
