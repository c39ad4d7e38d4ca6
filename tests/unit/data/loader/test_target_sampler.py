"""XLNet's targets: their exact number, whole words, orders in two halves, and the same samples on every rank."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from txl_dist.config.schema import halves_of
from txl_dist.data.loader.stream import Segment, plain_segment
from txl_dist.data.loader.target_sampler import (
    DrawnTargets,
    TargetSampler,
    TargetSettings,
    draw_span_lengths,
    draw_targets,
)


def settings_of(segment_len: int, reuse_len: int, predicted_len: int, **others: int) -> TargetSettings:
    halves = halves_of(segment_len, reuse_len=reuse_len, predicted_len=predicted_len)
    return TargetSettings(segment_len, halves, **others)


PAPER = settings_of(512, 256, 85)


def drawn(settings: TargetSettings = PAPER, *, position: int = 0, lane: int = 0, words: str = "all") -> DrawnTargets:
    rng = np.random.default_rng(position)
    begins_word = np.ones(settings.segment_len, dtype=bool)
    if words == "half":
        begins_word = rng.random(settings.segment_len) < 0.5
    return draw_targets(
        settings,
        seed=3,
        lane=lane,
        position=position,
        begins_word_T=begins_word,
        may_be_target_T=np.ones(settings.segment_len, dtype=bool),
    )


@pytest.mark.parametrize(
    ("segment_len", "reuse_len", "predicted_len", "by_half"),
    [(512, 256, 85, [43, 42]), (64, 32, 11, [6, 5]), (12, 6, 5, [3, 2]), (32, 32, 5, [5]), (48, 16, 7, [2, 5])],
)
def test_halves_share_the_targets_by_their_lengths(
    segment_len: int, reuse_len: int, predicted_len: int, by_half: list[int]
) -> None:
    halves = halves_of(segment_len, reuse_len=reuse_len, predicted_len=predicted_len)
    assert [half.num_targets for half in halves] == by_half
    assert (halves[0].start, halves[0].stop) == (0, reuse_len)
    assert halves[-1].stop == segment_len


@pytest.mark.parametrize("words", ["all", "half"])
def test_every_segment_has_exactly_its_targets_each_once_and_never_its_first_token(words: str) -> None:
    for position in range(300):
        found = drawn(position=position, words=words)
        assert found.is_drawn_m.all()
        assert len(set(found.place_m.tolist())) == 85
        assert (found.place_m < 256).sum() == 43
        assert 0 not in found.place_m


def test_span_lengths_are_drawn_in_proportion_to_one_over_their_length() -> None:
    lengths = draw_span_lengths(np.random.default_rng(0), 100_000, longest=5)
    counts = np.bincount(lengths, minlength=6)[1:]
    expected = 100_000 * (1 / np.arange(1, 6)) / (1 / np.arange(1, 6)).sum()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 18.47  # 4 degrees of freedom, p = 0.001
    assert abs(lengths.mean() - 2.19) < 0.02


def test_most_targets_come_in_spans_as_in_the_authors_code() -> None:
    """Of 43 targets in 256 tokens 36 are in spans and 7 are filled, if every token begins a word (xlnet's sampler)."""
    num_alone = num_targets = 0
    for position in range(300):
        places = np.sort(drawn(position=position).place_m)
        gaps = np.diff(places)
        alone = np.concatenate([[True], gaps > 1]) & np.concatenate([gaps > 1, [True]])
        num_alone += int(alone.sum())
        num_targets += len(places)
    # Spans of one word are 44 % of the spans and so a fifth of the targets. The filling adds a sixth of the targets.
    assert 0.25 < num_alone / num_targets < 0.45


def test_a_span_is_whole_words() -> None:
    """With words of 4 tokens, a run of targets begins at a word, unless it was filled or cut at the goal."""
    settings = settings_of(4096, 4096, 400, span_context=24)
    begins_word = np.arange(4096) % 4 == 0
    num_whole = num_runs = 0
    for position in range(20):
        found = draw_targets(
            settings,
            seed=1,
            lane=0,
            position=position,
            begins_word_T=begins_word,
            may_be_target_T=np.ones(4096, dtype=bool),
        )
        places = np.sort(found.place_m)
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
            num_runs += 1
            num_whole += int(run[0] % 4 == 0 and len(run) % 4 == 0)
    assert num_whole / num_runs > 0.9


def test_a_target_sees_open_tokens_earlier_halves_and_targets_of_lower_rank_only() -> None:
    settings = settings_of(12, 6, 5)
    for position in range(50):
        found = drawn(settings, position=position)
        rank = {int(place): index for index, place in enumerate(found.place_m)}
        for i in range(12):
            for j in range(12):
                sees = bool(found.key_level_T[j] < found.query_level_T[i])
                half_i, half_j = i >= 6, j >= 6
                if half_i != half_j:
                    expected = half_j < half_i
                elif j not in rank:
                    expected = True
                elif i not in rank:
                    expected = False
                else:
                    expected = rank[j] < rank[i]
                assert sees == expected, (i, j)


def test_blocks_of_an_order_keep_the_order_of_the_text_and_share_a_permutation() -> None:
    settings = settings_of(16, 8, 8, order_len=4)
    for position in range(30):
        found = drawn(settings, position=position)
        levels = found.key_level_T
        for half in (0, 8):
            places = [int(place) for place in found.place_m if half <= place < half + 8]
            first = [place for place in places if place < half + 4]
            second = [place for place in places if place >= half + 4]
            assert places == first + second
            both = [place for place in first if place + 4 in second]
            assert sorted(both, key=lambda place: levels[place]) == sorted(both, key=lambda place: levels[place + 4])


def test_tokens_that_may_not_be_targets_are_not_and_missing_targets_are_marked() -> None:
    settings = settings_of(12, 6, 5)
    may_be_target = np.zeros(12, dtype=bool)
    may_be_target[[0, 3, 8, 9, 10]] = True
    found = draw_targets(
        settings, seed=1, lane=0, position=0, begins_word_T=np.ones(12, dtype=bool), may_be_target_T=may_be_target
    )
    assert found.is_drawn_m.tolist() == [True, False, False, True, True]
    assert found.place_m.tolist()[:3] == [3, 0, 0]
    assert set(found.place_m.tolist()[3:]) <= {8, 9, 10}


def test_draws_depend_on_seed_lane_and_position_and_on_nothing_else() -> None:
    segment = plain_segment(np.random.default_rng(5).integers(0, 50, (6, 65)))
    begins_word = np.random.default_rng(6).random(50) < 0.4
    settings = settings_of(64, 32, 11)
    sampler = TargetSampler(settings, seed=7, begins_word_V=begins_word)
    lanes, positions = list(range(6)), [0, 32, 64, 0, 0, 96]
    whole = sampler.draw(segment, lanes=lanes, positions=positions)
    for rows in (slice(0, 2), slice(2, 6), slice(5, 6)):
        part_of_it = Segment(*(array[rows] for array in segment))
        part = sampler.draw(part_of_it, lanes=lanes[rows], positions=positions[rows])
        for found, expected in zip(part, whole.of_rows(rows), strict=True):
            assert np.array_equal(found, expected)
    other_seed = TargetSampler(settings, seed=8, begins_word_V=begins_word)
    assert not np.array_equal(other_seed.draw(segment, lanes=lanes, positions=positions).place_Bm, whole.place_Bm)
    assert not np.array_equal(whole.place_Bm[0], whole.place_Bm[3])


def test_the_first_token_of_a_document_is_never_a_target() -> None:
    tokens = np.zeros((2, 65), np.int64)
    documents = np.repeat(np.arange(13), 5)[None].repeat(2, axis=0)
    segment = Segment(tokens, documents, np.zeros((2, 64), dtype=bool), np.ones((2, 64), dtype=bool))
    sampler = TargetSampler(settings_of(64, 32, 11), seed=7, begins_word_V=np.ones(1, dtype=bool))
    for position in range(0, 3200, 32):
        places = sampler.draw(segment, lanes=[0, 1], positions=[position] * 2).place_Bm
        assert not ((places + 1) % 5 == 0).any()


def test_draws_stay_the_same_from_version_to_version() -> None:
    """A run that is resumed by a later version must draw the same targets."""
    digest = hashlib.sha256()
    for position in range(5):
        for array in drawn(position=position, lane=2, words="half"):
            digest.update(np.ascontiguousarray(array).tobytes())
    assert digest.hexdigest()[:16] == "78c1ef7f4fb77bab"
