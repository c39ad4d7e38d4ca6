"""Datasets for other programs read the tokens that training reads, and continue anywhere, on any number of ranks."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch.utils.data import DataLoader

from tests.helpers.corpora import flip_bit, random_texts, tiny_corpus
from txl_dist.config.schema import DataSection
from txl_dist.data.loader.corpora import open_corpora
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.loader.stream import LaneStream
from txl_dist.errors import CheckpointError, ConfigError, DataError

LANES, T = 6, 5
Tokens = npt.NDArray[np.int64]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


def tokens_of(segments: Iterable[dict[str, Any]], count: int) -> list[list[list[int]]]:
    return [np.asarray(segment["tokens"]).tolist() for segment in itertools.islice(segments, count)]


def trained(corpus: Corpus, count: int, *, seed: int = 1) -> list[list[list[int]]]:
    """What a training with these lanes reads."""
    data = DataSection(path=corpus.location)
    opened = open_corpora(data, num_lanes=LANES, seed=seed)
    stream = LaneStream(opened.train, opened.begin, segment_len=T, lanes=range(LANES))
    return [segment.tokens.tolist() for segment, _ in itertools.islice(stream, count)]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_loader_returns_the_segments_of_training_whatever_its_workers(corpus: Corpus, num_workers: int) -> None:
    wanted = trained(corpus, 12, seed=7)
    for first_step in (0, 5):
        dataset = corpus.lanes(num_lanes=LANES, segment_len=T, seed=7, first_step=first_step)
        loader = DataLoader(dataset, batch_size=None, num_workers=num_workers)
        assert tokens_of(loader, 7) == wanted[first_step : first_step + 7]


def test_the_ranks_together_read_the_lanes_of_one_and_a_state_resumes_on_another_number(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = trained(corpus, 200)  # more than an epoch
    states = []
    for rank in range(3):
        dataset = corpus.lanes(num_lanes=LANES, segment_len=T, rank=rank, world_size=3)
        assert tokens_of(dataset, 120) == [segment[2 * rank : 2 * rank + 2] for segment in wanted[:120]]
        states.append(dataset.state_dict())
    assert states[0] == states[1] == states[2]
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        dataset = corpus.lanes(num_lanes=LANES, segment_len=T)
        dataset.load_state_dict(json.loads(json.dumps(states[0])))
        assert tokens_of(dataset, 80) == [segment[3 * rank : 3 * rank + 3] for segment in wanted[120:]]


def test_the_state_is_that_of_a_checkpoint_and_continues_with_other_lanes_on_unread_tokens(corpus: Corpus) -> None:
    data = DataSection(path=corpus.location)
    opened = open_corpora(data, num_lanes=LANES, seed=1)
    dataset = corpus.lanes(num_lanes=LANES, segment_len=T)
    read = tokens_of(dataset, 3)
    assert dataset.state_dict() == opened.begin.advanced(3 * T).to_dict()
    other = corpus.lanes(num_lanes=4, segment_len=1)
    other.load_state_dict(dataset.state_dict())
    num_left = (corpus.split("train").tokens - 3 * T * LANES) // 4
    rest = tokens_of(other, num_left)
    ids = sorted(corpus.split("train").read_all().tolist())
    seen = sorted(token for segment in read for lane in segment for token in lane[:-1])
    seen += [token for segment in rest for lane in segment for token in lane[:-1]]
    assert len(ids) - len(seen) < 4 + LANES
    assert not (np.bincount(seen, minlength=300) > np.bincount(ids, minlength=300)).any()


@pytest.mark.parametrize(("num_workers", "every", "stops"), [(0, 1, (0, 1, 4, 5)), (2, 1, (0, 1)), (2, 3, (5,))])
def test_torchdatas_loader_resumes_at_any_step(
    corpus: Corpus, num_workers: int, every: int, stops: tuple[int, ...]
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    wanted = trained(corpus, 12)

    def loader() -> Any:
        dataset = corpus.lanes(num_lanes=LANES, segment_len=T)
        return stateful(dataset, batch_size=None, num_workers=num_workers, snapshot_every_n_steps=every)

    for stop in stops:
        first = loader()
        begun = iter(first)
        assert tokens_of(begun, stop) == wanted[:stop]
        state = pickle.loads(pickle.dumps(first.state_dict()))
        del begun
        second = loader()
        second.load_state_dict(state)
        assert tokens_of(second, 6) == wanted[stop : stop + 6]


def test_states_that_do_not_belong_here_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    dataset = corpus.lanes(num_lanes=LANES, segment_len=T)
    state = dataset.state_dict()
    other = tiny_corpus(tmp_path, name="other", texts=random_texts(count=30, seed=9), shard_len=10**6)
    for another in (corpus.lanes(num_lanes=LANES, segment_len=T, seed=2), other.lanes(num_lanes=LANES, segment_len=T)):
        with pytest.raises(CheckpointError):
            another.load_state_dict(state)
    with pytest.raises(CheckpointError, match="damaged"):
        dataset.load_state_dict({**state, "corpora": 5})
    of_worker = {**state, "worker": 1, "num_workers": 2}
    dataset.load_state_dict(of_worker)
    with pytest.raises(ConfigError, match="num_workers=2"):
        next(iter(dataset))
    with pytest.raises(ConfigError, match="Keep num_lanes"):
        corpus.lanes(num_lanes=2, segment_len=T).load_state_dict(of_worker)


def test_impossible_numbers_are_refused(corpus: Corpus) -> None:
    for numbers in ({"num_lanes": 0}, {"segment_len": 0}, {"first_step": -1}, {"rank": 0, "world_size": 4}):
        with pytest.raises(ConfigError):
            corpus.lanes(**{"num_lanes": LANES, "segment_len": T, **numbers})
    with pytest.raises(DataError, match="no split"):
        corpus.lanes("other", num_lanes=LANES, segment_len=T)
    with pytest.raises(ConfigError, match="chunk_len"):
        corpus.webdataset(chunk_len=-1)


def readers(monkeypatch: pytest.MonkeyPatch, world_size: int, num_workers: int) -> Iterator[int]:
    """Make this process each worker of each rank in turn."""
    for rank, worker in itertools.product(range(world_size), range(num_workers)):
        places = {"RANK": rank, "WORLD_SIZE": world_size, "WORKER": worker, "NUM_WORKERS": num_workers}
        for name, value in places.items():
            monkeypatch.setenv(name, str(value))
        yield rank


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 1), (2, 3), (7, 2), (50, 1)])
def test_the_workers_of_all_ranks_together_read_each_document_once(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, world_size: int, num_workers: int
) -> None:
    split = corpus.split("train")
    pipeline = corpus.webdataset()
    samples = [list(pipeline) for _ in readers(monkeypatch, world_size, num_workers)]
    counts = {len(of_reader) for of_reader in samples}
    assert max(counts) - min(counts) <= 1
    read = [sample for of_reader in samples for sample in of_reader]
    assert [sample["__key__"] for sample in read] == [f"{number:09d}" for number in range(split.documents)]
    assert [sample["tokens"].tolist() for sample in read] == [ids.tolist() for ids in split.each_document()]


@pytest.mark.parametrize("chunk_len", [1, 7, 64])
def test_chunks_are_the_joined_documents_cut_into_equal_pieces(corpus: Corpus, chunk_len: int) -> None:
    split = corpus.split("train")
    ids = split.read_all().tolist()
    chunks = list(corpus.webdataset(chunk_len=chunk_len))
    wanted = [ids[begin : begin + chunk_len] for begin in range(0, len(ids) - chunk_len + 1, chunk_len)]
    assert [chunk["tokens"].tolist() for chunk in chunks] == wanted
    assert len({chunk["__key__"] for chunk in chunks}) == len(chunks)
    batches = list(DataLoader(corpus.webdataset(chunk_len=chunk_len).shuffle(50).batched(4), batch_size=None))
    assert sum(len(batch["tokens"]) for batch in batches) == len(chunks)


def test_a_damaged_document_is_never_skipped(corpus: Corpus, tmp_path: Path) -> None:
    shutil.copytree(corpus.folder, tmp_path / "damaged")
    damaged = open_corpus(tmp_path / "damaged")
    split = damaged.split("train")
    flip_bit(damaged.folder / split.shards[0].name, offset=int(split.open_shard(0).offsets[1]))
    with pytest.raises(DataError, match="document 1"):
        list(damaged.webdataset())
    with pytest.raises(DataError, match="document 1"):
        tokens_of(damaged.lanes(num_lanes=LANES, segment_len=T), 300)
