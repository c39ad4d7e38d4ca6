"""Tasks of a preparation on a cluster (cluster.py). Each task runs on a node and exchanges files with the work folder.

    choose     read the first documents to choose the held-out text; make the tokenizer
    scan       read a group of files, and return the positions at which it is cut into parts
    encode     read some parts of a group from the inputs, and write their files to the work folder
    plan       read the records of all parts, find duplicates, and plan the shards
    write      read from each part the rows of a group of shards, and write these shards to the corpus
    count      add the token counts of all shards of a split

A task works in a temporary folder of its node with the functions of a preparation on one machine. So its files are the
same, byte for byte. The work folder can be a shared folder or a URL. Besides the files of workdir.py it has:

    scan-HASH.json       result of a scan
    parts.json           descriptions of all parts, for the plan
    rows-train.u32       [shards + 1, parts] first row of each shard in each part, which `write` reads by range

Limitations: counting the records of the inputs reads them once more. A node's temporary folder holds the records of all
parts during the plan (56 bytes per document, and 64 more to estimate near duplicates, or about 800 more to report or
drop them), and a group of shards during `write`. One process finds all near duplicates.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from txl_dist.data.format import TOKENIZER_NAME, ShardInfo, SplitInfo, counts_name, npy_bytes
from txl_dist.data.prepare.documents import Reading
from txl_dist.data.prepare.input_splits import Cursor, InputPart, read_parts
from txl_dist.data.prepare.merge import DROPPED, ShardPlan, ShardTask, plan_shards, write_planned
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.data.prepare.preparation import Preparation, choose_held_out, make_tokenizer
from txl_dist.data.prepare.readers import open_source
from txl_dist.data.prepare.shared_files import FolderFiles, SharedFiles, shared_files
from txl_dist.data.prepare.sources import SourceFile
from txl_dist.data.prepare.tokenize import (
    PART_RECORD,
    Encoding,
    PartInfo,
    PartTask,
    encode_part,
    name_of_part,
    part_info_of,
    records_of,
)
from txl_dist.data.prepare.workdir import CORPUS, TOKENIZER_DONE
from txl_dist.data.storage.bucket import read_if_present
from txl_dist.data.workers import start_workers
from txl_dist.errors import DataError
from txl_dist.io.files import typed, write_bytes

PARTS_NAME = "parts.json"
_NUM_THREADS = 16
"""Number of requests to the work folder at the same time."""


class Places(NamedTuple):
    """Locations that all tasks of a preparation read and write: folders that all nodes see, or URLs."""

    work: str
    """Location of the parts, and of the descriptions of shards."""
    corpus: str
    """Location of the shards."""


class ScanJob(NamedTuple):
    """Facts that all tasks of a scan share."""

    places: Places
    stamp: str
    """Hash of the settings of the preparation."""
    part_bytes: int
    allow_protocols: tuple[str, ...]
    jsonl_field: str


class FileGroup(NamedTuple):
    """Consecutive input files that are scanned together: one file, or small files."""

    first_file: int
    """Index of the first file in the list of all input files."""
    files: tuple[SourceFile, ...]


class PartRange(NamedTuple):
    """Range of the inputs that is one part."""

    begin: Cursor
    end: Cursor
    stored_bytes: int
    """Number of stored bytes of the inputs up to the end of the part."""


class ScannedGroup(NamedTuple):
    """Result of a scan. Positions are relative to the group."""

    parts: list[PartRange]
    can_seek: bool
    """Whether reading can start at a part without reading the parts before it. In compressed files and
    tars it cannot."""
    notes: list[tuple[str, str]]
    """(path, sentence for the user) on how files are read."""


class EncodeJob(NamedTuple):
    """Facts that all tasks that encode parts share."""

    scan: ScanJob
    encoding: Encoding
    """Settings for encoding. The folder and the path of the tokenizer are replaced on each node."""


class EncodeTask(NamedTuple):
    """Consecutive parts of one group, which are encoded by one task. Positions are relative to all inputs."""

    group: FileGroup
    parts: tuple[tuple[int, str, PartRange], ...]
    """(number, hash of all inputs up to the end, range) of each part."""


class PlanJob(NamedTuple):
    """Facts that the plan needs, apart from the parts."""

    places: Places
    settings: PrepareSettings
    splits: tuple[str, ...]
    vocab_size: int
    is_lossless: bool


class WriteTask(NamedTuple):
    """Consecutive shards of one split, which are written by one task."""

    split: str
    first_shard: int
    shards: tuple[ShardTask, ...]


class CountedSplit(NamedTuple):
    """Hash of a split's file of token counts, and two facts from it."""

    sha256: str
    num_unknown: int
    """Number of tokens that are the unknown symbol."""
    num_unused: int
    """Number of ids below the number of names that do not occur."""


