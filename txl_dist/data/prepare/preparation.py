"""One preparation at work: its files, what is held out of them, and the tokenizer that is learnt from the rest."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

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
from txl_dist.tokenizers.tokenizer import load_tokenizer
from txl_dist.tokenizers.training import DEFAULT_SUBWORDS, train_tokenizer

_MIB = 1 << 20
_SMALL = 16 * _MIB
"""Bytes of input below which worker processes cost more than they save."""
MOST_BEGUN = 64 * _MIB
"""Bytes of a stream that are kept to see whether it is a few documents, whose ends are held out. What is longer is
nearly always documents enough for the hash; a book is a MiB, and a disk that holds the corpus has room for so much."""


@dataclass
class Preparation:
    """One preparation at work."""

    settings: PrepareSettings
    scratch: Path
    files: list[SourceFile]
    remarks: list[str] = field(default_factory=list)
    """Sentences on the splits, for people."""
    kept: Counter[str] = field(default_factory=Counter)
    reading: Reading = field(init=False)
    """How documents are read, and what of them is held out."""

    def __post_init__(self) -> None:
        self.reading = self.settings.reading(given={file.split for file in self.files})

    @property
    def total_bytes(self) -> int:
        """Of all files, as stored; 0 if one does not know its size."""
        return _total_bytes(self.files)

    @property
    def splits(self) -> list[str]:
        """Splits that the corpus is to have."""
        given = {file.split for file in self.files}
        return [split for split in SPLITS if split in given or split in self.reading.shares]

    def parts(self, files: Sequence[SourceFile], begin: Cursor = Cursor()) -> Iterator[InputPart]:  # noqa: B008  immutable
        """What some files hold, from a cursor on."""
        settings = self.settings
        part_bytes = settings.block_bytes or _choose_part_bytes(_total_bytes(files))
        allowed, column = settings.allow_protocols, settings.jsonl_field
        return read_parts(files, part_bytes=part_bytes, begin=begin, allow_protocols=allowed, jsonl_field=column)

    def num_workers(self) -> int:
        """Processes that are worth it."""
        if self.settings.num_workers:
            return self.settings.num_workers
        return 1 if 0 < self.total_bytes < _SMALL else num_cores()


def list_files(settings: PrepareSettings) -> tuple[Listing, list[str]]:
    """All files, train first, with what was left out, and sentences on the splits that their names say.

    Raises DataError if there are none, or none to train on, one is missing, or is given twice; ConfigError if a share
    is asked for of a split that has files.
    """
    if not settings.inputs:
        raise DataError("there are no inputs. Give files, folders, globs, URLs, or stdlib for the built-in text.")
    listed = [list_sources([one], settings, split=TRAIN) for one in settings.inputs]
    found = [(str(one), listing.files) for one, listing in zip(settings.inputs, listed, strict=True)]
    held_out = []
    for split, inputs in ((VALID, settings.valid_inputs), (TEST, settings.test_inputs)):
        for one in inputs:
            listed.append(list_sources([one], settings, split=split))
            held_out.append((str(one), listed[-1].files))
    remarks: list[str] = []
    if not settings.ignore_split_names:
        given = {os.path.realpath(file.path) for _, files in held_out for file in files}
        by_name, remarks = split_by_name(found, given=given)
        found = [(one, files) for (one, _), files in zip(found, by_name, strict=True)]
    check_inputs([*found, *held_out])
    files = sorted((file for _, own in [*found, *held_out] for file in own), key=lambda file: SPLITS.index(file.split))
    if files[0].split != TRAIN:
        raise DataError(
            "the inputs hold no text for the train split: by their names all files are held out. Give the files to "
            "train on too, or train on these with `--ignore-split-names`."
        )
    settings.check_given({file.split for file in files})
    num_other, hidden = sum(each.num_other for each in listed), tuple(path for each in listed for path in each.hidden)
    return Listing(files, num_other, hidden), remarks


def files_of_named(settings: PrepareSettings, scratch: Path) -> list[SourceFile]:
    """The files of a named corpus, whose content is proven: made anew they are the same input."""
    name = settings.name
    assert name is not None
    with Progress(f"getting {name}", total=0) as progress:
        paths = materialise(
            name, scratch / DOWNLOADS, source=settings.archive, progress=lambda done, _: progress.reach(done)
        )
    files = [file for split, own in paths.items() for file in list_sources(own, settings, split=split).files]
    return [file._replace(identity=name) for file in files]


def check_in_the_way(job: Preparation, target: Path) -> None:
    """Refuse to replace a corpus that is surely another one, before the work and not after it.

    Another one has other splits or another kind of tokenizer, or its held-out text begins with another document.
    The whole is compared at the end. Raises DataError.
    """
    if job.settings.overwrite or not (target / INDEX_NAME).exists():
        return
    try:
        corpus = open_corpus(target)
        tokenizer = corpus.tokenizer
        is_another = set(corpus.split_names) != set(job.splits) or not _is_like(tokenizer, job)
        is_another = is_another or not all(_begins_alike(job, corpus, tokenizer, split) for split in job.splits)
    except DataError:  # damaged: to prepare it again is the remedy
        return
    if is_another:
        raise another_corpus(target)


def _is_like(tokenizer: Tokenizer, job: Preparation) -> bool:
    """Whether these settings could have made a tokenizer."""
    settings = job.settings
    if settings.tokenizer_path is not None:
        return True
    if settings.vocab_list is not None:
        ours = listed_tokenizer(job.reading.names, end_of_text=settings.end_of_text)
        return tokenizer.fingerprint == ours.fingerprint
    return tokenizer.kind == settings.kind and (tokenizer.vocab_size <= settings.vocab_size or not settings.vocab_size)


def _begins_alike(job: Preparation, corpus: Corpus, tokenizer: Tokenizer, split: str) -> bool:
    """Whether a held-out split, which keeps the order of the input, may be that of these inputs."""
    files = [file for file in job.files if file.split == split] or [file for file in job.files if file.split == TRAIN]
    if split == TRAIN or job.settings.duplicates == "drop" or any(file.is_stream for file in files):
        return True
    for given_for, document in _each_document(job, files, "comparing", SPLITS):
        for piece in pieces_of(document, given_for=given_for, reading=job.reading):
            if piece.split == split and piece.document.text:
                ids = tokenizer.encode(piece.document.text)
                if len(ids) or corpus.end_of_text is not None:
                    ends = [] if corpus.end_of_text is None else [corpus.end_of_text]
                    return np.array_equal([*ids, *ends], corpus.split(split).open_shard(0).document(0))
    return True


def make_tokenizer(job: Preparation) -> Tokenizer:
    """The given tokenizer, or one learnt from the train documents; kept in the scratch folder."""
    settings, path, done = job.settings, job.scratch / TOKENIZER_NAME, job.scratch / TOKENIZER_DONE
    inputs = identities(job.files)[-1]
    if path.exists() and done.exists() and read_bytes(done) == inputs.encode():
        return load_tokenizer(path)
    if settings.vocab_list is not None:
        tokenizer: Tokenizer = listed_tokenizer(job.reading.names, end_of_text=settings.end_of_text)
    elif settings.tokenizer_path is None:
        assert settings.kind != "auto"
        tokenizer = train_tokenizer(settings.kind, lambda: _train_texts(job), **settings.learning())
    elif settings.encoding_errors == "keep":
        tokenizer = load_tokenizer(settings.tokenizer_path)
        _check_keeps(settings, tokenizer.kind)
    else:
        tokenizer = import_tokenizer(settings.tokenizer_path, lambda: _train_texts(job))
    done.unlink(missing_ok=True)  # it may speak of another tokenizer
    atomic_replace(path, tokenizer.to_json().encode("utf-8"))
    atomic_replace(done, inputs.encode())
    return tokenizer


def check_learning(settings: PrepareSettings) -> None:
    """Refuse what no tokenizer can be learnt with, before any text is read. Raises ConfigError."""
    if settings.learns:
        _check_keeps(settings, settings.kind)
        settings.check_kind(settings.kind)


def remarks_on_size(settings: PrepareSettings, tokenizer: Tokenizer) -> list[str]:
    """A sentence if the text has fewer pieces than were asked for."""
    wanted = settings.vocab_size or DEFAULT_SUBWORDS
    if not settings.learns or settings.kind not in ("bpe", "unigram") or tokenizer.vocab_size >= wanted:
        return []
    return [f"the text gives no more than {tokenizer.vocab_size:,} of the {wanted:,} ids that the vocabulary may have"]


def _check_keeps(settings: PrepareSettings, kind: str) -> None:
    if settings.encoding_errors == "keep" and kind != "byte":
        raise ConfigError(
            f"encoding_errors=keep has a meaning for byte tokenizers only; a {kind} tokenizer sees characters. Use a "
            "byte tokenizer, or `replace`, or `skip`."
        )


def _train_texts(job: Preparation) -> Iterator[str]:
    """One pass over the texts that a tokenizer is learnt from. Raises DataError naming the inputs that hold none."""
    _spool(job)
    reading, fraction = job.reading, job.settings.tokenizer_fraction
    has_text = False
    splits = set(SPLITS) if job.settings.tokenizer_all_splits else {TRAIN}
    for given_for, document in _each_document(job, job.files, "learning the tokenizer", splits):
        for piece in pieces_of(document, given_for=given_for, reading=reading):
            has_text = has_text or bool(piece.document.text)
            if piece.document.text and piece.split in splits and is_learnt_from(piece.digest, fraction=fraction):
                yield piece.document.text
    if not has_text:
        raise no_text(job.settings.inputs, reading)


def choose_held_out(job: Preparation, streams: ExitStack) -> None:
    """Settle what is held out of the train files. Raises DataError if a split would get no text.

    What can be read but once is kept: whole if a tokenizer is to be learnt from it, else its beginning, whose rest is
    open until `streams` ends. What is longer than that goes by the hash.
    """
    if not job.reading.shares:
        return
    if job.settings.learns:
        _spool(job)
    else:
        for number, file in enumerate(job.files):
            if file.is_stream and file.split == TRAIN:
                copy, allowed = job.scratch / f"begun-{number}", job.settings.allow_protocols
                job.files[number] = begin(file, copy, at_most=MOST_BEGUN, allow_protocols=allowed, streams=streams)
    files = [file for file in job.files if file.split == TRAIN]
    if any(file.rest for file in files):
        _check_number(files, [*job.reading.shares])
        return

    def documents() -> Iterator[Document]:
        return (document for _, document in _each_document(job, files, "looking for text to hold out", {TRAIN}))

    job.reading, remark = hold_out(documents, job.reading, inputs=job.settings.inputs)
    job.remarks += [remark] if remark else []


def _check_number(files: Sequence[SourceFile], wanted: Sequence[str]) -> None:
    """Raise DataError if files, one of them too long to be cut, surely are fewer documents than splits."""
    if len(files) <= len(wanted) and all(file.form == "file" for file in files):
        path = next(file.path for file in files if file.rest)
        given = " and ".join(f"`--{split} PATH`" for split in wanted)
        none = " ".join(f"--{split}-fraction 0" for split in wanted)
        raise DataError(
            f"{path} gives one document, of {MOST_BEGUN // _MIB} MiB or more, which is too long for its end to be held "
            f"out of what is read but once. Give held-out text with {given}, hold nothing out with `{none}`, cut it "
            "with `--documents line` or `--documents blank_line`, or give a file."
        )


def _each_document(
    job: Preparation, files: Sequence[SourceFile], what: str, splits: Collection[str]
) -> Iterator[tuple[str, Document]]:
    """One pass over the documents of files given for these splits, each with its file's split."""
    with Progress(what, total=_total_bytes(files)) as progress:
        for part in job.parts(files):
            for block in part.blocks:
                if block.split in splits:
                    yield from ((block.split, document) for document in documents_of(block, job.reading))
            progress.reach(part.stored_bytes)


def _spool(job: Preparation) -> None:
    """Make stdin, and what commands print, files: a tokenizer is learnt from them, and then they are encoded."""
    for number, file in enumerate(job.files):
        if file.is_stream and (not file.spooled or file.rest):
            path = job.scratch / f"spooled-{number}"
            with open_new(path) as stream:
                stream.writelines(chunks_of(file, job.settings.allow_protocols))
            job.files[number] = file._replace(spooled=str(path), size=path.stat().st_size, rest=None)


def _total_bytes(files: Sequence[SourceFile]) -> int:
    """Of all, as stored; 0 if one does not know its size."""
    sizes = [file.size for file in files]
    return 0 if None in sizes else sum(size or 0 for size in sizes)


def _choose_part_bytes(total_bytes: int) -> int:
    """About two thousand parts, of 4 to 256 MiB; powers of 2, so that a mended file seldom moves their borders."""
    return min(max(1 << (total_bytes // 2000).bit_length(), 4 * _MIB), 256 * _MIB) if total_bytes else 32 * _MIB
