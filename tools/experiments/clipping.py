"""Share of clipped steps of every recipe, at a size that a CPU can train: is `optim.clip_norm` a limit, or the rate?

    python -m tools.experiments.clipping                    every recipe of configs/ that notebook/clipping.csv lacks
    python -m tools.experiments.clipping ptb --again        one recipe, again
    python -m tools.experiments.clipping --table            write the table of notebook/clipping.md

Each recipe trains on the source text of Python's standard library, in its own kind of tokens. Optimizer, learning
rate, schedule, gradient norm and dropout stay. The schedule ends after `--steps`, and the warm-up takes a quarter of
the steps at most. A recipe of more than 6 million parameters is made smaller: 4 layers, `--lanes` lanes of 64 tokens, a
memory of 64. All train in fp32, on one rank.

Limitations: the gradient of fewer lanes has more noise and a larger norm, and the norm falls in a long run. The
figure is one of a short run of a small model, and no more.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from tools.benchmarks.measuring import announced, positive
from tools.experiments.recording import NOTEBOOK, ROOT, Rows, markdown, origin, put_table
from tools.experiments.trainings import cutoffs_below, records_in, run_txl, train
from txl_dist.config.load import Config, changed, load_config
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.errors import TxlError
from txl_dist.model.flops import count_parameters

RECIPES, RECORDS, PAGE = ROOT / "configs", NOTEBOOK / "clipping.csv", NOTEBOOK / "clipping.md"
BEGIN = "<!-- table: python -m tools.experiments.clipping --table -->"
LARGE = 6_000_000
"""Parameters above which a recipe is made smaller."""


class Tokens(NamedTuple):
    """How a recipe's text becomes tokens here."""

    tokenizer: str
    vocab_size: int


BYTES, WORDS, PIECES = Tokens("byte", 257), Tokens("word", 20_000), Tokens("bpe", 4096)
TOKENS = {
    **dict.fromkeys(("books_bytes_cpu", "tinyshakespeare", "tinyshakespeare_cpu", "tinyshakespeare_cpu_2h"), BYTES),
    **dict.fromkeys(("enwik8_base", "enwik8_large", "text8_base", "text8_large"), BYTES),
    **dict.fromkeys(("lm1b_base", "lm1b_large", "nvidia_wt103_base", "nvidia_wt103_large"), WORDS),
    **dict.fromkeys(("ptb", "wikitext2", "wikitext2_cpu", "wt103_base", "wt103_large"), WORDS),
    **dict.fromkeys(("books_bpe_cpu", "modern_quickstart", "quickstart", "stdlib_cpu"), PIECES),
    "mine": Tokens("bpe", 512),
}
"""{recipe: its kind of tokens}"""
COLUMNS = (
    *("recipe", "optimizer", "lr", "clip_norm", "layers", "lanes", "segment", "tokenizer", "steps"),
    *("clipped_pct", "median_norm", "parameters", "commit", "cpu", "date"),
)


