"""Shared functions of the programs that measure for the repository: records in a CSV, tables in pages, and pictures.

A record is a NamedTuple. Its CSV has a column per field, and a row is on disk when `append_rows` returns. `Rows` is for
records whose fields are texts that are looked up by name.
"""

from __future__ import annotations

import csv
import platform
import re
import statistics
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from txl_dist.errors import TxlError

ROOT = Path(__file__).parents[2]
NOTEBOOK = Path(__file__).parent / "notebook"
"""Folder of the pages with measurements, and of their records and pictures."""
END = "<!-- end of table -->"
"""Comment after a table in a page. The comment before the table contains the command that writes it."""
_WRITING = threading.RLock()
"""Lock for adding rows, because runs in parallel can add rows at the same time."""

_Record = TypeVar("_Record", bound=tuple[Any, ...])


class RecordsError(TxlError, ValueError):
    """Raised if a file of records, or a row for it, has other columns than the program writes."""


def read_rows(path: Path, kind: type[_Record]) -> list[_Record]:
    """Return the records of a CSV, whose fields are str, int or float. The list is empty if the file does not exist.

    Raises RecordsError if the file has other columns.
    """
    kinds = get_type_hints(kind)
    return [kind(**{name: kinds[name](row[name]) for name in kinds}) for row in _words_in(path, list(kinds))]


def append_rows(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Append rows, after the head if the file is empty. Raises RecordsError if the file has other columns."""
    with _WRITING:
        head = [] if _has_head(path, columns) else [columns]
        with path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([*head, *rows])


def _words_in(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a CSV as dictionaries by column."""
    if not _has_head(path, columns):
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _has_head(path: Path, columns: Sequence[str]) -> bool:
    """Return whether a CSV has a head. Raises RecordsError if its columns differ, because new rows would then be
    wrong."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", newline="") as file:
        found = next(csv.reader(file), [])
    if found and found != list(columns):
        raise RecordsError(
            f"{path} has the columns {', '.join(found)}, not {', '.join(columns)}. "
            "Another version of the program wrote it. Copy its rows by hand, or move the file away."
        )
    return bool(found)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(cells)} |" for cells in lines)]


class Rows:
    """A CSV with given columns, whose rows are dictionaries of texts. Runs in parallel can add rows to it."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        """Read the file. Raises RecordsError if it has other columns."""
        self.path, self.columns = path, tuple(columns)
        self.rows = _words_in(path, columns)

    def add(self, **row: object) -> None:
        """Append a row, which is on disk when this function returns. None and missing columns become empty texts.

        Raises RecordsError for a name that is not a column.
        """
        self.add_all([row])

    def add_all(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append several rows at once, so that a killed program has recorded all of them or none. Raises RecordsError
        as `add` does."""
        rows = list(rows)
        if unknown := {name for row in rows for name in row} - {*self.columns}:
            raise RecordsError(f"{self.path} has no column {', '.join(sorted(unknown))}.")
        given = [{name: row.get(name) for name in self.columns} for row in rows]
        values = [{name: "" if value is None else str(value) for name, value in row.items()} for row in given]
        with _WRITING:
            append_rows(self.path, self.columns, [list(row.values()) for row in values])
            self.rows.extend(values)


def put_table(page: Path, begin: str, lines: Sequence[str]) -> None:
    """Replace the text of a page between the comment `begin` and the next `END`. Raises ValueError if the page does not
    contain them."""
    before, _, behind = _parted(page, begin)
    table = "\n".join(["", *lines, ""]) if lines else ""
    page.write_text(f"{before}{begin}\n{table}\n{END}{behind}", encoding="utf-8")


def table_in(page: Path, begin: str) -> list[str]:
    """Return the lines of a table in a page. Raises ValueError if the page does not contain the comments around the
    table."""
    return _parted(page, begin)[1].strip().splitlines()


def _parted(page: Path, begin: str) -> tuple[str, str, str]:
    text = page.read_text(encoding="utf-8")
    first = text.index(begin)
    last = text.index(END, first)
    return text[:first], text[first + len(begin) : last], text[last + len(END) :]


def spread(values: Sequence[float], *, digits: int, sign: str = "") -> str:
    """Return the mean as text, with the standard deviation if there are several values."""
    deviation = f" +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.{digits}f}{deviation}"


@contextmanager
def picture(out: Path, *, width: float, height: float) -> Iterator[Any]:
    """Yield a matplotlib Figure with sizes in inches, then write it as SVG. The bytes of the file depend only on the
    drawn numbers."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "txl_dist", "font.size": 9.5, "legend.frameon": False}
    settings |= {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd"}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(out, format="svg", metadata={"Date": None}, facecolor="white")


def commit() -> str:
    """Return the short hash of the repository's commit, with + if tracked files other than records have changed."""
    differing = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!*.csv")
    return _git("rev-parse", "--short", "HEAD") + ("+" if differing else "")


def cpu() -> str:
    """Return the name of the processor, with AVX-512 if it has these instructions."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"model name\s*:\s*(.*)", facts)
    return f"{name[1] if name else platform.processor()}{' AVX-512' if 'avx512f' in facts else ''}"


def today() -> str:
    """Return the date in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def origin() -> dict[str, str]:
    """Return the columns commit, cpu and date of a row."""
    return {"commit": commit(), "cpu": cpu(), "date": today()}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
