"""A network whose weights stay in their file: each layer reads its weights when it runs, and does not keep them.

The network computes the same as `TransformerXL`, whose code it runs. It holds one matrix of a layer in memory at a
time. Of the embedding and softmax tables, which can be larger, it holds 1 MiB at a time. So `txl export` can check a
bundle's probe with far less memory than the model itself needs. The price is speed, because every segment reads all
weights again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from txl_dist.config.schema import ModelSection
from txl_dist.errors import CheckpointError
from txl_dist.inference.weights import Sliced, Weights, copy_in_pieces, pieces
from txl_dist.model.adaptive_embedding import AdaptiveEmbedding, Partition
from txl_dist.model.adaptive_softmax import AdaptiveSoftmax, Columned, column_losses
from txl_dist.model.block import Block
from txl_dist.model.fused_softmax import Columns
from txl_dist.model.memory import Memory, empty_memory
from txl_dist.model.transformer_xl import TransformerXL

_MOST_LOGITS = 1 << 19


class DiskOffloadedXL(TransformerXL):
    """Network in evaluation mode whose layers read their weights from a file when they run.

    With it, `txl export` checks the probe of a bundle that can be larger than memory. The network computes in the type
    `dtype`. The keys of `weights` are the names of the parameters.
    """

    def __init__(
        self,
        model: ModelSection,
        *,
        vocab_size: int,
        weights: Weights,
        dtype: torch.dtype,
        memory_lens: Sequence[int] = (),
    ) -> None:
        reader = _Reader({}, dtype)
        with torch.device("meta"):
            super().__init__(model, vocab_size=vocab_size, memory_lens=memory_lens)
            self.embedding = _Embedding(model, vocab_size=vocab_size, reader=reader)
            self.softmax = _Softmax(model, vocab_size=vocab_size, embedding=self.embedding, reader=reader)
        _fill_buffers(self, model, dtype)
        reader.sources.update({parameter: weights[name] for name, parameter in self.named_parameters()})
        if self.target_row is not None:
            self.target_row = nn.Parameter(reader.whole(self.target_row), requires_grad=False)
        self.final_norm = _Part(self.final_norm, reader)
        for part in (*self.blocks, self.residuals):
            _stream(part, reader)
        self._like = torch.empty(0, dtype=dtype)
        self.eval()

    def empty_memory(self, *, num_lanes: int, memory_len: int) -> Memory:
        """Make an empty memory for this number of lanes (batch rows), as `TransformerXL.empty_memory` does."""
        lens = self.memory_of_layers(memory_len)
        return empty_memory(lens, num_lanes=num_lanes, width=self.section.width, like=self._like)


def _fill_buffers(network: TransformerXL, model: ModelSection, dtype: torch.dtype) -> None:
    """Compute the buffers of plugins' layers from the settings, because the network was built without storage.

    Raises CheckpointError if any other layer has a buffer. The message names the buffer.
    """
    build = model.scheme.build
    for block in network.blocks.children():
        assert isinstance(block, Block)
        layer = block.attention.distance
        if build is not None and layer is not None and any(True for _ in layer.buffers()):
            values = dict(build(model).named_buffers())
            for name, buffer in list(layer.named_buffers()):
                place, _, leaf = name.rpartition(".")
                if buffer.is_floating_point():
                    value = values[name].to(dtype)
                else:
                    value = values[name]
                layer.get_submodule(place)._buffers[leaf] = value
    for name, buffer in network.named_buffers():
        if buffer.is_meta:
            raise CheckpointError(
                f"the layer {name.rpartition('.')[0] or 'at the top'} has the buffer {name.rpartition('.')[2]}, which "
                "cannot be exported, because checkpoints contain no buffers. Make the buffer a parameter, or compute "
                "its values in forward."
            )


class _Reader(NamedTuple):
    """Reader for layers that do not store their weights: the source of each parameter, and the type in which it is
    read."""

    sources: dict[Tensor, Sliced]
    dtype: torch.dtype

    def rows(self, parameter: Tensor, rows: slice) -> Tensor:
        return self.sources[parameter][rows].to(self.dtype)

    def whole(self, parameter: Tensor) -> Tensor:
        return copy_in_pieces(torch.empty(parameter.shape, dtype=self.dtype), self.sources[parameter])


def _stream(module: nn.Module, reader: _Reader) -> None:
    """Make each layer in a module read its weights when it runs.

    Parameters of the module itself, such as the biases u and v, are read now and stay in memory.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(reader.whole(parameter), requires_grad=False))
    for name, child in list(module.named_children()):
        if any(child.children()) and name != "distance":  # which a plugin may have made: it sees itself whole
            _stream(child, reader)
        else:
            setattr(module, name, _Part(child, reader))


