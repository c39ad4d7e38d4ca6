"""Prefetching of items by one background thread, which keeps the items in order.

There are no worker processes, because one thread reads far faster than any model trains (tools/benchmarks/loader.py).
Copying of arrays releases the interpreter lock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")

_POLL_S = 0.1
_MAX_CLOSE_S = 10.0


def prefetch(iterable: Iterable[Item], *, depth: int) -> Generator[Item, None, None]:
    """Yield the items of `iterable` in order, prefetched by one background thread. At most `depth` items wait.

    The thread starts at the first `next`. If the iterable raises an exception, all items before it are yielded, and
    then the exception is raised here. Closing this generator ends the thread, and waits up to 10 seconds for the item
    in progress.
    """
    waiting: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(kind: str, value: Any) -> None:
        while not stop.is_set():
            try:
                return waiting.put((kind, value), timeout=_POLL_S)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in iterable:
                put("item", item)
                if stop.is_set():
                    return
            put("end", None)
        except BaseException as error:  # noqa: BLE001  whatever ends the thread is raised in the consumer
            put("error", error)

    thread = threading.Thread(target=work, name="txl-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = waiting.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stop.set()
        thread.join(timeout=_MAX_CLOSE_S)
