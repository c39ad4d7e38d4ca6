"""One training step of this rank, up to its update: the micro-batches, and a decision that all ranks take together.

Only that decision (`reduce_step`) waits for the device. One small reduction shows every rank whether loss and gradient
are finite everywhere, whether a stop was requested, and whether a checkpoint is written. All ranks skip a step that is
not finite: weights, moments and memories stay unchanged, and the step's text is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from txl_dist.config.load import BatchPlan
from txl_dist.distributed.collectives import RankInfo, StepFlags, all_reduce_sum, waiting
from txl_dist.fault_injection import failpoint
from txl_dist.model.memory import Memory
from txl_dist.rng import derive_seed
from txl_dist.train.batch import StepInput, to_device
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.monitoring.stragglers import StepClock


class StepResult(NamedTuple):
    """Loss, gradient norm and flags of one training step, combined over all ranks by `reduce_step`.

    All fields are the same on every rank, except `local_loss`.
    """

    loss: float
    """Mean loss over the scored tokens of all ranks, in nats."""
    grad_norm: float
    """Global gradient norm before clipping. It is infinite if the step must be skipped."""
    votes: StepFlags
    """Flags of the job. `stop` and `save` are true if any rank set them. `written` is true only if all ranks set it."""
    local_loss: float
    """Mean loss over the scored tokens of this rank, in nats."""


class Stepper:
    """Forward and backward passes of the training steps on one rank, and the combination of the results of all ranks.

    The caller makes the weight update.
    """

    def __init__(
        self,
        engine: Engine,
        clock: StepClock,
        ranks: RankInfo,
        plan: BatchPlan,
        *,
        seed: int,
        first_lane: int,
        scored_len: int | None,
        before_reduction: Callable[[], None] = lambda: None,
    ) -> None:
        """Store the values that are the same for all steps.

        The caller starts `clock` before it asks for the data of a step. `seed` is the seed of the run. `first_lane` is
        the global id of this rank's first lane (batch row). `scored_len` is the number of scored targets per lane and
        step, or None if this number varies. `before_reduction` is called before the results of all ranks are combined:
        this rank then takes part in no further step until it returns.
        """
        self._engine = engine
        self._clock = clock
        self._ranks = ranks
        self._plan = plan
        self._seed = seed
        self._first_lane = first_lane
        self._scored_len = scored_len
        self._before_reduction = before_reduction

    def __call__(
        self, step_input: StepInput, memories: Sequence[Memory], *, step: int, votes: StepFlags
    ) -> tuple[tuple[Memory, ...], StepResult]:
        """Make step number `step`, counted from 1, without the weight update. `votes` are the flags of this rank.

        Returns (memories, result). The memories are the memories after the step, or the argument `memories` if the
        step is skipped. The result combines all ranks.
        """
        fault = failpoint("step", step=step)
        if fault == "flip":
            _, first_parameter = next(iter(self._engine.named_values()))
            _flip_bit(first_parameter)
        self._clock.mark_prepared()
        normalizer = self._normalizer(step_input, fault)
        losses: list[Tensor] = []
        after: list[Memory] = []
        for index, (batch, memory) in enumerate(zip(step_input.batches, memories, strict=True)):
            first_lane = self._first_lane + index * self._plan.microbatch_lanes
            torch.manual_seed(derive_seed(self._seed, "dropout", step - 1, first_lane))
            batch = to_device(batch, self._ranks.device)
            if index == 0:
                self._clock.start_forward()
            with record_function("forward"):
                loss, memory = self._engine.forward(batch, _corrupted(memory, fault), normalizer=normalizer)
            if index == 0:
                self._clock.forward_ends()
            with record_function("backward"):
                self._engine.backward(loss)
            losses.append(loss.detach())
            del loss  # frees the activations of its passes
            after.append(memory)
        with record_function("exchange"):
            grad_norm = self._engine.grad_norm()
        self._before_reduction()
        failpoint("vote", step=step)
        decision = reduce_step(
            torch.stack(losses).mean(),
            grad_norm,
            skip=fault == "skip",
            votes=votes,
            world_size=self._ranks.world_size,
        )
        is_skipped = not math.isfinite(decision.grad_norm)
        return tuple(memories if is_skipped else after), decision

    def _normalizer(self, step_input: StepInput, fault: str) -> Tensor | float:
        """Return the number by which the summed loss of a micro-batch is divided.

        With this number the mean over micro-batches and ranks is the mean over all scored tokens. Ranks score different
        numbers of tokens if documents are masked, or if damaged text is skipped.
        """
        fault_factor = {"nan": math.nan, "inf": 0.0, "spike": 0.02}.get(fault, 1.0)
        plan = self._plan
        if self._scored_len is not None:
            return fault_factor * plan.microbatch_lanes * self._scored_len
        scored = torch.full((), float(step_input.num_scored), device=self._ranks.device)  # a copy would wait
        parts = plan.num_microbatches * plan.world_size
        return fault_factor * all_reduce_sum(scored).clamp(min=1.0) / parts


def reduce_step(loss: Tensor, grad_norm: Tensor, *, skip: bool, votes: StepFlags, world_size: int) -> StepResult:
    """Combine the results and flags of all ranks. Only here does a step wait for the device.

    `loss` is the mean loss of this rank, and `grad_norm` is the gradient norm over all ranks. `skip` asks all ranks to
    skip the step.
    """
    with waiting():  # on a GPU also for the kernels issued before, and for those of the other ranks
        local_loss = loss.double()
        # Filled on the device: a copy from the host would wait for it.
        flags = [loss.new_full((), value, dtype=torch.float64) for value in (skip, *votes)]
        not_finite = loss.isfinite().logical_not().double()
        sums = all_reduce_sum(torch.stack([local_loss, not_finite, *flags]))
        numbers = torch.cat([sums, torch.stack([grad_norm.double(), local_loss])])
        total, num_bad, num_skips, num_stops, num_written, num_saves, norm, local_value = numbers.tolist()
    is_valid = not num_bad and not num_skips and math.isfinite(norm)
    return StepResult(
        loss=total / world_size,
        grad_norm=norm if is_valid else math.inf,
        votes=StepFlags(stop=num_stops > 0, written=num_written == world_size, save=num_saves > 0),
        local_loss=local_value,
    )


def _corrupted(memory: Memory, fault: str) -> Memory:
    """Return the memory. If the injected fault is `nan`, all its values are NaN, because wrong activations would reach
    the memory too."""
    if fault != "nan":
        return memory
    return memory._replace(hidden=tuple(hidden_BMD * math.nan for hidden_BMD in memory.hidden))


def _flip_bit(parameter: Tensor) -> None:
    """Inject silent corruption: change one value of this rank's weights by about a tenth of the value.

    A change of the last bit would not be enough, because the next update could round it away.
    """
    place = parameter.element_size() - 2
    parameter.detach().view(-1).view(torch.uint8)[place : place + 1] ^= 0x10
