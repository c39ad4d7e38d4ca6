"""Documents that are equal, and documents that are nearly equal, over all parts of a preparation.

Exact: the same 128 bits of sha256 over the text. Of equal documents one stays: a held-out one before one of train
(train must not contain what is measured), otherwise the first of the input.

Near: one-permutation MinHash (Li, Owen, Zhang 2012) over runs of token ids. The hashes of a document's runs fall
into 64 bins, the smallest of each bin is kept, an empty bin borrows from the next one (Shrivastava, Li 2014), and
8 bands of 8 bins become one number each. Two documents whose runs overlap by the share J (Jaccard) agree in a bin
with probability J, and share a band with probability 1 - (1 - J^8)^8:

    J     0.5    0.6    0.7    0.8    0.9    0.95
    p     0.03   0.13   0.38   0.77   0.99   1.00

What is counted is the documents that share a band with an earlier one that is not equal. So the count is an estimate:
it misses about a quarter of pairs at J = 0.8, texts below `FEWEST_RUNS` runs, and a short text inside a long one; it
counts some pairs of J around 0.5, more of them where the texts are short. Nothing is dropped for it.

Memory is bounded by `_SLICE` entries: more are spread over files by value first, and looked at file by file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.data.loader.lanes import hash64
from txl_dist.io.files import open_new

UInt64s = npt.NDArray[np.uint64]

NUM_BANDS = NUM_ROWS = 8
FEWEST_RUNS = 16
"""Runs of tokens that a document needs to be compared."""
_RUN_LEN = {"byte": 24, "char": 24}
"""Tokens in a run where they are shorter than words."""
_DEFAULT_RUN_LEN = 5
_BASE = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 1 << 15
_SLICE = 1 << 23
_MOST_FILES = 256
_EMPTY = np.uint64(2**64 - 1)
_EXACT = np.dtype([("value", "<u8"), ("rest", "<u8"), ("ordinal", "<u8"), ("is_train", "<u8")])
_BAND = np.dtype([("value", "<u8"), ("ordinal", "<u8")])


class Equals(NamedTuple):
    """The documents that equal one which stays."""

    ordinals: UInt64s
    """Of all of them, ascending."""
    num_held_out: int
    """How many of them are train documents that equal a held-out one."""


def band_keys(documents: Sequence[npt.NDArray[Any]], *, kind: str) -> UInt64s:
    """[documents, 8] one number per band, given the ids of each document; 0 for documents that are too short."""
    run_len = _RUN_LEN.get(kind, _DEFAULT_RUN_LEN)
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    ids = np.concatenate([*documents, np.empty(0, np.int32)])
    owners = np.repeat(np.arange(len(documents), dtype=np.int32), lengths)
    smallest = np.full((len(documents), NUM_BANDS * NUM_ROWS), _EMPTY)
    bands = np.zeros((len(documents), NUM_BANDS), dtype=np.uint64)
    for begin in range(0, len(ids) - run_len + 1, _CHUNK):
        own = ids[begin : begin + _CHUNK + run_len - 1].astype(np.uint64) + np.uint64(1)
        count = len(own) - run_len + 1
        runs = np.zeros(count, dtype=np.uint64)  # of each run a polynomial in its ids modulo 2^64, then mixed
        for place in reversed(range(run_len)):
            runs *= _BASE
            runs += own[place : place + count]
        runs = (runs ^ (runs >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
        runs = (runs ^ (runs >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        first, last = owners[begin : begin + count], owners[begin + run_len - 1 :][:count]
        bins = first * smallest.shape[1] + (runs >> np.uint64(58)).astype(np.int64)
        is_whole = first == last  # a run of one document
        np.minimum.at(smallest.reshape(-1), bins[is_whole], runs[is_whole])
    for column in [*range(smallest.shape[1] - 1, -1, -1)] * 2:  # an empty bin borrows from the next one, going round
        following = smallest[:, (column + 1) % smallest.shape[1]]
        is_filled = (smallest[:, column] == _EMPTY) & (following != _EMPTY)
        smallest[is_filled, column] = hash64(following[is_filled])
    for row in range(NUM_ROWS):
        # The bins of a band lie far apart, so that one borrowed value seldom fills several of its rows.
        bands = hash64(bands ^ smallest[:, row * NUM_BANDS : (row + 1) * NUM_BANDS])
    bands = hash64(bands ^ np.arange(1, NUM_BANDS + 1, dtype=np.uint64))
    bands[lengths < FEWEST_RUNS + run_len - 1] = 0
    return bands


def find_equal(tables: Iterable[tuple[npt.NDArray[Any], bool]], *, count: int, folder: Path) -> Equals:
    """Equal documents in (records of a part, whether it is of train) tables with `count` records in all."""

    def entries() -> Iterator[npt.NDArray[Any]]:
        for records, is_train in tables:
            own = np.empty(len(records), dtype=_EXACT)
            own["value"], own["rest"] = records["digest"][:, 0], records["digest"][:, 1]
            own["ordinal"], own["is_train"] = records["ordinal"], is_train
            yield own

    found, num_held_out = [np.empty(0, np.uint64)], 0
    for own in _sliced(entries(), count=count, folder=folder):
        if not len(own):
            continue
        own = own[np.lexsort((own["ordinal"], own["is_train"], own["rest"], own["value"]))]
        is_equal = (own["value"][1:] == own["value"][:-1]) & (own["rest"][1:] == own["rest"][:-1])
        begins = np.concatenate([[True], ~is_equal])
        first = np.flatnonzero(begins)[np.cumsum(begins) - 1]  # of each document the one that stays
        num_held_out += int(((own["is_train"] == 1) & (own["is_train"][first] == 0)).sum())
        found.append(own["ordinal"][1:][is_equal])
    return Equals(np.sort(np.concatenate(found)), num_held_out)


def count_near(tables: Iterable[tuple[npt.NDArray[Any], UInt64s]], equal: Equals, *, count: int, folder: Path) -> int:
    """Documents that share a band with an earlier one, in (records, bands) tables with `count` records in all.

    Those in `equal` are left out.
    """

    def entries() -> Iterator[npt.NDArray[Any]]:
        for records, bands in tables:
            is_used = (bands[:, 0] != 0) & ~contains(equal.ordinals, records["ordinal"])
            own = np.empty(int(is_used.sum()) * NUM_BANDS, dtype=_BAND)
            own["value"], own["ordinal"] = bands[is_used].ravel(), np.repeat(records["ordinal"][is_used], NUM_BANDS)
            yield own

    near = np.empty(0, np.uint64)
    for own in _sliced(entries(), count=count * NUM_BANDS, folder=folder):
        own = own[np.lexsort((own["ordinal"], own["value"]))]
        is_shared = own["value"][1:] == own["value"][:-1]
        near = np.union1d(near, own["ordinal"][1:][is_shared])
    return len(near)


def contains(ordinals: UInt64s, wanted: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """For each of `wanted` whether it is among the ascending `ordinals`."""
    if not len(ordinals):
        return np.zeros(len(wanted), dtype=bool)
    places = np.minimum(np.searchsorted(ordinals, wanted), len(ordinals) - 1)
    found: npt.NDArray[np.bool_] = ordinals[places] == wanted
    return found


def _sliced(entries: Iterable[npt.NDArray[Any]], *, count: int, folder: Path) -> Iterator[npt.NDArray[Any]]:
    """All entries in a few arrays; those of one value are in one array."""
    num_files = min(-(-count // _SLICE), _MOST_FILES)
    if num_files <= 1:
        yield np.concatenate(list(entries))
        return
    paths = [folder / f"slice-{number:03d}" for number in range(num_files)]
    with ExitStack() as stack:
        files = [stack.enter_context(open_new(path)) for path in paths]
        for own in entries:
            numbers = (own["value"] >> np.uint64(32)) * np.uint64(num_files) >> np.uint64(32)
            order = np.argsort(numbers, kind="stable")
            borders = np.searchsorted(numbers[order], np.arange(1, num_files))
            for file, piece in zip(files, np.split(own[order], borders), strict=True):
                file.write(piece.tobytes())
    for path in paths:
        yield np.fromfile(path, dtype=own.dtype)
        path.unlink()
