"""Adaptive input embedding (Baevski and Auli 2019, as in the original Transformer-XL).

The vocabulary is in frequency order and is cut into clusters. If `div_value` is 1, all clusters use one table. If
`div_value` is larger, cluster i has its own table of width E // div_value**i and a projection to the model width. The
result is multiplied by sqrt(D) if the model scales its embeddings.

Every cluster is computed in every step. A cluster to which no token belongs is computed for padded rows. If only some
ranks computed a cluster, the collectives of ZeRO would hang. In training the host finds the tokens of each cluster
(`vocabulary_clusters`) and sends them with the segment. So the forward pass does not wait for the device.

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
"""Multiple to which the number of rows of a cluster is padded, by kind of device. The multiple is large on a GPU, so
that steps have few different shapes. It is small on a CPU, so that few padded rows are computed."""


def partition_of(ids: Tensor, *, edges: Sequence[int]) -> tuple[ClusterRows, ...]:
    """Group token ids by cluster for `AdaptiveEmbedding` and `AdaptiveSoftmax`. Returns one item per cluster.

    An item holds the positions and the ids of the cluster's tokens. The function waits for the device. So training
    groups the ids on the host instead, and sends the groups with each segment.
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
        """Return the weights of table i, [V_i, E_i]: a row of width E_i for each of the table's V_i token ids."""
        return cast(nn.Parameter, getattr(self, f"weight_{i}"))

    def projection(self, i: int) -> nn.Parameter | None:
        """Return the projection from table i to the model width, [D, E_i], or None if the table has no projection."""
        return cast(nn.Parameter | None, getattr(self, f"projection_{i}"))

    def forward(
        self, tokens_BT: Tensor, *, partition: Partition | None = None, sparse_gradient: bool = False
    ) -> Tensor:
        """Look up the embeddings of tokens and return them as hidden_BTD.

        `partition` groups the tokens into the clusters of `edges`. The argument is ignored if there is a single table.
        With `sparse_gradient` the gradient of a single table can be a sparse tensor. A caller sets this flag only if it
        adds the sparse gradient to a dense gradient.
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
        hidden_BTD = hidden_SD.view(*tokens_BT.shape, hidden_SD.shape[-1])
        return hidden_BTD * self.scale

    def _embed(self, i: int, ids: Tensor, *, sparse: bool = False) -> Tensor:
        """Look up ids in table i and project the embeddings to the model width. Returns [..., D]."""
        embedded = F.embedding(ids, self.weight(i), sparse=sparse)
        projection = self.projection(i)
        if projection is None:
            return embedded
        return F.linear(embedded, projection)
