"""The rank for which the others wait is found, and no other rank is named."""

from __future__ import annotations

import time

import pytest
import torch

from txl_dist.train.monitoring.stragglers import NUM_REPORTS, StepClock, slowest, straggler


def test_the_slowest_is_measured_by_the_median_of_the_others() -> None:
    assert slowest([10.0, 10.0, 15.0, 10.0]) == (2, pytest.approx(50.0))
    assert slowest([30.0, 10.0]) == (0, pytest.approx(200.0))
    assert slowest([10.0, 10.0]) == (0, pytest.approx(0.0))
    # One slow neighbour does not make the median of the others slow.
    assert slowest([10.0, 40.0, 10.0, 50.0, 10.0]) == (3, pytest.approx(400.0))


def test_a_rank_is_named_once_it_was_slower_by_a_third_in_enough_reports_in_a_row() -> None:
    slow, even = [10.0, 10.0, 14.0], [10.0, 10.0, 10.0]
    assert straggler([slow] * NUM_REPORTS) == 2
    assert straggler([even, *[slow] * NUM_REPORTS]) == 2
    assert straggler([slow] * (NUM_REPORTS - 1)) is None
    assert straggler([*[slow] * (NUM_REPORTS - 1), even]) is None


def test_ranks_that_take_turns_at_being_slow_are_not_named() -> None:
    assert straggler([[14.0, 10.0], [10.0, 14.0], [14.0, 10.0]]) is None
    assert straggler([[13.0, 10.0]] * NUM_REPORTS) is None  # 30 % is less than a third
    assert straggler([[99.0]] * NUM_REPORTS) is None  # a rank alone keeps nobody waiting


@pytest.mark.parametrize("sees_forward", [True, False])
def test_the_clock_stands_still_while_the_rank_waits_for_others(sees_forward: bool) -> None:
    clock = StepClock(torch.device("cpu"), sees_forward=sees_forward)
    clock.begin()
    time.sleep(0.02)
    clock.mark_prepared()
    time.sleep(0.3)  # it meets the others here
    clock.start_forward()
    time.sleep(0.05)
    clock.forward_ends()
    time.sleep(0.3)  # and here
    least_ms = 70 if sees_forward else 20
    assert least_ms <= clock.local_ms() < least_ms + 250
    clock.begin()
    clock.mark_prepared()
    assert clock.local_ms() < 20, "each step is timed anew"
