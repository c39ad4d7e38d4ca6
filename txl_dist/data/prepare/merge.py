"""Third step of `txl prepare`: the documents of all parts become shards.

    duplicates   find duplicates over all parts; the ordinals of dropped documents become one sorted array
    plan         divide the range of keys into cells, sum the tokens per cell, and join cells to shards of equal size
    write        in workers: gather the documents of a shard from all parts, sort them, and write the shard

Each process holds at most one shard, or one slice of the digests, in host memory. Workers memory-map the array of
dropped documents (8 bytes per document). Each finished shard has a JSON file next to the parts, with the hash of its
plan. After a kill, the same command keeps the finished shards of the same plan and writes all other shards again. The
JSON file of a shard is removed before the shard is written again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.data.format import ShardInfo, SplitInfo, token_dtype
from txl_dist.data.prepare.documents import TRAIN
from txl_dist.data.prepare.duplicates import contains, count_near, find_equal
from txl_dist.data.prepare.near_duplicates import find_near
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.data.prepare.shard_writer import WrittenShard, write_shard
from txl_dist.data.prepare.tokenize import PartInfo, bands_of, gather, records_of
from txl_dist.data.prepare.workdir import CORPUS
from txl_dist.data.workers import Workers
from txl_dist.io.files import atomic_replace, read_json, sha256_of_file, typed, write_bytes

_CELL_BITS = 20
"""Number of bits of a document's key that choose its cell. Documents are sorted by key, and a shard consists of whole
cells."""
_MOST_DOCUMENTS = 1 << 20
"""Approximate maximum number of documents in a shard. The worker that writes the shard needs some hundred bytes of host
memory for each document."""
DROPPED = "dropped.u64"
"""Name of the file with the ordinals of dropped documents."""


class Duplicated(NamedTuple):
    """Result of `find_duplicates`: counts of duplicates, and the documents to leave out of the corpus."""

    statistics: dict[str, int]
    """Numbers of duplicate documents by kind, which the corpus's index records. Empty if duplicates are ignored."""
    dropped: npt.NDArray[np.uint64]
    """Ordinals of the documents to leave out, ascending."""


class ShardPlan(NamedTuple):
    """Result of `plan_shards`: counts of duplicates, and the shards of each split, which are not written yet."""

    statistics: dict[str, int]
    """Numbers of duplicate documents by kind, as in `Duplicated`."""
    splits: dict[str, tuple[SplitInfo, list[ShardTask]]]
    """Entry of each split in the index without its shards, and the tasks that write the shards."""


class ShardTask(NamedTuple):
    """Task of a worker: write one shard."""

    scratch: str
    """Work folder, which contains the parts."""
    plan: str
    """Hash of everything that the shards depend on (`hash_of_plan`)."""
    split: str
    name: str
    keys: tuple[int, int]
    """First and last key of the shard's documents. Keys give the order of the documents in a split (tokenize.py)."""
    first_document: int
    """Number of the shard's first document in the split. Dropped documents are not counted."""
    parts: tuple[int, ...]
    """Numbers of the parts that have documents of this split."""
    dtype: str
    vocab_size: int


def plan_shards(
    scratch: Path,
    parts: Sequence[PartInfo],
    *,
    settings: PrepareSettings,
    splits: Sequence[str],
    vocab_size: int,
    is_lossless: bool,
    workers: Workers,
) -> ShardPlan:
    """Find duplicates, write the ordinals of the dropped documents, and divide each split into shards.

    `scratch` is the work folder, which contains the parts. `vocab_size` and `is_lossless` are properties of the
    tokenizer. `workers` search for near duplicates.
    """
    duplicated = find_duplicates(scratch, parts, settings, workers)
    write_bytes(scratch / DROPPED, duplicated.dropped.tobytes())
    plan = hash_of_plan(parts, duplicated.dropped, sizes=[settings.shard_len])
    planned = {}
    for split in splits:
        planned[split] = plan_split(
            scratch,
            split,
            parts,
            dropped=duplicated.dropped,
            shard_len=settings.shard_len,
            dtype=token_dtype(vocab_size),
            vocab_size=vocab_size,
            plan=plan,
            is_lossless=is_lossless,
        )
    return ShardPlan(duplicated.statistics, planned)


