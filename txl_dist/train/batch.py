"""Conversion of a segment of text (numpy arrays in host memory) to a rank's micro-batches (tensors on its device).

Token ids are sorted into the clusters of the vocabulary while they are still in host memory. So sorting never waits for
the device. `BatchMaker` and `pinned` run in the prefetch thread. Only `to_device` runs in the training thread.

CUDA graphs need few different shapes. With CUDA graphs the clusters are therefore padded to one of a few fixed tuples
of sizes. The smallest tuple that has room for the batch is used (`vocabulary_clusters.size_ladder`). Each tuple needs
one graph. The tuple depends only on the settings and the batch, so a resumed run has the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from txl_dist.config.load import Config
from txl_dist.data.loader.corpora import open_corpora
from txl_dist.data.loader.corpus import Corpus
from txl_dist.data.loader.corruption import CorruptionPolicy
from txl_dist.data.loader.shards import Split
from txl_dist.data.loader.stream import LaneStream, Segment
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.data.loader.target_sampler import TargetBatch, TargetSampler, TargetSettings
from txl_dist.model.adaptive_embedding import ROWS_MULTIPLE, Partition
from txl_dist.model.prediction_order import PredictionOrder
from txl_dist.model.transformer_xl import Batch, TransformerXL
from txl_dist.tokenizers.word_starts import word_starts
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
    """Edges of the clusters of the softmax: the first id of each cluster, then the vocabulary size."""
    mask_documents: bool
    """Whether tokens attend only within their document."""
    rows_multiple: int = 0
    """The number of rows of each cluster is padded to a multiple of this value. With 0 the number is padded to one of a
    few fixed sizes."""
    half_loss: bool = False
    """Whether only the last half of a segment's targets is scored. `for_training` sets this field."""

    def for_training(self, *, half_loss: bool) -> BatchMaker:
        """Return a copy of this maker for training text. With `half_loss` the copy marks only the last half of each
        segment's targets as scored."""
        return self._replace(half_loss=half_loss)

    def microbatches(self, segment: Segment, *, lanes: int, targets: TargetBatch | None = None) -> list[Batch]:
        """Cut a rank's segment into micro-batches of `lanes` lanes (batch rows) each, in lane order.

        For XLNet's objective `targets` are the tokens to predict. For next-token prediction `targets` is None.
        """
        num_lanes = segment.tokens.shape[0]
        batches = []
        for start in range(0, num_lanes, lanes):
            rows = slice(start, start + lanes)
            if targets is None:
                batches.append(self.batch(segment, rows=rows))
            else:
                batches.append(self.ordered_batch(segment, targets, rows=rows))
        return batches

    def batch(self, segment: Segment, *, rows: slice = slice(None)) -> Batch:
        """Make one batch of the segment's `rows`, by default of all rows. The tensors share the segment's memory where
        possible.

        With document masks, an input that is an end-of-text token counts as part of the document that follows it. This
        input attends to itself alone, and predicts the first token of that document. A target is scored only if the
        target and its input are in the same document. Target and input are in two documents if the target begins a
        document without an end-of-text token before it, or begins another part of the text of its lane (batch row).
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

    def ordered_batch(self, segment: Segment, targets: TargetBatch, *, rows: slice = slice(None)) -> Batch:
        """Make one batch of the segment's `rows` for XLNet's objective, which predicts `targets` in a random order.

        The input is the last T of the segment's T + 1 tokens, and each target is one of these T tokens. With document
        masks, each token attends only within its own document. CUDA graphs are not supported.
        """
        targets = targets.of_rows(rows)
        tokens = segment.tokens[rows, 1:]
        target_ids = np.take_along_axis(tokens, targets.place_Bm, axis=1)
        is_sound = np.take_along_axis(segment.scored[rows], targets.place_Bm, axis=1)
        is_scored = targets.is_drawn_Bm & is_sound
        document_BT = None
        if self.mask_documents:
            document_BT = torch.from_numpy(np.ascontiguousarray(segment.documents[rows, 1:]))
        order = PredictionOrder(
            query_level_BT=torch.from_numpy(targets.query_level_BT),
            key_level_BT=torch.from_numpy(targets.key_level_BT),
            place_Bm=torch.from_numpy(targets.place_Bm),
            reuse_len=targets.reuse_len,
        )
        return Batch(
            tokens_BT=torch.from_numpy(np.ascontiguousarray(tokens)),
            targets_BT=torch.from_numpy(target_ids),
            scored_BT=torch.from_numpy(is_scored.astype(np.float32)),
            document_BT=document_BT,
            token_partition=self._partition(tokens, self.embedding_edges, ()),
            target_partition=self._partition(target_ids, self.softmax_edges, ()),
            order=order,
        )

    def _sizes(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[int, ...]:
        """Return the number of rows to which each cluster is padded. Each size has room for the cluster's input tokens
        and for its targets.

        If both the embedding and the softmax have clusters, they have the same clusters.
        """
        counts = count_by_cluster(targets, self.softmax_edges)
        if len(self.embedding_edges) > 2:
            input_counts = count_by_cluster(tokens, self.embedding_edges)
            counts = tuple(map(max, counts, input_counts))
        return sizes_for(counts, edges=self.softmax_edges, num_tokens=targets.size)

    def _partition(self, ids: np.ndarray, edges: tuple[int, ...], sizes: tuple[int, ...]) -> Partition | None:
        """Return the ids sorted into clusters, or None if there is only one cluster. `edges` contains the first id of
        each cluster, then the vocabulary size."""
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
    """Return a copy of a batch in pinned host memory, or the batch itself if the device is a CPU. The reader thread
    calls this function.

    torch keeps a set of pinned buffers, and uses a buffer again only after the copy from it has ended.
    """
    if device.type == "cpu":
        return batch
    return _mapped(batch, torch.Tensor.pin_memory)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a batch on a device, or the batch itself if the device is a CPU. The host does not wait for the
    copy of a pinned batch."""
    if device.type == "cpu":
        return batch
    return _mapped(batch, lambda value: value.to(device, non_blocking=True))