def check_node(places: Places, token: str, inputs: Sequence[str], node: str) -> None:
    """Check that this node sees the work folder, the folder of the corpus and the local inputs.

    `token` is the content of the file `token` in the work folder. Raises DataError that names the node.
    """
    remedy = "Use a folder that all nodes share under the same path, or a URL of an object store (--workdir, --out)."
    for location in places:
        files = shared_files(location)
        if read_if_present(files, "token") != token.encode():
            raise DataError(f"node {node} does not see the folder {location} of this machine. {remedy}")
    work = shared_files(places.work)
    work.write(f"token-{node}", b"")
    work.remove([f"token-{node}"])
    for path in inputs:
        if not os.path.exists(path):
            raise DataError(
                f"node {node} does not see {path}. Put the inputs and the tokenizer in a folder that all nodes share "
                "under the same path, or in an object store."
            )


def choose_on_node(places: Places, settings: PrepareSettings, files: Sequence[SourceFile]) -> tuple[Reading, list[str]]:
    """Choose the held-out text, and write the tokenizer to the work folder.

    Returns (options for reading documents, sentences for the user). Raises errors as `choose_held_out` and
    `make_tokenizer` do.
    """
    work = shared_files(places.work)
    with _node_folder() as folder, ExitStack() as streams:
        for name in (TOKENIZER_NAME, TOKENIZER_DONE):
            content = read_if_present(work, name)
            if content is not None:
                write_bytes(folder / name, content)
        job = Preparation(settings, folder, list(files))
        choose_held_out(job, streams)
        make_tokenizer(job)
        for name in (TOKENIZER_NAME, TOKENIZER_DONE):
            work.upload(folder / name, name)
    return job.reading, job.remarks


def scan_group(job: ScanJob, group: FileGroup) -> ScannedGroup:
    """Read a group of files, and return the positions at which it is cut into parts. Raises DataError as `read_parts`
    does."""
    work = shared_files(job.places.work)
    facts = repr((job.stamp, job.part_bytes, [file[:5] for file in group.files]))
    name = f"scan-{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"
    content = read_if_present(work, name)
    if content is not None:
        return _scanned(json.loads(content))
    ranges = []
    notes: list[tuple[str, str]] = []
    for part in _parts(job, group.files, Cursor()):
        ranges.append(PartRange(part.begin, part.end, part.stored_bytes))
        notes += part.notes
    with open_source(group.files[0], job.allow_protocols) as opened:
        can_seek = opened.stream.seekable() and opened.form != "webdataset"
    scanned = ScannedGroup(ranges, can_seek, notes)
    work.write(name, json.dumps(scanned).encode())
    return scanned


def _scanned(values: Any) -> ScannedGroup:
    parts, can_seek, notes = values
    ranges = [PartRange(Cursor(*begin), Cursor(*end), stored) for begin, end, stored in parts]
    return ScannedGroup(ranges, can_seek, [(path, note) for path, note in notes])


def _parts(job: ScanJob, files: Sequence[SourceFile], begin: Cursor) -> Iterator[InputPart]:
    return read_parts(
        files,
        part_bytes=job.part_bytes,
        begin=begin,
        allow_protocols=job.allow_protocols,
        jsonl_field=job.jsonl_field,
    )


