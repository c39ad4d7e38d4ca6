"""Measure the time per evaluated token: the paper's table 9 on a CPU, and our cached evaluation against the original
code.

    python -m tools.benchmarks.evaluation [--peer-original DIR] [--only paper | original | precision]

**paper** uses the model of enwik8_base (12 layers of width 512, a vocabulary of 256 bytes, random weights) and one row
of text. Each token whose loss is computed attends to as many tokens as the attention length says, including itself.
This is `same_length`, with which the original code evaluates.

    vanilla, fused   a Transformer without memory, whose window of this many tokens moves by one for each token: all
                     layers for all tokens of the window, logits for the last token. Attention is torch's fused one
                     with is_causal.
    vanilla, plain   the same with a matrix of scores: product, mask, softmax, product
    recurrence       evaluation as in the original code: hidden states of the past are joined with a segment, and the
                     keys, values and distances of all tokens are projected again. With --peer-original it runs the
                     authors' code with our weights. Without it our plain model runs, which does the same with fewer
                     copies.
    cached           our evaluation with a cache of keys and values (`inference.kv_cache`)

The last two variants run segments of --tokens tokens over a memory of the attention length. Their losses of the same
text must agree to 1e-4.

**original** (needs --peer-original) uses 4 layers of width 256 in fp32. It computes the losses of all tokens with a
full memory. The losses of the original code and of ours must agree to 1e-4.

**precision** compares our cached evaluation in bf16 with fp32, at 1 and 16 rows, for the sizes of the quickstart (4
layers of width 128, segments of 64 tokens, memory 128) and for 6 layers of width 512 (segments of 128, memory 512).
Weights are random. `loss error` is the difference of the mean losses of one segment.

    x by min, x by median   time per token of the first row / time per token of this row
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.benchmarks.decode import SIZES
from tools.benchmarks.measuring import (
    Timing,
    add_measure_options,
    announced,
    interleaved,
    print_table,
    speedup,
    write_json,
)
from tools.benchmarks.peers import original
from tools.benchmarks.trainers import PeerTrainer, Sizes
from txl_dist.config.schema import ModelSection
from txl_dist.inference.bundle import copy_weights
from txl_dist.inference.kv_cache import FrozenModel
from txl_dist.model.block import Block
from txl_dist.model.positions import distance_encoding
from txl_dist.model.transformer_xl import TransformerXL

TOLERANCE = 1e-4
"""Largest allowed difference, in nats, between the losses of the variants recurrence and cached."""
BASE = ModelSection(
    num_layers=12, width=512, num_heads=8, head_width=64, ff_width=2048, dropout=0.0, same_length="memory"
)
SMALL = ModelSection(num_layers=4, width=256, num_heads=4, head_width=64, ff_width=1024, dropout=0.0)
WORDS = SMALL.model_copy(update={"cutoffs": (10_000, 20_000, 40_000)})
TINY = ModelSection(num_layers=2, width=32, num_heads=2, head_width=16, ff_width=64, dropout=0.0, same_length="memory")

Run = Callable[[Tensor, Tensor], Tensor]
"""A function that returns the losses nll_BT of the target tokens. It continues the text of its earlier calls."""


class Variant(NamedTuple):
    """A variant of evaluation that is timed."""

    run: Callable[[], object]
    num_tokens: int
    """Number of tokens that one call of `run` evaluates."""


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention with a matrix of scores."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return cast(Tensor, scores.masked_fill_(future, float("-inf")).softmax(-1) @ value)


def fused_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention with torch's fused function."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@torch.inference_mode()
def vanilla(model: TransformerXL, tokens_BT: Tensor, *, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Return log p_BV of the token after a window, from a model with absolute positions."""
    section = model.section
    hidden = model.embedding(tokens_BT)
    hidden = hidden + distance_encoding(tokens_BT.shape[1], width=section.width, clamp_len=0, like=hidden)
    for block in cast(Sequence[Block], model.blocks):
        query = block.attention.query(hidden).unflatten(-1, (section.num_heads, -1)).transpose(1, 2)
        key, value = block.project_key_value(hidden).permute(2, 0, 3, 1, 4)
        context = attend(query, key, value).transpose(1, 2).flatten(2)
        hidden = block.finish(hidden, block.attention.output(context))
    return model.softmax.log_probabilities(hidden[:, -1])


