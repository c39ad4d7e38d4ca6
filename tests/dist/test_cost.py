"""Costs of a step besides its arithmetic: waiting for the device, and gathered weights."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import VOCAB_SIZE, tiny_config, train_engine
from tests.helpers.waits import Waits
from txl_dist.config.load import plan_batch
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo, StepFlags
from txl_dist.train.batch import batch_maker
from txl_dist.train.engine import cuda_graph as graph
from txl_dist.train.engine.zero import ZeroEngine, import_deepspeed
from txl_dist.train.stepper import reduce_step

pytestmark = pytest.mark.dist

MODEL = {"num_layers": 5, "width": 160, "num_heads": 4, "head_width": 40, "ff_width": 320}
"""Its matrices are large enough to be gathered."""


def waiting_worker(ranks: RankInfo, stage: int, precision: str) -> tuple[list[str], list[str]]:
    """Where the second step waits: (in its micro-steps, in its update)."""
    config = tiny_config(engine={"zero_stage": stage, "precision": precision})
    engine, batch = _engine_and_batch(ranks, config)
    memory = engine.empty_memory(num_lanes=2, memory_len=12)
    for _ in range(2):
        with Waits() as micro:
            for _ in range(2):
                loss, _ = engine.forward(batch, memory, normalizer=16.0)
                engine.backward(loss)
        norm, votes = engine.grad_norm(), StepFlags()
        decision = reduce_step(loss.detach(), norm, skip=False, votes=votes, world_size=ranks.world_size)
        with Waits() as update:
            engine.step(lr=1e-3, grad_norm=decision.grad_norm)
    return micro.places, update.places


def _engine_and_batch(ranks: RankInfo, config):  # type: ignore[no-untyped-def]
    plan = plan_batch(config.train, world_size=ranks.world_size)
    engine = ZeroEngine(config, vocab_size=VOCAB_SIZE, plan=plan, ranks=ranks)
    ids = torch.randint(0, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1)).numpy()
    batch = batch_maker(engine.model, mask_documents=False).batch(plain_segment(ids))
    return engine, batch


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_forward_and_backward_never_wait_and_the_update_at_most_once(tmp_path: Path, stage: int) -> None:
    for precision in ("fp32", "bf16"):
        micro, update = run_ranks(waiting_worker, stage, precision, world_size=1, folder=tmp_path / precision)[0]
        assert micro == [], "\n".join(micro)
        assert len(update) <= (1 if stage == 3 else 0), "\n".join(update)


def synchronizing_worker(ranks: RankInfo, stage: int) -> int:
    """How often four steps of two micro-batches let DeepSpeed wait for all that a device has to do."""
    engine, batch = _engine_and_batch(ranks, tiny_config(engine={"zero_stage": stage}))
    memory, calls = engine.empty_memory(num_lanes=2, memory_len=12), []
    get_accelerator = import_deepspeed().accelerator.get_accelerator
    get_accelerator().synchronize = lambda *_: calls.append(1)
    for _ in range(4):
        for _ in range(2):
            loss, _ = engine.forward(batch, memory, normalizer=16.0)
            engine.backward(loss)
        engine.step(lr=1e-3, grad_norm=float(engine.grad_norm()))
    return len(calls)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_never_waits_for_the_whole_device(tmp_path: Path, stage: int) -> None:
    assert run_ranks(synchronizing_worker, stage, world_size=1, folder=tmp_path) == [0]


def norms_worker(ranks: RankInfo, stage: int, precision: str) -> list[tuple[float, float, list[str], int, int]]:
    """Per step: (DeepSpeed's norm; ours; where ours waits; values of the largest tensor it makes; of a gradient)."""
    config = tiny_config(model=MODEL, engine={"zero_stage": stage, "precision": precision})
    with patch.object(ZeroEngine, "_take_over_gradients", lambda engine: None):
        engine, batch = _engine_and_batch(ranks, config)
    memory, found, of_deepspeed = engine.empty_memory(num_lanes=2, memory_len=12), [], engine._compute_norm
    engine._take_over_gradients()  # as on a GPU, and in bf16 on a CPU
    of_gpu = engine._compute_norm
    for _ in range(2):
        for _ in range(2 // ranks.world_size):
            loss, _ = engine.forward(batch, memory, normalizer=16.0 * (1 + ranks.rank))
            engine.backward(loss)
        engine._compute_norm = of_deepspeed
        expected = float(engine.grad_norm())
        engine._compute_norm = of_gpu
        with Waits() as waits:
            norm = engine.grad_norm()
        length = max(part.numel() for group in engine._optimizer.averaged_gradients.values() for part in group)
        found.append((expected, float(norm), waits.places, waits.longest, length))
        engine.step(lr=1e-3, grad_norm=expected)
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_of_a_gpu_is_deepspeeds_without_its_waits_and_copies(
    tmp_path: Path, stage: int, precision: str
) -> None:
    both = run_ranks(norms_worker, stage, precision, world_size=2, folder=tmp_path)
    for expected, norm, waits, longest, length in both[0] + both[1]:
        assert norm == pytest.approx(expected, rel=1e-5)
        assert waits == []
        assert longest < 2_048 < length, "a CPU adds squares in rows of 1,024, a GPU makes a number per parameter"


def gathering_worker(ranks: RankInfo) -> tuple[int, list[int], list[int]]:
    """(parameters of a block; those gathered after each block; the same when the forward pass is over)."""
    config = tiny_config(model=MODEL, train={"num_lanes": 4, "microbatch_lanes": 2}, engine={"zero_stage": 3})
    engine, batch = _engine_and_batch(ranks, config)
    memory = engine.empty_memory(num_lanes=2, memory_len=12)
    blocks = list(engine.model.blocks)

    def gathered() -> int:
        return sum(parameter.numel() for block in blocks for parameter in _large(block))

    during: list[int] = []
    for block in blocks:
        block.register_forward_hook(lambda *_: during.append(gathered()))
    after: list[int] = []
    engine.model.softmax.register_forward_hook(lambda *_: after.append(gathered()))
    for _ in range(3):  # the first step is traced, later ones gather ahead
        during.clear()
        after.clear()
        for _ in range(2 // ranks.world_size):
            loss, _ = engine.forward(batch, memory, normalizer=16.0)
            engine.backward(loss)
        engine.step(lr=1e-3, grad_norm=float(engine.grad_norm()))
    whole = sum(parameter.ds_numel for parameter in _large(blocks[0]))  # type: ignore[attr-defined]
    return whole, during, after


def _large(block: nn.Module) -> list[nn.Parameter]:
    """Those that ZeRO-3 cuts; it keeps biases and norms."""
    return [parameter for parameter in block.parameters() if not parameter.ds_persist]  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", [1, 2])
def test_at_stage_3_no_more_than_one_layer_is_gathered(tmp_path: Path, world_size: int) -> None:
    for whole, during, after in run_ranks(gathering_worker, world_size=world_size, folder=tmp_path):
        assert whole > 100_000
        assert len(during) == 5 * 2 // world_size
        assert max(during) <= whole
        assert max(after) <= whole


def held_worker(ranks: RankInfo, recomputes: bool) -> tuple[int, int]:
    """Bytes of gathered weights that are alive: (of all blocks, behind the forward pass, the most between blocks)."""
    engine_settings = {"zero_stage": 3, "activation_checkpointing": recomputes}
    config = tiny_config(model=MODEL, train={"num_lanes": 4, "microbatch_lanes": 2}, engine=engine_settings)
    engine, batch = _engine_and_batch(ranks, config)
    memory = engine.empty_memory(num_lanes=2, memory_len=12)
    known: dict[int, Any] = {}

    def alive() -> int:
        return sum(size for reference, size in known.values() if reference() is not None)

    def note(block: nn.Module, *_: Any) -> None:
        for parameter in block.parameters():
            if not parameter.ds_persist:  # type: ignore[attr-defined]
                storage = parameter.untyped_storage()
                known[storage._cdata] = weakref.ref(storage), storage.nbytes()

    most: list[int] = []
    for block in engine.model.blocks:
        block.register_forward_pre_hook(lambda *_: most.append(alive()))
        block.attention.register_forward_hook(lambda *_, block=block: note(block))
    behind: list[int] = []
    for _ in range(2):
        known.clear()
        for _ in range(2 // ranks.world_size):
            loss, _ = engine.forward(batch, memory, normalizer=16.0)
            behind.append(alive())
            engine.backward(loss)
        engine.step(lr=1e-3, grad_norm=float(engine.grad_norm()))
    assert len(known) >= 5, "the weights were seen"
    return max(behind), max(most)


@pytest.mark.parametrize("recomputes", [False, True])
def test_at_stage_3_no_weights_stay_alive_between_the_passes(tmp_path: Path, recomputes: bool) -> None:
    block_bytes = 4 * (4 * 160 * 160 + 160 * 160 + 2 * 160 * 320)
    for behind, most in run_ranks(held_worker, recomputes, world_size=2, folder=tmp_path):
        assert behind <= 0.1 * block_bytes
        assert most <= 1.1 * block_bytes


def graphed_worker(ranks: RankInfo) -> list[tuple[list[float], list[float]]]:
    """Per stage and precision: losses (without graphs, with graphs). A stand-in records: it runs again."""

    def record(run: Callable[[], Any], *, pool: Any) -> Callable[[], None]:
        run()
        return lambda: run()

    graph.record_on_gpu = record  # type: ignore[assignment]
    pairs = []
    for stage, precision in ((0, "fp32"), (1, "fp32"), (2, "fp32"), (0, "bf16"), (1, "bf16")):
        losses = []
        for is_graphed in (False, True):
            engine = {"zero_stage": stage, "precision": precision, "cuda_graph": "on" if is_graphed else "off"}
            config = tiny_config(engine=engine, model={"dropout": 0.1})
            losses.append(train_engine(ranks, config, num_steps=6, evaluates=True)[0])
        pairs.append((losses[0], losses[1]))
    return pairs


def test_replayed_micro_steps_train_as_others_do(tmp_path: Path) -> None:
    for plain, graphed in run_ranks(graphed_worker, world_size=2, folder=tmp_path)[0]:
        assert plain == graphed