def find_duplicates(folder: Path, parts: Sequence[PartInfo], settings: PrepareSettings, workers: Workers) -> Duplicated:
    """Find exact and near duplicates over all parts and splits, and choose the documents to leave out.

    `folder` is the work folder, which contains the parts.
    """
    splits_of_parts = [(part.number, split) for part in parts for split in part.documents]
    count = sum(sum(part.documents.values()) for part in parts)
    none = np.empty(0, np.uint64)
    if not count or settings.duplicates == "ignore":
        return Duplicated({}, none)
    records = ((records_of(folder, number, split), split == TRAIN) for number, split in splits_of_parts)
    equal = find_equal(records, count=count, folder=folder)
    drop = settings.duplicates == "drop"
    statistics = {
        "exact_duplicates": len(equal.ordinals) - equal.num_held_out,
        "held_out_duplicates": equal.num_held_out,
        "duplicates_dropped": len(equal.ordinals) if drop else 0,
    }
    dropped = equal.ordinals if drop else none
    if settings.near_duplicates == "estimate":
        bands = (
            (records_of(folder, number, split), bands_of(folder, number, split)) for number, split in splits_of_parts
        )
        statistics["near_duplicates"] = count_near(bands, equal, count=count, folder=folder)
    if settings.compares_signatures:
        plan = hash_of_plan(parts, equal.ordinals, sizes=[settings.near_threshold])
        near = find_near(folder, parts, equal, threshold=settings.near_threshold, plan=plan, workers=workers)
        drop_near = settings.near_duplicates == "drop"
        statistics["near_duplicates"] = len(near.ordinals) - near.num_held_out
        statistics["near_held_out_duplicates"] = near.num_held_out
        statistics["near_threshold_pct"] = round(100 * settings.near_threshold)
        if drop_near:
            statistics["near_duplicates_dropped"] = len(near.ordinals)
            dropped = np.union1d(dropped, near.ordinals)
    return Duplicated(statistics, dropped)


def plan_split(
    scratch: Path,
    split: str,
    parts: Sequence[PartInfo],
    *,
    dropped: npt.NDArray[np.uint64],
    shard_len: int,
    dtype: np.dtype[Any],
    vocab_size: int,
    plan: str,
    is_lossless: bool,
) -> tuple[SplitInfo, list[ShardTask]]:
    """Divide the documents of a split into shards whose sizes differ by about the number of tokens of one document.

    Returns (the split's entry in the index without its shards, the tasks that write the shards).
    """
    numbers = tuple(part.number for part in parts if part.documents.get(split))
    shift = _cell_shift(scratch, split, numbers)
    tokens_of_cell = np.zeros(1 << _CELL_BITS, dtype=np.int64)
    documents_of_cell = np.zeros(1 << _CELL_BITS, dtype=np.int64)
    info = SplitInfo()
    num_changed = 0
    for number in numbers:
        records = records_of(scratch, number, split)
        is_dropped = contains(dropped, records["ordinal"])
        records = records[~is_dropped]
        cells = (records["key"] >> np.uint64(shift)).astype(np.int64)
        np.add.at(tokens_of_cell, cells, records["tokens"])
        np.add.at(documents_of_cell, cells, 1)
        info.text_bytes += int(records["text_bytes"].sum(dtype=np.int64))
        info.text_characters += int(records["characters"].sum(dtype=np.int64))
        info.longest = max(info.longest, int(records["tokens"].max(initial=0)))
        num_changed += int(records["is_changed"].sum(dtype=np.int64))
    if is_lossless:
        info.changed_documents = None
    else:
        info.changed_documents = num_changed
    documents_before = np.cumsum(documents_of_cell) - documents_of_cell
    info.tokens = int(tokens_of_cell.sum())
    info.documents = int(documents_of_cell.sum())
    count_by_tokens = math.ceil(info.tokens / shard_len)
    count_by_documents = math.ceil(info.documents / _MOST_DOCUMENTS)
    count = max(count_by_tokens, count_by_documents)
    tasks = []
    for number, (first, end) in enumerate(_cut(tokens_of_cell, count)):
        task = ShardTask(
            scratch=str(scratch),
            plan=plan,
            split=split,
            name=f"{split}-{number:06d}.tar",
            keys=(first << shift, (end << shift) - 1),
            first_document=int(documents_before[first]),
            parts=numbers,
            dtype=dtype.str,
            vocab_size=vocab_size,
        )
        tasks.append(task)
    return info, tasks


