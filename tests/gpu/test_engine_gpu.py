"""Properties that only a GPU shows: half precisions train, and agree with fp32."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config, train_engine
from txl_dist.distributed.collectives import RankInfo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def precisions_worker(ranks: RankInfo, stage: int) -> dict[str, list[float]]:
    return {
        precision: train_engine(ranks, tiny_config(engine={"zero_stage": stage, "precision": precision}), num_steps=20)[
            0
        ]
        for precision in ("fp32", "tf32", "bf16", "fp16")
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_half_precisions_follow_fp32(tmp_path: Path, stage: int) -> None:
    losses = run_ranks(precisions_worker, stage, world_size=1, folder=tmp_path)[0]
    assert losses["fp32"][-1] < losses["fp32"][0] - 0.1
    np.testing.assert_allclose(losses["tf32"], losses["fp32"], rtol=2e-3)
    np.testing.assert_allclose(losses["bf16"], losses["fp32"], rtol=2e-2)
    assert np.isfinite(losses["fp16"]).all()
    assert losses["fp16"][-1] < losses["fp16"][0]


def kernels_worker(ranks: RankInfo, stage: int) -> dict[str, list[float]]:
    return {
        attention: train_engine(
            ranks,
            tiny_config(engine={"zero_stage": stage, "precision": "bf16", "attention": attention}),
            num_steps=20,
        )[0]
        for attention in ("plain", "fused", "triton")
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_ways_to_compute_attention_train_alike(tmp_path: Path, stage: int) -> None:
    losses = run_ranks(kernels_worker, stage, world_size=1, folder=tmp_path)[0]
    for attention in ("fused", "triton"):
        np.testing.assert_allclose(losses[attention], losses["plain"], rtol=2e-2)


def padding_worker(ranks: RankInfo, stage: int) -> dict[str, list[float]]:
    odd = {"width": 20, "head_width": 5, "ff_width": 18}
    return {
        pads: train_engine(
            ranks,
            tiny_config(model=odd, engine={"zero_stage": stage, "precision": "bf16", "pad_widths": pads}),
            num_steps=20,
        )[0]
        for pads in ("off", "auto")
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_padded_widths_train_alike(tmp_path: Path, stage: int) -> None:
    losses = run_ranks(padding_worker, stage, world_size=1, folder=tmp_path)[0]
    np.testing.assert_allclose(losses["auto"], losses["off"], rtol=2e-2)


def graphs_worker(ranks: RankInfo, stage: int, precision: str) -> list[list[float]]:
    return [
        train_engine(
            ranks,
            tiny_config(
                engine={"zero_stage": stage, "precision": precision, "cuda_graph": "on" if is_graphed else "off"},
                model={"dropout": 0.1, "attention_dropout": 0.1},
                train={"segment_len": 64},  # two sizes of clusters, so two graphs
            ),
            num_steps=20,
            evaluates=True,
        )[0]
        for is_graphed in (False, True, True)
    ]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_replayed_micro_steps_train_as_others_do(tmp_path: Path, stage: int, precision: str) -> None:
    plain, graphed, again = run_ranks(graphs_worker, stage, precision, world_size=1, folder=tmp_path)[0]
    assert graphed == again, "the same seeds, the same dropout"
    np.testing.assert_allclose(graphed, plain, rtol=2e-2)
