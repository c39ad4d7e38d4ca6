"""Measure how long a GPU takes for an action, and how long the host takes to launch it.

The device's time is measured between two events around replays of a CUDA graph that contains the action once. It
contains no gaps in which the device waits for the host. The host's time is that of consecutive calls without waiting
for the device. A replay finds data of the replay before it in the L2 cache. In a training step only a part of the data
is in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

Action = Callable[[], object]


def times(action: Action, *, device: str, least_ms: float = 60.0) -> dict[str, object]:
    """Return {"device ms", "host ms", "timed"}. The times are the best of three series of at least `least_ms` each, and
    "timed" says how they were measured.

    On a CPU both times are elapsed time.
    """
    if device != "cuda":
        action()
        best = min(_clock_ms(action) for _ in range(3))
        return {"device ms": best, "host ms": best, "timed": "clock"}
    replay, how = _graphed(action)
    guess_ms = _events_ms(replay, 1)
    count = max(1, min(1000, round(least_ms / max(guess_ms, 1e-3))))
    device_ms = min(_events_ms(replay, count) for _ in range(3))
    return {"device ms": device_ms, "host ms": _host_ms(action, min(count, 20)), "timed": how}


def _graphed(action: Action) -> tuple[Action, str]:
    """Return the action as a CUDA graph with a description, or the action itself if it cannot be recorded."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                action()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            action()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.cuda.synchronize()  # raises an error again if the device has failed
        action()
        return action, f"events, eager: {str(error).splitlines()[0][:60]}"
    return graph.replay, "events, graph"


def _events_ms(action: Action, count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        action()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / count


def _host_ms(action: Action, count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        action()
    told_ms = 1000 * (time.perf_counter() - began) / count
    torch.cuda.synchronize()
    return told_ms


def _clock_ms(action: Action) -> float:
    began = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - began)


def median_step_ms(step: Action, *, device: str, steps: int, warm_up: int) -> float:
    """Return the median milliseconds of steps. The host waits for the device once per step, as in training."""
    taken: list[float] = []
    for number in range(warm_up + steps):
        began = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= warm_up:
            taken.append(1000 * (time.perf_counter() - began))
    return median(taken)


def median(values: Iterable[float]) -> float:
    """Return the middle value. For an even number of values it is the upper middle one."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
