"""fp16 scales the loss so that small gradients survive, and the reported norm does not contain the scale."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import VOCAB_SIZE, tiny_config
from txl_dist.config.load import plan_batch
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo
from txl_dist.train.batch import batch_maker
from txl_dist.train.engine import cuda_graph as graph
from txl_dist.train.engine.zero import ZeroEngine, _loss_scaler, import_deepspeed
from txl_dist.train.footprint.rank import bytes_per_rank

SCALE = 2.0**8
"""With DeepSpeed's first one, 65,536, a step may overflow, which is not what is asked here."""


def norms_worker(ranks: RankInfo, stage: int) -> dict[str, list[float]]:
    """The norms of two steps of two micro-batches: in fp32, in fp16, and in fp16 recorded."""
    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch's CPU can; DeepSpeed does not know

    def record(run: Callable[[], Any], *, pool: Any) -> Callable[[], None]:
        run()
        return lambda: run()

    graph.record_on_gpu = record  # type: ignore[assignment]
    norms: dict[str, list[float]] = {}
    for name in ("fp32", "fp16", "fp16 graphed")[: 2 if stage == 3 else 3]:
        precision = name.split()[0]
        graph_of = "on" if "graphed" in name else "off"
        config = tiny_config(engine={"zero_stage": stage, "precision": precision, "cuda_graph": graph_of})
        engine = ZeroEngine(config, vocab_size=VOCAB_SIZE, plan=plan_batch(config.train, world_size=1), ranks=ranks)
        if precision == "fp16":
            _loss_scaler(engine._optimizer).cur_scale = SCALE
        ids = torch.randint(0, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1)).numpy()
        batch = batch_maker(engine.model, mask_documents=False).batch(plain_segment(ids))
        memory = engine.empty_memory(num_lanes=2, memory_len=12)
        norms[name] = []
        for _ in range(2):
            for _ in range(2):
                loss, _ = engine.forward(batch, memory, normalizer=16.0)
                engine.backward(loss)
            norms[name].append(float(engine.grad_norm()))
            engine.step(lr=1e-3, grad_norm=norms[name][-1])
    return norms


def moves_worker(ranks: RankInfo, stage: int) -> dict[str, list[float]]:
    """How far a weight moves in the first two steps of Adam, the median, in units of the rate."""
    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    moves: dict[str, list[float]] = {}
    for precision in ("fp32", "bf16", "fp16")[: 2 if stage == 3 else 3]:
        config = tiny_config(
            engine={"zero_stage": stage, "precision": precision}, train={"num_lanes": 2, "microbatch_lanes": 2}
        )
        engine = ZeroEngine(config, vocab_size=VOCAB_SIZE, plan=plan_batch(config.train, world_size=1), ranks=ranks)
        if precision == "fp16":
            _loss_scaler(engine._optimizer).cur_scale = SCALE
        ids = torch.randint(0, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1)).numpy()
        batch = batch_maker(engine.model, mask_documents=False).batch(plain_segment(ids))
        memory, moves[precision] = engine.empty_memory(num_lanes=2, memory_len=12), []
        for _ in range(2):
            before = [one.values["weight"].clone() for one in engine.fragments()]
            loss, _ = engine.forward(batch, memory, normalizer=16.0)
            engine.backward(loss)
            engine.step(lr=1e-3, grad_norm=float(engine.grad_norm()))
            after = [one.values["weight"] for one in engine.fragments()]
            distance = torch.cat([(new - old).abs() for old, new in zip(before, after, strict=True)])
            moves[precision].append(float(distance[distance > 0].median()) / 1e-3)
        steps = {one.step for one in engine.fragments()}
        assert steps == {2.0}
    return moves


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adams_first_steps_are_its_first_at_every_stage_and_precision(tmp_path: Path, stage: int) -> None:
    found = run_ranks(moves_worker, stage, world_size=1, folder=tmp_path)[0]
    assert found["fp32"][0] == pytest.approx(1.0, abs=0.01)  # Adam's first step is one rate long
    for moves in found.values():
        assert moves == pytest.approx(found["fp32"], abs=0.02)


def gradients_worker(ranks: RankInfo, stage: int) -> dict[str, tuple[float, float]]:
    """Bytes of the gradients behind the last micro-batch: (foreseen, found)."""
    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        config = tiny_config(engine={"zero_stage": stage, "precision": precision})
        plan = plan_batch(config.train, world_size=1)
        engine = ZeroEngine(config, vocab_size=VOCAB_SIZE, plan=plan, ranks=ranks)
        ids = torch.randint(0, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1)).numpy()
        batch = batch_maker(engine.model, mask_documents=False).batch(plain_segment(ids))
        memory = engine.empty_memory(num_lanes=2, memory_len=12)
        for _ in range(plan.num_microbatches):
            loss, _ = engine.forward(batch, memory, normalizer=16.0)
            engine.backward(loss)
        kept = engine._optimizer.averaged_gradients if stage else {0: [one.tensor.grad for one in engine.stored]}
        tensors = [one for group in kept.values() for one in group]
        foreseen = bytes_per_rank(config, plan=plan, vocab_size=VOCAB_SIZE, on_gpu=False)["gradients"]
        found[precision] = (foreseen, float(sum(one.numel() * one.element_size() for one in tensors)))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_bytes_of_gradients_are_foreseen_in_every_precision(tmp_path: Path, stage: int) -> None:
    for precision, (foreseen, found) in run_ranks(gradients_worker, stage, world_size=1, folder=tmp_path)[0].items():
        assert found == pytest.approx(foreseen, rel=0.1), precision  # flat tensors are aligned


@pytest.mark.dist
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norms_in_fp16_are_those_in_fp32(tmp_path: Path, stage: int) -> None:
    norms = run_ranks(norms_worker, stage, world_size=1, folder=tmp_path)[0]
    expected = norms.pop("fp32")
    assert len(norms) == (1 if stage == 3 else 2)
    for name, found in norms.items():
        assert found == pytest.approx(expected, rel=2e-2), name
