"""Detection of stragglers: ranks that the other ranks wait for.

All ranks take equally long for a step, because they wait for each other. So only the local part of a step is timed. The
local part ends before the rank's first collective. It consists of waiting for data, preparing the data, and the forward
pass of the first micro-batch. Reports gather the means of all ranks (`rank_ms`). A rank that stays slower than the
others is named with its host.

On a GPU the forward pass is timed by events on the device. The events are read after the step has waited for the device
anyway.

Limitations: at ZeRO stage 3 the forward pass has collectives, so only the time before it is measured.
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
"""A rank is slow if its local part of a step takes more than this many times as long as the median of the other ranks.
4/3 means a relative speed of 0.75."""
NUM_REPORTS = 3
"""Number of consecutive slow reports after which a rank is reported as a straggler.

A single slow report may come from another job on the rank's host.
"""


class StepClock:
    """Clock for the part of each step that a rank spends without waiting for other ranks."""

    def __init__(self, device: torch.device, *, sees_forward: bool) -> None:
        """Make the clock of a rank. `sees_forward` says whether the forward pass has no collectives, so that it can be
        timed."""
        self._sees_forward = sees_forward
        self._begin_s = self._local_s = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda" and sees_forward:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def begin(self) -> None:
        """Start the clock. Call this method before the data of a step is requested."""
        self._begin_s = time.perf_counter()
        self._local_s = 0.0

    def elapsed_s(self) -> float:
        """Return the seconds since the clock was started."""
        return time.perf_counter() - self._begin_s

    def mark_prepared(self) -> None:
        """Count the time so far as local time. Call it before this rank's first collective."""
        self._local_s = self.elapsed_s()

    def start_forward(self) -> None:
        """Start timing the forward pass of the first micro-batch."""
        self._begin_s = time.perf_counter()
        if self._events:
            self._events[0].record()

    def forward_ends(self) -> None:
        """Stop timing the forward pass of the first micro-batch, because its backward pass may have collectives."""
        if self._events:
            self._events[1].record()
        elif self._sees_forward:
            self._local_s += self.elapsed_s()

    def local_ms(self) -> float:
        """Return the milliseconds of the step's local part. Call it after the step has waited for the device."""
        if self._events:
            device_ms = float(self._events[0].elapsed_time(self._events[1]))
        else:
            device_ms = 0.0
        return 1000 * self._local_s + device_ms


def slowest(rank_ms: Sequence[float]) -> tuple[int, float]:
    """Return (the slowest rank, by how many percent it is slower than the median of the other ranks).

    `rank_ms` contains the milliseconds of at least two ranks.
    """
    rank = max(range(len(rank_ms)), key=rank_ms.__getitem__)
    others = statistics.median([*rank_ms[:rank], *rank_ms[rank + 1 :]])
    return rank, 100 * (rank_ms[rank] / max(others, 1e-6) - 1)


def straggler(reports: Sequence[Sequence[float]]) -> int | None:
    """Return the rank that was slow in each of the last `NUM_REPORTS` reports, or None."""
    last = [slowest(rank_ms) for rank_ms in reports[-NUM_REPORTS:] if len(rank_ms) > 1]
    if len(last) < NUM_REPORTS or len({rank for rank, _ in last}) > 1:
        return None
    if all(pct > 100 * (SLOWER_THAN - 1) for _, pct in last):
        return last[-1][0]
    return None


class StragglerWatch:
    """Monitor that logs a straggler (a rank that the other ranks wait for) and records an event. It logs again only if
    another rank becomes the straggler."""

    def __init__(self, reporter: MetricReporter) -> None:
        """Gather the host names of all ranks. All ranks make and call this object together."""
        self._hosts = gather_objects(socket.gethostname())
        self._reporter = reporter
        self._reports: list[list[float]] = []
        self._named: int | None = None

    def __call__(self, rank_ms: list[float], *, step: int) -> Record:
        """Check the times of a report for a straggler. `rank_ms` has the milliseconds of each rank's local part of a
        step.

        Returns the fields `slowest_rank`, `slowest_host` and `slowest_pct` for the report. `slowest_pct` says by how
        many percent the slowest rank takes longer than the median of the other ranks. A run of one rank gets an empty
        record.
        """
        if len(rank_ms) == 1:
            return {}
        self._reports = [*self._reports, rank_ms][-NUM_REPORTS:]
        last, pct = slowest(rank_ms)
        rank = straggler(self._reports)
        if rank is not None and rank != self._named:
            warn_for_all(
                "rank %d on %s keeps the other ranks waiting: its local part of a step takes %.0f ms, which is %.0f %% "
                "longer than the median of the other ranks. It was slow in the last %d reports",
                rank,
                self._hosts[rank],
                rank_ms[rank],
                pct,
                NUM_REPORTS,
            )
            event = {"event": "straggler", "step": step, "rank": rank, "host": self._hosts[rank], "pct": round(pct, 1)}
            self._reporter.write("event", event)
        self._named = rank
        return {"slowest_rank": last, "slowest_host": self._hosts[last], "slowest_pct": round(pct, 1)}
