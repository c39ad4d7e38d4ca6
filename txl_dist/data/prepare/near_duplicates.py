"""Search for near duplicates among all documents of a preparation: `--near-duplicates report` and `drop`.

    encode    workers write each document's signature and bands, the bands of a part sorted by value    minhash.py
    compare   workers: one slice of the band values each, over all parts; similar documents become links
    join      the main process joins linked documents to clusters; the first document of each cluster stays

A link joins two documents that agree in a band, and whose signatures agree in the share of hashes that the threshold
gives. A cluster is a connected component of links. The first document of a cluster is its first document of the
validation or test split, or else its first train document. So a train document is never kept instead of a held-out one.
Exact duplicates take no part.

Workers hold one slice of the bands in host memory. Signatures, bands, links and clusters are files in the work folder,
which are mapped into memory. After a kill, the same command keeps the finished slices.

Limitations: where more than `_FARTHEST` documents agree in a band, each is compared with the next `_FARTHEST` of them
only. All entries with one band value are in one slice, whatever its size.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.console.progress import Progress
from txl_dist.data.prepare.documents import SPLITS, TRAIN
from txl_dist.data.prepare.duplicates import Duplicates, contains, equals_previous
from txl_dist.data.prepare.minhash import BAND_ENTRY, NUM_HASHES, Signatures, rows_of_bands
from txl_dist.data.prepare.tokenize import PartInfo, band_entries_of, records_of, signatures_of
from txl_dist.data.workers import Workers
from txl_dist.io.files import atomic_replace, open_new, write_bytes

Int64s = npt.NDArray[np.int64]

_SLICE = 1 << 22
"""Approximate number of entries (one per band of a document) that a worker holds in host memory."""
_CHUNK = 1 << 15
"""Number of entries whose signatures a worker holds in host memory."""
_FARTHEST = 128
"""Maximum distance of two documents that are compared, in the order of the documents that agree in a band."""
_EQUAL = "equal.u64"
"""Name of the file with the ordinals of exact duplicates, which take no part in the search."""
_PARENTS = "near-parents.i64"
"""Name of the file that joins documents to clusters, see `join`."""
_PLACED = np.dtype([("value", "<u8"), ("rank", "<i8"), ("part", "<u4"), ("row", "<u4")])
"""Entry of one band of a document: the hash of the band, the document's rank, its part in `SliceTask.parts`, and its
row in this part. The rank orders documents: the documents of validation and test come first, each in input order."""


class SliceTask(NamedTuple):
    """Task of a worker: find the links of one slice of the band values."""

    scratch: str
    """Work folder, which contains the parts."""
    name: str
    """Name of the file for the links. A finished file is not written again."""
    values: tuple[int, int]
    """First and last band value of the slice."""
    parts: tuple[tuple[int, str], ...]
    """Number and split of each piece of a part."""
    num_ordinals: int
    """A number above all ordinals. The rank of a train document is its ordinal plus this number."""
    least_equal: int
    """Minimum number of equal hashes in the signatures of similar documents."""


def find_near(
    scratch: Path, parts: Sequence[PartInfo], equal: Duplicates, *, threshold: float, plan: str, workers: Workers
) -> Duplicates:
    """Find the documents that are near another document, which is kept.

    `equal` are the exact duplicates. `plan` is a hash of the parts, the exact duplicates and the threshold.
    """
    placed = tuple((part.number, split) for part in parts for split in part.documents)
    num_documents = sum(sum(part.documents.values()) for part in parts)
    num_bands = NUM_HASHES // rows_of_bands(threshold)
    num_slices = math.ceil(num_documents * num_bands / _SLICE)
    num_ordinals = len(SPLITS) * parts[-1].end.ordinal  # a document of which ends are held out has an ordinal for each
    tasks = []
    for number in range(num_slices):
        task = SliceTask(
            scratch=str(scratch),
            name=f"near-{plan[:32]}-{number:06d}.links",
            values=((number << 64) // num_slices, ((number + 1) << 64) // num_slices - 1),
            parts=placed,
            num_ordinals=num_ordinals,
            least_equal=round(NUM_HASHES * threshold),
        )
        tasks.append(task)
    names = {task.name for task in tasks}
    for path in scratch.glob("near-*"):  # of another plan, or incomplete
        if path.name not in names:
            path.unlink()
    write_bytes(scratch / _EQUAL, equal.ordinals.tobytes())
    unfinished = (task for task in tasks if not (scratch / task.name).exists())
    num_finished = sum((scratch / name).exists() for name in names)
    slice_bytes = num_documents * num_bands * BAND_ENTRY.itemsize // num_slices
    with Progress("comparing", total=num_slices * slice_bytes, done=num_finished * slice_bytes) as progress:
        for _ in workers.in_order(write_links, unfinished):
            progress.advance(slice_bytes)
    return _join_slices(scratch, [scratch / task.name for task in tasks], num_ordinals=num_ordinals)


def write_links(task: SliceTask) -> None:
    """Write the links of a slice: [links, 2] int64, the ranks of two similar documents."""
    table = _entries_of(task)
    links = [np.empty((0, 2), np.int64)]
    for begin in range(0, len(table), _CHUNK):
        chunk = table[begin : begin + _CHUNK + _FARTHEST]
        links.append(_links_of(chunk, task))
    found = _spanning(np.concatenate(links))
    atomic_replace(Path(task.scratch) / task.name, found.tobytes())


def _entries_of(task: SliceTask) -> npt.NDArray[Any]:
    """Return the entries of a slice whose value more than one document has, as `_PLACED` sorted by (value, rank)."""
    scratch = Path(task.scratch)
    tables = [np.empty(0, _PLACED)]
    for place, (number, split) in enumerate(task.parts):
        mapped = band_entries_of(scratch, number, split)
        first = bisect.bisect_left(mapped["value"], task.values[0], key=int)
        last = bisect.bisect_right(mapped["value"], task.values[1], lo=first, key=int)
        table = np.zeros(last - first, dtype=_PLACED)
        table["value"] = mapped["value"][first:last]
        table["row"] = mapped["row"][first:last]
        table["part"] = place
        tables.append(table)
    table = _shared(np.concatenate(tables))
    for place, rows in _by_part(table):
        number, split = task.parts[place]
        ordinals = records_of(scratch, number, split)["ordinal"][table["row"][rows]]
        table["rank"][rows] = ordinals.astype(np.int64)
        if split == TRAIN:
            table["rank"][rows] += task.num_ordinals
    equal_path = scratch / _EQUAL
    if equal_path.stat().st_size:
        equal = np.memmap(equal_path, dtype=np.uint64, mode="r")
        ordinals = table["rank"] % task.num_ordinals
        is_equal = contains(equal, ordinals.astype(np.uint64))
        table = _shared(table[~is_equal])
    return table


def _shared(table: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the entries whose value occurs more than once, sorted by (value, rank)."""
    order = np.lexsort((table["rank"], table["value"]))
    table = table[order]
    has_earlier = equals_previous(table["value"])
    has_later = np.append(has_earlier[1:], False)
    shared: npt.NDArray[Any] = table[has_earlier | has_later[: len(table)]]
    return shared


