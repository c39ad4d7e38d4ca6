"""Which rank the others wait for.

All ranks of a job take equally long for a step, because they wait for each other; so what is timed here is a rank's own
part, before it meets another: waiting for data, preparing, and the forward pass of the first micro-batch. Reports
gather the means (`rank_ms`), and a rank that stays slower than the rest is named with its machine.

On a GPU the forward pass is timed by events on the device, read when the step has waited for it anyway. At stage 3
ranks meet within the forward pass, so there only what comes before it is seen.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence

import torch

from txl_dist.console.logging import warn_for_all
from txl_dist.distributed.collectives import gather_objects
from txl_dist.train.report.loggers import MetricReporter, Record

SLOWER_THAN = 4 / 3
"""Times the median of the other ranks, from which a rank is a straggler (a relative speed of 0.75)."""
NUM_REPORTS = 3
"""Reports in a row after which it is named: one may be a neighbour's doing."""


class StepClock:
    """Times the own part of each step of this rank."""

    def __init__(self, device: torch.device, *, sees_forward: bool) -> None:
        """`sees_forward`: the forward pass waits for no other rank."""
        self._sees_forward = sees_forward
        self._begin_s = self._own_s = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda" and sees_forward:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def begin(self) -> None:
        """Before the step's data are asked for."""
        self._begin_s, self._own_s = time.perf_counter(), 0.0

    def elapsed_s(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._begin_s

    def mark_prepared(self) -> None:
        """Before this rank meets another."""
        self._own_s = self.elapsed_s()

    def start_forward(self) -> None:
        """Of the first micro-batch."""
        self._begin_s = time.perf_counter()
        if self._events:
            self._events[0].record()

    def forward_ends(self) -> None:
        """Of the first micro-batch; its backward pass may meet others."""
        if self._events:
            self._events[1].record()
        elif self._sees_forward:
            self._own_s += self.elapsed_s()

    def local_ms(self) -> float:
        """Of the step, once it has waited for the device."""
        return 1000 * self._own_s + (self._events[0].elapsed_time(self._events[1]) if self._events else 0.0)


def slowest(rank_ms: Sequence[float]) -> tuple[int, float]:
    """(the slowest rank, by how many percent it takes longer than the median of the others). Of two ranks or more."""
    rank = max(range(len(rank_ms)), key=rank_ms.__getitem__)
    others = statistics.median([*rank_ms[:rank], *rank_ms[rank + 1 :]])
    return rank, 100 * (rank_ms[rank] / max(others, 1e-6) - 1)


def straggler(reports: Sequence[Sequence[float]]) -> int | None:
    """The rank that was the slowest by far in each of the last `NUM_REPORTS` reports, if there is one."""
    last = [slowest(rank_ms) for rank_ms in reports[-NUM_REPORTS:] if len(rank_ms) > 1]
    if len(last) < NUM_REPORTS or len({rank for rank, _ in last}) > 1:
        return None
    return last[-1][0] if all(pct > 100 * (SLOWER_THAN - 1) for _, pct in last) else None


class StragglerWatch:
    """Names the rank that the others wait for, once each time that it becomes another one."""

    def __init__(self, reporter: MetricReporter) -> None:
        """All ranks together make it, and call it."""
        self._hosts, self._reporter = gather_objects(socket.gethostname()), reporter
        self._reports: list[list[float]] = []
        self._named: int | None = None

    def __call__(self, rank_ms: list[float], *, step: int) -> Record:
        """Take the own part of each rank's step in a report. Returns the slowest: its rank, host and `slowest_pct`, by
        how much longer it takes than the median of the others; nothing for a rank alone."""
        if len(rank_ms) == 1:
            return {}
        self._reports = [*self._reports, rank_ms][-NUM_REPORTS:]
        last, pct = slowest(rank_ms)
        rank = straggler(self._reports)
        if rank is not None and rank != self._named:
            warn_for_all(
                "rank %d on %s keeps the others waiting: its own part of a step takes %.0f ms, %.0f %% longer than the "
                "median of the others, in %d reports in a row",
                *(rank, self._hosts[rank], rank_ms[rank], pct, NUM_REPORTS),
            )
            event = {"event": "straggler", "step": step, "rank": rank, "host": self._hosts[rank], "pct": round(pct, 1)}
            self._reporter.write("event", event)
        self._named = rank
        return {"slowest_rank": last, "slowest_host": self._hosts[last], "slowest_pct": round(pct, 1)}
