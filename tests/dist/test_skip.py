"""A step that goes wrong on one rank is skipped on all ranks, at every stage and precision."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.test_checkpoint import BY_CASES, Job
from tests.helpers.jobs import TOKENIZER
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo, StepFlags
from txl_dist.train.batch import to_device
from txl_dist.train.stepper import reduce_step

pytestmark = pytest.mark.dist

WRONG_STEP, WRONG_RANK = 2, 1


def trained(job: Job, *, wrong: str) -> tuple[list[bool], dict[str, Any]]:
    """Four steps, one of which goes wrong on one rank, or is skipped on purpose; (skipped, state of the engine)."""
    skipped = []
    for step in range(4):
        is_wrong = step == WRONG_STEP and job.ranks.rank == WRONG_RANK
        shape = (job.config.train.num_lanes, job.config.train.segment_len + 1)
        ids = np.random.default_rng(step).integers(0, job.vocab_size, shape)[job.lanes.start : job.lanes.stop]
        losses, after = [], []
        batches = job.maker.microbatches(plain_segment(ids), lanes=job.plan.microbatch_lanes)
        for index, (batch, memory) in enumerate(zip(batches, job.memories, strict=True)):
            torch.manual_seed(1000 * step + 10 * job.ranks.rank + index)
            if is_wrong and wrong == "memory":
                memory = memory._replace(hidden=tuple(torch.stack(memory.hidden) * math.nan))
            normalizer = {"loss": math.nan, "infinite": 0.0}.get(wrong, 16.0) if is_wrong else 16.0
            loss, memory = job.engine.forward(to_device(batch, job.ranks.device), memory, normalizer=normalizer)
            job.engine.backward(loss)
            losses.append(loss.detach())
            after.append(memory)
        decision = reduce_step(
            torch.stack(losses).mean(),
            job.engine.grad_norm(),
            skip=is_wrong and wrong == "skip",
            votes=StepFlags(),
            world_size=job.ranks.world_size,
        )
        job.engine.step(lr=1e-2, grad_norm=decision.grad_norm)
        skipped.append(not math.isfinite(decision.grad_norm))
        job.memories = job.memories if skipped[-1] else tuple(after)
    values = {
        f"{one.parameter} {kind} {one.start} {one.step}": tensor.clone()
        for one in job.engine.fragments()
        for kind, tensor in one.values.items()
    }
    hidden = torch.cat([torch.stack(memory.hidden) for memory in job.memories], dim=1)
    return skipped, {**values, "memory": hidden, "in use": probe_losses(job)}


def probe_losses(job: Job) -> torch.Tensor:
    """What the model computes with its own weights, which a skipped step must not have touched either."""
    ids = np.arange(18).reshape(2, 9)
    batch = to_device(job.maker.batch(plain_segment(ids)), job.ranks.device)
    return job.engine.losses(batch, job.engine.empty_memory(num_lanes=2, memory_len=12))[0]


def skipping_worker(ranks: RankInfo, cases: list[tuple[int, str]]) -> list[tuple[str, bool]]:
    results = []
    for stage, precision in cases:
        config = tiny_config(engine={"zero_stage": stage, "precision": precision})
        expected: dict[str, Any] = {}
        for wrong in ("skip", "loss", "memory", "infinite"):
            job = Job(ranks, config, vocab_size=TOKENIZER.vocab_size)
            skipped, state = trained(job, wrong=wrong)
            assert skipped == [False, False, True, False], (stage, precision, wrong)
            assert all(tensor.isfinite().all() for tensor in state.values())
            expected = expected or state
            same = state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in state)
            results.append((f"stage {stage} {precision} {wrong}", same))
    return results


@BY_CASES
def test_a_step_that_is_not_finite_on_one_rank_is_as_one_skipped_on_purpose(
    cases: list[tuple[int, str]], tmp_path: Path
) -> None:
    for rank in run_ranks(skipping_worker, cases, world_size=2, folder=tmp_path):
        assert len(rank) == 4 * len(cases)
        assert [name for name, is_same in rank if not is_same] == []
