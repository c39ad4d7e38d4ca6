"""Adaptive input embedding (Baevski and Auli 2019, as in the original Transformer-XL).

The vocabulary is in frequency order and is cut into clusters. If `div_value` is 1, all clusters use one table. If
`div_value` is larger, cluster i has its own table of width E // div_value**i and a projection to the model width. The
result is multiplied by sqrt(D) if the model scales its embeddings.

Every cluster is computed in every step, for at least one padded row, even if no token belongs to it. If only some ranks
computed a cluster, the collectives of ZeRO would hang. The host computes the partition (`vocabulary_clusters`), so
nothing here waits for the device.

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
"""Divisor of the number of rows of a cluster, by kind of device. Rows are padded to a multiple of this number. A GPU
should see few different shapes, and a CPU should compute few rows."""


def partition_of(ids: Tensor, *, edges: Sequence[int]) -> tuple[ClusterRows, ...]:
    """Group token ids by cluster, as `AdaptiveEmbedding` and `AdaptiveSoftmax` need them. Returns one item per cluster.

    An item holds the ids of the cluster's tokens and their positions. The function waits for the device. So training
    computes the partition on the host instead, and sends it with each segment.
    """
    device = ids.device
    if device.type == "cpu":
        kind = "cpu"
    else:
        kind = "cuda"
    multiple = ROWS_MULTIPLE[kind]
    host_ids = ids.detach().cpu().numpy().reshape(-1)
    clusters = []
    for cluster in partition_by_cluster(host_ids, edges=edges, multiple=multiple):
        fields = [torch.from_numpy(field).to(device) for field in cluster]
        clusters.append(ClusterRows(*fields))
    return tuple(clusters)


def is_projected(model: ModelSection, *, table_width: int) -> bool:
    """Return True if embeddings of width `table_width` pass through a projection to the model width."""
    if table_width != model.width:
        return True
    return model.div_value > 1 and model.project_same_width


class AdaptiveEmbedding(nn.Module):
    """Embedding that turns token ids into hidden states. The softmax may use the same tables and projections."""

    def __init__(self, model: ModelSection, *, vocab_size: int) -> None:
        super().__init__()
        self.width = model.width
        self.embed_width = model.embed_width_or_default()
        if model.scale_embedding:
            self.scale = math.sqrt(model.width)
        else:
            self.scale = 1.0
        if model.div_value > 1:
            cutoffs = model.cutoffs
        else:
            cutoffs = ()
        self.edges = cluster_edges(cutoffs, vocab_size=vocab_size)
        self.num_tables = len(self.edges) - 1
        for i in range(self.num_tables):
            table_width = self.embed_width // model.div_value**i
            size = self.edges[i + 1] - self.edges[i]
            weight = nn.Parameter(torch.empty(size, table_width))
            self.register_parameter(f"weight_{i}", weight)
            projection: nn.Parameter | None = None
            if is_projected(model, table_width=table_width):
                projection = nn.Parameter(torch.empty(model.width, table_width))
            self.register_parameter(f"projection_{i}", projection)

    def weight(self, i: int) -> nn.Parameter:
        """Return the weights of table i, [V_i, E_i]. V_i is the number of tokens in its cluster."""
        return cast(nn.Parameter, getattr(self, f"weight_{i}"))

    def projection(self, i: int) -> nn.Parameter | None:
        """Return the projection from table i to the model width, [D, E_i], or None if the table has no projection."""
        return cast(nn.Parameter | None, getattr(self, f"projection_{i}"))

    def forward(
        self, tokens_BT: Tensor, *, partition: Partition | None = None, sparse_gradient: bool = False
    ) -> Tensor:
        """Look up the embeddings of tokens and return them as hidden_BTD.

        `partition` groups the tokens into the clusters of `edges`. It is ignored if there is a single table. With
        `sparse_gradient` a single table may get a sparse gradient. The caller must be able to add that gradient to a
        dense one.
        """
        if self.num_tables == 1:
            # Dense on a GPU, where a sparse sum has no fixed order.
            sparse = sparse_gradient and tokens_BT.device.type != "cuda"
            embedded = self._embed(0, tokens_BT, sparse=sparse)
            return embedded * self.scale
        if partition is None:
            partition = partition_of(tokens_BT, edges=self.edges)
        # Each cluster's rows are written once and then gathered in token order. In the backward pass each row gets one
        # gradient, so the order of sums is fixed on a GPU too. Padded rows are not gathered and get no gradient.
        embedded = torch.cat([self._embed(i, cluster.ids) for i, cluster in enumerate(partition)])
        rows = torch.cat([cluster.rows for cluster in partition])
        row_numbers = torch.arange(len(rows), device=rows.device)
        # Index of each token's row in `embedded`. The last element is for padded rows.
        place = rows.new_empty(tokens_BT.numel() + 1)
        place.index_copy_(0, rows, row_numbers)
        hidden_SD = embedded.index_select(0, place[:-1])
        hidden_BTD = hidden_SD.view(*tokens_BT.shape, self.width)
        return hidden_BTD * self.scale

    def _embed(self, i: int, ids: Tensor, *, sparse: bool = False) -> Tensor:
        """Look up ids in table i and project the embeddings to the model width. Returns [..., D]."""
        embedded = F.embedding(ids, self.weight(i), sparse=sparse)
        projection = self.projection(i)
        if projection is None:
            return embedded
        return F.linear(embedded, projection)