def _mapped(batch: Batch, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Return the batch with `move` applied to each of its tensors, including the tensors of its partitions."""

    def moved(value: torch.Tensor | Partition | PredictionOrder | int | None) -> Any:
        if value is None or isinstance(value, int):
            return value
        if isinstance(value, torch.Tensor):
            return move(value)
        if isinstance(value, PredictionOrder):
            return PredictionOrder(*map(moved, value))
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
    sampler: TargetSampler | None = None,
) -> Iterator[StepInput]:
    """Yield the input of each training step for this rank's `lanes` (batch rows), beginning at the position `stream` in
    the text.

    This runs in the reader thread. `maker` is the maker of training batches, and `depth` is the number of inputs that
    are prefetched. `sampler` chooses the targets for XLNet's objective, and is None for prediction of the next token.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # pinning must not open a context on the first GPU
    segments = LaneStream(
        splits,
        stream,
        segment_len=segment_len,
        lanes=lanes,
        step_len=0 if sampler is None else sampler.settings.reuse_len,
        damage=damage,
        mark_documents=maker.mask_documents or sampler is not None,
        # The prefetched ones, the one being trained on and the one being filled.
        num_buffers=depth + 2,
    )
    for segment, targets, state in _with_targets(segments, sampler):
        batches = maker.microbatches(segment, lanes=microbatch_lanes, targets=targets)
        num_scored = int(sum(batch.scored_BT.sum() for batch in batches))
        yield StepInput([pinned(batch, device) for batch in batches], num_scored, state)


def lane_batches(config: Config, model: TransformerXL) -> Iterator[Batch]:
    """Yield the training batches of a run in one process, without end. Use it in a training loop of your own.

    Each batch has all lanes (batch rows). The first batch is the batch of step 1. Raises DataError if the corpus of
    `data.path` cannot be read.
    """
    train = config.train
    mask_documents = config.data.document_mask
    corpora = open_corpora(config.data, num_lanes=train.num_lanes, seed=config.run.seed)
    stream = LaneStream(
        corpora.train,
        corpora.begin,
        segment_len=train.segment_len,
        lanes=range(train.num_lanes),
        step_len=train.step_len,
        mark_documents=mask_documents or train.is_permutation,
    )
    maker = batch_maker(model, mask_documents=mask_documents).for_training(half_loss=train.half_loss)
    settings = TargetSettings.of(train) if train.is_permutation else None
    sampler = target_sampler(settings, corpora.first, seed=config.run.seed)
    return (
        maker.microbatches(segment, lanes=train.num_lanes, targets=targets)[0]
        for segment, targets, _ in _with_targets(stream, sampler)
    )


def _with_targets(
    stream: LaneStream, sampler: TargetSampler | None
) -> Iterator[tuple[Segment, TargetBatch | None, StreamState]]:
    """Yield (segment, targets, stream state after the segment) for each segment of a stream.

    With `sampler` the targets are the tokens to predict in XLNet's objective. Without `sampler` the targets are None,
    for next-token prediction.
    """
    before = stream.state
    for segment, after in stream:
        targets = None
        if sampler is not None:
            targets = sampler.draw(segment, lanes=stream.lanes, positions=stream.positions(before))
        yield segment, targets, after
        before = after


def target_sampler(settings: TargetSettings | None, corpus: Corpus, *, seed: int) -> TargetSampler | None:
    """Return the sampler that chooses the tokens to predict for XLNet's objective.

    Returns None if there are no `settings`, which means next-token prediction. The tokenizer of `corpus` determines
    where words begin.
    """
    if settings is None:
        return None
    return TargetSampler(settings, seed=seed, begins_word_V=word_starts(corpus.tokenizer))
