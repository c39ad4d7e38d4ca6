"""Turns text into a corpus: read documents, split them by name, train the tokenizer, write shards, index last.

The source is read two or three times (once per pass of tokenizer training, once to write), so nothing but one
batch of documents is in memory. Documents keep the order of the input; training shuffles them by hash, shards and
documents inside shards. Empty documents are dropped and counted; each other one ends in end-of-text, where the
tokenizer has it.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from txl_dist.data.corpus import Corpus, open_corpus
from txl_dist.data.shards import (
    DEFAULT_SHARD_LEN,
    FORMAT_VERSION,
    INDEX_NAME,
    TOKENIZER_NAME,
    SplitInfo,
    SplitWriter,
    token_dtype,
)
from txl_dist.data.sources import (
    Document,
    EncodingErrors,
    Source,
    check_given_once,
    count_left_out,
    in_valid_split,
    open_source,
)
from txl_dist.data.verify import verify_corpus
from txl_dist.errors import ConfigError, DataError
from txl_dist.files import flush_folder, write_bytes, write_hashed_json
from txl_dist.text.tokenizer import Tokenizer, TokenizerKind, load_tokenizer
from txl_dist.text.training import batches_of_text, train_tokenizer

TRAIN, VALID = "train", "valid"


@dataclass(frozen=True)
class PrepareSummary:
    """What `prepare_corpus` made."""

    corpus: Corpus
    is_unchanged: bool
    """An identical corpus was already there and was left alone."""
    files_left_out: int
    """Files in the given folders whose suffix is none of a text. Not in the index: they change no content."""

    def lines(self) -> list[str]:
        """For people."""
        corpus = self.corpus
        state = "already there, identical" if self.is_unchanged else "written"
        lines = [f"{corpus.location}: {state}; {corpus.vocab_size:,} ids, data fingerprint {corpus.fingerprint[:16]}"]
        for name in corpus.split_names:
            split = corpus.split(name)
            lines.append(
                f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens, {split.text_bytes:,} bytes of "
                f"text, {len(split.shards):,} shards"
            )
        counts = {**corpus.statistics, "files left out (suffix)": self.files_left_out}
        lines += [f"  {key.replace('_', ' ')}: {count:,}" for key, count in counts.items() if count]
        return lines


@dataclass(frozen=True)
class _Splits:
    """The documents of each split; `valid` comes from the same source unless it has its own."""

    source: Source
    valid_source: Source | None
    valid_fraction: float

    @property
    def names(self) -> tuple[str, ...]:
        return (TRAIN, VALID) if self.valid_source or self.valid_fraction else (TRAIN,)

    def train_texts(self) -> Iterator[str]:
        return (document.text for document in self.read(TRAIN))

    def read(self, split: str) -> Iterator[Document]:
        if self.valid_source is not None:
            return self.source() if split == TRAIN else self.valid_source()
        return (
            document
            for document in self.source()
            if in_valid_split(document.name, valid_fraction=self.valid_fraction) == (split == VALID)
        )


def prepare_corpus(
    output: str | Path,
    *,
    inputs: Sequence[str | Path],
    valid_inputs: Sequence[str | Path] = (),
    valid_fraction: float = 0.05,
    kind: TokenizerKind = "bpe",
    vocab_size: int = 0,
    min_frequency: int = 1,
    tokenizer_path: str | Path | None = None,
    jsonl_field: str = "text",
    encoding_errors: EncodingErrors = "refuse",
    shard_len: int = DEFAULT_SHARD_LEN,
    overwrite: bool = False,
) -> PrepareSummary:
    """Write the corpus `output` from files, folders or the input `stdlib`.

    The held-out split is `valid_inputs`, or else the documents whose name hashes below `valid_fraction`; 0 makes
    none. `tokenizer_path` takes a given tokenizer.json instead of training one. `shard_len` is in tokens.
    Raises ConfigError for settings that are impossible or have no meaning; DataError if there is no text, a file is
    given twice or cannot be read, the output cannot be written, or another corpus or folder is in the way.
    """
    if not 0 <= valid_fraction < 1:
        raise ConfigError(
            f"valid_fraction={valid_fraction} must be at least 0 and below 1. Give the share of documents to hold out, "
            "for instance 0.05, or 0 for no held-out split."
        )
    if shard_len < 1:
        raise ConfigError(f"shard_len={shard_len} must be 1 or more: it is the number of tokens in a shard.")
    if tokenizer_path is not None and (vocab_size, min_frequency) != (0, 1):
        raise ConfigError(
            f"vocab_size and min_frequency have no meaning with a given tokenizer file ({tokenizer_path}). Leave "
            "them out, or leave the file out to train a tokenizer."
        )
    target = Path(output).absolute()
    _check_target(target)
    source = open_source(inputs, jsonl_field=jsonl_field, encoding_errors=encoding_errors)
    valid_source = (
        open_source(valid_inputs, jsonl_field=jsonl_field, encoding_errors=encoding_errors) if valid_inputs else None
    )
    given = [*inputs, *valid_inputs]
    check_given_once(given)
    files_left_out = count_left_out(given)
    splits = _Splits(source, valid_source, valid_fraction)
    with _scratch_folder(target) as scratch:
        if tokenizer_path is None:
            tokenizer = train_tokenizer(kind, splits.train_texts, vocab_size=vocab_size, min_frequency=min_frequency)
        else:
            tokenizer = load_tokenizer(tokenizer_path)
        _write_corpus(scratch, splits, tokenizer, shard_len=shard_len)
        is_unchanged = _move_into_place(scratch, target, overwrite=overwrite)
    return PrepareSummary(corpus=open_corpus(output), is_unchanged=is_unchanged, files_left_out=files_left_out)


def _write_corpus(folder: Path, splits: _Splits, tokenizer: Tokenizer, *, shard_len: int) -> None:
    counts: Counter[str] = Counter()
    dtype = token_dtype(tokenizer.vocab_size)
    end_of_text = tokenizer.end_of_text
    infos: dict[str, SplitInfo] = {}
    for name in splits.names:
        writer = SplitWriter(folder, name, dtype=dtype, vocab_size=tokenizer.vocab_size, shard_len=shard_len)
        for batch in batches_of_text(_kept(splits.read(name), counts)):
            for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
                document = ids if end_of_text is None else np.append(ids, end_of_text)
                if not len(document):  # a text of nothing but blanks, in words
                    counts["empty"] += 1
                    continue
                writer.add(document, text_bytes=len(text.encode("utf-8")), text_characters=len(text))
        infos[name] = writer.close()
    _check_splits(infos)
    write_bytes(folder / TOKENIZER_NAME, tokenizer.to_json().encode("utf-8"))
    index: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "tokenizer_sha256": tokenizer.fingerprint,
        "splits": {name: info.to_dict() for name, info in infos.items()},
        "statistics": {
            "empty_documents_dropped": counts["empty"],
            "documents_with_replacements": counts["replaced"],
            "documents_skipped": counts["skipped"],
        },
    }
    write_hashed_json(folder / INDEX_NAME, index)
    flush_folder(folder)


def _kept(documents: Iterable[Document], counts: Counter[str]) -> Iterator[str]:
    """Texts that are not empty; the others, and the damaged ones, are counted."""
    for document in documents:
        if document.damage:
            counts[document.damage] += 1
        elif not document.text:
            counts["empty"] += 1
        if document.text:
            yield document.text


def _check_splits(infos: dict[str, SplitInfo]) -> None:
    if not infos[TRAIN].documents:
        raise DataError("the inputs hold no text for the train split. Check the paths and the valid fraction.")
    if VALID in infos and not infos[VALID].documents:
        raise DataError(
            f"no document fell into the held-out split ({infos[TRAIN].documents} in train). Give held-out text with "
            "`--valid PATH`, or have no held-out split with `--valid-fraction 0`."
        )


def _check_target(target: Path) -> None:
    """Refuse early what the move at the end could not do. Only a corpus is ever overwritten."""
    if target.exists() and not target.is_dir():
        raise DataError(f"{target} is a file. Choose another output folder.")
    is_empty = not target.exists() or not any(target.iterdir())
    if not is_empty and not (target / INDEX_NAME).exists():
        raise DataError(f"{target} holds other files and no corpus. Choose another output folder.")


@contextmanager
def _scratch_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target, removed unless it was moved away."""
    scratch = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)  # of a killed process: in a container the same id comes again
        scratch.mkdir()
    except OSError as error:
        raise DataError(
            f"cannot write to {target.parent}: {error.strerror or error}. Choose another output folder."
        ) from error
    try:
        yield scratch
    except OSError as error:
        raise DataError(f"cannot write {target}: {error}. Free some space or choose another output folder.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _move_into_place(scratch: Path, target: Path, *, overwrite: bool) -> bool:
    """True if an identical, intact corpus is there already."""
    if (target / INDEX_NAME).exists():
        is_same = (target / INDEX_NAME).read_bytes() == (scratch / INDEX_NAME).read_bytes()
        if is_same and not verify_corpus(target):
            return True
        # Preparing again is the remedy for a damaged corpus, so that one is replaced without asking.
        if not is_same and not overwrite:
            raise DataError(
                f"another corpus is in {target}. Choose another output folder, or replace it with `--overwrite`."
            )
        old = target.with_name(f".{target.name}.old-{os.getpid()}")
        target.rename(old)
        scratch.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        scratch.rename(target)  # an empty folder in the way is replaced
    flush_folder(target.parent)
    return False
