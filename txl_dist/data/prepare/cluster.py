"""Preparation of a corpus on the nodes of a Ray cluster, or into an object store: the parts and shards of one machine.

    list       this process lists the files, and refuses inputs that only it can read
    connect    connect to the cluster; check that every node sees the folders and has the same software
    tasks      choose, scan, encode, plan, write, count: cluster_tasks.py
    commit     write tokenizer.json, prepared.json and, as the last file, index.json

This process and the cluster's object store hold names of files, positions and counts, but no text and no tokens. Parts
and shards are files in the work folder and in the corpus, which are shared folders or URLs. A part or shard whose node
is lost is made again on another node. After a kill of this process, the same command continues from the finished parts
and shards.

Where the files are, for the output NAME:

    output     work folder                         shards, until the commit
    folder     .NAME.prepare next to it            .NAME.prepare/corpus, which is moved to the output
    URL        .NAME.prepare next to it            the output itself; without index.json it is no corpus
    either     WORKDIR/.NAME.prepare, if given     as above
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from txl_dist.console.formatting import counted
from txl_dist.console.logging import logger
from txl_dist.console.progress import Progress
from txl_dist.data.format import INDEX_NAME, PREPARED_NAME, TOKENIZER_NAME, SplitInfo, index_of, token_dtype
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.data.prepare.cluster_tasks import (
    PARTS_NAME,
    EncodeJob,
    EncodeTask,
    FileGroup,
    PartRange,
    Places,
    PlanJob,
    ScanJob,
    ScannedGroup,
    WriteTask,
    check_node,
    choose_on_node,
    count_on_node,
    encode_on_node,
    find_part,
    finished_shard,
    is_same_part,
    on_all_nodes,
    plan_on_node,
    scan_group,
    write_on_node,
)
from txl_dist.data.prepare.detection import has_scheme
from txl_dist.data.prepare.documents import TRAIN
from txl_dist.data.prepare.input_splits import Cursor
from txl_dist.data.prepare.merge import ShardPlan, ShardTask
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.data.prepare.preparation import (
    Preparation,
    check_learning,
    choose_part_bytes,
    list_files,
    remarks_on_size,
)
from txl_dist.data.prepare.request import RequestHashes, check_request, request_of, write_request
from txl_dist.data.prepare.run import (
    PrepareSummary,
    check_splits,
    encoding_of,
    hash_up_to,
    remark_on_names,
    remarks_of_notes,
    statistics_of,
    summary_of,
)
from txl_dist.data.prepare.shared_files import STAMP, SharedFiles, claim_urls, shared_files
from txl_dist.data.prepare.sources import SourceFile, identities, is_repeatable
from txl_dist.data.prepare.tokenize import PartInfo
from txl_dist.data.prepare.workdir import CORPUS, another_corpus, check_target, claim_scratch, move_into_place
from txl_dist.data.ray_workers import connect
from txl_dist.data.storage.bucket import Bucket, read_if_present
from txl_dist.data.storage.bucket_lock import BucketLock
from txl_dist.data.workers import Workers, num_cores, start_workers
from txl_dist.errors import ConfigError, DataError
from txl_dist.io.files import write_bytes, write_hashed_json
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.tokenizer import load_tokenizer

_NUM_CHAINS = 8
"""Maximum number of tasks that encode one compressed file. Each of them decompresses the file up to its own parts."""
_MOST_SHARDS = 16
"""Maximum number of shards that one task writes. Each task reads a range of every part, so few tasks need few
requests."""
_SHARD_TASKS = 64
"""Number of tasks below which a task writes only one shard."""
_MOST_NODES = 8
"""Maximum number of nodes that the progress display names."""
_NUM_THREADS = 32


@dataclass(frozen=True)
class _Output:
    """Output of a preparation on a cluster, and the places of its unfinished files."""

    location: str
    """Absolute path of the output folder, or URL."""
    work: str
    """Absolute path or URL of the work folder."""

    @property
    def is_url(self) -> bool:
        return has_scheme(self.location)

    @property
    def places(self) -> Places:
        """Work folder, and folder or URL that the shards are written to."""
        if self.is_url:
            return Places(self.work, self.location)
        return Places(self.work, f"{self.scratch}/{CORPUS}")

    @property
    def scratch(self) -> str:
        """Absolute path or URL of the folder next to the output that a preparation locks."""
        parent, _, name = self.location.rpartition("/")
        return f"{parent}/.{name}.prepare"


def prepare_on_cluster(
    output: str | Path, *, workers: Workers | None = None, **settings_of_user: Any
) -> PrepareSummary:
    """Prepare a corpus on the cluster that the setting `cluster` names, or by processes of this machine without it.

    `output` is a folder that all nodes see, or a URL. `workers` is an executor to use instead. Returns and raises what
    `prepare_corpus` does. Also raises UnreachableError if the cluster, a shared folder or a URL cannot be reached.
    """
    settings = PrepareSettings(**settings_of_user).completed()
    out = _output_of(output, settings)
    check_learning(settings)
    if settings.name is not None:
        raise ConfigError(
            f"the named corpus {settings.name} is too small for a cluster or an object store. Prepare it in a local "
            "folder without --cluster and --workdir, or give files as inputs."
        )
    listing, remarks = list_files(settings)
    _check_inputs(listing.files)
    files = [_on_all_nodes(file) for file in listing.files]
    request = request_of(settings, files)
    if out.is_url:
        if _is_there(out, request):
            return PrepareSummary(open_corpus(out.location), True, listing.num_other, listing.hidden)
    else:
        check_target(Path(out.location))
        if not settings.overwrite:
            check_request(request, Path(out.location))
    stamp = f"{settings.stamp()} cluster"
    can_continue = is_repeatable(files)
    with ExitStack() as stack:
        if workers is None and settings.cluster:
            _, _, address = settings.cluster.partition("=")
            workers = stack.enter_context(connect(address, num_workers=settings.num_workers))
        elif workers is None:
            workers = stack.enter_context(start_workers(settings.num_workers or num_cores()))
        locks = _claim(out, stack, stamp=stamp, can_continue=can_continue)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="txl-prepare-")))
        job = Preparation(on_all_nodes(settings), folder, files, remarks)
        _check_nodes(job, out.places, workers)
        _make_corpus(job, out.places, workers, request, stamp=stamp, locks=locks)
        is_unchanged = False
        if not out.is_url:
            written = Path(out.scratch, CORPUS)
            is_unchanged = move_into_place(written, Path(out.location), overwrite=settings.overwrite)
    return summary_of(job, listing, open_corpus(out.location), is_unchanged=is_unchanged)


def _output_of(output: str | Path, settings: PrepareSettings) -> _Output:
    """Return the output and its work folder. Raises ConfigError for a URL that cannot be the output."""
    given = str(output).removeprefix("file://")
    if given.startswith(("http://", "https://")):
        raise ConfigError(f"the output {given} cannot be written. Give a folder or an object store (s3://bucket/NAME).")
    is_url = has_scheme(given)
    if is_url and settings.overwrite:
        raise ConfigError(
            f"--overwrite cannot replace a corpus at a URL ({given}). Choose another URL, or remove that corpus first."
        )
    location = given.rstrip("/") if is_url else str(Path(given).resolve())
    parent, _, name = location.rpartition("/")
    if parent.endswith(":/"):
        raise ConfigError(f"the output {given} is a whole bucket. Give a folder in it, such as {given}/NAME.")
    above = settings.workdir.removeprefix("file://").rstrip("/") or parent
    if not has_scheme(above):
        above = os.path.abspath(above)
    return _Output(location, f"{above}/.{name}.prepare")


def _check_inputs(files: Sequence[SourceFile]) -> None:
    """Raise ConfigError for inputs that several processes cannot read."""
    for file in files:
        if file.is_stream:
            raise ConfigError(
                f"the input {file.path} can be read only once, by one process. Save it as files in a folder that all "
                "nodes share, or in an object store."
            )


def _on_all_nodes(file: SourceFile) -> SourceFile:
    """Return the file with an absolute path, because each process of a cluster has its own current folder."""
    if has_scheme(file.path):
        return file
    return file._replace(path=os.path.abspath(file.path))


def _is_there(out: _Output, request: RequestHashes) -> bool:
    """Return whether the URL already has the corpus of the same inputs and settings.

    Raises DataError if it has another corpus, or other files and no interrupted preparation.
    """
    files = Bucket(out.location)  # without retries: an address that is wrong is reported at once
    content = read_if_present(files, INDEX_NAME)
    if content is not None:
        prepared = json.loads(read_if_present(files, PREPARED_NAME) or b"{}")
        if (prepared.get("settings"), prepared.get("inputs")) != (request.settings, request.inputs):
            raise another_corpus(Path(out.location), "it was prepared from other inputs or settings")
        return True
    if files.sizes() and read_if_present(Bucket(out.scratch), STAMP) is None:
        raise DataError(f"{out.location} contains other files but no corpus. Choose another output.")
    return False


def _claim(out: _Output, stack: ExitStack, *, stamp: str, can_continue: bool) -> list[BucketLock]:
    """Lock the folder next to the output and the work folder until `stack` ends. Returns the locks at URLs.

    Raises ConfigError or DataError if another process uses them.
    """
    places = dict.fromkeys((out.scratch, out.work))
    for folder in places:
        if not has_scheme(folder):
            target = Path(folder).with_name(Path(out.location).name)
            stack.enter_context(claim_scratch(target, stamp=stamp, can_continue=can_continue))
    if not out.is_url:
        Path(out.places.corpus).mkdir(exist_ok=True)
    urls = [place for place in places if has_scheme(place)]
    return stack.enter_context(claim_urls(urls, stamp=stamp, can_continue=can_continue))


def _check_nodes(job: Preparation, places: Places, workers: Workers) -> None:
    """Check that every node sees the folders and inputs. Raises DataError that names the first node that does not."""
    token = secrets.token_hex(8)
    settings = job.settings
    inputs = [file.path for file in job.files[:1] if not has_scheme(file.path)]
    for path in (settings.tokenizer_path, settings.vocab_list):
        if path is not None and not has_scheme(str(path)):
            inputs.append(str(path))
    for location in places:
        shared_files(location).write("token", token.encode())
    workers.check(partial(check_node, places, token, inputs))
    for location in places:
        shared_files(location).remove(["token"])


def _make_corpus(
    job: Preparation,
    places: Places,
    workers: Workers,
    request: RequestHashes,
    *,
    stamp: str,
    locks: Sequence[BucketLock],
) -> None:
    """Run the tasks of the preparation, and write the files of the corpus, the index last."""
    settings = job.settings
    work = shared_files(places.work)
    choose = partial(choose_on_node, places, settings)
    job.reading, remarks = next(workers.in_order(choose, [job.files]))
    job.remarks += remarks
    work.download(TOKENIZER_NAME, job.scratch / TOKENIZER_NAME)
    tokenizer = load_tokenizer(job.scratch / TOKENIZER_NAME)
    scan = ScanJob(
        places,
        stamp,
        settings.block_bytes or choose_part_bytes(job.total_bytes),
        tuple(settings.allow_protocols),
        settings.jsonl_field,
    )
    groups = list(file_groups(job.files, group_bytes=scan.part_bytes))
    scanned = _scan(job, scan, groups, workers)
    encode = EncodeJob(scan, encoding_of(job, tokenizer, stamp=stamp))
    parts = _encode(job, encode, groups, scanned, workers)
    work.write(PARTS_NAME, json.dumps([part._asdict() for part in parts]).encode())
    plan_job = PlanJob(
        places,
        settings,
        tuple(job.splits),
        tokenizer.vocab_size,
        tokenizer.is_lossless,
    )
    logger.info("looking for duplicates, and planning the shards")
    plan = next(workers.in_order(partial(plan_on_node, plan_job), [None]))
    splits = {split: info for split, (info, _) in plan.splits.items()}
    check_splits(splits, job)
    _write(job, places, plan, workers, num_parts=len(parts))
    _count(job, places, splits, tokenizer, workers)
    job.remarks += remarks_on_size(settings, tokenizer)
    statistics = statistics_of(parts, plan)
    index = index_of(tokenizer, dtype=token_dtype(tokenizer.vocab_size), splits=splits, statistics=statistics)
    write_bytes(job.scratch / TOKENIZER_NAME, tokenizer.to_json().encode("utf-8"))
    write_hashed_json(job.scratch / INDEX_NAME, index)
    write_request(job.scratch, request)
    for lock in locks:
        lock.check()
    corpus = shared_files(places.corpus)
    for name in (TOKENIZER_NAME, PREPARED_NAME, INDEX_NAME):  # the index makes the files a corpus
        corpus.upload(job.scratch / name, name)


def file_groups(files: Sequence[SourceFile], *, group_bytes: int) -> Iterator[FileGroup]:
    """Yield consecutive files as groups that are scanned together: one file, or small files of about `group_bytes`
    bytes in all."""
    first = 0
    num_bytes = 0
    for number, file in enumerate(files):
        size = group_bytes if file.size is None else file.size
        if number > first and num_bytes + size > group_bytes:
            yield FileGroup(first, tuple(files[first:number]))
            first = number
            num_bytes = 0
        num_bytes += size
    yield FileGroup(first, tuple(files[first:]))


def _scan(job: Preparation, scan: ScanJob, groups: Sequence[FileGroup], workers: Workers) -> list[ScannedGroup]:
    """Scan all groups. Returns the scans with positions relative to all inputs."""
    scanned = []
    notes: dict[str, list[str]] = defaultdict(list)
    ordinal = 0
    stored = 0
    with Progress("counting records", total=job.total_bytes) as progress:
        for group, result in zip(groups, workers.in_order(partial(scan_group, scan), groups), strict=True):
            parts = [_placed(part, group.first_file, ordinal, stored) for part in result.parts]
            scanned.append(result._replace(parts=parts))
            if parts:
                ordinal = parts[-1].end.ordinal
            stored += sum(file.size or 0 for file in group.files)
            for path, note in result.notes:
                notes[note].append(path)
            progress.reach(stored)
    job.remarks += remarks_of_notes(notes)
    return scanned


def _placed(part: PartRange, first_file: int, ordinal: int, stored: int) -> PartRange:
    """Return a range of a group as a range of all inputs. `ordinal` and `stored` are those of the group's begin."""

    def placed(cursor: Cursor) -> Cursor:
        return cursor._replace(file=cursor.file + first_file, ordinal=cursor.ordinal + ordinal)

    return PartRange(placed(part.begin), placed(part.end), part.stored_bytes + stored)


