"""Statistics of single steps: norms by layer, and training accuracy. By default neither is measured.

The settings `metrics.norms_every_steps` and `metrics.accuracy_every_steps` switch the measurements on. The measurements
run after the backward pass and before the update. So gradients are measured before clipping, and weights before the
update. Activations and accuracy come from one more forward pass over the step's text. This pass uses the memory from
before the step and no dropout. It does not change training. Steps without a measurement cost nothing more.

Layer 0 is next to the embedding. The embedding and the softmax are reported apart from the layers. Weights that both of
them use count as part of the embedding. A parameter that layers share counts as part of the first of these layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from txl_dist.distributed.collectives import all_reduce_sum
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.train.batch import to_device
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.report.loggers import Record


class LayerStats(NamedTuple):
    """Training accuracy and norms by layer of one step, as far as the settings require them for this step."""

    accuracy: float | None
    """Share of the step's scored targets that were the model's most probable token. It is None if it was not
    measured."""
    layers: Record | None
    """Record of the norms by layer, for the loggers. It is None if the norms were not measured."""


NOTHING = LayerStats(None, None)
"""Result for a step at which nothing is measured."""


def measure_layer_stats(
    engine: Engine,
    batches: Sequence[Any],
    memories: Sequence[Memory],
    *,
    step: int,
    accuracy_every: int,
    norms_every: int,
    device: torch.device,
) -> LayerStats:
    """Measure training accuracy and norms by layer, if the step is a multiple of their intervals.

    `batches` are the step's micro-batches on the host, and `memories` are their memories from before the step.
    `accuracy_every` and `norms_every` are the intervals in steps, and 0 means never. All ranks call this function
    together, after `grad_norm` and before `step` of the engine.
    """
    with_top1_correct = _is_due(step, accuracy_every)
    with_norms = _is_due(step, norms_every)
    if not with_top1_correct and not with_norms:
        return NOTHING
    if with_norms:
        watch = _ActivationWatch(engine.model)
    else:
        watch = None
    sums_2 = torch.zeros(2, dtype=torch.float64, device=device)
    for on_host, memory in zip(batches, memories, strict=True):
        batch = to_device(on_host, device)
        with watch.on() if watch is not None else nullcontext():
            scores, _ = engine.losses(batch, memory, with_top1_correct=with_top1_correct)
        if with_top1_correct:
            sums_2 += torch.stack([(scores[1] * batch.scored_BT).sum(), batch.scored_BT.sum()])
    if with_top1_correct:
        num_correct, scored = all_reduce_sum(sums_2).tolist()
    else:
        num_correct, scored = (0.0, 0.0)
    if watch is not None:
        layers = {"step": step, **_norms(engine), "activation_rms": watch.rms()}
    else:
        layers = None
    return LayerStats(num_correct / scored if scored else None, layers)


def _is_due(step: int, every: int) -> bool:
    """Return whether the step is a multiple of the interval `every`. An interval of 0 means never."""
    return every > 0 and step % every == 0


def _norms(engine: Engine) -> Record:
    """Return the norms of gradients and weights: one list over the layers, and one number for each part outside the
    layers."""
    totals: dict[str, list[float]] = {}
    for name, squares in engine.squared_norms().items():
        part = _part_of(name)
        totals[part] = [a + b for a, b in zip(totals.get(part, [0.0, 0.0]), squares, strict=True)]
    record: Record = {}
    for index, kind in enumerate(("gradient_norm", "weight_norm")):
        norms = {part: math.sqrt(squares[index]) for part, squares in totals.items()}
        record[kind] = [norms.pop(str(layer)) for layer in range(len(engine.model.blocks))]
        record |= {f"{kind}_{part}": norm for part, norm in norms.items()}
    return record


def _part_of(name: str) -> str:
    """Return the part of the model that a parameter belongs to: the number of its layer as text, or else a name such as
    embedding."""
    layer = re.match(r"(?:blocks|residuals)\.(\d+)\.", name)
    if layer:
        return layer[1]
    return name.split(".")[0]


class _ActivationWatch:
    """Accumulator of the mean square of each layer's output, averaged over all positions and measured passes."""

    def __init__(self, model: TransformerXL) -> None:
        self._blocks = model.blocks
        self._width = model.section.width
        self._squares: list[Tensor | float] = [0.0] * len(model.blocks)
        self._num_passes = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Return a context manager that measures the outputs of the layers in its block. The block must run the model
        once, without gradients."""
        handles = [block.register_forward_hook(self._taking(index)) for index, block in enumerate(self._blocks)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._num_passes += 1

    def rms(self) -> list[float]:
        """Return the root mean square of each layer's output over all ranks. All ranks call this method together."""
        sums = torch.stack([torch.as_tensor(square).double() for square in self._squares])
        passes = torch.full_like(sums[:1], self._num_passes)
        *squares, num_passes = all_reduce_sum(torch.cat([sums, passes])).tolist()
        return [math.sqrt(square / num_passes) for square in squares]

    def _taking(self, index: int) -> Any:
        """Return the forward hook that measures the layer with this index."""

        def take(block: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor | None]) -> None:
            hidden = outputs[0][..., : self._width]  # without padding
            self._squares[index] = self._squares[index] + hidden.double().square().mean()

        return take
