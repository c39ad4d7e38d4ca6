"""Compare a whole training step with those of the other codes.

    python -m tools.benchmarks.step --peer-original DIR [--peer-nvidia DIR] [--peer-huggingface] [--sizes SIZES]
                               [--against COMMIT_OR_FOLDER] [--bf16]
    python -m tools.benchmarks.step --switches

A step is forward, loss, backward, clipping and Adam, in fp32 on one thread. All codes begin with the original's
weights, which `txl_dist.convert` converts, and must have its losses over 8 steps (without dropout).

    --sizes wt103        four layers of width 256 with 4 heads, feed-forward 1024, T = M = 128, 8 lanes, and an adaptive
                         softmax over 60,000 words (cutoffs 10k, 20k, 40k, tied, one table), no dropout
            ptb          four layers of width 200 with 4 heads, feed-forward 800, T = M = 64, 32 lanes, 10,000 words
                         (cutoffs 2k, 5k), dropout 0.2
            wide         as ptb, with six layers of width 512, feed-forward 2048 and 16 lanes
            quickstart   the sizes of configs/quickstart.toml, one micro-batch; in comparison with other codes without
                         the final norm, which they do not have
    --switches           measure instead the engine's step at the quickstart's sizes (32 lanes, one rank), with its own
                         settings and with each setting of `switches`: Muon, averages, scalars ...
    --bf16               our step in bf16 too, with fp32 masters, which a CPU with AMX or AVX-512 BF16 computes faster
    --against            a commit, or a folder with another checkout: its version of our step, in a separate process

    x by min, x by median   how many times faster than the baseline, which is the first row of the table
    peak MiB                memory that the first two steps add to the weights, in a new process
    original, fused Adam    the original's step with torch's fused Adam, which our step uses; shows the gain without it
    ours, products alone    the matrix products of our step (see `products`); the rest of the step is the difference
    loss error              largest relative difference from the baseline's loss over 8 steps, each with its own weights
    ops, syncs              operations dispatched in a step, and the number of them that wait for a GPU
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tools.benchmarks.decode import unpacked
from tools.benchmarks.measuring import (
    add_measure_options,
    interleaved,
    peak_in_fresh_process,
    peak_mib,
    print_peak,
    print_table,
    rows,
    speedup,
    write_json,
)
from tools.benchmarks.peers import huggingface, nvidia, original
from tools.benchmarks.products import Products, share_of_products
from tools.benchmarks.switches import SWITCHES, WHOLE, EngineStep, config_with
from tools.benchmarks.trainers import HuggingFaceTrainer, OurTrainer, PeerTrainer, Sizes, Trainer, zipf_segments
from txl_dist.config.load import load_config
from txl_dist.config.schema import ModelSection
from txl_dist.distributed.collectives import distributed_context

HERE = Path(__file__).parent
AGREEING_STEPS = 8
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")


def sizes_of(name: str, *, tiny: bool, last_norm: bool = True) -> Sizes:
    """Return the benchmark's sizes of that name, or sizes that are small enough for a test."""
    if tiny:
        section = _section(2, 32, cutoffs=(100, 200, 400), dropout=0.2 if name == "ptb" else 0.0)
        return Sizes(section, 600, 2, 16, 16)
    if name == "ptb":
        return Sizes(_section(4, 200, cutoffs=(2_000, 5_000), dropout=0.2), 10_000, 32, 64, 64)
    if name == "wide":
        return Sizes(_section(6, 512, cutoffs=(2_000, 5_000), dropout=0.2), 10_000, 16, 64, 64)
    if name == "quickstart":
        config = load_config(HERE.parents[1] / "configs" / "quickstart.toml")
        sizes = Sizes.of(config, vocab_size=4_096, num_lanes=config.train.microbatch_lanes)
        return sizes._replace(model=sizes.model.model_copy(update={"final_norm": last_norm}))
    return Sizes(_section(4, 256, cutoffs=(10_000, 20_000, 40_000)), 60_000, 8, 128, 128)


def _section(num_layers: int, width: int, *, cutoffs: tuple[int, ...], dropout: float = 0.0) -> ModelSection:
    return ModelSection(
        num_layers=num_layers,
        width=width,
        num_heads=2 if width < 64 else 4,
        head_width=16 if width < 64 else width // 4,
        ff_width=2 * width if width < 64 else 4 * width,
        cutoffs=cutoffs,
        dropout=dropout,
    )


def makers(arguments: argparse.Namespace, sizes: Sizes) -> dict[str, Callable[[], Trainer]]:
    """Return a function that builds each variant, the baseline first. All have the original's weights if its folder is
    given."""
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
    if arguments.bf16:
        made["ours, bf16"] = lambda: OurTrainer(sizes, attention="fused", weights=weights, precision="bf16")
    return made