def recurrence(model: TransformerXL, *, num_rows: int, memory_len: int) -> Run:
    """Return a `Run` of our plain model over a memory of hidden states."""
    memory = [model.empty_memory(num_lanes=num_rows, memory_len=memory_len)]

    @torch.inference_mode()
    def run(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        hidden_BTD, memory[0] = model(tokens_BT, memory[0])
        return model.softmax.losses(hidden_BTD, targets_BT)

    return run


def theirs(peer: PeerTrainer, *, segment_len: int, memory_len: int) -> Run:
    """Return a `Run` of the original code, called as its eval.py calls it."""
    network, memory = peer.model.eval(), [()]
    network.reset_length(segment_len, 0, memory_len)
    network.crit.keep_order = True  # otherwise it returns the losses cluster by cluster

    @torch.no_grad()
    def run(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        losses, *memory[0] = network(tokens_BT.t().contiguous(), targets_BT.t().contiguous(), *memory[0])
        return cast(Tensor, losses.t())

    return run


def cached(frozen: FrozenModel, *, num_rows: int, segment_len: int, memory_len: int) -> Run:
    """Return a `Run` of our evaluation with a cache of keys and values."""
    ring = frozen.ring(num_rows=num_rows, memory_len=memory_len, chunk_len=segment_len)
    return lambda tokens_BT, targets_BT: frozen.losses(frozen.run(tokens_BT, ring), targets_BT)


def filled(runs: Sequence[Run], *, vocab_size: int, num_rows: int, segment_len: int, memory_len: int) -> float:
    """Run text through all variants until their memories are full, and one segment more. Return the largest difference
    of the losses."""
    generator, num_segments = torch.Generator().manual_seed(0), -(-memory_len // segment_len) + 1
    ids_BS = torch.randint(vocab_size, (num_rows, num_segments * segment_len + 1), generator=generator)
    for start in range(0, num_segments * segment_len, segment_len):
        tokens_BT, targets_BT = (ids_BS[:, start + i : start + i + segment_len] for i in (0, 1))
        losses = [run(tokens_BT, targets_BT) for run in runs]
    worst = max(float((one - losses[-1]).abs().max()) for one in losses)
    assert worst <= TOLERANCE, f"losses differ by {worst:.1e}"
    return worst


def models(
    section: ModelSection, vocab_size: int, peer_original: Path | None
) -> tuple[TransformerXL, PeerTrainer | None]:
    """Return our model and, if its folder is given, the original code's model. Both have the same weights."""
    torch.manual_seed(0)
    model, peer = TransformerXL(section, vocab_size=vocab_size).eval(), None
    if peer_original is not None:
        peer = PeerTrainer(original(peer_original), Sizes(section, vocab_size, 1, 1, 1))
        with torch.no_grad():
            copy_weights(model, peer.imported().weights)
    return model, peer


def table_of(variants: dict[str, Variant], *, rounds: int, facts: dict[str, object]) -> list[dict[str, object]]:
    """Time the variants and return a row per variant."""
    timings = interleaved({name: variant.run for name, variant in variants.items()}, rounds=rounds)
    per_token = {name: Timing(*(ms / variants[name].num_tokens for ms in timing)) for name, timing in timings.items()}
    base, table = next(iter(variants)), []
    for name, timing in per_token.items():
        by_min, by_median = speedup(per_token, name, base=base)
        row: dict[str, object] = facts | {"variant": name, "min ms per token": timing.min_ms}
        table.append(row | {"median ms": timing.median_ms, "x by min": by_min, "x by median": by_median})
    return table


def papers_table(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure the table `paper`. See the module's docstring."""
    section, vocab_size, segment_len = (TINY if arguments.tiny else BASE), 256, arguments.tokens
    model, peer = models(section, vocab_size, arguments.peer_original)
    torch.manual_seed(0)
    absolute = TransformerXL(section.model_copy(update={"positions": "absolute"}), vocab_size=vocab_size).eval()
    frozen, table = FrozenModel(model), []
    for length in announced(arguments.lengths, what="attention length"):
        window = torch.randint(vocab_size, (1, length))
        tokens, targets = torch.randint(vocab_size, (2, 1, segment_len))
        sizes = {"segment_len": segment_len, "memory_len": length}
        before = theirs(peer, **sizes) if peer else recurrence(model, num_rows=1, memory_len=length)
        after = cached(frozen, num_rows=1, **sizes)
        worst = filled([before, after], vocab_size=vocab_size, num_rows=1, **sizes)
        variants = {
            "vanilla, fused": Variant(partial(vanilla, absolute, window, attend=fused_attention), 1),
            "vanilla, plain": Variant(partial(vanilla, absolute, window, attend=plain_attention), 1),
            "recurrence": Variant(partial(before, tokens, targets), segment_len),
            "cached": Variant(partial(after, tokens, targets), segment_len),
        }
        if arguments.skip_plain:
            del variants["vanilla, plain"]
        table += table_of(variants, rounds=arguments.rounds, facts={"attention": length, "loss error": worst})
        print_table(f"attention length {length}", table[-len(variants) :])
    return table


def originals_table(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure the table `original`. See the module's docstring."""
    table = []
    cases = [(TINY, 256, 2, 16, 32)] if arguments.tiny else [(SMALL, 256, 4, 64, 640), (SMALL, 256, 2, 64, 2048)]
    cases += [] if arguments.tiny else [(WORDS, 60_000, 4, 64, 640)]
    for section, vocab_size, num_rows, segment_len, memory_len in cases:
        model, peer = models(section, vocab_size, arguments.peer_original)
        assert peer is not None
        sizes = {"segment_len": segment_len, "memory_len": memory_len}
        runs = [theirs(peer, **sizes), cached(FrozenModel(model), num_rows=num_rows, **sizes)]
        worst = filled(runs, vocab_size=vocab_size, num_rows=num_rows, **sizes)
        tokens, targets = torch.randint(vocab_size, (2, num_rows, segment_len))
        variants = {
            name: Variant(partial(run, tokens, targets), num_rows * segment_len)
            for name, run in zip(("original", "cached"), runs, strict=True)
        }
        facts = {"vocabulary": vocab_size, "tokens, memory, rows": f"{segment_len}, {memory_len}, {num_rows}"}
        table += table_of(variants, rounds=arguments.rounds, facts=facts | {"loss error": worst})
    return table


def precision_table(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure the table `precision`. See the module's docstring."""
    table = []
    vocab_size = 4096
    cases = [("tiny", TINY, 16, 32)]
    if not arguments.tiny:
        cases = [("quickstart", SIZES["quickstart"], 64, 128), ("wide", SIZES["wide"], 128, 512)]
    for size, section, segment_len, memory_len in cases:
        for num_rows in (1, 16):
            tokens, targets = torch.randint(vocab_size, (2, num_rows, segment_len))
            variants = {}
            losses = []
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
                model, _ = models(section, vocab_size, None)
                frozen = FrozenModel(model.to(dtype))
                run = cached(frozen, num_rows=num_rows, segment_len=segment_len, memory_len=memory_len)
                for _ in range(memory_len // segment_len):
                    run(tokens, targets)
                losses.append(float(run(tokens, targets).mean()))
                variants[name] = Variant(partial(run, tokens, targets), num_rows * segment_len)
            facts: dict[str, object] = {"size": size, "rows": num_rows, "loss error": abs(losses[1] - losses[0])}
            table += table_of(variants, rounds=arguments.rounds, facts=facts)
    return table


def main() -> None:
    """Measure the chosen tables and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-original", type=Path, metavar="DIR", help="folder `pytorch` of the authors' code")
    parser.add_argument("--lengths", type=int, nargs="+", default=[800, 1800, 2800, 3800], help="attention lengths")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a segment, for recurrence and cached")
    parser.add_argument(
        "--skip-plain", action="store_true", help="do not measure 'vanilla, plain', which takes longest"
    )
    parser.add_argument("--tiny", action="store_true", help="use a tiny size that takes seconds, to try the program")
    add_measure_options(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tables = {}
    if arguments.only in (None, "paper"):
        tables["the paper's table 9: time per token, one row, fp32, 1 thread"] = papers_table(arguments)
    if arguments.only in (None, "original") and arguments.peer_original:
        tables["cached evaluation beside the original's code, fp32, 1 thread"] = originals_table(arguments)
    if arguments.only in (None, "precision"):
        tables["cached evaluation in fp32 and bf16, 1 thread"] = precision_table(arguments)
    for title, table in tables.items():
        print_table(title, table)
    if arguments.json:
        write_json(arguments.json, tables)


if __name__ == "__main__":
    main()