def encode_on_node(job: EncodeJob, task: EncodeTask) -> list[PartInfo]:
    """Encode consecutive parts, and write their files to the work folder, the JSON file of each part last.

    Parts that are finished are only read. Raises DataError as `encode_part` does, or if an input has changed since it
    was scanned.
    """
    work = shared_files(job.scan.places.work)
    group = task.group
    _, _, first = task.parts[0]
    begin = first.begin._replace(file=first.begin.file - group.first_file)
    infos = []
    with _node_folder() as folder:
        tokenizer = _local_tokenizer(job.scan.places.work, job.encoding.fingerprint)
        encoding = job.encoding._replace(folder=str(folder), tokenizer=tokenizer)
        reader = _parts(job.scan, group.files, begin)
        for number, inputs, expected in task.parts:
            part = next(reader, None)
            end = None if part is None else part.end._replace(file=part.end.file + group.first_file)
            if part is None or end != expected.end:
                path = group.files[min(expected.end.file - group.first_file, len(group.files) - 1)].path
                raise DataError(
                    f"{path} or a file next to it has changed while it was prepared. Leave the inputs unchanged, then "
                    "run the same command again."
                )
            name = name_of_part(number)
            finished = find_part(work, number)
            if finished is not None and is_same_part(finished, encoding.stamp, inputs, expected):
                infos.append(finished)
                continue
            placed = part._replace(begin=expected.begin, end=expected.end, stored_bytes=expected.stored_bytes)
            infos.append(encode_part(PartTask(encoding, number, inputs, placed)))
            paths = sorted(folder.glob(f"{name}-*"))
            _in_threads(lambda path: work.upload(path, path.name), paths)
            work.upload(folder / f"{name}.json", f"{name}.json")
            for written in folder.glob(f"{name}*"):
                written.unlink()
    return infos


def find_part(work: SharedFiles, number: int) -> PartInfo | None:
    """Return the description of a part that is finished, or None."""
    content = read_if_present(work, f"{name_of_part(number)}.json")
    try:
        return part_info_of(json.loads(content or b"null"))
    except ValueError:
        return None


def is_same_part(info: PartInfo, stamp: str, inputs: str, expected: PartRange) -> bool:
    """Return whether a finished part has the range `expected` of the same inputs, and was made with the same
    settings."""
    has_range = (info.begin, info.end) == (expected.begin, expected.end)
    return has_range and info.stamp == stamp and info.inputs == inputs


def plan_on_node(job: PlanJob, _: None) -> ShardPlan:
    """Find duplicates among the documents of all parts, and plan the shards. The tasks of the plan name no parts,
    because `write` reads them from the files of rows."""
    work = shared_files(job.places.work)
    described = [part_info_of(values) for values in json.loads(work.read(PARTS_NAME))]
    parts = [part for part in described if part is not None]
    stems = {name_of_part(part.number, split) for part in parts for split in part.documents}
    with _node_folder() as folder, start_workers(1) as workers:
        names = [name for name in work.sizes() if name.partition(".")[0] in stems and not name.endswith(".ids")]
        _in_threads(lambda name: work.download(name, folder / name), names)
        plan = plan_shards(
            folder,
            parts,
            settings=job.settings,
            splits=job.splits,
            vocab_size=job.vocab_size,
            is_lossless=job.is_lossless,
            workers=workers,
        )
        work.upload(folder / DROPPED, DROPPED)
        splits: dict[str, tuple[SplitInfo, list[ShardTask]]] = {}
        for split, (info, tasks) in plan.splits.items():
            if tasks:
                work.write(f"rows-{split}.u32", _rows(folder, split, tasks, parts))
            splits[split] = info, [task._replace(scratch="", parts=()) for task in tasks]
    return plan._replace(splits=splits)


def _rows(folder: Path, split: str, tasks: Sequence[ShardTask], parts: Sequence[PartInfo]) -> bytes:
    """Return [shards + 1, parts] uint32: the first row of each shard in each part, and the number of rows of each
    part."""
    first_keys = np.array([task.keys[0] for task in tasks], dtype=np.uint64)
    rows = np.zeros((len(tasks) + 1, len(parts)), dtype="<u4")
    for column, part in enumerate(parts):
        if part.documents.get(split):
            records = records_of(folder, part.number, split)
            rows[:-1, column] = np.searchsorted(records["key"], first_keys)
            rows[-1, column] = np.searchsorted(records["key"], np.uint64(tasks[-1].keys[1]), side="right")
    return rows.tobytes()


