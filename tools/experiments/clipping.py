"""Measure the share of clipped steps of every recipe at a size for a CPU, to see how often `optim.clip_norm` acts.

    python -m tools.experiments.clipping                    every recipe of configs/ without a row in the records
    python -m tools.experiments.clipping ptb --again        one recipe, also if it has a row
    python -m tools.experiments.clipping --table            write the table of notebook/clipping.md

If almost every step is clipped, `optim.clip_norm` determines the step size. Each recipe trains on the source text of
Python's standard library, in its own kind of tokens. Optimizer, learning rate, schedule, clip norm and dropout are
those of the recipe. The schedule ends after `--steps` steps, and the warm-up takes at most a quarter of the steps. A
recipe of more than 6 million parameters is made smaller: 4 layers, `--lanes` lanes (batch rows) of 64 tokens, and a
memory of 64 tokens. Lengths of XLNet's objective shrink with the segment. All recipes train in fp32 on one rank.

Limitations: The gradient of fewer lanes has more noise and a larger norm, and the norm falls in a long run. The figures
describe short runs of small models only.
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
"""Number of parameters above which a recipe is made smaller."""


class Tokens(NamedTuple):
    """Tokenizer with which the text is prepared for a recipe."""

    tokenizer: str
    vocab_size: int


BYTES, WORDS, PIECES = Tokens("byte", 257), Tokens("word", 20_000), Tokens("bpe", 4096)
TOKENS = {
    **dict.fromkeys(("books_bytes_cpu", "tinyshakespeare", "tinyshakespeare_cpu", "tinyshakespeare_cpu_2h"), BYTES),
    **dict.fromkeys(("enwik8_base", "enwik8_large", "text8_base", "text8_large"), BYTES),
    **dict.fromkeys(("lm1b_base", "lm1b_large", "nvidia_wt103_base", "nvidia_wt103_large"), WORDS),
    **dict.fromkeys(("ptb", "wikitext2", "wikitext2_cpu", "wt103_base", "wt103_large"), WORDS),
    **dict.fromkeys(("books_bpe_cpu", "modern_quickstart", "quickstart", "stdlib_cpu", "xl_300m"), PIECES),
    **dict.fromkeys(("xlnet_base", "xlnet_cpu", "xlnet_large"), PIECES),
    "mine": Tokens("bpe", 512),
}
"""Kind of tokens of each recipe, by the recipe's name."""
COLUMNS = (
    *("recipe", "optimizer", "lr", "clip_norm", "layers", "lanes", "segment", "tokenizer", "steps"),
    *("clipped_pct", "median_norm", "parameters", "commit", "cpu", "date"),
)


def scaled(config: Config, *, steps: int, vocab_size: int, lanes: int = 8) -> Config:
    """Return the settings of a recipe for `steps` steps. A recipe that is too large for a CPU is made smaller, with
    `lanes` lanes."""
    model, batch, optim = config.model, config.train, config.optim
    limits = {"layers": 4, "lanes": lanes, "tokens": 64}
    cutoffs = cutoffs_below(model.cutoffs, vocab_size=vocab_size)
    ties = model.tie_projections[: len(cutoffs) + 1] if cutoffs else ()
    fitting = changed(config, {"model.cutoffs": cutoffs, "model.tie_projections": ties}).model
    if count_parameters(fitting, vocab_size=vocab_size) <= LARGE:
        limits = dict.fromkeys(limits, 10**9)
    num_lanes = min(batch.num_lanes, limits["lanes"])
    segment_len = min(batch.segment_len, limits["tokens"])
    shares = {
        f"train.{name}": getattr(batch, name) * segment_len // batch.segment_len
        for name in ("reuse_len", "predicted_len", "order_len")
    }
    values = shares | {
        "model.num_layers": min(model.num_layers, limits["layers"]),
        "model.cutoffs": cutoffs,
        "model.tie_projections": ties,
        "optim.warmup_steps": min(optim.warmup_steps, steps // 4),
        "train.batch_tokens": 0,
        "train.num_lanes": num_lanes,
        "train.microbatch_lanes": min(batch.microbatch_lanes, num_lanes),
        "train.segment_len": segment_len,
        "train.memory_len": min(batch.memory_len, limits["tokens"]),
        "train.max_steps": steps,
        "engine.precision": "fp32",
        "data.eval_split": "",
        "checkpoint.every_steps": steps,
        "checkpoint.every_minutes": 0.0,
        "checkpoint.mirror": "",
        "metrics.log_every_steps": 1,
        "metrics.sample_every_steps": 0,
    }
    return changed(config, values)


def prepare(tokens: Tokens, *, text: str, out: Path) -> Path:
    """Return the folder of the corpus in these tokens. The corpus is prepared if the folder does not exist."""
    folder = out / f"{tokens.tokenizer}-{tokens.vocab_size}"
    if not folder.exists():
        size = ("--vocab-size", tokens.vocab_size) if tokens.tokenizer != "byte" else ()
        run_txl("prepare", text, "--tokenizer", tokens.tokenizer, *size, "--out", folder)
    return folder


def measure(name: str, *, steps: int, lanes: int, text: str, out: Path, rows: Rows) -> None:
    """Train a recipe for some steps and add its row. Raises TxlError if a command fails."""
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
    shutil.rmtree(run)  # the checkpoint can have gigabytes


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
    """Measure the recipes without a row, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes of configs/; the default is all recipes")
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--lanes", type=positive, default=8, help="lanes (batch rows) of a recipe that is made smaller")
    parser.add_argument("--text", default="stdlib", help="input of `txl prepare`")
    parser.add_argument("--out", type=Path, default=Path("runs/clipping"), help="folder of corpora and runs")
    parser.add_argument("--csv", type=Path, default=RECORDS, help="file of the records")
    parser.add_argument("--again", action="store_true", help="also measure recipes that have a row")
    parser.add_argument("--table", action="store_true", help="write the table of notebook/clipping.md from the records")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(TOKENS):
        parser.error(f"{', '.join(sorted(unknown))}: not in configs/. The recipes are {', '.join(sorted(TOKENS))}")
    try:
        rows = Rows(arguments.csv, COLUMNS)
        known = () if arguments.again else newest(rows)
        names = [] if arguments.table else [name for name in arguments.names or sorted(TOKENS) if name not in known]
        for name in announced(names, what="recipe"):
            measure(
                name, steps=arguments.steps, lanes=arguments.lanes, text=arguments.text, out=arguments.out, rows=rows
            )
    except TxlError as error:
        sys.exit(str(error))
    if arguments.table:
        put_table(PAGE, BEGIN, table_of(rows))


if __name__ == "__main__":
    main()
