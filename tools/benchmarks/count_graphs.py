"""How many shapes, each a CUDA graph, the micro-batches of the recipes have on a GPU, and how many rows are padding.

    python -m tools.benchmarks.count_graphs [--text FILE] [--steps 5000] [--multiple 128]
    python -m tools.benchmarks.count_graphs --steps 2                      the smallest size, some seconds

Makes the batches of one rank as training does (`BatchMaker`) from three kinds of ids, and prints a table:

    zipf    words drawn independently, the frequency of one falling with the power -1.2 of its rank
    text    the words of FILE in order, lanes beginning at equal distances, each by its rank in FILE
    spread  the same, each word where its share of FILE lies in the recipe's whole vocabulary

Padded rows are counted beside those of tokens, of all clusters, and with what they add to the softmax's operations. A
spread text has as many rare words as the zipf, in clumps as texts have them. `--multiple` pads each cluster to a
multiple of that in place of a rung of the ladder. Needs no GPU.
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
"""With their vocabularies."""

Ids = npt.NDArray[np.int64]


class Found(NamedTuple):
    """What the micro-batches of a rank had."""

    num_shapes: int
    padded_rows: float
    """Beside rows of tokens; of embedding and softmax, where both are cut."""
    padded_softmax: float
    """Beside the operations of the softmax for tokens."""
    most_frequent: tuple[int, ...]
    """Rows of the softmax's clusters, the first of which it does not use."""


def word_ids(file: Path) -> Ids:
    """Of a text's words and ends of lines, by their rank in it."""
    words = file.read_text(encoding="utf-8").replace("\n", " <eos> ").split()
    ranks = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common())}
    return np.array([ranks[word] for word in words])


def shares_below(vocab_size: int) -> npt.NDArray[np.float64]:
    """[V + 1]: share of the words with a smaller rank."""
    below = (np.arange(vocab_size + 1) + 0.5) ** (1 - ZIPF_EXPONENT)
    shares: npt.NDArray[np.float64] = (below[0] - below) / (below[0] - below[-1])
    return shares


def spread(ids: Ids, *, vocab_size: int) -> Ids:
    """Each rank becomes that of the word which has as many tokens before it in the whole vocabulary."""
    counts = np.bincount(ids)
    middle = (np.cumsum(counts) - counts / 2) / len(ids)
    return (np.searchsorted(shares_below(vocab_size), middle) - 1).clip(0)[ids]


def microbatches(source: Ids | None, config: Config, *, vocab_size: int, num_steps: int) -> Iterator[Ids]:
    """[lanes, T + 1] for each step; drawn, where there is no text."""
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
    """Make the batches and look at their shapes."""
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
    """Print the table."""
    parser = argparse.ArgumentParser(description="Count shapes and padded rows of the recipes on a GPU.")
    parser.add_argument("--text", type=Path, metavar="FILE", help="count the micro-batches of this text too")
    parser.add_argument("--steps", type=positive, default=5000, help="micro-batches of each recipe")
    parser.add_argument("--multiple", type=int, default=0, help="pad to a multiple of this; 0 means the ladder")
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
