"""Conversion of a segment (numpy, host) to the micro-batches of a rank (tensors, device).

Token ids are sorted into the clusters of the vocabulary here, where they are in host memory. So no operation waits for
the device. `BatchMaker` and `pinned` run in the prefetch thread. Only `to_device` runs in the training thread.

CUDA graphs need few different shapes. So the clusters are then padded to one of a few tuples of sizes, the smallest
that has room for the batch (`vocabulary_clusters.size_ladder`). Each tuple is one shape, and one graph. The tuple
depends only on the settings and the batch, so a resumed run has the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from txl_dist.config.load import Config
from txl_dist.data.loader.corpora import open_corpora
from txl_dist.data.loader.corpus import Split
from txl_dist.data.loader.corruption import CorruptionPolicy
from txl_dist.data.loader.stream import LaneStream, Segment
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.model.adaptive_embedding import ROWS_MULTIPLE, Partition
from txl_dist.model.transformer_xl import Batch, TransformerXL
from txl_dist.vocabulary_clusters import ClusterRows, count_by_cluster, partition_by_cluster, sizes_for


class StepInput(NamedTuple):
    """Input of one training step on this rank. The reader thread prepares it for the training loop."""

    batches: list[Batch]
    """One batch per micro-batch, in the order of the lanes (batch rows). They are in pinned host memory if the device
    is a GPU."""
    num_scored: int
    """Number of this rank's targets that are scored."""
    stream: StreamState
    """Position in the training text after this step, for a checkpoint."""


