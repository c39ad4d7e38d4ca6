"""A training step as `train.step` makes one, for the benchmarks: of one rank, one micro-batch and no faults."""

from __future__ import annotations

from torch import Tensor

from txl_dist.distributed.collectives import StepFlags
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch
from txl_dist.train.engine.zero import ZeroEngine
from txl_dist.train.stepper import StepResult, reduce_step


def engine_step(
    engine: ZeroEngine, batch: Batch, memory: Memory, *, normalizer: float, lr: float
) -> tuple[Tensor, Memory, StepResult]:
    """(loss, the memory behind the batch, what was decided), with the weights updated; waits once for the device."""
    loss, memory = engine.forward(batch, memory, normalizer=normalizer)
    engine.backward(loss)
    decision = reduce_step(loss.detach(), engine.grad_norm(), skip=False, votes=StepFlags(), world_size=1)
    engine.step(lr=lr, grad_norm=decision.grad_norm)
    return loss.detach(), memory, decision
