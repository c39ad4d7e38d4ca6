"""The decision of a step is the same on every rank, whichever rank has a reason."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import VOCAB_SIZE, tiny_config
from tests.helpers.waits import Copies
from txl_dist.config.load import plan_batch
from txl_dist.data.loader.stream import plain_segment
from txl_dist.data.loader.stream_state import CorpusState, StreamState
from txl_dist.distributed.collectives import RankInfo, StepFlags, all_reduce_flags, is_waiting
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch, TransformerXL
from txl_dist.train import stepper as step_module
from txl_dist.train.batch import StepInput, batch_maker
from txl_dist.train.engine.partitions import WEIGHT
from txl_dist.train.engine.zero import ZeroEngine, import_deepspeed
from txl_dist.train.monitoring.stragglers import StepClock
from txl_dist.train.stepper import Stepper, StepResult, reduce_step


class Says(NamedTuple):
    """What a rank brings to a decision."""

    loss: float = 2.0
    grad_norm: float = 0.5
    skip: bool = False
    stop: bool = False
    written: bool = False
    save: bool = False


SOUND = Says()
CASES: dict[str, tuple[Says, Says]] = {
    "sound": (Says(loss=1.0), Says(loss=3.0)),
    "nan on rank 1": (SOUND, Says(loss=math.nan)),
    "nan on rank 0": (Says(loss=math.nan), SOUND),
    "opposite infinities": (Says(loss=math.inf), Says(loss=-math.inf)),
    "infinite norm": (Says(grad_norm=math.inf), Says(grad_norm=math.inf)),
    "norm that is none": (Says(grad_norm=math.nan), Says(grad_norm=math.nan)),
    "no norm": (Says(grad_norm=0.0), Says(grad_norm=0.0)),
    "one asks to skip": (Says(skip=True), SOUND),
    "one asks to stop": (SOUND, Says(stop=True)),
    "one has written": (Says(written=True), SOUND),
    "both have written": (Says(written=True), Says(written=True)),
    "rank 0's clock asks to save": (Says(save=True), SOUND),
    "all at once": (Says(loss=math.nan, stop=True, written=True), Says(written=True)),
}


def decide_cases(ranks: RankInfo) -> dict[str, tuple[StepResult, StepFlags]]:
    """Per case: the decision of this rank, and what `all_reduce_flags` says."""
    found = {}
    for name, says in CASES.items():
        loss, grad_norm, skip, stop, written, save = says[ranks.rank]
        votes, world_size = StepFlags(stop=stop, written=written, save=save), ranks.world_size
        decision = reduce_step(
            torch.tensor(loss), torch.tensor(grad_norm), skip=skip, votes=votes, world_size=world_size
        )
        found[name] = decision, all_reduce_flags(votes, world_size=world_size)
    return found


def test_a_rank_counts_as_waiting_from_the_first_moment_at_which_a_decision_can_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU whatever is issued may wait for the collectives before it, and a rank that hung there was blamed."""
    seen, make = [], torch.stack

    def spy(*values: Any, **named: Any) -> Tensor:
        seen.append(is_waiting(threading.get_ident()))
        return make(*values, **named)

    monkeypatch.setattr(torch, "stack", spy)
    monkeypatch.setattr(step_module, "all_reduce_sum", lambda sums: sums)
    one = torch.tensor(1.0)
    reduce_step(one, one, skip=False, votes=StepFlags(stop=False, written=False), world_size=1)
    assert seen == [True, True]
    assert not is_waiting(threading.get_ident())


