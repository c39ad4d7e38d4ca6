"""One background thread that makes items ahead of their use. With one thread the order is certain.

There are no worker processes. One thread reads far faster than any model trains (tools/benchmarks/loader.py),
since copying releases the interpreter's lock.
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
    """Yield the same items, made ahead by one background thread, at most `depth` of them waiting.

    The thread starts with the first `next`. An exception in it is raised here, after the items made before it. Closing
    the iterator ends the thread. It waits up to 10 seconds for the item that is being made.
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
