"""State of the training stream: the positions of all lanes, as a checkpoint stores them. This module reads no files.

A lane is a row of the batch with its own token stream. All lanes of a corpus have the same position, which is the
number of tokens that each lane has passed since the corpus was divided among its lanes (partitioned). If the weights or
the number of lanes change, `continued` makes a new partition of the tokens that no lane has read yet. So no token is
read twice. Each new partition leaves out fewer tokens than there are lanes. If training diverges and the run returns to
an earlier checkpoint (rewind), `with_skip` marks the tokens to skip. A lane reads only positions outside the skips of
its corpus.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from txl_dist.config.renamed import keys_in_new_names
from txl_dist.data.loader.lanes import LanePartition, LanePlan, Ranges, allot_lanes, merged, outside
from txl_dist.data.loader.shards import Split
from txl_dist.errors import CheckpointError
from txl_dist.rng import derive_seed

STATE_VERSION = 3
"""Format version of the state that `to_dict` writes."""
READABLE_VERSIONS = (2, 3)
"""Format versions that `from_dict` reads. Version 2, written by txl_dist 0.2, has another key for `unread`."""


class PositionRange(NamedTuple):
    """Range of consecutive lane positions that contains no skipped position."""

    position: int
    """First position of the range."""
    length: int
    """Number of positions, which is the number of tokens."""
    begin: int
    """End of the last skip before the range, or 0 if there is none. A document that began before this position is
    treated as if it began here."""


@dataclass(frozen=True)
class CorpusState:
    """State of one corpus in the training stream: how the corpus is divided among its lanes, and how far the lanes have
    read.

    A lane is a row of the batch with its own token stream.
    """

    name: str
    """Name of the corpus in messages. The fingerprint identifies the corpus."""
    fingerprint: str
    """Data fingerprint of the corpus."""
    split: str
    """Name of the split that the lanes read."""
    num_lanes: int
    """Number of lanes that read the corpus. It is 0 while the corpus is paused."""
    position: int = 0
    """Number of tokens that each lane has read or skipped since the partition was made. The position is never inside a
    skip."""
    epoch: int = 0
    """Epoch in which the partition was made, counted from 0."""
    unread: Ranges = ()
    """Token ranges of `epoch` that were divided among the lanes. Empty means the whole epoch."""
    skips: Ranges = ()
    """Ranges of lane positions that no lane trains on, including ranges already passed. As in `position`, positions
    count from the last division of the corpus among its lanes."""

    def cut(self) -> LanePartition:
        """Return the division of the corpus among its lanes (rows of the batch), for the argument `cut` of
        `LanePlan`."""
        return LanePartition(num_lanes=self.num_lanes, epoch=self.epoch, unread=self.unread)

    def next_ranges(self, num_tokens: int) -> Iterator[PositionRange]:
        """Yield the ranges of positions, without skips, that contain the next `num_tokens` tokens of each lane."""
        begin = max((end for _, end in self.skips if end <= self.position), default=0)
        num_left = num_tokens
        for first, end in outside(self.skips, self.position, sys.maxsize):
            length = min(end - first, num_left)
            if first != self.position:  # a skip ends here
                begin = first
            yield PositionRange(first, length, begin)
            num_left -= length
            if not num_left:
                return

    def advanced(self, num_tokens: int) -> CorpusState:
        """Return the state after each lane has been trained on `num_tokens` more tokens."""
        *_, last = self.next_ranges(num_tokens + 1)  # the extra token is the one at the new position
        return replace(self, position=last.position + last.length - 1)


@dataclass(frozen=True)
class StreamState:
    """State of the whole training stream, as a checkpoint stores it: the seed, and the position of each corpus.

    `owners_of_lanes` computes from this state which corpus each lane (row of the batch) reads.
    """

    seed: int
    """Seed of the order of shards and documents, and of the assignment of lanes to corpora."""
    corpora: tuple[CorpusState, ...]
    """State of each corpus, in the order of the settings."""
    version: int = field(default=STATE_VERSION)
    """Format version of the state in a checkpoint."""

    @property
    def num_lanes(self) -> int:
        """Total number of lanes of all corpora."""
        return sum(corpus.num_lanes for corpus in self.corpora)

    def advanced(self, num_tokens: int) -> StreamState:
        """Return the state after every lane has been trained on `num_tokens` more tokens."""
        corpora = [corpus.advanced(num_tokens) if corpus.num_lanes else corpus for corpus in self.corpora]
        return replace(self, corpora=tuple(corpora))

    def with_skip(self, begin: StreamState, end: StreamState) -> StreamState:
        """Return this state with the tokens between the states `begin` and `end` marked as skipped.

        A run that returns to this state, because training on those tokens diverged, continues with the result. The
        result also has all skips of `end`. The stream must have reached `begin` and `end` from this state, without
        dividing the corpora among the lanes again.
        """
        corpora = []
        for corpus, first, last in zip(self.corpora, begin.corpora, end.corpora, strict=True):
            new_skip = (first.position, last.position)
            skips = sorted([*last.skips, new_skip])
            corpora.append(replace(corpus, skips=merged(skips)))
        state = replace(self, corpora=tuple(corpora))
        return state.advanced(0)  # moves the position out of a skip that begins here

    def has_lanes_of(self, other: StreamState) -> bool:
        """Return whether every lane reads the same corpus as in `other`. If so, the model's recurrent memory is still
        valid for every lane."""
        return self._lanes_by_corpus() == other._lanes_by_corpus()

    def _lanes_by_corpus(self) -> list[tuple[str, str, int]]:
        """Return (fingerprint, split, number of lanes) of each corpus that is not paused."""
        reading = [corpus for corpus in self.corpora if corpus.num_lanes]
        return [(corpus.fingerprint, corpus.split, corpus.num_lanes) for corpus in reading]

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values. Each time a corpus is divided again among its lanes within an epoch,
        `unread` becomes longer by about 20 bytes per lane."""
        corpora = []
        for corpus in self.corpora:
            corpora.append({**vars(corpus), "unread": _text_of(corpus.unread), "skips": _text_of(corpus.skips)})
        return {**vars(self), "corpora": corpora}  # `asdict` would copy each range

    @staticmethod
    def from_dict(values: dict[str, Any]) -> StreamState:
        """Make a state from the values that `to_dict` returned.

        Raises CheckpointError if the values have an unknown version or are damaged.
        """
        if values.get("version") not in READABLE_VERSIONS:
            readable = " and ".join(map(str, READABLE_VERSIONS))
            raise CheckpointError(
                f"the stream state of the checkpoint has version {values.get('version')}, but this version of txl_dist "
                f"can read only the versions {readable}. Resume with the version of txl_dist that wrote the checkpoint."
            )
        try:
            corpora = []
            for saved in values["corpora"]:
                corpus = keys_in_new_names(saved, of="stream")
                ranges = {
                    "unread": _ranges_of(corpus["unread"]),
                    "skips": _ranges_of(corpus.get("skips", "")),  # older states have no skips
                }
                corpora.append(CorpusState(**{**corpus, **ranges}))
            return StreamState(**{**values, "corpora": tuple(corpora), "version": STATE_VERSION})
        except (AttributeError, TypeError, KeyError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"the stream state of the checkpoint is damaged: {error}. Use another checkpoint."
            ) from error


