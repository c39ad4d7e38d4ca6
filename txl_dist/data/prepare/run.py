"""Preparation of a corpus from text of any size, in worker processes: a small MapReduce.

    read      the main process cuts the inputs into parts of whole raw records          input_splits.py
    encode    workers decode, parse, split and tokenize; each part is sorted by key     documents.py  tokenize.py
    compare   find exact duplicates; workers find near duplicates       duplicates.py  minhash.py  near_duplicates.py
    assemble  plan the shards; workers write one shard each                             merge.py
    commit    write the counts, tokenizer.json and index.json; rename the folder

A seeded hash shuffles the train documents over the whole corpus. The other splits keep the order of the input. The
result depends on the inputs, the tokenizer, the seed, the shard length, and the settings for invalid text and
duplicates. The result does not depend on the number of workers or the size of the parts. After a kill, the same command
continues from the finished parts and shards (workdir.py). Empty documents are dropped and counted. Every other document
ends in the end-of-text token if the tokenizer has one.

Limitations: for a while the disk holds the tokens twice, in parts and in shards. To train a tokenizer, the main process
reads the inputs once or twice more.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from txl_dist.console.formatting import counted, format_table
from txl_dist.console.logging import logger
from txl_dist.console.progress import Progress
from txl_dist.data.format import (
    INDEX_NAME,
    TOKENIZER_NAME,
    SplitInfo,
    counts_name,
    index_of,
    npy_bytes,
    token_dtype,
)
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.prepare.documents import SPLITS, TRAIN
from txl_dist.data.prepare.input_splits import Cursor
from txl_dist.data.prepare.merge import (
    ShardPlan,
    ShardTask,
    is_written,
    plan_shards,
    read_written,
    write_planned,
)
from txl_dist.data.prepare.minhash import rows_of_bands
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.data.prepare.preparation import (
    Preparation,
    check_in_the_way,
    check_learning,
    choose_held_out,
    files_of_named,
    list_files,
    make_tokenizer,
    remarks_on_size,
)
from txl_dist.data.prepare.request import check_request, request_of, write_request
from txl_dist.data.prepare.sources import Listing, identities, is_repeatable
from txl_dist.data.prepare.tokenize import Encoding, PartInfo, PartTask, encode_part, read_part_info
from txl_dist.data.prepare.validation_split import named_few, no_text
from txl_dist.data.prepare.workdir import CORPUS, check_target, claim_scratch, move_into_place
from txl_dist.data.verify.inspect import statistics_lines
from txl_dist.data.workers import Workers, start_workers
from txl_dist.errors import ConfigError, DataError
from txl_dist.io.files import flush_folder, write_bytes, write_hashed_json
from txl_dist.tokenizers.base import Tokenizer

_PARTS_VERSION = 3
"""Version of the records of parts. Parts of another version are discarded and made again."""


@dataclass(frozen=True)
class PrepareSummary:
    """Result of `prepare_corpus`: the corpus, and facts for the user about how it was made."""

    corpus: Corpus
    is_unchanged: bool
    """Whether an identical corpus existed and was not replaced."""
    files_left_out: int
    """Number of files in the input folders that were left out because they have no suffix of text. The index does not
    contain this number."""
    hidden_files: tuple[str, ...] = ()
    """Paths of the hidden files that were left out of the input folders, patterns and URLs."""
    remarks: tuple[str, ...] = ()
    """Sentences for the user about splits and the vocabulary."""
    parts_kept: int = 0
    """Number of parts that were reused from an interrupted preparation."""
    shards_kept: int = 0
    """Number of shards that were reused from an interrupted preparation."""

    def lines(self) -> list[str]:
        """Return the summary for the user, line by line."""
        corpus = self.corpus
        if self.is_unchanged:
            state = "already there, identical"
        else:
            state = "written"
        lines = [f"{corpus.location}: {state}; {corpus.vocab_size:,} ids, data fingerprint {corpus.fingerprint[:16]}"]
        lines += self._table()
        lines += [f"  {remark}" for remark in self.remarks]
        for split in corpus.splits.values():
            if split.num_unknown:
                lines.append(f"  unknown tokens in {split.name}: {split.num_unknown / split.tokens:.2%}")
        for split in corpus.splits.values():
            if split.lost:
                lines.append(f"  losses on {split.name} have no bits per byte: {split.lost}")
        counts = {**corpus.statistics, "files left out (suffix)": self.files_left_out}
        lines += [f"  {line}" for line in statistics_lines(counts)]
        if self.hidden_files:
            names = ", ".join(self.hidden_files[:3])
            if len(self.hidden_files) > 3:
                more = ", ..."
            else:
                more = ""
            lines.append(f"  hidden files left out: {len(self.hidden_files):,} ({names}{more})")
        if self.parts_kept:
            parts = counted(self.parts_kept, "part")
            shards = counted(self.shards_kept, "shard")
            lines.append(f"  kept from an interrupted preparation: {parts}, {shards}")
        return lines

    def _table(self) -> list[str]:
        """Return the lines of the table of splits."""
        rows: list[tuple[str, ...]] = [
            ("split", "documents", "tokens", "bytes of text", "bytes/token", "longest", "shards")
        ]
        for split in sorted(self.corpus.splits.values(), key=lambda split: SPLITS.index(split.name)):
            row = (
                split.name,
                f"{split.documents:,}",
                f"{split.tokens:,}",
                f"{split.text_bytes:,}",
                f"{split.text_bytes / split.tokens:.2f}",
                f"{split.longest:,}",
                f"{len(split.shards):,}",
            )
            rows.append(row)
        return [f"  {line}" for line in format_table(rows)]


def prepare_corpus(output: str | Path, **settings: Any) -> PrepareSummary:
    """Prepare a corpus and write it to the folder `output`.

    The keyword arguments are the fields of `PrepareSettings`, of which only `inputs` is required. Raises ConfigError
    for settings that are impossible or would have no effect. Raises DataError if there is no text, or if a file is
    given twice or cannot be read. Also raises DataError if the output cannot be written, contains another corpus or
    other files, or is being prepared by another process. If a worker process dies, DataError is raised too.
    """
    job_settings = PrepareSettings(**settings).completed()
    if job_settings.cluster or job_settings.workdir or "://" in str(output):
        raise ConfigError(
            f"prepare_corpus works next to a local folder (output={output}). For a cluster, a workdir or an output at "
            "a URL, call prepare_on_cluster."
        )
    target = Path(output).resolve()  # the target of a link is replaced, not the link
    check_target(target)
    check_learning(job_settings)
    is_named = job_settings.name is not None
    if is_named:
        listing = Listing([])
        remarks: list[str] = []
    else:
        listing, remarks = list_files(job_settings)
    request = request_of(job_settings, listing.files)
    if not job_settings.overwrite:
        check_request(request, target)
    stamp = job_settings.stamp()
    can_continue = is_named or is_repeatable(listing.files)
    with claim_scratch(target, stamp=stamp, can_continue=can_continue) as scratch, ExitStack() as streams:
        if is_named:
            files = files_of_named(job_settings, scratch)
        else:
            files = listing.files
        job = Preparation(job_settings, scratch, files, remarks)
        choose_held_out(job, streams)
        check_in_the_way(job, target)
        tokenizer = make_tokenizer(job)
        with start_workers(job.num_workers()) as workers:
            parts = _encode(job, tokenizer, workers, stamp=stamp)
            _assemble(job, tokenizer, workers, parts)
            write_request(scratch / CORPUS, request)
            job.remarks += remarks_on_size(job_settings, tokenizer)
        is_unchanged = move_into_place(scratch / CORPUS, target, overwrite=job_settings.overwrite)
    return summary_of(job, listing, open_corpus(output), is_unchanged=is_unchanged)


def summary_of(job: Preparation, listing: Listing, corpus: Corpus, *, is_unchanged: bool) -> PrepareSummary:
    """Return the result of a finished preparation. `listing` has the inputs that were left out."""
    return PrepareSummary(
        corpus=corpus,
        is_unchanged=is_unchanged,
        files_left_out=listing.num_other,
        hidden_files=listing.hidden,
        remarks=tuple(job.remarks),
        parts_kept=job.kept["parts"],
        shards_kept=job.kept["shards"],
    )


def _encode(job: Preparation, tokenizer: Tokenizer, workers: Workers, *, stamp: str) -> list[PartInfo]:
    """Tokenize the parts that are not finished yet, and return the descriptions of all parts.

    Raises DataError if an input cannot be read or contains no text for the train split.
    """
    hashes = identities(job.files)
    encoding = encoding_of(job, tokenizer, stamp=stamp)

    parts: list[PartInfo] = []
    begin = Cursor()
    num_stored = 0
    while (part := read_part_info(job.scratch, len(parts))) is not None:
        is_of_this_run = part.stamp == encoding.stamp and part.begin == begin and part.end.file <= len(hashes)
        if not is_of_this_run or part.inputs != hash_up_to(part.end, hashes):
            break
        parts.append(part)
        begin = part.end
        num_stored = part.stored_bytes
    job.kept["parts"] = len(parts)
    if parts:
        logger.info("%s: %s kept from an interrupted run", job.scratch, counted(len(parts), "finished part"))
    notes: dict[str, list[str]] = defaultdict(list)

    def tasks() -> Iterator[PartTask]:
        for number, part in enumerate(job.parts(job.files, begin), start=len(parts)):
            for path, note in part.notes:
                notes[note].append(path)
            yield PartTask(encoding, number, hash_up_to(part.end, hashes), part)

    with Progress("encoding", total=job.total_bytes, done=num_stored) as progress:
        for info in workers.in_order(encode_part, tasks()):
            parts.append(info)
            progress.reach(info.stored_bytes)
    job.remarks += remarks_of_notes(notes)
    return parts


def encoding_of(job: Preparation, tokenizer: Tokenizer, *, stamp: str) -> Encoding:
    """Return the settings for encoding the parts of a preparation whose settings have the hash `stamp`."""
    settings = job.settings
    facts = f"{_PARTS_VERSION} {stamp} {tokenizer.fingerprint} {job.reading}"
    if settings.compares_signatures:
        band_rows = rows_of_bands(settings.near_threshold)
    else:
        band_rows = 0
    return Encoding(
        folder=str(job.scratch),
        tokenizer=str(job.scratch / TOKENIZER_NAME),
        fingerprint=tokenizer.fingerprint,
        reading=job.reading,
        seed=settings.seed,
        has_bands=settings.duplicates != "ignore" and settings.near_duplicates == "estimate",
        band_rows=band_rows,
        stamp=hashlib.sha256(facts.encode()).hexdigest(),
    )


def hash_up_to(end: Cursor, hashes: Sequence[str]) -> str:
    """Return the hash of all inputs up to the cursor `end`. `hashes` are the `identities` of the input files."""
    if end.offset:
        last_file = end.file
    else:
        last_file = end.file - 1
    return hashes[last_file]


def remarks_of_notes(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a sentence for the user for each note on how files are read. `notes` are the paths of these files."""
    remarks = []
    for note, paths in notes.items():
        if len(paths) > 1:
            more = f" and {len(paths) - 1:,} more"
        else:
            more = ""
        remarks.append(f"{paths[0]}{more}: {note}")
    return remarks