class _Counter(TorchDispatchMode):
    """Counts the dispatched operations, and those among them that wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = self.syncs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        self.syncs += func._schema.name.removeprefix("aten::") in WAITING
        return func(*args, **(kwargs or {}))


def agreement(trainers: dict[str, Trainer], sizes: Sizes) -> dict[str, dict[str, object]]:
    """Compare the losses of all trainers on the same segments, and count the operations of one more step."""
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


class Older:
    """Our step at an older commit, in a separate process. The process makes the segments itself."""

    def __init__(self, commit: str, sizes: Sizes, *, folder: Path) -> None:
        file = folder / "sizes.json"
        # Settings with their default are left out, because an older version may not know them.
        told = sizes._asdict() | {"model": sizes.model.model_dump(mode="json", exclude_defaults=True)}
        file.write_text(json.dumps(told), encoding="utf-8")
        checkout = unpacked(commit, folder, parts=("txl_dist", "tools"))
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "step_worker.py"), str(checkout), str(file)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    def step(self) -> float:
        """Make the next step and return its loss."""
        assert self._process.stdin is not None
        print("step", file=self._process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of --against ended. Read its message above.")
        return line


def _next_step(step: Callable[[np.ndarray], object], segments: Iterator[np.ndarray]) -> object:
    return step(next(segments))


def measure_switches(*, rounds: int) -> list[dict[str, object]]:
    """Return a row for the quickstart's step, for each switch alone, and for the switches of `WHOLE` together."""
    configs = {"adamw": config_with(), **{name: config_with((name,)) for name in SWITCHES}, "whole": config_with(WHOLE)}
    sizes = Sizes.of(configs["adamw"], vocab_size=4_096, num_lanes=configs["adamw"].train.num_lanes)
    given = itertools.cycle(list(itertools.islice(zipf_segments(sizes), 4)))
    with distributed_context(timeout_s=600, num_threads=1) as ranks:
        steps = {name: EngineStep(config, ranks, vocab_size=sizes.vocab_size) for name, config in configs.items()}
        timings = interleaved({name: partial(_next_step, step, given) for name, step in steps.items()}, rounds=rounds)
    cost = {name: {"cost": timings[name].min_ms / timings["adamw"].min_ms} for name in steps}
    return rows(
        timings, base="adamw", more={name: cost[name] | {"parameters": steps[name].parameters} for name in steps}
    )


def main() -> None:
    """Measure all variants, or the switches, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-original", type=Path, metavar="DIR", help="folder `pytorch` of the authors' code")
    parser.add_argument("--peer-nvidia", type=Path, metavar="DIR", help="folder `pytorch` of NVIDIA's code")
    parser.add_argument(
        "--peer-huggingface", action="store_true", help="compare with TransfoXL of the installed transformers"
    )
    parser.add_argument("--sizes", choices=("wt103", "ptb", "wide", "quickstart"), default="wt103")
    parser.add_argument("--bf16", action="store_true", help="also measure our step in bf16")
    parser.add_argument("--against", metavar="COMMIT_OR_FOLDER", help="also measure our step at this commit")
    parser.add_argument(
        "--switches", action="store_true", help="measure the cost of each setting in tools/benchmarks/switches.py"
    )
    parser.add_argument("--tiny", action="store_true", help="use a tiny size that takes seconds, to try the program")
    add_measure_options(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.switches:
        print_table("a step of the quickstart on one rank, fp32, 1 thread", measure_switches(rounds=arguments.rounds))
        return
    has_peers = bool(arguments.peer_original or arguments.peer_nvidia or arguments.peer_huggingface)
    sizes = sizes_of(arguments.sizes, tiny=arguments.tiny, last_norm=not has_peers)
    making, segments = makers(arguments, sizes), zipf_segments(sizes, seed=1)
    if arguments.measure == "memory":
        trainer = making[arguments.only]()
        print_peak(peak_mib(lambda: trainer.step(next(segments)), runs=2))
        return
    wanted = [name for name in making if arguments.only in (None, name)]
    undropped = sizes._replace(model=sizes.model.model_copy(update={"dropout": 0.0}))
    without = makers(arguments, undropped)
    more = agreement({name: without[name]() for name in wanted}, undropped)
    given = list(itertools.islice(segments, 4))
    trainers = {name: making[name]() for name in wanted}
    turns = {name: itertools.cycle(given) for name in trainers}
    steps: dict[str, Callable[[], object]] = {
        name: partial(_next_step, trainer.step, turns[name]) for name, trainer in trainers.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        if arguments.against:
            steps[f"ours at {arguments.against}"] = Older(arguments.against, sizes, folder=Path(folder)).step
        if ours := steps.get("ours"):
            pool = {"pool_numbers": 2**22} if arguments.tiny else {}
            steps["ours, products alone"] = Products.of(ours, **pool)
        timings = interleaved(steps, rounds=arguments.rounds)
    peaks = {name: peak_in_fresh_process(name) if name in trainers else math.nan for name in steps}
    table = rows(timings, base=next(iter(trainers)), peaks=peaks, more=more)
    title = f"a training step of {sizes.tokens:,} tokens, {arguments.sizes}, fp32, 1 thread, {arguments.rounds} rounds"
    print_table(title, table)
    if ours:
        share = share_of_products(ours)
        by_min, by_median = speedup(timings, "ours, products alone", base="ours")
        print(
            f"products: {share:.1%} of our step's self time; the step takes {by_min:.2f} of them alone by min, "
            f"{by_median:.2f} by median; cores with {torch.backends.cpu.get_cpu_capability()}"
        )
        table.append({"variant": "ours", "share of products": share, "of products alone": by_min})
    if arguments.json:
        write_json(arguments.json, {title: table})


if __name__ == "__main__":
    main()
