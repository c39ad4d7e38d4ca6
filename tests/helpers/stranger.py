"""A reader of corpora and of a training's lanes, written only from docs/corpus-format.md, section "Specification".

It uses numpy, json, tarfile and hashlib, but nothing of the package. It is written to be checked by reading, not to be
fast. Whole epochs are joined in memory, and the token of a lane (batch row) at a position is looked up in them. The
page describes two ways to the tokens, the records and the members of the tar. Both are used and must agree.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

MASK = 2**64 - 1


def hash64(*keys: int) -> int:
    value = 0x9E3779B97F4A7C15
    for key in keys:
        value = ((value ^ (key & MASK)) + 0x9E3779B97F4A7C15) & MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
        value = value ^ (value >> 31)
    return value


def order(count: int, *keys: int) -> list[int]:
    return sorted(range(count), key=lambda number: (hash64(*keys, number), number))


def stream_seed(run_seed: int) -> int:
    text = f"{run_seed}\x1fdocuments"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class StrangersSplit:
    """The documents of a split, shard by shard in the order of the file."""

    def __init__(self, folder: Path, split: str) -> None:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        assert index["format_version"] == 2
        rest = {key: value for key, value in index.items() if key != "self_sha256"}
        canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        self.fingerprint = hashlib.sha256(canonical.encode()).hexdigest()
        assert self.fingerprint == index["self_sha256"]
        self.name, self.split = folder.name, split
        self._vocab_size, self._dtype = index["vocab_size"], np.dtype(index["dtype"]).newbyteorder("<")
        self._end_of_text = index["end_of_text"]
        self.shards: list[list[np.ndarray]] = []
        number = 0
        for shard in index["splits"][split]["shards"]:
            self.shards.append(self._documents(folder, shard, first=number))
            number += shard["documents"]
        self.num_tokens = sum(len(document) for documents in self.shards for document in documents)
        assert (number, self.num_tokens) == tuple(index["splits"][split][key] for key in ("documents", "tokens"))
        self._epochs: dict[tuple[int, int], np.ndarray] = {}

    def _documents(self, folder: Path, shard: dict[str, Any], *, first: int) -> list[np.ndarray]:
        tar, records = (folder / shard["name"]).read_bytes(), (folder / f"{shard['name']}.idx").read_bytes()
        assert len(tar) == shard["bytes"]
        assert hashlib.sha256(tar).hexdigest() == shard["sha256"]
        assert hashlib.sha256(records).hexdigest() == shard["idx_sha256"]
        documents = []
        for begin in range(0, len(records), 16):
            offset = int.from_bytes(records[begin : begin + 8], "little")
            num_tokens = int.from_bytes(records[begin + 8 : begin + 12], "little")
            raw = tar[offset : offset + num_tokens * self._dtype.itemsize]
            assert zlib.crc32(raw) == int.from_bytes(records[begin + 12 : begin + 16], "little")
            document = np.frombuffer(raw, dtype=self._dtype)
            assert len(document) == num_tokens > 0
            assert int(document.max()) < self._vocab_size
            assert self._end_of_text is None or document[-1] == self._end_of_text
            documents.append(document)
        assert (len(documents), sum(map(len, documents))) == (shard["documents"], shard["tokens"])
        in_tar = self._members(tar, first=first)
        assert len(in_tar) == len(documents)
        assert all(np.array_equal(a, b) for a, b in zip(in_tar, documents, strict=True))
        return documents

    @staticmethod
    def _members(tar: bytes, *, first: int) -> list[np.ndarray]:
        with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
            arrays = {
                member.name: np.load(io.BytesIO(archive.extractfile(member).read()), allow_pickle=False)
                for member in archive
            }
        documents: list[np.ndarray] = []
        for name, tokens in arrays.items():
            if name.endswith(".docs.npy"):
                continue
            key = name.removesuffix(".npy")
            assert key == f"{first + len(documents):09d}"
            starts = arrays.get(f"{key}.docs.npy", np.zeros(1, np.uint32)).tolist()
            documents += [tokens[a:b] for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]
        return documents

    def epoch(self, number: int, *, seed: int) -> np.ndarray:
        """Return all tokens of an epoch in its order."""
        if (number, seed) not in self._epochs:
            parts = [
                self.shards[shard][document]
                for shard in order(len(self.shards), seed, number, 1)
                for document in order(len(self.shards[shard]), seed, number, 2, shard)
            ]
            self._epochs[number, seed] = np.concatenate(parts)
        return self._epochs[number, seed]


@dataclass
class StrangersCorpus:
    """A corpus of a run: the partition into lanes, and their position."""

    data: StrangersSplit
    seed: int
    num_lanes: int
    position: int = 0
    epoch: int = 0
    unread: list[tuple[int, int]] = field(default_factory=list)
    """Ranges [first, end) of unread tokens of the epoch. An empty list means the whole epoch."""
    skips: list[tuple[int, int]] = field(default_factory=list)

    @property
    def _rest_ranges(self) -> list[tuple[int, int]]:
        return self.unread or [(0, self.data.num_tokens)]

    @cached_property
    def _rest_numbers(self) -> np.ndarray:
        """Number in the epoch of each unread token."""
        return np.concatenate([np.arange(first, end) for first, end in self._rest_ranges])

    @property
    def _rest_stripe(self) -> int:
        return len(self._rest_numbers) // self.num_lanes

    @property
    def _stripe(self) -> int:
        return self.data.num_tokens // self.num_lanes

    def token(self, lane: int, position: int) -> int:
        rest_stripe = self._rest_stripe
        if position < rest_stripe:
            number = self._rest_numbers[lane * rest_stripe + position]
            return int(self.data.epoch(self.epoch, seed=self.seed)[number])
        epochs, inside = divmod(position - rest_stripe, self._stripe)
        return int(self.data.epoch(self.epoch + 1 + epochs, seed=self.seed)[lane * self._stripe + inside])

    def is_skipped(self, position: int) -> bool:
        return any(first <= position < end for first, end in self.skips)

    def next_positions(self, count: int) -> list[int]:
        positions: list[int] = []
        position = self.position
        while len(positions) < count:
            if not self.is_skipped(position):
                positions.append(position)
            position += 1
        return positions

    def cut_anew(self, num_lanes: int) -> StrangersCorpus:
        if num_lanes == self.num_lanes:
            return self
        if not self.num_lanes:  # was paused
            return StrangersCorpus(self.data, self.seed, num_lanes, epoch=self.epoch, unread=self.unread)
        if self.position < self._rest_stripe:
            epoch, begin, stripe, numbers = self.epoch, 0, self._rest_stripe, self._rest_numbers
        else:
            epochs, _ = divmod(self.position - self._rest_stripe, self._stripe)
            epoch, begin, stripe = self.epoch + 1 + epochs, self._rest_stripe + epochs * self._stripe, self._stripe
            numbers = np.arange(self.data.num_tokens)
        unread = [
            number
            for place, number in enumerate(numbers.tolist())
            if place >= self.num_lanes * stripe  # left over at the end
            or (begin + place % stripe >= self.position and not self.is_skipped(begin + place % stripe))
        ]
        ranges: list[tuple[int, int]] = []
        for number in unread:
            if ranges and ranges[-1][1] == number:
                ranges[-1] = ranges[-1][0], number + 1
            else:
                ranges.append((number, number + 1))
        whole = [(0, self.data.num_tokens)]
        return StrangersCorpus(self.data, self.seed, num_lanes, epoch=epoch, unread=[] if ranges == whole else ranges)


def lanes_of_corpora(num_lanes: int, weights: Sequence[float]) -> list[int]:
    total = math.fsum(weights)
    shares = [weight / total * num_lanes for weight in weights]
    lanes = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda corpus: (-(shares[corpus] - lanes[corpus]), corpus))
    for corpus in by_remainder[: num_lanes - sum(lanes)]:
        lanes[corpus] += 1
    return lanes


def ranges_of(text: str) -> list[tuple[int, int]]:
    numbers, ranges, end = [int(word) for word in text.split()], [], 0
    for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
        ranges.append((end + gap, end + gap + length))
        end += gap + length
    return ranges


class StrangersRun:
    """All lanes of a training run."""

    def __init__(self, splits: Sequence[StrangersSplit], *, run_seed: int) -> None:
        self.splits, self.seed = splits, stream_seed(run_seed)
        self.corpora = [StrangersCorpus(split, self.seed, 0) for split in splits]

    def go_on(self, *, num_lanes: int, weights: Sequence[float] = ()) -> None:
        """Begin or resume with these settings."""
        lanes = lanes_of_corpora(num_lanes, weights or [split.num_tokens for split in self.splits])
        self.corpora = [corpus.cut_anew(count) for corpus, count in zip(self.corpora, lanes, strict=True)]

    def load(self, stream: dict[str, Any]) -> None:
        """Load the `stream` of a checkpoint's state.json."""
        assert stream["version"] == 3
        self.seed = stream["seed"]
        self.corpora = []
        for split, values in zip(self.splits, stream["corpora"], strict=True):
            assert (values["fingerprint"], values["split"]) == (split.fingerprint, split.split)
            ranges = {key: ranges_of(values[key]) for key in ("unread", "skips")}
            place = {key: values[key] for key in ("num_lanes", "position", "epoch")}
            self.corpora.append(StrangersCorpus(split, self.seed, **place, **ranges))

    def rows(self, segment_len: int) -> np.ndarray:
        """Return the tokens of the next step, [lanes, T+1], and move to the step after it."""
        in_order = [number for number, corpus in enumerate(self.corpora) for _ in range(corpus.num_lanes)]
        owners = [in_order[place] for place in order(len(in_order), self.seed, 0, 3)]
        positions = [corpus.next_positions(segment_len + 1) for corpus in self.corpora]
        rows, num_seen = [], [0] * len(self.corpora)
        for owner in owners:
            lane, corpus = num_seen[owner], self.corpora[owner]
            rows.append([corpus.token(lane, position) for position in positions[owner]])
            num_seen[owner] += 1
        for corpus, own in zip(self.corpora, positions, strict=True):
            if corpus.num_lanes:
                corpus.position = own[-1]
        return np.array(rows)
