"""Measure loss and time of the quick start over several seeds, for the README.

    python -m tools.experiments.quickstart --seeds 3       prepare, train and evaluate each seed, one after the other
    python -m tools.experiments.quickstart --table         print the README's table and all figures

Each seed is trained and evaluated by the commands of `launch/quickstart.sh`. A row is appended to
notebook/quickstart.csv as soon as a seed is evaluated. A seed that has a row from this processor is not trained again.
`ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2` makes a processor with AVX-512 compute like a processor without
it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.experiments.recording import NOTEBOOK, ROOT, append_rows, commit, cpu, markdown, read_rows, today
from tools.experiments.trainings import run_txl
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.errors import TxlError

RECIPE = ROOT / "configs/modern_quickstart.toml"
RECORDS = NOTEBOOK / "quickstart.csv"
RANKS = 2
LABELS = {
    "model": "the model",
    "no_memory": "the model without its memory",
    "bigram": "bigram of the training text",
    "order_0": "frequencies of the training text",
}
"""Columns of the records that contain scores, with their names in the table."""


class Record(NamedTuple):
    """Scores of one seed in bits per byte of the validation split, and the time of its training."""

    seed: int
    model: float
    no_memory: float
    bigram: float
    order_0: float
    nats_per_token: float
    """Validation loss of the model in nats per token."""
    train_s: float
    """Seconds from the start of `txl launch` to its end."""
    corpus: str
    commit: str
    cpu: str
    kernels: str
    """Widest vector instructions that torch uses, `AVX2` or `AVX512` for example."""
    torch: str
    date: str


def measure(*, seed: int, corpus: Path, run: Path) -> Record:
    """Train and evaluate one seed. Raises CommandError if a command fails."""
    import torch

    train_s = run_txl(
        "launch", "--num_accelerators", RANKS, RECIPE, "--data.path", corpus, "--run.dir", run, "--run.seed", seed
    )
    results = run / "evaluation.json"
    run_txl("evaluate", run, "--without-memory", "--baselines", "--json", results)
    scores = read_scores(results)

    def bits_of(name: str) -> float:
        return round(scores[name]["bits_per_byte"], 4)

    return Record(
        seed=seed,
        model=bits_of("model"),
        no_memory=bits_of("memory off"),
        bigram=bits_of("bigram"),
        order_0=bits_of("order 0"),
        nats_per_token=round(scores["model"]["loss"], 4),
        train_s=round(train_s, 1),
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
    """Return the README's table in Markdown: mean and range over all rows, with a column per score."""
    rows = []
    for column, label in LABELS.items():
        values = [getattr(record, column) for record in records]
        rows.append([label, mean_and_range(values)])
    return markdown(("scored", "bits per byte"), rows)


def mean_and_range(values: Sequence[float]) -> str:
    """Return a mean with its lowest and highest value as text. It is one number if all are equal after rounding."""
    lowest, highest = f"{min(values):.2f}", f"{max(values):.2f}"
    if lowest == highest:
        return lowest
    return f"{statistics.fmean(values):.2f} ({lowest} to {highest})"


def summary_of(records: Sequence[Record]) -> list[str]:
    """Return a line per processor and kind of kernels: number of seeds, loss and time."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.cpu, record.kernels), []).append(record)
    lines = []
    for (processor, kernels), rows in groups.items():
        losses = mean_and_range([row.nats_per_token for row in rows])
        bits = mean_and_range([row.model for row in rows])
        seconds = [row.train_s for row in rows]
        lines.append(
            f"{processor}, {kernels} kernels, {len(rows)} seeds: {bits} bits per byte, {losses} nats per token, "
            f"trained in {min(seconds):.0f} to {max(seconds):.0f} s"
        )
    return lines


def main() -> None:
    """Measure the seeds without a row, or print the table."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N - 1 (default 3)")
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
        known = {(row.seed, row.corpus, row.cpu, row.kernels) for row in read_rows(RECORDS, Record)}
        if (seed, fingerprint, cpu(), kernels) in known:
            continue
        print(f"seed {seed} of {options.seeds}, {kernels} ...", file=sys.stderr, flush=True)
        record = measure(seed=seed, corpus=corpus, run=options.out.resolve() / f"{kernels}-seed-{seed}")
        append_rows(RECORDS, Record._fields, [record])
        print(record, flush=True)


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"quickstart: {error}")