def _cell_shift(scratch: Path, split: str, numbers: Sequence[int]) -> int:
    """Return the number of low bits that are removed from a key to get the number of its cell."""
    if split == TRAIN:  # keys are hashes of 64 bits
        return 64 - _CELL_BITS
    largest = 0  # keys are ordinals
    for number in numbers:
        last_key = int(records_of(scratch, number, split)["key"][-1])
        largest = max(largest, last_key)
    return max(largest.bit_length() - _CELL_BITS, 0)


def hash_of_plan(parts: Sequence[PartInfo], dropped: npt.NDArray[np.uint64], *, sizes: Sequence[float]) -> str:
    """Return a hash of everything that later files depend on: the parts, the dropped documents and some settings.

    These settings are the shard length for shards, and the threshold for near duplicates.
    """
    described_parts = [part._asdict() for part in parts]
    described = json.dumps([*sizes, described_parts], sort_keys=True)
    content = described.encode() + dropped.tobytes()
    return hashlib.sha256(content).hexdigest()


def write_planned(task: ShardTask) -> WrittenShard:
    """Write the shard of a task, and then its JSON file, which marks the shard as finished."""
    scratch = Path(task.scratch)
    dtype = np.dtype(task.dtype)
    info_path = _info_path(task)
    info_path.unlink(missing_ok=True)  # it may describe a shard of another plan
    records, documents = gather(scratch, task.parts, task.split, keys=task.keys, dtype=dtype)
    dropped_path = scratch / DROPPED
    if dropped_path.stat().st_size:
        dropped = np.memmap(dropped_path, dtype=np.uint64, mode="r")
        is_kept = ~contains(dropped, records["ordinal"])
        documents = list(itertools.compress(documents, is_kept))
    written = write_shard(
        scratch / CORPUS,
        task.name,
        documents,
        first_document=task.first_document,
        dtype=dtype,
        vocab_size=task.vocab_size,
    )
    atomic_replace(info_path.with_suffix(".counts"), written.counts.tobytes())
    content = {"plan": task.plan, "info": written.info._asdict()}
    atomic_replace(info_path, json.dumps(content).encode())
    return written


def is_written(task: ShardTask) -> bool:
    """Return whether the shard of a task is finished.

    A finished shard has a JSON file with the hash of the task's plan, and the files of the shard match this JSON file.
    """
    tar = Path(task.scratch) / CORPUS / task.name
    try:
        content = read_json(_info_path(task))
        info = typed(ShardInfo, content["info"])
        if content["plan"] != task.plan or info.bytes != tar.stat().st_size:
            return False
        records = tar.with_name(f"{task.name}.idx")
        return info.idx_sha256 == sha256_of_file(records)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_written(task: ShardTask) -> WrittenShard:
    """Read the description and the token counts of a finished shard."""
    info_path = _info_path(task)
    info = typed(ShardInfo, read_json(info_path)["info"])
    counts = np.fromfile(info_path.with_suffix(".counts"), dtype=np.int64)
    return WrittenShard(info, counts)


def _info_path(task: ShardTask) -> Path:
    return Path(task.scratch) / f"shard-{task.name}.json"


def _cut(tokens_of_cell: npt.NDArray[np.int64], count: int) -> Iterator[tuple[int, int]]:
    """Yield (first cell, one past the last cell) for up to `count` shards with about the same number of tokens.

    Every shard has at least one token.
    """
    # [cells + 1] tokens before each cell, and in all cells
    tokens_before = np.concatenate([[0], np.cumsum(tokens_of_cell)])
    total = int(tokens_before[-1])
    wanted = [total * number // count for number in range(1, count)]
    inner_borders = np.searchsorted(tokens_before[1:], wanted) + 1
    borders = np.unique([0, *inner_borders, len(tokens_of_cell)])
    tokens_between = np.diff(tokens_before[borders])
    is_kept = np.concatenate([[True], tokens_between > 0])
    kept_borders = borders[is_kept].tolist()
    yield from itertools.pairwise(kept_borders)
