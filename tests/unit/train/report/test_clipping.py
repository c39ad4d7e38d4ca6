"""A run in which the default clip norm clips nearly all steps gives a warning."""

import math

import pytest

from txl_dist.config.load import Config, changed
from txl_dist.train.report.metrics import Clipping


def record_of(norms: list[float], **optim: float) -> dict[str, float] | None:
    section = Config.model_validate({"optim": optim}).optim
    clipping = Clipping(section.clip_norm, is_default="clip_norm" not in section.model_fields_set)
    for norm in norms:
        clipping.add(norm)
    return clipping.record()


def test_steps_that_are_all_clipped_by_the_default_norm_are_told_with_their_mean_norm() -> None:
    record = record_of([1.0, 3.0] * 50)
    assert record == {"steps": 100, "clipped_pct": 100.0, "clip_norm": 0.25, "grad_norm": 2.0}


@pytest.mark.parametrize(("num_clipped", "is_told"), [(94, False), (95, False), (96, True)])
def test_the_limit_is_more_than_95_per_cent(num_clipped: int, is_told: bool) -> None:
    assert (record_of([1.0] * num_clipped + [0.1] * (100 - num_clipped)) is not None) == is_told


def test_skipped_steps_count_neither_as_clipped_nor_as_made() -> None:
    record = record_of([math.inf] * 100 + [math.nan] * 3 + [1.0] * 20)
    assert record is not None
    assert record["steps"] == 20
    assert record_of([math.inf] * 100) is None


def test_a_replacement_continues_the_counts() -> None:
    before = Clipping(0.25, is_default=True)
    for norm in (1.0, 3.0, math.inf) * 15:
        before.add(norm)
    after = Clipping(0.25, is_default=True)
    after.continue_from(before.counts())
    assert after.record() == before.record() is not None


@pytest.mark.parametrize("norm", [0.25, 1.0, 0.0])
def test_a_norm_that_the_settings_name_is_the_choice_of_whoever_wrote_it(norm: float) -> None:
    assert record_of([5.0] * 100, clip_norm=norm) is None


def test_a_few_steps_say_nothing() -> None:
    assert record_of([5.0] * 19) is None


def test_phases_and_derived_settings_do_not_count_as_naming_the_norm() -> None:
    config = changed(Config(), {"train.num_lanes": 2, "optim.lr": 1e-3})
    assert "clip_norm" not in config.optim.model_fields_set
