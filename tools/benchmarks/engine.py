"""What the engine costs the host.

    python -m tools.benchmarks.engine                            all ZeRO stages, some minutes
    python -m tools.benchmarks.engine --stages 1 --rounds 1      the smallest size, some seconds

Twelve layers so small that arithmetic takes no time (width 16, feed-forward 32, 4 lanes of 8 tokens): what is left is
Python and dispatch. A step is forward, loss, backward, norm, decision, clipping and update, fp32, one process and one
thread. Base line: the same module with torch's fused AdamW and clipping, nothing else. At real sizes this time is
hidden as long as the GPU has more work queued; under strong scaling it is what remains.

    x by min, x by median   the base line's time over this one's; `cost` is the inverse, of minima
    tensors                 parameters that the engine sees
    loss error              largest relative distance from the base line's loss over the first 8 steps
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
    """The model of the benchmark at a ZeRO stage."""
    model = {"num_layers": 12, "width": 16, "num_heads": 2, "head_width": 8, "ff_width": 32, "dropout": 0.0}
    train = {"num_lanes": LANES, "microbatch_lanes": LANES, "segment_len": LENGTH, "memory_len": LENGTH}
    engine = {"zero_stage": stage, "precision": precision}
    return Config.model_validate({"model": model, "train": train, "engine": engine})


def batch_of() -> Batch:
    """Always the same tokens: the loss falls, so that agreement means something."""
    ids = torch.randint(0, VOCAB_SIZE, (LANES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.ones(LANES, LENGTH), None)


class PlainStep:
    """The module with torch alone."""

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
        """One step; its loss."""
        loss: Tensor
        loss, self.memory = self.module(self.batch, self.memory, float(LANES * LENGTH))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class EngineStep:
    """The module in our engine."""

    def __init__(self, config: Config, ranks: RankInfo) -> None:
        plan = plan_batch(config.train, world_size=1)
        self.engine = ZeroEngine(config, vocab_size=VOCAB_SIZE, plan=plan, ranks=ranks)
        self.batch, self.memory = batch_of(), self.engine.empty_memory(num_lanes=LANES, memory_len=LENGTH)
        self.num_tensors = len(self.engine.stored)

    def __call__(self) -> Tensor:
        """One step as `train.step` makes it; its loss."""
        normalizer = float(LANES * LENGTH)
        loss, self.memory, _ = engine_step(self.engine, self.batch, self.memory, normalizer=normalizer, lr=LR)
        return loss


def main() -> None:
    """Measure all stages in one run, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 2, 3], choices=range(4), help="of ZeRO")
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
