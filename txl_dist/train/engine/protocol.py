"""What training needs of an engine, and all that it knows of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch, TransformerXL
from txl_dist.train.engine.partitions import Fragment, Source


class Engine(Protocol):
    """What the loop needs of an engine. Every method is called by all ranks together."""

    model: TransformerXL
    """The network; its parameters may be sharded, so only its settings and shapes are for reading."""
    shapes: dict[str, list[int]]
    """Of each parameter, a tied one once; at stage 3 too."""

    def named_values(self) -> Iterator[tuple[str, Tensor]]:
        """(name, values) of each parameter, as views of what this rank computes with; empty ones at stage 3."""

    def forward(self, batch: Batch, memory: Memory, *, normalizer: Tensor | float) -> tuple[Tensor, Memory]:
        """Of one micro-batch. Returns (its loss, for `backward`; the memory after it)."""

    def backward(self, loss: Tensor) -> None:
        """Of the micro-batch that gave this loss, before the next one: adds to the gradients."""

    def grad_norm(self) -> Tensor:
        """Global norm of the accumulated gradients before clipping, on the device and the same on every rank; not
        finite if one of them is not. Call it after the last micro-batch of a step."""

    def step(self, *, lr: float, grad_norm: float) -> None:
        """Update with the accumulated gradients, whose norm `grad_norm` gave, or, if that is not finite, drop them."""

    def squared_norms(self) -> dict[str, list[float]]:
        """Of each parameter (sum of squares of its gradient before clipping, that of its weights), in fp32 where there
        are such weights; the same on every rank. Between `grad_norm` and `step`; waits for the device."""

    def losses(self, batch: Batch, memory: Memory, *, with_top1_correct: bool = False) -> tuple[Tensor, Memory]:
        """Return nll_BT in nats and the next memory, without gradients or dropout.

        `with_top1_correct` returns score_2BT instead: the losses, then 1 where the target is the most probable token.
        """

    def predict(self, batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        """log p_BV of the token behind the batch and the next memory, without gradients or dropout."""

    def swap_averages(self) -> None:
        """Exchange the weights and their averages (`optim.ema_decay`): once to compute with these, and once more
        to continue. Before the first update there are none, and nothing is exchanged."""

    def empty_memory(self, *, num_lanes: int, memory_len: int) -> Memory:
        """A memory that holds nothing, in the compute type, on the device."""

    def fragments(self) -> list[Fragment]:
        """Weights and optimizer state of this rank, as views into live storage."""

    def loss_scale(self) -> dict[str, Any]:
        """State of the loss scaling in fp16, for JSON; else empty."""

    def load(self, source: Source, *, loss_scale: dict[str, Any]) -> None:
        """Restore what `fragments` and `loss_scale` gave, on any number of ranks at any stage. Raises TxlError."""

    def close(self) -> None:
        """Give back all memory of weights, gradients and optimizer, also where somebody still refers to the engine; no
        other method may be called afterwards. Uses no collective, and waits for this rank's device. A second call does
        nothing."""