def _by_part(table: npt.NDArray[Any]) -> list[tuple[int, Int64s]]:
    """Return (part, the places of its entries in `table`) for each part in the table."""
    order = np.argsort(table["part"], kind="stable")
    places, firsts = np.unique(table["part"][order], return_index=True)
    borders = [*firsts, len(table)]
    slices = itertools.pairwise(borders)
    return [(int(place), order[first:end]) for place, (first, end) in zip(places, slices, strict=True)]


def _links_of(chunk: npt.NDArray[Any], task: SliceTask) -> Int64s:
    """Compare the first `_CHUNK` entries with later entries of the same value, and return the links.

    Shape [links, 2]. Links that follow from others are left out.
    """
    signatures = _signatures_of(chunk, task)
    ranks = chunk["rank"]
    links = [np.empty((0, 2), np.int64)]
    for distance in range(1, _FARTHEST + 1):
        agrees = chunk["value"][:-distance] == chunk["value"][distance:]
        firsts = np.flatnonzero(agrees[:_CHUNK])
        if not len(firsts):
            break
        seconds = firsts + distance
        num_equal = (signatures[firsts] == signatures[seconds]).sum(axis=1)
        is_near = num_equal >= task.least_equal
        links.append(np.stack([ranks[firsts[is_near]], ranks[seconds[is_near]]], axis=1))
    return _spanning(np.concatenate(links))


