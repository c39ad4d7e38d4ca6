"""Turns text into a corpus, of any size, with worker processes: a small MapReduce.

    read      this process cuts the inputs into parts of whole raw records              cutting.py
    encode    workers decode, parse, split and tokenise; each part is sorted by key     documents.py  encoding.py
    assemble  duplicates, plan; workers gather, sort and write one shard each           duplicates.py  assembly.py
    commit    counts, tokenizer.json, index.json, and one rename

Train documents are shuffled over the whole corpus by a seeded hash; held-out ones keep the order of the input. What
comes out depends on the inputs, the tokenizer, the seed, the shard length and the policies, never on the number of
workers, the size of the parts, or how often it was killed: finished parts and shards are kept, and the same command
goes on (scratch.py). Empty documents are dropped and counted; each other one ends in end-of-text, where the
tokenizer has it.

What it gives up: the disk holds the tokens twice for a while (the parts, and the shards made of them), and learning
a tokenizer reads the inputs once or twice more, in this process.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
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
    DROPPED,
    ShardTask,
    find_duplicates,
    hash_of_plan,
    is_written,
    plan_split,
    read_written,
    write_planned,
)
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
from txl_dist.data.workers import Workers, start_workers
from txl_dist.errors import ConfigError, DataError
from txl_dist.io.files import flush_folder, write_bytes, write_hashed_json
from txl_dist.tokenizers.base import Tokenizer

_PARTS_VERSION = 3
"""Of what the records of parts hold: parts of another version are made again."""
_COUNTS = {
    "held_out_duplicates": "train documents that also stand in a held-out split",
    "documents_cut": "documents cut, their ends held out",
    "invalid_records_skipped": "invalid records left out (no JSON, or a field missing, null, of another type or twice)",
}


@dataclass(frozen=True)
class PrepareSummary:
    """What `prepare_corpus` made."""

    corpus: Corpus
    is_unchanged: bool
    """An identical corpus was already there and was left alone."""
    files_left_out: int
    """Files in the given folders whose suffix is none of a text. Not in the index: they change no content."""
    hidden_files: tuple[str, ...] = ()
    """Hidden files in the given folders, patterns and URLs that were left out."""
    remarks: tuple[str, ...] = ()
    """Sentences on what is held out."""
    parts_kept: int = 0
    shards_kept: int = 0
    """What an interrupted preparation had finished."""

    def lines(self) -> list[str]:
        """For people."""
        corpus = self.corpus
        state = "already there, identical" if self.is_unchanged else "written"
        lines = [f"{corpus.location}: {state}; {corpus.vocab_size:,} ids, data fingerprint {corpus.fingerprint[:16]}"]
        lines += [*self._table(), *(f"  {remark}" for remark in self.remarks)]
        splits = corpus.splits.values()
        shares = {split.name: split.num_unknown / split.tokens for split in splits}
        lines += [f"  unknown in {name}: {share:.2%} of the tokens" for name, share in shares.items() if share]
        lines += [f"  lost in {split.name}, so no bits per byte: {split.lost}" for split in splits if split.lost]
        counts = {**corpus.statistics, "files left out (suffix)": self.files_left_out}
        lines += [f"  {_COUNTS.get(key, key.replace('_', ' '))}: {count:,}" for key, count in counts.items() if count]
        if self.hidden_files:
            shown = ", ".join(self.hidden_files[:3]) + ", ..." * (len(self.hidden_files) > 3)
            lines.append(f"  hidden files left out: {len(self.hidden_files):,} ({shown})")
        if self.parts_kept:
            parts, shards = counted(self.parts_kept, "part"), counted(self.shards_kept, "shard")
            lines.append(f"  kept from an interrupted preparation: {parts}, {shards}")
        return lines

    def _table(self) -> list[str]:
        rows: list[tuple[str, ...]] = [
            ("split", "documents", "tokens", "bytes of text", "bytes/token", "longest", "shards")
        ]
        for name, split in sorted(self.corpus.splits.items(), key=lambda named: SPLITS.index(named[0])):
            numbers = (split.documents, split.tokens, split.text_bytes)
            rate = f"{split.text_bytes / split.tokens:.2f}"
            rows.append((name, *(f"{n:,}" for n in numbers), rate, f"{split.longest:,}", f"{len(split.shards):,}"))
        return [f"  {line}" for line in format_table(rows)]


def prepare_corpus(output: str | Path, **settings: Any) -> PrepareSummary:
    """Write the corpus `output`. The keywords are the fields of `PrepareSettings`; `inputs` has no default.

    Raises ConfigError for settings that are impossible or have no meaning; DataError if there is no text, a file is
    given twice or cannot be read, the output cannot be written, another corpus or folder is in the way, another
    process prepares it, or a worker dies.
    """
    job_settings = PrepareSettings(**settings).completed()
    if "://" in str(output):
        raise ConfigError(f"the output {output} is a URL. Prepare into a folder, and copy that.")
    target = Path(output).resolve()  # of a link what it stands for is replaced
    check_target(target)
    check_learning(job_settings)
    is_named = job_settings.name is not None
    listing, remarks = (Listing([]), []) if is_named else list_files(job_settings)
    request = request_of(job_settings, listing.files)
    if not job_settings.overwrite:
        check_request(request, target)
    stamp, can_continue = job_settings.stamp(), is_named or is_repeatable(listing.files)
    with claim_scratch(target, stamp=stamp, can_continue=can_continue) as scratch, ExitStack() as streams:
        files = files_of_named(job_settings, scratch) if is_named else listing.files
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
    return PrepareSummary(
        corpus=open_corpus(output),
        is_unchanged=is_unchanged,
        files_left_out=listing.num_other,
        hidden_files=listing.hidden,
        remarks=tuple(job.remarks),
        parts_kept=job.kept["parts"],
        shards_kept=job.kept["shards"],
    )


def _encode(job: Preparation, tokenizer: Tokenizer, workers: Workers, *, stamp: str) -> list[PartInfo]:
    """All parts; those that are there already are kept."""
    settings, so_far = job.settings, identities(job.files)
    encoding = Encoding(
        folder=str(job.scratch),
        tokenizer=str(job.scratch / TOKENIZER_NAME),
        fingerprint=tokenizer.fingerprint,
        reading=job.reading,
        seed=settings.seed,
        has_bands=settings.duplicates != "ignore",
        stamp=hashlib.sha256(f"{_PARTS_VERSION} {stamp} {tokenizer.fingerprint} {job.reading}".encode()).hexdigest(),
    )

    def hash_up_to(end: Cursor) -> str:
        return so_far[end.file if end.offset else end.file - 1]

    parts: list[PartInfo] = []
    while (found := read_part_info(job.scratch, len(parts))) is not None:
        begin = parts[-1].end if parts else Cursor()
        is_own = found.stamp == encoding.stamp and found.begin == begin and found.end.file <= len(so_far)
        if not is_own or found.inputs != hash_up_to(found.end):
            break
        parts.append(found)
    job.kept["parts"] = len(parts)
    if parts:
        logger.info("%s: %d finished parts are kept", job.scratch, len(parts))
    begin, stored = (parts[-1].end, parts[-1].stored_bytes) if parts else (Cursor(), 0)
    notes: dict[str, list[str]] = defaultdict(list)

    def tasks() -> Iterator[PartTask]:
        for number, part in enumerate(job.parts(job.files, begin), start=len(parts)):
            for path, note in part.notes:
                notes[note].append(path)
            yield PartTask(encoding, number, hash_up_to(part.end), part)

    with Progress("encoding", total=job.total_bytes, done=stored) as progress:
        for info in workers.in_order(encode_part, tasks()):
            parts.append(info)
            progress.reach(info.stored_bytes)
    job.remarks += [f"{_first_of(paths)}: {note}" for note, paths in notes.items()]
    return parts


def _first_of(paths: Sequence[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1:,} more" if len(paths) > 1 else "")


def _assemble(job: Preparation, tokenizer: Tokenizer, workers: Workers, parts: Sequence[PartInfo]) -> None:
    """Write the corpus into its folder in the scratch folder, the index last."""
    settings, scratch, folder = job.settings, job.scratch, job.scratch / CORPUS
    dtype = token_dtype(tokenizer.vocab_size)
    duplicated = find_duplicates(scratch, parts, policy=settings.duplicates)
    write_bytes(scratch / DROPPED, duplicated.dropped.tobytes())
    plan = hash_of_plan(parts, duplicated.dropped, shard_len=settings.shard_len)
    planned = {
        split: plan_split(
            scratch,
            split,
            parts,
            dropped=duplicated.dropped,
            shard_len=settings.shard_len,
            dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            plan=plan,
            is_lossless=tokenizer.is_lossless,
        )
        for split in job.splits
    }
    _check_splits({split: info for split, (info, _) in planned.items()}, job)
    _write_shards(job, workers, planned, folder)
    for split, (info, _) in planned.items():
        info.counts_sha256 = hashlib.sha256((folder / counts_name(split)).read_bytes()).hexdigest()
        if not tokenizer.is_lossless and tokenizer.unknown_id is not None:
            info.unknown_tokens = int(np.load(folder / counts_name(split))[tokenizer.unknown_id])
    write_bytes(folder / TOKENIZER_NAME, tokenizer.to_json().encode("utf-8"))
    counts = sum((Counter(part.counts) for part in parts), Counter())
    statistics = {
        "documents_read": counts["read"],
        "empty_documents_dropped": counts["empty"],
        "documents_with_replacements": counts["replaced"],
        "documents_skipped": counts["skipped"],
        **duplicated.statistics,
        **({"documents_cut": counts["cut"]} if counts["cut"] else {}),
        **({"invalid_records_skipped": counts["invalid"]} if counts["invalid"] else {}),
    }
    splits = {split: info for split, (info, _) in planned.items()}
    if settings.vocab_list is not None:
        unused = int((np.load(folder / counts_name(TRAIN))[: len(job.reading.names)] == 0).sum())
        told = f"{unused:,} of the {len(job.reading.names):,} names of the vocabulary list do not occur in train"
        job.remarks += [told] if unused else []
    index = index_of(tokenizer, dtype=dtype, splits=splits, statistics=statistics)
    write_hashed_json(folder / INDEX_NAME, index)
    flush_folder(folder)


def _write_shards(
    job: Preparation, workers: Workers, planned: dict[str, tuple[SplitInfo, list[ShardTask]]], folder: Path
) -> None:
    """Write what is not written yet, and fill in what the index says of the shards."""
    tasks = [task for _, own in planned.values() for task in own]
    finished = {task.name for task in tasks if is_written(task)}
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():  # of another plan, or half written
        if path.name.removesuffix(".idx") not in finished:
            path.unlink()
    job.kept["shards"] = len(finished)
    written = workers.in_order(write_planned, (task for task in tasks if task.name not in finished))
    itemsize = np.dtype(tasks[0].dtype).itemsize
    with Progress("writing", total=itemsize * sum(info.tokens for info, _ in planned.values())) as progress:
        for split, (info, own) in planned.items():
            counts = np.zeros(own[0].vocab_size, dtype=np.int64)
            for task in own:
                shard = read_written(task) if task.name in finished else next(written)
                info.shards.append(shard.info)
                counts += shard.counts
                progress.advance(itemsize * shard.info.tokens)
            write_bytes(folder / counts_name(split), npy_bytes(counts))


def _check_splits(infos: dict[str, SplitInfo], job: Preparation) -> None:
    if not infos[TRAIN].documents:
        raise no_text(job.settings.inputs, job.reading)
    for split, info in infos.items():
        if not info.documents:
            if files := [file.path for file in job.files if file.split == split]:
                raise DataError(f"no text for the split {split} in {named_few(files)}. Give other files for it.")
            raise DataError(
                f"no document fell into the split {split} ({infos[TRAIN].documents} in train). Give held-out text with "
                f"`--{split} PATH`, or have no such split with `--{split}-fraction 0`."
            )
