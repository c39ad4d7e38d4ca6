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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

ROOT = Path(__file__).parents[1]
END = "<!-- end of table -->"
"""Behind a table in a page; before it stands a comment with the command that writes it."""

_Record = TypeVar("_Record", bound=tuple[Any, ...])


def read_rows(path: Path, kind: type[_Record]) -> list[_Record]:
    """The records of a CSV, whose fields are str, int or float; none if there is no such file."""
    if not path.is_file():
        return []
    kinds = get_type_hints(kind)
    with path.open(encoding="utf-8", newline="") as file:
        return [kind(**{name: kinds[name](row[name]) for name in kinds}) for row in csv.DictReader(file)]


def append_rows(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Add rows, and the head if they are the first."""
    with path.open("a", encoding="utf-8", newline="") as file:
        head = [] if file.tell() else [columns]
        csv.writer(file, lineterminator="\n").writerows([*head, *rows])


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(cells)} |" for cells in lines)]


class Rows:
    """A CSV with these columns, whose rows are words by column; runs made side by side may add to it."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, tuple(columns)
        self.rows: list[dict[str, str]] = []
        self._lock = threading.Lock()
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                self.rows = list(csv.DictReader(file))

    def add(self, **row: object) -> None:
        """Append a row, None and what is missing as empty words; it is on disk when this returns."""
        given = {name: row.get(name) for name in self.columns}
        values = {name: "" if value is None else str(value) for name, value in given.items()}
        with self._lock:
            append_rows(self.path, self.columns, [list(values.values())])
            self.rows.append(values)


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
