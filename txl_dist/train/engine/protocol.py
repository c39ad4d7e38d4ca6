"""The interface between training and an engine. Training uses nothing of an engine except this interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch, TransformerXL
from txl_dist.train.engine.partitions import Fragment, PartitionState, Source


class Engine(Protocol):
    """Interface of an object that computes the model's losses and updates its weights.

    All ranks call every method together. `ZeroEngine` implements it.
    """

    model: TransformerXL
    """The network. Its parameters may be sharded, so other code reads only its settings and shapes."""
    shapes: dict[str, list[int]]
    """Shape of each whole parameter by name, also at ZeRO stage 3. A tied parameter occurs once."""

    def named_values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values) of each parameter, the weights that this rank computes with. They are views where
        possible.

        At ZeRO stage 3 the values are empty.
        """

    def forward(self, batch: Batch, memory: Memory, *, normalizer: Tensor | float) -> tuple[Tensor, Memory]:
        """Run the forward pass of one micro-batch. Returns (loss, memory after the segment).

        The loss is the sum over the scored tokens divided by `normalizer`. Pass the loss to `backward`.
        """

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass from the loss of a micro-batch, before the next forward pass.

        The pass adds to the accumulated gradients.
        """

    def grad_norm(self) -> Tensor:
        """Return the global norm of the accumulated gradients before clipping, on the device. The norm is the same on
        every rank.

        The norm is not finite if a gradient is not finite. Call this after the last micro-batch of a step.
        """

    def step(self, *, lr: float, grad_norm: float) -> None:
        """Update the weights with the accumulated gradients, or drop the gradients if `grad_norm` is not finite.

        `grad_norm` is the result of the method `grad_norm`, and `lr` is the learning rate.
        """

    def squared_norms(self) -> dict[str, list[float]]:
        """Return two numbers for each parameter: [sum of squares of its gradient, sum of squares of its weights].

        Gradients are taken before clipping. Weights are the fp32 weights, if the engine keeps such weights. The result
        is the same on every rank. Call this method between `grad_norm` and `step`. The method waits for the device.
        """

    def losses(self, batch: Batch, memory: Memory, *, with_top1_correct: bool = False) -> tuple[Tensor, Memory]:
        """Return (nll_BT, next memory), computed without gradients or dropout. nll_BT is the loss of each target in
        nats.

        With `with_top1_correct` the first item is score_2BT: the losses, then 1 where the target is the most probable
        token, else 0.
        """

    def predict(self, batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        """Return (log p_BV, next memory), computed without gradients or dropout.

        log p_BV is the log-probability of each token of the vocabulary as the next token of each batch row.
        """

    def swap_averages(self) -> None:
        """Exchange the weights and their averages (`optim.ema_decay`).

        Call it once to compute with the averages, and once more to continue training. Before the first update there are
        no averages, so nothing is exchanged.
        """

    def empty_memory(self, *, num_lanes: int, memory_len: int) -> Memory:
        """Return an empty memory for `num_lanes` batch rows of `memory_len` tokens, on the device and in the type of
        the computation.

        Hidden states can have columns of zeros after the model width (`engine.pad_widths`).
        """

    def partition_states(self) -> list[PartitionState]:
        """Return weights and optimizer state of this rank, as flat tensors. They are views where possible, whose values
        the next step changes."""

    def fragments(self) -> list[Fragment]:
        """Return the same values as `partition_states`, divided into pieces of named parameters."""

    def loss_scale(self) -> dict[str, Any]:
        """Return the state of the fp16 loss scaling, as values for JSON. In other precisions it is an empty
        dictionary."""

    def load(self, source: Source, *, loss_scale: dict[str, Any]) -> None:
        """Load weights, optimizer state and loss scaling that any number of ranks saved at any ZeRO stage.

        Raises TxlError on all ranks if a value is missing or cannot be read.
        """

    def close(self) -> None:
        """Free the memory of weights, gradients and optimizer, even while there are references to the engine.

        Afterwards no other method may be called. This method uses no collective, but it waits for this rank's device. A
        second call does nothing.
        """
