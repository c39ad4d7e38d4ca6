"""Where all lanes are: the value that a checkpoint stores, and how it goes on under other settings.

Each corpus has its own position, a count of the tokens that each of its lanes has passed since the lanes were cut.
Other weights or another number of lanes are a new cut (`continued`): what no lane has read yet is dealt out anew, no
token twice and none left out. What made a run rewind is left out (`skipping`): a lane's stream is what lies outside
the skips of its corpus. Pure, no files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from txl_dist.data.loader.corpus import Split
from txl_dist.data.loader.lanes import LanePartition, LanePlan, Ranges, allot_lanes, merged, outside
from txl_dist.errors import CheckpointError

STATE_VERSION = 2


class Span(NamedTuple):
    """Consecutive positions that a lane reads."""

    position: int
    length: int
    begin: int
    """Where the skip before it ended, 0 without one: no piece of a document begins earlier."""


@dataclass(frozen=True)
class CorpusState:
    """Where the lanes of one corpus are."""

    name: str
    """For people; the fingerprint decides."""
    fingerprint: str
    """Data fingerprint of the corpus."""
    split: str
    num_lanes: int
    """Lanes that read it; 0 while it is paused."""
    position: int = 0
    """Tokens that each of these lanes has been trained on, or has skipped, since they were cut; never in a skip."""
    epoch: int = 0
    """Epoch in which they were cut."""
    rest: Ranges = ()
    """What of that epoch was cut; empty means all of it."""
    skips: Ranges = ()
    """Positions since that cut that no lane is trained on, or was."""

    def cut(self) -> LanePartition:
        """For `LanePlan`."""
        return LanePartition(num_lanes=self.num_lanes, epoch=self.epoch, rest=self.rest)

    def spans(self, num_tokens: int) -> Iterator[Span]:
        """Where the next so many tokens of each lane are."""
        begin = max((end for _, end in self.skips if end <= self.position), default=0)
        for first, end in outside(self.skips, self.position, sys.maxsize):
            length = min(end - first, num_tokens)
            yield Span(first, length, begin if first == self.position else first)
            num_tokens -= length
            if not num_tokens:
                return

    def advanced(self, num_tokens: int) -> CorpusState:
        """The state after each lane has been trained on so many tokens more."""
        *_, last = self.spans(num_tokens + 1)  # ends with the token behind them
        return replace(self, position=last.position + last.length - 1)


@dataclass(frozen=True)
class StreamState:
    """Where all lanes are, for a checkpoint. Lanes belong to corpora as `owners_of_lanes` says."""

    seed: int
    corpora: tuple[CorpusState, ...]
    version: int = field(default=STATE_VERSION)

    @property
    def num_lanes(self) -> int:
        """Lanes of all corpora."""
        return sum(corpus.num_lanes for corpus in self.corpora)

    def advanced(self, num_tokens: int) -> StreamState:
        """The state after every lane has been trained on so many tokens more."""
        return replace(self, corpora=tuple(one.advanced(num_tokens) if one.num_lanes else one for one in self.corpora))

    def skipping(self, begin: StreamState, end: StreamState) -> StreamState:
        """This state, to be rewound to, but what was trained on from `begin` to `end`, or skipped before, is left out.

        Both are states of the same cut that the stream came to from here.
        """
        corpora = [
            replace(one, skips=merged(sorted((*last.skips, (first.position, last.position)))))
            for one, first, last in zip(self.corpora, begin.corpora, end.corpora, strict=True)
        ]
        return replace(self, corpora=tuple(corpora)).advanced(0)  # a skip may begin right here

    def has_lanes_of(self, other: StreamState) -> bool:
        """Whether every lane reads the same corpus, and goes on where it was: then its memory is still true."""
        mine, others = (
            [(one.fingerprint, one.split, one.num_lanes) for one in state.corpora if one.num_lanes]
            for state in (self, other)
        )
        return mine == others

    def to_dict(self) -> dict[str, Any]:
        """JSON values. After each new cut within an epoch, `rest` takes about 20 bytes more per lane."""
        values = asdict(self)
        for one, corpus in zip(values["corpora"], self.corpora, strict=True):
            one |= {"rest": _text_of(corpus.rest), "skips": _text_of(corpus.skips)}
        return values

    @staticmethod
    def from_dict(values: dict[str, Any]) -> StreamState:
        """Raises CheckpointError for values of another version or form."""
        if values.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the stream state has version {values.get('version')}, this program reads {STATE_VERSION}. "
                "Continue with the program that wrote the checkpoint."
            )
        try:
            corpora = [
                # States from before there were skips have none.
                CorpusState(**{**one, "rest": _ranges_of(one["rest"]), "skips": _ranges_of(one.get("skips", ""))})
                for one in values["corpora"]
            ]
            return StreamState(**{**values, "corpora": tuple(corpora)})
        except (AttributeError, TypeError, KeyError, ValueError, OverflowError) as error:
            raise CheckpointError(f"the stream state of the checkpoint is damaged: {error}.") from error


def _text_of(ranges: Ranges) -> str:
    """Gaps and lengths in turn are smaller than bounds, and a text stays on one line."""
    return " ".join(map(str, np.diff(np.array(ranges, np.int64).reshape(-1), prepend=0).tolist()))


def _ranges_of(text: str) -> Ranges:
    steps = np.array([int(step) for step in text.split()], np.int64)
    bounds = np.cumsum(steps).reshape(-1, 2)
    if steps.min(initial=0) < 0 or bounds.min(initial=0) < 0:  # the second: a sum that is no int64 any more
        raise ValueError(f"the ranges {text[:40]!r} do not ascend")
    return tuple((first, end) for first, end in bounds.tolist())


def first_state(splits: Sequence[Split], *, weights: Sequence[float] = (), num_lanes: int, seed: int) -> StreamState:
    """The state of a new run. No weights means in proportion to the tokens. Raises ConfigError for bad weights."""
    names = [split.corpus.location for split in splits]
    allotted = allot_lanes(num_lanes, weights or [split.tokens for split in splits], names=names)
    return StreamState(
        seed=seed,
        corpora=tuple(
            CorpusState(name=split.corpus.name, fingerprint=split.corpus.fingerprint, split=split.name, num_lanes=count)
            for split, count in zip(splits, allotted, strict=True)
        ),
    )


def continued(old: StreamState, wanted: StreamState, splits: Sequence[Split]) -> StreamState:
    """Where `wanted`, the first state of the present settings, goes on behind `old`, the state of a checkpoint.

    A corpus that keeps its number of lanes keeps its place; one that does not is cut anew; a new one begins.
    Raises CheckpointError if the seed differs, or a corpus that was read is missing: its data would be lost.
    """
    if old.seed != wanted.seed:
        raise CheckpointError(
            f"the checkpoint's stream has the seed {old.seed}, this run {wanted.seed}. Restore run.seed."
        )
    before = {(one.fingerprint, one.split): one for one in old.corpora}
    missing = before.keys() - {(one.fingerprint, one.split) for one in wanted.corpora}
    if missing:
        added = [one for one in wanted.corpora if (one.fingerprint, one.split) not in before]
        raise CheckpointError(
            f"the checkpoint was trained on data that is not given now: {_names(map(before.__getitem__, missing))}; "
            f"new to it are: {_names(added) or 'none'}. Restore data.path or data.more_paths (a weight of 0 in "
            "data.weights pauses a corpus), or start a new run."
        )
    return replace(
        wanted,
        corpora=tuple(
            _continued_corpus(before[key], new, split) if (key := (new.fingerprint, new.split)) in before else new
            for new, split in zip(wanted.corpora, splits, strict=True)
        ),
    )


def _names(corpora: Iterable[CorpusState]) -> str:
    return ", ".join(f"{one.name} (split {one.split}, fingerprint {one.fingerprint[:12]})" for one in corpora)


def _continued_corpus(old: CorpusState, new: CorpusState, split: Split) -> CorpusState:
    if old.num_lanes == new.num_lanes:
        return replace(old, name=new.name)
    if not old.num_lanes:  # was paused: its rest was listed then
        return replace(old, name=new.name, num_lanes=new.num_lanes)
    plan = LanePlan(split.shard_tokens, old.cut(), seed=0, document_tokens=lambda shard: np.empty(0, np.int64))
    epoch, rest = plan.rest_of_epoch(old.position, old.skips)
    return replace(new, epoch=epoch, rest=rest)
