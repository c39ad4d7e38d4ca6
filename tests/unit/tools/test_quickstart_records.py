"""The README's figures of the quick start are the mean and the range of the recorded seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.experiments.quickstart import (
    RECIPES,
    RECORDS,
    Record,
    mean_and_range,
    read_scores,
    summary_of,
    table_of,
)
from tools.experiments.recording import ROOT, read_rows

ROWS = read_rows(RECORDS, Record)


def test_the_readme_has_the_table_of_the_records() -> None:
    assert "\n".join(["", *table_of(ROWS), ""]) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_records_are_of_three_seeds_for_each_recipe_kind_of_kernels_and_precision() -> None:
    seeds: dict[tuple[str, ...], list[int]] = {}
    for row in ROWS:
        seeds.setdefault((row.recipe, row.cpu, row.kernels, row.precision), []).append(row.seed)
    assert len(seeds) >= 2
    assert {tuple(sorted(numbers)) for numbers in seeds.values()} == {(0, 1, 2)}
    assert len({row.corpus for row in ROWS}) == 1
    assert len(summary_of(ROWS)) == len(seeds)


def test_the_tool_trains_the_recipe_of_the_quick_start() -> None:
    script = (ROOT / "launch/quickstart.sh").read_text(encoding="utf-8")
    assert f"config=configs/{RECIPES[0]}.toml " in script


def test_the_table_has_a_column_for_each_precision_and_only_rows_of_the_quick_start() -> None:
    first = ROWS[0]._replace(recipe=RECIPES[0], precision="fp32", model=1.5)
    other = first._replace(precision="bf16", model=1.6)
    head, _, model, *_ = table_of([other, first, other._replace(recipe=RECIPES[1], model=9.0)])
    assert head == "| bits per byte | fp32 | bf16 |"
    assert model == "| the model | 1.50 | 1.60 |"


@pytest.mark.parametrize(
    ("values", "text"),
    [([1.0, 2.0, 3.0], "2.00 (1.00 to 3.00)"), ([1.967, 1.967], "1.97"), ([1.5], "1.50")],
)
def test_a_mean_has_its_range_where_values_differ(values: list[float], text: str) -> None:
    assert mean_and_range(values) == text


def test_scores_are_read_without_what_is_in_brackets(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps({"model": {"loss": 4.0}, "memory off (3 tokens)": {"loss": 5.0}}), encoding="utf-8")
    assert read_scores(path) == {"model": {"loss": 4.0}, "memory off": {"loss": 5.0}}
