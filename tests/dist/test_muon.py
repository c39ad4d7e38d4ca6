"""Muon with real DeepSpeed: equal on any number of ranks and at every stage, with divided work, and resumed exactly."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.dist.test_checkpoint import BY_CASES, Job
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import VOCAB_SIZE, tiny_config, train_engine
from txl_dist.artifacts import checkpoint_folder
from txl_dist.config.load import Config, check_config
from txl_dist.distributed.collectives import RankInfo, barrier
from txl_dist.train.engine import muon
from txl_dist.train.engine.muon import matrices_of

pytestmark = pytest.mark.dist


def config_of(stage: int, precision: str = "fp32") -> Config:
    optim = {"name": "muon", "lr": 3e-3, "weight_decay": 0.01, "clip_norm": 0.5}
    engine = {"zero_stage": stage, "precision": precision}
    config = tiny_config(optim=optim, engine=engine, train={"microbatch_lanes": 1})
    check_config(config)
    return config


def training_worker(ranks: RankInfo, cases: list[tuple[int, str]]) -> list[Any]:
    return [train_engine(ranks, config_of(*case), num_steps=10) for case in cases]


@BY_CASES
def test_every_stage_and_number_of_ranks_trains_alike(cases: list[tuple[int, str]], tmp_path: Path) -> None:
    full = [case for case in cases if case[1] == "fp32"]
    by_cases = {1: full[:1], 2: cases, 4: full}  # in half precision on two alone: others only round otherwise
    by_world = {
        world: run_ranks(training_worker, some, world_size=world, folder=tmp_path / str(world))
        for world, some in by_cases.items()
    }
    expected, _, _ = by_world[1][0][0]
    assert expected[-1] < expected[0] - 0.1, "it learns"
    for world, ranks in by_world.items():
        for case, (losses, _, _) in zip(by_cases[world], ranks[0], strict=True):
            rtol = 2e-6 if case[1] == "fp32" else 3e-3
            np.testing.assert_allclose(losses, expected, rtol=rtol, atol=0, err_msg=f"{world} ranks, {case}")


def products_of_a_step(job: Job) -> list[tuple[int, int]]:
    """Shapes of what the iterations multiply on this rank."""
    made: list[tuple[int, int]] = []
    baddbmm, newton_schulz = torch.baddbmm, muon.newton_schulz

    def counted(x: Tensor, *others: Tensor, **keywords: Any) -> Tensor:
        made.extend([(x.shape[1], x.shape[2])] * len(x))
        return baddbmm(x, *others, **keywords)

    def watched(update: Tensor) -> Tensor:
        with mock.patch.object(torch, "baddbmm", counted):  # attention calls it too
            return newton_schulz(update)

    with mock.patch.object(muon, "newton_schulz", watched):
        job.step(0)
    return sorted(made)


def counting_worker(ranks: RankInfo, stages: list[int]) -> list[dict[str, Any]]:
    """What a rank multiplies and keeps, by stage."""
    found = []
    for stage in stages:
        job = Job(ranks, config_of(stage), vocab_size=VOCAB_SIZE)
        products = products_of_a_step(job)
        fragments = job.engine.fragments()
        found.append(
            {
                "products": products,
                "momentum": sum(
                    f.values["momentum_buffer"].numel() for f in fragments if "momentum_buffer" in f.values
                ),
                "second moments of matrices": [
                    f.parameter
                    for f in fragments
                    if "exp_avg_sq" in f.values and matrices_of(f.parameter, job.engine.shapes[f.parameter])
                ],
                "all": [one for name, shape in job.engine.shapes.items() for one in matrices_of(name, shape)],
            }
        )
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_matrix_is_iterated_five_times_on_one_rank_and_the_work_is_divided(
    tmp_path: Path, world_size: int
) -> None:
    stages = [0, 1, 2, 3]
    by_rank = run_ranks(counting_worker, stages, world_size=world_size, folder=tmp_path)
    for index, stage in enumerate(stages):
        facts = [ranks[index] for ranks in by_rank]
        expected: list[tuple[int, int]] = []
        for one in facts[0]["all"]:
            short, long = sorted((one.rows, one.columns))
            expected += [(short, short)] * 5 + [(short, long)] * 5
        assert sorted(shape for one in facts for shape in one["products"]) == sorted(expected), f"stage {stage}"
        work = [sum(rows * rows * columns for rows, columns in one["products"]) for one in facts]
        assert max(work) <= 1.3 * sum(work) / world_size, f"stage {stage}: {work}"
        total = sum(one.length for one in facts[0]["all"])
        assert sum(one["momentum"] for one in facts) == total * (world_size if stage == 0 else 1)
        if stage:
            assert max(one["momentum"] for one in facts) <= total / world_size + 256, f"stage {stage}"
        assert not any(one["second moments of matrices"] for one in facts)


def resuming_worker(ranks: RankInfo, cases: list[tuple[int, str]], folder: str) -> list[tuple[str, bool, bool]]:
    results = []
    for case in cases:
        config, run = config_of(*case), Path(folder) / f"{case[0]}-{case[1]}"
        job = Job(ranks, config, vocab_size=VOCAB_SIZE)
        for step in range(3):
            job.step(step)
        assert job.save(run, step=3).error == ""
        resumed = Job(ranks, config, vocab_size=VOCAB_SIZE)
        resumed.load(checkpoint_folder(run, 3))
        going_on = [job.step(step) for step in (3, 4, 5)]
        again = [resumed.step(step) for step in (3, 4, 5)]
        weights = [[f.values[kind] for f in j.engine.fragments() for kind in f.values] for j in (job, resumed)]
        results.append((run.name, going_on == again, all(map(torch.equal, *weights))))
    return results


@BY_CASES
def test_a_checkpoint_continues_bit_for_bit(cases: list[tuple[int, str]], tmp_path: Path) -> None:
    for rank in run_ranks(resuming_worker, cases, str(tmp_path), world_size=2, folder=tmp_path / "results"):
        assert rank == [(f"{stage}-{precision}", True, True) for stage, precision in cases]


def saving_worker(ranks: RankInfo, folder: str) -> list[list[float]]:
    """A run at each stage is saved at step 3 and goes on."""
    losses = []
    for stage in range(4):
        job = Job(ranks, config_of(stage), vocab_size=VOCAB_SIZE)
        for step in range(3):
            job.step(step)
        assert job.save(Path(folder) / str(stage), step=3).error == ""
        losses.append([sum(job.step(step)) for step in (3, 4, 5)])
    return losses


def loading_worker(ranks: RankInfo, folder: str) -> list[list[float]]:
    """Each goes on at the next stage."""
    losses = []
    for stage in range(4):
        job = Job(ranks, config_of((stage + 1) % 4), vocab_size=VOCAB_SIZE)
        job.load(checkpoint_folder(Path(folder) / str(stage), 3))
        losses.append([sum(job.step(step)) for step in (3, 4, 5)])
        barrier()
    return losses


def test_other_ranks_at_other_stages_go_on_with_the_same_momentum(tmp_path: Path) -> None:
    two = run_ranks(saving_worker, str(tmp_path), world_size=2, folder=tmp_path / "2")
    four = run_ranks(loading_worker, str(tmp_path), world_size=4, folder=tmp_path / "4")
    for stage in range(4):
        expected = np.sum([ranks[stage] for ranks in two], axis=0)
        np.testing.assert_allclose(
            np.sum([ranks[stage] for ranks in four], axis=0), expected, rtol=2e-6, err_msg=str(stage)
        )
