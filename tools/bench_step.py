"""A whole training step beside the peers'.

    python tools/bench_step.py --peer-original DIR [--peer-nvidia DIR] [--peer-huggingface]

Four layers of width 256 with 4 heads, feed-forward 1024, T = M = 128, 8 lanes, and an adaptive softmax over 60,000
words (cutoffs 10k, 20k, 40k, tied, one table); forward, loss, backward, clipping, Adam; fp32, one thread, no dropout.
All begin with the original's weights, brought over by `txl_dist.convert`, and must give its losses over 8 steps.

    x by min, x by median   how many times faster than the base line: the first of those in the table
    peak MiB                what the first two steps add to the weights, in a fresh process
    original, fused Adam    theirs with torch's fused Adam, which ours use: what of the gain is not the optimizer's
    loss error              largest relative distance from the base line's loss over 8 steps, each on its own weights
    ops, syncs              operations dispatched in a step, and those among them that wait for a GPU
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import (
    add_measure_options,
    interleaved,
    peak_in_fresh_process,
    peak_mib,
    print_peak,
    print_table,
    rows,
    write_json,
)
from peers import huggingface, nvidia, original
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import HuggingFaceTrainer, OurTrainer, PeerTrainer, Sizes, Trainer, zipf_segments

from txl_dist.sections import ModelSection

AGREEING_STEPS = 8
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")


def sizes_of(*, tiny: bool) -> Sizes:
    """The benchmark's, or something as small as a test wants."""
    shape = (2, 32, 2, 16, 64) if tiny else (4, 256, 4, 64, 1024)
    section = ModelSection(
        num_layers=shape[0],
        width=shape[1],
        num_heads=shape[2],
        head_width=shape[3],
        ff_width=shape[4],
        cutoffs=(100, 200, 400) if tiny else (10_000, 20_000, 40_000),
        dropout=0.0,
    )
    return Sizes(section, 600, 2, 16, 16) if tiny else Sizes(section, 60_000, 8, 128, 128)


def makers(arguments: argparse.Namespace, sizes: Sizes) -> dict[str, Callable[[], Trainer]]:
    """How each variant is made; the base line first. All have the weights of the original, where it is given."""
    made: dict[str, Callable[[], Trainer]] = {}
    theirs = PeerTrainer(original(arguments.peer_original), sizes) if arguments.peer_original else None
    weights = theirs.imported().weights if theirs else None
    if arguments.peer_original:
        made["original"] = lambda: PeerTrainer(original(arguments.peer_original), sizes)
        made["original, fused Adam"] = lambda: PeerTrainer(original(arguments.peer_original), sizes, fused=True)
    if arguments.peer_nvidia:
        own = PeerTrainer(nvidia(arguments.peer_nvidia), sizes, nvidia=True)
        made["nvidia"] = lambda: own.begin_as(theirs) if theirs else own
    if arguments.peer_huggingface:
        transfo_xl = huggingface()
        made["huggingface"] = lambda: HuggingFaceTrainer(transfo_xl, sizes, weights=weights)
    made["ours, plain attention"] = lambda: OurTrainer(sizes, attention="plain", weights=weights)
    made["ours"] = lambda: OurTrainer(sizes, attention="fused", weights=weights)
    return made


class _Counter(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = self.syncs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        self.syncs += func._schema.name.removeprefix("aten::") in WAITING
        return func(*args, **(kwargs or {}))


def agreement(trainers: dict[str, Trainer], sizes: Sizes) -> dict[str, dict[str, object]]:
    """Losses of all over the same segments, and what one more step dispatches."""
    segments = list(itertools.islice(zipf_segments(sizes), AGREEING_STEPS + 1))
    losses = {
        name: [float(trainer.step(ids)) for ids in segments[:AGREEING_STEPS]] for name, trainer in trainers.items()
    }
    base = next(iter(losses.values()))
    found: dict[str, dict[str, object]] = {}
    for name, trainer in trainers.items():
        with _Counter() as counter:
            trainer.step(segments[-1])
        error = max(abs(mine - theirs) / theirs for mine, theirs in zip(losses[name], base, strict=True))
        found[name] = {"loss error": error, "ops": counter.ops, "syncs": counter.syncs}
    return found


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-original", type=Path, metavar="DIR", help="folder `pytorch` of the authors' code")
    parser.add_argument("--peer-nvidia", type=Path, metavar="DIR", help="folder `pytorch` of NVIDIA's code")
    parser.add_argument("--peer-huggingface", action="store_true", help="TransfoXL of the installed transformers")
    parser.add_argument("--tiny", action="store_true", help="a size that is over in seconds, to try the program")
    add_measure_options(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = sizes_of(tiny=arguments.tiny)
    making, segments = makers(arguments, sizes), zipf_segments(sizes, seed=1)
    if arguments.measure == "memory":
        trainer = making[arguments.only]()
        print_peak(peak_mib(lambda: trainer.step(next(segments)), runs=2))
        return
    trainers = {name: make() for name, make in making.items() if arguments.only in (None, name)}
    agrees = agreement(trainers, sizes)
    given = list(itertools.islice(segments, 4))
    turns = {name: itertools.cycle(given) for name in trainers}
    timings = interleaved(
        {name: lambda n=name: trainers[n].step(next(turns[n])) for name in trainers}, rounds=arguments.rounds
    )
    peaks = {name: peak_in_fresh_process(name) for name in trainers}
    table = rows(timings, base=next(iter(trainers)), peaks=peaks, more=agrees)
    title = f"a training step of {sizes.tokens:,} tokens, fp32, 1 thread, {arguments.rounds} rounds"
    print_table(title, table)
    if arguments.json:
        write_json(arguments.json, {title: table})


if __name__ == "__main__":
    main()
