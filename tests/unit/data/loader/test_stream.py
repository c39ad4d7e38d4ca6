"""Streams are complete, continuous, resumable, and equal for any number of ranks."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.corpora import flip_bit, tiny_corpus
from txl_dist.data.format import RECORD
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.loader.corruption import CorruptionPolicy
from txl_dist.data.loader.evaluation import EvalStream
from txl_dist.data.loader.lanes import LanePartition, LanePlan, Ranges, lanes_of_rank, merged, owners_of_lanes
from txl_dist.data.loader.prefetch import prefetch
from txl_dist.data.loader.stream import LaneStream
from txl_dist.data.loader.stream_state import CorpusState, StreamState, continued, first_state
from txl_dist.errors import CheckpointError, DataError, UnreachableError
from txl_dist.io.files import write_hashed_json


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.mktemp("stream"))


def stream(corpus: Corpus, **changes: Any) -> LaneStream:
    values: dict[str, Any] = {"segment_len": 13, "lanes": range(8), "state": first(corpus), **changes}
    return LaneStream([corpus.split("train")], values.pop("state"), **values)


def first(corpus: Corpus, *, num_lanes: int = 8, seed: int = 1) -> StreamState:
    return first_state([corpus.split("train")], num_lanes=num_lanes, seed=seed)


def take(source: LaneStream, count: int) -> list[tuple[np.ndarray, np.ndarray, StreamState]]:
    steps = list(itertools.islice(source, count))
    assert all(segment.scored.all() for segment, _ in steps)
    return [(segment.tokens, segment.documents, state) for segment, state in steps]


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
    assert steps[-1][2].corpora[0].position > 2 * corpus.split("train").tokens // 8, "several epochs"
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
    border = next(i for i, step in enumerate(whole) if step[2].corpora[0].position > stripe_len)
    for step in {1, border - 1, border, border + 1, *random.Random(0).sample(range(1, 100), 8)}:
        state = StreamState.from_dict(whole[step - 1][2].to_dict())
        assert_equal(take(stream(corpus, state=state), 20), whole[step : step + 20])


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
    assert digest.hexdigest()[:16] == "cf047d1185bfc902"


def test_a_state_of_another_version_or_form_is_refused() -> None:
    form = {"version": 3, "seed": 3}
    for values in (
        {"version": 1},
        {},
        form,
        {**form, "corpora": [{"name": "a"}]},
        {**form, "corpora": [{"unread": 1}]},
    ):
        with pytest.raises(CheckpointError):
            StreamState.from_dict(values)


def test_too_few_tokens_for_the_lanes_are_refused(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, texts=["ab", "c"], valid_fraction=0.0)
    with pytest.raises(DataError, match="only 5 tokens for 8 lanes"):
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
        source = EvalStream(corpus.split("valid"), rank=rank, world_size=world_size, **settings)
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
@pytest.mark.parametrize("segment_len", [pytest.param(1, marks=pytest.mark.slow), 7, 64, 5000])
@pytest.mark.parametrize("num_lanes", [1, 5])
def test_an_overlap_gives_context_and_scores_the_same_targets(
    corpus: Corpus, num_lanes: int, segment_len: int, overlap_len: int
) -> None:
    values: dict[str, Any] = {"num_lanes": num_lanes, "segment_len": segment_len, "rank": 0, "world_size": 2}
    plain = list(EvalStream(corpus.split("valid"), **values))
    source = EvalStream(corpus.split("valid"), overlap_len=overlap_len, **values)
    assert len(source) == len(plain)
    segment_len = min(segment_len, source.stripe_len)  # a longer one would be padding
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
    segments = list(EvalStream(corpus.split("valid"), num_lanes=3, segment_len=50, world_size=2, rank=1))
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
    source = EvalStream(corpus.split("valid"), num_lanes=2, segment_len=10, max_tokens=101)
    assert source.num_targets == 100 == sum(int(segment.scored.sum()) for segment in source)
    with pytest.raises(DataError, match="1 token "):
        EvalStream(corpus.split("valid"), num_lanes=2, segment_len=10, max_tokens=1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_more_lanes_than_targets_and_segments_longer_than_a_lane_are_cut_not_padded(
    corpus: Corpus, world_size: int
) -> None:
    split = corpus.split("valid")
    targets = split.tokens - 1
    for num_lanes, segment_len, shape in ((1, 10**9, (1, targets)), (10**7, 10**9, (targets, 1)), (2, 7, (2, 7))):
        ranks = [
            EvalStream(split, num_lanes=num_lanes, segment_len=segment_len, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        segments = [segment for source in ranks for segment in source]
        assert {segment.scored.shape for segment in segments} == {(-(-shape[0] // world_size), shape[1])}
        assert sum(int(segment.scored.sum()) for segment in segments) == targets


def test_prefetch_depth_changes_nothing(corpus: Corpus) -> None:
    plain = take(stream(corpus), 40)
    for depth in (1, 8):
        ahead = prefetch(stream(corpus), depth=depth)
        assert_equal(take(ahead, 40), plain)
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


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Corpus:
    """A corpus of other text with the same tokenizer."""
    texts = [f"<{i}>" * (i % 40 + 1) for i in range(90)]
    tokenizer_path = corpus.folder / "tokenizer.json"
    settings: dict[str, Any] = {"kind": "auto", "tokenizer_path": tokenizer_path}
    return tiny_corpus(tmp_path_factory.mktemp("other"), texts=texts, name="other", **settings)


def mixed(corpora: list[Corpus], weights: list[float], *, num_lanes: int = 10) -> StreamState:
    return first_state([c.split("train") for c in corpora], weights=weights, num_lanes=num_lanes, seed=1)


def mixed_stream(corpora: list[Corpus], state: StreamState, **changes: Any) -> LaneStream:
    values: dict[str, Any] = {"segment_len": 13, "lanes": range(state.num_lanes), **changes}
    return LaneStream([c.split("train") for c in corpora], state, **values)


def test_each_corpus_of_a_mixture_is_read_as_if_it_were_alone(corpus: Corpus, other: Corpus) -> None:
    state = mixed([corpus, other], [0.7, 0.3])
    assert [one.num_lanes for one in state.corpora] == [7, 3]
    steps = take(mixed_stream([corpus, other], state), 40)
    owners, numbers = owners_of_lanes([7, 3], seed=1)
    for index, (alone, lanes) in enumerate([(corpus, 7), (other, 3)]):
        single = take(stream(alone, state=first(alone, num_lanes=lanes), lanes=range(lanes)), 40)
        rows = np.flatnonzero(owners == index)
        assert numbers[rows].tolist() == list(range(lanes))
        for (tokens, documents, _), (own_tokens, own_documents, _) in zip(steps, single, strict=True):
            assert np.array_equal(tokens[rows], own_tokens)
            assert np.array_equal(documents[rows], own_documents)
    parts = [take(mixed_stream([corpus, other], state, lanes=range(r * 5, r * 5 + 5)), 40) for r in range(2)]
    assert all(
        np.array_equal(whole[0], np.concatenate([left[0], right[0]]))
        for whole, left, right in zip(steps, *parts, strict=True)
    )


def test_without_weights_corpora_share_lanes_as_they_have_tokens(corpus: Corpus, other: Corpus) -> None:
    sizes = [c.split("train").tokens for c in (corpus, other)]
    state = mixed([corpus, other], [], num_lanes=100)
    assert [one.num_lanes for one in state.corpora] == [round(100 * size / sum(sizes)) for size in sizes]


def test_another_number_of_lanes_goes_on_without_reading_a_token_twice_or_leaving_one_out(corpus: Corpus) -> None:
    """A ramp 4, 8, 16 lanes, then 3, all inside one epoch, to its end."""
    split = corpus.split("train")
    state, read = first(corpus, num_lanes=4), Counter[int]()
    for num_lanes, steps in ((4, 9), (8, 7), (16, 5), (3, None)):
        state = continued(state, first(corpus, num_lanes=num_lanes), [split])
        assert StreamState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
        (here,) = state.corpora
        assert here.num_lanes == num_lanes
        unread = sum(end - begin for begin, end in here.unread) or split.tokens
        assert unread == split.tokens - read.total()
        segment_len = 7 if steps else unread // num_lanes
        for tokens, _, after in take(
            stream(corpus, state=state, segment_len=segment_len, lanes=range(num_lanes)), steps or 1
        ):
            read.update(tokens[:, :-1].reshape(-1).tolist())
            state = after
    everything = Counter(split.read_all().tolist())
    assert not read - everything, "no token twice"
    assert (everything - read).total() < 3, "fewer left out than there are lanes"
    rest_of_epoch = continued(state, first(corpus, num_lanes=5), [split])
    assert (rest_of_epoch.corpora[0].epoch, rest_of_epoch.corpora[0].unread) == (1, ()), "then the next epoch begins"


def test_segments_with_a_look_ahead_advance_over_each_token_once_on_another_number_of_lanes(corpus: Corpus) -> None:
    """The rest of a segment is read again by the next one. Only the first tokens count as read."""
    split = corpus.split("train")
    state, read = first(corpus, num_lanes=4), Counter[int]()
    for num_lanes, reuse_len, steps in ((4, 6, 9), (8, 3, 7), (6, 4, 11), (3, 1, None)):
        state = continued(state, first(corpus, num_lanes=num_lanes), [split])
        unread = sum(end - begin for begin, end in state.corpora[0].unread) or split.tokens
        assert unread == split.tokens - read.total()
        source = stream(corpus, state=state, segment_len=13, step_len=reuse_len, lanes=range(num_lanes))
        for tokens, _, after in take(source, steps or unread // num_lanes // reuse_len):
            read.update(tokens[:, :reuse_len].reshape(-1).tolist())
            state = after
    everything = Counter(split.read_all().tolist())
    assert not read - everything, "no token twice"
    assert (everything - read).total() < 3, "fewer left out than there are lanes"


def test_a_resume_behind_a_new_cut_equals_never_having_stopped(corpus: Corpus) -> None:
    split = corpus.split("train")
    state = continued(take(stream(corpus), 11)[-1][2], first(corpus, num_lanes=6), [split])
    whole = take(stream(corpus, state=state, lanes=range(6)), 110)
    assert whole[-1][2].corpora[0].position > split.tokens // 6
    for step in (1, 7, 33):
        resumed = StreamState.from_dict(whole[step - 1][2].to_dict())
        assert_equal(take(stream(corpus, state=resumed, lanes=range(6)), 20), whole[step : step + 20])


def test_corpora_may_join_pause_and_change_weight_and_each_keeps_its_place(corpus: Corpus, other: Corpus) -> None:
    splits = [corpus.split("train"), other.split("train")]
    alone = take(stream(corpus), 5)[-1][2]
    both = continued(alone, mixed([corpus, other], [8, 2]), splits)
    assert both.corpora[0] == alone.corpora[0], "as many lanes as before: the same place"
    assert both.corpora[1].position == 0
    assert not both.has_lanes_of(alone)
    later = both.advanced(26)
    paused = continued(later, mixed([corpus, other], [1, 0]), splits)
    rest = paused.corpora[1]
    assert rest.num_lanes == 0
    assert sum(end - begin for begin, end in rest.unread) == splits[1].tokens - 2 * 26
    assert paused.advanced(13).corpora[1] == rest, "time stands still for it"
    again = continued(paused.advanced(13), mixed([corpus, other], [6, 4]), splits)
    assert again.corpora[1].unread == rest.unread
    assert again.corpora[1].num_lanes == 4
    take(mixed_stream([corpus, other], again), 3)


def test_a_state_of_other_data_or_another_seed_is_refused(corpus: Corpus, other: Corpus) -> None:
    state = first(corpus)
    with pytest.raises(CheckpointError, match=r"corpus.*split train"):
        continued(state, first(other), [other.split("train")])
    with pytest.raises(CheckpointError, match=r"seed 1, but this run has run\.seed=2"):
        continued(state, first(corpus, seed=2), [corpus.split("train")])
    assert continued(state, first(corpus), [corpus.split("train")]) == state


def test_the_state_of_a_thousand_lanes_is_small() -> None:
    num_tokens = 10**13
    plan = LanePlan(
        [num_tokens // 10] * 10, LanePartition(1024), seed=0, document_tokens=lambda shard: np.ones(1, np.int64)
    )
    epoch, rest = plan.rest_of_epoch(12_345_678)
    state = StreamState(1, (CorpusState("c" * 40, "f" * 64, "train", num_lanes=1024, epoch=epoch, unread=rest),))
    assert len(rest) == 1024
    assert len(json.dumps(state.to_dict(), indent=1)) < 64_000


def with_skips(state: StreamState, *skips: tuple[tuple[int, int], ...]) -> StreamState:
    """The state with the skips of each corpus."""
    corpora = [replace(one, skips=ranges) for one, ranges in zip(state.corpora, skips, strict=True)]
    return replace(state, corpora=tuple(corpora)).advanced(0)


RANGES = st.lists(st.integers(0, 150), max_size=8, unique=True).map(
    lambda bounds: merged(zip(sorted(bounds)[0::2], sorted(bounds)[1::2], strict=False))
)


@given(skips=st.tuples(RANGES, RANGES), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_lanes_read_all_but_the_skips_once_also_with_other_segments_and_resumes(
    corpus: Corpus, other: Corpus, skips: tuple[Ranges, Ranges], lengths: list[int]
) -> None:
    corpora = [corpus, other]
    plain, marks, _ = take(mixed_stream(corpora, mixed(corpora, [7, 3]), segment_len=600), 1)[0]
    owners, _ = owners_of_lanes([7, 3], seed=1)
    state = with_skips(mixed(corpora, [7, 3]), *skips)
    num_read = 0
    kept = [[at for at in range(600) if not any(a <= at < b for a, b in ranges)] for ranges in skips]
    for segment_len in lengths:
        state = StreamState.from_dict(json.loads(json.dumps(state.to_dict())))
        for tokens, documents, after in take(mixed_stream(corpora, state, segment_len=segment_len), 2):
            assert after == state.advanced(segment_len)
            state = after
            for row, owner in enumerate(owners.tolist()):
                places = kept[owner][num_read : num_read + segment_len + 1]
                behind = [max((b for _, b in skips[owner] if b <= at), default=0) for at in places]
                assert np.array_equal(tokens[row], plain[row, places])
                assert np.array_equal(documents[row], np.maximum(marks[row, places], behind))
            num_read += segment_len
    assert state == with_skips(mixed(corpora, [7, 3]), *skips).advanced(num_read), "in one go as step by step"


def test_a_rewind_leaves_out_what_was_trained_on_between_two_states_and_knows_the_skips_before(corpus: Corpus) -> None:
    saved, *_ = [state for _, _, state in take(stream(corpus), 1)]
    states = [saved, *(state for _, _, state in take(stream(corpus, state=saved), 9))]
    rewound = saved.with_skip(states[3], states[5])
    assert rewound.corpora[0].skips == ((4 * 13, 6 * 13),)
    assert rewound.corpora[0].position == saved.corpora[0].position
    plain = take(stream(corpus, state=saved), 9)
    again = take(stream(corpus, state=rewound), 7)
    for step, expected in enumerate([0, 1, 2, 5, 6, 7, 8]):
        assert np.array_equal(again[step][0][:, :-1], plain[expected][0][:, :-1])
    assert again[3][2].corpora[0].position == 7 * 13
    # From the same checkpoint once more, for steps that come behind the first skip.
    twice = saved.with_skip(again[4][2], again[5][2])
    assert twice.corpora[0].skips == ((4 * 13, 6 * 13), (8 * 13, 9 * 13))
    at_once = saved.with_skip(saved, states[2])
    assert at_once.corpora[0].position == 3 * 13, "a skip may begin where the checkpoint is"
    around = saved.with_skip(again[1][2], again[3][2])
    assert around.corpora[0].skips == ((3 * 13, 7 * 13),), "steps on both sides of a skip"


def test_a_new_cut_leaves_out_what_was_to_be_skipped_of_the_epoch(corpus: Corpus) -> None:
    split = corpus.split("train")
    state = first(corpus, num_lanes=8).with_skip(*(first(corpus).advanced(n) for n in (40, 60))).advanced(30)
    anew = continued(state, first(corpus, num_lanes=5), [split]).corpora[0]
    assert anew.skips == ()
    assert sum(end - begin for begin, end in anew.unread) == split.tokens - 8 * (30 + 20)
    paused = continued(state, replace(state, corpora=(replace(state.corpora[0], num_lanes=0),)), [split]).corpora[0]
    assert paused.unread == anew.unread
    same = continued(state, first(corpus, num_lanes=8), [split])
    assert same == state


def test_a_state_of_version_2_is_read(corpus: Corpus) -> None:
    state = first(corpus).advanced(26)
    state = replace(state, corpora=(replace(state.corpora[0], unread=((3, 9), (20, 41))),))
    values = state.to_dict()
    values["version"] = 2
    values["corpora"][0]["rest"] = values["corpora"][0].pop("unread")
    assert StreamState.from_dict(values) == state


def test_a_state_from_before_there_were_skips_is_read(corpus: Corpus) -> None:
    values = first(corpus).advanced(26).to_dict()
    del values["corpora"][0]["skips"]
    assert StreamState.from_dict(values) == first(corpus).advanced(26)


@pytest.mark.parametrize("steps_at_once", [1, 3, 8])
def test_a_segment_in_the_ring_holds_until_so_many_more_were_taken(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, steps_at_once: int
) -> None:
    plain = take(stream(corpus), 60)
    monkeypatch.setattr("txl_dist.data.loader.stream.STEPS_AT_ONCE", steps_at_once)
    held: list[tuple[np.ndarray, np.ndarray]] = []
    places = set()
    for (segment, state), (_, _, expected_state) in zip(stream(corpus, num_buffers=5), plain, strict=False):
        held.append((segment.tokens, segment.documents))
        places.add(segment.tokens.ctypes.data)
        assert state == expected_state
        for (tokens, documents), (whole, marks, _) in list(zip(held, plain, strict=False))[-6:]:
            assert np.array_equal(tokens, whole)
            assert np.array_equal(documents, marks)
    assert len(places) < 30, "memory is used again"


def test_the_segments_before_damage_come_before_its_error(
    damaged: tuple[Corpus, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for steps_at_once in (1, 8):
        monkeypatch.setattr("txl_dist.data.loader.stream.STEPS_AT_ONCE", steps_at_once)
        counts.append(0)
        try:
            for _ in stream(damaged[0], segment_len=5):
                counts[-1] += 1
        except DataError as error:
            assert damaged[1] in str(error)  # noqa: PT017  what came before it is the point
    assert counts[0] == counts[1] > 0


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Corpus, str]:
    """A corpus with one bit flipped in the tokens of a train shard, and the shard's name."""
    made = tiny_corpus(tmp_path)
    shard = made.split("train").shards[1].name
    (offset, _, _) = np.fromfile(made.folder / f"{shard}.idx", dtype=RECORD)[2]
    flip_bit(made.folder / shard, offset=int(offset))
    return open_corpus(made.folder), shard