def _encode(
    job: Preparation, encode: EncodeJob, groups: Sequence[FileGroup], scanned: Sequence[ScannedGroup], workers: Workers
) -> list[PartInfo]:
    """Encode the parts that are not finished yet. Returns the descriptions of all parts, in order."""
    hashes = identities(job.files)
    work = shared_files(encode.scan.places.work)
    numbered: list[list[tuple[int, str, PartRange]]] = []
    count = 0
    for group_scan in scanned:
        numbered.append([])
        for part in group_scan.parts:
            numbered[-1].append((count, hash_up_to(part.end, hashes), part))
            count += 1
    ranges = {number: (inputs, part) for parts in numbered for number, inputs, part in parts}
    infos = {}
    for number, info in _found_parts(work):
        if number in ranges and is_same_part(info, encode.encoding.stamp, *ranges[number]):
            infos[number] = info
    job.kept["parts"] = len(infos)
    if infos:
        logger.info("%s: %s kept from an interrupted run", work.location, counted(len(infos), "finished part"))
    sizes = _part_sizes(ranges)

    def tasks() -> Iterator[EncodeTask]:
        for group, group_scan, parts in zip(groups, scanned, numbered, strict=True):
            most = 1 if group_scan.can_seek else -(-len(parts) // _NUM_CHAINS)
            unfinished = [part for part in parts if part[0] not in infos]
            for chain in _chains(unfinished, most=most):
                yield EncodeTask(group, tuple(chain))

    rates = _NodeRates()
    done = sum(sizes[number] for number in infos)
    with Progress("encoding", total=job.total_bytes, done=done, note=rates.note) as progress:
        for results in workers.in_order(partial(encode_on_node, encode), tasks()):
            for info in results:
                infos[info.number] = info
            num_bytes = sum(sizes[info.number] for info in results)
            rates.add(workers.where, num_bytes)
            progress.advance(num_bytes)
    return [infos[number] for number in range(count)]


def _found_parts(work: SharedFiles) -> Iterator[tuple[int, PartInfo]]:
    """Yield (number, description) of the parts in the work folder."""
    names = [name for name in work.sizes() if name.startswith("part-") and name.endswith(".json")]
    numbers = [int(name.removeprefix("part-").removesuffix(".json")) for name in names]
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for number, info in zip(numbers, threads.map(partial(find_part, work), numbers), strict=True):
            if info is not None:
                yield number, info


def _part_sizes(ranges: dict[int, tuple[str, PartRange]]) -> dict[int, int]:
    """Return the number of stored bytes of each part, by number."""
    sizes = {}
    before = 0
    for number, (_, part) in ranges.items():
        sizes[number] = part.stored_bytes - before
        before = part.stored_bytes
    return sizes


def _chains(parts: Sequence[tuple[int, str, PartRange]], *, most: int) -> Iterator[list[tuple[int, str, PartRange]]]:
    """Yield runs of parts with consecutive numbers, of at most `most` parts."""
    chain: list[tuple[int, str, PartRange]] = []
    for part in parts:
        if chain and (len(chain) == most or part[0] != chain[-1][0] + 1):
            yield chain
            chain = []
        chain.append(part)
    if chain:
        yield chain


def _write(job: Preparation, places: Places, plan: ShardPlan, workers: Workers, *, num_parts: int) -> None:
    """Write the shards that are not finished yet, and add the entries of all shards to the splits of the plan."""
    work = shared_files(places.work)
    corpus = shared_files(places.corpus)
    _, (first, *_) = plan.splits[TRAIN]
    present = corpus.sizes()
    written = {}
    for name in work.sizes():
        if name.startswith("shard-") and name.endswith(".json"):
            shard_name = name.removeprefix("shard-").removesuffix(".json")
            info = finished_shard(work, first.plan, shard_name)
            if info is not None and present.get(shard_name) == info.bytes and f"{shard_name}.idx" in present:
                written[shard_name] = info
    job.kept["shards"] = len(written)
    corpus.remove(name for name in present if name.removesuffix(".idx") not in written)
    num_shards = sum(len(tasks) for _, tasks in plan.splits.values())
    most = max(1, min(_MOST_SHARDS, num_shards // _SHARD_TASKS))
    groups = [
        group for split, (_, tasks) in plan.splits.items() for group in _shard_groups(split, tasks, written, most)
    ]
    rates = _NodeRates()
    itemsize = np.dtype(first.dtype).itemsize
    total = itemsize * sum(info.tokens for info, _ in plan.splits.values())
    done = itemsize * sum(info.tokens for info in written.values())
    with Progress("writing", total=total, done=done, note=rates.note) as progress:
        for infos in workers.in_order(partial(write_on_node, places, num_parts), groups):
            num_bytes = itemsize * sum(info.tokens for info in infos)
            rates.add(workers.where, num_bytes)
            progress.advance(num_bytes)
            written.update((info.name, info) for info in infos)
    for info_of_split, tasks in plan.splits.values():
        info_of_split.shards += [written[task.name] for task in tasks]
    wanted = {name for shard in written for name in (shard, f"{shard}.idx")}
    corpus.remove(name for name in corpus.sizes() if name not in wanted)  # a lost node can leave unfinished files


def _shard_groups(split: str, tasks: Sequence[ShardTask], written: Collection[str], most: int) -> Iterator[WriteTask]:
    """Yield the shards that are not written yet as groups of at most `most` consecutive shards."""
    group: list[ShardTask] = []
    first = 0
    for number, task in enumerate(tasks):
        if task.name in written:
            continue
        if group and (len(group) == most or number != first + len(group)):
            yield WriteTask(split, first, tuple(group))
            group = []
        if not group:
            first = number
        group.append(task)
    if group:
        yield WriteTask(split, first, tuple(group))


def _count(
    job: Preparation, places: Places, splits: dict[str, SplitInfo], tokenizer: Tokenizer, workers: Workers
) -> None:
    """Write the token counts of each split, and add their hashes to `splits`."""
    num_names = len(job.reading.names)
    count = partial(count_on_node, places, num_names, tokenizer.unknown_id)
    tasks = []
    for split, info in splits.items():
        tasks.append((split, [shard.name for shard in info.shards]))
    for (split, info), counts in zip(splits.items(), workers.in_order(count, tasks), strict=True):
        info.counts_sha256 = counts.sha256
        if not tokenizer.is_lossless and tokenizer.unknown_id is not None:
            info.unknown_tokens = counts.num_unknown
        if split == TRAIN and counts.num_unused:
            job.remarks.append(remark_on_names(counts.num_unused, num_names))


class _NodeRates:
    """Bytes per second of each node since the begin of a step."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._num_bytes: Counter[str] = Counter()

    def add(self, node: str, num_bytes: int) -> None:
        """Count bytes that a node has finished. The name is empty for the present machine, which is not shown."""
        if node:
            self._num_bytes[node] += num_bytes

    def note(self) -> str:
        """Return a text such as `; 2 nodes: a 4.1 MB/s, b 3.9 MB/s`, the slowest nodes first."""
        elapsed = max(time.monotonic() - self._begin, 1e-9)
        slowest = sorted(self._num_bytes.items(), key=lambda item: item[1])
        if not slowest:
            return ""
        shown = ", ".join(f"{node} {num_bytes / elapsed / 1e6:,.1f} MB/s" for node, num_bytes in slowest[:_MOST_NODES])
        more = ", ..." if len(slowest) > _MOST_NODES else ""
        return f"; {counted(len(slowest), 'node')}: {shown}{more}"