def test_nothing_is_copied_to_a_gpu_in_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a copy would wait for all that the device has to do: before the reduction is even asked for."""
    monkeypatch.setattr(step_module, "all_reduce_sum", Mock(side_effect=InterruptedError))
    with FakeTensorMode(), Copies() as copies:
        loss = torch.empty((), device="cuda")
        with pytest.raises(InterruptedError):  # it has come to the reduction
            reduce_step(loss, loss, skip=False, votes=StepFlags(), world_size=1)
    assert copies.to_device == []


def test_nothing_is_copied_to_a_gpu_for_the_number_of_scored_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "all_reduce_sum", lambda sums: sums)
    ranks: Any = SimpleNamespace(device=torch.device("cuda"))
    plan = plan_batch(tiny_config().train, world_size=1)
    unused: Any = None
    stepper = Stepper(unused, unused, ranks, plan, seed=0, first_lane=0, scored_len=None)
    step_input: Any = SimpleNamespace(num_scored=7)
    with FakeTensorMode(), Copies() as copies:
        stepper._normalizer(step_input, "")
    assert copies.to_device == []


@pytest.mark.dist
def test_ranks_decide_alike_and_one_of_them_is_enough_to_skip_or_to_stop(tmp_path: Path) -> None:
    first, second = run_ranks(decide_cases, world_size=2, folder=tmp_path)
    same = [
        {name: (decision._replace(local_loss=0.0), polled) for name, (decision, polled) in found.items()}
        for found in (first, second)
    ]
    assert repr(same[0]) == repr(same[1])  # a loss may be nan, which equals nothing
    assert [math.isnan(found["nan on rank 1"][0].local_loss) for found in (first, second)] == [False, True]
    assert first.keys() == CASES.keys()
    decisions = {name: decision for name, (decision, _) in first.items()}
    for name, (decision, polled) in first.items():
        assert decision.votes == polled, name
        assert polled.stop == (name in ("one asks to stop", "all at once")), name
        assert polled.written == (name in ("both have written", "all at once")), name
        assert polled.save == (name == "rank 0's clock asks to save"), name
    skipped = {name for name, decision in decisions.items() if not math.isfinite(decision.grad_norm)}
    assert skipped == {
        "nan on rank 1",
        "nan on rank 0",
        "opposite infinities",
        "infinite norm",
        "norm that is none",
        "one asks to skip",
        "all at once",
    }
    assert {decisions[name].grad_norm for name in skipped} == {math.inf}
    assert (decisions["sound"].loss, decisions["sound"].grad_norm) == (2.0, 0.5)
    assert decisions["no norm"].grad_norm == 0.0
    assert decisions["infinite norm"].loss == 2.0
    assert math.isnan(decisions["nan on rank 1"].loss)


class FakeEngine:
    """Answers with the losses given, and a memory that counts its steps."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = iter(losses)
        self.updates: list[float] = []

    def forward(self, batch: Batch, memory: Memory, *, normalizer: Tensor | float) -> tuple[Tensor, Memory]:
        return torch.tensor(next(self.losses)), memory._replace(hidden=tuple(torch.stack(memory.hidden) + 1))

    def backward(self, loss: Tensor) -> None:
        pass

    def grad_norm(self) -> Tensor:
        return torch.tensor(0.25)

    def step(self, *, lr: float, grad_norm: float) -> None:
        self.updates.append(grad_norm)


def decide_steps(ranks: RankInfo) -> list[tuple[list[float], list[float]]]:
    """Per step: (memories of this rank after it, norms that the engine was given so far)."""
    config = tiny_config(train={"microbatch_lanes": 1})
    # Rank 1 meets something that is not finite in its second micro-batch of the second step.
    losses = [1.0, 1.0, 1.0, math.nan if ranks.rank == 1 else 1.0, 1.0, 1.0]
    engine: Any = FakeEngine(losses)
    clock = StepClock(ranks.device, sees_forward=True)
    plan = plan_batch(config.train, world_size=ranks.world_size)
    first_lane = ranks.rank * plan.lanes_per_rank
    scored_len = config.train.segment_len
    stepper = Stepper(engine, clock, ranks, plan, seed=config.run.seed, first_lane=first_lane, scored_len=scored_len)
    maker = batch_maker(TransformerXL(config.model, vocab_size=VOCAB_SIZE), mask_documents=False)
    batches = maker.microbatches(plain_segment(np.zeros((2, 9), np.int64)), lanes=1)
    stream = StreamState(seed=1, corpora=(CorpusState("text", "data", "train", num_lanes=4),))
    memories = tuple(Memory(tuple(torch.zeros(2, 1, 3, 5)), torch.zeros(1, 3, dtype=torch.int64)) for _ in batches)
    found = []
    for step in (1, 2, 3):
        given = StepInput(batches, 16, stream)
        after, decision = stepper(given, memories, step=step, votes=StepFlags())
        engine.step(lr=0.1, grad_norm=decision.grad_norm)
        is_same = all(one is other for one, other in zip(after, memories, strict=True))
        assert is_same == (step == 2), "a skipped step gives back the very memories"
        memories = after
        found.append(([float(torch.stack(memory.hidden).max()) for memory in memories], list(engine.updates)))
    return found


