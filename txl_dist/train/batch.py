"""From a segment (numpy, host) to the micro-batches of a rank (tensors, device).

The cluster partitions are made here, where the token ids are known without asking the device. `BatchMaker` runs in
the prefetch thread, `pinned` too; `to_device` is the only part on the training thread.

Where micro-batches are CUDA graphs the sizes of a partition are a rung of a ladder, the lowest that holds the batch
(`text.clusters.size_ladder`). All clusters climb together, so that text, whose numbers of rare words never repeat, has
a handful of shapes, each a graph. A rung depends on settings and the batch alone: a run that is continued has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from txl_dist.config.load import Config
from txl_dist.config.schema import TrainSection
from txl_dist.data.loader.corpora import open_corpora
from txl_dist.data.loader.corruption import CorruptionPolicy
from txl_dist.data.loader.stream import LaneStream, Segment
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.model.adaptive_embedding import ROWS_MULTIPLE, Partition
from txl_dist.model.transformer_xl import Batch, TransformerXL
from txl_dist.train.state import RunContext
from txl_dist.vocabulary_clusters import ClusterRows, count_by_cluster, partition_by_cluster, sizes_for


class StepInput(NamedTuple):
    """What the reader thread prepares for one step of this rank."""

    batches: list[Batch]
    num_scored: int
    """Targets of this rank that count."""
    stream: StreamState
    """Where the stream stands once this step is trained on."""


class BatchMaker(NamedTuple):
    """What turns a segment into batches: the cluster edges of the model and the policy at document borders."""

    embedding_edges: tuple[int, ...]
    softmax_edges: tuple[int, ...]
    mask_documents: bool
    rows_multiple: int = 0
    """Each cluster's rows are padded to a multiple of this; 0 pads them to a rung of the ladder."""
    half_loss: bool = False
    """Only the recent half of a segment's targets is scored: of training (`for_training`)."""

    def for_training(self, train: TrainSection) -> BatchMaker:
        """The same for text that is trained on, of which less may be scored."""
        return self._replace(half_loss=train.half_loss)

    def microbatches(self, segment: Segment, *, lanes: int) -> list[Batch]:
        """Cut a rank's segment into micro-batches of `lanes` lanes each, in lane order."""
        count = segment.tokens.shape[0]
        return [self.batch(segment, rows=slice(start, start + lanes)) for start in range(0, count, lanes)]

    def batch(self, segment: Segment, *, rows: slice = slice(None)) -> Batch:
        """One batch of some lanes; it shares the segment's memory where it can.

        With document masks an end-of-text belongs, as an input, to the document that it opens: it sees itself alone and
        predicts that document's first token. A target that its input's document does not hold is not scored: where a
        document begins without an end-of-text before it, or was cut at the border of a lane's piece.
        """
        tokens, targets = segment.tokens[rows, :-1], segment.tokens[rows, 1:]
        counts, document_BT = segment.scored[rows], None
        if self.mask_documents:
            begins = segment.documents[rows]
            documents = np.where(segment.opens[rows], begins[:, 1:], begins[:, :-1])
            counts, document_BT = counts & (documents == begins[:, 1:]), torch.from_numpy(documents)
        if self.half_loss:
            counts = counts & (np.arange(counts.shape[1]) >= counts.shape[1] // 2)
        sizes = self._sizes(tokens, targets) if not self.rows_multiple else ()
        return Batch(
            tokens_BT=torch.from_numpy(np.ascontiguousarray(tokens)),
            targets_BT=torch.from_numpy(np.ascontiguousarray(targets)),
            scored_BT=torch.from_numpy(counts.astype(np.float32)),
            document_BT=document_BT,
            token_partition=self._partition(tokens, self.embedding_edges, sizes),
            target_partition=self._partition(targets, self.softmax_edges, sizes),
        )

    def _sizes(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[int, ...]:
        """Of both partitions: where there are two, they are by the same edges."""
        counts = count_by_cluster(targets, self.softmax_edges)
        if len(self.embedding_edges) > 2:
            counts = tuple(map(max, counts, count_by_cluster(tokens, self.embedding_edges)))
        return sizes_for(counts, edges=self.softmax_edges, num_tokens=targets.size)

    def _partition(self, ids: np.ndarray, edges: tuple[int, ...], sizes: tuple[int, ...]) -> Partition | None:
        if len(edges) == 2:
            return None  # one cluster: nothing to part
        flat = np.ascontiguousarray(ids).reshape(-1)
        clusters = partition_by_cluster(flat, edges=edges, multiple=self.rows_multiple, sizes=sizes)
        return tuple(ClusterRows(*(torch.from_numpy(field) for field in cluster)) for cluster in clusters)


def batch_maker(model: TransformerXL, *, mask_documents: bool, for_graphs: bool = False) -> BatchMaker:
    """The maker for a model, whose batches have few different shapes if they are `for_graphs`. Raises nothing; ids out
    of range are found when a batch is made (DataError)."""
    kind = "cpu" if model.embedding.weight(0).device.type == "cpu" else "cuda"
    rows_multiple = 0 if for_graphs else ROWS_MULTIPLE[kind]
    return BatchMaker(tuple(model.embedding.edges), tuple(model.softmax.edges), mask_documents, rows_multiple)


def pinned(batch: Batch, device: torch.device) -> Batch:
    """A copy in pinned memory, for the reader thread; a no-op on the CPU.

    torch keeps a ring of such buffers, and gives one out again only when the copy from it has ended.
    """
    return batch if device.type == "cpu" else _mapped(batch, torch.Tensor.pin_memory)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy without waiting for the device, if the batch is pinned; a no-op on the CPU."""
    return batch if device.type == "cpu" else _mapped(batch, lambda value: value.to(device, non_blocking=True))


def _mapped(batch: Batch, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """With each of its tensors moved, those of its partitions too."""

    def moved(value: torch.Tensor | Partition | None) -> Any:
        if value is None or isinstance(value, torch.Tensor):
            return None if value is None else move(value)
        return tuple(ClusterRows(*map(move, cluster)) for cluster in value)

    return Batch(*map(moved, batch))


def read_inputs(
    context: RunContext, stream: StreamState, *, maker: BatchMaker, damage: CorruptionPolicy
) -> Iterator[StepInput]:
    """The steps of this rank behind a position. Runs in the reader thread."""
    config, device = context.config, context.ranks.device
    maker = maker.for_training(config.train)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # pinning must not open a context on the first GPU
    segments = LaneStream(
        context.corpora.train,
        stream,
        segment_len=config.train.segment_len,
        lanes=context.lanes,
        damage=damage,
        mark_documents=maker.mask_documents,
        # Those that wait, the one that is trained on and the one that is being filled.
        num_buffers=config.data.prefetch_depth + 2,
    )
    for segment, state in segments:
        batches = maker.microbatches(segment, lanes=context.plan.microbatch_lanes)
        num_scored = int(sum(batch.scored_BT.sum() for batch in batches))
        yield StepInput([pinned(batch, device) for batch in batches], num_scored, state)


def lane_batches(config: Config, model: TransformerXL) -> Iterator[Batch]:
    """The endless batches of all lanes that a run of one process trains on, from its first step: for one's own loop.

    Raises DataError where the corpus of `data.path` cannot be read.
    """
    train, mask_documents = config.train, config.data.document_mask
    corpora = open_corpora(config.data, num_lanes=train.num_lanes, seed=config.run.seed)
    stream = LaneStream(
        corpora.train,
        corpora.begin,
        segment_len=train.segment_len,
        lanes=range(train.num_lanes),
        mark_documents=mask_documents,
    )
    maker = batch_maker(model, mask_documents=mask_documents).for_training(train)
    return (maker.batch(segment) for segment, _ in stream)
