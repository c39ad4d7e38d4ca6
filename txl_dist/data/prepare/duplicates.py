"""Equal and nearly equal documents over all parts of a preparation.

Exact: two documents are equal if 128 bits of the sha256 of their texts are equal. Of equal documents one stays. A
held-out one comes before one of train, since train must not contain the text of an evaluation. Otherwise it is the
first of the input.

Near: one-permutation MinHash (Li, Owen, Zhang 2012) over runs of token ids. The hashes of a document's runs fall into
64 bins, and the smallest hash of each bin is kept. An empty bin borrows from the next one (Shrivastava, Li 2014). Eight
bands of eight bins become one number each. Two documents whose runs overlap by the share J (Jaccard) agree in a bin
with probability J, and share a band with probability 1 - (1 - J^8)^8:

    J     0.5    0.6    0.7    0.8    0.9    0.95
    p     0.03   0.13   0.38   0.77   0.99   1.00

The count is of documents that share a band with an earlier one that is not equal. What it gives up: the count is an
estimate. It misses about a quarter of pairs at J = 0.8, texts below `FEWEST_RUNS` runs, and a short text inside a long
one. It counts some pairs of J around 0.5, more of them where the texts are short. Nothing is dropped for it.

Memory is bounded by `_SLICE` entries: more are first spread over files by value, and each file is read alone.
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
"""Minimum number of runs of tokens that a document needs to be compared."""
_RUN_LEN = {"byte": 24, "char": 24}
"""Number of tokens in a run, by the kind of tokenizer, where tokens are shorter than words."""
_DEFAULT_RUN_LEN = 5
_BASE = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 1 << 15
"""Number of runs that are hashed at once."""
_SLICE = 1 << 23
"""Number of entries that are sorted in memory at once."""
_MAX_FILES = 256
_EMPTY = np.uint64(2**64 - 1)
_EXACT = np.dtype([("value", "<u8"), ("rest", "<u8"), ("ordinal", "<u8"), ("is_train", "<u8")])
_BAND = np.dtype([("value", "<u8"), ("ordinal", "<u8")])


class Equals(NamedTuple):
    """Documents that equal one which stays."""

    ordinals: UInt64s
    """Ordinals of these documents, ascending."""
    num_held_out: int
    """Number of them that are train documents and equal a held-out one."""


def band_keys(documents: Sequence[npt.NDArray[Any]], *, kind: str) -> UInt64s:
    """Hash each document's ids into bands: [documents, 8] one number per band, 0 for documents that are too short.

    `kind` of tokenizer sets the length of a run.
    """
    run_len = _RUN_LEN.get(kind, _DEFAULT_RUN_LEN)
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    smallest = _smallest_hashes(documents, lengths, run_len=run_len)
    _fill_empty_bins(smallest)
    bands = np.zeros((len(documents), NUM_BANDS), dtype=np.uint64)
    for row in range(NUM_ROWS):
        # The bins of a band are far apart, so that one borrowed value seldom fills several of its rows.
        columns = slice(row * NUM_BANDS, (row + 1) * NUM_BANDS)
        bands = hash64(bands ^ smallest[:, columns])
    band_numbers = np.arange(1, NUM_BANDS + 1, dtype=np.uint64)
    bands = hash64(bands ^ band_numbers)
    bands[lengths < FEWEST_RUNS + run_len - 1] = 0
    return bands


def _smallest_hashes(documents: Sequence[npt.NDArray[Any]], lengths: npt.NDArray[np.int64], *, run_len: int) -> UInt64s:
    """Return [documents, bins] the smallest hash of each document's runs in each bin, `_EMPTY` without one."""
    ids = np.concatenate([*documents, np.empty(0, np.int32)])
    owners = np.repeat(np.arange(len(documents), dtype=np.int32), lengths)
    num_bins = NUM_BANDS * NUM_ROWS
    smallest = np.full((len(documents), num_bins), _EMPTY)
    for begin in range(0, len(ids) - run_len + 1, _CHUNK):
        chunk = ids[begin : begin + _CHUNK + run_len - 1].astype(np.uint64) + np.uint64(1)
        count = len(chunk) - run_len + 1
        runs = _hash_runs(chunk, run_len=run_len)
        first_owner = owners[begin : begin + count]
        last_owner = owners[begin + run_len - 1 :][:count]
        bins = first_owner * num_bins + (runs >> np.uint64(58)).astype(np.int64)
        is_whole = first_owner == last_owner  # the run is in one document
        np.minimum.at(smallest.reshape(-1), bins[is_whole], runs[is_whole])
    return smallest


