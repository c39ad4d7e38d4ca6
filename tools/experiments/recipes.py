"""What the recipes for two cores come to: trained as they are, scored as their pages say, a row per score.

    python -m tools.experiments.recipes books_bytes_cpu --precision bf16  trains, or goes on, then scores and records
    python -m tools.experiments.recipes --table                           the table of notebook/results.md

The corpus is prepared before, as the recipe's header says. Seconds are those of training, its evaluations and
checkpoints (`trainings.seconds_of`). Scores are made side by side, each on one thread. What has its row, of the same
settings and corpus, is not made again, nor is a run trained whose scores all have theirs.
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
"""Flags of `txl evaluate`, per recipe; those that its header tells are among them."""
COLUMNS = (
    *("recipe", "parameters", "seed", "ranks", "precision", "steps", "seconds", "settings", "corpus", "score"),
    *("tokens", "nats", "bits_per_byte", "ppl", "text", "commit", "cpu", "date"),
)


def train(recipe: Path, config: Config, *, ranks: int) -> None:
    """The run with these settings, to its end, from where it stopped. Raises TxlError if it does not get there."""
    run = Path(config.run.dir)
    if (run / SETTINGS).exists() and load_config(run / SETTINGS) != config:
        raise ConfigError(f"{run} was begun with other settings than {recipe.name} has. Move it away.")
    if not (run / DONE).exists():
        launcher = [sys.executable, "-m", "txl_dist", "launch", "--num_accelerators", str(ranks), str(recipe)]
        if code := subprocess.run([*launcher, *flags_of(config, base=recipe)], check=False).returncode:
            log = f", and in {run / LOG}" if (run / LOG).exists() else ""
            raise CommandError(f"{recipe.name} ended with {code}: why stands above{log}.")


def corpus_of(recipe: Path, config: Config) -> Corpus:
    """What it reads. Raises ConfigError if nobody has prepared it."""
    folder = Path(config.data.path)
    if not folder.exists():
        raise ConfigError(f"{folder}, which {recipe.name} reads, is not there. Its header says how to prepare it.")
    return open_corpus(folder)


def words_of(name: str, config: Config, *, corpus: Corpus) -> dict[str, str]:
    """Of a run's rows: what must be alike for a row to be of it."""
    facts = {"recipe": name, "seed": config.run.seed, "precision": config.engine.precision}
    facts |= {"steps": config.train.max_steps, "settings": mark_of(config), "corpus": named(corpus)}
    return {column: str(fact) for column, fact in facts.items()}


def score(flags: str, *, rows: Rows, words: dict[str, str], config: Config) -> None:
    """Score the run of these settings, and add the row. Raises TxlError if that fails."""
    run = Path(config.run.dir)
    result = run / f"score-{flags.replace(' ', '_').replace('--', '')}.json"
    run_txl("evaluate", run, *flags.split(), "--json", result)
    (model,) = json.loads(result.read_text(encoding="utf-8")).values()  # by the name of its protocol
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
    """Mark of the text that was scored; empty if it was a part of it, or if tokens are not all of it."""
    if "--protocol" in flags:
        return ""
    corpus, split = open_corpus(Path(config.data.path)), flags.split()[1]  # --split NAME
    try:
        return mark_of_text(marked_text(corpus.split(split)))
    except DataError:
        return ""


def bring(name: str, *, rows: Rows, precision: str, ranks: int) -> None:
    """Train a recipe and add the rows of its scores, as far as they are missing. Raises TxlError."""
    recipe = ROOT / f"configs/{name}.toml"
    config = changed(load_config(recipe), {"engine.precision": precision})
    words = words_of(name, config, corpus=corpus_of(recipe, config))
    known = {row["score"] for row in rows.rows if words.items() <= row.items()}
    missing = [flags for flags in SCORES[name] if flags not in known]
    if not missing:
        print(f"{name}: all its scores, of these settings on this corpus, stand in {rows.path}")
        return
    train(recipe, config, ranks=ranks)
    side_by_side(partial(score, rows=rows, words=words, config=config), missing, jobs=ranks)


def as_told(row: dict[str, str]) -> str:
    """The loss in the unit of its field: bits per byte, perplexity per word, or nats per character."""
    if "nanogpt" in row["score"] or row["recipe"].startswith("tinyshakespeare"):
        return f"{row['nats']} nats per character"
    return f"{float(row['bits_per_byte']):.3f} bits per byte" if row["bits_per_byte"] else f"{row['ppl']} perplexity"


def table_of(rows: Sequence[dict[str, str]]) -> list[str]:
    """Markdown: a row per score."""
    head = ("recipe", "parameters", "steps", "minutes", "precision", "seed", "scored by", "nats per token", "as told")
    lines = []
    for row in rows:
        parameters, minutes = f"{int(row['parameters']):,}", f"{float(row['seconds']) / 60:.0f}"
        facts = [row["recipe"], parameters, row["steps"], minutes, row["precision"], row["seed"], f"`{row['score']}`"]
        lines.append([*facts, row["nats"], as_told(row)])
    return markdown(head, lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one after another: {', '.join(SCORES)}")
    parser.add_argument("--precision", default="fp32", help="bf16 where the processor has instructions for it")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="write the table of notebook/results.md from the records")
    given = parser.parse_args()
    if unknown := set(given.names) - set(SCORES):
        parser.error(f"{', '.join(sorted(unknown))}: no recipe that is scored here. There are {', '.join(SCORES)}")
    if not (given.names or given.table):
        parser.error("name a recipe, or --table")
    try:
        rows = Rows(RECORDS, COLUMNS)
        for name in announced(given.names, what="recipe"):
            bring(name, rows=rows, precision=given.precision, ranks=given.ranks)
    except TxlError as error:
        sys.exit(str(error))
    if given.table:
        put_table(PAGE, BEGIN, table_of(rows.rows))


if __name__ == "__main__":
    main()
