"""State of one run of `txl prepare`, and its first steps: list the files, choose the held-out text, make the
tokenizer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from txl_dist.console.formatting import counted
from txl_dist.console.progress import Progress
from txl_dist.data.format import INDEX_NAME, TOKENIZER_NAME
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.prepare.datasets import materialise
from txl_dist.data.prepare.documents import (
    SPLITS,
    TEST,
    TRAIN,
    VALID,
    Document,
    Reading,
    documents_of,
    is_learnt_from,
    pieces_of,
)
from txl_dist.data.prepare.input_splits import Cursor, InputPart, read_parts
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.data.prepare.readers import begin, chunks_of
from txl_dist.data.prepare.shared_files import read_tokenizer_file
from txl_dist.data.prepare.sources import Listing, SourceFile, check_inputs, identities, list_sources
from txl_dist.data.prepare.split_names import split_by_name
from txl_dist.data.prepare.validation_split import hold_out, no_text
from txl_dist.data.prepare.workdir import DOWNLOADS, TOKENIZER_DONE, another_corpus
from txl_dist.data.workers import num_cores
from txl_dist.errors import ConfigError, DataError
from txl_dist.io.files import atomic_replace, open_new, read_bytes
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.importing import import_tokenizer
from txl_dist.tokenizers.listed import listed_tokenizer
from txl_dist.tokenizers.tokenizer import load_tokenizer, read_tokenizer
from txl_dist.tokenizers.training import DEFAULT_SUBWORDS, train_tokenizer

_MIB = 1 << 20
_SMALL = 16 * _MIB
"""Bytes of input below which the start of worker processes takes more time than the processes save."""
MOST_BEGUN = 64 * _MIB
"""Maximum number of bytes that are copied from a stream to disk, to see whether the stream has only few documents. If
so, the ends of the documents are held out. A longer stream nearly always has enough documents to hold out whole
documents, because even a book has only about 1 MiB. The disk has room for the copy, because it will also hold the
corpus."""


@dataclass
class Preparation:
    """State of one run of `txl prepare`, which the functions of this module and of run.py read and change."""

    settings: PrepareSettings
    scratch: Path
    """Work folder of the preparation (workdir.py)."""
    files: list[SourceFile]
    """Input files in reading order, train files first."""
    remarks: list[str] = field(default_factory=list)
    """Sentences for the user about splits and the vocabulary."""
    kept: Counter[str] = field(default_factory=Counter)
    """Number of finished `parts` and `shards` that an interrupted preparation left and this preparation reuses."""
    reading: Reading = field(init=False)
    """Options for reading documents and for holding text out of train."""

    def __post_init__(self) -> None:
        self.reading = self.settings.reading(given={file.split for file in self.files})

    @property
    def total_bytes(self) -> int:
        """Stored bytes of all files. 0 if the size of any file is unknown."""
        return _total_bytes(self.files)

    @property
    def splits(self) -> list[str]:
        """Names of the splits that the corpus will have, in the order train, valid, test."""
        given = {file.split for file in self.files}
        return [split for split in SPLITS if split in given or split in self.reading.shares]

    def parts(self, files: Sequence[SourceFile], begin: Cursor = Cursor()) -> Iterator[InputPart]:  # noqa: B008  immutable
        """Return an iterator over the parts of `files`, starting at the cursor `begin`. Raises DataError as
        `read_parts` does."""
        settings = self.settings
        return read_parts(
            files,
            part_bytes=settings.block_bytes or choose_part_bytes(_total_bytes(files)),
            begin=begin,
            allow_protocols=settings.allow_protocols,
            jsonl_field=settings.jsonl_field,
        )

    def num_workers(self) -> int:
        """Return the number of worker processes: the setting, or one per core unless the input is small."""
        if self.settings.num_workers:
            return self.settings.num_workers
        is_small = 0 < self.total_bytes < _SMALL
        if is_small:
            return 1
        return num_cores()


def list_files(settings: PrepareSettings) -> tuple[Listing, list[str]]:
    """Return (listing of all input files with the train files first, sentences for the user about files that were
    assigned to splits by their names).

    Raises DataError if there are no files or no train files, or if a file is missing or given twice. Raises ConfigError
    if a fraction is set for a split that has its own files.
    """
    if not settings.inputs:
        raise DataError("there are no inputs. Give files, folders, globs, URLs, or stdlib for the built-in text.")
    train_listings = [list_sources([train_input], settings, split=TRAIN) for train_input in settings.inputs]
    names = [str(train_input) for train_input in settings.inputs]
    other_listings = []
    other_names = []
    for split, inputs in ((VALID, settings.valid_inputs), (TEST, settings.test_inputs)):
        for split_input in inputs:
            other_listings.append(list_sources([split_input], settings, split=split))
            other_names.append(str(split_input))
    train_files = [listing.files for listing in train_listings]
    other_files = [listing.files for listing in other_listings]
    remarks: list[str] = []
    if not settings.ignore_split_names:
        given = {os.path.realpath(file.path) for files in other_files for file in files}
        train_files, remarks = split_by_name(list(zip(names, train_files, strict=True)), given=given)
    files_of_inputs = [*train_files, *other_files]
    check_inputs(list(zip(names + other_names, files_of_inputs, strict=True)))
    files = sorted(chain.from_iterable(files_of_inputs), key=lambda file: SPLITS.index(file.split))
    if files[0].split != TRAIN:
        raise DataError(
            "the inputs contain no text for the train split, because the names of all files say validation or test. "
            "Add the files of the train split, or train on all files with `--ignore-split-names`."
        )
    settings.check_given({file.split for file in files})
    num_other = 0
    hidden: tuple[str, ...] = ()
    for listing in train_listings + other_listings:
        num_other += listing.num_other
        hidden += listing.hidden
    return Listing(files, num_other, hidden), remarks


def files_of_named(settings: PrepareSettings, scratch: Path) -> list[SourceFile]:
    """Return the files of a named corpus, and download them if needed.

    The `identity` of each file is the name of the corpus, because checksums have verified the content.
    """
    name = settings.name
    assert name is not None
    with Progress(f"getting {name}", total=0) as progress:
        paths = materialise(
            name, scratch / DOWNLOADS, source=settings.archive, progress=lambda done, _: progress.reach(done)
        )
    files: list[SourceFile] = []
    for split, paths_of_split in paths.items():
        files += list_sources(paths_of_split, settings, split=split).files
    return [file._replace(identity=name) for file in files]


def check_in_the_way(job: Preparation, target: Path) -> None:
    """Raise DataError before the long work if `target` contains a corpus that certainly differs from the new corpus.

    The corpus certainly differs if it has other splits, another kind of tokenizer, or another first document in its
    validation or test split. The whole corpora are compared only at the end.
    """
    if job.settings.overwrite or not (target / INDEX_NAME).exists():
        return
    try:
        corpus = open_corpus(target)
        tokenizer = corpus.tokenizer
        is_same = set(corpus.split_names) == set(job.splits) and _is_like(tokenizer, job)
        is_same = is_same and all(_begins_alike(job, corpus, tokenizer, split) for split in job.splits)
    except DataError:  # damaged: to prepare it again is the remedy
        return
    if not is_same:
        raise another_corpus(target)


def _is_like(tokenizer: Tokenizer, job: Preparation) -> bool:
    """Return whether the settings of the preparation could have produced this tokenizer."""
    settings = job.settings
    if settings.tokenizer_path is not None:
        return True
    if settings.vocab_list is not None:
        listed = listed_tokenizer(job.reading.names, end_of_text=settings.end_of_text)
        return tokenizer.fingerprint == listed.fingerprint
    has_fitting_size = not settings.vocab_size or tokenizer.vocab_size <= settings.vocab_size
    return tokenizer.kind == settings.kind and has_fitting_size


def _begins_alike(job: Preparation, corpus: Corpus, tokenizer: Tokenizer, split: str) -> bool:
    """Return whether a split of `corpus` and the same split of the new corpus can have the same first document.

    Returns True if this cannot be checked. Only validation and test splits are compared, because the documents of train
    are shuffled.
    """
    if split == TRAIN or job.settings.duplicates == "drop":
        return True
    files = [file for file in job.files if file.split == split]
    if not files:
        files = [file for file in job.files if file.split == TRAIN]
    if any(file.is_stream for file in files):
        return True
    if corpus.end_of_text is None:
        ends = []
    else:
        ends = [corpus.end_of_text]
    for given_for, document in _each_document(job, files, "comparing", SPLITS):
        for piece in pieces_of(document, given_for=given_for, reading=job.reading):
            if piece.split != split or not piece.document.text:
                continue
            ids = [*tokenizer.encode(piece.document.text), *ends]
            if ids:
                return np.array_equal(ids, corpus.split(split).open_shard(0).document(0))
    return True


def make_tokenizer(job: Preparation) -> Tokenizer:
    """Return the tokenizer that the settings name, or a tokenizer trained on the train documents.

    The tokenizer is also written to the work folder, so that a continued preparation does not train it again. Raises
    DataError if the tokenizer's file or the text cannot be read. Raises ConfigError as `check_learning` does.
    """
    settings = job.settings
    path = job.scratch / TOKENIZER_NAME
    done = job.scratch / TOKENIZER_DONE
    inputs = identities(job.files)[-1]
    if path.exists() and done.exists() and read_bytes(done) == inputs.encode():
        return load_tokenizer(path)
    if settings.vocab_list is not None:
        tokenizer: Tokenizer = listed_tokenizer(job.reading.names, end_of_text=settings.end_of_text)
    elif settings.tokenizer_path is None:
        assert settings.kind != "auto"
        tokenizer = train_tokenizer(settings.kind, lambda: _train_texts(job), **settings.learning())
    elif settings.encoding_errors == "keep":
        tokenizer = read_tokenizer(read_tokenizer_file(settings.tokenizer_path), name=str(settings.tokenizer_path))
        _check_keeps(settings, tokenizer.kind)
    else:
        content = read_tokenizer_file(settings.tokenizer_path)
        tokenizer = import_tokenizer(settings.tokenizer_path, lambda: _train_texts(job), content=content)
    done.unlink(missing_ok=True)  # it may belong to another tokenizer
    atomic_replace(path, tokenizer.to_json().encode("utf-8"))
    atomic_replace(done, inputs.encode())
    return tokenizer


def check_learning(settings: PrepareSettings) -> None:
    """Raise ConfigError if no tokenizer can be trained with these settings. Callers check this before any text is
    read."""
    if settings.learns:
        _check_keeps(settings, settings.kind)
        settings.check_kind(settings.kind)


def remarks_on_size(settings: PrepareSettings, tokenizer: Tokenizer) -> list[str]:
    """Return a sentence for the user if the trained vocabulary is smaller than the requested or default size.

    Returns an empty list otherwise.
    """
    wanted = settings.vocab_size or DEFAULT_SUBWORDS
    if not settings.learns or settings.kind not in ("bpe", "unigram"):
        return []
    if tokenizer.vocab_size >= wanted:
        return []
    return [
        f"the vocabulary has {tokenizer.vocab_size:,} ids instead of {wanted:,}, because the text has too few "
        "different words"
    ]


def _check_keeps(settings: PrepareSettings, kind: str) -> None:
    if settings.encoding_errors == "keep" and kind != "byte":
        raise ConfigError(
            f"encoding_errors=keep works only with byte tokenizers, not with a {kind} tokenizer. Use a byte "
            "tokenizer, or set encoding_errors to `replace` or `skip`."
        )


def _train_texts(job: Preparation) -> Iterator[str]:
    """Yield the texts that the tokenizer is trained on. Raises DataError with the names of the inputs if they contain
    no text, and DataError with the fraction if it chooses none of the documents."""
    _spool(job)
    fraction = job.settings.tokenizer_fraction
    has_text = False
    num_texts = num_chosen = 0
    if job.settings.tokenizer_all_splits:
        splits = set(SPLITS)
    else:
        splits = {TRAIN}
    for given_for, document in _each_document(job, job.files, "training the tokenizer", splits):
        for piece in pieces_of(document, given_for=given_for, reading=job.reading):
            if not piece.document.text:
                continue
            has_text = True
            if piece.split not in splits:
                continue
            num_texts += 1
            if is_learnt_from(piece.digest, fraction=fraction):
                num_chosen += 1
                yield piece.document.text
    if not has_text:
        raise no_text(job.settings.inputs, job.reading)
    if num_texts and not num_chosen:
        raise DataError(
            f"--tokenizer-fraction {fraction:g} chooses none of {counted(num_texts, 'text')} to train a tokenizer on. "
            "Give a larger fraction."
        )


def choose_held_out(job: Preparation, streams: ExitStack) -> None:
    """Choose the text that is held out of the train files, and store the choice in `job.reading`.

    Inputs that can be read only once are copied to disk: the whole input if a tokenizer is trained on it, otherwise its
    first 64 MiB. The rest of a longer input stays open until `streams` is closed, and a hash chooses the split of each
    document. Raises DataError if a split would get no text.
    """
    if not job.reading.shares:
        return
    if job.settings.learns:
        _spool(job)
    else:
        for number, file in enumerate(job.files):
            if file.is_stream and file.split == TRAIN:
                job.files[number] = begin(
                    file,
                    job.scratch / f"begun-{number}",
                    at_most=MOST_BEGUN,
                    allow_protocols=job.settings.allow_protocols,
                    streams=streams,
                )
    files = [file for file in job.files if file.split == TRAIN]
    if any(file.rest for file in files):
        _check_number(files, [*job.reading.shares])
        return

    def documents() -> Iterator[Document]:
        return (document for _, document in _each_document(job, files, "looking for text to hold out", {TRAIN}))

    job.reading, remark = hold_out(documents, job.reading, inputs=job.settings.inputs)
    if remark:
        job.remarks.append(remark)


def _check_number(files: Sequence[SourceFile], wanted: Sequence[str]) -> None:
    """Raise DataError if the files certainly have too few documents for the `wanted` splits.

    This function is called if one of the files is a stream that is too long to hold out its end.
    """
    if len(files) <= len(wanted) and all(file.form == "file" for file in files):
        path = next(file.path for file in files if file.rest)
        given = " and ".join(f"`--{split} PATH`" for split in wanted)
        none = " ".join(f"--{split}-fraction 0" for split in wanted)
        raise DataError(
            f"{path} is one document of {MOST_BEGUN // _MIB} MiB or more from an input that can be read only once "
            "(such as stdin). The end of such a document cannot be held out for another split. Give other text for "
            f"the split with {given}, or hold out no text with `{none}`. You can also cut the document with "
            "`--documents line` or `--documents blank_line`, or save the input as a file and prepare the file."
        )


def _each_document(
    job: Preparation, files: Sequence[SourceFile], what: str, splits: Collection[str]
) -> Iterator[tuple[str, Document]]:
    """Yield (split of the file, document) for the documents of `files` whose split is in `splits`.

    A progress display with the label `what` shows the bytes read.
    """
    with Progress(what, total=_total_bytes(files)) as progress:
        for part in job.parts(files):
            for block in part.blocks:
                if block.split not in splits:
                    continue
                for document in documents_of(block, job.reading):
                    yield block.split, document
            progress.reach(part.stored_bytes)


def _spool(job: Preparation) -> None:
    """Copy stdin and the output of commands to files, because these inputs are read twice: to train the tokenizer, and
    to encode."""
    for number, file in enumerate(job.files):
        if file.is_stream and (not file.spooled or file.rest):
            path = job.scratch / f"spooled-{number}"
            with open_new(path) as stream:
                stream.writelines(chunks_of(file, job.settings.allow_protocols))
            job.files[number] = file._replace(spooled=str(path), size=path.stat().st_size, rest=None)


def _total_bytes(files: Sequence[SourceFile]) -> int:
    """Return the stored bytes of all files. Returns 0 if the size of any file is unknown."""
    total = 0
    for file in files:
        if file.size is None:
            return 0
        total += file.size
    return total


def choose_part_bytes(total_bytes: int) -> int:
    """Return the size of a part of the input in bytes: a power of 2, from 4 to 256 MiB, for about two thousand parts.

    Returns 32 MiB if the total is unknown. A power of 2 seldom changes when a repaired file changes the total a little,
    so finished parts can be reused.
    """
    if not total_bytes:
        return 32 * _MIB
    part_bytes = 1 << (total_bytes // 2000).bit_length()
    return min(max(part_bytes, 4 * _MIB), 256 * _MIB)
