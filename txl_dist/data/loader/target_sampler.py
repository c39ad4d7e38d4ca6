"""Choice of the tokens that XLNet predicts in a segment, and of the order in which it predicts them.

`draw_targets` is a pure function of the settings, the seed, the lane (batch row) and the lane's position. So the
targets do not change if a run resumes, or if the number of ranks or the size of the micro-batches changes. No targets
have to be stored.

A segment of T tokens has two halves. The first half has R tokens, whose hidden states the model's memory then stores.
The second half has T - R tokens. The next segment begins after the first half, so it reads the second half again. Each
half is sampled by itself, as in section 3.1 of Yang et al. 2019 and in its code (data_utils.py, `_sample_mask`):

    spans    Spans of n whole words with p(n) ~ 1/n, one in each stretch of n * span_context tokens of context. The
             place of a span in its context is random.
    filling  Single random tokens, until the half has its number of targets.
    order    A random permutation of the half. All tokens that are not targets come before the first target.

A token is not a target if it begins the segment or a document. So every target sees at least one token of its document.

Shapes: B lanes, T segment, m targets, V vocabulary.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from txl_dist.config.schema import Half, TrainSection
from txl_dist.data.loader.stream import Segment
from txl_dist.rng import derive_seed

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class TargetSettings(NamedTuple):
    """Settings of `draw_targets`. Lengths are numbers of tokens."""

    segment_len: int
    halves: tuple[Half, ...]
    """The halves of a segment: the positions of each half, and the number of tokens that are predicted in the half.
    There is only one half if each step moves on by the whole segment."""
    order_len: int = 0
    """Number of tokens in a block. Blocks are predicted one after the other, in the order of the text. Inside every
    block of a half the tokens have the same random order. 0 means that each half is one block."""
    longest_span: int = 5
    """Largest number of words in a span."""
    span_context: int = 6
    """Number of tokens of context per word of a span."""

    @property
    def reuse_len(self) -> int:
        """Number R of tokens by which each lane (batch row) advances in a step. The model's memory stores the hidden
        states of these tokens."""
        return self.halves[0].stop

    @classmethod
    def of(cls, train: TrainSection) -> Self:
        """Return the settings of a run."""
        return cls(
            segment_len=train.segment_len,
            halves=train.halves(),
            order_len=train.order_len,
            longest_span=train.longest_span,
            span_context=train.span_context,
        )


class DrawnTargets(NamedTuple):
    """Targets of one segment of one lane (batch row).

    Arrays with the suffix _m have one number for each of the m targets, in the order of prediction. Arrays with the
    suffix _T have one number for each of the T tokens.
    """

    place_m: Int64s
    """Positions of the targets. A target that could not be drawn has position 0."""
    is_drawn_m: Bools
    """True for each target that was drawn. If too few tokens of a half may be targets, the value is False for each
    missing target."""
    query_level_T: Int64s
    """Level of each position as a query. Position i sees position j if `key_level_T[j]` is below `query_level_T[i]`.
    See `model.prediction_order`."""
    key_level_T: Int64s


def draw_targets(
    settings: TargetSettings, *, seed: int, lane: int, position: int, begins_word_T: Bools, may_be_target_T: Bools
) -> DrawnTargets:
    """Draw the targets of the segment that a lane reads at a position, and their order.

    `begins_word_T` marks tokens that begin a word. `may_be_target_T` marks tokens that may be predicted. The first
    token of the segment is never predicted, whatever `may_be_target_T` says.
    """
    key = derive_seed(seed, "targets", lane, position)
    rng = np.random.Generator(np.random.Philox(key=key))
    may_be_target_T = may_be_target_T.copy()
    may_be_target_T[0] = False
    num_tokens = settings.segment_len
    step = num_tokens + 3  # more levels than a half can have
    key_level_T = np.empty(num_tokens, np.int64)
    query_level_T = np.empty(num_tokens, np.int64)
    places: list[Int64s] = []
    drawn: list[Bools] = []
    for index, half in enumerate(settings.halves):
        targets = _draw_places(half, settings, rng, begins_word_T=begins_word_T, may_be_target_T=may_be_target_T)
        rank_h = _draw_ranks(half.stop - half.start, order_len=settings.order_len, rng=rng)
        is_target_h = np.zeros(half.stop - half.start, dtype=bool)
        is_target_h[targets - half.start] = True
        level_h = index * step + np.where(is_target_h, 1 + rank_h, 0)
        key_level_T[half.start : half.stop] = level_h
        query_level_T[half.start : half.stop] = np.where(is_target_h, level_h, index * step + 1)
        in_order = targets[np.argsort(rank_h[targets - half.start])]
        missing = half.num_targets - len(targets)
        places.append(np.concatenate([in_order, np.zeros(missing, np.int64)]))
        drawn.append(np.arange(half.num_targets) < len(targets))
    return DrawnTargets(np.concatenate(places), np.concatenate(drawn), query_level_T, key_level_T)


def draw_span_lengths(rng: np.random.Generator, count: int, *, longest: int) -> Int64s:
    """Draw the lengths of spans, 1 to `longest` words, with probabilities in proportion to 1 / length."""
    weights = 1 / np.arange(1, longest + 1)
    cumulative = np.cumsum(weights) / weights.sum()
    lengths: Int64s = np.searchsorted(cumulative, rng.random(count), side="right") + 1
    return np.minimum(lengths, longest)  # the last cumulative number may be rounded to less than 1


def _draw_places(
    half: Half,
    settings: TargetSettings,
    rng: np.random.Generator,
    *,
    begins_word_T: Bools,
    may_be_target_T: Bools,
) -> Int64s:
    """Draw the positions of a half's targets, in ascending order. Returns fewer positions if too few tokens of the half
    may be targets."""
    goal = half.num_targets
    # The same numbers are drawn whatever the text is, so that the draws after them do not depend on the text.
    lengths = draw_span_lengths(rng, goal, longest=settings.longest_span).tolist()
    lefts = rng.random(goal).tolist()
    keys_h = rng.random(half.stop - half.start)
    words = (half.start + np.flatnonzero(begins_word_T[half.start : half.stop])).tolist()
    may_be_target = may_be_target_T.tolist()
    chosen: list[int] = []
    cursor = half.start
    for length, left in zip(lengths, lefts, strict=True):
        num_left = goal - len(chosen)
        if num_left == 0:
            break
        num_words = min(length, num_left)
        context = num_words * settings.span_context
        before = int(left * context)
        span = _span_at(cursor + before, num_words, words, stop=half.stop)
        if span is None:
            break
        eligible = [place for place in span if may_be_target[place]]
        chosen += eligible[:num_left]
        cursor = span.stop + context - before
    is_free_h = may_be_target_T[half.start : half.stop].copy()
    is_free_h[np.array(chosen, np.int64) - half.start] = False
    keys_h[~is_free_h] = 2.0  # above all random numbers
    num_filling = min(goal - len(chosen), int(is_free_h.sum()))
    filling = half.start + np.argsort(keys_h, kind="stable")[:num_filling]
    return np.sort(np.concatenate([np.array(chosen, np.int64), filling]))


def _span_at(position: int, num_words: int, words: Sequence[int], *, stop: int) -> range | None:
    """Return the positions of the first `num_words` words from a position on. Returns None if the half ends before the
    last of these words.

    `words` are the positions in the half where words begin, and `stop` is the end of the half.
    """
    first = bisect.bisect_left(words, position)
    after = first + num_words
    if first >= len(words) or after > len(words):
        return None
    if after == len(words):
        return range(words[first], stop)
    return range(words[first], words[after])


def _draw_ranks(num_tokens: int, *, order_len: int, rng: np.random.Generator) -> Int64s:
    """Draw the rank of each token of a half in the order of prediction.

    The half is cut into blocks of `order_len` tokens. The blocks keep the order of the text, and the tokens of every
    block are permuted in the same way.
    """
    block_len = order_len or num_tokens
    permutation = rng.permutation(block_len)
    block_starts = np.arange(0, num_tokens, block_len)
    ranks: Int64s = (block_starts[:, None] + permutation[None, :]).reshape(-1)
    return ranks


class TargetBatch(NamedTuple):
    """Targets of the segments of several lanes (batch rows): the arrays of `DrawnTargets`, with lanes as their first
    axis."""

    place_Bm: Int64s
    is_drawn_Bm: Bools
    query_level_BT: Int64s
    key_level_BT: Int64s
    reuse_len: int
    """Number R of tokens of each segment whose hidden states the model's memory stores."""

    def of_rows(self, rows: slice) -> TargetBatch:
        """Return the targets of some of the lanes."""
        return TargetBatch(
            place_Bm=self.place_Bm[rows],
            is_drawn_Bm=self.is_drawn_Bm[rows],
            query_level_BT=self.query_level_BT[rows],
            key_level_BT=self.key_level_BT[rows],
            reuse_len=self.reuse_len,
        )


