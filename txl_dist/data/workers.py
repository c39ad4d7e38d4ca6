"""Executors of `txl prepare` and `txl verify`, which run tasks elsewhere and return results in the order of the tasks.

`Workers` is the interface. `PoolWorkers`, in this module, runs tasks in processes of this machine, and is the default.
`RayWorkers` (ray_workers.py) runs tasks on the nodes of a Ray cluster.

Few tasks are in flight at a time. Processes are spawned, not forked, because threads of the tokenizer library do not
survive a fork. With one worker, tasks run in the present process, without the cost of a start. If a worker is killed,
the caller gets an error and does not wait. Workers end with the process that started them, even if that process is
killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import TypeVar

from typing_extensions import override

from txl_dist.config.registry import load_plugins, loaded_plugins
from txl_dist.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers(ABC):
    """Interface of an executor: it runs tasks in other processes or on other machines."""

    where = ""
    """Name of the node that made the result which `in_order` yielded last. Empty for the present machine."""

    @abstractmethod
    def in_order(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield the result of `function` for each task, in the order of the tasks.

        Tasks are taken from `tasks` when there is room for them, not all at once. `function` and the tasks must be
        picklable. Raises the exception of the first task that fails, and DataError if a worker was killed and the task
        cannot run elsewhere.
        """

    def check(self, action: Callable[[str], None]) -> None:
        """Call `action` with the name of each node, on this node. Raises what `action` raises."""
        action("this machine")


class PoolWorkers(Workers):
    """Pool of worker processes. Without an `executor`, tasks run in the present process."""

    def __init__(self, executor: ProcessPoolExecutor | None, num_workers: int) -> None:
        self._executor = executor
        self._max_in_flight = num_workers + 2

    @override
    def in_order(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield the result of `function` for each task, in the order of the tasks.

        At most `num_workers` + 2 tasks are taken from `tasks` before their results are ready. Raises errors as
        `Workers.in_order` does.
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
                "a worker process was killed, perhaps because host memory ran out. Run the same command again, with a "
                "smaller --num-workers if memory ran out. `txl prepare` keeps the work that is finished."
            ) from error


@contextmanager
def start_workers(num_workers: int) -> Iterator[Workers]:
    """Start `num_workers` processes, and end them when the `with` block ends.

    With one worker, no process is started, and tasks run in the present process.
    """
    if num_workers == 1:
        yield PoolWorkers(None, 1)
        return
    context = multiprocessing.get_context("spawn")
    plugins = [plugin.name for plugin in loaded_plugins()]
    executor = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin_worker, initargs=(plugins,))
    try:
        yield PoolWorkers(executor, num_workers)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_one_thread() -> None:
    """Make the tokenizer library use one thread in this process. There is a process per core already."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"


def _begin_worker(plugins: Sequence[str]) -> None:
    """Set up a worker process: one thread per library, Ctrl-C ignored, and the plugins loaded."""
    use_one_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the first one decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    load_plugins(plugins)  # a spawned process knows none


def _end_with_parent() -> None:
    """Wait until the parent process ends, and then end this worker.

    Without this function, a worker would wait forever after its parent was killed, because the worker itself holds both
    ends of the queue that it reads.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
