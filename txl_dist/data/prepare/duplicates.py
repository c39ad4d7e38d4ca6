"""Search for exact duplicates among all documents of a preparation, and estimate of the number of near duplicates.

Exact: two documents are equal if the first 128 bits of the sha256 of their texts are equal. One document of each group
of equal documents is kept. A document of the validation or test split is kept rather than a train document, because
train must not contain evaluation text. Otherwise the document that comes first in the inputs is kept.

Near: one-permutation MinHash (Li, Owen, Zhang 2012) over runs, which are sequences of consecutive token ids. The hashes
of a document's runs fall into 64 bins, and the smallest hash of each bin is kept. An empty bin takes a value from the
next bin (Shrivastava, Li 2014). The bins form eight bands of eight bins, and each band is hashed into one number. Two
documents whose runs overlap by the share J (Jaccard) agree in a bin with probability J. They agree in at least one band
with probability p = 1 - (1 - J^8)^8:

    J     0.5    0.6    0.7    0.8    0.9    0.95
    p     0.03   0.13   0.38   0.77   0.99   1.00

A near duplicate is a document that agrees in a band with an earlier document and is not an exact duplicate.

Limitations: the number of near duplicates is an estimate. It misses about a quarter of the pairs at J = 0.8, texts with
fewer than `FEWEST_RUNS` runs, and a short text inside a long text. It includes some pairs at J around 0.5, mostly short
texts. These near duplicates are counted but never dropped. `--near-duplicates drop` uses near_duplicates.py instead.
The estimate stays the default, because its result is part of the index, and so of the data fingerprint that checkpoints
record. With another estimate, a corpus that is prepared again would be another corpus.

Host memory holds about `_SLICE` entries at once. If there are more entries, they are first divided into files by value,
and then one file is read at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.data.loader.lanes import hash64
from txl_dist.io.files import open_new

UInt64s = npt.NDArray[np.uint64]

NUM_BANDS = 8
NUM_ROWS = 8
"""Number of bins in a band. Documents that agree in all bins of a band are near duplicates."""
FEWEST_RUNS = 16
"""Minimum number of runs (sequences of consecutive token ids) in a document. A shorter document is not compared with
others for near duplicates."""
_NUM_BINS = NUM_BANDS * NUM_ROWS
_RUN_LEN = {"byte": 24, "char": 24}
"""Number of tokens in a run (sequence of token ids that is hashed), for each kind of tokenizer whose tokens are single
bytes or characters."""
_DEFAULT_RUN_LEN = 5
"""Number of tokens in a run (sequence of token ids that is hashed) for all other kinds of tokenizers."""
_BASE = np.uint64(0x9E3779B97F4A7C15)
"""Base of the polynomial hash of a run (sequence of token ids)."""
_MIXERS = (
    (np.uint64(32), np.uint64(0x94D049BB133111EB)),
    (np.uint64(29), np.uint64(0xBF58476D1CE4E5B9)),
)
"""Shift and factor of each round that mixes the hash of a run."""
_TO_BIN = np.uint64(58)
"""Shift that leaves the highest 6 bits of a hash, the number of its bin."""
_HALF_BITS = np.uint64(32)
"""Half the number of bits of a hash."""
_CHUNK = 1 << 15
"""Number of runs (sequences of token ids) that are hashed at once, to bound host memory."""
_SLICE = 1 << 23
"""Approximate number of entries (one per document, or one per band of a document) that are sorted in host memory at
once."""
_MAX_FILES = 256
"""Maximum number of temporary files."""
_EMPTY = np.uint64(2**64 - 1)
"""Value of a bin into which no hash of a document fell."""
_EXACT = np.dtype([("value", "<u8"), ("rest", "<u8"), ("ordinal", "<u8"), ("is_train", "<u8")])
"""Entry of one document in the search for exact duplicates: the two halves of its digest, its ordinal, and whether it
is a train document."""
_BAND = np.dtype([("value", "<u8"), ("ordinal", "<u8")])
"""Entry of one band of a document in the search for near duplicates: the hash of the band, and the document's
ordinal."""


class Duplicates(NamedTuple):
    """Documents that are equal to another document, which is kept, or near such a document."""

    ordinals: UInt64s
    """Ordinals of the duplicates, ascending. The documents that are kept are not included."""
    num_held_out: int
    """Number of the documents in `ordinals` that are train documents, and duplicates of a validation or test
    document."""


def run_len_of(kind: str) -> int:
    """Return the number of token ids in a run, for a kind of tokenizer."""
    return _RUN_LEN.get(kind, _DEFAULT_RUN_LEN)


def band_keys(documents: Sequence[npt.NDArray[Any]], *, kind: str) -> UInt64s:
    """Return the numbers by which near duplicates are found, one for each of the eight bands of each document.

    Shape [documents, 8]. A document that is too short to compare has zeros. `kind` is the kind of tokenizer, which sets
    the length of a run.
    """
    run_len = run_len_of(kind)
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    smallest = _smallest_hashes(documents, run_len=run_len)
    _fill_empty_bins(smallest)
    bands = np.zeros((len(documents), NUM_BANDS), dtype=np.uint64)
    for row in range(NUM_ROWS):
        # The bins of a band are far apart, so that one value seldom fills several empty bins of the same band.
        first_bin = row * NUM_BANDS
        bins = smallest[:, first_bin : first_bin + NUM_BANDS]
        bands = hash64(bands ^ bins)
    band_numbers = np.arange(1, NUM_BANDS + 1, dtype=np.uint64)
    bands = hash64(bands ^ band_numbers)
    shortest_len = FEWEST_RUNS + run_len - 1
    is_too_short = lengths < shortest_len
    bands[is_too_short] = 0
    return bands


def _smallest_hashes(documents: Sequence[npt.NDArray[Any]], *, run_len: int) -> UInt64s:
    """Return the smallest hash of each document's runs in each bin, or `_EMPTY` for a bin without a run.

    Shape [documents, bins].
    """
    smallest = np.full((len(documents), _NUM_BINS), _EMPTY)
    flat = smallest.reshape(-1)
    for owners, runs in hashed_runs(documents, run_len=run_len, chunk=_CHUNK):
        bin_in_document = (runs >> _TO_BIN).astype(np.int64)
        bins = owners * _NUM_BINS + bin_in_document
        np.minimum.at(flat, bins, runs)
    return smallest


def hashed_runs(
    documents: Sequence[npt.NDArray[Any]], *, run_len: int, chunk: int
) -> Iterator[tuple[npt.NDArray[np.int32], UInt64s]]:
    """Yield (the number of each run's document, the hash of each run) for all runs, at most `chunk` runs at a time.

    A run is a sequence of `run_len` consecutive token ids of one document. Documents come in order.
    """
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    no_ids = np.empty(0, np.int32)
    ids = np.concatenate([*documents, no_ids])
    document_numbers = np.arange(len(documents), dtype=np.int32)
    # [ids] the document of each id
    owners = np.repeat(document_numbers, lengths)
    num_runs = len(ids) - run_len + 1
    for begin in range(0, num_runs, chunk):
        end = min(begin + chunk, num_runs)
        last_begin = begin + run_len - 1
        last_end = end + run_len - 1
        runs = _hash_runs(ids[begin:last_end], run_len=run_len)
        # A run counts if its first and its last id are in one document.
        first_owner = owners[begin:end]
        last_owner = owners[last_begin:last_end]
        is_whole = first_owner == last_owner
        yield first_owner[is_whole], runs[is_whole]


def _hash_runs(ids: npt.NDArray[Any], *, run_len: int) -> UInt64s:
    """Return the hash of each run of `run_len` consecutive ids: a polynomial in (id + 1) modulo 2^64, with mixed
    bits."""
    digits = ids.astype(np.uint64) + np.uint64(1)
    count = len(ids) - run_len + 1
    runs = np.zeros(count, dtype=np.uint64)
    for place in reversed(range(run_len)):
        runs *= _BASE
        runs += digits[place : place + count]
    for shift, factor in _MIXERS:
        runs ^= runs >> shift
        runs *= factor
    return runs


def _fill_empty_bins(smallest: UInt64s) -> None:
    """Fill each empty bin in place with a hash of the value of the next bin.

    The first bin follows the last bin, so two passes fill all bins of a document that has any run.
    """
    num_bins = smallest.shape[1]
    for _ in range(2):
        for column in reversed(range(num_bins)):
            next_column = (column + 1) % num_bins
            following = smallest[:, next_column]
            is_empty = smallest[:, column] == _EMPTY
            has_lender = following != _EMPTY
            borrows = is_empty & has_lender
            smallest[borrows, column] = hash64(following[borrows])


def find_equal(tables: Iterable[tuple[npt.NDArray[Any], bool]], *, count: int, folder: Path) -> Duplicates:
    """Find the documents that are equal to another document, which is kept.

    `tables` yields pairs (records of documents, whether these are train documents). `count` is the number of records in
    all tables. Temporary files are written to `folder`.
    """
    ordinals = [np.empty(0, np.uint64)]
    num_held_out = 0
    for part in _sliced(_exact_entries(tables), count=count, folder=folder):
        if not len(part):
            continue
        # lexsort takes the most important key last
        order = np.lexsort((part["ordinal"], part["is_train"], part["rest"], part["value"]))
        table = part[order]
        has_equal_value = equals_previous(table["value"])
        has_equal_rest = equals_previous(table["rest"])
        is_equal = has_equal_value & has_equal_rest
        stays = ~is_equal
        is_train = table["is_train"] == 1
        # Each group of equal documents begins with the document that is kept.
        group_of_row = np.cumsum(stays) - 1
        first_rows = np.flatnonzero(stays)
        stays_in_train = is_train[first_rows]
        is_leak = is_train & ~stays_in_train[group_of_row]
        num_held_out += int(is_leak.sum())
        ordinals.append(table["ordinal"][is_equal])
    all_ordinals = np.concatenate(ordinals)
    return Duplicates(np.sort(all_ordinals), num_held_out)


def _exact_entries(tables: Iterable[tuple[npt.NDArray[Any], bool]]) -> Iterator[npt.NDArray[Any]]:
    """Yield a table of `_EXACT` entries for each table of document records."""
    for records, is_train in tables:
        table = np.empty(len(records), dtype=_EXACT)
        table["value"] = records["digest"][:, 0]
        table["rest"] = records["digest"][:, 1]
        table["ordinal"] = records["ordinal"]
        table["is_train"] = is_train
        yield table


def equals_previous(values: UInt64s) -> npt.NDArray[np.bool_]:
    """Return for each value whether it is equal to the value before it. The result for the first value is False."""
    is_equal = np.zeros(len(values), dtype=bool)
    is_equal[1:] = values[1:] == values[:-1]
    return is_equal


def count_near(
    tables: Iterable[tuple[npt.NDArray[Any], UInt64s]], equal: Duplicates, *, count: int, folder: Path
) -> int:
    """Count the documents that agree in a band with an earlier document. Exact duplicates in `equal` are left out.

    `tables` yields pairs (records of documents, bands of these documents). `count` is the number of records in all
    tables. Temporary files are written to `folder`.
    """
    near = np.empty(0, np.uint64)
    entries = _band_entries(tables, equal)
    for part in _sliced(entries, count=count * NUM_BANDS, folder=folder):
        order = np.lexsort((part["ordinal"], part["value"]))
        table = part[order]
        is_shared = equals_previous(table["value"])
        near = np.union1d(near, table["ordinal"][is_shared])
    return len(near)


def _band_entries(tables: Iterable[tuple[npt.NDArray[Any], UInt64s]], equal: Duplicates) -> Iterator[npt.NDArray[Any]]:
    """Yield a table of `_BAND` entries for each table of document records: one entry per band of each compared
    document."""
    for records, bands in tables:
        is_long_enough = bands[:, 0] != 0
        is_dropped = contains(equal.ordinals, records["ordinal"])
        is_compared = is_long_enough & ~is_dropped
        ordinals = records["ordinal"][is_compared]
        table = np.empty(len(ordinals) * NUM_BANDS, dtype=_BAND)
        table["value"] = bands[is_compared].ravel()
        table["ordinal"] = np.repeat(ordinals, NUM_BANDS)
        yield table


def contains(ordinals: UInt64s, wanted: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return for each ordinal in `wanted` whether it is in `ordinals`, which are ascending."""
    if not len(ordinals):
        return np.zeros(len(wanted), dtype=bool)
    last = len(ordinals) - 1
    places = ordinals.searchsorted(wanted)
    places = np.minimum(places, last)
    is_among: npt.NDArray[np.bool_] = ordinals[places] == wanted
    return is_among


def _sliced(entries: Iterable[npt.NDArray[Any]], *, count: int, folder: Path) -> Iterator[npt.NDArray[Any]]:
    """Yield all `count` entries in arrays that are small enough to be sorted in host memory.

    Entries with equal `value` are in the same array. Temporary files are written to `folder`.
    """
    num_files = min(math.ceil(count / _SLICE), _MAX_FILES)
    if num_files <= 1:
        yield np.concatenate(list(entries))
        return
    paths = [folder / f"slice-{number:03d}" for number in range(num_files)]
    later_files = np.arange(1, num_files)
    with ExitStack() as stack:
        files = [stack.enter_context(open_new(path)) for path in paths]
        for table in entries:
            high_bits = table["value"] >> _HALF_BITS
            scaled = high_bits * np.uint64(num_files)
            file_numbers = scaled >> _HALF_BITS
            order = np.argsort(file_numbers, kind="stable")
            sorted_numbers = file_numbers[order]
            borders = np.searchsorted(sorted_numbers, later_files)
            pieces = np.split(table[order], borders)
            for file, piece in zip(files, pieces, strict=True):
                file.write(piece.tobytes())
    for path in paths:
        yield np.fromfile(path, dtype=table.dtype)
        path.unlink()
