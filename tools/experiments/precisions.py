"""Compare the losses of bf16 and fp32 over several seeds, with the recipes for two cores at a reduced number of steps.

    python -m tools.experiments.precisions books_bpe_cpu --steps 300      train and record both precisions, three seeds
    python -m tools.experiments.precisions books_bpe_cpu --corpus DIR     its corpus, if it is in another folder
    python -m tools.experiments.precisions --table                        write the table of notebook/results.md

Prepare the corpus first, as the recipe's header says. Each run trains on two ranks with the recipe's settings and its
schedule shortened to these steps. The loss is that of `txl evaluate` on the validation split, read by 16 lanes. A row
is on disk as soon as a run is evaluated. A run that has a row from this processor is not repeated.
`tools.experiments.quickstart` compares the shorter recipes over all of their steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.benchmarks.measuring import announced, positive
from tools.experiments.quickstart import PRECISIONS, train_seed
from tools.experiments.recording import NOTEBOOK, ROOT, Rows, commit, cpu, markdown, put_table, spread, today
from tools.experiments.trainings import run_txl
from txl_dist.config.load import load_config
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.errors import TxlError

RECIPES = (
    *("mine", "xlnet_cpu", "tinyshakespeare_cpu", "tinyshakespeare_cpu_2h"),
    *("wikitext2_cpu", "books_bpe_cpu", "books_bytes_cpu"),
)
RECORDS, PAGE = NOTEBOOK / "precisions.csv", NOTEBOOK / "results.md"
BEGIN = "<!-- table: python -m tools.experiments.precisions --table -->"
COLUMNS = ("recipe", "steps", "precision", "seed", "nats", "corpus", "commit", "cpu", "date")


def measure(recipe: str, *, steps: int, precision: str, seed: int, corpus: Path, run: Path) -> float:
    """Train and evaluate one run. Return its validation loss in nats per token. Raises CommandError if that fails."""
    settings = ["--train.max_steps", steps, "--eval.every_steps", 0, "--checkpoint.every_steps", 0]
    train_seed(recipe, precision=precision, seed=seed, corpus=corpus, run=run, settings=settings)
    result = run / "evaluation.json"
    run_txl("evaluate", run, "--num-lanes", 16, "--json", result)
    (score,) = json.loads(result.read_text(encoding="utf-8")).values()
    return float(score["loss"])


def table_of(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return the Markdown table: a row per recipe, number of steps and corpus, with mean and deviation over seeds."""
    groups: dict[tuple[str, str, str], dict[tuple[str, str], float]] = {}
    for row in rows:
        group = groups.setdefault((row["recipe"], row["steps"], row["corpus"]), {})
        group[row["precision"], row["seed"]] = float(row["nats"])
    lines = []
    for (recipe, steps, _), losses in groups.items():
        seeds = [seed for precision, seed in losses if precision == "fp32" and ("bf16", seed) in losses]
        if not seeds:
            continue
        cells = [spread([losses[precision, seed] for seed in seeds], digits=4) for precision in PRECISIONS]
        differences = [losses["bf16", seed] - losses["fp32", seed] for seed in seeds]
        lines.append([recipe, steps, str(len(seeds)), *cells, spread(differences, digits=4, sign="+")])
    return markdown(("recipe", "steps", "seeds", *PRECISIONS, "bf16 less fp32"), lines)


def main() -> None:
    """Train the runs of a recipe that have no rows, and write the table if --table is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", choices=RECIPES, help="recipe in configs/")
    parser.add_argument("--steps", type=positive, default=300, metavar="N", help="steps of each run (default 300)")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="seeds 0 to N - 1 (default 3)")
    parser.add_argument("--corpus", type=Path, help="folder of the corpus (default: that of the recipe)")
    parser.add_argument("--table", action="store_true", help="write the table of notebook/results.md from the records")
    options = parser.parse_args()
    if not (options.recipe or options.table):
        parser.error("type the name of a recipe, or --table")
    rows = Rows(RECORDS, COLUMNS)
    if options.recipe:
        compare(options, rows)
    if options.table:
        put_table(PAGE, BEGIN, table_of(rows.rows))


def compare(options: argparse.Namespace, rows: Rows) -> None:
    """Train each seed in both precisions, and add the rows. Raises TxlError."""
    config = load_config(ROOT / f"configs/{options.recipe}.toml")
    corpus = (options.corpus or Path(config.data.path)).resolve()
    about = {"recipe": options.recipe, "steps": str(options.steps), "cpu": cpu()}
    about["corpus"] = open_corpus(corpus).fingerprint[:12]
    cases = list(itertools.product(range(options.seeds), PRECISIONS))
    for seed, precision in announced(cases, what="run"):
        case = {**about, "precision": precision, "seed": str(seed)}
        if any(case.items() <= row.items() for row in rows.rows):
            continue
        folder = Path(tempfile.mkdtemp())
        nats = measure(
            options.recipe, steps=options.steps, precision=precision, seed=seed, corpus=corpus, run=folder / "run"
        )
        rows.add(**case, nats=f"{nats:.4f}", commit=commit(), date=today())
        shutil.rmtree(folder)


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"precisions: {error}")
