"""Verification of a corpus by `txl verify`: compares every file with its hash, and every document with its record.

- Each byte is read once. One pass computes the sha256 of a shard, the structure of its tar and the crc32 of each
  document.
- All damage is reported. After a damaged file the other files are still checked. Documents after an unreadable header
  are checked too, because their records contain their offsets.
- A change that alters no value, such as an added blank in index.json, is reported too.

Nothing is repaired. A user can restore a damaged file from a copy, or run `txl prepare` again.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec

import numpy as np

from txl_dist.config.schema import DataSection
from txl_dist.console.echo import echo
from txl_dist.console.formatting import counted
from txl_dist.console.progress import Progress
from txl_dist.data.format import INDEX_NAME, PREPARED_NAME, TOKENIZER_NAME, ShardInfo, counts_name
from txl_dist.data.loader.corpus import Corpus, open_corpus, storage_of
from txl_dist.data.loader.shards import Shard, Split
from txl_dist.data.storage.base import REMEDY
from txl_dist.data.storage.local import LocalStorage
from txl_dist.data.verify.tars import ForwardReader, TarSample, read_samples
from txl_dist.data.workers import num_cores, start_workers
from txl_dist.errors import DataError
from txl_dist.io.files import hashed_json, parse_object, read_bytes

P = ParamSpec("P")

_LARGE = 1 << 30
"""Size of a corpus in bytes above which worker processes save more time than their start takes."""
MAX_LISTED = 20
"""Maximum number of damaged documents that are listed for each shard. Further damaged documents are counted."""


def verify_corpus(location: str | Path, settings: DataSection | None = None) -> list[str]:
    """Compare a whole corpus with its hashes. Returns one line per problem, and no line for an intact corpus."""
    settings = settings or DataSection()
    try:
        return list(each_problem(open_corpus(location, settings), settings))
    except DataError as error:
        return [str(error)]


def problems_at(location: str, settings: DataSection, *, num_workers: int) -> Iterator[str]:
    """Yield one line for each problem of the corpus at `location`, as it is found.

    Shows the progress, and prints the names of files that do not belong to the corpus. `num_workers` 0 means one
    process per core, or only the present process for a small corpus.
    """
    try:
        corpus = open_corpus(location, settings)
    except DataError as error:
        yield str(error)
        return
    total = 0
    for split in corpus.splits.values():
        total += sum(shard.bytes for shard in split.shards)
    if not num_workers:
        num_workers = num_cores() if total > _LARGE else 1
    with Progress("verifying", total=total) as progress:
        yield from each_problem(corpus, settings, num_workers=num_workers, on_bytes=progress.advance)
    names = strangers(corpus)
    if names:
        num_files = counted(len(names), "file")
        echo(f"{location} contains {num_files} not listed in its index: {', '.join(names[:10])}")


def each_problem(
    corpus: Corpus,
    settings: DataSection,
    *,
    num_workers: int = 1,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> Iterator[str]:
    """Yield the problems of an open corpus, one line each, as they are found.

    The corpus was opened with `settings`. Each worker process verifies one shard at a time. With one worker, the
    present process does the work. The order of the problems does not depend on the number of workers. `on_bytes` is
    called with the size of each verified tar in bytes. Raises DataError if index.json disappears during the
    verification, or if a worker is killed.
    """
    content = corpus.storage.read(INDEX_NAME)
    if content != hashed_json(parse_object(content)):
        yield f"{corpus.storage.name_of(INDEX_NAME)} is edited or damaged: it does not match its own hash. {REMEDY}"
    if isinstance(corpus.storage, LocalStorage):
        yield from _problem_of(_check_request, corpus.folder / PREPARED_NAME)
    yield from _problem_of(_check_tokenizer, corpus)
    for split in corpus.splits.values():
        yield from _problem_of(_check_counts, split)
        documents = sum(shard.documents for shard in split.shards)
        if (documents, int(split.shard_tokens.sum())) != (split.documents, split.tokens):
            name = corpus.storage.name_of(INDEX_NAME)
            yield f"{name}: the sizes of split {split.name} are not the sums over its shards. {REMEDY}"
    tasks = []
    for split in corpus.splits.values():
        for info in split.shards:
            tasks.append(_ShardTask(corpus.location, settings, info, corpus.dtype, corpus.vocab_size))
    with start_workers(num_workers) as workers:
        for task, problems in zip(tasks, workers.in_order(_shard_problems, tasks), strict=True):
            on_bytes(task.info.bytes)
            yield from problems


def strangers(corpus: Corpus) -> list[str]:
    """Return the names of the files in a corpus's folder that do not belong to the corpus. Such files are not damage.

    The list is empty for a corpus at a URL.
    """
    if not isinstance(corpus.storage, LocalStorage):
        return []
    known = {INDEX_NAME, TOKENIZER_NAME, PREPARED_NAME}
    for name, split in corpus.splits.items():
        known.add(counts_name(name))
        for shard in split.shards:
            known.update((shard.name, f"{shard.name}.idx"))
    return sorted(path.name for path in corpus.folder.iterdir() if path.name not in known)


def _problem_of(check: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Iterator[str]:
    """Call a check, and yield the message of the DataError if the check raises one."""
    try:
        check(*args, **kwargs)
    except DataError as error:
        yield str(error)


def _check_request(path: Path) -> None:
    """Raise DataError if prepared.json is damaged."""
    try:
        content = read_bytes(path)
        is_whole = content == hashed_json(parse_object(content))
    except FileNotFoundError:  # an older corpus, or one of --reindex
        return
    except (OSError, ValueError):
        is_whole = False
    if not is_whole:
        raise DataError(
            f"{path} is damaged: its content does not match the hash that the file itself contains. {REMEDY}"
        )


def _check_tokenizer(corpus: Corpus) -> None:
    """Raise DataError if tokenizer.json is damaged, or is not the tokenizer of the corpus."""
    name = corpus.storage.name_of(TOKENIZER_NAME)
    content = corpus.storage.read(TOKENIZER_NAME)
    if hashlib.sha256(content).hexdigest() != corpus.tokenizer_sha256:
        raise DataError(f"{name} is damaged, or is not the tokenizer that made this corpus. {REMEDY}")
    if corpus.tokenizer.vocab_size != corpus.vocab_size:
        raise DataError(
            f"{name} must have {corpus.vocab_size} ids (vocab_size in the index), but has another number of ids. "
            f"{REMEDY}"
        )


def _check_counts(split: Split) -> None:
    """Raise DataError if the sum of a split's counts of ids is not its number of tokens."""
    num_counted = int(split.counts().sum())
    if num_counted != split.tokens:
        name = split.corpus.storage.name_of(counts_name(split.name))
        raise DataError(f"{name}: the sum of the counts is not the split's number of tokens, {split.tokens}. {REMEDY}")


