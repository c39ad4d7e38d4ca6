"""A training step for the benchmarks, made as in the training loop: one rank, one micro-batch and no faults."""

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
    """Make a step with an update of the weights. Return (loss, memory after the batch, the step's result). The host
    waits for the device once."""
    loss, memory = engine.forward(batch, memory, normalizer=normalizer)
    engine.backward(loss)
    decision = reduce_step(loss.detach(), engine.grad_norm(), skip=False, votes=StepFlags(), world_size=1)
    engine.step(lr=lr, grad_norm=decision.grad_norm)
    return loss.detach(), memory, decision
