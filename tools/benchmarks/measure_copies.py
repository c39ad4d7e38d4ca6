"""Measure how much longer a training step takes with recovery's copies: on the node, and on a partner node too.

    python -m tools.benchmarks.measure_copies [--rounds 20] [--most 6]         steps of about 50 ms, 2 ranks
    python -m tools.benchmarks.measure_copies --config configs/modern_quickstart.toml --most 1  the quick start's step
    python -m tools.benchmarks.measure_copies --copy-every 4         copies every four steps, as with recover.copy_every
    python -m tools.benchmarks.measure_copies --ways off node --rounds 180 --steps 5    a narrow interval, in minutes
    python -m tools.benchmarks.measure_copies --rounds 1 --steps 2             the smallest size, 20 s

Two ranks train in this program's own processes. The ways take turns, a block of steps each, because the speed of a
machine drifts:

    off        no copies
    node       a thread copies the state into memory of another process, as with recover.spares = 1
    partner    the thread also sends it to the process of the other rank over TCP, as with recover.copies = partner

The share is the median, over the rounds, of a block's mean step divided by that of the block without copies. Its
interval has 95 % of the medians of rounds drawn again with replacement. With `--most P` the program exits with code 1
if copies on the node cost more than P percent. Both ranks run on this machine, so the partner's work takes the time of
the same cores. It runs on CPUs only.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.multiprocessing.spawn import spawn

from tools.benchmarks.measure_ends import prepare_corpus
from tools.benchmarks.measuring import announced, positive
from txl_dist.config.load import Config, configure
from txl_dist.data.loader.corruption import CorruptionPolicy
from txl_dist.distributed.collectives import RankInfo, StepFlags, barrier, distributed_context
from txl_dist.distributed.recovery.partner import PartnerAddress
from txl_dist.distributed.recovery.seat import NODE
from txl_dist.distributed.rendezvous import free_port
from txl_dist.io.files import parse_object
from txl_dist.train.batch import batch_maker, read_inputs
from txl_dist.train.checkpoint.partner import find_partner
from txl_dist.train.checkpoint.slots import Share, StateSlots
from txl_dist.train.engine.zero import ZeroEngine
from txl_dist.train.monitoring.stragglers import StepClock
from txl_dist.train.run_plan import plan_run
from txl_dist.train.stability import Health
from txl_dist.train.state import TrainState
from txl_dist.train.stepper import Stepper

NUM_RANKS = 2
HEALTH = Health(losses=(1 / 3,) * 128, grad_norms=(1 / 7,) * 128)
"""Health of a run whose windows for spikes are full. It is a part of each copy."""
WAYS = ("off", "node", "partner")
KEEPER = """
import json, os, sys
from txl_dist.distributed.recovery.partner import PartnerServer
server = PartnerServer(unreachable_s=60.0)
files = [os.memfd_create("slot") for _ in range(4)]
paths = [f"/proc/{os.getpid()}/fd/{file}" for file in files]
print(json.dumps({"paths": paths, "port": server.port, "key": server.key}), flush=True)
sys.stdin.read()
"""
"""Program of a process that keeps copies, as an agent does: the slots of a rank, and those of its partner."""


class Bench:
    """One rank that trains, with slots for copies on its node and slots for copies on a partner node too."""

    def __init__(self, config: Config, ranks: RankInfo, keeper: dict[str, Any], *, copy_every: int) -> None:
        """Build the parts of a run. `keeper` describes the process that keeps this rank's copies.

        The state is copied after each step whose number is a multiple of `copy_every`.
        """
        self._copy_every = copy_every
        context = plan_run(config, ranks).stages[0].context
        self.engine = ZeroEngine(config, vocab_size=context.vocab_size, plan=context.plan, ranks=ranks)
        self.slots: StateSlots | None = None
        """Slots into which the steps of the present block are stored."""
        self._clock = StepClock(ranks.device, sees_forward=True)
        self._stepper = Stepper(
            self.engine,
            self._clock,
            ranks,
            context.plan,
            seed=config.run.seed,
            first_lane=context.lanes.start,
            scored_len=context.scored_len,
            before_reduction=self._wait,
        )
        stream = context.corpora.begin
        num_lanes = context.plan.microbatch_lanes
        empty = self.engine.empty_memory(num_lanes=num_lanes, memory_len=config.train.memory_len)
        self._state = TrainState(0, 0, Health(), stream, (empty,) * context.plan.num_microbatches)
        self._inputs = read_inputs(
            context.corpora.train,
            stream,
            lanes=context.lanes,
            segment_len=config.train.segment_len,
            microbatch_lanes=num_lanes,
            maker=batch_maker(self.engine.model, mask_documents=False),
            damage=CorruptionPolicy(),
            depth=config.data.prefetch_depth,
            device=ranks.device,
        )
        address = PartnerAddress("127.0.0.1", keeper["port"], keeper["key"])
        partner = find_partner(address, rank=ranks.rank, every=1)
        place = SimpleNamespace(share=Share(0, 1), rank=ranks.rank, world_size=ranks.world_size)
        self.by_way = {
            "off": None,
            "node": StateSlots(keeper["paths"][:2], **vars(place)),
            "partner": StateSlots(keeper["paths"][2:], **vars(place), partner=partner),
        }

    def block(self, way: str, *, num_steps: int) -> list[float]:
        """Train with this way of copying. Return the seconds of each step but the first one."""
        barrier()
        self.slots = self.by_way[way]
        times = [self._step() for _ in range(num_steps + 1)]
        self._wait()
        return times[1:]

    def _wait(self) -> None:
        if self.slots is not None:
            self.slots.wait()

    def _step(self) -> float:
        """Make one training step, and begin to store the state after it if a copy is due."""
        began = time.perf_counter()
        self._clock.begin()
        given = next(self._inputs)
        step = self._state.step + 1
        memories, decision = self._stepper(given, self._state.memories, step=step, votes=StepFlags())
        self.engine.step(lr=1e-5, grad_norm=decision.grad_norm)
        self._state = TrainState(step, 0, HEALTH, given.stream, memories)
        if self.slots is not None and step % self._copy_every == 0:
            self.slots.store(self._state, self.engine, {})
        return time.perf_counter() - began


def work(rank: int, config: Config, port: int, arguments: argparse.Namespace) -> None:
    """Run one rank: start its keeper, join the other rank and measure. The second rank is on a pretended node."""
    here = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": NUM_RANKS, "MASTER_PORT": port, NODE: f"node{rank}"}
    os.environ |= {name: str(value) for name, value in here.items()} | {"MASTER_ADDR": "127.0.0.1"}
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert keeper.stdout is not None
    with distributed_context(timeout_s=600) as ranks:
        bench = Bench(config, ranks, parse_object(keeper.stdout.readline()), copy_every=arguments.copy_every)
        code = measure(bench, ranks, arguments)
        barrier()  # each rank's keeper has the copies of the other rank
    sys.stdout.flush()
    keeper.kill()
    os._exit(code)  # the interpreter's teardown sometimes aborts in native threads


def measure(bench: Bench, ranks: RankInfo, arguments: argparse.Namespace) -> int:
    """Measure all ways in turn. Rank 0 prints a table. Return the exit code."""
    ways = ["off", *(way for way in WAYS[1:] if way in arguments.ways)]
    for way in ways:
        bench.block(way, num_steps=2)
    blocks: dict[str, list[list[float]]] = {way: [] for way in ways}
    numbers = range(arguments.rounds)
    for number in announced(numbers, what="round") if ranks.is_rank0 else numbers:
        turn = number % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            blocks[way].append(bench.block(way, num_steps=arguments.steps))
    if not ranks.is_rank0:
        return 0
    shares = {}
    print(
        "| copies | step, ms: minimum | median | longer than without, median of rounds | 95 % |\n|---|---|---|---|---|"
    )
    for way, measured in blocks.items():
        pairs = zip(measured, blocks["off"], strict=True)
        ratios = [statistics.fmean(block) / statistics.fmean(off) for block, off in pairs]
        shares[way] = 100 * (statistics.median(ratios) - 1)
        low, high = (100 * (bound - 1) for bound in interval_of_median(ratios))
        times = [1000 * second for block in measured for second in block]
        step = f"{min(times):.1f} | {statistics.median(times):.1f}"
        print(f"| {way} | {step} | {shares[way]:+.1f} % | {low:+.1f} to {high:+.1f} % |")
    if arguments.most and shares["node"] > arguments.most:
        cost = f"{shares['node']:.1f} % of a step"
        print(f"copies on the node cost {cost}, more than {arguments.most:g} %", file=sys.stderr)
        return 1
    return 0


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the 95 % interval of a median, from medians of values drawn with replacement."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(1000))
    return medians[25], medians[-26]


def main() -> None:
    """Prepare a corpus unless a configuration names one, start two ranks and print what they measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=None, help="settings of the run, whose corpus exists")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="ways to compare with off (default all)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="precision of the steps")
    parser.add_argument("--rounds", type=positive, default=20, help="blocks of each way")
    parser.add_argument("--steps", type=positive, default=10, help="timed steps of a block")
    parser.add_argument("--copy-every", type=positive, default=1, metavar="N", help="steps between two copies")
    parser.add_argument("--most", type=float, default=0.0, metavar="P", help="largest cost on the node, in %%")
    arguments = parser.parse_args()
    if arguments.most and "node" not in arguments.ways:
        parser.error("--most is the largest cost on the node: add node to --ways")
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = arguments.config
        changes: dict[str, Any] = {"run": {"dir": str(folder / "run")}, "engine": {"precision": arguments.precision}}
        if path is None:
            prepare_corpus(folder)
            path = folder / "ends.toml"
            changes["data"] = {"path": str(folder / "corpus")}
        config = configure(path, **changes)
        spawn(work, args=(config, free_port(), arguments), nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()
