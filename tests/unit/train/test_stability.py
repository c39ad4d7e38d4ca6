"""Skipped steps are counted and limited, spikes are distinguished from noise, and a resumed run decides as the unbroken
run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from txl_dist.config.schema import GuardSection
from txl_dist.errors import CheckpointError
from txl_dist.train.stability import Health, Spike, after_rewind, after_step, reason_to_stop, should_rewind

GUARD = GuardSection()


def feed(
    losses: Iterable[float],
    *,
    grad_norms: Iterable[float] | None = None,
    health: Health | None = None,
    guard: GuardSection = GUARD,
    first_step: int = 1,
) -> tuple[Health, list[Spike]]:
    """Steps with these losses, one after another; NaN is a step that is skipped."""
    health, spikes = health or Health(), []
    losses = list(losses)
    for index, (loss, grad_norm) in enumerate(zip(losses, grad_norms or [0.0] * len(losses), strict=True)):
        health, new = after_step(
            health,
            step=first_step + index,
            loss=loss,
            grad_norm=grad_norm,
            skipped=not math.isfinite(loss),
            guard=guard,
        )
        spikes += new
    return health, spikes


def noisy(count: int, *, level: float = 3.0, noise: float = 0.03, seed: int = 0) -> list[float]:
    rng = np.random.default_rng(seed)
    return (level * np.exp(noise * rng.standard_normal(count))).tolist()


def test_a_loss_of_fifty_times_the_others_is_a_spike_and_the_report_says_by_how_much() -> None:
    before = noisy(200)
    health, spikes = feed([*before, 150.0, *noisy(50, seed=1)])
    (spike,) = spikes
    assert (spike.step, spike.what, spike.value) == (201, "loss", 150.0)
    assert spike.median == pytest.approx(np.median(before[-128:]), rel=0.01)
    assert 70 < spike.sigmas < 200, "ln 50 over 0.03, roughly"
    assert (health.num_spikes, health.spikes_in_row) == (1, 0)
    assert 150.0 not in health.losses, "it does not spoil what later steps are measured by"
    assert len(health.losses) == GUARD.spike_window


def test_a_gradient_norm_may_be_a_spike_alone_and_one_that_is_not_known_is_none() -> None:
    norms = [*noisy(100, level=0.4), 40.0, 0.0, 0.4]
    health, spikes = feed(noisy(103), grad_norms=norms)
    assert [(spike.step, spike.what) for spike in spikes] == [(101, "grad_norm")]
    assert len(health.losses) == 102, "a spike of one keeps the other out too"
    assert 0.0 not in health.grad_norms
    _, spikes = feed([*noisy(100), 90.0], grad_norms=[*noisy(100), 90.0])
    assert [spike.what for spike in spikes] == ["loss", "grad_norm"]


def test_no_spike_is_seen_before_half_of_the_window_is_there() -> None:
    for count, expected in ((63, 0), (64, 1)):
        _, spikes = feed([*noisy(count), 150.0])
        assert len(spikes) == expected


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_noise_and_a_falling_loss_raise_no_alarm(noise: float) -> None:
    steps = np.arange(3000)
    losses = np.array(noisy(3000, noise=noise)) * (1 + 3 * np.exp(-steps / 200))
    health, spikes = feed(losses.tolist(), grad_norms=noisy(3000, level=0.5, noise=0.3, seed=1))
    assert spikes == []
    assert health.num_spikes == 0


def test_a_run_without_noise_reports_no_trifles() -> None:
    _, spikes = feed([2.0] * 100 + [2.2] + [2.0] * 10 + [3.0])
    assert [spike.value for spike in spikes] == [3.0]
    assert spikes[0].sigmas == pytest.approx(math.log(1.5) / 0.02), "noise is taken for 2 % at least"


def test_a_lower_loss_is_never_a_spike() -> None:
    assert feed([*noisy(100), 0.001])[1] == []


def test_a_lasting_new_level_is_reported_as_often_as_patience_says_and_then_accepted() -> None:
    health, spikes = feed([*noisy(200), *noisy(200, level=9.0)])
    assert [spike.step for spike in spikes] == [201, 202, 203]
    assert health.num_spikes == 3
    assert health.spikes_in_row == 0, "it has become the level that later steps are measured by"
    _, spikes = feed([90.0], health=health)
    assert len(spikes) == 1


def test_a_guard_of_zero_sigma_looks_for_no_spike() -> None:
    health, spikes = feed([*noisy(200), 150.0], guard=GuardSection(spike_sigma=0))
    assert spikes == []
    assert health == Health()


def test_skipped_steps_are_counted_and_enter_no_window() -> None:
    health, spikes = feed([2.0, math.nan, math.inf, 2.0, math.nan])
    assert spikes == []
    assert (health.skipped_steps, health.skipped_in_row, health.recent_skips) == (3, 1, (2, 3, 5))
    assert health.losses == (2.0, 2.0)
    assert feed([2.0], health=health)[0].skipped_in_row == 0


def test_too_many_skips_in_a_row_are_a_reason_to_stop() -> None:
    guard = GuardSection(max_consecutive_skips=3)
    health, _ = feed([2.0, math.nan, math.nan], guard=guard)
    assert reason_to_stop(health, guard) == ""
    health, _ = feed([math.nan], health=health, guard=guard, first_step=4)
    assert "3 steps in a row (guard.max_consecutive_skips=3)" in reason_to_stop(health, guard)


def test_too_many_skips_among_the_last_thousand_are_a_reason_to_stop() -> None:
    guard = GuardSection(max_skipped_per_1000=3, spike_sigma=0)
    losses = [math.nan, *[2.0] * 997, math.nan, 2.0, math.nan]  # steps 1, 999, 1001
    health, _ = feed(losses, guard=guard)
    assert health.recent_skips == (999, 1001)
    assert reason_to_stop(health, guard) == ""
    health, _ = feed([2.0, math.nan], health=health, guard=guard, first_step=1002)
    assert "3 of the last 1,000 steps" in reason_to_stop(health, guard)
    assert health.skipped_steps == 4


def test_spikes_in_a_row_ask_for_a_rewind_and_too_many_rewinds_end_the_run() -> None:
    guard = GuardSection(on_spike="rewind", spike_patience=2, max_rewinds=1)
    saved, _ = feed(noisy(200), guard=guard)
    once, _ = feed([90.0], health=saved, guard=guard)
    assert not should_rewind(once, guard)
    twice, _ = feed([math.nan], health=once, guard=guard)
    assert should_rewind(twice, guard), "a skipped step behind a spike is one of the row"
    assert not should_rewind(twice, GuardSection(spike_patience=2)), "unless it is only to be reported"
    assert reason_to_stop(twice, guard) == ""
    rewound = after_rewind(twice, to=saved)
    assert (rewound.rewinds, rewound.num_spikes, rewound.spikes_in_row) == (1, 1, 0)
    assert (rewound.losses, rewound.skipped_steps) == (saved.losses, 0), "as the checkpoint had it"
    again, _ = feed([90.0, 90.0], health=rewound, guard=guard)
    assert "again after 1 rewinds (guard.max_rewinds=1)" in reason_to_stop(again, guard)


def test_a_resumed_run_decides_as_the_unbroken_one() -> None:
    losses = [*noisy(150), 90.0, *noisy(30, seed=1), math.nan, *noisy(40, seed=2, level=8.0), *noisy(30, seed=3)]
    norms = noisy(len(losses), level=0.1, noise=0.4)
    whole, spikes = feed(losses, grad_norms=norms)
    assert len(spikes) >= 4
    for cut in range(0, len(losses), 7):
        before, early = feed(losses[:cut], grad_norms=norms[:cut])
        health = Health.from_dict(json.loads(json.dumps(before.to_dict())))
        assert health == before
        after, late = feed(losses[cut:], grad_norms=norms[cut:], health=health, first_step=cut + 1)
        assert after == whole
        assert early + late == spikes


@pytest.mark.parametrize("values", [{"skipped": 1}, None, [1]])
def test_values_of_another_form_are_refused(values: Any) -> None:
    with pytest.raises(CheckpointError, match=r"the value `health` in the checkpoint.s state\.json is damaged"):
        Health.from_dict(values)
