"""ZeRO stages, micro-batches and recomputation of activations change only the cost of the training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config, train_engine
from txl_dist.distributed.collectives import RankInfo
from txl_dist.train.engine import deepspeed_config

pytestmark = pytest.mark.dist

RARE_FREE = (3, 1)


def stages_worker(ranks: RankInfo, precision: str) -> list[list[float]]:
    return [
        train_engine(
            ranks,
            tiny_config(engine={"zero_stage": stage, "precision": precision}),
            num_steps=20,
            rare_free=RARE_FREE,
        )[0]
        for stage in range(4)
    ]


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """Losses at stages 0 to 3."""
    return run_ranks(stages_worker, "fp32", world_size=2, folder=tmp_path_factory.mktemp("fp32"))[0]


def test_all_stages_give_the_same_losses_although_a_cluster_is_empty_on_one_rank(fp32: list[list[float]]) -> None:
    assert fp32[0][-1] < fp32[0][0] - 0.1, "it learns"
    for stage in (1, 2, 3):
        np.testing.assert_allclose(fp32[stage], fp32[0], rtol=1e-5, atol=0)


def test_bf16_follows_at_all_stages(fp32: list[list[float]], tmp_path: Path) -> None:
    bf16 = run_ranks(stages_worker, "bf16", world_size=2, folder=tmp_path)[0]
    for stage in range(4):
        np.testing.assert_allclose(bf16[stage], fp32[0], rtol=2e-2, atol=0)


def buckets_worker(ranks: RankInfo, recomputes: bool) -> list[list[float]]:
    """Losses at stages 0 to 3, with buckets that a block's gradients overfill. u and v matter in them."""
    deepspeed_config.BUCKET_LEN = 2000
    losses = []
    for stage in range(4):
        engine = {"zero_stage": stage, "activation_checkpointing": recomputes}
        model = {"num_layers": 4, "init_std": 0.1}
        losses.append(train_engine(ranks, tiny_config(engine=engine, model=model), num_steps=12)[0])
    return losses


@pytest.mark.parametrize("recomputes", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_biases_that_layers_share_are_trained_at_all_stages_when_buckets_overflow(
    tmp_path: Path, recomputes: bool
) -> None:
    losses = run_ranks(buckets_worker, recomputes, world_size=2, folder=tmp_path)[0]
    for stage in (1, 2, 3):
        np.testing.assert_allclose(losses[stage], losses[0], rtol=1e-5, atol=0)


MODERN = {
    "pre_norm": True,
    "final_norm": True,
    "norm": "rms",
    "zero_init": True,
    "query_key_norm": True,
    "residual_scalars": True,
    "value_residual": True,
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "modern": {
        "model": {"num_layers": 3, "activation": "relu2", **MODERN},
        "optim": {"name": "muon", "lr": 1e-3},
        "train": {"memory_lens": [12, 5, 0]},
    },
    "swiglu": {"model": {"num_layers": 3, "activation": "swiglu", **MODERN, "pre_norm": False, "final_norm": False}},
    "modern recomputed": {
        "model": {"num_layers": 3, "activation": "relu2", "ff_dropout": 0.1, **MODERN},
        "engine": {"activation_checkpointing": True},
    },
    "labml": {
        "model": {
            "positions": "learned_relative",
            "num_distances": 12,
            "share_biases": False,
            "value_bias": True,
            "output_bias": True,
            "scale_embedding": False,
            "pre_norm": True,
            "final_norm": True,
            "tie_weights": False,
            "activation": "gelu",
        }
    },
    "vanilla": {"model": {"positions": "absolute"}, "train": {"memory_len": 0}},
    "nvidia": {"model": {"same_length": "memory_and_self", "project_same_width": False}},
}


def variants_worker(ranks: RankInfo, stages: tuple[int, ...]) -> dict[str, list[Any]]:
    return {
        name: [
            train_engine(
                ranks,
                tiny_config(**sections | {"engine": sections.get("engine", {}) | {"zero_stage": stage}}),
                num_steps=6,
            )
            for stage in stages
        ]
        for name, sections in VARIANTS.items()
    }


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((0, 1, 2), marks=pytest.mark.nightly)], ids=str)
def test_every_variant_of_the_model_trains_alike_in_all_stages(stages: tuple[int, ...], tmp_path: Path) -> None:
    """Parameters outside the module that reads them would be empty at stage 3."""
    for name, (plain, *sharded) in run_ranks(variants_worker, stages, world_size=2, folder=tmp_path)[0].items():
        assert plain[0][-1] != plain[0][0], name
        for losses, _, held_out in sharded:
            np.testing.assert_allclose(losses, plain[0], rtol=1e-5, atol=0, err_msg=name)
            np.testing.assert_allclose(held_out, plain[2], rtol=1e-4, atol=1e-5, err_msg=name)


def cuts_worker(ranks: RankInfo, cuts: list[int]) -> list[Any]:
    return [train_engine(ranks, tiny_config(train={"microbatch_lanes": cut}), num_steps=10) for cut in cuts]


def test_losses_and_memories_do_not_depend_on_how_the_lanes_are_cut(tmp_path: Path) -> None:
    results = []
    for world_size, cuts in ((1, [4, 2, 1]), (2, [2, 1]), (4, [1])):
        by_rank = run_ranks(cuts_worker, cuts, world_size=world_size, folder=tmp_path / str(world_size))
        for index, cut in enumerate(cuts):
            memories: dict[int, Any] = {}
            for rank in by_rank:
                memories |= rank[index][1]
            results.append((f"{world_size} ranks x {cut} lanes", by_rank[0][index][0], memories))
    assert len(results) == 6
    _, losses, memories = results[0]
    for name, other_losses, other_memories in results[1:]:
        np.testing.assert_allclose(other_losses, losses, rtol=1e-5, atol=0, err_msg=name)
        assert sorted(other_memories) == [0, 1, 2, 3]
        for lane, memory in memories.items():
            scale = np.abs(memory).max()
            assert np.abs(other_memories[lane] - memory).max() <= 1e-5 * scale, f"{name}, lane {lane}"


def recompute_worker(ranks: RankInfo) -> list[Any]:
    return [
        train_engine(
            ranks,
            tiny_config(
                model={"dropout": 0.2, "attention_dropout": 0.1},
                engine={"zero_stage": stage, "activation_checkpointing": recompute},
            ),
            num_steps=5,
        )
        for stage in (1, 3)
        for recompute in (False, True)
    ]


def test_activation_checkpointing_is_bit_identical_with_dropout(tmp_path: Path) -> None:
    for plain_1, recomputed_1, plain_3, recomputed_3 in run_ranks(recompute_worker, world_size=2, folder=tmp_path):
        assert_same_training(plain_1, recomputed_1)
        assert_same_training(plain_3, recomputed_3)


def evaluating_worker(ranks: RankInfo) -> list[Any]:
    return [
        train_engine(
            ranks,
            tiny_config(model={"dropout": 0.2}, engine={"zero_stage": stage}),
            num_steps=4,
            evaluates=evaluates,
        )
        for stage in (1, 3)
        for evaluates in (False, True)
    ]


def test_evaluation_between_steps_cannot_be_seen_in_training(tmp_path: Path) -> None:
    for quiet_1, watched_1, quiet_3, watched_3 in run_ranks(evaluating_worker, world_size=2, folder=tmp_path):
        assert_same_training(quiet_1, watched_1)
        assert_same_training(quiet_3, watched_3)


def assert_same_training(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    np.testing.assert_array_equal(one[2], other[2])
    for lane, memory in one[1].items():
        np.testing.assert_array_equal(memory, other[1][lane])
