"""Durations of the test files: tests/durations.txt, written by `bash launch/test.sh --all --keep-durations`.

They show which files take longest. They also give the order in which two processes run the files, the longest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "durations.txt"


def read() -> dict[str, float]:
    """Return the seconds of each file."""
    lines = [line.split() for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {name: float(seconds) for seconds, name in lines}


def keep(reports: Iterable[Any]) -> None:
    """Update the seconds of the files from pytest's reports, and remove files that do not exist any more."""
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds[report.location[0]] += report.duration
    kept = {name: one for name, one in (read() | seconds).items() if (FILE.parents[1] / name).exists()}
    head = "# Seconds of each file of tests, by `bash launch/test.sh --all --keep-durations`\n"
    lines = [f"{one:8.1f}  {name}\n" for name, one in sorted(kept.items(), key=lambda item: (-item[1], item[0]))]
    FILE.write_text(head + "".join(lines), encoding="utf-8")
