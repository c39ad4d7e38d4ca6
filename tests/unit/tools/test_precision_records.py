"""Precisions are compared over the seeds that both have, and the notebook shows the records."""

from __future__ import annotations

from tools.experiments.precisions import BEGIN, COLUMNS, PAGE, RECORDS, table_of
from tools.experiments.recording import Rows, table_in


def row(precision: str, seed: int, nats: float, *, steps: int = 300) -> dict[str, str]:
    words = {"recipe": "mine", "steps": str(steps), "precision": precision, "seed": str(seed), "nats": str(nats)}
    return words | {"corpus": "c0ffee"}


def test_the_notebook_has_the_table_of_the_records() -> None:
    assert table_in(PAGE, BEGIN) == table_of(Rows(RECORDS, COLUMNS).rows)


def test_a_seed_without_a_run_in_the_other_precision_does_not_count() -> None:
    rows = [row("fp32", 0, 2.0), row("bf16", 0, 2.5), row("fp32", 1, 3.0), row("bf16", 1, 3.1), row("fp32", 2, 9.0)]
    (line,) = table_of(rows)[2:]
    assert line == "| mine | 300 | 2 | 2.5000 +- 0.7071 | 2.8000 +- 0.4243 | +0.3000 +- 0.2828 |"


def test_runs_of_other_lengths_have_their_own_row() -> None:
    rows = [row("fp32", 0, 2.0), row("bf16", 0, 2.5), row("fp32", 0, 1.0, steps=600), row("bf16", 0, 1.0, steps=600)]
    assert [line.split(" | ")[1] for line in table_of(rows)[2:]] == ["300", "600"]
    assert table_of(rows[:1])[2:] == []
