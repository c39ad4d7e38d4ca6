"""Adaptive softmax (Grave et al. 2017): the loss over a large vocabulary, per token and in token order.

The head is a softmax over the most frequent words and one column per tail cluster. The log-probability of a tail word
is a sum: the log-probability of its cluster's column, plus the log-probability of the word within the cluster. The i-th
of these columns, counted from 0, belongs to tail cluster i + 1. (The original PyTorch code has these columns in reverse
order. The conversion of checkpoints from that code reverses the columns.) Weights may be tied to the input embedding,
and a cluster's output projection may be tied to its input projection. A tied tensor is the same Parameter in the
softmax and in the embedding.

Every cluster is computed in every step (see `adaptive_embedding`). Normalisers and log-probabilities have the type fp32
or fp64.

Shapes: B lanes, T segment, S = B * T, D model width, E embedding width, V vocabulary, C tail clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_dist.config.schema import AttentionKernel, ModelSection
from txl_dist.model.adaptive_embedding import AdaptiveEmbedding, Partition, partition_of
from txl_dist.model.fused_softmax import CHUNK_LOGITS, CHUNK_ROWS, Cluster, Columns, fused_linear_cross_entropy
from txl_dist.model.relative_attention import at_least_fp32
from txl_dist.vocabulary_clusters import cluster_edges


class Columned(Protocol):
    """Interface of an object that computes the losses of one cluster's softmax. `ClusterTable` implements it."""

    def losses(self, hidden_RD: Tensor, targets_R: Tensor) -> Tensor:
        """Return -log p of one target column for each row, [R], in fp32 or fp64."""


class ClusterTable(NamedTuple):
    """Weights that turn hidden states into one cluster's logits."""

    weight_VE: Tensor
    bias_V: Tensor
    projection_DE: Tensor | None

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Compute the cluster's logits for any hidden states [R, D]. Returns [R, V]."""
        inner_RE = hidden_RD
        if self.projection_DE is not None:
            inner_RE = F.linear(hidden_RD, self.projection_DE.t())
        return F.linear(inner_RE, self.weight_VE, self.bias_V)

    def losses(self, hidden_RD: Tensor, targets_R: Tensor) -> Tensor:
        """Return -log p of each row's target column, [R], in fp32 or fp64."""
        return column_losses(self.logits(hidden_RD), targets_R)