class BatchMaker(NamedTuple):
    """Converter of token segments to model batches, for training and validation.

    It sorts token ids into the clusters of the vocabulary, and marks the targets that are scored.
    """

    embedding_edges: tuple[int, ...]
    """Edges of the clusters of the embedding: the first id of each cluster, then the vocabulary size."""
    softmax_edges: tuple[int, ...]
    """Edges of the clusters of the softmax, in the same form."""
    mask_documents: bool
    """Whether tokens attend only within their document."""
    rows_multiple: int = 0
    """Multiple to which each cluster's rows are padded. 0 pads them to one of a few fixed sizes."""
    half_loss: bool = False
    """Whether only the last half of a segment's targets is scored. `for_training` sets it."""

    def for_training(self, *, half_loss: bool) -> BatchMaker:
        """Return the maker for training text. With `half_loss` it marks only the last half of the targets as scored."""
        return self._replace(half_loss=half_loss)

    def microbatches(self, segment: Segment, *, lanes: int) -> list[Batch]:
        """Cut a rank's segment into micro-batches of `lanes` lanes (batch rows) each, in lane order."""
        num_lanes = segment.tokens.shape[0]
        return [self.batch(segment, rows=slice(start, start + lanes)) for start in range(0, num_lanes, lanes)]

    def batch(self, segment: Segment, *, rows: slice = slice(None)) -> Batch:
        """Make one batch of the segment's `rows`, by default of all rows. It shares the segment's memory where
        possible.

        With document masks an end-of-text token belongs, as an input, to the document that it opens. It attends to
        itself alone and predicts the first token of that document. A target is not scored if it is not in its input's
        document. That is the case where a document begins without an end-of-text token, or where the border of a lane's
        text cuts a document.
        """
        tokens = segment.tokens[rows, :-1]
        targets = segment.tokens[rows, 1:]
        is_scored = segment.scored[rows]
        document_BT = None
        if self.mask_documents:
            all_documents = segment.documents[rows]
            target_documents = all_documents[:, 1:]
            input_documents = np.where(segment.opens[rows], target_documents, all_documents[:, :-1])
            is_scored = is_scored & (input_documents == target_documents)
            document_BT = torch.from_numpy(input_documents)
        if self.half_loss:
            segment_len = is_scored.shape[1]
            is_scored = is_scored & (np.arange(segment_len) >= segment_len // 2)
        if not self.rows_multiple:
            sizes = self._sizes(tokens, targets)
        else:
            sizes = ()
        return Batch(
            tokens_BT=torch.from_numpy(np.ascontiguousarray(tokens)),
            targets_BT=torch.from_numpy(np.ascontiguousarray(targets)),
            scored_BT=torch.from_numpy(is_scored.astype(np.float32)),
            document_BT=document_BT,
            token_partition=self._partition(tokens, self.embedding_edges, sizes),
            target_partition=self._partition(targets, self.softmax_edges, sizes),
        )

    def _sizes(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[int, ...]:
        """Return the padded size of each cluster, for both partitions.

        If there are two partitions, their edges are equal.
        """
        counts = count_by_cluster(targets, self.softmax_edges)
        if len(self.embedding_edges) > 2:
            input_counts = count_by_cluster(tokens, self.embedding_edges)
            counts = tuple(map(max, counts, input_counts))
        return sizes_for(counts, edges=self.softmax_edges, num_tokens=targets.size)

    def _partition(self, ids: np.ndarray, edges: tuple[int, ...], sizes: tuple[int, ...]) -> Partition | None:
        """Return the ids sorted into clusters. `edges` are the edges of the clusters. Returns None if there is only one
        cluster."""
        if len(edges) == 2:
            return None
        flat = np.ascontiguousarray(ids).reshape(-1)
        clusters = partition_by_cluster(flat, edges=edges, multiple=self.rows_multiple, sizes=sizes)
        return tuple(ClusterRows(*map(torch.from_numpy, cluster)) for cluster in clusters)


def batch_maker(model: TransformerXL, *, mask_documents: bool, for_graphs: bool = False) -> BatchMaker:
    """Return the maker of batches for a model. With `for_graphs` its batches have only a few different shapes.

    Ids outside the vocabulary raise DataError only when a batch is made.
    """
    if model.embedding.weight(0).device.type == "cpu":
        kind = "cpu"
    else:
        kind = "cuda"
    if for_graphs:
        rows_multiple = 0
    else:
        rows_multiple = ROWS_MULTIPLE[kind]
    return BatchMaker(tuple(model.embedding.edges), tuple(model.softmax.edges), mask_documents, rows_multiple)


def pinned(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a batch in pinned memory. On a CPU the batch itself is returned. Called in the reader thread.

    torch keeps a set of pinned buffers, and uses a buffer again only after the copy from it has ended.
    """
    if device.type == "cpu":
        return batch
    return _mapped(batch, torch.Tensor.pin_memory)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a batch on a device. The host does not wait if the batch is pinned. On a CPU the batch itself is
    returned."""
    if device.type == "cpu":
        return batch
    return _mapped(batch, lambda value: value.to(device, non_blocking=True))


def _mapped(batch: Batch, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Return the batch with `move` applied to each of its tensors, including the tensors of its partitions."""

    def moved(value: torch.Tensor | Partition | None) -> Any:
        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            return move(value)
        return tuple(ClusterRows(*map(move, cluster)) for cluster in value)

    return Batch(*map(moved, batch))


def read_inputs(
    splits: Sequence[Split],
    stream: StreamState,
    *,
    lanes: range,
    segment_len: int,
    microbatch_lanes: int,
    maker: BatchMaker,
    damage: CorruptionPolicy,
    depth: int,
    device: torch.device,
) -> Iterator[StepInput]:
    """Yield the input of each step for this rank's `lanes`, from the position `stream` on.

    This runs in the reader thread. `maker` is the maker of training batches, and `depth` is the number of inputs that
    are prefetched.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # pinning must not open a context on the first GPU
    segments = LaneStream(
        splits,
        stream,
        segment_len=segment_len,
        lanes=lanes,
        damage=damage,
        mark_documents=maker.mask_documents,
        # The prefetched ones, the one being trained on and the one being filled.
        num_buffers=depth + 2,
    )
    for segment, state in segments:
        batches = maker.microbatches(segment, lanes=microbatch_lanes)
        num_scored = int(sum(batch.scored_BT.sum() for batch in batches))
        yield StepInput([pinned(batch, device) for batch in batches], num_scored, state)


def lane_batches(config: Config, model: TransformerXL) -> Iterator[Batch]:
    """Yield the training batches of a run in one process, without end. Use it in a training loop of your own.

    Each batch has all lanes (batch rows), and the first batch is that of the first step. Raises DataError if the corpus
    of `data.path` cannot be read.
    """
    train = config.train
    mask_documents = config.data.document_mask
    corpora = open_corpora(config.data, num_lanes=train.num_lanes, seed=config.run.seed)
    stream = LaneStream(
        corpora.train,
        corpora.begin,
        segment_len=train.segment_len,
        lanes=range(train.num_lanes),
        mark_documents=mask_documents,
    )
    maker = batch_maker(model, mask_documents=mask_documents).for_training(half_loss=train.half_loss)
    return (maker.batch(segment) for segment, _ in stream)
