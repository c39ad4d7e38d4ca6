"""Train the recipes for two cores, evaluate them as their pages say, and record a row per score.

    python -m tools.experiments.recipes books_bytes_cpu --precision bf16  trains or resumes, then scores and records
    python -m tools.experiments.recipes --table                           the table of notebook/results.md

Prepare the corpus first, as the recipe's header says. The recorded seconds contain training, its evaluations and
checkpoints (`trainings.seconds_of`). Several scores are computed in parallel, each on one thread. A score that has a
row for the same settings and corpus is not computed again. A run is not trained if all its scores have rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tools.benchmarks.measuring import announced
from tools.experiments.recording import NOTEBOOK, ROOT, Rows, cpu, markdown, put_table, today
from tools.experiments.texts import mark_of_text, marked_text
from tools.experiments.trainings import (
    CommandError,
    commits_of,
    flags_of,
    mark_of,
    named,
    run_txl,
    seconds_of,
    side_by_side,
    starts_of,
)
from txl_dist.artifacts import DONE, LOG, SETTINGS
from txl_dist.config.load import Config, changed, load_config
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.errors import ConfigError, DataError, TxlError

RECORDS, PAGE = NOTEBOOK / "recipes.csv", NOTEBOOK / "results.md"
BEGIN = "<!-- table: python -m tools.experiments.recipes --table -->"
_CHARACTERS = (
    "--split valid --num-lanes 1 --memory-len 256",
    "--split valid --protocol nanogpt --segment-len 256",
)
SCORES = {
    "tinyshakespeare_cpu": _CHARACTERS,
    "tinyshakespeare_cpu_2h": _CHARACTERS,
    "wikitext2_cpu": ("--split valid --num-lanes 1", "--split test --num-lanes 1"),
    "books_bytes_cpu": ("--split valid --num-lanes 16", "--split test --num-lanes 16"),
    "books_bpe_cpu": ("--split valid --num-lanes 16", "--split test --num-lanes 16"),
    "stdlib_cpu": ("--split valid --num-lanes 16",),
}
"""Flags of `txl evaluate` for each recipe. They include the flags in the recipe's header."""
COLUMNS = (
    *("recipe", "parameters", "seed", "ranks", "precision", "steps", "seconds", "settings", "corpus", "score"),
    *("tokens", "nats", "bits_per_byte", "ppl", "text", "commit", "cpu", "date"),
)


def train(recipe: Path, config: Config, *, ranks: int) -> None:
    """Train the run with these settings to its end, or resume it. Raises TxlError if it does not reach its end."""
    run = Path(config.run.dir)
    if (run / SETTINGS).exists() and load_config(run / SETTINGS) != config:
        raise ConfigError(f"{run} was begun with settings that differ from {recipe.name}. Move {run} to another place.")
    if not (run / DONE).exists():
        launcher = [sys.executable, "-m", "txl_dist", "launch", "--num_accelerators", str(ranks), str(recipe)]
        if code := subprocess.run([*launcher, *flags_of(config, base=recipe)], check=False).returncode:
            log = f", and in {run / LOG}" if (run / LOG).exists() else ""
            raise CommandError(f"{recipe.name} ended with {code}. Read its message above{log}.")


def corpus_of(recipe: Path, config: Config) -> Corpus:
    """Return the corpus of a recipe. Raises ConfigError if it was not prepared."""
    folder = Path(config.data.path)
    if not folder.exists():
        raise ConfigError(
            f"{folder}, which {recipe.name} reads, does not exist. The header of {recipe.name} says how to prepare it."
        )
    return open_corpus(folder)


def words_of(name: str, config: Config, *, corpus: Corpus) -> dict[str, str]:
    """Return the columns that identify the rows of a run."""
    facts = {"recipe": name, "seed": config.run.seed, "precision": config.engine.precision}
    facts |= {"steps": config.train.max_steps, "settings": mark_of(config), "corpus": named(corpus)}
    return {column: str(fact) for column, fact in facts.items()}


