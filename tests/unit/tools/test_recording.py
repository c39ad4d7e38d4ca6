"""Records are read back as they were written, and replacing a table changes nothing else in a page."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.experiments.recording import (
    END,
    RecordsError,
    Rows,
    append_rows,
    picture,
    put_table,
    read_rows,
    spread,
    table_in,
)


class Measured(NamedTuple):
    name: str
    seed: int
    seconds: float


def test_records_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    path, rows = tmp_path / "records.csv", [Measured('a "fast", one', 0, 0.1), Measured("other", 1, 2.5)]
    assert read_rows(path, Measured) == []
    for one in rows:
        append_rows(path, Measured._fields, [one])
    assert read_rows(path, Measured) == rows
    assert path.read_bytes().count(b"\n") == 3


def test_a_file_of_other_columns_is_refused_by_name_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    path.write_text("name,seconds,seed\na,0.5,1\n")
    for use in (
        lambda: read_rows(path, Measured),
        lambda: append_rows(path, Measured._fields, [Measured("b", 1, 2.5)]),
        lambda: Rows(path, Measured._fields),
    ):
        with pytest.raises(RecordsError, match=r"records\.csv has the columns name, seconds, seed, not name"):
            use()
    assert path.read_text() == "name,seconds,seed\na,0.5,1\n"


def test_a_word_that_is_no_column_is_refused_and_nothing_is_added(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "records.csv", Measured._fields)
    with pytest.raises(RecordsError, match=r"records\.csv has no column secnds"):
        rows.add(name="a", secnds=1.0)
    assert rows.rows == []
    assert not rows.path.exists()


def test_rows_that_are_recorded_at_once_share_one_head(tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: append_rows(path, Measured._fields, [Measured("a", seed, 0.5)]), range(200)))
    assert sorted(row.seed for row in read_rows(path, Measured)) == list(range(200))


def test_a_table_is_replaced_and_all_around_it_stays(tmp_path: Path) -> None:
    page, before = (
        tmp_path / "page.md",
        f"# A\n\n<!-- one -->\n\n| old |\n\n{END}\n\n<!-- two -->\n\n| b |\n\n{END}\nend\n",
    )
    page.write_text(before)
    put_table(page, "<!-- one -->", ["| new |", "| --- |"])
    assert table_in(page, "<!-- one -->") == ["| new |", "| --- |"]
    assert page.read_text() == before.replace("| old |", "| new |\n| --- |")
    with pytest.raises(ValueError, match="not found"):
        put_table(page, "<!-- three -->", ["| lost |"])


def test_a_deviation_is_told_of_several_values_only() -> None:
    assert spread([1.0], digits=2) == "1.00"
    assert spread([1.0, 2.0], digits=2, sign="+") == "+1.50 +- 0.71"


def test_a_picture_depends_on_its_numbers_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with picture(tmp_path / name / "one.svg", width=3, height=2) as figure:
            figure.subplots().plot([1, 2], [3, 4], label="line")
    assert (tmp_path / "a" / "one.svg").read_bytes() == (tmp_path / "b" / "one.svg").read_bytes()
