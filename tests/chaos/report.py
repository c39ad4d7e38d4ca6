"""Make the Markdown tables of tools/experiments/notebook/reliability.md from the lines that the cases wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER = (
    "| case | trials | passed | steps lost (most) | tokens lost | detect s (most) | recover s (median) | bytes left |"
)


def tables(report: Path) -> Iterator[str]:
    """Lines of Markdown: one row per kind of case; below, the figures of statistics and whatever failed."""
    cases: list[dict[str, Any]] = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    yield HEADER
    yield "|" + " --- |" * (HEADER.count("|") - 1)
    single = [case for case in cases if not case["figures"]]
    for kind in dict.fromkeys(_kind(case) for case in single):
        yield _row(kind, [case for case in single if _kind(case) == kind])
    for case in cases:
        if case["figures"]:
            yield ""
            yield f"{case['case']} ({case['trials']} faults: {case['fault']}):"
            yield ""
            yield "| " + " | ".join(name.replace("_", " ") for name in case["figures"]) + " |"
            yield "|" + " --- |" * len(case["figures"])
            yield "| " + " | ".join(str(value) for value in case["figures"].values()) + " |"
    for case in cases:
        if case["problems"]:
            yield f"\nFAILED: {case['case']} ZeRO-{case['stage']} {case['fault']}: {'; '.join(case['problems'])}"


def _kind(case: dict[str, Any]) -> str:
    """Cases of one kind share a row: a request at all moments, a crash at all points of a save."""
    if case["case"] == "sweep":
        return f"sweep: kill -9 at every point of a save, ZeRO-{case['stage']}"
    return "sweep: kill -9 elsewhere" if case["case"].startswith("crash ") else str(case["case"]).split(", in ")[0]


def _row(kind: str, cases: list[dict[str, Any]]) -> str:
    trials = sum(case["trials"] for case in cases)
    passed = sum(case["trials"] for case in cases if not case["problems"])
    recover = sorted(case["recover_s"] for case in cases if case["recover_s"] is not None)
    detect = [case["detect_s"] for case in cases if case["detect_s"] is not None]
    cells = [
        kind,
        trials,
        passed,
        max(case["steps_lost"] for case in cases),
        sum(case["tokens_lost"] for case in cases),
        f"{max(detect):.1f}" if detect else "",
        f"{recover[len(recover) // 2]:.1f}" if recover else "",
        sum(case["bytes_left"] for case in cases),
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
