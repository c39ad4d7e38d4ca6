"""Measure the losses of the quick start over several seeds, for the README, and compare precisions with other recipes.

    python -m tools.experiments.quickstart --seeds 3       prepare, train and evaluate each seed, one after the other
    python -m tools.experiments.quickstart --precision bf16 --recipe quickstart    in bf16, with configs/quickstart.toml
    python -m tools.experiments.quickstart --table         print the README's table and all figures

Each seed is trained and evaluated by the commands of `launch/quickstart.sh`. A row is appended to
notebook/quickstart.csv as soon as a seed is evaluated. A seed that has a row from this processor is not trained again.
`ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2` makes a processor with AVX-512 compute like a processor without
it. Losses do not depend on other programs on the machine. `tools.experiments.speedrun` measures seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.experiments.recording import NOTEBOOK, ROOT, append_rows, commit, cpu, markdown, read_rows, spread, today
from tools.experiments.trainings import run_txl
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.errors import TxlError

RECIPES = ("modern_quickstart", "quickstart", "stdlib_cpu")
"""Recipes in `configs/` that can be measured, all on the same corpus. The quick start trains the first one."""
PRECISIONS = ("fp32", "bf16")
RECORDS = NOTEBOOK / "quickstart.csv"
RANKS = 2
LABELS = {
    "model": "the model",
    "no_memory": "without its memory",
    "bigram": "training text's bigram",
    "order_0": "training text's frequencies",
}
"""Columns of the records that contain scores, with their names in the table."""


class Record(NamedTuple):
    """Scores of one seed in bits per byte of the validation split."""

    recipe: str
    precision: str
    """Value of engine.precision during the training."""
    seed: int
    model: float
    no_memory: float
    bigram: float
    order_0: float
    nats_per_token: float
    """Validation loss of the model in nats per token."""
    corpus: str
    commit: str
    cpu: str
    kernels: str
    """Widest vector instructions that torch uses, `AVX2` or `AVX512` for example."""
    torch: str
    date: str


def train_seed(recipe: str, *, precision: str, seed: int, corpus: Path, run: Path, settings: Sequence[object]) -> None:
    """Train one seed of a recipe on two ranks, with further settings. Raises CommandError if that fails."""
    own = ["--data.path", corpus, "--run.dir", run, "--run.seed", seed, "--engine.precision", precision]
    run_txl("launch", "--num_accelerators", RANKS, ROOT / f"configs/{recipe}.toml", *own, *settings)


def measure(recipe: str, *, precision: str, seed: int, corpus: Path, run: Path) -> Record:
    """Train and evaluate one seed of a recipe. Raises CommandError if a command fails."""
    import torch

    train_seed(recipe, precision=precision, seed=seed, corpus=corpus, run=run, settings=())
    results = run / "evaluation.json"
    run_txl("evaluate", run, "--without-memory", "--baselines", "--json", results)
    scores = read_scores(results)

    def bits_of(name: str) -> float:
        return round(scores[name]["bits_per_byte"], 4)

    return Record(
        recipe=recipe,
        precision=precision,
        seed=seed,
        model=bits_of("model"),
        no_memory=bits_of("memory off"),
        bigram=bits_of("bigram"),
        order_0=bits_of("order 0"),
        nats_per_token=round(scores["model"]["loss"], 4),
        corpus=open_corpus(corpus).fingerprint[:12],
        commit=commit(),
        cpu=cpu(),
        kernels=torch.backends.cpu.get_cpu_capability(),
        torch=torch.__version__,
        date=today(),
    )


def read_scores(path: Path) -> dict[str, dict[str, float]]:
    """Return the scores in a JSON file of `txl evaluate`, by the name of the score without the part in brackets."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return {name.partition(" (")[0]: values for name, values in content.items()}


def table_of(records: Sequence[Record]) -> list[str]:
    """Return the README's table in Markdown: a row per score and a column per precision, with the mean and the range
    over the seeds and processors of the quick start's recipe."""
    groups = {}
    for precision in PRECISIONS:
        groups[precision] = [row for row in records if (row.recipe, row.precision) == (RECIPES[0], precision)]
    measured = {precision: rows for precision, rows in groups.items() if rows}
    lines = []
    for column, label in LABELS.items():
        cells = [mean_and_range([getattr(row, column) for row in rows]) for rows in measured.values()]
        lines.append([label, *cells])
    return markdown(("bits per byte", *measured), lines)


def mean_and_range(values: Sequence[float]) -> str:
    """Return a mean with its lowest and highest value as text. It is one number if all are equal after rounding."""
    lowest, highest = f"{min(values):.2f}", f"{max(values):.2f}"
    if lowest == highest:
        return lowest
    return f"{statistics.fmean(values):.2f} ({lowest} to {highest})"


def summary_of(records: Sequence[Record]) -> list[str]:
    """Return a line per recipe, processor, kind of kernels and precision: number of seeds and losses."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        groups.setdefault((record.recipe, record.cpu, record.kernels, record.precision), []).append(record)
    lines = []
    for (recipe, processor, kernels, precision), rows in groups.items():
        losses = spread([row.nats_per_token for row in rows], digits=4)
        bits = mean_and_range([row.model for row in rows])
        lines.append(
            f"{recipe}, {processor}, {kernels} kernels, {precision}, {len(rows)} seeds: "
            f"{bits} bits per byte, {losses} nats per token"
        )
    return lines


def main() -> None:
    """Measure the seeds without a row, or print the table."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N - 1 (default 3)")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="engine.precision (default fp32)")
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0], help=f"default {RECIPES[0]}")
    parser.add_argument(
        "--corpus",
        type=Path,
        default=Path("data/stdlib"),
        help="folder of the corpus; it is prepared if it does not exist",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart_seeds"), help="folder of the runs")
    parser.add_argument("--table", action="store_true", help="print the README's table and all figures")
    options = parser.parse_args()
    if options.table:
        records = read_rows(RECORDS, Record)
        print("\n".join([*table_of(records), "", *summary_of(records)]))
        return
    corpus = options.corpus.resolve()
    if not (corpus / "index.json").is_file():
        run_txl("prepare", "stdlib", "--out", corpus, "--tokenizer", "bpe", "--vocab-size", 4096)
    kernels = torch.backends.cpu.get_cpu_capability()
    fingerprint = open_corpus(corpus).fingerprint[:12]
    for seed in range(options.seeds):
        case = (options.recipe, options.precision, seed)
        known = {
            (row.recipe, row.precision, row.seed, row.corpus, row.cpu, row.kernels)
            for row in read_rows(RECORDS, Record)
        }
        if (*case, fingerprint, cpu(), kernels) in known:
            continue
        name = f"{options.recipe}-{options.precision}-{kernels}-seed-{seed}"
        print(f"{name}, of {options.seeds} seeds ...", file=sys.stderr, flush=True)
        run = options.out.resolve() / name
        record = measure(options.recipe, precision=options.precision, seed=seed, corpus=corpus, run=run)
        append_rows(RECORDS, Record._fields, [record])
        print(record, flush=True)


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"quickstart: {error}")
