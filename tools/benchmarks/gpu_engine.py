"""Measure `ZeroEngine` on enwik8_base: first losses and norms against a CPU's, time of a step, and time by kernel.

    python -m tools.benchmarks.gpu_engine                       half a minute on one core
    python -m tools.benchmarks.gpu_engine --tiny --json FILE    the same with a tiny model, in some seconds

The program itself writes the CPU's figures again, to gpu_reference.json: fp32, ZeRO stage 1, no dropout, 2 lanes (batch
rows), always the same ids. A change that changes losses intentionally says so and writes this file again.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType

from tools.benchmarks.gpu_jobs import Setting
from tools.benchmarks.gpu_rows import Row
from tools.benchmarks.gpu_timing import median
from tools.benchmarks.stepping import engine_step
from tools.benchmarks.trainers import Sizes, zipf_segments
from txl_dist.config.load import Config, load_config, plan_batch
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo, distributed_context
from txl_dist.model.flops import flops_by_part, peak_tflops
from txl_dist.model.transformer_xl import Batch
from txl_dist.rng import derive_seed
from txl_dist.train.batch import batch_maker, pinned, to_device
from txl_dist.train.engine.zero import ZeroEngine

REFERENCE = Path(__file__).with_name("gpu_reference.json")
RECIPE = Path(__file__).parents[2] / "configs/enwik8_base.toml"
VOCAB_SIZE, LANES, REFERENCE_LANES, REFERENCE_STEPS = 204, 22, 2, 4
TINY = {"num_layers": 2, "width": 32, "num_heads": 2, "head_width": 16, "ff_width": 64}


def recipe(
    *, stage: int, precision: str, graphed: bool = False, dropout: bool = True, lanes: int = LANES, tiny: bool = False
) -> Config:
    """Return the settings of enwik8_base on one device with one micro-batch per step."""
    values = load_config(RECIPE).model_dump(mode="json")
    values["train"] |= {"num_lanes": lanes, "microbatch_lanes": lanes}
    values["engine"] |= {"zero_stage": stage, "precision": precision, "cuda_graph": graphed, "keep_scores": "on"}
    if not dropout:
        rates = {name: 0.0 for name, value in values["model"].items() if name.endswith("dropout") and value}
        values["model"] |= rates
    if tiny:
        values["model"] |= TINY
        values["train"] |= {"segment_len": 16, "memory_len": 16}
    return Config.model_validate(values)


class Training:
    """Training steps of an engine on ids that are always the same, made as in the training loop."""

    def __init__(self, config: Config, ranks: RankInfo, *, lanes: int) -> None:
        self.config, self.ranks, self.lanes = config, ranks, lanes
        self.engine = ZeroEngine(
            config, vocab_size=VOCAB_SIZE, plan=plan_batch(config.train, world_size=1), ranks=ranks
        )
        self.maker = batch_maker(self.engine.model, mask_documents=False)
        self.memory = self.engine.empty_memory(num_lanes=lanes, memory_len=config.train.memory_len)
        self.sizes = Sizes.of(config, vocab_size=VOCAB_SIZE, num_lanes=lanes)
        self.segments, self.number = zipf_segments(self.sizes), 0

    def batch(self) -> Batch:
        """Return the next batch in pinned memory, as the reader thread provides it."""
        return pinned(self.maker.batch(plain_segment(next(self.segments))), self.ranks.device)

    def step(self, batch: Batch) -> tuple[float, float]:
        """Make one step and return (loss, norm before clipping). The host waits for the device once."""
        batch = to_device(batch, self.ranks.device)
        torch.manual_seed(derive_seed(1, "dropout", self.number, 0))
        self.number += 1
        normalizer, lr = float(self.sizes.tokens), self.config.optim.lr
        _, self.memory, told = engine_step(self.engine, batch, self.memory, normalizer=normalizer, lr=lr)
        return told.loss, told.grad_norm


def first_steps(config: Config, ranks: RankInfo) -> dict[str, list[float]]:
    """Return losses and norms of the first steps without dropout, on as many lanes as the reference has."""
    training = Training(config, ranks, lanes=REFERENCE_LANES)
    told = [training.step(training.batch()) for _ in range(REFERENCE_STEPS)]
    return {"losses": [loss for loss, _ in told], "norms": [norm for _, norm in told]}


def reference(setting: Setting, ranks: RankInfo) -> dict[str, list[float]]:
    """Return the CPU's losses and norms from the reference file. In a rehearsal they are computed here."""
    if setting.rehearse:
        config = recipe(stage=1, precision="fp32", dropout=False, lanes=REFERENCE_LANES, tiny=True)
        return first_steps(config, ranks)
    kept: dict[str, list[float]] = json.loads(REFERENCE.read_text(encoding="utf-8"))
    return kept


