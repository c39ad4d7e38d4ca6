"""Formatting of numbers and tables for people."""

from __future__ import annotations

import math
import re

import pytest

from txl_dist.console.formatting import (
    bounded,
    clock,
    counted,
    format_bytes,
    format_count,
    format_duration,
    format_table,
    printable,
)


def test_numbers_of_a_table_stand_under_each_other() -> None:
    assert format_table([["name", "count"], ["a", "1"], ["bcdefg", "1,000"]]) == [
        "name    count",
        "a           1",
        "bcdefg  1,000",
    ]


def test_a_number_that_is_missing_does_not_turn_its_column_into_words() -> None:
    assert format_table([["", "loss", "state"], ["a", "-", "-"], ["b", "1.25", "whole"]]) == [
        "   loss  state",
        "a     -  -",
        "b  1.25  whole",
    ]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(4096, "4 KiB"), (12.3 * 2**20, "12.3 MiB"), (2**30, "1.00 GiB"), (1500 * 2**30, "1,500.00 GiB")],
)
def test_a_size_has_the_unit_that_fits(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (95, "95 s"), (720, "12 min"), (12_240, "3.4 h"), (2.1 * 86_400, "2.1 days")],
)
def test_a_duration_has_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_clock_counts_hours_on() -> None:
    assert [clock(9000), clock(100 * 3600 + 61)] == ["2:30:00", "100:01:01"]


def test_large_numbers_are_short_and_none_is_not_finite() -> None:
    values = [131_072_000, 0.00025, 12_345, 9_999, -2e9, math.nan]
    assert [format_count(value) for value in values] == ["131M", "0.00025", "12.3k", "9999", "-2G", "-"]


def test_ticks_that_lie_close_together_are_told_apart() -> None:
    assert [format_count(value, digits=6) for value in (4.5725, 122_500)] == ["4.5725", "122.5k"]


def test_what_steers_a_terminal_is_replaced_but_for_what_is_to_stay() -> None:
    assert printable("a\x1b[2J\nb") == "a\ufffd[2J\ufffdb"
    assert printable("a\x1b\nb", keep="\n") == "a\ufffd\nb"


@pytest.mark.parametrize("exponent", range(-12, 309, 8))
def test_no_number_is_longer_than_a_reader_can_count(exponent: int) -> None:
    for sign in (1, -1):
        value = sign * 1.2345 * 10.0**exponent
        for text in (bounded(value), bounded(value, ".2f"), bounded(value, ",.0f"), format_count(value)):
            assert len(text) <= 14, text
            assert not re.search(r"e\+\d+[kMGT]", text)


def test_numbers_of_usual_size_keep_their_format() -> None:
    assert [bounded(value) for value in (5.70351, 0.0, -12.5, 99999.0)] == [
        "5.7035",
        "0.0000",
        "-12.5000",
        "99999.0000",
    ]
    assert bounded(131_072_000, ",.0f") == "131,072,000"
    assert (bounded(1.01e304, ".2f"), format_count(1.01e304)) == ("1.01e+304", "1.01e+304")
    assert [bounded(value) for value in (math.inf, -math.inf, math.nan)] == ["inf", "-inf", "nan"]


def test_a_count_has_its_noun_in_the_right_number() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2, 1024)] == ["0 ranks", "1 rank", "2 ranks", "1,024 ranks"]
    assert counted(2, "micro-batch", "micro-batches") == "2 micro-batches"
