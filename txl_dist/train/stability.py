"""Rules for unstable training: count skipped steps, detect spikes, and decide when to stop or to rewind.

`Health` is a value that every checkpoint stores, so a resumed run makes the same decisions as an uninterrupted run.
This module uses no torch, ranks or files. All ranks compute the same from the same numbers.

A spike is a loss or a gradient norm far above the values of the steps before it. Losses and norms are positive, and
their noise is proportional to their size. So distances are taken between logarithms. A value is a spike when

    ln(value / median) > spike_sigma * max(1.4826 * MAD, 0.02)    over the last spike_window accepted steps

MAD is the median distance from the median. Neither a spike nor a falling loss changes MAD much. A spike does not enter
the window. More than `spike_patience` consecutive spikes are a new level: their values enter the window, and they are
not reported any more.

Limitations: a rise that is slow compared with the window moves the median, and is never a spike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from txl_dist.config.schema import GuardSection
from txl_dist.console.formatting import counted
from txl_dist.errors import CheckpointError

RECENT_STEPS = 1000
MAD_TO_SIGMA = 1.4826
"""Ratio of the standard deviation of a normal distribution to its median distance from the median."""
MIN_SIGMA = 0.02
"""Smallest standard deviation of the logarithms that is assumed: 0.02, which is 2 % of the median. So a run with little
noise does not report small deviations."""


class Spike(NamedTuple):
    """Spike of the loss or the gradient norm at one step: its value, and the values that it is compared with."""

    step: int
    what: str
    """Name of the value: loss or grad_norm."""
    value: float
    median: float
    """Median of the value over the preceding steps."""
    sigmas: float
    """Distance between the logarithms of the value and of the median, in robust standard deviations."""


@dataclass(frozen=True)
class Health:
    """Counts of skipped steps, spikes and rewinds, and recent values of loss and gradient norm. Checkpoints store
    it."""

    skipped_steps: int = 0
    """Number of skipped steps of the whole run."""
    skipped_in_row: int = 0
    """Number of skipped steps since the last accepted step."""
    recent_skips: tuple[int, ...] = ()
    """Step numbers of skipped steps, among the 1,000 steps up to the last skipped step."""
    losses: tuple[float, ...] = ()
    """Losses in nats per token of the last accepted steps, at most `spike_window` of them."""
    grad_norms: tuple[float, ...] = ()
    """Gradient norms of the last accepted steps, at most `spike_window` of them."""
    spikes_in_row: int = 0
    """Number of consecutive spikes up to now. Steps that were skipped after the first spike count too."""
    num_spikes: int = 0
    """Number of steps with a reported spike in the whole run."""
    rewinds: int = 0
    """Number of rewinds of the whole run."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values for JSON, from which `from_dict` restores exactly the same health."""
        return dict(vars(self))  # `asdict` copies each value, which takes a millisecond

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Health:
        """Return the health from values that `to_dict` returned. Raises CheckpointError for values of another form."""
        try:
            fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
            return Health(**fields)
        except (AttributeError, TypeError) as error:
            raise CheckpointError(
                f"the value `health` in the checkpoint's state.json is damaged: {error}. Continue with the version "
                "of txl_dist that wrote the checkpoint, or from another checkpoint."
            ) from error


def after_step(
    health: Health, *, step: int, loss: float, grad_norm: float, skipped: bool, guard: GuardSection
) -> tuple[Health, list[Spike]]:
    """Return (the health after a step, the spikes to report).

    `loss` in nats per token and `grad_norm` are the values of all ranks, and 0 means that a value is unknown. `skipped`
    says that the step changed no weight, because a value is not finite or the optimizer refused the step. The function
    takes tens of microseconds.
    """
    if skipped:
        recent = tuple(skip for skip in (*health.recent_skips, step) if skip > step - RECENT_STEPS)
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
    candidates = [_spike(step, what, value, window, guard=guard) for what, value, window in measured]
    spikes = [spike for spike in candidates if spike is not None]
    if spikes:
        in_row = health.spikes_in_row + 1
    else:
        in_row = 0
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
    """Return the health after a rewind to an earlier checkpoint. `to` is the health that this checkpoint stores. The
    counts of spikes and rewinds continue from `health`."""
    return replace(to, num_spikes=health.num_spikes, rewinds=health.rewinds + 1)


def should_rewind(health: Health, guard: GuardSection) -> bool:
    """Return whether the run must rewind now. This is so if `guard.on_spike` is `rewind`, and if with the last step the
    number of consecutive spikes has reached `guard.spike_patience`."""
    return guard.on_spike == "rewind" and health.spikes_in_row == guard.spike_patience


def reason_to_stop(health: Health, guard: GuardSection) -> str:
    """Return the limit that the run has reached, as the start of an error message, or an empty text."""
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
            f"the loss or the gradient norm had a spike again after {health.rewinds} rewinds "
            f"(guard.max_rewinds={guard.max_rewinds})"
        )
    return ""


def _is_known(value: float) -> bool:
    """Return whether a value was measured and is finite."""
    return 0 < value < math.inf


def _spike(step: int, what: str, value: float, window: tuple[float, ...], *, guard: GuardSection) -> Spike | None:
    """Return the spike if a value is far above the values in `window`, which are the last accepted values. Otherwise
    return None.

    The result is also None if the window is less than half full.
    """
    if 2 * len(window) < guard.spike_window or not _is_known(value):
        return None
    median = sorted(window)[len(window) // 2]
    excess = math.log(value / median)
    if excess <= guard.spike_sigma * MIN_SIGMA:  # true for most steps, which need no second sort
        return None
    distance = sorted(abs(math.log(earlier / median)) for earlier in window)[len(window) // 2]
    sigmas = excess / max(MAD_TO_SIGMA * distance, MIN_SIGMA)
    if sigmas > guard.spike_sigma:
        return Spike(step, what, value, median, sigmas)
    return None
