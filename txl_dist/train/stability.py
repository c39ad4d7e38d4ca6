"""When numbers go wrong: steps to skip are counted, spikes are told from noise, and it is said when to stop or rewind.

`Health` is a value, stored in every checkpoint, so that a resumed run decides as the unbroken one. Nothing here knows
torch, ranks or files; all ranks compute the same from the same numbers.

A spike is a loss or a gradient norm far above those of the steps before it. Both are positive and their noise is
proportional, so distances are taken between logarithms: a value is a spike when

    ln(value / median)  >  spike_sigma * max(1.4826 * MAD, 0.02)        over the last spike_window accepted steps,

with MAD the median distance from the median, which neither a spike nor a falling loss moves much. A spike does not
enter the window; more than `spike_patience` in a row are a new level, which does, without further reports.

What it gives up: a rise that is slow against the window moves the median along, and no step of it is a spike.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from txl_dist.config.schema import GuardSection
from txl_dist.console.formatting import counted
from txl_dist.errors import CheckpointError

RECENT_STEPS = 1000
MAD_TO_SIGMA = 1.4826
"""Makes the median distance of a normal distribution its standard deviation."""
MIN_SIGMA = 0.02
"""Of logarithms: noise is taken for at least 2 % of the median, so that a quiet run does not report trifles."""


class Spike(NamedTuple):
    """What a step is reported for."""

    step: int
    what: str
    """loss or grad_norm."""
    value: float
    median: float
    """Of the steps before it."""
    sigmas: float
    """Robust standard deviations that the value lies above the median, by logarithm."""


@dataclass(frozen=True)
class Health:
    """What is remembered of the steps so far."""

    skipped_steps: int = 0
    """In all."""
    skipped_in_row: int = 0
    """Up to now."""
    recent_skips: tuple[int, ...] = ()
    """Skipped steps among the last 1,000 before the last of them."""
    losses: tuple[float, ...] = ()
    """Of the last accepted steps, at most `spike_window`."""
    grad_norms: tuple[float, ...] = ()
    """The same."""
    spikes_in_row: int = 0
    """Steps of the present row, up to now: spikes, and what was skipped behind the first of them."""
    num_spikes: int = 0
    """Steps reported, in all."""
    rewinds: int = 0
    """In all."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values, which keep floats exactly."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Health:
        """Raises CheckpointError for values of another form."""
        try:
            fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
            return Health(**fields)
        except (AttributeError, TypeError) as error:
            raise CheckpointError(
                f"the health of the checkpoint is damaged: {error}. Continue with the program that wrote it, or from "
                "another checkpoint."
            ) from error


def after_step(
    health: Health, *, step: int, loss: float, grad_norm: float, skipped: bool, guard: GuardSection
) -> tuple[Health, list[Spike]]:
    """The health after a step, and what to report of it.

    `loss` in nats and `grad_norm` are those of all ranks; 0 means not known. `skipped`: no weight was changed, because
    one of them is not finite or an optimizer refused. Takes tens of microseconds.
    """
    if skipped:
        recent = tuple(one for one in (*health.recent_skips, step) if one > step - RECENT_STEPS)
        return (
            replace(
                health,
                skipped_steps=health.skipped_steps + 1,
                skipped_in_row=health.skipped_in_row + 1,
                recent_skips=recent,
                spikes_in_row=health.spikes_in_row + bool(health.spikes_in_row),
            ),
            [],
        )
    if not guard.spike_sigma:
        return replace(health, skipped_in_row=0), []
    measured = (("loss", loss, health.losses), ("grad_norm", grad_norm, health.grad_norms))
    found = [_spike(step, what, value, window, guard=guard) for what, value, window in measured]
    spikes = [spike for spike in found if spike is not None]
    in_row = health.spikes_in_row + 1 if spikes else 0
    if in_row > guard.spike_patience:
        spikes = []
    losses, grad_norms = (
        window if spikes or not _is_known(value) else (*window, value)[-guard.spike_window :]
        for _, value, window in measured
    )
    return (
        replace(
            health,
            skipped_in_row=0,
            losses=losses,
            grad_norms=grad_norms,
            spikes_in_row=in_row,
            num_spikes=health.num_spikes + bool(spikes),
        ),
        spikes,
    )


def after_rewind(health: Health, *, to: Health) -> Health:
    """The health to go on with from a checkpoint that had the health `to`: what is counted for good stays counted."""
    return replace(to, num_spikes=health.num_spikes, rewinds=health.rewinds + 1)


def should_rewind(health: Health, guard: GuardSection) -> bool:
    """Whether the last step made as many spikes in a row as a rewind takes."""
    return guard.on_spike == "rewind" and health.spikes_in_row == guard.spike_patience


def reason_to_stop(health: Health, guard: GuardSection) -> str:
    """Which limit has been reached, for a sentence about the run; empty if none."""
    if health.skipped_in_row >= guard.max_consecutive_skips:
        return (
            f"the loss or the gradient was not finite in {counted(health.skipped_in_row, 'step')} in a row "
            f"(guard.max_consecutive_skips={guard.max_consecutive_skips})"
        )
    if len(health.recent_skips) >= guard.max_skipped_per_1000:
        return (
            f"the loss or the gradient was not finite in {len(health.recent_skips)} of the last 1,000 steps "
            f"(guard.max_skipped_per_1000={guard.max_skipped_per_1000})"
        )
    if should_rewind(health, guard) and health.rewinds >= guard.max_rewinds:
        return (
            f"loss or gradient norm rose out of the ordinary again after {health.rewinds} rewinds "
            f"(guard.max_rewinds={guard.max_rewinds})"
        )
    return ""


def _is_known(value: float) -> bool:
    return 0 < value < math.inf


def _spike(step: int, what: str, value: float, window: tuple[float, ...], *, guard: GuardSection) -> Spike | None:
    if 2 * len(window) < guard.spike_window or not _is_known(value):
        return None
    median = sorted(window)[len(window) // 2]
    excess = math.log(value / median)
    if excess <= guard.spike_sigma * MIN_SIGMA:  # most steps: spares the second sort
        return None
    distance = sorted(abs(math.log(one / median)) for one in window)[len(window) // 2]
    sigmas = excess / max(MAD_TO_SIGMA * distance, MIN_SIGMA)
    return Spike(step, what, value, median, sigmas) if sigmas > guard.spike_sigma else None