def scaled(config: Config, *, steps: int, vocab_size: int, lanes: int = 8) -> Config:
    """Return the recipe for `steps` steps, and made smaller, to so many lanes, where a CPU could not train it."""
    model, batch, optim = config.model, config.train, config.optim
    limits = {"layers": 4, "lanes": lanes, "tokens": 64}
    cutoffs = cutoffs_below(model.cutoffs, vocab_size=vocab_size)
    ties = model.tie_projections[: len(cutoffs) + 1] if cutoffs else ()
    fitting = changed(config, {"model.cutoffs": cutoffs, "model.tie_projections": ties}).model
    if count_parameters(fitting, vocab_size=vocab_size) <= LARGE:
        limits = dict.fromkeys(limits, 10**9)
    num_lanes = min(batch.num_lanes, limits["lanes"])
    values = {
        "model.num_layers": min(model.num_layers, limits["layers"]),
        "model.cutoffs": cutoffs,
        "model.tie_projections": ties,
        "optim.warmup_steps": min(optim.warmup_steps, steps // 4),
        "train.num_lanes": num_lanes,
        "train.microbatch_lanes": min(batch.microbatch_lanes, num_lanes),
        "train.segment_len": min(batch.segment_len, limits["tokens"]),
        "train.memory_len": min(batch.memory_len, limits["tokens"]),
        "train.max_steps": steps,
        "engine.precision": "fp32",
        "data.eval_split": "",
        "checkpoint.every_steps": steps,
        "metrics.log_every_steps": 1,
        "metrics.sample_every_steps": 0,
    }
    return changed(config, values)


def prepare(tokens: Tokens, *, text: str, out: Path) -> Path:
    """Return the folder of the corpus in these tokens, which is made once."""
    folder = out / f"{tokens.tokenizer}-{tokens.vocab_size}"
    if not folder.exists():
        size = ("--vocab-size", tokens.vocab_size) if tokens.tokenizer != "byte" else ()
        run_txl("prepare", text, "--tokenizer", tokens.tokenizer, *size, "--out", folder)
    return folder


def measure(name: str, *, steps: int, lanes: int, text: str, out: Path, rows: Rows) -> None:
    """Train a recipe for some steps and add its row. Raises TxlError."""
    recipe, run = RECIPES / f"{name}.toml", out / name
    corpus = prepare(TOKENS[name], text=text, out=out)
    vocab_size = open_corpus(corpus).vocab_size
    config = scaled(load_config(recipe), steps=steps, vocab_size=vocab_size, lanes=lanes)
    config = changed(config, {"run.dir": str(run), "data.path": str(corpus)})
    shutil.rmtree(run, ignore_errors=True)
    train(config, base=recipe)
    norms = [record["grad_norm"] for record in records_in(run, "train").values()]
    clipped = sum(norm > config.optim.clip_norm for norm in norms)
    rows.add(
        recipe=name,
        optimizer=config.optim.name,
        lr=f"{config.optim.lr:g}",
        clip_norm=f"{config.optim.clip_norm:g}",
        layers=config.model.num_layers,
        lanes=config.train.num_lanes,
        segment=config.train.segment_len,
        tokenizer=TOKENS[name].tokenizer,
        steps=len(norms),
        clipped_pct=f"{100 * clipped / len(norms):.0f}",
        median_norm=f"{statistics.median(norms):.3g}",
        parameters=count_parameters(config.model, vocab_size=vocab_size),
        **origin(),
    )
    shutil.rmtree(run)  # a checkpoint of gigabytes


def newest(rows: Rows) -> dict[str, dict[str, str]]:
    """Return the last row of each recipe by its name, in the order of the names."""
    return {row["recipe"]: row for row in sorted(rows.rows, key=lambda row: row["recipe"])}


def table_of(rows: Rows) -> list[str]:
    """Return the lines of a Markdown table, a row per recipe."""
    head = ("recipe", "trained at", "`clip_norm`", "median norm", "clipped steps")
    lines = []
    for row in newest(rows).values():
        size = f"{row['layers']} layers, {row['lanes']} x {row['segment']} tokens, {row['steps']} steps"
        is_whole = load_config(RECIPES / f"{row['recipe']}.toml").train.num_lanes == int(row["lanes"])
        size = size if is_whole else f"smaller: {size}"
        lines.append([f"`{row['recipe']}`", size, row["clip_norm"], row["median_norm"], f"{row['clipped_pct']} %"])
    return markdown(head, lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes of configs/; all without any")
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--lanes", type=positive, default=8, help="of a recipe that is made smaller")
    parser.add_argument("--text", default="stdlib", help="input of `txl prepare`")
    parser.add_argument("--out", type=Path, default=Path("runs/clipping"), help="folder of corpora and runs")
    parser.add_argument("--csv", type=Path, default=RECORDS, help="file of the records")
    parser.add_argument("--again", action="store_true", help="also what has a row")
    parser.add_argument("--table", action="store_true", help="write the table of notebook/clipping.md from the records")
    given = parser.parse_args()
    if unknown := set(given.names) - set(TOKENS):
        parser.error(f"{', '.join(sorted(unknown))}: no recipe of configs/. There are {', '.join(sorted(TOKENS))}")
    try:
        rows = Rows(given.csv, COLUMNS)
        known = () if given.again else newest(rows)
        names = [] if given.table else [name for name in given.names or sorted(TOKENS) if name not in known]
        for name in announced(names, what="recipe"):
            measure(name, steps=given.steps, lanes=given.lanes, text=given.text, out=given.out, rows=rows)
    except TxlError as error:
        sys.exit(str(error))
    if given.table:
        put_table(PAGE, BEGIN, table_of(rows))


if __name__ == "__main__":
    main()
