"""Streams: complete, continuous, resumable, the same for any number of ranks."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpora import tiny_corpus
from txl_dist.data.corpus import Corpus
from txl_dist.data.lanes import lanes_of_rank
from txl_dist.data.stream import EvalStream, LaneStream, StreamState, prefetch
from txl_dist.errors import CheckpointError, DataError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.mktemp("stream"))


def stream(corpus: Corpus, **changes: Any) -> LaneStream:
    values: dict[str, Any] = {"num_lanes": 8, "segment_len": 13, "seed": 1, "lanes": range(8)}
    return LaneStream(corpus, "train", **{**values, **changes})


def take(source: LaneStream, count: int) -> list[tuple[np.ndarray, np.ndarray, StreamState]]:
    return [(*segment, state) for segment, state in itertools.islice(source, count)]


def assert_equal(a: list[tuple[Any, ...]], b: list[tuple[Any, ...]]) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])
        assert one[2] == other[2]


def test_ranks_together_read_each_token_of_the_epoch_exactly_once(corpus: Corpus) -> None:
    num_tokens = corpus.split("train").tokens
    stripe_len = num_tokens // 8
    read: Counter[int] = Counter()
    for rank in range(4):
        lanes = lanes_of_rank(8, rank=rank, world_size=4)
        # One segment as long as a stripe: an epoch exactly.
        segment, _ = next(iter(stream(corpus, segment_len=stripe_len, lanes=lanes)))
        read.update(segment.tokens[:, :-1].reshape(-1).tolist())
    left_out = Counter(corpus.split("train").read_all().tolist()) - read
    assert read.total() == 8 * stripe_len
    assert left_out.total() == num_tokens % 8
    assert not read - Counter(corpus.split("train").read_all().tolist())


def test_each_segment_continues_the_one_before(corpus: Corpus) -> None:
    steps = take(stream(corpus), 200)
    assert steps[-1][2].position > 2 * corpus.split("train").tokens // 8, "several epochs"
    for (tokens, documents, _), (next_tokens, next_documents, _) in itertools.pairwise(steps):
        assert np.array_equal(tokens[:, -1], next_tokens[:, 0])
        assert np.array_equal(documents[:, -1], next_documents[:, 0])


def test_documents_begin_behind_end_of_text_and_at_epoch_borders_only(corpus: Corpus) -> None:
    steps = take(stream(corpus), 150)
    tokens = np.concatenate([step[0][:, :-1] for step in steps], axis=1)
    documents = np.concatenate([step[1][:, :-1] for step in steps], axis=1)
    stripe_len = corpus.split("train").tokens // 8
    positions = np.arange(tokens.shape[1])
    starts = np.ones_like(tokens, dtype=bool)
    starts[:, 1:] = (tokens[:, :-1] == corpus.end_of_text) | (positions[1:] % stripe_len == 0)
    assert np.array_equal(starts, documents == positions)
    assert np.array_equal(documents, np.maximum.accumulate(np.where(starts, positions, 0), axis=1))


def test_resuming_anywhere_equals_never_having_stopped(corpus: Corpus) -> None:
    whole = take(stream(corpus), 120)
    stripe_len = corpus.split("train").tokens // 8
    border = next(i for i, step in enumerate(whole) if step[2].position > stripe_len)
    for step in {1, border - 1, border, border + 1, *random.Random(0).sample(range(1, 100), 8)}:
        state = StreamState.from_dict(whole[step - 1][2].to_dict())
        assert_equal(take(stream(corpus, state=state), 20), whole[step : step + 20])
    fresh = StreamState(position=0, num_lanes=8, seed=1, fingerprint=corpus.fingerprint, split="train")
    assert_equal(take(stream(corpus, state=fresh), 20), whole[:20])


def test_resuming_exactly_at_an_epoch_border(corpus: Corpus) -> None:
    stripe_len = corpus.split("train").tokens // 8
    whole = take(stream(corpus, segment_len=stripe_len), 3)
    assert_equal(take(stream(corpus, segment_len=stripe_len, state=whole[0][2]), 2), whole[1:])


def test_the_position_survives_another_segment_length(corpus: Corpus) -> None:
    (_, _, state), (expected, _, _) = take(stream(corpus, segment_len=20), 2)
    (tokens, _, _) = take(stream(corpus, segment_len=10, state=state), 1)[0]
    assert np.array_equal(tokens, expected[:, :11])


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_any_number_of_ranks_reads_the_same_global_batches(corpus: Corpus, world_size: int) -> None:
    whole = take(stream(corpus), 30)
    ranks = [
        take(stream(corpus, lanes=lanes_of_rank(8, rank=rank, world_size=world_size)), 30) for rank in range(world_size)
    ]
    for step, (tokens, documents, state) in enumerate(whole):
        assert np.array_equal(tokens, np.concatenate([rank[step][0] for rank in ranks]))
        assert np.array_equal(documents, np.concatenate([rank[step][1] for rank in ranks]))
        assert all(rank[step][2] == state for rank in ranks)


def test_a_segment_may_be_longer_than_the_epoch(corpus: Corpus) -> None:
    stripe_len = corpus.split("train").tokens // 8
    long, _ = next(iter(stream(corpus, segment_len=3 * stripe_len + 5)))
    short = take(stream(corpus, segment_len=stripe_len), 3)
    assert np.array_equal(long.tokens[:, : 3 * stripe_len], np.concatenate([s[0][:, :-1] for s in short], axis=1))


def test_the_first_batches_of_a_seed_are_frozen(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, texts=[f"document number {i}, " * (i % 7 + 1) for i in range(50)])
    digest = hashlib.sha256()
    for tokens, documents, _ in take(stream(corpus), 100):
        digest.update(tokens.astype("<i8").tobytes() + documents.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "98c3988c873df56b"


@pytest.mark.parametrize(
    "change",
    [{"num_lanes": 4}, {"seed": 2}, {"fingerprint": "0" * 64}, {"split": "valid"}],
    ids=lambda c: next(iter(c)),
)
def test_a_state_of_another_stream_is_refused_with_the_difference(corpus: Corpus, change: dict[str, Any]) -> None:
    values = take(stream(corpus), 1)[0][2].to_dict()
    with pytest.raises(CheckpointError, match=next(iter(change))):
        stream(corpus, state=StreamState.from_dict(values | change))


def test_a_state_of_another_version_or_form_is_refused() -> None:
    for values in ({"version": 2}, {}, {"version": 1, "position": 3}):
        with pytest.raises(CheckpointError):
            StreamState.from_dict(values)


def test_too_few_tokens_for_the_lanes_are_refused(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, texts=["ab", "c"], valid_fraction=0.0)
    with pytest.raises(DataError, match="5 tokens, fewer than the 8 lanes"):
        stream(corpus)


@pytest.mark.parametrize("num_lanes", [1, 2, 5, 16])
@pytest.mark.parametrize("segment_len", [1, 7, 64, 5000])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_scores_each_target_exactly_once(
    corpus: Corpus, num_lanes: int, segment_len: int, world_size: int
) -> None:
    tokens = corpus.split("valid").read_all().astype(np.int64)
    scored_by_lane: list[np.ndarray] = []
    passes = set()
    for rank in range(world_size):
        settings = {"num_lanes": num_lanes, "segment_len": segment_len}
        source = EvalStream(corpus, "valid", rank=rank, world_size=world_size, **settings)
        segments = list(source)
        passes.add(len(segments))
        assert len(source) == len(segments)
        for row in range(len(source.lanes)):
            pairs = [
                np.stack([s.tokens[row, :-1][s.scored[row]], s.tokens[row, 1:][s.scored[row]]], axis=1)
                for s in segments
            ]
            scored_by_lane.append(np.concatenate(pairs))
    assert len(passes) == 1, "every rank makes the same number of forward passes"
    assert np.array_equal(np.concatenate(scored_by_lane), np.stack([tokens[:-1], tokens[1:]], axis=1))


@pytest.mark.parametrize("overlap_len", [1, 6, 7, 40, 5000])
@pytest.mark.parametrize("segment_len", [1, 7, 64, 5000])
@pytest.mark.parametrize("num_lanes", [1, 5])
def test_an_overlap_gives_context_and_scores_the_same_targets(
    corpus: Corpus, num_lanes: int, segment_len: int, overlap_len: int
) -> None:
    values: dict[str, Any] = {"num_lanes": num_lanes, "segment_len": segment_len, "rank": 0, "world_size": 2}
    plain = list(EvalStream(corpus, "valid", **values))
    source = EvalStream(corpus, "valid", overlap_len=overlap_len, **values)
    assert len(source) == len(plain)
    for step, (segment, without) in enumerate(zip(source, plain, strict=True)):
        overlap = min(step * segment_len, overlap_len)
        assert segment.scored.shape == (len(source.lanes), overlap + segment_len)
        assert segment.tokens.shape == segment.documents.shape == (len(source.lanes), overlap + segment_len + 1)
        assert not segment.scored[:, :overlap].any()
        assert np.array_equal(segment.scored[:, overlap:], without.scored)
        for row in np.flatnonzero(without.scored.any(axis=1)):
            assert np.array_equal(segment.tokens[row, overlap:], without.tokens[row])
            assert np.array_equal(segment.documents[row, overlap:], without.documents[row])
            # What precedes is what the lane read just before.
            for name in ("tokens", "documents"):
                before = [getattr(s, name)[row, :-1] for s in plain[:step]]
                read = np.concatenate([np.empty(0, np.int64), *before])
                assert np.array_equal(getattr(segment, name)[row, :overlap], read[len(read) - overlap :])


def test_evaluation_marks_documents_and_keeps_padding_apart(corpus: Corpus) -> None:
    segments = list(EvalStream(corpus, "valid", num_lanes=3, segment_len=50, world_size=2, rank=1))
    for row in range(2):
        documents = np.concatenate([s.documents[row, :-1] for s in segments])
        tokens = np.concatenate([s.tokens[row, :-1] for s in segments])
        scored = np.concatenate([s.scored[row] for s in segments])
        assert (np.diff(documents) >= 0).all()
        assert (documents >= 0).all()
        inputs = int(scored.sum())
        borders = 1 + np.flatnonzero(tokens[: max(inputs - 1, 0)] == corpus.end_of_text)
        assert np.array_equal(np.flatnonzero(np.diff(documents[:inputs])) + 1, borders)
        assert not set(documents[inputs + 1 :]) & set(documents[:inputs])
        assert (tokens[inputs + 1 :] == 0).all()


def test_evaluation_can_be_limited_to_the_first_tokens(corpus: Corpus) -> None:
    source = EvalStream(corpus, "valid", num_lanes=2, segment_len=10, max_tokens=101)
    assert source.num_targets == 100 == sum(int(segment.scored.sum()) for segment in source)
    with pytest.raises(DataError, match="1 tokens"):
        EvalStream(corpus, "valid", num_lanes=2, segment_len=10, max_tokens=1)


def test_prefetch_depth_changes_nothing(corpus: Corpus) -> None:
    plain = take(stream(corpus), 40)
    for depth in (1, 8):
        ahead = prefetch(stream(corpus), depth=depth)
        assert_equal([(*segment, state) for segment, state in itertools.islice(ahead, 40)], plain)
        ahead.close()
    assert list(prefetch(range(100), depth=3)) == list(range(100))


def test_prefetch_raises_what_the_source_raised_behind_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield from range(3)
        raise DataError("shard 7 is damaged")

    ahead = prefetch(source(), depth=2)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="shard 7"):
        next(ahead)


def test_closing_prefetch_ends_its_thread() -> None:
    before = threading.active_count()
    ahead = prefetch(itertools.count(), depth=1)
    assert next(ahead) == 0
    began = time.monotonic()
    ahead.close()
    assert threading.active_count() == before
    assert time.monotonic() - began < 2
