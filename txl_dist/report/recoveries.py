"""Recoveries of a run from its records: what each one cost, and what restarts would have cost instead.

A recovery replaces lost ranks inside the running job (`distributed/recovery`). It costs the seconds of its four phases,
which end with the first step, and the time of further repeated steps. There are many of them if no copy of the state
was left, and the run returned to a checkpoint. Their time is an estimate:

    (repeated steps - 1) x median seconds per step

Without recovery the job would start again from its last checkpoint. That cost is an estimate too:

    seconds to notice + seconds of a start + steps since the last checkpoint x median seconds per step

The time that a launcher needs to end the old job, and that a queue needs to start the next one, is not in it. So the
true cost of a restart is higher.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from txl_dist.console.formatting import counted, format_duration, printable
from txl_dist.report.records import MOST, Event, History, is_number
from txl_dist.train.report.event_text import RESTORED_FROM

PHASES = ("notice_s", "regroup_s", "restore_s", "redo_s")
"""Fields of the event `recovered`: seconds to notice the loss, to regroup, to restore the state, and to make the first
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
    restored_from: str
    """Origin of the state: copies, checkpoint, or start (of the run). Empty for runs of older versions."""
    repeated_steps: int
    """Number of steps that were made again. It is 0 if a rank was lost after a step, for instance in a validation."""
    why: str
    notice_s: float
    regroup_s: float
    restore_s: float
    redo_s: float
    further_s: float
    """Estimate of the seconds of the repeated steps after the first. It is 0 if the time of a step is unknown."""

    @property
    def lost_s(self) -> float:
        """Seconds from the last heartbeat of the lost rank, or the last progress of one that hung, to the end of the
        last repeated step."""
        return self.notice_s + self.regroup_s + self.restore_s + self.redo_s + self.further_s

    @property
    def further_steps(self) -> int:
        """Number of repeated steps after the first, whose time is an estimate."""
        return max(self.repeated_steps - 1, 0)


class Goodput(NamedTuple):
    """Share of the working time in which a run did not recover, and an estimate of the same share with restarts."""

    lost_s: float
    """Seconds that the recoveries took, with the estimate for `further_steps`."""
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


def recoveries_of(events: Iterable[Event], *, step_ms: float | None) -> list[RecoveryRecord]:
    """Return the recoveries among the events of a run. `step_ms` is the median time of a step in milliseconds.

    Seconds that are missing become 0, and texts become empty. An event of an older version counts as one repeated step.
    """
    step_s = (step_ms or 0.0) / 1000
    return [_recovery(event, step_s=step_s) for event in events if event.name == "recovered"]


def _recovery(event: Event, *, step_s: float) -> RecoveryRecord:
    fields = event.fields
    ranks = [rank for rank in _list_of(fields.get("ranks")) if type(rank) is int]
    hosts = [printable(str(host)) for host in _list_of(fields.get("hosts"))]
    source = str(fields.get("restored_from"))
    if source not in RESTORED_FROM:
        source = ""
    repeated = fields.get("repeated_steps")
    if type(repeated) is not int or not 0 <= repeated <= MOST:
        repeated = 1
    why = printable(str(fields.get("why", "")))
    values = [fields.get(phase) for phase in PHASES]
    seconds = [max(0.0, float(value)) if is_number(value) else 0.0 for value in values]
    seconds.append(max(repeated - 1, 0) * step_s)
    return RecoveryRecord(event.step, event.hours, ranks, hosts, source, repeated, why[:_MAX_TEXT], *seconds)


def goodput_of(history: History, *, step_ms: float | None) -> Goodput | None:
    """Return the goodput of a run with recoveries. `step_ms` is the median time of a step in milliseconds.

    Returns None if the run has no recovery, or if the time of a start or of a step is unknown.
    """
    recoveries = recoveries_of(history.events, step_ms=step_ms)
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
    """Return, for each recovery, the number of steps that a restart from the last checkpoint would have repeated."""
    distances = []
    saved_step = 0
    for event in events:
        if event.name in ("saved", "rewound", "start"):
            saved_step = event.step
        elif event.name == "recovered":
            recovery = _recovery(event, step_s=0.0)
            if recovery.restored_from != "copies":
                saved_step = min(saved_step, recovery.step)  # the run found no newer checkpoint
            distances.append(recovery.step + recovery.repeated_steps - saved_step)
    return distances


def lost_time(recoveries: Sequence[RecoveryRecord]) -> str:
    """Return the seconds that the recoveries took as text, with the part that is an estimate."""
    lost_s = sum(recovery.lost_s for recovery in recoveries)
    further_s = sum(recovery.further_s for recovery in recoveries)
    num_further = sum(recovery.further_steps for recovery in recoveries)
    if not num_further:
        return f"{lost_s:,.1f} s"
    steps = counted(num_further, "further repeated step")
    if not further_s:
        return f"{lost_s:,.1f} s (without {steps}, because the time of a step is unknown)"
    return f"{lost_s:,.1f} s ({further_s:,.1f} s of it estimated for {steps})"


def goodput_sentences(goodput: Goodput, *, lost: str) -> list[str]:
    """Return sentences about the goodput for people, with the formula of the estimate. `lost` comes from
    `lost_time`."""
    return [
        f"Recoveries took {lost}, so {goodput.with_pct:.2f} % of the working time was spent on new steps.",
        f"Estimate: restarts from the last checkpoint would have taken at least {format_duration(goodput.restarts_s)}, "
        f"which leaves {goodput.without_pct:.2f} %.",
        f"The estimate is, per recovery: seconds to notice + {goodput.start_s:.1f} s of a start + steps since the last "
        f"checkpoint x {goodput.step_ms:.0f} ms.",
    ]


def recovery_rows(recoveries: Sequence[RecoveryRecord]) -> list[list[str]]:
    """Return table rows of the newest recoveries: step, ranks, hosts, origin of the state, number of repeated steps,
    seconds of each phase, and the cause. The seconds of further repeated steps are an estimate."""
    head = ["step", "ranks", "hosts", "from", "repeated steps"]
    head += ["notice, s", "regroup, s", "restore, s", "redo, s", "further, s", "sum, s", "cause"]
    rows = [head]
    for recovery in recoveries[-_MAX_ROWS:]:
        seconds = [getattr(recovery, phase) for phase in (*PHASES, "further_s", "lost_s")]
        rows.append(
            [
                f"{recovery.step:,}",
                ", ".join(map(str, recovery.ranks)) or "-",
                ", ".join(dict.fromkeys(recovery.hosts)) or "-",
                recovery.restored_from or "-",
                f"{recovery.repeated_steps:,}",
                *(f"{value:.2f}" for value in seconds),
                recovery.why or "-",
            ]
        )
    return rows


def _list_of(value: object) -> list[Any]:
    if isinstance(value, list):
        return value
    return []
