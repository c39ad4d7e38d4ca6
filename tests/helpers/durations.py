"""What each file of tests took when all of them ran: tests/durations.txt, made by `bash launch/test.sh --all
--keep-durations`. It says what a run waits for, and in which order two processes take the files: the longest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "durations.txt"


def read() -> dict[str, float]:
    """Seconds by file."""
    lines = [line.split() for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {name: float(seconds) for seconds, name in lines}


def keep(reports: Iterable[Any]) -> None:
    """Replace the seconds of the files that these reports of pytest are of; files that are gone leave the list."""
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds[report.location[0]] += report.duration
    kept = {name: one for name, one in (read() | seconds).items() if (FILE.parents[1] / name).exists()}
    head = "# Seconds of each file of tests, by `bash launch/test.sh --all --keep-durations`\n"
    lines = [f"{one:8.1f}  {name}\n" for name, one in sorted(kept.items(), key=lambda item: (-item[1], item[0]))]
    FILE.write_text(head + "".join(lines), encoding="utf-8")