def _text_of(ranges: Ranges) -> str:
    """Write ranges as a text of alternating gaps and lengths.

    Gaps and lengths have fewer digits than the ends of ranges, and JSON keeps a text on one line.
    """
    bounds = [0, *chain.from_iterable(ranges)]
    return " ".join(str(end - start) for start, end in pairwise(bounds))


def _ranges_of(text: str) -> Ranges:
    """Parse the text that `_text_of` wrote. Raises ValueError for other text, OverflowError for numbers beyond
    int64."""
    steps = np.array([int(step) for step in text.split()], np.int64)
    bounds = np.cumsum(steps).reshape(-1, 2)
    if steps.min(initial=0) < 0 or bounds.min(initial=0) < 0:  # the second: a sum that overflows int64
        raise ValueError(f"the token ranges {text[:40]!r} are not in ascending order")
    return tuple((first, end) for first, end in bounds.tolist())


def document_seed(seed: int) -> int:
    """Return the seed of the order of shards and documents that belongs to the setting run.seed."""
    return derive_seed(seed, "documents")


def first_state(splits: Sequence[Split], *, weights: Sequence[float] = (), num_lanes: int, seed: int) -> StreamState:
    """Return the stream state at the start of a new run, with all lanes at position 0.

    The lanes (rows of the batch) are divided among the corpora in proportion to `weights`, or to the numbers of tokens
    if there are no weights. Raises ConfigError if no weight is positive, or if a corpus with a positive weight gets no
    lane.
    """
    names = [split.corpus.location for split in splits]
    sizes = [split.tokens for split in splits]
    allotted = allot_lanes(num_lanes, weights or sizes, names=names)
    corpora = []
    for split, count in zip(splits, allotted, strict=True):
        corpus = split.corpus
        state = CorpusState(name=corpus.name, fingerprint=corpus.fingerprint, split=split.name, num_lanes=count)
        corpora.append(state)
    return StreamState(seed=seed, corpora=tuple(corpora))


