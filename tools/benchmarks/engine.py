"""Measure the host time that the engine adds to a training step.

    python -m tools.benchmarks.engine                            all ZeRO stages, some minutes
    python -m tools.benchmarks.engine --stages 1 --rounds 1      the smallest size, some seconds

Twelve layers are so small that arithmetic takes almost no time (width 16, feed-forward 32, 4 lanes of 8 tokens). The
measured time is that of Python and of dispatch. A step is forward, loss, backward, norm, decision, clipping and update,
in fp32, in one process with one thread. The baseline is the same module with torch's fused AdamW and clipping, and
nothing else. At real sizes this time is hidden as long as the GPU has work queued. In strong scaling (ever smaller
batches per GPU) it limits the speed.

    x by min, x by median   the baseline's time / the time of this row; `cost` is the inverse of the ratio of minima
    tensors                 parameters that the engine stores
    loss error              largest relative difference from the baseline's loss in the first 8 steps
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tools.benchmarks.measuring import add_measure_options, interleaved, print_table, rows, write_json
from tools.benchmarks.stepping import engine_step
from txl_dist.config.load import Config, plan_batch
from txl_dist.distributed.collectives import RankInfo, distributed_context
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL
from txl_dist.rng import derive_seed
from txl_dist.train.engine.optimizer import build_optimizer
from txl_dist.train.engine.zero import ZeroEngine

VOCAB_SIZE, LANES, LENGTH = 64, 4, 8
LR, AGREEING_STEPS = 1e-3, 8


def config_of(*, stage: int, precision: str) -> Config:
    """Return the benchmark's settings for a ZeRO stage and a precision."""
    model = {"num_layers": 12, "width": 16, "num_heads": 2, "head_width": 8, "ff_width": 32, "dropout": 0.0}
    train = {"num_lanes": LANES, "microbatch_lanes": LANES, "segment_len": LENGTH, "memory_len": LENGTH}
    engine = {"zero_stage": stage, "precision": precision}
    return Config.model_validate({"model": model, "train": train, "engine": engine})


def batch_of() -> Batch:
    """Return a batch that always has the same tokens. The loss then falls, so that equal losses are a meaningful
    check."""
    ids = torch.randint(0, VOCAB_SIZE, (LANES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.ones(LANES, LENGTH), None)


class PlainStep:
    """A training step of the module with torch alone."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(derive_seed(config.run.seed, "init"))
        self.module = SegmentLoss(TransformerXL(config.model, vocab_size=VOCAB_SIZE))
        if config.engine.precision == "bf16":
            self.module.bfloat16()
        self.optimizer = build_optimizer(self.module.named_parameters(), config.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = LR
        self.batch, self.clip_norm = batch_of(), config.optim.clip_norm
        self.memory = self.module.model.empty_memory(num_lanes=LANES, memory_len=LENGTH)
        self.num_tensors = len(list(self.module.parameters()))

    def __call__(self) -> Tensor:
        """Make one step and return its loss."""
        loss: Tensor
        loss, self.memory = self.module(self.batch, self.memory, float(LANES * LENGTH))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class EngineStep:
    """A training step of the module in our engine."""

    def __init__(self, config: Config, ranks: RankInfo) -> None:
        plan = plan_batch(config.train, world_size=1)
        self.engine = ZeroEngine(config, vocab_size=VOCAB_SIZE, plan=plan, ranks=ranks)
        self.batch, self.memory = batch_of(), self.engine.empty_memory(num_lanes=LANES, memory_len=LENGTH)
        self.num_tensors = len(self.engine.stored)

    def __call__(self) -> Tensor:
        """Make one step as the training loop does, and return its loss."""
        normalizer = float(LANES * LENGTH)
        loss, self.memory, _ = engine_step(self.engine, self.batch, self.memory, normalizer=normalizer, lr=LR)
        return loss


def main() -> None:
    """Measure all stages in one run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stages", type=int, nargs="*", default=[0, 1, 2, 3], choices=range(4), help="ZeRO stages to measure"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    add_measure_options(parser)
    parser.set_defaults(rounds=20)
    arguments = parser.parse_args()
    with distributed_context(timeout_s=600, num_threads=1) as ranks:
        base = "torch fused AdamW"
        steps: dict[str, Any] = {base: PlainStep(config_of(stage=0, precision=arguments.precision))}
        for stage in arguments.stages:
            steps[f"ZeRO-{stage}"] = EngineStep(config_of(stage=stage, precision=arguments.precision), ranks)
        losses = {name: torch.stack([step() for _ in range(AGREEING_STEPS)]) for name, step in steps.items()}
        actions: dict[str, Callable[[], object]] = dict(steps)
        timings = interleaved(actions, rounds=arguments.rounds)
    more = {
        name: {
            "cost": timings[name].min_ms / timings[base].min_ms,
            "tensors": step.num_tensors,
            "loss error": ((losses[name] - losses[base]) / losses[base]).abs().max().item(),
        }
        for name, step in steps.items()
    }
    table = rows(timings, base=base, more=more)
    print_table(f"host time of a step, {arguments.precision}", table)
    if arguments.json is not None:
        write_json(arguments.json, {"engine": table}, precision=arguments.precision)


if __name__ == "__main__":
    main()
