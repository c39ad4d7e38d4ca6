"""Judgements about the ranks of a job, as pure functions of what the coordinator has heard from their agents.

    frozen   no thread of the rank runs: no heartbeat for `silent_s`, and another rank makes no progress either
    hung     no rank makes progress, and the others wait for this one
    lost     the process has ended. `why_not_again` says whether a replacement makes sense

Whether an agent itself is silent, and whether a rank is late for the next generation, is a comparison of two times in
the coordinator. All times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from txl_dist.distributed.recovery.status import Status

PER_HOUR = 120
"""Largest number of recoveries within an hour."""
AGENT_LOST = "its agent was lost"
"""Cause of the loss of a rank whose agent was lost, for instance with its node."""
IN_STEP = ("data", "step")
"""Phases that are over when a step is finished. Others follow: its report, and for instance an evaluation."""
CUT_OFF = "its agent was cut off from the coordinator"
"""Cause of the loss of a rank whose agent has killed it, because the coordinator did not answer."""


class RankProgress(Protocol):
    """Progress of a rank, as far as `ranks_waited_for` needs it."""

    @property
    def step(self) -> int:
        """Training step that the rank has reached."""

    @property
    def is_waiting(self) -> bool:
        """Whether the main thread is inside a collective."""


class Loss(NamedTuple):
    """Loss of one rank: which rank, and how and where its process ended. JSON stores it as a list."""

    rank: int
    host: str
    pid: int
    cause: str
    """Way in which the process ended, for example SIGKILL, or the reason why it was killed, as `kind: details`."""
    step: int
    """Step that the rank had reached."""
    phase: str
    """Part of the step that the rank had begun."""
    notice_s: float
    """Seconds from the rank's last heartbeat, or the last progress of a rank that hung, to the notice of the loss. If
    others were lost before in the same recovery: to the notice of the first of them, or 0."""

    def repeats(self, other: Loss) -> bool:
        """Return whether two losses have the same rank, kind of cause, step and phase.

        The loss of a node or of its network is never a repetition, because no step causes it. Neither is the loss of a
        replacement that has not begun a step.
        """
        mine = (self.rank, self._kind, self.step, self.phase)
        is_same = mine == (other.rank, other._kind, other.step, other.phase)
        return is_same and self.step > 0 and self.cause not in (AGENT_LOST, CUT_OFF)

    @property
    def _kind(self) -> str:
        """Kind of the cause, for example frozen, without the seconds that follow it."""
        return self.cause.partition(":")[0]

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host} (pid {self.pid}) was lost at step {self.step}, in phase `{self.phase}`: "
            f"{self.cause}"
        )


def aged(status: Status, seconds: float) -> Status:
    """Return the status of a rank from which nothing has arrived for so many seconds since."""
    return status._replace(silent_s=status.silent_s + seconds, idle_s=status.idle_s + seconds)


def is_missed(number: int, statuses: Mapping[int, Status], *, silent_s: float) -> bool:
    """Return whether a rank other than `number` makes no progress, or there is no other one.

    While all other ranks make progress, a silent rank counts as slow, not as frozen.
    """
    others = [status.idle_s for other, status in statuses.items() if other != number]
    return not others or max(others) > silent_s / 2


def find_frozen(statuses: Mapping[int, Status], *, silent_s: float) -> dict[int, str]:
    """Return the frozen ranks, each with the reason to kill its process."""
    frozen = {}
    for number, status in statuses.items():
        if status.silent_s > silent_s and is_missed(number, statuses, silent_s=silent_s):
            frozen[number] = f"frozen: no heartbeat for {status.silent_s:.1f} s"
    return frozen


def find_hung(statuses: Mapping[int, Status], *, met_for_s: float) -> dict[int, str]:
    """Return the ranks for which others have waited longer than their limit, each with the reason to kill it.

    Time before the ranks of this generation met, `met_for_s` ago, does not count: a rank has then waited for others.
    Named are ranks at the lowest step that do not wait. If all of those wait, the ones with an old heartbeat are named,
    because they may have stopped since. If there is none either, ranks at higher steps that do not wait are named,
    because a replacement is at step 0 until its first step.
    """
    idle = {number: min(status.idle_s, met_for_s) for number, status in statuses.items()}
    if not any(idle[number] > status.limit_s for number, status in statuses.items()):
        return {}
    stuck = {number: status for number, status in statuses.items() if idle[number] > status.limit_s / 2}
    named = ranks_waited_for(stuck)
    if all(stuck[number].is_waiting for number in named):
        silent = [number for number in named if stuck[number].silent_s > stuck[number].limit_s / 2]
        named = silent or [number for number in stuck if not stuck[number].is_waiting] or named
    return {number: f"hung: no progress for {idle[number]:.0f} s" for number in named}


def ranks_waited_for(ranks: Mapping[int, RankProgress]) -> list[int]:
    """Return the ranks for which the other ranks wait.

    These are the ranks at the lowest step. If some of these ranks are outside a collective, only the ranks outside are
    returned.
    """
    lowest = min(one.step for one in ranks.values())
    late = {rank: one for rank, one in ranks.items() if one.step == lowest}
    not_waiting = sorted(rank for rank, one in late.items() if not one.is_waiting)
    return not_waiting or sorted(late)


def still_possible(losses: Sequence[Loss], *, finished: int) -> list[Loss]:
    """Return the losses that may come again in the same way, after all ranks have finished a step.

    A run may have returned to an earlier step. Until the last step that a lost rank had begun, any loss may come again.
    After that step it is a loss outside a step, for instance in its evaluation.
    """
    if finished < max((loss.step for loss in losses), default=0):
        return list(losses)
    return [loss for loss in losses if loss.step == finished and loss.phase not in IN_STEP]


def why_not_again(
    loss: Loss,
    earlier: Sequence[Loss],
    *,
    num_in_row: int,
    num_failed: int,
    max_in_row: int,
    world_size: int,
    num_recent: int,
) -> str:
    """Return the reason why a new attempt would fail too, or an empty text.

    `earlier` are the losses whose steps may come again. `num_in_row` is the number of losses since the last finished
    step, and `num_failed` the number of generations that they have ended. `num_recent` is the number of recoveries
    within the last hour. All three numbers include this one.
    """
    if any(loss.repeats(other) for other in earlier):
        return f"{loss}. The same happened before at this step, so the job does not try again"
    if num_failed > max_in_row or num_in_row > max_in_row * world_size:
        limit = f"recover.max_in_row={max_in_row}"
        return f"{loss}. This is loss number {num_in_row} without a finished step between them ({limit})"
    if num_recent > PER_HOUR:
        return f"{loss}. The job had more than {PER_HOUR} recoveries within an hour"
    return ""
