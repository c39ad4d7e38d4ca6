"""The end of `txl prepare`: the documents of all parts become shards.

    duplicates   found over all parts; the ordinals of those that are dropped are kept in one sorted array
    plan         tokens per cell of the key space, summed over all parts, are cut into shards of equal size
    write        workers; each shard gathers its keys from every part, sorts, and is written in one rename

No step holds more than one shard, or one slice of the digests, in memory; the array of dropped documents (8 bytes
each) is mapped. A finished shard has a JSON beside the parts that names the plan it belongs to, so that the same
command after a kill keeps it, and rewrites it once the plan is another one. The JSON goes before its shard does.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from txl_dist.data.format import ShardInfo, SplitInfo
from txl_dist.data.prepare.documents import TRAIN
from txl_dist.data.prepare.duplicates import Equals, contains, count_near, find_equal
from txl_dist.data.prepare.shard_writer import WrittenShard, write_shard
from txl_dist.data.prepare.tokenize import PartInfo, bands_of, gather, records_of
from txl_dist.data.prepare.workdir import CORPUS
from txl_dist.io.files import atomic_replace, read_json, sha256_of_file, typed

_CELL_BITS = 20
_MOST_DOCUMENTS = 1 << 20
"""In a shard, about: the worker that writes it keeps some hundred bytes of each, however short."""
DROPPED = "dropped.u64"


class Duplicated(NamedTuple):
    """What was found, and what is left out for it."""

    statistics: dict[str, int]
    dropped: npt.NDArray[np.uint64]
    """Ordinals, ascending."""


class ShardTask(NamedTuple):
    """One shard to write."""

    scratch: str
    plan: str
    """Hash of everything that the shards depend on."""
    split: str
    name: str
    keys: tuple[int, int]
    """First and last."""
    first_document: int
    parts: tuple[int, ...]
    """Those that have documents of this split."""
    dtype: str
    vocab_size: int


def find_duplicates(
    folder: Path, parts: Sequence[PartInfo], *, policy: Literal["report", "drop", "ignore"]
) -> Duplicated:
    """Exact and near duplicates over all parts and splits."""
    own = [(part.number, split) for part in parts for split in part.documents]
    count = sum(sum(part.documents.values()) for part in parts)
    if not count or policy == "ignore":
        return Duplicated({}, np.empty(0, np.uint64))
    equal: Equals = find_equal(
        ((records_of(folder, number, split), split == TRAIN) for number, split in own), count=count, folder=folder
    )
    pairs = ((records_of(folder, number, split), bands_of(folder, number, split)) for number, split in own)
    drop = policy == "drop"
    statistics = {
        "exact_duplicates": len(equal.ordinals) - equal.num_held_out,
        "held_out_duplicates": equal.num_held_out,
        "duplicates_dropped": len(equal.ordinals) if drop else 0,
        "near_duplicates": count_near(pairs, equal, count=count, folder=folder),
    }
    return Duplicated(statistics, equal.ordinals if drop else np.empty(0, np.uint64))


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
    """(what is known of a split before it is written, its shards). Tokens of a shard differ by about a document."""
    numbers = tuple(part.number for part in parts if part.documents.get(split))
    # Train keys are hashes, spread over 64 bits; the others are ordinals.
    largest = max((int(records_of(scratch, number, split)["key"][-1]) for number in numbers), default=0)
    shift = 64 - _CELL_BITS if split == TRAIN else max(largest.bit_length() - _CELL_BITS, 0)
    tokens_of_cell, documents_of_cell = np.zeros((2, 1 << _CELL_BITS), dtype=np.int64)
    info, num_changed = SplitInfo(), 0
    for number in numbers:
        records = records_of(scratch, number, split)
        records = records[~contains(dropped, records["ordinal"])]
        cells = (records["key"] >> np.uint64(shift)).astype(np.int64)
        np.add.at(tokens_of_cell, cells, records["tokens"])
        np.add.at(documents_of_cell, cells, 1)
        info.text_bytes += int(records["text_bytes"].sum(dtype=np.int64))
        info.text_characters += int(records["characters"].sum(dtype=np.int64))
        info.longest = max(info.longest, int(records["tokens"].max(initial=0)))
        num_changed += int(records["is_changed"].sum(dtype=np.int64))
    info.changed_documents = None if is_lossless else num_changed
    documents_before = np.cumsum(documents_of_cell) - documents_of_cell
    info.tokens, info.documents = int(tokens_of_cell.sum()), int(documents_of_cell.sum())
    count = max(-(-info.tokens // shard_len), -(-info.documents // _MOST_DOCUMENTS))
    tasks = [
        ShardTask(
            scratch=str(scratch),
            plan=plan,
            split=split,
            name=f"{split}-{number:06d}.tar",
            keys=(first << shift, (last << shift) - 1),
            first_document=int(documents_before[first]),
            parts=numbers,
            dtype=dtype.str,
            vocab_size=vocab_size,
        )
        for number, (first, last) in enumerate(_cut(tokens_of_cell, count))
    ]
    return info, tasks


def hash_of_plan(parts: Sequence[PartInfo], dropped: npt.NDArray[np.uint64], *, shard_len: int) -> str:
    """Hash of everything that the shards depend on."""
    described = json.dumps([shard_len, [part._asdict() for part in parts]], sort_keys=True)
    return hashlib.sha256(described.encode() + dropped.tobytes()).hexdigest()


def write_planned(task: ShardTask) -> WrittenShard:
    """Write a shard, and then the JSON that says so."""
    scratch, dtype = Path(task.scratch), np.dtype(task.dtype)
    _about(task).unlink(missing_ok=True)  # it may speak of a shard of another plan
    records, documents = gather(scratch, task.parts, task.split, keys=task.keys, dtype=dtype)
    if (scratch / DROPPED).stat().st_size:
        is_dropped = contains(np.memmap(scratch / DROPPED, dtype=np.uint64, mode="r"), records["ordinal"])
        documents = [*itertools.compress(documents, ~is_dropped)]
    written = write_shard(
        scratch / CORPUS,
        task.name,
        documents,
        first_document=task.first_document,
        dtype=dtype,
        vocab_size=task.vocab_size,
    )
    atomic_replace(_about(task).with_suffix(".counts"), written.counts.tobytes())
    atomic_replace(_about(task), json.dumps({"plan": task.plan, "info": written.info._asdict()}).encode())
    return written


def is_written(task: ShardTask) -> bool:
    """Whether a shard is finished already, of this plan, and still there."""
    tar = Path(task.scratch) / CORPUS / task.name
    try:
        about = read_json(_about(task))
        size, idx_sha256 = tar.stat().st_size, sha256_of_file(tar.with_name(f"{task.name}.idx"))
        info = typed(ShardInfo, about["info"])
        return bool(about["plan"] == task.plan and (info.bytes, info.idx_sha256) == (size, idx_sha256))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_written(task: ShardTask) -> WrittenShard:
    """A shard that is finished."""
    info = typed(ShardInfo, read_json(_about(task))["info"])
    return WrittenShard(info, np.fromfile(_about(task).with_suffix(".counts"), dtype=np.int64))


def _about(task: ShardTask) -> Path:
    return Path(task.scratch) / f"shard-{task.name}.json"


def _cut(tokens_of_cell: npt.NDArray[np.int64], count: int) -> Iterator[tuple[int, int]]:
    """(first cell, cell behind the last) of `count` shards of equal size, none without tokens."""
    ends = np.cumsum(tokens_of_cell)
    total = int(ends[-1])
    wanted = [total * number // count for number in range(1, count)]
    borders = np.unique([0, *(np.searchsorted(ends, wanted) + 1), len(ends)])
    filled = np.concatenate([[0], ends])[borders]
    keep = np.concatenate([[True], np.diff(filled) > 0])
    borders = borders[keep]
    yield from zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)
