"""The file that `gpu.py` writes: a JSON object a line, on the disk before anything else happens.

    {"began": .., "section": "", "state": "opens", "command": ..}      a run of the program
    {"began": .., "section": .., "state": "plans", "jobs": [..]}       what a section is about to do
    {"began": .., "section": .., "job": .., "state": "begins"}
    {"began": .., "section": .., "job": .., .. what was found ..}      any number of rows
    {"began": .., "section": .., "job": .., "state": "ends"}

`began` tells runs of the program apart that share a file; `at_s` are seconds since. A job that begins and does not end
was killed, hung or ran out of time: the parent adds a row that says which. All that a file
holds is printed as tables by `python -m tools.benchmarks.gpu_rows FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.benchmarks.measuring import print_table, without_nan

Row = dict[str, object]


class Journal:
    """Appends to the file; what is appended outlives the process, and the machine."""

    def __init__(self, path: Path, *, section: str, began: float, skip: Iterable[str] = ()) -> None:
        """`skip` are jobs that an earlier process of this section has begun."""
        self.path, self.section, self.began, self.skip = path, section, began, frozenset(skip)

    def opens(self, facts: Mapping[str, object]) -> None:
        """Note what the run is, and that the file can be written. Raises OSError."""
        self._append({"state": "opens", **facts})

    def plans(self, jobs: Iterable[str]) -> list[str]:
        """Note all jobs of the section; those that are left are returned."""
        jobs = list(jobs)
        self._append({"state": "plans", "jobs": jobs})
        return [job for job in jobs if job not in self.skip]

    def begins(self, job: str) -> None:
        """From here on the job's own limit counts."""
        self._append({"job": job, "state": "begins"})

    def row(self, job: str, found: Mapping[str, object]) -> None:
        """Something was found."""
        self._append({"job": job, **found})

    def ends(self, job: str) -> None:
        """All of its rows are there."""
        self._append({"job": job, "state": "ends"})

    def _append(self, entry: Mapping[str, object]) -> None:
        stamp = {"began": self.began, "at_s": round(time.time() - self.began, 2), "section": self.section}
        line = json.dumps(without_nan(stamp | dict(entry)), allow_nan=False, default=str) + "\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
            os.fsync(handle)
        finally:
            os.close(handle)


def all_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Of every run that the file knows; half a line is passed over."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def entries(path: Path, *, began: float, section: str = "") -> Iterator[dict[str, Any]]:
    """What one run of the program wrote, of all sections or of one."""
    for entry in all_entries(path):
        if entry["began"] == began and section in ("", entry["section"]):
            yield entry


def rows(path: Path, *, began: float) -> dict[str, list[Row]]:
    """What was found, by section, in order."""
    found: dict[str, list[Row]] = {}
    for entry in entries(path, began=began):
        if "state" not in entry:
            row = {key: value for key, value in entry.items() if key not in ("began", "at_s", "section")}
            found.setdefault(entry["section"], []).append(row)
    return found


def print_rows(path: Path, *, began: float) -> None:
    """A table per section, with the same columns in every row, lists as text."""
    for section, found in rows(path, began=began).items():
        columns = list(dict.fromkeys(column for row in found for column in row))
        print_table(section, [{column: _short(row.get(column, "")) for column in columns} for row in found])


def _short(value: object) -> object:
    if isinstance(value, list):
        return " ".join(f"{one:.5g}" if isinstance(one, float) else str(one) for one in value)
    return value


def main() -> None:
    """Print every run of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE", help="rows that gpu.py wrote")
    path = parser.parse_args().file
    for opened in [entry for entry in all_entries(path) if entry.get("state") == "opens"]:
        print(opened["date"], opened["command"])
        print_rows(path, began=opened["began"])


if __name__ == "__main__":
    main()