def _signatures_of(table: npt.NDArray[Any], task: SliceTask) -> Signatures:
    """Read the signature of each entry's document. Shape [entries, hashes]."""
    signatures = np.empty((len(table), NUM_HASHES), dtype=np.uint32)
    for place, rows in _by_part(table):
        mapped = signatures_of(Path(task.scratch), *task.parts[place])
        signatures[rows] = mapped[table["row"][rows]]
    return signatures


def _spanning(links: Int64s) -> Int64s:
    """Return links that give the same clusters: one from the first document of a cluster to each other document."""
    ranks, numbers = np.unique(links, return_inverse=True)
    parents = np.zeros(len(ranks), np.int64)
    join(parents, numbers.reshape(-1, 2))
    members = np.flatnonzero(parents)
    firsts = members - parents[members]
    return np.stack([ranks[firsts], ranks[members]], axis=1)


def join(parents: Int64s, links: Int64s) -> None:
    """Join the documents of each link to one cluster, in place.

    `parents` has a distance for each document: the document's number minus this distance is an earlier document of its
    cluster, or the document itself if it is the first of its cluster. Afterwards, the distance of each document in
    `links` leads to the first document of its cluster. Unjoined documents have the distance 0, so that zeros are a
    valid start.
    """
    firsts, seconds = links[:, 0], links[:, 1]
    while len(firsts):
        one = _first_of_cluster(parents, firsts)
        other = _first_of_cluster(parents, seconds)
        is_apart = one != other
        firsts = np.minimum(one, other)[is_apart]
        seconds = np.maximum(one, other)[is_apart]
        order = np.lexsort((firsts, seconds))
        firsts, seconds = firsts[order], seconds[order]
        # Each cluster is joined to one earlier cluster per round.
        is_joined = ~equals_previous(seconds)
        parents[seconds[is_joined]] = (seconds - firsts)[is_joined]
    members = links.reshape(-1)
    parents[members] = members - _first_of_cluster(parents, members)


def _first_of_cluster(parents: Int64s, numbers: Int64s) -> Int64s:
    """Return the first document of each document's cluster."""
    while True:
        distances = parents[numbers]
        if not distances.any():
            return numbers
        numbers = numbers - distances


def _join_slices(scratch: Path, paths: Sequence[Path], *, num_ordinals: int) -> Duplicates:
    """Join the links of all slices, and return all documents except the first of each cluster."""
    parents_path = scratch / _PARENTS
    size = 2 * num_ordinals
    num_bytes = size * np.dtype(np.int64).itemsize
    with open_new(parents_path) as stream:
        if hasattr(os, "posix_fallocate"):  # on a full disk this is an error. A mapped file would end the process
            os.posix_fallocate(stream.fileno(), 0, num_bytes)
        else:
            stream.truncate(num_bytes)
    parents = np.memmap(parents_path, dtype=np.int64, mode="r+", shape=(size,))
    for path in paths:
        join(parents, np.fromfile(path, dtype=np.int64).reshape(-1, 2))
    near = [np.empty(0, np.int64)]
    num_held_out = 0
    for begin in range(0, size, _SLICE):
        ranks = np.flatnonzero(parents[begin : begin + _SLICE]) + begin
        firsts = _first_of_cluster(parents, ranks)
        is_leak = (ranks >= num_ordinals) & (firsts < num_ordinals)
        num_held_out += int(is_leak.sum())
        near.append(ranks % num_ordinals)
    del parents
    parents_path.unlink()
    ordinals = np.sort(np.concatenate(near)).astype(np.uint64)
    return Duplicates(ordinals, num_held_out)
