"""The file that `bench_gpu.py` writes: a JSON object a line, on the disk before anything else happens.

    {"began": .., "section": .., "state": "plans", "jobs": [..]}       what a section is about to do
    {"began": .., "section": .., "job": .., "state": "begins"}
    {"began": .., "section": .., "job": .., .. what was found ..}      any number of rows
    {"began": .., "section": .., "job": .., "state": "ends"}

`began` tells runs of the program apart that share a file; `at_s` are seconds since. A job that begins and does not end
was killed, hung or ran out of time: the parent adds a row that says which.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from measuring import without_nan

Row = dict[str, object]


class Journal:
    """Appends to the file; what is appended outlives the process, and the machine."""

    def __init__(self, path: Path, *, section: str, began: float, skip: Iterable[str] = ()) -> None:
        """`skip` are jobs that an earlier process of this section has begun."""
        self.path, self.section, self.began, self.skip = path, section, began, frozenset(skip)

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


def entries(path: Path, *, began: float, section: str = "") -> Iterator[dict[str, Any]]:
    """What one run of the program wrote, of all sections or of one; half a line is passed over."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if entry.get("began") == began and section in ("", entry["section"]):
            yield entry


def rows(path: Path, *, began: float) -> dict[str, list[Row]]:
    """What was found, by section, in order."""
    found: dict[str, list[Row]] = {}
    for entry in entries(path, began=began):
        if "state" not in entry:
            row = {key: value for key, value in entry.items() if key not in ("began", "at_s", "section")}
            found.setdefault(entry["section"], []).append(row)
    return found