class AdaptiveSoftmax(nn.Module):
    """Output layer that turns hidden states and target tokens into losses in nats.

    If the model has no cutoffs, the layer is a plain softmax over the vocabulary. `kernel` is `engine.attention`, which
    also decides whether the softmax's Triton kernel may run.
    """

    def __init__(
        self,
        model: ModelSection,
        *,
        vocab_size: int,
        embedding: AdaptiveEmbedding,
        kernel: AttentionKernel = "auto",
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.edges = cluster_edges(model.cutoffs, vocab_size=vocab_size)
        self.num_tails = len(model.cutoffs)
        self.one_table = model.div_value == 1
        if self.one_table:
            num_tables = 1
        else:
            num_tables = self.num_tails + 1
        for i in range(num_tables):
            weight = embedding.weight(i)
            if not model.tie_weights:
                weight = nn.Parameter(torch.empty_like(weight))
            bias = nn.Parameter(torch.empty(weight.shape[0]))
            self.register_parameter(f"weight_{i}", weight)
            self.register_parameter(f"bias_{i}", bias)
        ties = model.tie_projections or (False,) * (self.num_tails + 1)
        for i in range(self.num_tails + 1):
            projection = embedding.projection(0 if self.one_table else i)
            if projection is not None and not ties[i]:
                projection = nn.Parameter(torch.empty_like(projection))
            self.register_parameter(f"projection_{i}", projection)
        if self.num_tails:
            self.cluster_weight = nn.Parameter(torch.empty(self.num_tails, embedding.embed_width))
            self.cluster_bias = nn.Parameter(torch.empty(self.num_tails))

    def forward(
        self,
        hidden_BTD: Tensor,
        targets_BT: Tensor | None,
        *,
        partition: Partition | None = None,
        weight_BT: Tensor | None = None,
        with_top1: bool = False,
    ) -> Tensor:
        """Compute nll_BT, the loss of each target token in nats. Three arguments select other results:

            with_top1        score_2BT: the losses, then 1.0 where the target is the most probable token, else 0.0
            weight_BT        the sum of weight * loss over all tokens, a scalar
            targets_BT None  log p of the whole vocabulary after each token, [B * T, V]

        `partition` groups the targets into the clusters of `edges`. If it is None, it is computed here. Where gradients
        are enabled, the weighted sum is computed together with its gradients (see `fused_softmax`).
        """
        if targets_BT is None:
            return self.log_probabilities(hidden_BTD.flatten(0, 1))
        if self.num_tails and partition is None:
            partition = partition_of(targets_BT, edges=self.edges)
        if weight_BT is not None and torch.is_grad_enabled():
            clusters = self._clusters(targets_BT.flatten(), partition=partition or ())
            hidden_SD = hidden_BTD.flatten(0, 1)
            weight_S = weight_BT.flatten()
            return fused_linear_cross_entropy(hidden_SD, clusters, weight_S=weight_S, kernel=self.kernel)
        nll_BT = self.losses(hidden_BTD, targets_BT, partition=partition)
        if with_top1:
            is_correct_BT = self.top1_correct(hidden_BTD, targets_BT)
            return torch.stack([nll_BT, is_correct_BT])
        if weight_BT is not None:
            return (nll_BT * weight_BT).sum()
        return nll_BT

    def _clusters(self, targets_S: Tensor, *, partition: Partition) -> list[Cluster]:
        """Return the weights and the tokens of the head and of each tail, for `fused_linear_cross_entropy`."""
        head = Cluster(
            rows_R=None,
            targets_R=self._head_columns(targets_S),
            columns=self._columns(0),
            projection_DE=self._projection(0),
        )
        clusters = [head]
        for i, tail in enumerate(partition[1:], start=1):
            cluster = Cluster(
                rows_R=tail.rows,
                targets_R=tail.ids,
                columns=self._columns(i),
                projection_DE=self._projection(i),
            )
            clusters.append(cluster)
        return clusters

    def losses(
        self,
        hidden_BTD: Tensor,
        targets_BT: Tensor,
        *,
        partition: Partition | None = None,
        tables: Sequence[Columned] | None = None,
    ) -> Tensor:
        """Compute nll_BT, the loss of each token in nats, without `fused_softmax.fused_linear_cross_entropy`.

        `tables` is the result of the method `tables()`, which copies the head's weights. A caller with frozen weights
        calls `tables()` only once and passes the result here. If `tables` is None, this method calls `tables()`.
        """
        if self.num_tails and partition is None:
            partition = partition_of(targets_BT, edges=self.edges)
        if tables is None:
            tables = self.tables()
        hidden_SD = hidden_BTD.flatten(0, 1)
        targets_S = targets_BT.flatten()
        nll_S = tables[0].losses(hidden_SD, self._head_columns(targets_S))
        nll_S = F.pad(nll_S, (0, 1))  # the losses of padded rows are added to the last element
        tails = (partition or ())[1:]
        for tail, table in zip(tails, tables[1:], strict=True):
            rows_R = tail.rows.clamp(max=hidden_SD.shape[0] - 1)
            rows_RD = hidden_SD.index_select(0, rows_R)
            nll_R = table.losses(rows_RD, tail.ids)
            nll_S = nll_S.index_add(0, tail.rows, nll_R)
        return nll_S[:-1].view(targets_BT.shape)

    def _head_columns(self, targets_S: Tensor) -> Tensor:
        """Return each target's column in the head: the target itself, or the column of its tail cluster."""
        cluster_S = torch.zeros_like(targets_S)
        for edge in self.edges[1:-1]:
            cluster_S += targets_S >= edge
        return torch.where(cluster_S == 0, targets_S, self.edges[1] - 1 + cluster_S)

    def log_probabilities(self, hidden_SD: Tensor, *, tables: Sequence[ClusterTable] | None = None) -> Tensor:
        """Compute log p of the whole vocabulary for each hidden state, [S, V]. Generation and probes use this method.

        Training does not use this method, because the result is large. `tables` is the result of the method `tables()`.
        If `tables` is None, this method calls `tables()`.
        """
        if tables is None:
            tables = self.tables()
        head = _log_softmax(tables[0].logits(hidden_SD))
        if not self.num_tails:
            return head
        shortlist_size = self.edges[1]
        parts = [head[:, :shortlist_size]]
        for i, table in enumerate(tables[1:]):
            column_S1 = head[:, shortlist_size + i, None]
            parts.append(column_S1 + _log_softmax(table.logits(hidden_SD)))
        return torch.cat(parts, dim=1)

    def top1_correct(
        self, hidden_BTD: Tensor, targets_BT: Tensor, *, tables: Sequence[ClusterTable] | None = None
    ) -> Tensor:
        """Return top1_BT: 1.0 where the target is the most probable token, else 0.0.

        Tokens are processed in chunks, so that few logits are in memory at a time. `tables` is the result of the method
        `tables()`. If `tables` is None, this method calls `tables()`.
        """
        if tables is None:
            tables = self.tables()
        if hidden_BTD.is_cuda:
            kind = "cuda"
        else:
            kind = "cpu"
        num_columns = max(table.bias_V.shape[0] for table in tables)
        chunk_len = max(CHUNK_ROWS[kind], CHUNK_LOGITS[kind] // num_columns)
        chunks = hidden_BTD.flatten(0, 1).split(chunk_len)
        ids_S = torch.cat([self._most_probable(hidden_cD, tables) for hidden_cD in chunks])
        is_correct_BT = ids_S.view(targets_BT.shape) == targets_BT
        return is_correct_BT.to(at_least_fp32(hidden_BTD.dtype))

    def _most_probable(self, hidden_SD: Tensor, tables: Sequence[ClusterTable]) -> Tensor:
        """Return the ids of the most probable tokens, [S]. The method waits for the device.

        A word is never more probable than its cluster's column. So a tail is computed only for the tokens where the
        tail's column is more probable than the best word so far.
        """
        head_SV = _log_softmax(tables[0].logits(hidden_SD))
        best_S, ids_S = head_SV[:, : self.edges[1]].max(1)
        for i, table in enumerate(tables[1:]):
            column_S = head_SV[:, self.edges[1] + i]
            rows_R = (column_S > best_S).nonzero().squeeze(1)
            if not len(rows_R):
                continue
            inside_R, places_R = _log_softmax(table.logits(hidden_SD[rows_R])).max(1)
            log_p_R = column_S[rows_R] + inside_R
            is_better_R = log_p_R > best_S[rows_R]
            rows_R = rows_R[is_better_R]
            best_S[rows_R] = log_p_R[is_better_R]
            ids_S[rows_R] = self.edges[i + 1] + places_R[is_better_R]
        return ids_S

    def tables(self) -> list[ClusterTable]:
        """Return the weights of each cluster's logits, the head first.

        The head's logits end with one column per tail.
        """
        tables = []
        for i in range(self.num_tails + 1):
            weights: list[Tensor] = []
            biases: list[Tensor] = []
            for columns in self._columns(i):
                weights.append(columns.weight_VE[columns.low : columns.high])
                biases.append(columns.bias_V[columns.low : columns.high])
            is_joined = len(weights) > 1
            if is_joined:
                weight_VE = torch.cat(weights)
            else:
                weight_VE = weights[0]
            if is_joined:
                bias_V = torch.cat(biases)
            else:
                bias_V = biases[0]
            tables.append(ClusterTable(weight_VE, bias_V, self._projection(i)))
        return tables

    def _columns(self, i: int) -> tuple[Columns, ...]:
        """Return the slices of tables that hold the weights of cluster i's logits, one row per logit."""
        low = self.edges[i]
        high = self.edges[i + 1]
        if self.one_table:
            table = 0
        else:
            table = i
        if self.one_table:
            offset = 0
        else:
            offset = low
        weight = getattr(self, f"weight_{table}")
        bias = getattr(self, f"bias_{table}")
        words = Columns(weight, bias, low - offset, high - offset)
        if i > 0 or not self.num_tails:
            return (words,)
        tails = Columns(self.cluster_weight, self.cluster_bias, 0, self.num_tails)
        return (words, tails)

    def _projection(self, i: int) -> Tensor | None:
        return cast(Tensor | None, getattr(self, f"projection_{i}"))


def column_losses(logits_RV: Tensor, targets_R: Tensor) -> Tensor:
    """Return -log p of each row's target column, [R], in fp32 or fp64, from logits [R, V]."""
    log_p_RV = _log_softmax(logits_RV)
    return F.nll_loss(log_p_RV, targets_R, reduction="none")


def _log_softmax(logits: Tensor) -> Tensor:
    return F.log_softmax(logits, dim=-1, dtype=at_least_fp32(logits.dtype))
