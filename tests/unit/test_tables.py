"""How numbers and tables are written for people."""

from __future__ import annotations

import math

import pytest

from txl_dist.tables import aligned, clock, compact, duration, printable, size


def test_numbers_of_a_table_stand_under_each_other() -> None:
    assert aligned([["name", "count"], ["a", "1"], ["bcdefg", "1,000"]]) == [
        "name    count",
        "a           1",
        "bcdefg  1,000",
    ]


def test_a_number_that_is_missing_does_not_turn_its_column_into_words() -> None:
    assert aligned([["", "loss", "state"], ["a", "-", "-"], ["b", "1.25", "whole"]]) == [
        "   loss  state",
        "a     -  -",
        "b  1.25  whole",
    ]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(4096, "4 KiB"), (12.3 * 2**20, "12.3 MiB"), (2**30, "1.00 GiB"), (1500 * 2**30, "1,500.00 GiB")],
)
def test_a_size_has_the_unit_that_fits(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (95, "95 s"), (720, "12 min"), (12_240, "3.4 h"), (2.1 * 86_400, "2.1 days")],
)
def test_a_duration_has_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_clock_counts_hours_on() -> None:
    assert [clock(9000), clock(100 * 3600 + 61)] == ["2:30:00", "100:01:01"]


def test_large_numbers_are_short_and_none_is_not_finite() -> None:
    values = [131_072_000, 0.00025, 12_345, 9_999, -2e9, math.nan]
    assert [compact(value) for value in values] == ["131M", "0.00025", "12.3k", "9999", "-2G", "-"]


def test_ticks_that_lie_close_together_are_told_apart() -> None:
    assert [compact(value, digits=6) for value in (4.5725, 122_500)] == ["4.5725", "122.5k"]


def test_what_steers_a_terminal_is_replaced_but_for_what_is_to_stay() -> None:
    assert printable("a\x1b[2J\nb") == "a\ufffd[2J\ufffdb"
    assert printable("a\x1b\nb", keep="\n") == "a\ufffd\nb"