def continued(old: StreamState, wanted: StreamState, splits: Sequence[Split]) -> StreamState:
    """Return the stream state with which the present settings continue the state `old` of a checkpoint.

    `wanted` is the state with which the present settings would begin a new run. A corpus that keeps its number of lanes
    keeps its position. If the number of lanes changes, the corpus's unread tokens are divided among the new lanes. A
    corpus that is new to the run begins at its start. Raises CheckpointError if the seed differs, or if a corpus of the
    checkpoint is missing, because its unread tokens would be lost.
    """
    if old.seed != wanted.seed:
        raise CheckpointError(
            f"the checkpoint's token stream was ordered with the seed {old.seed}, but this run has "
            f"run.seed={wanted.seed}. Set run.seed to the seed of the checkpoint."
        )
    before = {(corpus.fingerprint, corpus.split): corpus for corpus in old.corpora}
    now = {(corpus.fingerprint, corpus.split) for corpus in wanted.corpora}
    missing = before.keys() - now
    if missing:
        added = [corpus for corpus in wanted.corpora if (corpus.fingerprint, corpus.split) not in before]
        raise CheckpointError(
            "the checkpoint was trained on corpora that this run does not read: "
            f"{_names(before[key] for key in missing)}. Corpora that are new in this run: {_names(added) or 'none'}. "
            "Name all corpora of the checkpoint in data.path and data.more_paths, or start a new run. To stop "
            "reading a corpus, set its weight in data.weights to 0."
        )
    corpora = []
    for corpus, split in zip(wanted.corpora, splits, strict=True):
        saved = before.get((corpus.fingerprint, corpus.split))
        if saved is not None:
            corpus = _continued_corpus(saved, corpus, split)
        corpora.append(corpus)
    return replace(wanted, corpora=tuple(corpora))


def _names(corpora: Iterable[CorpusState]) -> str:
    """List corpora with their splits and fingerprints, for a message."""
    names = []
    for corpus in corpora:
        fingerprint = corpus.fingerprint[:12]
        names.append(f"{corpus.name} (split {corpus.split}, fingerprint {fingerprint})")
    return ", ".join(names)


def _continued_corpus(old: CorpusState, new: CorpusState, split: Split) -> CorpusState:
    """Return the state of one corpus for the lanes of the state `new`, which continue where the lanes of `old`
    stopped."""
    if old.num_lanes == new.num_lanes:
        return replace(old, name=new.name)
    if not old.num_lanes:  # it was paused: `unread` has listed its unread tokens since then
        return replace(old, name=new.name, num_lanes=new.num_lanes)
    plan = LanePlan(split.shard_tokens, old.cut(), seed=0, document_tokens=lambda shard: np.empty(0, np.int64))
    epoch, unread = plan.rest_of_epoch(old.position, old.skips)
    return replace(new, epoch=epoch, unread=unread)
