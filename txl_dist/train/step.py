"""One training step of this rank, up to its update: its micro-batches, and the decision that all ranks take together.

Nothing in a step waits for the device but that decision (`reduce_step`): one small reduction tells every rank whether
loss and gradient are finite everywhere, whether anybody was asked to stop, and whether a checkpoint is written. All
ranks skip a step that is not finite: weights, moments and memories stay as they were, its text is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from txl_dist.distributed.collectives import StepFlags, all_reduce_sum, waiting
from txl_dist.fault_injection import failpoint
from txl_dist.model.memory import Memory
from txl_dist.rng import derive_seed
from txl_dist.train.batch import StepInput, to_device
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.monitoring.stragglers import StepClock
from txl_dist.train.state import RunContext


class StepResult(NamedTuple):
    """What all ranks know after a step; the same on each."""

    loss: float
    """Mean over the tokens of all ranks, in nats."""
    grad_norm: float
    """Before clipping; infinite if the step is to be skipped."""
    votes: StepFlags
    local_loss: float
    """Mean over the tokens of this rank, the one field that is not the same on all."""


class Stepper:
    """Makes steps; holds nothing that changes but the engine."""

    def __init__(self, engine: Engine, context: RunContext, clock: StepClock) -> None:
        """`clock` began before the data of a step were asked for."""
        self._engine, self._context, self._clock = engine, context, clock

    def __call__(
        self, step_input: StepInput, memories: Sequence[Memory], *, step: int, votes: StepFlags
    ) -> tuple[tuple[Memory, ...], StepResult]:
        """Make step number `step`, counted from 1, but for its update. `votes` are this rank's.

        Returns (the memories after it, or those given if it is skipped; what was decided).
        """
        fault = failpoint("step", step=step)
        if fault == "flip":
            _flip_bit(next(iter(self._engine.named_values()))[1])
        self._clock.mark_prepared()
        context = self._context
        normalizer = self._normalizer(step_input, fault)
        losses: list[Tensor] = []
        after: list[Memory] = []
        for index, (batch, memory) in enumerate(zip(step_input.batches, memories, strict=True)):
            first_lane = context.lanes.start + index * context.plan.microbatch_lanes
            torch.manual_seed(derive_seed(context.config.run.seed, "dropout", step - 1, first_lane))
            batch = to_device(batch, context.ranks.device)
            if index == 0:
                self._clock.start_forward()
            with record_function("forward"):
                loss, memory = self._engine.forward(batch, _corrupted(memory, fault), normalizer=normalizer)
            if index == 0:
                self._clock.forward_ends()
            with record_function("backward"):
                self._engine.backward(loss)
            losses.append(loss.detach())
            del loss  # and what its passes have kept
            after.append(memory)
        with record_function("exchange"):
            grad_norm = self._engine.grad_norm()
        decision = reduce_step(
            torch.stack(losses).mean(),
            grad_norm,
            skip=fault == "skip",
            votes=votes,
            world_size=context.ranks.world_size,
        )
        return (tuple(after) if math.isfinite(decision.grad_norm) else tuple(memories)), decision

    def _normalizer(self, step_input: StepInput, fault: str) -> Tensor | float:
        """What a micro-batch's summed loss is divided by, so that the mean over micro-batches and ranks is the mean
        over all scored tokens. With document masks, or damage skipped, ranks score different numbers of tokens."""
        wrong = {"nan": math.nan, "inf": 0.0, "spike": 0.02}.get(fault, 1.0)
        config, plan = self._context.config, self._context.plan
        if not self._context.masks_documents and config.data.on_corrupt != "skip":
            return wrong * plan.microbatch_lanes * config.train.scored_len
        scored = torch.full((), float(step_input.num_scored), device=self._context.ranks.device)  # a copy would wait
        parts = plan.num_microbatches * plan.world_size
        return wrong * all_reduce_sum(scored).clamp(min=1.0) / parts


def reduce_step(loss: Tensor, grad_norm: Tensor, *, skip: bool, votes: StepFlags, world_size: int) -> StepResult:
    """The one point of a step that waits for the device. `loss` is this rank's mean, `grad_norm` that of all."""
    with waiting():  # on a GPU for what was issued before, and the others with it
        own = loss.double()
        # Filled in on the device: a copy from the host would wait for it.
        says = (loss.new_full((), value, dtype=torch.float64) for value in (skip, *votes))
        sums = torch.stack([own, loss.isfinite().logical_not().double(), *says])
        known = torch.cat([all_reduce_sum(sums), torch.stack([grad_norm.double(), own])])
        total, bad, skips, stops, writtens, saves, norm, own_loss = known.tolist()
    is_sound = not bad and not skips
    return StepResult(
        loss=total / world_size,
        grad_norm=norm if is_sound and math.isfinite(norm) else math.inf,
        votes=StepFlags(stop=stops > 0, written=writtens == world_size, save=saves > 0),
        local_loss=own_loss,
    )


def _corrupted(memory: Memory, fault: str) -> Memory:
    """For faults on purpose: a rank whose activations go wrong has them in its memory too."""
    return memory._replace(hidden=tuple(one * math.nan for one in memory.hidden)) if fault == "nan" else memory


def _flip_bit(parameter: Tensor) -> None:
    """For faults on purpose: silent corruption of what this rank computes with, by about a tenth of one value: the last
    bit could be rounded away again by the next update."""
    place = parameter.element_size() - 2
    parameter.detach().view(-1).view(torch.uint8)[place : place + 1] ^= 0x10
