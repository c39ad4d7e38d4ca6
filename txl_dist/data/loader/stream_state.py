"""State of the training stream: the positions of all lanes, as a checkpoint stores them. Pure, no files.

Each corpus has its own position: the number of tokens that each of its lanes has passed since the corpus was
partitioned into lanes. Other weights or another number of lanes need a new partition (`continued`). It shares out the
tokens that no lane has read yet, none twice and none left out. Tokens on which a run went wrong are skipped after its
rewind (`with_skip`): a lane's stream is what lies outside the skips of its corpus.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from txl_dist.config.renamed import keys_in_new_names
from txl_dist.data.loader.corpus import Split
from txl_dist.data.loader.lanes import LanePartition, LanePlan, Ranges, allot_lanes, merged, outside
from txl_dist.errors import CheckpointError

STATE_VERSION = 3
"""Version of the state that is written."""
READABLE_VERSIONS = (2, 3)
"""Version 2, written by 0.2, has another key for `unread`."""


class PositionRange(NamedTuple):
    """Consecutive lane positions without a skip."""

    position: int
    """First position of the range."""
    length: int
    """Number of positions, which is the number of tokens."""
    begin: int
    """End of the skip before the range, 0 without one. No piece of a document begins earlier."""


@dataclass(frozen=True)
class CorpusState:
    """Position and partition of the lanes of one corpus."""

    name: str
    """Name for messages; the fingerprint identifies the corpus."""
    fingerprint: str
    """Data fingerprint of the corpus."""
    split: str
    num_lanes: int
    """Number of lanes that read the corpus; 0 while it is paused."""
    position: int = 0
    """Number of tokens that each lane was trained on, or skipped, since the partition was made. Never in a skip."""
    epoch: int = 0
    """Epoch in which the partition was made."""
    unread: Ranges = ()
    """Token ranges of that epoch that were partitioned. Empty means the whole epoch."""
    skips: Ranges = ()
    """Lane positions of this partition that no lane trains on, past ones included."""

    def cut(self) -> LanePartition:
        """Return the partition that `LanePlan` needs."""
        return LanePartition(num_lanes=self.num_lanes, epoch=self.epoch, unread=self.unread)

    def next_ranges(self, num_tokens: int) -> Iterator[PositionRange]:
        """Yield the positions of the next `num_tokens` tokens of each lane."""
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
    """Positions of all lanes, for a checkpoint. `owners_of_lanes` assigns the lanes to the corpora."""

    seed: int
    """Seed of the order of shards and documents, and of the lanes' assignment."""
    corpora: tuple[CorpusState, ...]
    version: int = field(default=STATE_VERSION)

    @property
    def num_lanes(self) -> int:
        """Number of lanes of all corpora."""
        return sum(corpus.num_lanes for corpus in self.corpora)

    def advanced(self, num_tokens: int) -> StreamState:
        """Return the state after every lane has been trained on `num_tokens` more tokens."""
        corpora = [corpus.advanced(num_tokens) if corpus.num_lanes else corpus for corpus in self.corpora]
        return replace(self, corpora=tuple(corpora))

    def with_skip(self, begin: StreamState, end: StreamState) -> StreamState:
        """Return this state, to rewind to, with the tokens trained on from `begin` to `end` left out.

        What `end` skips is left out too. Both are states of the same partition that the stream came to from here.
        """
        corpora = []
        for corpus, first, last in zip(self.corpora, begin.corpora, end.corpora, strict=True):
            new_skip = (first.position, last.position)
            skips = sorted([*last.skips, new_skip])
            corpora.append(replace(corpus, skips=merged(skips)))
        state = replace(self, corpora=tuple(corpora))
        return state.advanced(0)  # moves the position out of a skip that begins here

    def has_lanes_of(self, other: StreamState) -> bool:
        """Return whether every lane reads the same corpus as in `other`, so that its memory is still valid."""
        return self._lanes_by_corpus() == other._lanes_by_corpus()

    def _lanes_by_corpus(self) -> list[tuple[str, str, int]]:
        """List (fingerprint, split, number of lanes) of the corpora that are not paused."""
        reading = [corpus for corpus in self.corpora if corpus.num_lanes]
        return [(corpus.fingerprint, corpus.split, corpus.num_lanes) for corpus in reading]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values. After each new partition within an epoch, `unread` takes about 20 bytes more per lane."""
        values = asdict(self)
        for corpus_values, corpus in zip(values["corpora"], self.corpora, strict=True):
            corpus_values["unread"] = _text_of(corpus.unread)
            corpus_values["skips"] = _text_of(corpus.skips)
        return values

    @staticmethod
    def from_dict(values: dict[str, Any]) -> StreamState:
        """Read what `to_dict` returned. Raises CheckpointError for values of another version or form."""
        if values.get("version") not in READABLE_VERSIONS:
            readable = " and ".join(map(str, READABLE_VERSIONS))
            raise CheckpointError(
                f"the stream state has version {values.get('version')}, but this version of txl_dist reads {readable}. "
                "Continue with the program that wrote the checkpoint."
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
            raise CheckpointError(f"the stream state of the checkpoint is damaged: {error}.") from error


def _text_of(ranges: Ranges) -> str:
    """Write ranges as gaps and lengths in turn: these are smaller than bounds, and a text stays on one line."""
    bounds = np.array(ranges, np.int64).reshape(-1)
    steps = np.diff(bounds, prepend=0).tolist()
    return " ".join(str(step) for step in steps)


def _ranges_of(text: str) -> Ranges:
    """Read what `_text_of` wrote. Raises ValueError for other text, OverflowError for numbers beyond int64."""
    steps = np.array([int(step) for step in text.split()], np.int64)
    bounds = np.cumsum(steps).reshape(-1, 2)
    if steps.min(initial=0) < 0 or bounds.min(initial=0) < 0:  # the second: a sum that overflows int64
        raise ValueError(f"the ranges {text[:40]!r} do not ascend")
    return tuple((first, end) for first, end in bounds.tolist())


def first_state(splits: Sequence[Split], *, weights: Sequence[float] = (), num_lanes: int, seed: int) -> StreamState:
    """Return the state at the start of a new run.

    Without `weights` the corpora get lanes in proportion to their tokens. Raises ConfigError for bad weights.
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
    """Return the state in which `wanted`, the first state of the present settings, continues a checkpoint's `old`.

    A corpus that keeps its number of lanes keeps its place. Another number of lanes partitions its unread tokens. A
    corpus that is new to the run begins. Raises CheckpointError if the seed differs, or if a corpus that was read is
    missing: its unread data would be lost.
    """
    if old.seed != wanted.seed:
        raise CheckpointError(
            f"the checkpoint's stream has the seed {old.seed}, but this run has the seed {wanted.seed}. "
            "Restore run.seed."
        )
    before = {(corpus.fingerprint, corpus.split): corpus for corpus in old.corpora}
    now = {(corpus.fingerprint, corpus.split) for corpus in wanted.corpora}
    missing = before.keys() - now
    if missing:
        added = [corpus for corpus in wanted.corpora if (corpus.fingerprint, corpus.split) not in before]
        raise CheckpointError(
            "the checkpoint was trained on data that is not given now: "
            f"{_names(before[key] for key in missing)}. "
            f"New data: {_names(added) or 'none'}. Restore data.path or data.more_paths (a weight of 0 in "
            "data.weights pauses a corpus), or start a new run."
        )
    corpora = []
    for corpus, split in zip(wanted.corpora, splits, strict=True):
        saved = before.get((corpus.fingerprint, corpus.split))
        if saved is not None:
            corpus = _continued_corpus(saved, corpus, split)
        corpora.append(corpus)
    return replace(wanted, corpora=tuple(corpora))


def _names(corpora: Iterable[CorpusState]) -> str:
    """Name the corpora for a message."""
    names = []
    for corpus in corpora:
        fingerprint = corpus.fingerprint[:12]
        names.append(f"{corpus.name} (split {corpus.split}, fingerprint {fingerprint})")
    return ", ".join(names)


def _continued_corpus(old: CorpusState, new: CorpusState, split: Split) -> CorpusState:
    """Return the state of one corpus as `new`'s lanes continue after `old`'s."""
    if old.num_lanes == new.num_lanes:
        return replace(old, name=new.name)
    if not old.num_lanes:  # it was paused: `unread` has listed its unread tokens since then
        return replace(old, name=new.name, num_lanes=new.num_lanes)
    plan = LanePlan(split.shard_tokens, old.cut(), seed=0, document_tokens=lambda shard: np.empty(0, np.int64))
    epoch, unread = plan.rest_of_epoch(old.position, old.skips)
    return replace(new, epoch=epoch, unread=unread)