def _assemble(job: Preparation, tokenizer: Tokenizer, workers: Workers, parts: Sequence[PartInfo]) -> None:
    """Write all files of the corpus into the folder `corpus` of the work folder, the index last.

    Raises DataError if a split has no text.
    """
    settings = job.settings
    folder = job.scratch / CORPUS
    plan = plan_shards(
        job.scratch,
        parts,
        settings=job.settings,
        splits=job.splits,
        vocab_size=tokenizer.vocab_size,
        is_lossless=tokenizer.is_lossless,
        workers=workers,
    )
    splits = {split: info for split, (info, _) in plan.splits.items()}
    check_splits(splits, job)
    _write_shards(job, workers, plan.splits, folder)
    for split, info in splits.items():
        info.counts_sha256 = hashlib.sha256((folder / counts_name(split)).read_bytes()).hexdigest()
        if not tokenizer.is_lossless and tokenizer.unknown_id is not None:
            info.unknown_tokens = int(np.load(folder / counts_name(split))[tokenizer.unknown_id])
    write_bytes(folder / TOKENIZER_NAME, tokenizer.to_json().encode("utf-8"))
    if settings.vocab_list is not None:
        num_names = len(job.reading.names)
        train_counts = np.load(folder / counts_name(TRAIN))
        num_unused = int((train_counts[:num_names] == 0).sum())
        if num_unused:
            job.remarks.append(remark_on_names(num_unused, num_names))
    statistics = statistics_of(parts, plan)
    index = index_of(tokenizer, dtype=token_dtype(tokenizer.vocab_size), splits=splits, statistics=statistics)
    write_hashed_json(folder / INDEX_NAME, index)
    flush_folder(folder)


