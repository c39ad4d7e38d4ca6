"""Recoveries of a run from its records: what each one cost, and what restarts would have cost instead.

A recovery replaces lost ranks inside the running job (`distributed/recovery`). It costs the seconds of its four phases.
Without recovery the job would start again from its last checkpoint. That cost is an estimate:

    seconds to notice + seconds of a start + steps since the last checkpoint x median seconds per step

The time that a launcher needs to end the old job, and that a queue needs to start the next one, is not in it. So the
true cost of a restart is higher.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from txl_dist.console.formatting import format_duration, printable
from txl_dist.report.records import Event, History, is_number

PHASES = ("notice_s", "regroup_s", "restore_s", "redo_s")
"""Fields of the event `recovered`: seconds to notice the loss, to regroup, to restore the state, and to repeat the
step."""
_MAX_TEXT = 300
_MAX_ROWS = 300


class RecoveryRecord(NamedTuple):
    """Recovery of a run, as its event `recovered` describes it."""

    step: int
    """Step after which the run continued."""
    hours: float
    """Hours of work before the event."""
    ranks: list[int]
    """Ranks that were replaced."""
    hosts: list[str]
    """Hosts on which these ranks ran. The list is empty for runs of older versions."""
    why: str
    notice_s: float
    regroup_s: float
    restore_s: float
    redo_s: float

    @property
    def lost_s(self) -> float:
        """Seconds from the last heartbeat of the lost rank to the end of the repeated step."""
        return self.notice_s + self.regroup_s + self.restore_s + self.redo_s


class Goodput(NamedTuple):
    """Share of the working time in which a run did not recover, and an estimate of the same share with restarts."""

    lost_s: float
    """Seconds that the recoveries took."""
    restarts_s: float
    """Estimate of the seconds that restarts from the last checkpoint would have taken instead."""
    start_s: float
    """Seconds of a start, from the process to the first step."""
    step_ms: float
    """Median time of a step in milliseconds."""
    with_pct: float
    """Goodput of the run in per cent."""
    without_pct: float
    """Estimated goodput with restarts instead of recoveries, in per cent."""


def recoveries_of(events: Iterable[Event]) -> list[RecoveryRecord]:
    """Return the recoveries among the events of a run. Values that are missing become 0 or empty."""
    return [_recovery(event) for event in events if event.name == "recovered"]


def _recovery(event: Event) -> RecoveryRecord:
    fields = event.fields
    ranks = [rank for rank in _list_of(fields.get("ranks")) if type(rank) is int]
    hosts = [printable(str(host)) for host in _list_of(fields.get("hosts"))]
    why = printable(str(fields.get("why", "")))
    seconds = [fields.get(phase) for phase in PHASES]
    known = [max(0.0, float(value)) if is_number(value) else 0.0 for value in seconds]
    return RecoveryRecord(event.step, event.hours, ranks, hosts, why[:_MAX_TEXT], *known)


def goodput_of(history: History, *, step_ms: float | None) -> Goodput | None:
    """Return the goodput of a run with recoveries. `step_ms` is the median time of a step in milliseconds.

    Returns None if the run has no recovery, or if the time of a start or of a step is unknown.
    """
    recoveries = recoveries_of(history.events)
    starts = [event.fields.get("startup_s") for event in history.events if event.name == "start"]
    known_starts = [float(seconds) for seconds in starts if is_number(seconds)]
    working_s = 3600 * history.hours
    if not recoveries or not known_starts or step_ms is None or working_s <= 0:
        return None
    start_s = min(known_starts)  # a start inside a process that has recovered is not one of a new process
    lost_s = sum(recovery.lost_s for recovery in recoveries)
    notice_s = sum(recovery.notice_s for recovery in recoveries)
    num_repeated = sum(_steps_since_saved(history.events))
    restarts_s = notice_s + len(recoveries) * start_s + num_repeated * step_ms / 1000
    useful_s = max(working_s - lost_s, 0.0)
    return Goodput(
        lost_s=lost_s,
        restarts_s=restarts_s,
        start_s=start_s,
        step_ms=step_ms,
        with_pct=100 * useful_s / working_s,
        without_pct=100 * useful_s / (useful_s + restarts_s),
    )


def _steps_since_saved(events: Iterable[Event]) -> list[int]:
    """Return, for each recovery, the number of steps between the last checkpoint and the state that was restored."""
    distances = []
    saved_step = 0
    for event in events:
        if event.name in ("saved", "rewound", "start"):
            saved_step = event.step
        elif event.name == "recovered":
            distances.append(max(event.step - saved_step, 0))
    return distances


def goodput_sentences(goodput: Goodput) -> list[str]:
    """Return sentences about the goodput for people, with the formula of the estimate."""
    return [
        f"Recoveries took {format_duration(goodput.lost_s)}, so {goodput.with_pct:.2f} % of the working time was "
        "spent on new steps.",
        f"Estimate: restarts from the last checkpoint would have taken at least {format_duration(goodput.restarts_s)}, "
        f"which leaves {goodput.without_pct:.2f} %.",
        f"The estimate is, per recovery: seconds to notice + {goodput.start_s:.1f} s of a start + steps since the last "
        f"checkpoint x {goodput.step_ms:.0f} ms.",
    ]


def recovery_rows(recoveries: Sequence[RecoveryRecord]) -> list[list[str]]:
    """Return table rows of the newest recoveries: step, ranks, hosts, seconds of each phase, and the cause."""
    rows = [["step", "ranks", "hosts", "notice, s", "regroup, s", "restore, s", "redo, s", "sum, s", "cause"]]
    for recovery in recoveries[-_MAX_ROWS:]:
        seconds = [getattr(recovery, phase) for phase in PHASES]
        rows.append(
            [
                f"{recovery.step:,}",
                ", ".join(map(str, recovery.ranks)) or "-",
                ", ".join(dict.fromkeys(recovery.hosts)) or "-",
                *(f"{value:.2f}" for value in (*seconds, recovery.lost_s)),
                recovery.why or "-",
            ]
        )
    return rows


def _list_of(value: object) -> list[Any]:
    if isinstance(value, list):
        return value
    return []
