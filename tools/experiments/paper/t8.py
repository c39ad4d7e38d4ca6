"""Table 8 of the paper: the relative effective context length (RECL) of four models of table 6, with `txl recl`.

    python -m tools.experiments.paper.t8                  measures the runs of tools.experiments.paper.t6, seed by seed
    python -m tools.experiments.paper.t8 --size paper     prints the command for a cluster
    python -m tools.experiments.paper.t8 --table          writes the table of notebook/paper.md

The models of a seed form one group. Each model is compared with the best model of the group at each context length.
Each model uses the memory length of its training. A group that has rows in the CSV is not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.experiments.paper.trials import (
    PAGE,
    SIZES,
    UNMEASURED,
    Job,
    Size,
    Trial,
    add_record_flags,
    begin_of,
    require_own_records,
)
from tools.experiments.recording import Rows, markdown, origin, put_table
from tools.experiments.trainings import run_txl, side_by_side
from txl_dist.config.load import load_config
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.errors import ConfigError, TxlError

GROUP = (
    Trial(True, "ours", "full"),
    Trial(True, "Shaw", "full"),
    Trial(False, "ours", "full"),
    Trial(False, "absolute", "half"),
)
ABOUT = ("corpus", "recurrence", "positions", "loss", "segment", "steps", "targets", "contexts")
COLUMNS = (*ABOUT, "settings", "seed", "r", "recl", "or_more", "commit", "cpu", "date")
CONTEXTS = {
    "tiny": ("--step", "4", "--max-context", "12", "--num-tokens", "5"),
    "cores": ("--step", "32", "--max-context", "512"),
    "paper": ("--step", "100", "--max-context", "1000"),
}


def runs_of(seed: int, *, folder: Path, size: Size) -> list[Path]:
    """Return the folders in which tools.experiments.paper.t6 has trained the models of the group."""
    return [folder / Job(trial, seed, size.segment_len, size.steps).name(size) for trial in GROUP]


def measure(seed: int, *, rows: Rows, folder: Path, size: Size, flags: Sequence[str]) -> None:
    """Measure the group of a seed, and add all its rows at once. Raises TxlError or RuntimeError if the measurement
    fails."""
    runs = runs_of(seed, folder=folder, size=size)
    if not (settings := runs[0] / "config.toml").is_file():
        raise ConfigError(f"{runs[0]} is not a run. Train table 6 first: python -m tools.experiments.paper.t6")
    corpus = open_corpus(Path(load_config(settings).data.path))
    known = [Job(trial, seed, size.segment_len, size.steps).words(size, corpus=corpus) for trial in GROUP]
    if all(any(words.items() <= row.items() for row in rows.rows) for words in known):
        return
    result = folder / f"recl-{size.segment_len}-{size.steps}-{seed}.json"
    run_txl("recl", *runs, *flags, "--json", result)
    found = json.loads(result.read_text(encoding="utf-8"))
    facts = {"targets": found["targets"], "contexts": f"{found['contexts'][0]} to {found['contexts'][-1]}"}
    rows.add_all(
        words | facts | {"r": r, "recl": one["context"], "or_more": int(one["or_more"])} | origin()
        for words, model in zip(known, found["models"], strict=True)
        for r, one in model["recl"].items()
    )


def table_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the Markdown table with a row per model: tokens, as mean and range over the seeds. `+` means that a seed
    still gained at the longest context."""
    if not rows:
        return [UNMEASURED]
    shares = sorted({row["r"] for row in rows}, key=float)
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ABOUT)
        groups.setdefault(key, []).append(row)
    lines = []
    for key, own in groups.items():
        cells = [_told([row for row in own if row["r"] == r]) for r in shares]
        lines.append([*key, str(len({row["seed"] for row in own})), *cells])
    return markdown([*ABOUT, "seeds", *(f"r = {r}" for r in shares)], lines)


def _told(rows: Sequence[dict[str, Any]]) -> str:
    lengths = [int(row["recl"]) for row in rows]
    more = "+" if any(row["or_more"] == "1" for row in rows) else ""
    return f"{statistics.fmean(lengths):.0f}{more} ({min(lengths)} to {max(lengths)})"


def main() -> None:
    """Measure the groups without rows, print the commands, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", choices=SIZES, default="cores", help="tiny tries the program; paper only prints the command"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 1 to N")
    parser.add_argument("--steps", type=int, default=0, help="steps of these runs; 0 means the size's default")
    parser.add_argument("--jobs", type=int, default=2, help="number of seeds in parallel, each on one thread")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper/t6"), help="folder of the runs of table 6")
    add_record_flags(parser, program="t8")
    arguments = parser.parse_args()
    require_own_records(parser, arguments)
    rows = Rows(arguments.csv, COLUMNS)
    if arguments.table:
        put_table(PAGE, begin_of("t8"), table_of(rows.rows))
        return
    size, flags = SIZES[arguments.size], CONTEXTS[arguments.size]
    size = size._replace(steps=arguments.steps or size.steps)
    seeds = range(1, arguments.seeds + 1)
    if size.on_gpu:
        for seed in seeds:
            runs = " ".join(map(str, runs_of(seed, folder=arguments.runs, size=size)))
            print(f"txl recl {runs} {' '.join(flags)} --split test --json {arguments.runs}/recl-{seed}.json")
        return
    try:
        work = partial(measure, rows=rows, folder=arguments.runs, size=size, flags=flags)
        side_by_side(work, seeds, jobs=arguments.jobs)
    except (TxlError, RuntimeError) as error:
        sys.exit(str(error))
    print("\n".join(table_of(rows.rows)))


if __name__ == "__main__":
    main()