def score(flags: str, *, rows: Rows, words: dict[str, str], config: Config) -> None:
    """Score the run of these settings and add the row. Raises TxlError if the evaluation fails."""
    run = Path(config.run.dir)
    result = run / f"score-{flags.replace(' ', '_').replace('--', '')}.json"
    run_txl("evaluate", run, *flags.split(), "--json", result)
    (model,) = json.loads(result.read_text(encoding="utf-8")).values()  # the key is the name of the protocol
    start = starts_of(run)[-1]
    rows.add(
        **words,
        parameters=start["parameters"],
        ranks=start["ranks"],
        seconds=round(seconds_of(run)),
        score=flags,
        tokens=round(model["tokens"]),
        nats=f"{model['loss']:.4f}",
        bits_per_byte=f"{model['bits_per_byte']:.4f}" if "bits_per_byte" in model else None,
        ppl=f"{model['ppl']:.2f}",
        text=text_of(config, flags),
        commit=commits_of(run),
        cpu=cpu(),
        date=today(),
    )


def text_of(config: Config, flags: str) -> str:
    """Return the hash of the scored text. It is empty if only a part was scored, or if the tokenizer loses text."""
    if "--protocol" in flags:
        return ""
    corpus, split = open_corpus(Path(config.data.path)), flags.split()[1]  # --split NAME
    try:
        return mark_of_text(marked_text(corpus.split(split)))
    except DataError:
        return ""


def bring(name: str, *, rows: Rows, precision: str, ranks: int) -> None:
    """Train a recipe and add the rows of its missing scores. Raises TxlError."""
    recipe = ROOT / f"configs/{name}.toml"
    config = changed(load_config(recipe), {"engine.precision": precision})
    words = words_of(name, config, corpus=corpus_of(recipe, config))
    known = {row["score"] for row in rows.rows if words.items() <= row.items()}
    missing = [flags for flags in SCORES[name] if flags not in known]
    if not missing:
        print(f"{name}: all its scores with these settings and this corpus are in {rows.path}")
        return
    train(recipe, config, ranks=ranks)
    side_by_side(partial(score, rows=rows, words=words, config=config), missing, jobs=ranks)


def as_told(row: dict[str, str]) -> str:
    """Return the loss in the usual unit of the data set: bits per byte, perplexity per word, or nats per character."""
    if "nanogpt" in row["score"] or row["recipe"].startswith("tinyshakespeare"):
        return f"{row['nats']} nats per character"
    return f"{float(row['bits_per_byte']):.3f} bits per byte" if row["bits_per_byte"] else f"{row['ppl']} perplexity"


def table_of(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return the Markdown table, a row per score."""
    head = ("recipe", "parameters", "steps", "minutes", "precision", "seed", "scored by", "nats per token", "as told")
    lines = []
    for row in rows:
        parameters, minutes = f"{int(row['parameters']):,}", f"{float(row['seconds']) / 60:.0f}"
        facts = [row["recipe"], parameters, row["steps"], minutes, row["precision"], row["seed"], f"`{row['score']}`"]
        lines.append([*facts, row["nats"], as_told(row)])
    return markdown(head, lines)


def main() -> None:
    """Train and score the named recipes, and write the table if --table is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"recipes to train, one after another: {', '.join(SCORES)}"
    )
    parser.add_argument("--precision", default="fp32", help="type bf16 if the processor has instructions for bf16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="write the table of notebook/results.md from the records")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(SCORES):
        parser.error(f"{', '.join(sorted(unknown))}: not a recipe of this program. The recipes are {', '.join(SCORES)}")
    if not (arguments.names or arguments.table):
        parser.error("type the name of a recipe, or --table")
    try:
        rows = Rows(RECORDS, COLUMNS)
        for name in announced(arguments.names, what="recipe"):
            bring(name, rows=rows, precision=arguments.precision, ranks=arguments.ranks)
    except TxlError as error:
        sys.exit(str(error))
    if arguments.table:
        put_table(PAGE, BEGIN, table_of(rows.rows))


if __name__ == "__main__":
    main()