def write_on_node(places: Places, num_parts: int, task: WriteTask) -> list[ShardInfo]:
    """Write consecutive shards of a split to the corpus, and then their JSON files to the work folder."""
    work = shared_files(places.work)
    corpus = shared_files(places.corpus)
    infos = []
    with _node_folder() as folder:
        first = _row_of(work, task.split, task.first_shard, num_parts)
        end = _row_of(work, task.split, task.first_shard + len(task.shards), num_parts)
        numbers = np.flatnonzero(end > first).tolist()
        itemsize = np.dtype(task.shards[0].dtype).itemsize

        def fetch(number: int) -> None:
            rows = int(first[number]), int(end[number])
            _fetch_rows(work, folder, name_of_part(number, task.split), rows=rows, itemsize=itemsize)

        _in_threads(fetch, numbers)
        work.download(DROPPED, folder / DROPPED)
        (folder / CORPUS).mkdir()
        for shard in task.shards:
            written = write_planned(shard._replace(scratch=str(folder), parts=tuple(numbers)))
            infos.append(written.info)
            for name in (shard.name, f"{shard.name}.idx"):
                corpus.upload(folder / CORPUS / name, name)
                (folder / CORPUS / name).unlink()
            for suffix in ("counts", "json"):
                name = f"shard-{shard.name}.{suffix}"
                work.upload(folder / name, name)
    return infos


def _row_of(work: SharedFiles, split: str, shard: int, num_parts: int) -> Any:
    """Return [parts] the first row of a shard in each part."""
    num_bytes = 4 * num_parts
    return np.frombuffer(work.read(f"rows-{split}.u32", shard * num_bytes, (shard + 1) * num_bytes), dtype="<u4")


def _fetch_rows(work: SharedFiles, folder: Path, name: str, *, rows: tuple[int, int], itemsize: int) -> None:
    """Copy some rows of a part, and their tokens, as a smaller part to the folder."""
    record_bytes = PART_RECORD.itemsize
    content = work.read(f"{name}.records", rows[0] * record_bytes, rows[1] * record_bytes)
    records = np.frombuffer(content, dtype=PART_RECORD).copy()
    begin = int(records["start"][0])
    end = int(records["start"][-1]) + int(records["tokens"][-1])
    records["start"] -= np.uint64(begin)
    write_bytes(folder / f"{name}.records", records.tobytes())
    write_bytes(folder / f"{name}.ids", work.read(f"{name}.ids", begin * itemsize, end * itemsize))


def count_on_node(places: Places, num_names: int, unknown_id: int | None, split: tuple[str, list[str]]) -> CountedSplit:
    """Add the token counts of the shards of a split, and write their sum to the corpus. `split` is (name of the split,
    names of its shards)."""
    work = shared_files(places.work)
    name, shards = split
    total = np.frombuffer(work.read(f"shard-{shards[0]}.counts"), dtype=np.int64).copy()
    for shard in shards[1:]:
        total += np.frombuffer(work.read(f"shard-{shard}.counts"), dtype=np.int64)
    content = npy_bytes(total)
    shared_files(places.corpus).write(counts_name(name), content)
    return CountedSplit(
        sha256=hashlib.sha256(content).hexdigest(),
        num_unknown=0 if unknown_id is None else int(total[unknown_id]),
        num_unused=int((total[:num_names] == 0).sum()),
    )


def finished_shard(work: SharedFiles, plan: str, name: str) -> ShardInfo | None:
    """Return the description of a shard that an earlier process wrote by the same plan, or None."""
    try:
        content = json.loads(work.read(f"shard-{name}.json"))
        return typed(ShardInfo, content["info"]) if content["plan"] == plan else None
    except (ValueError, KeyError, TypeError, DataError):
        return None


def _in_threads(action: Callable[[Any], object], items: Sequence[Any]) -> None:
    """Call `action` for each item, some at the same time. Raises the first error."""
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for _ in threads.map(action, items):
            pass


@contextmanager
def _node_folder() -> Iterator[Path]:
    """Yield a temporary folder of this node, which is removed when the block ends."""
    with tempfile.TemporaryDirectory(prefix="txl-prepare-") as name:
        yield Path(name)


@lru_cache(maxsize=4)
def _local_tokenizer(location: str, fingerprint: str) -> str:
    """Copy the tokenizer from the work folder to this node, once per process, and return its path.

    All processes of a user share the copy, so that a killed process leaves no further one.
    """
    folder = Path(tempfile.gettempdir(), f"txl-tokenizers-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    FolderFiles(str(folder)).write(f"{fingerprint}.json", shared_files(location).read(TOKENIZER_NAME))
    return str(folder / f"{fingerprint}.json")


def on_all_nodes(settings: PrepareSettings) -> PrepareSettings:
    """Return the settings with absolute paths, because each process of a cluster has its own current folder."""
    paths = {}
    for name in ("tokenizer_path", "vocab_list"):
        path = getattr(settings, name)
        if path is not None and "://" not in str(path):
            paths[name] = os.path.abspath(path)
    return dataclasses.replace(settings, **paths)