def remark_on_names(num_unused: int, num_names: int) -> str:
    """Return the sentence for the user about names of a vocabulary list that do not occur."""
    return f"{num_unused:,} of the {num_names:,} names of the vocabulary list do not occur in train"


def statistics_of(parts: Sequence[PartInfo], plan: ShardPlan) -> dict[str, int]:
    """Return the numbers of documents by outcome, which the corpus's index records."""
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part.counts)
    statistics = {
        "documents_read": counts["read"],
        "empty_documents_dropped": counts["empty"],
        "documents_with_replacements": counts["replaced"],
        "documents_skipped": counts["skipped"],
        **plan.statistics,
    }
    if counts["cut"]:
        statistics["documents_cut"] = counts["cut"]
    if counts["invalid"]:
        statistics["invalid_records_skipped"] = counts["invalid"]
    return statistics


def _write_shards(
    job: Preparation, workers: Workers, planned: dict[str, tuple[SplitInfo, list[ShardTask]]], folder: Path
) -> None:
    """Write the shards that are not finished yet, and add the entries of all shards to the splits in `planned`."""
    tasks = [task for _, tasks_of_split in planned.values() for task in tasks_of_split]
    finished = {task.name for task in tasks if is_written(task)}
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():  # a shard of another plan, or incomplete
        if path.name.removesuffix(".idx") not in finished:
            path.unlink()
    job.kept["shards"] = len(finished)
    written = workers.in_order(write_planned, (task for task in tasks if task.name not in finished))
    itemsize = np.dtype(tasks[0].dtype).itemsize
    num_tokens = sum(info.tokens for info, _ in planned.values())
    with Progress("writing", total=itemsize * num_tokens) as progress:
        for split, (info, tasks_of_split) in planned.items():
            counts = np.zeros(tasks_of_split[0].vocab_size, dtype=np.int64)
            for task in tasks_of_split:
                if task.name in finished:
                    shard = read_written(task)
                else:
                    shard = next(written)
                info.shards.append(shard.info)
                counts += shard.counts
                progress.advance(itemsize * shard.info.tokens)
            write_bytes(folder / counts_name(split), npy_bytes(counts))


def check_splits(infos: dict[str, SplitInfo], job: Preparation) -> None:
    """Raise DataError if a split has no document."""
    if not infos[TRAIN].documents:
        raise no_text(job.settings.inputs, job.reading)
    for split, info in infos.items():
        if not info.documents:
            files = [file.path for file in job.files if file.split == split]
            if files:
                raise DataError(
                    f"the files of the split {split} contain no text: {named_few(files)}. Give other files for the "
                    "split."
                )
            raise DataError(
                f"the split {split} got no document (number of documents in the split train: "
                f"{infos[TRAIN].documents}). Give text for the split {split} with `--{split} PATH`, or prepare without "
                f"this split with `--{split}-fraction 0`."
            )
