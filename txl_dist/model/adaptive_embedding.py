"""Adaptive input embedding (Baevski and Auli 2019, as the original Transformer-XL has it).

The vocabulary is in frequency order and is cut into clusters. With `div_value` 1 all share one table; with a larger
one, cluster i has its own table of width E // div_value**i and a projection to the model width. The result is
multiplied by sqrt(D), unless the model does not scale its embeddings.

Every cluster runs in every step with at least one padded row, whatever the tokens: a cluster that only some ranks
use would break the collectives of ZeRO. The partition comes from the host (`text.clusters`); nothing here waits
for the device.

Shapes: B lanes, T segment, S = B * T, D model width, E embedding width, V vocabulary, R padded rows of a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_dist.config.schema import ModelSection
from txl_dist.vocabulary_clusters import ClusterRows, cluster_edges, partition_by_cluster

Partition = Sequence[ClusterRows]

ROWS_MULTIPLE = {"cpu": 8, "cuda": 128}
"""What the rows of a cluster are padded to a multiple of, by kind of device: few shapes on a GPU, few rows on a CPU."""


def partition_of(ids: Tensor, *, edges: Sequence[int]) -> tuple[ClusterRows, ...]:
    """Make a partition on the spot. It waits for the device: training ships one with the segment instead."""
    multiple = ROWS_MULTIPLE["cpu" if ids.device.type == "cpu" else "cuda"]
    rows = partition_by_cluster(ids.detach().cpu().numpy().reshape(-1), edges=edges, multiple=multiple)
    return tuple(ClusterRows(*(torch.from_numpy(field).to(ids.device) for field in cluster)) for cluster in rows)


def is_projected(model: ModelSection, *, table_width: int) -> bool:
    """Whether embeddings of a width pass through a projection to the model width."""
    return table_width != model.width or (model.div_value > 1 and model.project_same_width)


class AdaptiveEmbedding(nn.Module):
    """Token ids to hidden states. `weights` and `projections` may be shared with the softmax."""

    def __init__(self, model: ModelSection, *, vocab_size: int) -> None:
        super().__init__()
        self.width, self.embed_width = model.width, model.embed_width_or_default()
        self.scale = math.sqrt(model.width) if model.scale_embedding else 1.0
        self.edges = cluster_edges(model.cutoffs if model.div_value > 1 else (), vocab_size=vocab_size)
        self.num_tables = len(self.edges) - 1
        for i in range(self.num_tables):
            table_width = self.embed_width // model.div_value**i
            size = self.edges[i + 1] - self.edges[i]
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(size, table_width)))
            projects = is_projected(model, table_width=table_width)
            projection = nn.Parameter(torch.empty(model.width, table_width)) if projects else None
            self.register_parameter(f"projection_{i}", projection)

    def weight(self, i: int) -> nn.Parameter:
        """Table i, [V_i, E_i]."""
        return cast(nn.Parameter, getattr(self, f"weight_{i}"))

    def projection(self, i: int) -> nn.Parameter | None:
        """Projection of table i, [D, E_i], or None where none is needed."""
        return cast(nn.Parameter | None, getattr(self, f"projection_{i}"))

    def forward(
        self, tokens_BT: Tensor, *, partition: Partition | None = None, sparse_gradient: bool = False
    ) -> Tensor:
        """hidden_BTD. `partition` is of the tokens by `edges`; needed for more than one table, else ignored.

        `sparse_gradient`: that of a single table may be a sparse tensor, for whoever has a dense one to add it to.
        """
        if self.num_tables == 1:
            # Not on a GPU, where a sparse sum has no fixed order.
            hidden = self._embed(0, tokens_BT, sparse=sparse_gradient and tokens_BT.device.type != "cuda")
            return hidden * self.scale
        partition = partition_of(tokens_BT, edges=self.edges) if partition is None else partition
        # Each cluster's rows are written once and then fetched in token order. Going back each row gets one gradient,
        # so the order of sums is fixed on a GPU too; padded rows, which nothing fetches, get none.
        embedded = torch.cat([self._embed(i, cluster.ids) for i, cluster in enumerate(partition)])
        rows = torch.cat([cluster.rows for cluster in partition])
        place = rows.new_empty(tokens_BT.numel() + 1).index_copy_(0, rows, torch.arange(len(rows), device=rows.device))
        return embedded.index_select(0, place[:-1]).view(*tokens_BT.shape, self.width) * self.scale

    def _embed(self, i: int, ids: Tensor, *, sparse: bool = False) -> Tensor:
        embedded, projection = F.embedding(ids, self.weight(i), sparse=sparse), self.projection(i)
        return embedded if projection is None else F.linear(embedded, projection)
