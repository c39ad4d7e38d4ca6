"""The tables that pages take from the code: the reading list of docs/architecture.md and the public names of
docs/api.md."""

from __future__ import annotations

import ast
import re

import pytest

import txl_dist
from tools.checks import count_code, page_tables
from tools.checks.count_code import size_of
from tools.checks.page_tables import (
    FEWEST_LINES,
    MOST_LINES,
    PUBLIC_MEMBERS,
    Reading,
    first_sentence,
    public_names_table,
    reading_lines,
    with_table,
)
from tools.checks.sources import PACKAGE, ROOT

FIXED_ATTRIBUTES = {"__version__", "plugins"}
"""Public attributes that are no class and no function."""


def rows_of(page: str) -> list[list[str]]:
    """Return the cells of every row of the table between the marks of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = text.partition("<!-- table: ")[2].partition("<!-- end of table -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row[1:-1])] for row in rows]


def test_the_reading_list_has_each_file_with_its_lines_and_the_sum() -> None:
    *rows, sum_row = rows_of("architecture.md")[2:]
    listed: dict[str, int] = {}
    for row in rows:
        files = {name: int(lines) for name, lines in re.findall(r"`([\w/]+\.py)` (\d+)", row[2])}
        assert int(row[3].replace(",", "")) == sum(files.values()), row[0]
        listed |= files
    message = "run `python -m tools.checks.reference_pages`"
    assert listed == {name: size_of(ROOT / PACKAGE / name).lines for name in listed}, message
    assert sum_row[2:] == [f"{len(listed)} files", f"{sum(listed.values()):,}"]
    assert FEWEST_LINES <= sum(listed.values()) <= MOST_LINES


def test_the_program_that_the_page_names_counts_single_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(ROOT / PACKAGE / name) for name in ("io/tensor_files.py", "rng.py")]
    monkeypatch.setattr("sys.argv", ["count_code", *files])
    count_code.main()
    lines = reading_lines()
    printed = re.findall(r"(\S+) +\d files +([\d,]+) lines of code", capsys.readouterr().out)
    assert printed == [
        (files[0], str(lines["io/tensor_files.py"])),
        (files[1], str(lines["rng.py"])),
        ("all", str(lines["io/tensor_files.py"] + lines["rng.py"])),
    ]


def test_a_pattern_that_no_file_matches_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tables, "READING", (Reading("a", "b", ("io/man*.py", "train/gone.py")),))
    with pytest.raises(ValueError, match=r"no file train/gone\.py .* Correct READING"):
        reading_lines()


def test_every_public_name_is_in_the_table() -> None:
    names = {row[0] for row in rows_of("api.md")[2:]}
    found = {name for row in names for name in re.findall(r"^`(?!\.)(?!plugins\.)(\w+)", row)}
    assert found == set(txl_dist.__all__) - FIXED_ATTRIBUTES
    functions = {row.partition("(")[0].strip("`") for row in names if row.startswith("`plugins.")}
    exported = {name for name in txl_dist.plugins.__all__ if callable(getattr(txl_dist.plugins, name))}
    assert functions <= {f"plugins.{name}" for name in exported}
    assert {f"plugins.{name}" for name in exported if name.startswith("register_")} <= functions
    members = {member for members in PUBLIC_MEMBERS.values() for member in members}
    assert members <= {row.partition("(")[0].strip("`.") for row in names}


def test_a_row_has_the_parameters_without_types_and_the_first_sentence() -> None:
    table = public_names_table()
    assert "| `pretrain(config, *, callbacks=(), resume='auto'" in table
    assert "| `.network` |" in table, "a property has no parameters"
    assert "| `RunResult(steps, tokens_seen, loss, " in table, "a named tuple has its fields"
    source = 'def f():\n    """Do it by Dai et al. 2019 in\n    a | b. And more.\n\n    Raises KeyError."""'
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert first_sentence(function) == "Do it by Dai et al. 2019 in a \\| b"


def test_a_table_goes_between_its_marks() -> None:
    marks = "<!-- table: t (made by `python -m tools.checks.reference_pages`) -->\n{}<!-- end of table -->\n"
    page = "# A\n\n" + marks + "\nEnd.\n"
    once = with_table(page.format("old\n"), "t", "| new |")
    assert once == page.format("\n| new |\n\n")
    assert with_table(once, "t", "| new |") == once
    with pytest.raises(ValueError, match="no marks of the table 'other'"):
        with_table(page, "other", "")
