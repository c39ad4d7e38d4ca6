"""Clipping and the loss scale are one factor of the engine. SGD shows errors in it, but Adam does not."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import VOCAB_SIZE, tiny_config
from txl_dist.config.load import plan_batch
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo
from txl_dist.model.transformer_xl import SegmentLoss, TransformerXL
from txl_dist.rng import derive_seed
from txl_dist.train.batch import batch_maker
from txl_dist.train.engine.zero import ZeroEngine, _loss_scaler, import_deepspeed

NUM_STEPS, LR = 3, 0.5
CLIP_NORMS = {"off": 0.0, "below": 0.05, "above": 1e4}
"""Beside gradient norms of about 1."""


def config_of(stage: int, clip_norm: float) -> Any:
    return tiny_config(
        engine={"zero_stage": stage},
        optim={"name": "sgd", "clip_norm": clip_norm},
        train={"num_lanes": 2, "microbatch_lanes": 2},
    )


def plain_weights(config: Any) -> dict[str, Tensor]:
    """After the same steps with torch alone."""
    torch.manual_seed(derive_seed(config.run.seed, "init"))
    module = SegmentLoss(TransformerXL(config.model, vocab_size=VOCAB_SIZE))
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    memory = module.model.empty_memory(num_lanes=2, memory_len=12)
    for batch in batches(module.model):
        loss, memory = module(batch, memory, 16.0)
        loss.backward()
        if config.optim.clip_norm:
            torch.nn.utils.clip_grad_norm_(module.parameters(), config.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("model."): value.detach() for name, value in module.named_parameters()}


def batches(model: TransformerXL) -> list[Any]:
    ids = torch.randint(0, VOCAB_SIZE, (NUM_STEPS, 2, 9), generator=torch.Generator().manual_seed(1)).numpy()
    return [batch_maker(model, mask_documents=False).batch(plain_segment(one)) for one in ids]


def clipping_worker(ranks: RankInfo, stage: int, divides: bool) -> dict[str, float]:
    """Per kind of clipping the largest distance of a weight from that of plain torch, in units of how far it moved.

    `divides`: the optimizer divides gradients, as on a GPU; then no pass over them does it."""
    found = {}
    for name, clip_norm in CLIP_NORMS.items():
        config = config_of(stage, clip_norm)
        engine = ZeroEngine(config, vocab_size=VOCAB_SIZE, plan=plan_batch(config.train, world_size=1), ranks=ranks)
        engine._update_divides = divides
        begin = {one.parameter: one.values["weight"].clone() for one in engine.fragments()}
        memory = engine.empty_memory(num_lanes=2, memory_len=12)
        multiply = Mock(side_effect=AssertionError("a pass over the gradients"))
        for batch in batches(engine.model):
            loss, memory = engine.forward(batch, memory, normalizer=16.0)
            engine.backward(loss)
            with patch.object(torch, "_foreach_mul_", multiply) if divides else nullcontext():
                engine.step(lr=LR, grad_norm=float(engine.grad_norm()))
        expected, moved, off = plain_weights(config), 0.0, 0.0
        for one in engine.fragments():
            target = expected[one.parameter].view(-1)
            moved = max(moved, float((target - begin[one.parameter]).abs().max()))
            off = max(off, float((target - one.values["weight"]).abs().max()))
        found[name] = off / moved
    return found


@pytest.mark.dist
@pytest.mark.parametrize("divides", [False, True], ids=["factor", "divided in the update"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_move_as_with_plain_torch_whatever_is_clipped(tmp_path: Path, stage: int, divides: bool) -> None:
    found = run_ranks(clipping_worker, stage, divides, world_size=1, folder=tmp_path)[0]
    assert found.keys() == CLIP_NORMS.keys()
    assert {name: off for name, off in found.items() if not off < 1e-4} == {}


@pytest.mark.parametrize(("norm", "factor"), [(2.0, 0.5 / 2.0), (0.1, 1.0)])
def test_the_factor_holds_clipping_and_loss_scale(norm: float, factor: float) -> None:
    engine = ZeroEngine.__new__(ZeroEngine)
    engine._plugin_optimizer = ""
    engine._optimizer = SimpleNamespace(loss_scale=1024.0, param_groups=[{}])
    engine._base_optimizer, engine._clip_norm, engine._update_divides = SimpleNamespace(), 0.5, False
    engine._decay = 0.0
    engine._engine = SimpleNamespace(step=lambda: None)
    engine.step(lr=0.1, grad_norm=norm)
    assert engine._factor == pytest.approx(factor / 1024.0, rel=1e-5)
    assert engine._given_norm == norm * 1024.0
    gradients = [torch.full((2,), 1024.0)]
    engine._rescale(gradients)
    assert gradients[0].tolist() == pytest.approx([factor] * 2, rel=1e-5)
    engine._update_divides, engine._device = True, torch.device("cpu")
    engine.step(lr=0.1, grad_norm=norm)
    assert engine._factor == 1.0
    assert float(engine._base_optimizer.grad_scale) == pytest.approx(1024.0 / factor, rel=1e-5)


def precisions_worker(ranks: RankInfo, stage: int) -> dict[str, list[Tensor]]:
    """Weights after some steps of AdamW, clipped, by precision and by who divides the gradients."""
    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch's CPU can; DeepSpeed does not know
    weights = {}
    for precision in ("fp32", "bf16", "fp16")[: 3 if stage < 3 else 2]:
        for divides in (False, True):
            config = tiny_config(
                engine={"zero_stage": stage, "precision": precision},
                optim={"clip_norm": 0.05},
                train={"num_lanes": 2, "microbatch_lanes": 2},
            )
            plan = plan_batch(config.train, world_size=1)
            with patch.object(ZeroEngine, "_take_over_gradients", lambda engine: None):
                engine = ZeroEngine(config, vocab_size=VOCAB_SIZE, plan=plan, ranks=ranks)
            engine._update_divides = divides
            if divides and stage:
                engine._take_over_gradients()  # as on a GPU, and in bf16 on a CPU
            if precision == "fp16":
                _loss_scaler(engine._optimizer).cur_scale = 2.0**8
            memory = engine.empty_memory(num_lanes=2, memory_len=12)
            for batch in batches(engine.model):
                loss, memory = engine.forward(batch, memory, normalizer=16.0)
                engine.backward(loss)
                engine.step(lr=1e-3, grad_norm=float(engine.grad_norm()))
            weights[f"{precision} {divides}"] = [one.values["weight"].clone() for one in engine.fragments()]
    return weights


@pytest.mark.dist
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adam_that_divides_gradients_itself_makes_the_same_steps(tmp_path: Path, stage: int) -> None:
    found = run_ranks(precisions_worker, stage, world_size=1, folder=tmp_path)[0]
    for precision in {name.split()[0] for name in found}:
        for one, other in zip(found[f"{precision} False"], found[f"{precision} True"], strict=True):
            # A step is at most 1e-3, the rate.
            torch.testing.assert_close(other, one, rtol=1e-6, atol=2e-6, msg=lambda text, of=precision: f"{of}: {text}")
