"""Messages use the singular for one thing: "1 layer", "1 other file"."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from txl_dist.report.summary import _count, _sizes

PACKAGE = Path(__file__).parents[2] / "txl_dist"
NOUNS = (
    *("cores", "entries", "GPUs", "heads", "lanes", "layers", "machines", "nodes", "others", "prompts", "ranks"),
    *("requests", "rows", "seeds", "shards", "texts"),
)
"""Plurals that `console.formatting.counted` writes: there may be one of each."""
NEVER_ONE = {
    ("cli/main.py", "num_ranks"),
    ("config/load.py", "world_size"),
    ("data/loader/lanes.py", "shares[i]"),
    ("evaluation/options.py", "_MOST"),
    ("inference/bundle.py", "model.num_layers"),
    ("planning/scaling.py", "broken.gpus"),
    ("config/phases.py", "values['num_lanes']"),
    ("train/checkpoint/validate.py", "next_lane"),
    ("train/footprint/fits.py", "num_sharing"),
    ("cli/launch.py", "num_ranks"),
    ("data/loader/corruption.py", "self._num_ranks"),
}
"""Values that are not 1 where they are shown, fractions, and messages about a damaged file."""


def plain_plurals() -> Iterator[tuple[str, str, str]]:
    """(file, value, noun) of each f-string that puts a plural of NOUNS behind a value as it is."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else []
            for value, after in itertools.pairwise(parts):
                if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant):
                    noun = str(after.value).lstrip().split(" ")[0].rstrip(".,;:)")
                    if str(after.value).startswith(" ") and noun in NOUNS:
                        yield path.relative_to(PACKAGE).as_posix(), ast.unparse(value.value), noun


def test_no_message_counts_what_may_be_one_in_the_plural() -> None:
    found = [(file, value, noun) for file, value, noun in plain_plurals() if (file, value) not in NEVER_ONE]
    assert found == [], "use console.formatting.counted"


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (1, ("1 parameter", None)),
        (6_289, ("6,289 parameters", None)),
        (10_000, ("10k parameters", "10,000 exactly")),
        (1_234_567, ("1.23M parameters", "1,234,567 exactly")),
        (0, (None, None)),
        (None, (None, None)),
    ],
)
def test_a_number_of_parameters_is_said_twice_only_if_the_first_is_rounded(
    number: int | None, shown: tuple[str | None, str | None]
) -> None:
    assert _sizes(number) == shown


@pytest.mark.parametrize(("value", "shown"), [(1, "1 layer"), (2, "2 layers"), (4096, "4,096 layers"), (None, None)])
def test_a_fact_of_a_report_has_the_number_of_its_noun(value: object, shown: str | None) -> None:
    assert _count(value, "layer") == shown
