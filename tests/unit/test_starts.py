"""The default test run stays short by design: the processes that its tests start are counted, and too many are a
failure."""

from __future__ import annotations

import multiprocessing
import subprocess

import pytest

from tests.helpers import starts


def test_programs_and_workers_are_counted() -> None:
    before = starts.count
    subprocess.run(["true"], check=True)
    worker = multiprocessing.get_context("fork").Process(target=int)
    worker.start()
    worker.join()
    assert starts.count - before == 2


@pytest.mark.parametrize(
    ("marks", "budget"),
    [(set(), starts.BUDGET), ({"smoke", "dist", "slow"}, starts.SMOKE_BUDGET)],
)
def test_a_test_of_the_default_run_may_start_its_budget_and_no_more(marks: set[str], budget: int) -> None:
    starts.check(budget, marks=marks)
    with pytest.raises(pytest.fail.Exception, match=f"{budget + 1} processes were started .* may start {budget}"):
        starts.check(budget + 1, marks=marks)


@pytest.mark.parametrize("mark", ["slow", "dist", "gpu"])
def test_what_only_all_runs_or_a_gpu_runs_may_start_what_it_likes(mark: str) -> None:
    starts.check(1000, marks={mark})


@pytest.mark.xfail(raises=pytest.fail.Exception, strict=True, reason="it starts more than it may")
def test_a_test_that_starts_more_than_it_may_fails_though_it_asserts_nothing() -> None:
    for _ in range(starts.BUDGET + 1):
        subprocess.run(["true"], check=True)
