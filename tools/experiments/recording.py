"""What the tools that measure for the repository share: records in a CSV, a table in a page, a picture, where and when.

A record is a NamedTuple; its CSV has a column per field, and a row is on disk when `append_rows` returns. Where the
fields are words that are looked up by name, `Rows` keeps them.
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
"""Pages of measurements, with their records and pictures."""
END = "<!-- end of table -->"
"""Behind a table in a page; before it stands a comment with the command that writes it."""
_WRITING = threading.RLock()
"""Held while rows are added: runs made side by side may record at once."""

_Record = TypeVar("_Record", bound=tuple[Any, ...])


class RecordsError(TxlError, ValueError):
    """A file of records, or a row for it, has other columns than the program writes."""


def read_rows(path: Path, kind: type[_Record]) -> list[_Record]:
    """The records of a CSV, whose fields are str, int or float; none if there is no such file.

    Raises RecordsError if it has other columns.
    """
    kinds = get_type_hints(kind)
    return [kind(**{name: kinds[name](row[name]) for name in kinds}) for row in _words_in(path, list(kinds))]


def append_rows(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Add rows, and the head if they are the first. Raises RecordsError if the file has other columns."""
    with _WRITING:
        head = [] if _has_head(path, columns) else [columns]
        with path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([*head, *rows])


def _words_in(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Rows by column."""
    if not _has_head(path, columns):
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _has_head(path: Path, columns: Sequence[str]) -> bool:
    """Whether a CSV is begun. Its columns must be these: below others, rows would say something else."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", newline="") as file:
        found = next(csv.reader(file), [])
    if found and found != list(columns):
        raise RecordsError(
            f"{path} has the columns {', '.join(found)}, not {', '.join(columns)}. "
            "Another version wrote it: take its rows over by hand, or move it away."
        )
    return bool(found)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(cells)} |" for cells in lines)]


class Rows:
    """A CSV with these columns, whose rows are words by column; runs made side by side may add to it."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        """Raises RecordsError if the file has other columns."""
        self.path, self.columns = path, tuple(columns)
        self.rows = _words_in(path, columns)

    def add(self, **row: object) -> None:
        """Append a row, None and what is missing as empty words; it is on disk when this returns.

        Raises RecordsError for a name that is not a column.
        """
        self.add_all([row])

    def add_all(self, rows: Iterable[Mapping[str, object]]) -> None:
        """The same of several at once, so that a program that is killed has recorded all of them or none."""
        rows = list(rows)
        if unknown := {name for row in rows for name in row} - {*self.columns}:
            raise RecordsError(f"{self.path} has no column {', '.join(sorted(unknown))}.")
        given = [{name: row.get(name) for name in self.columns} for row in rows]
        values = [{name: "" if value is None else str(value) for name, value in row.items()} for row in given]
        with _WRITING:
            append_rows(self.path, self.columns, [list(row.values()) for row in values])
            self.rows.extend(values)


def put_table(page: Path, begin: str, lines: Sequence[str]) -> None:
    """Replace what stands in a page between a comment and the next `END`. Raises ValueError if it lacks them."""
    before, _, behind = _parted(page, begin)
    table = "\n".join(["", *lines, ""]) if lines else ""
    page.write_text(f"{before}{begin}\n{table}\n{END}{behind}", encoding="utf-8")


def table_in(page: Path, begin: str) -> list[str]:
    """Its lines. Raises ValueError if the page lacks the comments around it."""
    return _parted(page, begin)[1].strip().splitlines()


def _parted(page: Path, begin: str) -> tuple[str, str, str]:
    text = page.read_text(encoding="utf-8")
    first = text.index(begin)
    last = text.index(END, first)
    return text[:first], text[first + len(begin) : last], text[last + len(END) :]


def spread(values: Sequence[float], *, digits: int, sign: str = "") -> str:
    """Mean, and deviation if there are several."""
    deviation = f" +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.{digits}f}{deviation}"


@contextmanager
def picture(out: Path, *, width: float, height: float) -> Iterator[Any]:
    """A matplotlib Figure, sizes in inches; then the SVG is written, whose bytes depend on the numbers alone."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "txl_dist", "font.size": 9.5, "legend.frameon": False}
    settings |= {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd"}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(out, format="svg", metadata={"Date": None}, facecolor="white")


def commit() -> str:
    """Of the repository, shortened; + if tracked files, other than records, differ from it."""
    differing = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!*.csv")
    return _git("rev-parse", "--short", "HEAD") + ("+" if differing else "")


def cpu() -> str:
    """Its name, and the widest vectors that it has."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"model name\s*:\s*(.*)", facts)
    return f"{name[1] if name else platform.processor()}{' AVX-512' if 'avx512f' in facts else ''}"


def today() -> str:
    """In UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def origin() -> dict[str, str]:
    """Columns of a row: by which code, on what, and when it was measured."""
    return {"commit": commit(), "cpu": cpu(), "date": today()}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
