"""Training that begins with imported weights follows the training of the original code, step for step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.peers import WITH_CURVE, read_golden, state_dict, write_original_module
from tests.helpers.ranks import run_ranks
from txl_dist.config.load import Config, plan_batch
from txl_dist.convert.importer import import_model
from txl_dist.distributed.collectives import RankInfo
from txl_dist.inference.bundle import load_bundle
from txl_dist.model.transformer_xl import Batch
from txl_dist.train.engine.zero import ZeroEngine

pytestmark = pytest.mark.dist


RUNS = [*((name, 1) for name in WITH_CURVE), ("wt103_large_like", 3)]
"""Golden file and ZeRO stage."""


def curves(ranks: RankInfo, folder: Path) -> list[list[tuple[float, float]]]:
    """(loss, gradient norm) of each step of each run; every engine begins with an imported bundle."""
    return [curve(ranks, folder, name, stage) for name, stage in RUNS]


def curve(ranks: RankInfo, folder: Path, name: str, stage: int) -> list[tuple[float, float]]:
    """As the golden files were made: Adam, constant rate, clipped, memory carried."""
    settings, golden = read_golden(name)
    file = write_original_module(folder / f"{name}.pt", settings, state_dict(golden), legacy=False)
    import_model(file, folder / name, format="original")
    bundle = load_bundle(folder / name)
    ids_BS = golden["train_ids"].t().contiguous()
    num_lanes, segment_len = ids_BS.shape[0], bundle.segment_len
    config = Config.model_validate(
        {
            "model": bundle.model.section.model_dump(),
            "engine": {"zero_stage": stage},
            "optim": {"name": "adam", "lr": 1e-3, "clip_norm": 0.25},
            "train": {
                "num_lanes": num_lanes,
                "segment_len": segment_len,
                "memory_len": bundle.memory_len,
                "microbatch_lanes": num_lanes,
            },
        }
    )
    engine = ZeroEngine(
        config,
        vocab_size=settings["n_token"],
        plan=plan_batch(config.train, world_size=1),
        ranks=ranks,
        weights={key: value.detach() for key, value in bundle.model.named_parameters()},
    )
    memory = engine.empty_memory(num_lanes=num_lanes, memory_len=bundle.memory_len)
    points = []
    for start in range(0, ids_BS.shape[1] - 1, segment_len):
        tokens_BT = ids_BS[:, start : start + segment_len]
        targets_BT = ids_BS[:, start + 1 : start + segment_len + 1]
        batch = Batch(tokens_BT, targets_BT, torch.ones(tokens_BT.shape), None)
        loss, memory = engine.forward(batch, memory, normalizer=float(tokens_BT.numel()))
        engine.backward(loss)
        grad_norm = float(engine.grad_norm())
        engine.step(lr=1e-3, grad_norm=grad_norm)
        points.append((loss.item(), grad_norm))
    return points


def test_training_from_imported_weights_follows_the_curves_of_the_original(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (found,) = run_ranks(curves, tmp_path / "work", world_size=1, folder=tmp_path / "ranks")
    for (name, _), points in zip(RUNS, found, strict=True):
        _, golden = read_golden(name)
        assert len(points) == len(golden["train_loss"]) == 60
        for step, (loss, norm) in enumerate(points):
            assert loss == pytest.approx(golden["train_loss"][step].item(), rel=1e-3), f"{name}: loss of step {step}"
            expected = golden["train_grad_norm"][step].item()
            assert norm == pytest.approx(expected, rel=1e-3), f"{name}: gradient norm of step {step}"
