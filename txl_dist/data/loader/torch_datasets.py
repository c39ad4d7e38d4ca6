"""Datasets of a corpus for other programs: `Corpus.lanes` and `Corpus.webdataset` make them.

    LaneDataset        the segments that training reads, for a DataLoader; can be saved and resumed anywhere
    document_pipeline  one pass over documents or over chunks of equal length, as a pipeline of webdataset

The ranks and the workers of a DataLoader share the work. Each rank reads its own lanes (rows of the batch). Worker w of
n reads the steps w, w + n, and so on, so a DataLoader returns the segments in the order of a single process. In a
pipeline each worker of each rank reads its own range of the documents.

Both read documents by position, as training does. Damage raises an error that names shard and document. This module
imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from webdataset import FluidWrapper
from webdataset.pytorch import IterableDataset
from webdataset.utils import pytorch_worker_info

from txl_dist.console.formatting import counted
from txl_dist.data.loader.lanes import lanes_of_rank
from txl_dist.data.loader.shards import Split
from txl_dist.data.loader.stream import LaneStream
from txl_dist.data.loader.stream_state import StreamState, continued, document_seed, first_state
from txl_dist.errors import ConfigError

Sample = dict[str, Any]


class LaneDataset(IterableDataset):  # type: ignore[misc]
    """Endless dataset of training segments: one item per step, with T + 1 tokens of each lane of this rank.

    An item is a dictionary with the fields of `Segment` as arrays. Use it with `DataLoader(dataset, batch_size=None)`.
    `state_dict` and `load_state_dict` follow the protocol of torchdata's StatefulDataLoader.
    """

    def __init__(
        self, split: Split, *, num_lanes: int, segment_len: int, seed: int, first_step: int, rank: int, world_size: int
    ) -> None:
        """Begin at step `first_step`. A negative `rank` means the rank of this process.

        Raises ConfigError if the numbers are impossible.
        """
        super().__init__()
        if min(num_lanes, segment_len) < 1 or first_step < 0:
            raise ConfigError(
                f"num_lanes={num_lanes} and segment_len={segment_len} must be 1 or more, and first_step={first_step} "
                "0 or more."
            )
        if rank < 0:
            rank, world_size, _, _ = pytorch_worker_info()
        self.lanes = lanes_of_rank(num_lanes, rank=rank, world_size=world_size)
        self.segment_len = segment_len
        self._split = split
        self._begin = first_state([split], num_lanes=num_lanes, seed=document_seed(seed))
        self._state = self._begin.advanced(first_step * segment_len)
        self._worker = (0, 1)
        """(number of the DataLoader's worker whose next segment is at the state, number of workers). (0, 1) for a state
        that belongs to no worker."""

    def __iter__(self) -> Iterator[Sample]:
        """Yield segments without end. A new iterator continues where the last one stopped."""
        _, _, worker, num_workers = pytorch_worker_info()
        if self._worker == (0, 1):
            self._state = self._state.advanced(worker * self.segment_len)
        elif self._worker != (worker, num_workers):
            raise ConfigError(
                f"the state is of worker {self._worker[0]} of {self._worker[1]}, but this is worker {worker} of "
                f"{num_workers}. Resume with num_workers={self._worker[1]}, as the state was saved."
            )
        self._worker = (worker, num_workers)
        stream = LaneStream([self._split], self._state, segment_len=self.segment_len, lanes=self.lanes)
        while True:
            segment = stream.segment_at(self._state)
            self._state = self._state.advanced(num_workers * self.segment_len)
            yield segment._asdict()

    def state_dict(self) -> Sample:
        """Return the position after the last segment, as JSON values.

        In a single process these are the values of a checkpoint's stream state. They are the same on all ranks.
        """
        state = self._state.to_dict()
        worker, num_workers = self._worker
        if num_workers > 1:
            state |= {"worker": worker, "num_workers": num_workers}
        return state

    def load_state_dict(self, state_dict: Sample) -> None:
        """Continue at a position that `state_dict` returned, also with another number of ranks or lanes.

        Raises CheckpointError if the state is damaged, or of another corpus or seed. Raises ConfigError if the state of
        a worker is loaded for another number of lanes.
        """
        values = dict(state_dict)
        worker = (values.pop("worker", 0), values.pop("num_workers", 1))
        saved = StreamState.from_dict(values)
        if worker[1] > 1 and saved.num_lanes != self._begin.num_lanes:
            raise ConfigError(
                f"the state was saved by {counted(worker[1], 'worker')} for {counted(saved.num_lanes, 'lane')}, and "
                f"here are {counted(self._begin.num_lanes, 'lane')}. Keep num_lanes, or resume from a state that was "
                "saved with num_workers=0."
            )
        self._state = continued(saved, self._begin, [self._split])
        self._worker = worker


def document_pipeline(split: Split, *, chunk_len: int) -> FluidWrapper:
    """Return one pass over the documents of a split as a webdataset pipeline, or over chunks of `chunk_len` tokens.

    Raises ConfigError for a negative `chunk_len`.
    """
    if chunk_len < 0:
        raise ConfigError(f"chunk_len={chunk_len} must be 0 (whole documents) or the number of tokens in a chunk.")
    pipeline = FluidWrapper(DocumentSource(split))
    if chunk_len:
        pipeline = pipeline.compose(_Chunks(chunk_len))
    return pipeline


class DocumentSource(IterableDataset):  # type: ignore[misc]
    """Documents of a split in file order, as samples `{"__key__", "__url__", "tokens"}` with int64 ids.

    The key is the number of the document in its split, with 9 digits. The ranks and the workers of a DataLoader read
    ranges of documents whose numbers differ by one at most.
    """

    def __init__(self, split: Split) -> None:
        super().__init__()
        self._split = split

    def __iter__(self) -> Iterator[Sample]:
        """Yield the documents of this worker. Raises DataError for a damaged document."""
        rank, world_size, worker, num_workers = pytorch_worker_info()
        reader = rank * num_workers + worker
        num_readers = world_size * num_workers
        begin = reader * self._split.documents // num_readers
        end = (reader + 1) * self._split.documents // num_readers
        first = 0
        for number, info in enumerate(self._split.shards):
            numbers = range(max(begin, first), min(end, first + info.documents))
            if numbers:
                shard = self._split.open_shard(number)
                for document in numbers:
                    tokens = shard.document(document - first).astype(np.int64)
                    yield {"__key__": f"{document:09d}", "__url__": shard.name, "tokens": tokens}
            first += info.documents


class _Chunks:
    """Stage of a pipeline that joins documents and cuts them into chunks of equal length.

    The key of a chunk is that of the document of its first token, with the place of this token: `000000012+512`. The
    last tokens of a worker, which are fewer than a chunk, are left out.
    """

    def __init__(self, chunk_len: int) -> None:
        self._chunk_len = chunk_len

    def __call__(self, documents: Iterable[Sample]) -> Iterator[Sample]:
        parts: list[npt.NDArray[np.int64]] = []
        num_missing = self._chunk_len
        chunk: Sample = {}
        for document in documents:
            tokens = document["tokens"]
            offset = 0
            while offset < len(tokens):
                if not parts:
                    chunk = {**document, "__key__": f"{document['__key__']}+{offset}"}
                parts.append(tokens[offset : offset + num_missing])
                offset += len(parts[-1])
                num_missing -= len(parts[-1])
                if not num_missing:
                    yield {**chunk, "tokens": np.concatenate(parts)}
                    parts = []
                    num_missing = self._chunk_len
