"""Table 9 of the paper: time per evaluated token by attention length, with tools/benchmarks/evaluation.py.

    python -m tools.experiments.paper.t9                           on one core; --peer-original DIR times their code too
    python -m tools.experiments.paper.t9 --size paper              prints the command for the paper's model and lengths
    python -m tools.experiments.paper.t9 --table                   writes the table of notebook/paper.md

The vanilla model moves a window by one token for each token. Recurrence runs segments over a memory of hidden states.
Cached is our evaluation over keys and values. The model is enwik8_base with random weights, because speed does not
depend on the learned weights. The size cores has shorter attention lengths, so that it takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.experiments.paper.trials import PAGE, UNMEASURED, add_record_flags, begin_of, require_own_records
from tools.experiments.recording import ROOT, Rows, markdown, origin, put_table

COLUMNS = ("attention", "variant", "min_ms_per_token", "x_by_min", "model", "rounds", "commit", "cpu", "date")
SIZES = {
    "tiny": ["--tiny", "--lengths", "16", "32", "--tokens", "8", "--rounds", "2"],
    "cores": ["--lengths", "200", "400", "800", "--rounds", "4"],
    "paper": ["--lengths", "800", "1800", "2800", "3800", "--rounds", "3", "--skip-plain"],
}


def command(size: str, *, peer_original: Path | None) -> list[str]:
    """Return the command of the benchmark."""
    peer = ["--peer-original", str(peer_original)] if peer_original else []
    return ["-m", "tools.benchmarks.evaluation", "--only", "paper", *SIZES[size], *peer]


def measure(size: str, rows: Rows, *, peer_original: Path | None) -> None:
    """Run the benchmark and add its rows. Raises RuntimeError with the end of its error output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out, words = Path(folder) / "t9.json", command(size, peer_original=peer_original)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = [sys.executable, *words, "--json", str(out)]
        result = subprocess.run(process, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {result.returncode}:\n{result.stderr[-1000:]}")
        (table,) = json.loads(out.read_text(encoding="utf-8"))["tables"].values()
    model, rounds = "tiny" if size == "tiny" else "enwik8_base", words[words.index("--rounds") + 1]
    for row in table:
        times = {"min_ms_per_token": f"{row['min ms per token']:.4f}", "x_by_min": f"{row['x by min']:.2f}"}
        rows.add(attention=row["attention"], variant=row["variant"], model=model, rounds=rounds, **times, **origin())


def table_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the Markdown table: a row per attention length, with each variant's milliseconds per token and its
    speed-up over the first variant."""
    if not rows:
        return [UNMEASURED]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    found = {(row["model"], row["attention"], row["variant"]): row for row in rows}  # the last measurement counts
    lines = []
    for model, attention in dict.fromkeys((row["model"], row["attention"]) for row in rows):
        own = [found.get((model, attention, variant)) for variant in variants]
        lines.append(
            [model, attention, *(f"{row['min_ms_per_token']} (x {row['x_by_min']})" if row else "" for row in own)]
        )
    return markdown(["model", "attention length", *(f"{variant}, ms" for variant in variants)], lines)


def main() -> None:
    """Measure the times, print the command, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="cores", help="paper only prints the command")
    parser.add_argument("--peer-original", type=Path, metavar="DIR", help="folder `pytorch` of the authors' code")
    add_record_flags(parser, program="t9")
    arguments = parser.parse_args()
    require_own_records(parser, arguments)
    rows = Rows(arguments.csv, COLUMNS)
    if arguments.table:
        put_table(PAGE, begin_of("t9"), table_of(rows.rows))
        return
    if arguments.size == "paper":
        print(f"OMP_NUM_THREADS=1 python {' '.join(command('paper', peer_original=arguments.peer_original))}")
        return
    try:
        measure(arguments.size, rows, peer_original=arguments.peer_original)
    except RuntimeError as error:
        sys.exit(str(error))
    print("\n".join(table_of(rows.rows)))


if __name__ == "__main__":
    main()