class TargetSampler:
    """Sampler that draws the tokens to predict in each training segment, for training as in XLNet."""

    def __init__(self, settings: TargetSettings, *, seed: int, begins_word_V: Bools) -> None:
        """Store the settings, the seed and `begins_word_V`, which are the same for all segments. `begins_word_V` says
        for each token id whether it begins a word."""
        self.settings = settings
        self._seed = seed
        self._begins_word_V = begins_word_V

    def draw(self, segment: Segment, *, lanes: Sequence[int], positions: Sequence[int]) -> TargetBatch:
        """Draw the targets of a segment.

        `lanes` and `positions` are the lane and the lane position of each row of the segment. The targets are among the
        last T of the segment's T + 1 tokens. The segment must have document numbers.
        """
        tokens_BT = segment.tokens[:, 1:]
        begins_document_BT = segment.documents[:, 1:] != segment.documents[:, :-1]
        drawn = []
        for tokens_T, begins_document_T, lane, position in zip(
            tokens_BT, begins_document_BT, lanes, positions, strict=True
        ):
            drawn.append(
                draw_targets(
                    self.settings,
                    seed=self._seed,
                    lane=lane,
                    position=position,
                    begins_word_T=self._begins_word_V[tokens_T],
                    may_be_target_T=~begins_document_T,
                )
            )
        return TargetBatch(
            place_Bm=np.stack([one.place_m for one in drawn]),
            is_drawn_Bm=np.stack([one.is_drawn_m for one in drawn]),
            query_level_BT=np.stack([one.query_level_T for one in drawn]),
            key_level_BT=np.stack([one.key_level_T for one in drawn]),
            reuse_len=self.settings.reuse_len,
        )
