"""Norms by layer and accuracy are right at every stage on real ranks, and measuring them changes nothing."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.test_checkpoint import Job
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import VOCAB_SIZE, tiny_config
from txl_dist.config.load import Config
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo
from txl_dist.model.transformer_xl import SegmentLoss, TransformerXL
from txl_dist.rng import derive_seed
from txl_dist.train.engine.zero import _loss_scaler, import_deepspeed
from txl_dist.train.report.layer_stats import NOTHING, measure_layer_stats

pytestmark = pytest.mark.dist

NUM_STEPS = 3
FEW: list[tuple[int, str, dict[str, Any]]] = [
    *((stage, "fp32", {}) for stage in range(4)),
    *((stage, "bf16", {}) for stage in (0, 3)),
    (1, "fp16", {}),
    *((stage, "fp32", {"name": "muon"}) for stage in range(2)),
    (3, "fp32 offloaded", {}),
]
ALL: list[tuple[int, str, dict[str, Any]]] = [
    *FEW,
    *((stage, "bf16", {}) for stage in (1, 2)),
    *((stage, "fp16", {}) for stage in (0, 2)),
    (1, "fp32 offloaded", {}),
]


def config_of(stage: int, precision: str, optim: dict[str, Any], *, every: int) -> Config:
    return tiny_config(
        model={"dropout": 0.1, "residual_scalars": True},
        engine={
            "zero_stage": stage,
            "precision": precision.split()[0],
            "offload_optimizer": precision.endswith("offloaded"),
        },
        optim=optim,
        metrics={"accuracy_every_steps": every, "norms_every_steps": every},
    )


def segment_of(config: Config, step: int) -> np.ndarray:
    """Where ids follow each other, so that something can be learnt: all lanes."""
    shape = (config.train.num_lanes, 1)
    first = np.random.default_rng(step).integers(0, VOCAB_SIZE, shape)
    return (first + np.arange(config.train.segment_len + 1)) % VOCAB_SIZE


def trained(ranks: RankInfo, config: Config) -> dict[str, Any]:
    """Steps with what they are asked to measure before each update."""
    job = Job(ranks, config, vocab_size=VOCAB_SIZE)
    metrics = config.metrics
    if config.engine.precision == "fp16":
        _loss_scaler(job.engine._optimizer).cur_scale = 2.0**8
    losses, norms, seen = [], [], []
    for step in range(1, NUM_STEPS + 1):
        ids = segment_of(config, step)[job.lanes.start : job.lanes.stop]
        batches = job.maker.microbatches(plain_segment(ids), lanes=job.plan.microbatch_lanes)
        after = []
        for index, (batch, memory) in enumerate(zip(batches, job.memories, strict=True)):
            torch.manual_seed(1000 * step + 10 * ranks.rank + index)
            loss, memory = job.engine.forward(batch, memory, normalizer=16.0)
            job.engine.backward(loss)
            losses.append(loss.item())
            after.append(memory)
        norms.append(float(job.engine.grad_norm()))
        stats = measure_layer_stats(
            job.engine,
            batches,
            job.memories,
            step=step,
            accuracy_every=metrics.accuracy_every_steps,
            norms_every=metrics.norms_every_steps,
            device=ranks.device,
        )
        seen.append(stats)
        job.engine.step(lr=1e-2, grad_norm=norms[-1])
        job.memories = tuple(after)
    return {"losses": losses, "norms": norms, "seen": seen}


def worker(ranks: RankInfo, cases: list[tuple[int, str, dict[str, Any]]]) -> dict[str, Any]:
    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch's CPU can; DeepSpeed does not know
    found = {}
    for stage, precision, optim in cases:
        name = f"{precision} {stage} {optim.get('name', 'adamw')}"
        found[name] = [trained(ranks, config_of(stage, precision, optim, every=every)) for every in (1, 0)]
    return found


@pytest.fixture(scope="module", params=[FEW, pytest.param(ALL, marks=pytest.mark.nightly)], ids=["few", "all"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results = run_ranks(worker, request.param, world_size=2, folder=tmp_path_factory.mktemp("layer_stats"))
    for name in results[0]:  # all ranks know the same
        assert str(results[0][name][0]["seen"]) == str(results[1][name][0]["seen"])
    return results[0]


def test_losses_and_norms_are_bit_for_bit_those_of_a_run_that_measures_nothing(found: dict[str, Any]) -> None:
    for name, (measured, plain) in found.items():
        assert (measured["losses"], measured["norms"]) == (plain["losses"], plain["norms"]), name
        assert plain["seen"] == [NOTHING] * NUM_STEPS


def test_gradient_norms_of_the_parts_make_up_the_norm_of_the_whole(found: dict[str, Any]) -> None:
    for name, (measured, _) in found.items():
        for norm, seen in zip(measured["norms"], measured["seen"], strict=True):
            parts = [v for k, v in seen.layers.items() if k.startswith("gradient_norm_")]
            total = math.hypot(*seen.layers["gradient_norm"], *parts)
            assert total == pytest.approx(norm, rel=1e-5), name


def test_all_stages_see_what_stage_0_sees(found: dict[str, Any]) -> None:
    for name in [name for name in found if name.startswith("fp32") and " 0 " not in name]:
        base = found[f"fp32 0 {name.split()[-1]}"][0]["seen"]
        for ours, theirs in zip(found[name][0]["seen"], base, strict=True):
            assert ours.accuracy == theirs.accuracy
            assert ours.layers.keys() == theirs.layers.keys()
            for key, value in ours.layers.items():
                assert value == pytest.approx(theirs.layers[key], rel=2e-5), (name, key)


def test_stage_0_sees_what_plain_torch_sees(found: dict[str, Any]) -> None:
    config = config_of(0, "fp32", {}, every=1)
    torch.manual_seed(derive_seed(config.run.seed, "init"))
    module = SegmentLoss(TransformerXL(config.model, vocab_size=VOCAB_SIZE))
    seen = found["fp32 0 adamw"][0]["seen"][0]
    weights = {name.removeprefix("model."): one.detach() for name, one in module.named_parameters()}
    for layer in range(2):
        own = [w.norm() for name, w in weights.items() if name.startswith((f"blocks.{layer}.", f"residuals.{layer}."))]
        assert seen.layers["weight_norm"][layer] == pytest.approx(float(torch.stack(own).norm()), rel=1e-5)
    own = [w.norm() for name, w in weights.items() if name.startswith("embedding.")]
    assert seen.layers["weight_norm_embedding"] == pytest.approx(float(torch.stack(own).norm()), rel=1e-5)
    outputs: dict[int, torch.Tensor] = {}
    for index, block in enumerate(module.model.blocks):
        block.register_forward_hook(lambda _, __, out, index=index: outputs.__setitem__(index, out[0]))
    ids = torch.from_numpy(segment_of(config, 1))
    module.eval()
    with torch.no_grad():
        hidden, _ = module.model(ids[:, :-1], module.model.empty_memory(num_lanes=4, memory_len=12))
    rms = [float(outputs[index].double().square().mean().sqrt()) for index in range(2)]
    assert seen.layers["activation_rms"] == pytest.approx(rms, rel=1e-5)
    best = module.model.softmax.log_probabilities(hidden.flatten(0, 1)).argmax(-1)
    assert seen.accuracy == pytest.approx(float((best == ids[:, 1:].flatten()).double().mean()))