class _Part(nn.Module):
    """Wrapper of a layer that reads the layer's weights when the layer runs, and drops them afterwards."""

    def __init__(self, part: nn.Module, reader: _Reader) -> None:
        super().__init__()
        self.part = part
        self.reader = reader

    def forward(self, *inputs: Any) -> Any:
        weights = {name: self.reader.whole(parameter) for name, parameter in self.part.named_parameters()}
        return functional_call(self.part, weights, inputs)


class _Embedding(AdaptiveEmbedding):
    """Embedding that reads only the table rows of the ids in its input."""

    def __init__(self, model: ModelSection, *, vocab_size: int, reader: _Reader) -> None:
        super().__init__(model, vocab_size=vocab_size)
        self.reader = reader

    def _embed(self, i: int, ids: Tensor, *, sparse: bool = False) -> Tensor:
        rows = [self.reader.rows(self.weight(i), slice(id, id + 1)) for id in ids.flatten().tolist()]
        embedded = torch.cat(rows).view(*ids.shape, -1)
        projection = self.projection(i)
        if projection is None:
            return embedded
        return F.linear(embedded, self.reader.whole(projection))


class _Softmax(AdaptiveSoftmax):
    """Softmax that reads its tables in ranges of rows, and computes a few positions at a time."""

    def __init__(self, model: ModelSection, *, vocab_size: int, embedding: AdaptiveEmbedding, reader: _Reader) -> None:
        super().__init__(model, vocab_size=vocab_size, embedding=embedding)
        self.reader = reader

    def losses(
        self,
        hidden_BTD: Tensor,
        targets_BT: Tensor,
        *,
        partition: Partition | None = None,
        tables: Sequence[Columned] | None = None,
    ) -> Tensor:
        """Compute the same losses as the softmax of `TransformerXL`."""
        tables = [_Table(self._columns(i), self._projection(i), self.reader) for i in range(self.num_tails + 1)]
        return super().losses(hidden_BTD, targets_BT, partition=partition, tables=tables)


class _Table(NamedTuple):
    """Softmax of one cluster, which reads the rows of its tables from the file when it computes losses."""

    columns: tuple[Columns, ...]
    projection_DE: Tensor | None
    reader: _Reader

    def losses(self, hidden_RD: Tensor, targets_R: Tensor) -> Tensor:
        """Return [R] losses, -log p of each row's target column, in fp32 or higher."""
        if self.projection_DE is not None:
            hidden_RD = F.linear(hidden_RD, self.reader.whole(self.projection_DE).t())
        num_rows = max(1, _MOST_LOGITS // sum(columns.high - columns.low for columns in self.columns))
        some = zip(hidden_RD.split(num_rows), targets_R.split(num_rows), strict=True)
        return torch.cat([column_losses(self._logits(hidden_rE), targets_r) for hidden_rE, targets_r in some])

    def _logits(self, hidden_rE: Tensor) -> Tensor:
        num_columns = sum(columns.high - columns.low for columns in self.columns)
        logits_rV = hidden_rE.new_empty(len(hidden_rE), num_columns)
        start = 0
        for weight_VE, bias_V, low, high in self.columns:
            for piece in pieces(torch.Size((high - low, weight_VE.shape[1]))):
                rows = slice(low + piece.start, low + piece.stop)
                weight_vE = self.reader.rows(weight_VE, rows)
                bias_v = self.reader.rows(bias_V, rows)
                # In place: small results between large buffers that come and go would keep the heap from shrinking.
                logits_rV[:, start : start + len(bias_v)] = F.linear(hidden_rE, weight_vE, bias_v)
                start += len(bias_v)
        return logits_rV
