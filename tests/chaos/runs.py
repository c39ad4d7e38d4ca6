"""A run folder as seen from outside: its records, its checkpoints, and leftover files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.job import Job
from txl_dist.artifacts import list_checkpoints


class Run:
    """A run directory, from outside."""

    def __init__(self, folder: Path) -> None:
        self.dir, self.log = folder, folder.with_name(folder.name + ".log")
        self.jobs: list[Job] = []
        self._records: list[dict[str, Any]] = []
        self._num_bytes = self._last_step = self._highest_step = self._steps_lost = 0

    @property
    def is_done(self) -> bool:
        """Whether it has come to its end."""
        return (self.dir / "DONE").exists()

    def records(self, kind: str = "") -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl, in the order in which they were written."""
        self._read_on()
        return [record for record in self._records if kind in ("", record["kind"])]

    @property
    def last_step(self) -> int:
        """The step trained last."""
        self._read_on()
        return self._last_step

    @property
    def highest_step(self) -> int:
        """The highest step ever trained."""
        self._read_on()
        return self._highest_step

    @property
    def steps_lost(self) -> int:
        """Steps trained again after all restarts so far, counting finished steps."""
        self._read_on()
        return self._steps_lost

    def _read_on(self) -> None:
        """Take in what was written since; it is called many times a second, beside ranks that need the cores."""
        path = self.dir / "metrics.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._num_bytes)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                break  # still being written
            self._num_bytes += len(line)
            try:
                record = json.loads(line)
            except ValueError:  # a rank was killed while it wrote
                continue
            self._records.append(record)
            if record["kind"] == "train":
                self._last_step = record["step"]
                self._highest_step = max(self._highest_step, self._last_step)
            elif record.get("event") == "start" or record.get("restored_from") in ("checkpoint", "start"):
                self._steps_lost += max(0, self._last_step - record["step"])
                self._last_step = record["step"]

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the committed checkpoints."""
        return [int(path.name.removeprefix("step_")) for path in list_checkpoints(self.dir)]

    @property
    def bytes_left(self) -> int:
        """Bytes of temporary and half-removed files, and of shared memory that its jobs, now ended, have left."""
        strays = [path for path in self.dir.rglob("*") if path.is_file() and _is_stray(path.relative_to(self.dir))]
        return sum(path.stat().st_size for path in strays) + sum(job.leaked_bytes for job in self.jobs)


def _is_stray(path: Path) -> bool:
    return any(".tmp" in part or ".old" in part or ".trash" in part for part in path.parts)