def _hash_runs(ids: UInt64s, *, run_len: int) -> UInt64s:
    """Hash each run of `run_len` ids: a polynomial in them modulo 2^64, then mixed."""
    count = len(ids) - run_len + 1
    runs = np.zeros(count, dtype=np.uint64)
    for place in reversed(range(run_len)):
        runs *= _BASE
        runs += ids[place : place + count]
    runs = (runs ^ (runs >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    runs = (runs ^ (runs >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return runs


def _fill_empty_bins(smallest: UInt64s) -> None:
    """Let each empty bin borrow from the next one, in place. The bins are a circle, so two rounds fill them all."""
    num_bins = smallest.shape[1]
    for _ in range(2):
        for column in reversed(range(num_bins)):
            following = smallest[:, (column + 1) % num_bins]
            is_filled = (smallest[:, column] == _EMPTY) & (following != _EMPTY)
            smallest[is_filled, column] = hash64(following[is_filled])


def find_equal(tables: Iterable[tuple[npt.NDArray[Any], bool]], *, count: int, folder: Path) -> Equals:
    """Find equal documents in tables (records of a part, whether it is of train) with `count` records in all."""

    def entries() -> Iterator[npt.NDArray[Any]]:
        for records, is_train in tables:
            table = np.empty(len(records), dtype=_EXACT)
            table["value"] = records["digest"][:, 0]
            table["rest"] = records["digest"][:, 1]
            table["ordinal"] = records["ordinal"]
            table["is_train"] = is_train
            yield table

    ordinals = [np.empty(0, np.uint64)]
    num_held_out = 0
    for part in _sliced(entries(), count=count, folder=folder):
        if not len(part):
            continue
        order = np.lexsort((part["ordinal"], part["is_train"], part["rest"], part["value"]))
        table = part[order]
        is_equal = (table["value"][1:] == table["value"][:-1]) & (table["rest"][1:] == table["rest"][:-1])
        begins = np.concatenate([[True], ~is_equal])
        kept = np.flatnonzero(begins)[np.cumsum(begins) - 1]  # [documents] the equal one that stays
        is_leak = (table["is_train"] == 1) & (table["is_train"][kept] == 0)
        num_held_out += int(is_leak.sum())
        ordinals.append(table["ordinal"][1:][is_equal])
    return Equals(np.sort(np.concatenate(ordinals)), num_held_out)


def count_near(tables: Iterable[tuple[npt.NDArray[Any], UInt64s]], equal: Equals, *, count: int, folder: Path) -> int:
    """Count documents that share a band with an earlier one, in tables (records, bands) with `count` records in all.

    Those in `equal` are left out.
    """

    def entries() -> Iterator[npt.NDArray[Any]]:
        for records, bands in tables:
            is_used = (bands[:, 0] != 0) & ~contains(equal.ordinals, records["ordinal"])
            table = np.empty(int(is_used.sum()) * NUM_BANDS, dtype=_BAND)
            table["value"] = bands[is_used].ravel()
            table["ordinal"] = np.repeat(records["ordinal"][is_used], NUM_BANDS)
            yield table

    near = np.empty(0, np.uint64)
    for part in _sliced(entries(), count=count * NUM_BANDS, folder=folder):
        table = part[np.lexsort((part["ordinal"], part["value"]))]
        is_shared = table["value"][1:] == table["value"][:-1]
        near = np.union1d(near, table["ordinal"][1:][is_shared])
    return len(near)


def contains(ordinals: UInt64s, wanted: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return for each of `wanted` whether it is among the ascending `ordinals`."""
    if not len(ordinals):
        return np.zeros(len(wanted), dtype=bool)
    places = np.minimum(np.searchsorted(ordinals, wanted), len(ordinals) - 1)
    is_among: npt.NDArray[np.bool_] = ordinals[places] == wanted
    return is_among


def _sliced(entries: Iterable[npt.NDArray[Any]], *, count: int, folder: Path) -> Iterator[npt.NDArray[Any]]:
    """Yield all entries in a few arrays; entries of one value are in one array."""
    num_files = min(-(-count // _SLICE), _MAX_FILES)
    if num_files <= 1:
        yield np.concatenate(list(entries))
        return
    paths = [folder / f"slice-{number:03d}" for number in range(num_files)]
    with ExitStack() as stack:
        files = [stack.enter_context(open_new(path)) for path in paths]
        for table in entries:
            high_bits = table["value"] >> np.uint64(32)
            numbers = high_bits * np.uint64(num_files) >> np.uint64(32)
            order = np.argsort(numbers, kind="stable")
            borders = np.searchsorted(numbers[order], np.arange(1, num_files))
            for file, piece in zip(files, np.split(table[order], borders), strict=True):
                file.write(piece.tobytes())
    for path in paths:
        yield np.fromfile(path, dtype=table.dtype)
        path.unlink()
