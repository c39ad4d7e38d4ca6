"""Compare a step of XLNet's objective with a step of next-token prediction.

    python -m tools.benchmarks.permutation [--vocab-sizes 256 8192 32000 131072] [--rounds 8] [--json FILE]

A step is forward pass, loss and backward pass in fp32 on one thread, with fused attention and without dropout. Both
models have the same layers, and a plain softmax whose weights are the embeddings. Both segments have the same number T
of tokens and the same memory. XLNet's objective predicts T / 6 of the tokens, in T + T / 6 rows. Its step advances by
T / 2 tokens, and a step of next-token prediction advances by T. The two steps take turns in one process.

    x by min        how many times faster than next-token prediction
    ms per target   time of a step per predicted token
    ms per token    time of a step per token by which it advances in the text

Limitations: the optimizer is left out, because its work is the same. Choosing targets is left out, because it is done
in the thread that reads the text.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.benchmarks.measuring import announced, interleaved, positive, print_table, rows, write_json
from txl_dist.config.schema import ModelSection, TrainSection
from txl_dist.data.loader.stream import Segment, plain_segment
from txl_dist.data.loader.target_sampler import TargetSampler, TargetSettings
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL
from txl_dist.train.batch import batch_maker

LAYERS: dict[str, Any] = {"num_layers": 4, "width": 256, "num_heads": 4, "head_width": 64, "ff_width": 1024}
TINY: dict[str, Any] = {"num_layers": 1, "width": 32, "num_heads": 2, "head_width": 16, "ff_width": 64}
NEXT, PERMUTATION = "next token", "permutation"


def main() -> None:
    """Measure the vocabularies that the flags name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-sizes", type=positive, nargs="+", default=[256, 8192, 32_000, 131_072])
    parser.add_argument("--segment-len", type=positive, default=128)
    parser.add_argument("--memory-len", type=positive, default=128)
    parser.add_argument("--lanes", type=positive, default=8, help="lanes (batch rows) of a step")
    parser.add_argument("--rounds", type=positive, default=8, help="timed runs of each variant")
    parser.add_argument("--tiny", action="store_true", help="one narrow layer, to try the program")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers = TINY if options.tiny else LAYERS
    train = TrainSection(
        objective="permutation",
        segment_len=options.segment_len,
        reuse_len=options.segment_len // 2,
        memory_len=options.memory_len,
    )
    tables = {}
    for vocab_size in announced(options.vocab_sizes, what="vocabulary"):
        title = f"{vocab_size:,} ids"
        tables[title] = _compare(layers, train, vocab_size=vocab_size, lanes=options.lanes, rounds=options.rounds)
        print_table(title, tables[title])
    if options.json is not None:
        write_json(options.json, tables, lanes=options.lanes, segment_len=train.segment_len, **layers)


def _compare(
    layers: dict[str, Any], train: TrainSection, *, vocab_size: int, lanes: int, rounds: int
) -> list[dict[str, object]]:
    """Return a row of figures for each of the two steps."""
    steps = {
        NEXT: _step(layers, train, vocab_size=vocab_size, lanes=lanes, any_order=False),
        PERMUTATION: _step(layers, train, vocab_size=vocab_size, lanes=lanes, any_order=True),
    }
    timings = interleaved(steps, rounds=rounds)
    targets = {NEXT: lanes * train.segment_len, PERMUTATION: lanes * train.num_predicted}
    tokens = {NEXT: lanes * train.segment_len, PERMUTATION: lanes * train.step_len}
    more = {
        name: {"ms per target": timing.min_ms / targets[name], "ms per token": timing.min_ms / tokens[name]}
        for name, timing in timings.items()
    }
    return rows(timings, base=NEXT, more=more)


def _step(
    layers: dict[str, Any], train: TrainSection, *, vocab_size: int, lanes: int, any_order: bool
) -> Callable[[], None]:
    """Return a function that makes one step. All steps have the same batch and a memory of the step before."""
    torch.manual_seed(0)
    section = ModelSection(**layers, dropout=0.0, share_biases=False, any_order=any_order)
    model = TransformerXL(section, vocab_size=vocab_size, attention="fused").train()
    loss_of = SegmentLoss(model)
    segment = _segment(train.segment_len, vocab_size=vocab_size, lanes=lanes)
    batch = _batch(model, segment, train=train, vocab_size=vocab_size)
    num_targets = float(batch.scored_BT.sum())
    with torch.no_grad():
        empty = model.empty_memory(num_lanes=lanes, memory_len=train.memory_len)
        _, memory = loss_of(batch, empty, num_targets)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss, _ = loss_of(batch, memory, num_targets)
        loss.backward()

    return step


def _segment(segment_len: int, *, vocab_size: int, lanes: int) -> Segment:
    """Return a segment of ids that are frequent by Zipf's law."""
    weights_V = 1 / np.arange(1, vocab_size + 1)
    generator = np.random.default_rng(0)
    ids = generator.choice(vocab_size, (lanes, segment_len + 1), p=weights_V / weights_V.sum())
    return plain_segment(ids.astype(np.int64))


def _batch(model: TransformerXL, segment: Segment, *, train: TrainSection, vocab_size: int) -> Batch:
    """Return the batch of a segment, with targets of XLNet's objective if the model predicts in any order."""
    maker = batch_maker(model, mask_documents=False)
    if not model.section.any_order:
        return maker.batch(segment)
    sampler = TargetSampler(TargetSettings.of(train), seed=0, begins_word_V=np.ones(vocab_size, dtype=bool))
    lanes = segment.tokens.shape[0]
    targets = sampler.draw(segment, lanes=range(lanes), positions=[0] * lanes)
    return maker.ordered_batch(segment, targets)


if __name__ == "__main__":
    main()
