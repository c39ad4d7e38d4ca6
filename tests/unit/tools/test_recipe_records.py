"""What is recorded of the recipes for two cores stands in the page and in their headers, scored as these say."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.helpers.recipes import header
from tools.recipes import BEGIN, COLUMNS, PAGE, RECORDS, SCORES, as_told, table_of
from tools.recording import Rows, table_in

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
