"""One preparation at work: its files, and the tokenizer that is learnt from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from txl_dist.data.documents import (
    SPLITS,
    TEST,
    TRAIN,
    VALID,
    content_digest,
    documents_of,
    is_learnt_from,
    split_of,
    text_bytes_of,
)
from txl_dist.data.inputs import Cursor, Part, read_parts
from txl_dist.data.named import materialise
from txl_dist.data.progress import Progress
from txl_dist.data.scratch import DOWNLOADS, TOKENIZER_DONE
from txl_dist.data.settings import PrepareSettings
from txl_dist.data.shards import TOKENIZER_NAME
from txl_dist.data.sources import Listing, SourceFile, check_inputs, identities, list_sources
from txl_dist.data.streams import chunks_of
from txl_dist.data.workers import num_cores
from txl_dist.errors import ConfigError, DataError
from txl_dist.files import open_new, read_bytes, replace_file
from txl_dist.text.importing import import_tokenizer
from txl_dist.text.tokenizer import Tokenizer, load_tokenizer
from txl_dist.text.training import train_tokenizer

_MIB = 1 << 20
_SMALL = 16 * _MIB
"""Bytes of input below which worker processes cost more than they save."""


@dataclass
class Job:
    """One preparation at work."""

    settings: PrepareSettings
    scratch: Path
    files: list[SourceFile]
    kept: Counter[str] = field(default_factory=Counter)

    @property
    def total_bytes(self) -> int:
        """Of all files, as stored; 0 if one does not know its size."""
        sizes = [file.size for file in self.files]
        return 0 if None in sizes else sum(size or 0 for size in sizes)

    @property
    def splits(self) -> list[str]:
        """Splits that the corpus is to have."""
        reading, given = self.settings.reading(), {file.split for file in self.files}
        held_out = {"valid": reading.valid_fraction, "test": reading.test_fraction}
        return [split for split in SPLITS if split in given or held_out.get(split)]

    def parts(self, begin: Cursor = Cursor()) -> Iterator[Part]:  # noqa: B008  immutable
        """The input from a cursor on."""
        settings = self.settings
        part_bytes = settings.part_bytes or _choose_part_bytes(self.files)
        allowed, column = settings.allow_protocols, settings.jsonl_field
        return read_parts(self.files, part_bytes=part_bytes, begin=begin, allow_protocols=allowed, jsonl_field=column)

    def num_workers(self) -> int:
        """Processes that are worth it."""
        if self.settings.num_workers:
            return self.settings.num_workers
        return 1 if 0 < self.total_bytes < _SMALL else num_cores()


def list_files(settings: PrepareSettings) -> list[SourceFile]:
    """All files, train first. Raises DataError if there are none, one is missing, or is given twice."""
    if not settings.inputs:
        raise DataError("there are no inputs. Give files, folders, globs, URLs, or stdlib for the built-in text.")
    given = {TRAIN: settings.inputs, VALID: settings.valid_inputs, TEST: settings.test_inputs}
    listing = _listing(settings)
    found = [(str(one), list_sources([one], listing, split=split)) for split, own in given.items() for one in own]
    check_inputs(found)
    return [file for _, files in found for file in files]


def _listing(settings: PrepareSettings) -> Listing:
    return Listing(settings.documents, settings.stdin_format, tuple(settings.allow_protocols))


def files_of_named(settings: PrepareSettings, scratch: Path) -> list[SourceFile]:
    """The files of a named corpus, whose content is proven: made anew they are the same input."""
    name = settings.name
    assert name is not None
    with Progress(f"getting {name}", total=0) as progress:
        paths = materialise(
            name, scratch / DOWNLOADS, source=settings.source, progress=lambda done, _: progress.reach(done)
        )
    files = [file for split, own in paths.items() for file in list_sources(own, _listing(settings), split=split)]
    return [file._replace(identity=name) for file in files]


def make_tokenizer(job: Job) -> Tokenizer:
    """The given tokenizer, or one learnt from the train documents; kept in the scratch folder."""
    settings, path, done = job.settings, job.scratch / TOKENIZER_NAME, job.scratch / TOKENIZER_DONE
    inputs = identities(job.files)[-1]
    if path.exists() and done.exists() and read_bytes(done) == inputs.encode():
        return load_tokenizer(path)
    if settings.tokenizer_path is None:
        tokenizer = _learn(job)
    elif settings.encoding_errors == "keep":
        tokenizer = load_tokenizer(settings.tokenizer_path)
        _check_keeps(settings, tokenizer.kind)
    else:
        tokenizer = import_tokenizer(settings.tokenizer_path, lambda: _train_texts(job))
    done.unlink(missing_ok=True)  # it may speak of another tokenizer
    replace_file(path, tokenizer.to_json().encode("utf-8"))
    replace_file(done, inputs.encode())
    return tokenizer


def _learn(job: Job) -> Tokenizer:
    settings = job.settings
    assert settings.kind != "auto"
    _check_keeps(settings, settings.kind)
    return train_tokenizer(
        settings.kind,
        lambda: _train_texts(job),
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        lower_case=settings.lower_case,
        end_of_text=settings.end_of_text,
        only_seen=settings.only_seen,
        sentence_marks=settings.sentence_marks,
    )


def _check_keeps(settings: PrepareSettings, kind: str) -> None:
    if settings.encoding_errors == "keep" and kind != "byte":
        raise ConfigError(
            f"encoding_errors=keep has a meaning for byte tokenizers only; a {kind} tokenizer sees characters. Use a "
            "byte tokenizer, or `replace`, or `skip`."
        )


def _train_texts(job: Job) -> Iterator[str]:
    """One pass over the texts that a tokenizer is learnt from."""
    job.files = [_spooled(job, number, file) for number, file in enumerate(job.files)]
    reading, fraction = job.settings.reading(), job.settings.tokenizer_fraction
    splits = set(SPLITS) if job.settings.all_splits else {TRAIN}
    with Progress("learning the tokenizer", total=job.total_bytes) as progress:
        for part in job.parts():
            for block in part.blocks:
                for document in documents_of(block, reading) if splits & {block.split} else ():
                    digest = content_digest(text_bytes_of(document.text))
                    is_chosen = split_of(digest, given_for=block.split, reading=reading) in splits
                    if document.text and is_chosen and is_learnt_from(digest, fraction=fraction):
                        yield document.text
            progress.reach(part.stored_bytes)


def _spooled(job: Job, number: int, file: SourceFile) -> SourceFile:
    """Stdin, or what a command prints, as a file: a tokenizer is learnt from it, and then it is encoded."""
    if not file.is_stream or file.spooled:
        return file
    path = job.scratch / f"spooled-{number}"
    with open_new(path) as stream:
        stream.writelines(chunks_of(file, job.settings.allow_protocols))
    return file._replace(spooled=str(path), size=path.stat().st_size)


def _choose_part_bytes(files: Sequence[SourceFile]) -> int:
    """About two thousand parts, of 4 to 256 MiB; powers of 2, so that a mended file seldom moves their borders."""
    sizes = [file.size for file in files]
    if None in sizes:
        return 32 * _MIB
    return min(max(1 << (sum(size or 0 for size in sizes) // 2000).bit_length(), 4 * _MIB), 256 * _MIB)
