"""The interface between training and an engine. Training uses nothing else of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch, TransformerXL
from txl_dist.train.engine.partitions import Fragment, Source


class Engine(Protocol):
    """Engine that computes and updates the model. All ranks call every method together."""

    model: TransformerXL
    """The network. Its parameters may be sharded, so read only its settings and shapes."""
    shapes: dict[str, list[int]]
    """Shape of each whole parameter by name, a tied one once, also at stage 3."""

    def named_values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values) of each parameter, as views of the weights that this rank computes with.

        At stage 3 the views are empty.
        """

    def forward(self, batch: Batch, memory: Memory, *, normalizer: Tensor | float) -> tuple[Tensor, Memory]:
        """Run the forward pass of one micro-batch. Returns (its loss, for `backward`; the memory after it).

        The loss is the sum over the scored tokens divided by `normalizer`.
        """

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass from the loss of a micro-batch, before the next forward pass. Adds to the gradients."""

    def grad_norm(self) -> Tensor:
        """Return the global norm of the accumulated gradients before clipping, on the device, equal on every rank.

        It is not finite if a gradient is not. Call it after the last micro-batch of a step.
        """

    def step(self, *, lr: float, grad_norm: float) -> None:
        """Update the weights with the accumulated gradients, or drop these if `grad_norm` is not finite.

        `grad_norm` is the result of the method of that name.
        """

    def squared_norms(self) -> dict[str, list[float]]:
        """Return by parameter [sum of squares of its gradient before clipping, sum of squares of its weights].

        Weights are those in fp32, if there are any. The result is the same on every rank. Call it between `grad_norm`
        and `step`. It waits for the device.
        """

    def losses(self, batch: Batch, memory: Memory, *, with_top1_correct: bool = False) -> tuple[Tensor, Memory]:
        """Return nll_BT in nats and the next memory, without gradients or dropout.

        `with_top1_correct` returns score_2BT instead: the losses, then 1 where the target is the most probable token.
        """

    def predict(self, batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        """Return log p_BV of the token after the batch, and the next memory, without gradients or dropout."""

    def swap_averages(self) -> None:
        """Exchange the weights and their averages (`optim.ema_decay`).

        Call it once to compute with the averages, and once more to continue training. Before the first update there are
        no averages, and nothing is exchanged.
        """

    def empty_memory(self, *, num_lanes: int, memory_len: int) -> Memory:
        """Return an empty memory in the compute type, on the device."""

    def fragments(self) -> list[Fragment]:
        """Return weights and optimizer state of this rank, as views that change with the next step."""

    def loss_scale(self) -> dict[str, Any]:
        """Return the state of the loss scaling in fp16, for JSON; an empty dictionary in other precisions."""

    def load(self, source: Source, *, loss_scale: dict[str, Any]) -> None:
        """Load weights, optimizer state and loss scaling that any number of ranks saved at any stage.

        Raises TxlError on all ranks if a value is missing or cannot be read.
        """

    def close(self) -> None:
        """Free the memory of weights, gradients and optimizer, even while there are references to the engine.

        No other method may be called afterwards. It uses no collective, and waits for this rank's device. A second call
        does nothing.
        """
