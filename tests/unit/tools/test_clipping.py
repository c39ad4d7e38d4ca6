"""The share of clipped steps is measured with a recipe's own learning rate and clip norm, and is recorded for every
recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.recipes import CONFIGS, header
from tools.experiments import clipping
from tools.experiments.recording import Rows, table_in
from txl_dist.config.load import check_config, check_vocabulary, load_config
from txl_dist.model.flops import count_parameters

NAMES = sorted(path.stem for path in CONFIGS.glob("*.toml"))
ROWS = clipping.newest(Rows(clipping.RECORDS, clipping.COLUMNS))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_keeps_all_that_decides_over_clipping_when_it_is_made_smaller(name: str) -> None:
    config, vocab_size = load_config(CONFIGS / f"{name}.toml"), clipping.TOKENS[name].vocab_size
    small = clipping.scaled(config, steps=40, vocab_size=vocab_size)
    check_config(small)
    check_vocabulary(small.model, vocab_size=vocab_size)
    assert small.optim.warmup_steps == min(config.optim.warmup_steps, 10)
    assert small.optim.model_copy(update={"warmup_steps": config.optim.warmup_steps}) == config.optim
    assert (small.model.dropout, small.model.width) == (config.model.dropout, config.model.width)
    if count_parameters(config.model, vocab_size=max(vocab_size, *config.model.cutoffs, 0) + 1) <= clipping.LARGE:
        assert small.train.num_lanes == config.train.num_lanes
        assert small.model.num_layers == config.model.num_layers


def test_every_recipe_has_a_row_of_its_present_rate_and_norm() -> None:
    found = {name: (row["optimizer"], float(row["lr"]), float(row["clip_norm"])) for name, row in ROWS.items()}
    configs = {name: load_config(CONFIGS / f"{name}.toml").optim for name in NAMES}
    assert set(clipping.TOKENS) == set(NAMES)
    for name, optim in configs.items():
        assert found[name] == (optim.name, pytest.approx(optim.lr, rel=1e-5), optim.clip_norm), name


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_that_clips_nearly_every_step_repeats_a_published_one_and_says_so(name: str) -> None:
    if float(ROWS[name]["clipped_pct"]) > 95:
        assert re.search(r"^# Clipping: .* is kept, whatever share of the steps it clips$", header(name), re.MULTILINE)


def test_the_page_shows_the_records() -> None:
    rows = Rows(clipping.RECORDS, clipping.COLUMNS)
    assert table_in(clipping.PAGE, clipping.BEGIN) == clipping.table_of(rows)


def test_a_recipe_that_was_measured_twice_is_shown_once(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.csv", clipping.COLUMNS)
    facts = {"layers": 4, "lanes": 8, "segment": 64, "steps": 50, "clip_norm": 1, "median_norm": 2}
    for pct in (90, 40):
        rows.add(recipe="ptb", clipped_pct=pct, **facts)
    (line,) = clipping.table_of(rows)[2:]
    assert line == "| `ptb` | smaller: 4 layers, 8 x 64 tokens, 50 steps | 1 | 2 | 40 % |"
