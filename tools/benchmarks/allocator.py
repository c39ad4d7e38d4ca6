"""Measure the cost for a training step on a CPU when the C library returns freed memory to the system.

    python -m tools.benchmarks.allocator                         14 million parameters; --size 51 has more
    python -m tools.benchmarks.allocator --size 1 --rounds 1     the smallest size, under a minute

`txl_dist/distributed/malloc.py` makes the C library map large blocks separately and return them when they are freed. It
does this once per process, so each variant runs in its own process. One process uses this setting, and the other one
uses the C library's default. Both build the same engine. The parent process lets them make steps in turn, so that other
load on the machine slows both equally. Times are CPU time, including the system's time for new pages.

    x by min, x by median   time of a step with the C library's default / time with this setting
    peak MiB                peak resident memory, including the program itself
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

VARIANTS = ("as it comes", "given back")
SHAPES = {1: (4, 128, 4096), 14: (4, 512, 4096), 51: (12, 512, 20_000)}
"""(layers, width, vocabulary) of each size. The key is the size in millions of parameters."""


def main() -> None:
    """Measure both variants and print the table. With --only the process is a child that makes steps on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, choices=SHAPES, default=14, help="million parameters")
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each variant")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the figures there")
    parser.add_argument(
        "--only", choices=VARIANTS, default=None, help="internal: run as the child process of this variant"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} measures nothing: type --rounds 1 or more")
    if options.only is not None:
        return make_steps(options.only, size=options.size)
    times_ms, peaks = measure(size=options.size, rounds=options.rounds)
    from tools.benchmarks.measuring import Timing, print_table, rows, write_json

    timings = {name: Timing(min(times), median(times)) for name, times in times_ms.items()}
    table = list(rows(timings, base=VARIANTS[0], peaks=peaks))
    print_table(f"a step of {options.size} million parameters, one thread", table)
    if options.json is not None:
        write_json(options.json, {"allocator": table})


def measure(*, size: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the milliseconds of each step and the peak resident memory in MiB, by variant."""
    children = {
        name: subprocess.Popen(
            [sys.executable, "-m", "tools.benchmarks.allocator", "--only", name, "--size", str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        )
        for name in VARIANTS
    }
    times_ms: dict[str, list[float]] = {name: [] for name in VARIANTS}
    peaks = {}
    for round_number in range(-2, rounds):
        for name, child in children.items():
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            step_ms, peaks[name] = (float(word) for word in child.stdout.readline().split())
            if round_number >= 0:
                times_ms[name].append(step_ms)
    for child in children.values():
        child.communicate()
    return times_ms, peaks


def make_steps(variant: str, *, size: int) -> None:
    """Make a training step for each line on standard input. After each step, print its milliseconds and the process's
    peak resident memory in MiB."""
    from txl_dist.distributed.malloc import give_memory_back

    if variant == VARIANTS[1] and not give_memory_back():
        sys.exit("the C library's setting was not changed: no huge pages, or the environment sets the allocator")
    import torch

    from txl_dist.config.load import Config, plan_batch
    from txl_dist.data.loader.stream import plain_segment
    from txl_dist.distributed.collectives import distributed_context
    from txl_dist.train.batch import batch_maker
    from txl_dist.train.engine.zero import ZeroEngine

    layers, width, vocab_size = SHAPES[size]
    lanes, length = 4, 64
    model = {"num_layers": layers, "width": width, "num_heads": 8, "head_width": width // 8, "ff_width": 4 * width}
    train = {"num_lanes": lanes, "microbatch_lanes": lanes, "segment_len": length, "memory_len": length}
    config = Config.model_validate({"model": model, "train": train, "engine": {"zero_stage": 1}})
    with distributed_context(timeout_s=600, num_threads=1) as ranks:
        engine = ZeroEngine(config, vocab_size=vocab_size, plan=plan_batch(config.train, world_size=1), ranks=ranks)
        ids = torch.randint(0, vocab_size, (lanes, length + 1), generator=torch.Generator().manual_seed(1)).numpy()
        batch = batch_maker(engine.model, mask_documents=False).batch(plain_segment(ids))
        memory = engine.empty_memory(num_lanes=lanes, memory_len=length)
        for _ in sys.stdin:
            began_s = time.process_time()
            loss, memory = engine.forward(batch, memory, normalizer=float(lanes * length))
            engine.backward(loss)
            engine.step(lr=1e-3, grad_norm=float(engine.grad_norm()))
            step_ms = 1000 * (time.process_time() - began_s)
            print(step_ms, resident_peak_mib(), flush=True)


def resident_peak_mib() -> float:
    """Return the process's peak resident memory so far, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) / 1024


if __name__ == "__main__":
    main()
