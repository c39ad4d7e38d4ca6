"""lamb and sgd with real DeepSpeed: any number of ranks, whole tensors, and a checkpoint that resumes bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.test_checkpoint import Job
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import VOCAB_SIZE, tiny_config, train_engine
from txl_dist.artifacts import checkpoint_folder
from txl_dist.config.load import Config, check_config
from txl_dist.distributed.collectives import RankInfo

pytestmark = pytest.mark.dist

LAMB = {"name": "lamb", "lr": 0.05, "eps": 1e-6, "weight_decay": 0.01}
SGD = {"name": "sgd", "lr": 0.5, "momentum": 0.9}


def config_of(optim: dict[str, Any], *, zero_stage: int = 0) -> Config:
    config = tiny_config(optim=optim, engine={"zero_stage": zero_stage})
    check_config(config)
    return config


def training_worker(ranks: RankInfo, cases: list[tuple[dict[str, Any], int]]) -> list[Any]:
    return [train_engine(ranks, config_of(optim, zero_stage=stage), num_steps=20) for optim, stage in cases]


def test_one_and_two_ranks_train_alike_with_lamb_and_with_sgd_at_either_stage(tmp_path: Path) -> None:
    cases = [(LAMB, 0), (SGD, 0), (SGD, 1)]
    alone = run_ranks(training_worker, cases, world_size=1, folder=tmp_path / "1")[0]
    together = run_ranks(training_worker, cases, world_size=2, folder=tmp_path / "2")
    for index, (optim, stage) in enumerate(cases):
        losses, memories, _ = alone[index]
        name = f"{optim['name']}, stage {stage}"
        assert losses[-1] < losses[0] - 0.1, f"{name} learns"
        np.testing.assert_allclose(together[0][index][0], losses, rtol=1e-5, atol=0, err_msg=name)
        by_lane = together[0][index][1] | together[1][index][1]
        assert sorted(by_lane) == sorted(memories) == [0, 1, 2, 3]
        for lane, memory in memories.items():
            assert np.abs(by_lane[lane] - memory).max() <= 1e-5 * np.abs(memory).max(), f"{name}, lane {lane}"
    np.testing.assert_allclose(alone[2][0], alone[1][0], rtol=1e-5, atol=0, err_msg="sgd at stages 0 and 1")


def ratios_worker(ranks: RankInfo) -> dict[str, tuple[float, float, float]]:
    """By parameter: the library's trust ratio, that of the equations over the whole tensor, and the update's error."""
    job = Job(ranks, config_of(LAMB), vocab_size=VOCAB_SIZE)
    module, optimizer = job.engine._engine.module, job.engine._optimizer
    for step in range(3):
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        job.step(step)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    found = {}
    for name, p in module.named_parameters():
        state, w = optimizer.state[p], before[name]
        assert state["exp_avg"].shape == w.shape
        s = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + LAMB["eps"]) + decays[id(p)] * w
        norm_w, norm_s = min(float(w.norm()), 10.0), float(s.norm())
        ratio = norm_w / (norm_s + LAMB["eps"]) if norm_w and norm_s else 1.0
        error = float((p.detach() - (w - 1e-2 * ratio * s)).abs().max())
        found[name] = (float(state["trust_ratio"]), ratio, error)
    return found


def test_the_trust_ratios_are_those_of_whole_tensors(tmp_path: Path) -> None:
    first, second = run_ranks(ratios_worker, world_size=2, folder=tmp_path)
    assert first == second
    assert len({ratio for ratio, _, _ in first.values()}) > len(first) // 2, "each tensor has its own"
    for name, (ratio, expected, error) in first.items():
        assert ratio == pytest.approx(expected, rel=1e-5), name
        assert error <= 1e-6, name


def resuming_worker(ranks: RankInfo, folder: str) -> list[Any]:
    results = []
    for optim, stage in ((LAMB, 0), (SGD, 0), (SGD, 1)):
        config = config_of(optim, zero_stage=stage)
        run = Path(folder) / f"{optim['name']}-{stage}"
        job = Job(ranks, config, vocab_size=VOCAB_SIZE)
        for step in range(3):
            job.step(step)
        assert job.save(run, step=3).error == ""
        resumed = Job(ranks, config, vocab_size=VOCAB_SIZE)
        resumed.load(checkpoint_folder(run, 3))
        going_on = [job.step(step) for step in (3, 4, 5)]
        again = [resumed.step(step) for step in (3, 4, 5)]
        weights = [torch.cat([p.detach().flatten() for p in j.engine.model.parameters()]) for j in (job, resumed)]
        results.append((optim["name"], stage, going_on == again, torch.equal(*weights)))
    return results


def test_a_checkpoint_continues_bit_for_bit(tmp_path: Path) -> None:
    for rank in run_ranks(resuming_worker, str(tmp_path), world_size=2, folder=tmp_path / "results"):
        assert rank == [("lamb", 0, True, True), ("sgd", 0, True, True), ("sgd", 1, True, True)]
