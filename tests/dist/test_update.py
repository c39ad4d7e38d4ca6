"""The update of the weights: what one rank leaves out, and what the kernel of a GPU computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import VOCAB_SIZE, tiny_config
from txl_dist.config.load import Config, plan_batch
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo
from txl_dist.train.batch import batch_maker
from txl_dist.train.engine import adam_update, zero
from txl_dist.train.engine.zero import ZeroEngine

pytestmark = pytest.mark.dist


class Exchanging(ZeroEngine):
    """An engine that exchanges gradients on one rank too, as DeepSpeed does."""

    def _keep_gradients(self) -> None:
        pass


def trained(kind: type[ZeroEngine], ranks: RankInfo, config: Config, *, num_steps: int) -> list[Tensor]:
    """Make some steps on fixed tokens, and one whose norm is infinite. Returns the norms of the gradients, then all
    weights, moments and counts of updates, then the weights that the model computes with."""
    plan = plan_batch(config.train, world_size=ranks.world_size)
    engine = kind(config, vocab_size=VOCAB_SIZE, plan=plan, ranks=ranks)
    maker = batch_maker(engine.model, mask_documents=False)
    memory = engine.empty_memory(num_lanes=plan.microbatch_lanes, memory_len=config.train.memory_len)
    generator = torch.Generator().manual_seed(1)
    norms = []
    for step in range(num_steps + 1):
        for _ in range(plan.num_microbatches):
            ids = torch.randint(0, VOCAB_SIZE, (plan.microbatch_lanes, 9), generator=generator).numpy()
            loss, memory = engine.forward(maker.batch(plain_segment(ids)), memory, normalizer=16.0)
            engine.backward(loss)
        norms.append(engine.grad_norm())
        engine.step(lr=1e-3, grad_norm=float("inf") if step == 2 else float(norms[-1]))
    values = []
    for fragment in engine.fragments():
        values += [fragment.values[name] for name in sorted(fragment.values)]
        values.append(torch.tensor(fragment.step))
    return [*norms, *values, *(value.float() for _, value in engine.named_values())]


def alone_worker(ranks: RankInfo, precision: str) -> list[bool]:
    """For one and for two micro-batches: are all results equal to those with an exchange?"""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch's CPU can; DeepSpeed does not know
    equal = []
    for lanes in (4, 2):
        config = tiny_config(engine={"zero_stage": 1, "precision": precision}, train={"microbatch_lanes": lanes})
        found = [trained(kind, ranks, config, num_steps=3) for kind in (ZeroEngine, Exchanging)]
        equal.append(all(torch.equal(here, there) for here, there in zip(*found, strict=True)))
    return equal


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_rank_at_stage_1_trains_bit_for_bit_as_with_an_exchange(tmp_path: Path, precision: str) -> None:
    assert run_ranks(alone_worker, precision, world_size=1, folder=tmp_path) == [[True, True]]


def step_in_torch(tensors: Any, sizes: Any, numbers: tuple[float, ...], *, is_decoupled: bool) -> None:
    """Compute what the kernel computes, in its place."""
    divisor, decay, mean_share, square_kept, square_share, rate, root, eps = numbers
    for weight, master, mean, square, given in zip(*tensors, strict=True):
        gradient = given.float() / divisor
        if is_decoupled:
            master -= decay * master
        else:
            gradient = gradient + decay * master
        mean += mean_share * (gradient - mean)
        square.mul_(square_kept).add_(gradient * gradient, alpha=square_share)
        master -= rate * mean / (square.sqrt() / root + eps)
        weight.copy_(master)


def kernel_worker(ranks: RankInfo, stage: int, name: str) -> dict[str, float]:
    """The largest difference between results with and without the kernel's step, by precision."""
    adam_update.start_step = step_in_torch
    differences = {}
    for precision in ("fp32", "bf16"):
        config = tiny_config(
            engine={"zero_stage": stage, "precision": precision},
            optim={"name": name, "clip_norm": 0.05, "weight_decay": 0.1},
        )
        found = []
        for is_possible in (False, True):
            zero.kernel_updates = lambda *_, is_possible=is_possible, **__: is_possible
            found.append(trained(ZeroEngine, ranks, config, num_steps=3))
        assert len(found[0]) == len(found[1])
        differences[precision] = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True) if a.numel())
    return differences


@pytest.mark.parametrize(
    ("stage", "name", "world_size"),
    [(1, "adamw", 1), (2, "adam", 2), pytest.param(1, "adam", 2, marks=pytest.mark.nightly)],
)
def test_the_kernels_step_is_the_optimizers_to_rounding(tmp_path: Path, stage: int, name: str, world_size: int) -> None:
    """A step moves weights by 1e-3. In bf16 a weight of the model can be rounded the other way."""
    for found in run_ranks(kernel_worker, stage, name, world_size=world_size, folder=tmp_path):
        assert found["fp32"] < 2e-6
        assert found["bf16"] < 2e-3
