"""Count the different shapes of micro-batches of the recipes on a GPU, and their padded rows. It needs no GPU.

    python -m tools.benchmarks.count_graphs [--text FILE] [--steps 5000] [--multiple 128]
    python -m tools.benchmarks.count_graphs --steps 2                      the smallest size, some seconds

Each shape of a micro-batch needs its own CUDA graph. The program makes the batches of one rank as in training
(`BatchMaker`) from three kinds of token ids, and prints a table:

    zipf    independent random words; the frequency of a word is proportional to its rank to the power -1.2
    text    the words of FILE in order; the lanes (batch rows) begin at equal distances; an id is a word's rank
    spread  the same as text, but each id is moved to the rank in the recipe's vocabulary that has the same cumulative
            share of tokens

Padded rows are given as a share of the rows of tokens, over all clusters, and as the share of operations that they add
to the softmax. The ids of spread contain as many rare words as those of zipf, but in clumps as in real text. By default
the rows of a cluster are padded to a fixed ladder of sizes. `--multiple` pads them to a multiple of a number instead.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tools.benchmarks.measuring import announced, positive
from txl_dist.config.load import Config, load_config
from txl_dist.console.formatting import format_table
from txl_dist.data.loader.stream import plain_segment
from txl_dist.train.batch import BatchMaker
from txl_dist.vocabulary_clusters import ZIPF_EXPONENT, cluster_edges

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = {
    "enwik8_base": 204,
    "enwik8_large": 204,
    "wt103_base": 267_735,
    "nvidia_wt103_base": 267_735,
    "wt103_large": 267_735,
}
"""Recipes with the size of their vocabularies in tokens."""

Ids = npt.NDArray[np.int64]


class Found(NamedTuple):
    """Results for the micro-batches of one rank."""

    num_shapes: int
    padded_rows: float
    """Padded rows as a share of the rows of tokens, over the embedding and the softmax where they have clusters."""
    padded_softmax: float
    """Operations of the softmax for padded rows, as a share of its operations for tokens."""
    most_frequent: tuple[int, ...]
    """Rows of each cluster in the most frequent shape of the softmax. The softmax does not use the first number."""


def word_ids(file: Path) -> Ids:
    """Return the ids of a text's words and line ends. An id is the rank of the word by its frequency in the text."""
    words = file.read_text(encoding="utf-8").replace("\n", " <eos> ").split()
    ranks = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common())}
    return np.array([ranks[word] for word in words])


def shares_below(vocab_size: int) -> npt.NDArray[np.float64]:
    """Return for each rank of the vocabulary the share of tokens with a smaller rank, [V + 1]."""
    below = (np.arange(vocab_size + 1) + 0.5) ** (1 - ZIPF_EXPONENT)
    shares: npt.NDArray[np.float64] = (below[0] - below) / (below[0] - below[-1])
    return shares


def spread(ids: Ids, *, vocab_size: int) -> Ids:
    """Move each id to the rank in the whole vocabulary that has the same share of tokens before it."""
    counts = np.bincount(ids)
    middle = (np.cumsum(counts) - counts / 2) / len(ids)
    return (np.searchsorted(shares_below(vocab_size), middle) - 1).clip(0)[ids]


def microbatches(source: Ids | None, config: Config, *, vocab_size: int, num_steps: int) -> Iterator[Ids]:
    """Yield the ids of each step, [lanes, T + 1]. Without a source the ids are random."""
    train, rng, below = config.train, np.random.default_rng(1), shares_below(vocab_size)
    lanes, length = train.microbatch_lanes, train.segment_len
    begins = np.arange(lanes) * (0 if source is None else len(source) // lanes)
    for step in range(num_steps):
        if source is None:
            yield np.searchsorted(below, rng.random((lanes, length + 1))) - 1
        else:
            places = begins[:, None] + step * length + np.arange(length + 1)
            yield np.take(source, places, mode="wrap")


def count(batches: Iterator[Ids], config: Config, *, vocab_size: int, multiple: int = 0) -> Found:
    """Make the batches and count their shapes and padded rows."""
    model = config.model
    edges, whole = cluster_edges(model.cutoffs, vocab_size=vocab_size), (0, vocab_size)
    maker = BatchMaker(edges if model.div_value > 1 else whole, edges, mask_documents=False, rows_multiple=multiple)
    widths = np.diff(edges) // model.div_value ** np.arange(len(edges) - 1)
    shapes: Counter[tuple[tuple[int, ...], ...]] = Counter()
    rows = tokens = softmax = useful = 0
    for ids in batches:
        batch, size = maker.batch(plain_segment(ids)), ids[:, 1:].size
        partitions = [part for part in (batch.token_partition, batch.target_partition) if part]
        shapes[tuple(tuple(len(cluster.rows) for cluster in part) for part in partitions)] += 1
        rows += sum(len(cluster.rows) for part in partitions for cluster in part)
        tokens += size * len(partitions)
        useful += size * widths[0]
        softmax += size * widths[0]
        for cluster, width in list(zip(batch.target_partition or (), widths, strict=False))[1:]:
            useful += int((cluster.rows < size).sum()) * width
            softmax += len(cluster.rows) * width
    most_frequent = shapes.most_common(1)[0][0]
    return Found(len(shapes), rows / max(1, tokens) - bool(tokens), softmax / useful - 1, (most_frequent or ((),))[-1])


def main() -> int:
    """Count for each recipe and print the table."""
    parser = argparse.ArgumentParser(description="Count shapes and padded rows of the recipes' micro-batches on a GPU.")
    parser.add_argument("--text", type=Path, metavar="FILE", help="also count the micro-batches of this text")
    parser.add_argument("--steps", type=positive, default=5000, help="micro-batches of each recipe")
    parser.add_argument(
        "--multiple",
        type=int,
        default=0,
        help="pad the rows of each cluster to a multiple of this number; 0 means the fixed ladder of sizes",
    )
    arguments = parser.parse_args()
    ranks = word_ids(arguments.text) if arguments.text else None
    table = [["recipe", "ids", "graphs", "padded rows", "added to softmax", "most frequent"]]
    for name in announced(list(RECIPES), what="recipe"):
        vocab_size = RECIPES[name]
        config = load_config(CONFIGS / f"{name}.toml")
        sources: dict[str, Ids | None] = {"zipf": None}
        if ranks is not None and not config.model.cutoffs:
            sources["text"] = ranks % vocab_size
        elif ranks is not None:
            sources |= {"text": ranks, "spread": spread(ranks, vocab_size=vocab_size)}
        for kind, source in sources.items():
            batches = microbatches(source, config, vocab_size=vocab_size, num_steps=arguments.steps)
            found = count(batches, config, vocab_size=vocab_size, multiple=arguments.multiple)
            shares = [f"{found.padded_rows:.1%}", f"{found.padded_softmax:.1%}"]
            table.append([name, kind, str(found.num_shapes), *shares, " ".join(map(str, found.most_frequent))])
    print(*format_table(table), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
