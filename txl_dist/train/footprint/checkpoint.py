"""Prediction of the size of a checkpoint on disk, for `txl train --dry-run` and `txl plan`.

A checkpoint holds the weights and the optimizer state, in fp32 whatever the precision. It also holds the memory of
every lane (batch row) in the type of the engine. With many lanes and a long memory the memories are the larger part.
Neither the number of ranks nor the ZeRO stage changes the size. The tokenizer, settings and headers are not counted.
These take some KiB to a few MiB.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from txl_dist.config.load import Config
from txl_dist.console.formatting import format_bytes
from txl_dist.inference.bundle import DTYPES
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.train.engine.muon import is_matrix

_FP32 = 4
_DOCUMENT = 8
"""Bytes that a memory needs per position to store the number of the document, which is a 64-bit integer."""


class CheckpointSize(NamedTuple):
    """Predicted size of a checkpoint in bytes, separately for weights, optimizer state and memories."""

    weights: int
    optimizer: int
    memories: int

    @property
    def total(self) -> int:
        """Bytes of the whole checkpoint."""
        return sum(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {format_bytes(part)}" for name, part in self._asdict().items())
        return f"{format_bytes(self.total)} ({parts})"


def checkpoint_size(config: Config, *, vocab_size: int) -> CheckpointSize:
    """Return the predicted size on disk of a checkpoint of a run with these settings."""
    model = config.model
    train = config.train
    optim = config.optim
    with torch.device("meta"):
        network = TransformerXL(model, vocab_size=vocab_size)
    lengths = {name: parameter.numel() for name, parameter in network.named_parameters()}
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
    optimizer = 0
    for name, length in lengths.items():
        optimizer += length * optim.state_bytes(of_matrices=is_matrix(name, shapes[name]))
    memory_lens = train.memory_per_layer(model.num_layers)
    of_lane = sum(memory_lens) * model.width * DTYPES[config.engine.dtype].itemsize + _DOCUMENT * max(memory_lens)
    return CheckpointSize(
        weights=_FP32 * sum(lengths.values()), optimizer=optimizer, memories=train.num_lanes * of_lane
    )