@pytest.mark.dist
def test_a_step_that_is_not_finite_on_one_rank_leaves_the_memories_of_all_as_they_were(tmp_path: Path) -> None:
    results = run_ranks(decide_steps, world_size=2, folder=tmp_path)
    expected = [
        ([1.0, 1.0], [0.25]),
        ([1.0, 1.0], [0.25, math.inf]),
        ([2.0, 2.0], [0.25, math.inf, 0.25]),
    ]
    assert results == [expected, expected]


def scaled_engine(optimizer: Any) -> ZeroEngine:
    """An engine of stage 1 around an optimizer without weights; fp16 itself needs a GPU."""
    optimizer.update_lp_params = lambda: None
    engine = ZeroEngine.__new__(ZeroEngine)
    engine._optimizer, engine._stage, engine._partitions, engine._decay = optimizer, 1, [], 0.0
    engine._base_optimizer = torch.optim.SGD([torch.zeros(1)])
    engine._padded = {}
    return engine


BEFORE, BEHIND = [False] * 3 + [True, True, False, True], [False] * 4 + [True] + [False] * 9
"""Whether each step overflows."""


def scales(update: Any, scaler: Any, overflows: list[bool]) -> list[float]:
    """The loss scale after each of the steps."""
    found = []
    for overflow in overflows:
        update(overflow)
        found.append(float(scaler.cur_scale))
    return found


def loss_scale_goes_on(ranks: RankInfo) -> dict[str, tuple[Any, list[float], list[float], list[float]]]:
    """Per kind of scaler: (what is saved, scales of the unbroken one, of the loaded one, of a new one)."""
    import_deepspeed().init_distributed("gloo", verbose=False)
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleConfig, LossScaler

    def zero() -> Any:  # as stages 1 to 3 have it
        scaler = DynamicLossScaler(
            2.0**8,
            scale_window=4,
            min_scale=1.0,
            delayed_shift=2,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=False,
            dtype=torch.half,
        )
        return SimpleNamespace(loss_scaler=scaler), scaler, scaler.update_scale

    def stage_0() -> Any:
        scaler = LossScaleConfig(
            low_precision_dtype=torch.half,
            dynamic_loss_scale=True,
            static_loss_scale=1.0,
            dynamic_loss_args={"init_scale": 2.0**8, "scale_window": 4, "min_scale": 1.0, "delayed_shift": 2},
        )
        optimizer = SimpleNamespace(loss_scale_config=scaler, verbose=False)
        return optimizer, scaler, lambda overflow: FP16_Optimizer._update_scale(optimizer, overflow)

    def static() -> Any:
        scaler = LossScaler(scale=4.0)
        return SimpleNamespace(loss_scaler=scaler), scaler, scaler.update_scale

    source: Any = SimpleNamespace(kinds=[WEIGHT])
    found = {}
    for make in (zero, stage_0, static):
        optimizer, scaler, update = make()
        scales(update, scaler, BEFORE)
        saved = json.loads(json.dumps(scaled_engine(optimizer).loss_scale()))
        again, loaded, update_loaded = make()
        scaled_engine(again).load(source, loss_scale=saved)
        _, new, update_new = make()
        pairs = ((update, scaler), (update_loaded, loaded), (update_new, new))
        found[make.__name__] = saved, *(scales(one, of, BEHIND) for one, of in pairs)
    return found


@pytest.mark.dist
def test_the_loss_scale_goes_on_as_if_it_had_not_been_saved(tmp_path: Path) -> None:
    (found,) = run_ranks(loss_scale_goes_on, world_size=1, folder=tmp_path)
    for name in ("zero", "stage_0"):
        saved, unbroken, loaded, new = found[name]
        assert saved["cur_iter"] == len(BEFORE)
        assert loaded == unbroken, name
        assert new != unbroken, "the case would not notice"
    saved, unbroken, loaded, _ = found["static"]
    assert saved == {}
    assert loaded == unbroken
