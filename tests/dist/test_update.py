"""The update of the weights: what one rank leaves out, and what the kernel of a GPU computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import VOCAB_SIZE, tiny_config
from txl_dist.config.load import Config, plan_batch
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo
from txl_dist.train.batch import batch_maker
from txl_dist.train.engine.zero import ZeroEngine

pytestmark = pytest.mark.dist


class Exchanging(ZeroEngine):
    """An engine that exchanges gradients on one rank too, as DeepSpeed does."""

    def _keep_gradients(self) -> None:
        pass


def trained(engine: ZeroEngine, config: Config, *, num_steps: int) -> list[torch.Tensor]:
    """Make some steps on fixed tokens. Returns the norms of the gradients, then all weights and moments."""
    plan = plan_batch(config.train, world_size=1)
    maker = batch_maker(engine.model, mask_documents=False)
    memory = engine.empty_memory(num_lanes=plan.microbatch_lanes, memory_len=config.train.memory_len)
    generator = torch.Generator().manual_seed(1)
    norms = []
    for _ in range(num_steps):
        for _ in range(plan.num_microbatches):
            ids = torch.randint(0, VOCAB_SIZE, (plan.microbatch_lanes, 9), generator=generator).numpy()
            loss, memory = engine.forward(maker.batch(plain_segment(ids)), memory, normalizer=16.0)
            engine.backward(loss)
        norms.append(engine.grad_norm())
        engine.step(lr=1e-3, grad_norm=float(norms[-1]))
    values = [fragment.values[kind] for fragment in engine.fragments() for kind in sorted(fragment.values)]
    return [*norms, *values]


def alone_worker(ranks: RankInfo, precision: str) -> list[bool]:
    """For one and for two micro-batches: are all results equal to those with an exchange?"""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch's CPU can; DeepSpeed does not know
    equal = []
    for lanes in (4, 2):
        config = tiny_config(engine={"zero_stage": 1, "precision": precision}, train={"microbatch_lanes": lanes})
        plan = plan_batch(config.train, world_size=1)
        found = [
            trained(kind(config, vocab_size=VOCAB_SIZE, plan=plan, ranks=ranks), config, num_steps=4)
            for kind in (ZeroEngine, Exchanging)
        ]
        equal.append(all(torch.equal(here, there) for here, there in zip(*found, strict=True)))
    return equal


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_rank_at_stage_1_trains_bit_for_bit_as_with_an_exchange(tmp_path: Path, precision: str) -> None:
    assert run_ranks(alone_worker, precision, world_size=1, folder=tmp_path) == [[True, True]]