def measured(
    setting: Setting, ranks: RankInfo, *, stage: int, precision: str, graphed: bool, wanted: dict[str, list[float]]
) -> Iterator[Row]:
    """Yield two rows: the first steps compared with the CPU's, and the time of a step with the recipe's dropout."""
    tiny = setting.rehearse
    lanes = 2 if tiny else LANES
    given: dict[str, Any] = {"stage": stage, "precision": precision, "graphed": graphed, "tiny": tiny}
    told = first_steps(recipe(**given, dropout=False, lanes=REFERENCE_LANES), ranks)
    off = {
        f"{name} off by": max(abs(a - b) / abs(b) for a, b in zip(told[name], wanted[name], strict=True))
        for name in ("losses", "norms")
    }
    gc.collect()  # engines contain reference cycles; collect them before the next peak is measured
    yield {**told, "CPU losses": wanted["losses"], "CPU norms": wanted["norms"], **off}
    yield timed(Training(recipe(**given, lanes=lanes), ranks, lanes=lanes), precision=precision, tiny=tiny)


def timed(training: Training, *, precision: str, tiny: bool) -> Row:
    """Return a row with the median time of 20 steps after 5 warm-up steps."""
    cuda = training.ranks.device.type == "cuda"
    given = [training.batch() for _ in range(8)]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    taken = []
    for number in range(3 if tiny else 25):
        began = time.perf_counter()
        loss, norm = training.step(given[number % 8])
        taken.append(1000 * (time.perf_counter() - began))
    assert math.isfinite(loss), "the loss is not finite"
    step_ms, sizes = median(taken[1 if tiny else 5 :]), training.sizes
    flops = flops_by_part(
        sizes.model,
        vocab_size=sizes.vocab_size,
        segment_len=sizes.segment_len,
        memory_lens=[sizes.memory_len] * sizes.model.num_layers,
        microbatch_lanes=sizes.num_lanes,
    )
    tflops = sum(flops.values()) * sizes.tokens / step_ms / 1e9
    peak = peak_tflops(torch.cuda.get_device_name(), precision=precision) if cuda else 0.0
    return {
        "lanes": sizes.num_lanes,
        "step ms": step_ms,
        "tokens/s": 1000 * sizes.tokens / step_ms,
        "MFU %": 100 * tflops / peak if peak else math.nan,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else math.nan,
        "loss": loss,
        "norm": norm,
    }


def profiled(training: Training, *, steps: int, rows: int) -> Iterator[Row]:
    """Yield a row for the whole step, then a row for each of its kernels, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    cuda = training.ranks.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    given = [training.batch() for _ in range(4)]
    for batch in given * 2:
        training.step(batch)
    began = time.perf_counter()
    for number in range(steps):
        training.step(given[number % 4])
    plain_ms = 1000 * (time.perf_counter() - began) / steps
    with profile(activities=activities) as profiler:
        for number in range(steps):
            training.step(given[number % 4])
    found = [
        (event.key, event.count / steps, (event.self_device_time_total if cuda else event.self_cpu_time_total))
        for event in profiler.key_averages()
        if not cuda or event.device_type == DeviceType.CUDA
    ]
    busy_ms = sum(micros for _, _, micros in found) / 1000 / steps
    yield {
        "kernel": "all",
        "calls a step": sum(calls for _, calls, _ in found),
        "ms a step": busy_ms,
        "step ms": plain_ms,
        "busy %": 100 * busy_ms / plain_ms,
    }
    for name, calls, micros in sorted(found, key=lambda one: -one[2])[:rows]:
        own_ms = micros / 1000 / steps
        yield {"kernel": name[:90], "calls a step": calls, "ms a step": own_ms, "share %": 100 * own_ms / busy_ms}


def graphs_by_running_again() -> None:
    """Replace the recording of CUDA graphs by running the function again, for a CPU."""
    from txl_dist.train.engine import cuda_graph as graph

    def again(run: Any, *, pool: Any = None) -> Any:
        run()
        return run

    graph.record_on_gpu = again


def main() -> None:
    """Compute the reference and write it to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=REFERENCE, metavar="FILE", help="where the reference is written")
    parser.add_argument(
        "--tiny", action="store_true", help="use a tiny model; needs --json, because its figures are not the reference"
    )
    arguments = parser.parse_args()
    if arguments.tiny and arguments.json == REFERENCE:
        parser.error("--tiny does not make the reference: name another file with --json FILE")
    config = recipe(stage=1, precision="fp32", dropout=False, lanes=REFERENCE_LANES, tiny=arguments.tiny)
    with distributed_context(timeout_s=600) as ranks:
        found = first_steps(config, ranks)
    arguments.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
