"""The records of the recipes for two cores appear in the page and in the recipes' headers, with the same scores."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.helpers.corpora import tiny_corpus
from tests.helpers.recipes import header
from tools.experiments import recipes
from tools.experiments.recipes import BEGIN, COLUMNS, PAGE, RECORDS, SCORES, as_told, table_of
from tools.experiments.recording import Rows, table_in
from txl_dist.config.load import Config
from txl_dist.errors import ConfigError

ROWS = Rows(RECORDS, COLUMNS).rows


def test_the_page_shows_the_table_of_the_records() -> None:
    assert table_in(PAGE, BEGIN) == table_of(ROWS)


@pytest.mark.parametrize("name", SCORES)
def test_a_recipes_own_command_is_among_its_scores(name: str) -> None:
    told = re.search(rf"txl evaluate runs/{name} (.*)", header(name))
    assert told is not None
    assert shlex.split(told[1], comments=True) in [flags.split() for flags in SCORES[name]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['recipe']}-{row['score']}")
def test_a_header_tells_what_was_recorded(row: dict[str, str]) -> None:
    assert as_told(row).split()[0] in header(row["recipe"])


def test_a_loss_is_told_in_the_unit_of_its_field() -> None:
    row = {"recipe": "a", "score": "--split valid", "nats": "1.2345", "bits_per_byte": "1.7812", "ppl": "3.44"}
    assert as_told(row) == "1.781 bits per byte"
    assert as_told(row | {"bits_per_byte": ""}) == "3.44 perplexity"
    assert as_told(row | {"score": "--protocol nanogpt"}) == "1.2345 nats per character"


def test_a_run_is_trained_and_scored_unless_rows_of_its_settings_and_corpus_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = list[str]()

    def score(flags: str, *, rows: Rows, words: dict[str, str], config: Config) -> None:
        rows.add(**words, score=flags)

    monkeypatch.setattr(recipes, "train", lambda recipe, config, *, ranks: trained.append(config.engine.precision))
    monkeypatch.setattr(recipes, "score", score)
    rows = Rows(tmp_path / "recipes.csv", COLUMNS)
    with pytest.raises(ConfigError, match=r"stdlib, which stdlib_cpu\.toml reads, does not exist\. The header of"):
        recipes.bring("stdlib_cpu", rows=rows, precision="fp32", ranks=2)
    for text in ("one text", "another text"):
        (tmp_path / "data").mkdir(exist_ok=True)
        shutil.rmtree(tmp_path / "data" / "stdlib", ignore_errors=True)
        tiny_corpus(tmp_path / "data", name="stdlib", texts=[text] * 40, valid_fraction=0.0)
        for precision in ("fp32", "fp32", "bf16", "bf16"):
            recipes.bring("stdlib_cpu", rows=rows, precision=precision, ranks=2)
    assert trained == ["fp32", "bf16"] * 2
    assert len(rows.rows) == 4
    assert Rows(rows.path, COLUMNS).rows == rows.rows