def test_damage_ends_the_stream_and_names_shard_and_document(damaged: tuple[Corpus, str]) -> None:
    with pytest.raises(DataError, match=rf"{damaged[1]}, document \d+.*crc32.*txl prepare"):
        take(stream(damaged[0]), 200)


def test_a_damaged_document_may_be_skipped_and_moves_nothing(damaged: tuple[Corpus, str], tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = tiny_corpus(tmp_path / "whole")
    damage = CorruptionPolicy(skip=True, max_skipped=1)
    split = damaged[0].split("train")
    reading = LaneStream([split], first(damaged[0]), segment_len=13, lanes=range(8), damage=damage)
    num_unscored = 0
    for (segment, _), (tokens, documents, _) in zip(reading, take(stream(whole), 150), strict=False):
        filled = segment.tokens != tokens
        assert np.array_equal(segment.documents, documents)
        assert (segment.tokens[filled] == damaged[0].end_of_text).all()
        # Neither what was replaced nor what is predicted from it counts.
        assert not segment.scored[filled[:, 1:] | filled[:, :-1]].any()
        num_unscored += int((~segment.scored).sum())
    assert damage.num_skipped == 1
    assert 0 < num_unscored < 150 * 8


def test_a_replacement_continues_the_count_of_skipped_documents() -> None:
    damage = CorruptionPolicy(skip=True, max_skipped=2)
    damage.skip(DataError("damaged"), shard="a", document=3)
    later = CorruptionPolicy(skip=True, max_skipped=2)
    later.continue_from(json.loads(json.dumps(damage.skipped())))
    later.skip(DataError("damaged"), shard="a", document=3)  # counted before
    later.skip(DataError("damaged"), shard="b", document=3)
    assert later.num_skipped == 2
    with pytest.raises(DataError, match="skipped 3 documents in all"):
        later.skip(DataError("damaged"), shard="b", document=4)


def test_a_rank_that_reads_the_lanes_of_two_may_skip_the_documents_of_both() -> None:
    damage = CorruptionPolicy(skip=True, max_skipped=2)
    damage.continue_from([3, [["a", 3]], 2])
    damage.skip(DataError("damaged"), shard="b", document=3)
    with pytest.raises(DataError, match=r"5 documents in all, more than data\.max_skipped=2 for each of 2 ranks"):
        damage.skip(DataError("damaged"), shard="b", document=4)


def test_a_lost_shard_may_be_skipped_within_the_budget_only(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path)
    split = corpus.split("train")
    info = split.shards[1]
    (corpus.folder / info.name).unlink()
    with pytest.raises(DataError, match=info.name):
        take(stream(corpus), 200)
    with pytest.raises(DataError, match=f"max_skipped={info.documents - 1}"):
        take(stream(corpus, damage=CorruptionPolicy(skip=True, max_skipped=info.documents - 1)), 200)
    damage = CorruptionPolicy(skip=True, max_skipped=info.documents)
    steps = list(itertools.islice(stream(corpus, damage=damage, segment_len=split.tokens // 8), 1))
    assert damage.num_skipped == info.documents
    assert (~steps[0][0].scored).sum() >= info.tokens - 8


@pytest.mark.parametrize("is_whole_first", [True, False])
def test_a_shard_may_be_lost_and_come_back_while_it_is_read(tmp_path: Path, is_whole_first: bool) -> None:
    whole = tiny_corpus(tmp_path)
    expected = take(stream(whole), 200)
    paths = [whole.folder / info.name for info in whole.split("train").shards]
    damage = CorruptionPolicy(skip=True, max_skipped=10**6)
    reading = stream(whole, damage=damage)
    state, is_there = first(whole), True
    for turn, (tokens, _, _) in enumerate(expected):
        if (turn % 10 < 5) != (is_there == is_whole_first):
            for path in paths:
                away = path.with_suffix(".away")
                path.rename(away) if is_there else away.rename(path)
            is_there = not is_there
        segment = reading.segment_at(state)
        state = state.advanced(13)
        counts = segment.scored
        assert np.array_equal(segment.tokens[:, 1:][counts], tokens[:, 1:][counts]), "what is scored is right"
        assert np.array_equal(segment.tokens[:, :-1][counts], tokens[:, :-1][counts])
    assert damage.num_skipped > 0


def test_a_lost_shard_counts_in_each_corpus_that_has_one_of_its_name(tmp_path: Path) -> None:
    corpora = [tiny_corpus(tmp_path, name=name, texts=[f"{name} {i}" * 9 for i in range(40)]) for name in ("a", "b")]
    shard = corpora[0].split("train").shards[0]
    for made in corpora:
        (made.folder / shard.name).unlink()
    damage = CorruptionPolicy(skip=True, max_skipped=10**6)
    take_all = mixed_stream(corpora, mixed(corpora, [1, 1]), damage=damage, segment_len=300)
    for _ in itertools.islice(take_all, 5):
        pass
    assert damage.num_skipped == sum(made.split("train").shards[0].documents for made in corpora)


def test_records_of_other_sizes_than_the_index_says_are_refused(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path)
    index = json.loads((corpus.folder / "index.json").read_text())
    index["splits"]["train"]["shards"][0]["tokens"] += 40
    write_hashed_json(corpus.folder / "index.json", {key: v for key, v in index.items() if key != "self_sha256"})
    with pytest.raises(DataError, match=r"train-000000\.tar\.idx lists .* index\.json says"):
        take(stream(open_corpus(corpus.folder)), 300)


def test_lanes_say_early_which_shard_they_will_read_next(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    hints: list[int] = []
    monkeypatch.setattr("txl_dist.data.loader.shards.Split.prefetch", lambda self, indices: hints.extend(indices))
    reading = stream(corpus, lanes=range(1), state=first(corpus, num_lanes=1), segment_len=9)
    read: list[int] = []
    state = first(corpus, num_lanes=1)
    for _ in range(3 * corpus.split("train").tokens // 9):
        reading.segment_at(state)
        shard = reading.stretch_at(0, state.advanced(9))[1].shard
        if not read or shard != read[-1]:
            read.append(shard)
        state = state.advanced(9)
    assert len(set(read)) == len(corpus.split("train").shards) > 3
    assert hints[: len(read) - 1] == read[1:], "each is named before it is read, in order"


def test_an_outage_is_never_skipped_as_damage(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *arguments: Any) -> None:
        raise UnreachableError("https://example.org does not answer")

    damage = CorruptionPolicy(skip=True, max_skipped=10**9)
    for name in ("Shard.document", "Split.open_shard"):
        with monkeypatch.context() as patch:
            patch.setattr(f"txl_dist.data.loader.shards.{name}", fail)
            with pytest.raises(UnreachableError):
                take(stream(corpus, damage=damage), 1)
    assert damage.num_skipped == 0


@pytest.mark.parametrize(
    "texts",
    [["", "a", "", "b", "c" * 9000, "d", "\n"], ["x" * 5000], [f"{i}" for i in range(40)]],
    ids=["empty, one-letter and long documents", "fewer documents than lanes", "short documents"],
)
def test_documents_of_any_length_are_read_once(tmp_path: Path, texts: list[str]) -> None:
    corpus = tiny_corpus(tmp_path, texts=texts, valid_fraction=0.0)
    split = corpus.split("train")
    (tokens, _, _) = take(stream(corpus, segment_len=split.tokens // 8), 1)[0]
    everything = Counter(split.read_all().tolist())
    read = Counter(tokens[:, :-1].reshape(-1).tolist())
    assert not read - everything
    assert (everything - read).total() == split.tokens % 8


def test_the_first_batches_of_a_mixture_that_is_cut_anew_are_frozen(tmp_path: Path) -> None:
    corpora = [
        tiny_corpus(tmp_path, name=name, texts=[f"{name} {i}, " * (i % 7 + 1) for i in range(50)], valid_fraction=0.0)
        for name in ("one", "two")
    ]
    splits = [made.split("train") for made in corpora]
    state, digest = mixed(corpora, [2, 1], num_lanes=9), hashlib.sha256()
    for num_lanes, steps in ((9, 34), (14, 33), (5, 33)):
        state = continued(state, mixed(corpora, [2, 1], num_lanes=num_lanes), splits)
        for tokens, documents, after in take(mixed_stream(corpora, state), steps):
            digest.update(tokens.astype("<i8").tobytes() + documents.astype("<i8").tobytes())
            state = after
    assert digest.hexdigest()[:16] == "bf6dea2d04a831c9"
