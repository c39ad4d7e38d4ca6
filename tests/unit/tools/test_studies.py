"""Every variant of a study can be started, tables pair seeds, and a prediction is a line through logarithms."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tools import prediction
from tools.studies import STUDIES, Record, config_of, parameters_outside_tables, table_of
from txl_dist.config import plan_batch
from txl_dist.errors import ConfigError

VARIANTS = [(name, variant) for name, study in STUDIES.items() for variant in study.variants]


def row(study: str, variant: str, seed: int, nats: float, *, parameters: int = 1) -> Record:
    return Record(
        study, "text", variant, seed, 9, nats, 1.0, 2.0, 0.5, parameters, "", "", "d", "c", "cpu", "2026-11-23"
    )


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_every_variant_can_be_started_on_its_ranks(name: str, variant: str, tmp_path: Path) -> None:
    study = STUDIES[name]
    config = config_of(study, variant, corpus=tmp_path, vocab_size=4096, seed=3, steps=70, place=tmp_path / "run")
    plan = plan_batch(config.train, world_size=study.ranks)
    assert plan.num_microbatches == 1
    assert (config.run.seed, config.train.max_steps, config.train.num_lanes) == (3, 70, 32)
    assert parameters_outside_tables(config) > 100_000


def test_variants_stand_beside_the_first_by_seed() -> None:
    losses = {("memory 0", 1): 4.0, ("memory 0", 2): 5.0, ("memory 64", 1): 3.5, ("memory 64", 2): 4.7}
    _, _, first, second = table_of([row("memory", name, seed, nats) for (name, seed), nats in losses.items()])
    assert "| 2 | 4.5000 +- 0.7071 | 1.0000 |  | 2 | 0.50 |" in first
    assert "| 4.1000 +- 0.8485 | 1.0000 | -0.4000 +- 0.1414 |" in second


def test_a_corpus_that_does_not_know_its_bytes_has_an_empty_cell() -> None:
    _, _, line = table_of([row("softmax", "full", 1, 5.4)._replace(bits_per_byte=math.nan)])
    assert "| 5.4000 |  |  |" in line


def test_a_power_law_is_continued_exactly_and_seeds_tell_how_sure_it_is() -> None:
    sizes = {"width 64": 10_000, "width 96": 40_000, "width 128": 90_000}
    rows = [
        row("sizes", name, seed, factor * size**-0.1, parameters=size)
        for seed, factor in ((1, 10.0), (2, 11.0))
        for name, size in sizes.items()
    ]
    (said,) = prediction.predict(rows, parameters=1_000_000)
    assert said.nats == pytest.approx(10.5 * 1_000_000**-0.1, abs=1e-4)
    assert said.deviation == pytest.approx(math.sqrt(0.5) * 1_000_000**-0.1, abs=1e-4)
    assert "not yet trained" in prediction.table_of([said], rows)[2]
    came = row("larger", "width 224", 1, 2.5)
    assert "| 2.5000 |" in prediction.table_of([said], [*rows, came])[2]
    with pytest.raises(ConfigError, match="fewer than two seeds"):
        prediction.predict(rows[:3], parameters=1)
