"""The file that `gpu.py` writes: one JSON object per line, flushed to the disk before the program continues.

    {"began": .., "section": "", "state": "opens", "command": .., "commit": .., "device": ..}     a run of the program
    {"began": .., "section": .., "state": "plans", "jobs": [..]}       jobs that a section will run
    {"began": .., "section": .., "job": .., "state": "begins"}
    {"began": .., "section": .., "job": .., .. results ..}             any number of rows
    {"began": .., "section": .., "job": .., "state": "ends"}

`began` is the start time of a run of the program and separates runs that share a file. `at_s` is in seconds since then.
A job that begins but does not end was killed, hung or ran out of time. The parent process adds a row with the reason.
`python -m tools.benchmarks.gpu_rows FILE` prints the contents of a file as tables.
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
    """Appends entries to the file. An entry is flushed to the disk, so it survives a crash of the process or the
    machine."""

    def __init__(self, path: Path, *, section: str, began: float, skip: Iterable[str] = ()) -> None:
        """Set the section of all entries. `skip` are jobs that an earlier process of this section has begun."""
        self.path, self.section, self.began, self.skip = path, section, began, frozenset(skip)

    def opens(self, facts: Mapping[str, object]) -> None:
        """Append facts about the run. Raises OSError if the file cannot be written."""
        self._append({"state": "opens", **facts})

    def plans(self, jobs: Iterable[str]) -> list[str]:
        """Append the names of all jobs of the section. Return the jobs that are not yet begun."""
        jobs = list(jobs)
        self._append({"state": "plans", "jobs": jobs})
        return [job for job in jobs if job not in self.skip]

    def begins(self, job: str) -> None:
        """Append that the job begins. The job's time limit counts from here."""
        self._append({"job": job, "state": "begins"})

    def row(self, job: str, found: Mapping[str, object]) -> None:
        """Append a result of the job. `log`, the whole error of an error row, is appended to the log instead."""
        found = dict(found)
        if words := found.pop("log", ""):
            self.explains(job, str(words))
        self._append({"job": job, **found})

    def ends(self, job: str) -> None:
        """Append that the job has ended and all of its rows are written."""
        self._append({"job": job, "state": "ends"})

    @property
    def log(self) -> Path:
        """File for whole error messages: tracebacks, and all that the processes print. It is next to the rows."""
        return self.path.with_name(f"{self.path.name}.log")

    def explains(self, job: str, words: str) -> None:
        """Append the whole error of a job to the log."""
        stamp = f"[{time.time() - self.began:.1f} s] {self.section}: {job}"
        append(self.log, f"{stamp}\n{words.rstrip()}\n")

    def _append(self, entry: Mapping[str, object]) -> None:
        stamp = {"began": self.began, "at_s": round(time.time() - self.began, 2), "section": self.section}
        line = json.dumps(without_nan(stamp | dict(entry)), allow_nan=False, default=str) + "\n"
        append(self.path, line)


def append(path: Path, text: str) -> None:
    """Append text to a file and wait until it is on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, text.encode(errors="replace"))
        os.fsync(handle)
    finally:
        os.close(handle)


def all_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of every run in the file. An incomplete line is skipped."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def entries(path: Path, *, began: float, section: str = "") -> Iterator[dict[str, Any]]:
    """Yield the entries of one run of the program, of all sections or of one section."""
    for entry in all_entries(path):
        if entry["began"] == began and section in ("", entry["section"]):
            yield entry


def rows(path: Path, *, began: float) -> dict[str, list[Row]]:
    """Return the results of a run by section, in the order of the file."""
    found: dict[str, list[Row]] = {}
    for entry in entries(path, began=began):
        if "state" not in entry:
            row = {key: value for key, value in entry.items() if key not in ("began", "at_s", "section")}
            found.setdefault(entry["section"], []).append(row)
    return found


def print_rows(path: Path, *, began: float) -> None:
    """Print a table per section. All rows have the same columns, and a list is printed as text."""
    for section, found in rows(path, began=began).items():
        columns = list(dict.fromkeys(column for row in found for column in row))
        print_table(section, [{column: _short(row.get(column, "")) for column in columns} for row in found])


def _short(value: object) -> object:
    if isinstance(value, list):
        return " ".join(f"{one:.5g}" if isinstance(one, float) else str(one) for one in value)
    return value


def main() -> None:
    """Print the tables of every run in a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE", help="rows that gpu.py wrote")
    path = parser.parse_args().file
    for opened in [entry for entry in all_entries(path) if entry.get("state") == "opens"]:
        print(opened["date"], opened["command"])
        print_rows(path, began=opened["began"])


if __name__ == "__main__":
    main()