class _ShardTask(NamedTuple):
    """Task of a worker process: one shard to verify, with the location and settings to open it."""

    location: str
    settings: DataSection
    info: ShardInfo
    dtype: np.dtype[Any]
    vocab_size: int


def _shard_problems(task: _ShardTask) -> list[str]:
    """Return the problems of one shard, one line each."""
    info = task.info
    problems: list[str] = []
    storage = storage_of(task.location, task.settings)
    shard = None
    try:
        shard = Shard(storage, info, dtype=task.dtype, vocab_size=task.vocab_size)
    except DataError as error:
        problems.append(str(error))
    try:
        payload = storage.open_payload(info)
    except DataError as error:
        if str(error) not in problems:
            problems.append(str(error))
        return problems  # perhaps damaged records too
    stream = ForwardReader(payload, info.bytes, name=storage.name_of(info.name))
    structure = ""
    try:
        if shard is not None:
            check = _ShardCheck(shard, task)
            problems += _bounded(check.document_problems(stream), name=shard.name)
            structure = check.structure
        if stream.sha256() != info.sha256:
            problems.append(
                f"{stream.name} is damaged: its sha256 differs from the index. {structure or payload.remedy}"
            )
        elif structure:
            problems.append(structure)
    except DataError as error:  # the bytes cannot be read any more
        problems.append(str(error))
    return problems


class _ShardCheck:
    """Check of one shard: compares its documents with their records, and its tar with the tar format."""

    def __init__(self, shard: Shard, task: _ShardTask) -> None:
        self._shard = shard
        self._dtype = task.dtype
        self._vocab_size = task.vocab_size
        self._sizes = shard.lengths * self._dtype.itemsize
        self._is_checked = np.zeros(len(shard.lengths), dtype=bool)
        self.structure = ""
        """Problem of the tar itself, which `document_problems` sets. Empty if there is none."""

    def document_problems(self, stream: ForwardReader) -> Iterator[str]:
        """Yield one line for each damaged document of the shard. Raises DataError if the bytes cannot be read."""
        try:
            for sample in read_samples(stream):
                yield from self._sample_problems(sample)
        except DataError as error:
            self.structure = str(error)
        stream.sha256()  # reads the rest, so that unreadable bytes are one error, not one per document
        # After an unreadable header the records still give the offsets of the documents.
        unread = np.flatnonzero(~self._is_checked).tolist()
        for document in unread:
            stream.seek(int(self._shard.offsets[document]))
            content = stream.read(int(self._sizes[document]))
            raw = np.frombuffer(content, dtype=np.uint8)
            yield from _problem_of(self._shard.check, raw, document)
        if unread and not self.structure:
            self.structure = (
                f"{stream.name}: no sample contains the documents of {counted(len(unread), 'record')}. {REMEDY}"
            )

    def _sample_problems(self, sample: TarSample) -> Iterator[str]:
        """Yield one line for each damaged document of a sample.

        Raises DataError if the sample's documents are not those that the records list.
        """
        offsets = self._shard.offsets
        sample_end = sample.offset + sample.tokens.nbytes
        first, last = offsets.searchsorted([sample.offset, sample_end]).tolist()
        starts = sample.offset + sample.starts * sample.tokens.itemsize
        if sample.tokens.dtype != self._dtype or not np.array_equal(offsets[first:last], starts):
            raise DataError(
                f"{self._shard.name}, sample {sample.key}: the documents of this sample differ from the records in the "
                f"shard's .idx file. {REMEDY}"
            )
        self._is_checked[first:last] = True
        is_in_vocabulary = sample.tokens.max(initial=0) < self._vocab_size
        raw = sample.tokens.view(np.uint8)
        begins = (starts - sample.offset).tolist()
        sizes = self._sizes[first:last].tolist()
        for document, begin, size in zip(range(first, last), begins, sizes, strict=True):
            content = raw[begin : begin + size]
            if not is_in_vocabulary or zlib.crc32(content.data) != self._shard.crc32s[document]:
                yield from _problem_of(self._shard.check, content, document)


def _bounded(problems: Iterator[str], *, name: str) -> Iterator[str]:
    """Yield the first MAX_LISTED problems of a shard, and then a line with the number of the remaining problems."""
    yield from itertools.islice(problems, MAX_LISTED)
    num_others = sum(1 for _ in problems)
    if num_others:
        yield f"{name}: {counted(num_others, 'more damaged document')}"
