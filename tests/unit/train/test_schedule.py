"""Learning rates: the formulas, and no jump at the end of the warm-up."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from txl_dist.config.schema import OptimSection
from txl_dist.train.schedule import learning_rate

MAX_STEPS = 100
SCHEDULES = ["cosine", "cosine_from_start", "linear", "inverse_sqrt", "wsd", "constant"]


def rates(schedule: str, **changes: Any) -> list[float]:
    """The rate of every update of a run, then those after its end."""
    values: dict[str, Any] = {"lr": 0.5, "warmup_steps": 10, "min_lr": 0.05, **changes}
    optim = OptimSection(schedule=schedule, **values)
    return [learning_rate(step, optim, max_steps=MAX_STEPS) for step in range(2 * MAX_STEPS)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_warm_up_is_a_line_from_one_step_above_zero_to_the_peak(schedule: str) -> None:
    values = rates(schedule)
    assert values[:10] == pytest.approx([0.05 * update for update in range(1, 11)], rel=1e-12)
    assert max(values) == values[9] == 0.5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warm_up_the_first_update_is_at_the_peak(schedule: str) -> None:
    assert rates(schedule, warmup_steps=0)[0] == 0.5


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup_steps", [0, 1, 10])
def test_after_the_warm_up_the_rate_never_rises_and_never_leaves_its_bounds(schedule: str, warmup_steps: int) -> None:
    values = rates(schedule, warmup_steps=warmup_steps)
    assert all(a >= b for a, b in itertools.pairwise(values[warmup_steps:]))
    assert all(0 < value <= 0.5 for value in values)
    assert min(values[warmup_steps:]) >= 0.05 * (1 - 1e-12)


def test_cosine_and_linear_follow_their_formula_and_end_at_the_lowest_rate() -> None:
    for schedule, shape in (("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2), ("linear", lambda x: 1 - x)):
        values = rates(schedule)
        expected = [0.05 + 0.45 * shape((step - 10) / 90) for step in range(10, MAX_STEPS + 1)]
        assert values[10 : MAX_STEPS + 1] == pytest.approx(expected, rel=1e-12)
        assert values[55] == pytest.approx(0.275, rel=1e-12)
        assert values[MAX_STEPS:] == pytest.approx([0.05] * MAX_STEPS, rel=1e-12)


def test_wsd_stays_at_its_peak_and_falls_along_a_line_in_its_last_part() -> None:
    values = rates("wsd", cooldown_fraction=0.4)
    assert values[10:61] == [0.5] * 51
    assert values[60:101] == pytest.approx([0.5 - 0.45 * done / 40 for done in range(41)], rel=1e-12)
    assert rates("wsd", cooldown_fraction=1.0) == rates("linear")


def test_a_stable_run_cools_down_from_any_step_of_it() -> None:
    # What docs/checkpoints.md says of a branch: its max_steps are those of its beginning, divided by 1 - fraction.
    branch = OptimSection(schedule="wsd", lr=0.5, warmup_steps=10)
    stable = OptimSection(schedule="constant", lr=0.5, warmup_steps=10)
    assert learning_rate(80, branch, max_steps=100) == learning_rate(80, stable, max_steps=1000)
    assert learning_rate(81, branch, max_steps=100) == pytest.approx(0.5 * 19 / 20)


def test_inverse_sqrt_halves_when_the_updates_have_become_four_times_as_many_and_stops_at_its_floor() -> None:
    values = rates("inverse_sqrt", min_lr=0.0)
    assert values[9:] == pytest.approx([0.5 * math.sqrt(10 / (step + 1)) for step in range(9, 2 * MAX_STEPS)])
    assert values[39] == pytest.approx(0.25, rel=1e-12)
    assert rates("inverse_sqrt", min_lr=0.3)[MAX_STEPS] == 0.3


def test_cosine_from_start_is_not_shifted_by_the_warm_up() -> None:
    values = rates("cosine_from_start")
    expected = [0.05 + 0.45 * (1 + math.cos(math.pi * step / MAX_STEPS)) / 2 for step in range(10, MAX_STEPS + 1)]
    assert values[10 : MAX_STEPS + 1] == pytest.approx(expected, rel=1e-12)
    assert values[MAX_STEPS:] == [0.05] * MAX_STEPS
    assert rates("cosine_from_start", warmup_steps=0) == rates("cosine", warmup_steps=0)


def test_cosine_from_start_is_the_original_loop_with_torchs_scheduler() -> None:
    """train.py of kimiyoung/transformer-xl sets the rate of the next update after each one, counting updates."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, MAX_STEPS, eta_min=0.05)
    original = [0.5]
    optimizer.step()
    for _ in range(MAX_STEPS):
        scheduler.step()
        original.append(scheduler.get_last_lr()[0])
    assert rates("cosine_from_start")[10 : MAX_STEPS + 1] == pytest.approx(original[10:], rel=1e-9)


@pytest.mark.parametrize(("width", "warmup_steps"), [(128, 2000), (512, 4000), (3, 1)])
def test_inverse_sqrt_with_the_right_peak_is_the_formula_of_noam(width: int, warmup_steps: int) -> None:
    optim = OptimSection(schedule="inverse_sqrt", lr=(width * warmup_steps) ** -0.5, warmup_steps=warmup_steps)
    for update in range(1, 10_000):
        noam = width**-0.5 * min(update**-0.5, update * warmup_steps**-1.5)
        assert learning_rate(update - 1, optim, max_steps=5000) == pytest.approx(noam, rel=1e-12)


def test_constant_stays_at_the_peak() -> None:
    assert set(rates("constant")[10:]) == {0.5}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_as_short_as_its_warm_up_still_has_a_rate_for_every_step(schedule: str) -> None:
    optim = OptimSection(schedule=schedule, lr=0.5, warmup_steps=10)
    values = [learning_rate(step, optim, max_steps=10) for step in range(12)]
    assert all(0 <= value <= 0.5 for value in values)
    assert values[9] == 0.5
