"""Creation of a corpus from existing tars of token ids, which stay where they are: `txl prepare --reindex`.

The other files of the corpus are written next to the tars: records (.tar.idx), counts, tokenizer.json and, last,
index.json. Each tar is read once from front to back and is not changed. All tars are read before any file of an older
index is replaced.

- The tars have webdataset's layout: `KEY.npy` contains ids, and `KEY.docs.npy` contains the starts of documents that
  share a sample. Other members are ignored. The module verify/tars.py says which tars are refused.
- The name of a tar decides the split of the tar, as for text files (split_names.py): `valid.tar`, `test_000.tar`. All
  other tars belong to train. Inside a split, the tars are ordered by the numbers in their names.
- The ids must be ids of the given tokenizer. A tokenizer from another library keeps its own ids. Each id is checked
  against the vocabulary.

Limitations: ids are not renumbered. So the cutoffs of an adaptive softmax save time only if frequent tokens have small
ids in the tars. After a kill, the next call reads all tars again.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from txl_dist.data.format import (
    INDEX_NAME,
    PREPARED_NAME,
    RECORD,
    TOKENIZER_NAME,
    ShardInfo,
    SplitInfo,
    counts_name,
    index_of,
    npy_bytes,
)
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.prepare.documents import SPLITS, TRAIN, count_characters, text_bytes_of
from txl_dist.data.prepare.shared_files import read_tokenizer_file
from txl_dist.data.prepare.split_names import splits_of_paths
from txl_dist.data.storage.local import MappedPayload
from txl_dist.data.verify.inspect import corpus_facts, corpus_lines
from txl_dist.data.verify.tars import ForwardReader, TarSample, read_samples
from txl_dist.errors import DataError
from txl_dist.io.files import atomic_replace, flush_folder, write_bytes, write_hashed_json
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.foreign import ADDED, ForeignTokenizer
from txl_dist.tokenizers.importing import open_tokenizer

MAX_SAMPLE_LEN = (1 << 32) - 1
"""Maximum number of tokens in a sample, because a record counts the tokens in 32 bits."""
_COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz4")
_TEMPORARY = ".idx.reindexed"
"""Suffix of the record files until all tars have been read. Then the files are renamed."""
_PIECE_LEN = 1 << 22
"""Number of tokens that are counted at once."""


@dataclass(frozen=True)
class ReindexSummary:
    """Result of `reindex_corpus` for the summary of `txl prepare --reindex`: the corpus, and counts of members,
    documents and tars that the user should know about."""

    corpus: Corpus
    ignored: dict[str, int]
    """Number of ignored members of the tars, by suffix."""
    num_unended: int
    """Number of documents whose last id is not end-of-text. Nothing separates such a document from the next
    document."""
    num_without_tokens: int
    """Number of tars that contain no tokens and are left out."""
    remarks: tuple[str, ...] = ()
    """Sentences for the user about tars that were assigned to splits by their names."""

    def lines(self) -> list[str]:
        """Return the lines of the summary for the user: the corpus, then the parts of the tars that were left out."""
        lines = [*corpus_lines(corpus_facts(self.corpus)), *self.remarks]
        for suffix, count in sorted(self.ignored.items()):
            lines.append(f"members ignored: {count:,} {suffix}")
        if self.num_without_tokens:
            lines.append(f"tars without tokens, left out: {self.num_without_tokens:,}")
        if self.num_unended:
            lines.append(f"documents without an end-of-text token at the end: {self.num_unended:,}")
        return lines


def reindex_corpus(
    folder: str | Path,
    *,
    inputs: Sequence[str | Path] = (),
    tokenizer_path: str | Path,
    ignore_split_names: bool = False,
    overwrite: bool = False,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> ReindexSummary:
    """Make a corpus of the tars in a folder, or of some of these tars.

    `inputs` are tars in `folder`, or `folder` itself. Without inputs, all tars in `folder` are used. With
    `ignore_split_names`, all tars belong to train. After each read, `on_bytes` is called with the number of bytes read.

    Raises DataError if a tar is damaged or contains ids outside the tokenizer's vocabulary, or if an index exists and
    `overwrite` is not set. The folder is then unchanged.
    """
    target = Path(folder)
    splits, remarks = split_tars(find_tars(target, inputs), ignore_names=ignore_split_names)
    if (target / INDEX_NAME).exists() and not overwrite:
        raise DataError(
            f"{target} already contains a corpus. To replace its {INDEX_NAME} and its files of records (.tar.idx), "
            "add `--overwrite`. The tars are not changed."
        )
    tokenizer = _open_tokenizer(tokenizer_path)
    scan = _Scan(tokenizer, on_bytes)
    with _temporaries(target):
        infos = {name: scan.split(name, paths) for name, paths in splits.items()}
        if scan.dtype is None:
            raise DataError(
                f"the tars in {target} contain no tokens: no member is named KEY.npy, where KEY is the name of a "
                "sample. Name the folder whose tars contain tokens."
            )
        statistics = {"empty_documents_dropped": scan.num_empty, "unended_documents": scan.num_unended}
        filled = {name: info for name, info in infos.items() if info.shards}
        index = index_of(tokenizer, dtype=scan.dtype, splits=filled, statistics=statistics)
        _write(target, scan, tokenizer, index)
    return ReindexSummary(
        open_corpus(target),
        ignored=dict(scan.ignored),
        num_unended=scan.num_unended,
        num_without_tokens=scan.num_without_tokens,
        remarks=tuple(remarks),
    )


def bytes_of_tars(folder: Path, inputs: Sequence[str | Path] = ()) -> int:
    """Return the number of bytes that `reindex_corpus` will read. Raises DataError as `find_tars` does."""
    return sum(path.stat().st_size for path in find_tars(folder, inputs))


def find_tars(folder: Path, inputs: Sequence[str | Path] = ()) -> list[Path]:
    """Return the paths of the tars in `folder` (of `inputs`, if given), ordered by the numbers in their names.

    Raises DataError if there is no tar, or if a tar is in another folder or compressed.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Name the folder that contains the tars.")
    paths = [Path(path) for path in inputs]
    is_whole_folder = [path.resolve() for path in paths] == [folder.resolve()]
    if not paths or is_whole_folder:
        paths = [path for path in sorted(folder.iterdir()) if _is_named_tar(path)]
    tars = set()
    for path in paths:
        if path.resolve().parent != folder.resolve():
            raise DataError(
                f"{path} is not in {folder}. The index is written next to the tars. Set the output to the folder that "
                "contains the tars."
            )
        if _suffix(path) != ".tar":
            remedy = "give .tar files"
            if _suffix(path) in _COMPRESSED:
                remedy = f"decompress the tar first, for instance with `gunzip {path}`"
            raise DataError(f"{path} is not an uncompressed .tar file, which --reindex needs: {remedy}.")
        if not path.is_file():
            raise DataError(f"cannot read {path}: the path does not exist, or is not a file. Check the path.")
        tars.add(folder / path.name)
    if not tars:
        raise DataError(f"{folder} contains no .tar file. Name the folder that contains the tars.")
    return sorted(tars, key=lambda path: (_natural(path.name), path.name))


def _is_named_tar(path: Path) -> bool:
    """Return whether a file is not hidden and has the name of a tar. The tar may be compressed."""
    if path.name.startswith("."):
        return False
    has_tar_name = re.search(r"\.(tar|tgz)", path.name, re.IGNORECASE) is not None
    return has_tar_name and _suffix(path) in (".tar", *_COMPRESSED)


def split_tars(tars: Sequence[Path], *, ignore_names: bool = False) -> tuple[dict[str, list[Path]], list[str]]:
    """Assign the tars of one folder to splits by the tars' names.

    Returns (the tars of each split in order, sentences on the splits for the user).
    """
    if ignore_names:
        return {TRAIN: list(tars)}, []
    paths = [str(path) for path in tars]
    (splits,), remarks = splits_of_paths([(str(tars[0].parent), paths)])
    tars_of_split: dict[str, list[Path]] = {}
    for path, split in zip(tars, splits, strict=True):
        tars_of_split.setdefault(split, []).append(path)
    return dict(sorted(tars_of_split.items())), remarks


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares the numbers in names by value, so that x-9 comes before x-10."""
    key: list[tuple[int, str]] = []
    for part in re.split(r"([0-9]+)", name):
        if part.isdecimal():
            key.append((int(part), ""))
        else:
            key.append((-1, part))
    return key


def _open_tokenizer(path: str | Path) -> Tokenizer:
    """Open a tokenizer of this package, or a foreign tokenizer with its own ids.

    Raises DataError if the ids of a foreign tokenizer have gaps.
    """
    tokenizer = open_tokenizer(path, content=read_tokenizer_file(path))
    if isinstance(tokenizer, ForeignTokenizer):
        ids = tokenizer.foreign_ids[tokenizer.foreign_ids != ADDED]
        # A foreign tokenizer that this package saved has the ids in another order, and its own numbers have no gaps.
        has_own_ids = (np.diff(ids) > 0).all()
        if has_own_ids and ids[-1] != len(ids) - 1:
            raise DataError(
                f"the ids of the tokenizer {path} have gaps: its {len(ids)} ids do not run from 0 to {len(ids) - 1}. "
                "Run `txl prepare` with this tokenizer on the text, not on the tars. `txl prepare` then gives the ids "
                "new numbers without gaps."
            )
    return tokenizer


@contextmanager
def _temporaries(folder: Path) -> Iterator[None]:
    """Remove temporary record files before and after the block, including those of an earlier call.

    An OSError inside the block becomes a DataError.
    """
    _remove_temporaries(folder)
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot index {folder}: {error}. Free some disk space, or make the folder writable."
        ) from error
    finally:
        _remove_temporaries(folder)


def _remove_temporaries(folder: Path) -> None:
    for path in folder.glob(f"*{_TEMPORARY}"):
        with suppress(OSError):
            path.unlink()


def _write(folder: Path, scan: _Scan, tokenizer: Tokenizer, index: dict[str, Any]) -> None:
    """Replace all files of the corpus except the tars. The index is written last."""
    # Without its old index the folder is not a corpus until the new index is complete.
    (folder / INDEX_NAME).unlink(missing_ok=True)
    (folder / PREPARED_NAME).unlink(missing_ok=True)
    for split in SPLITS:  # the corpus may have had other splits
        (folder / counts_name(split)).unlink(missing_ok=True)
    for path in folder.glob(f"*{_TEMPORARY}"):
        tar_name = path.name.removesuffix(_TEMPORARY)
        path.rename(path.with_name(f"{tar_name}.idx"))
    for name, content in scan.counts_files.items():
        atomic_replace(folder / counts_name(name), content)
    atomic_replace(folder / TOKENIZER_NAME, tokenizer.to_json().encode("utf-8"))
    temporary = folder / f"{INDEX_NAME}{_TEMPORARY}"
    write_hashed_json(temporary, index)
    temporary.rename(folder / INDEX_NAME)
    flush_folder(folder)


@dataclass
class _Scan:
    """Reader of the tars for `reindex_corpus`. Its fields collect the results of all tars that were read so far."""

    tokenizer: Tokenizer
    on_bytes: Callable[[int], object]
    dtype: np.dtype[Any] | None = None
    """Type of the ids in all tars. None before the first sample is read."""
    first: str = ""
    """File and key of the first sample, whose ids have the type `dtype`, for messages."""
    num_empty: int = 0
    num_unended: int = 0
    num_without_tokens: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    counts_files: dict[str, bytes] = field(default_factory=dict)
    """Content of each split's file of counts."""

    def split(self, name: str, paths: Sequence[Path]) -> SplitInfo:
        """Read the tars of a split, and return the split's entry in the index.

        Raises DataError if a tar is damaged, or contains ids of another type or outside the vocabulary.
        """
        info = SplitInfo()
        counts: npt.NDArray[np.int64] = np.zeros(self.tokenizer.vocab_size, dtype=np.int64)
        for path in paths:
            records, shard = self._tar(path, counts, info)
            if not shard.documents:
                self.num_without_tokens += 1
                continue
            info.shards.append(shard)
            info.documents += shard.documents
            info.tokens += shard.tokens
            info.longest = max(info.longest, int(records["tokens"].max()))
        counts_file = npy_bytes(counts)
        self.counts_files[name] = counts_file
        info.counts_sha256 = hashlib.sha256(counts_file).hexdigest()
        if self.tokenizer.spellings is not None:
            is_text = np.arange(len(counts)) != self.tokenizer.end_of_text
            info.text_bytes, info.text_characters = text_sizes(self.tokenizer.spellings, counts * is_text)
        return info

    def _tar(
        self, path: Path, counts: npt.NDArray[np.int64], info: SplitInfo
    ) -> tuple[npt.NDArray[np.void], ShardInfo]:
        """Read a tar, add the occurrences of its ids to `counts`, and write its temporary record file.

        Returns (records, the shard's entry in the index). The sizes of decoded text are added to `info`.
        """
        num_bytes = path.stat().st_size
        if not num_bytes:
            raise DataError(f"{path} is empty. Restore the file from a copy, or remove the file from the folder.")
        stream = ForwardReader(MappedPayload(path), num_bytes, name=str(path), on_bytes=self.on_bytes)
        parts = [np.empty(0, dtype=RECORD)]
        for sample in read_samples(stream, on_ignored=self._count_ignored):
            self.num_empty += sample.num_empty
            if not len(sample.starts):
                continue
            self._check(sample, str(path))
            parts.append(self._records(sample))
            if self.tokenizer.spellings is None:
                self._add_decoded(sample, info)
            for first in range(0, len(sample.tokens), _PIECE_LEN):
                piece = sample.tokens[first : first + _PIECE_LEN]
                piece_counts = np.bincount(piece)
                counts[: len(piece_counts)] += piece_counts
        records = np.concatenate(parts)
        if len(records):
            write_bytes(path.with_name(path.name + _TEMPORARY), records.tobytes())
        return records, ShardInfo(
            name=path.name,
            bytes=num_bytes,
            documents=len(records),
            tokens=int(records["tokens"].sum(dtype=np.int64)),
            sha256=stream.sha256(),
            idx_sha256=hashlib.sha256(records.tobytes()).hexdigest(),
        )

    def _count_ignored(self, name: str) -> None:
        """Count a member that does not belong to a sample, by the suffix of its name."""
        suffix = Path(name).suffix or name
        self.ignored[suffix] += 1

    def _check(self, sample: TarSample, path: str) -> None:
        """Raise DataError if the ids of a sample are outside the vocabulary, or have another type than the ids of
        earlier samples."""
        where = f"{path}, sample {sample.key}"
        if self.dtype is None:
            self.dtype = sample.tokens.dtype
            self.first = where
        if sample.tokens.dtype != self.dtype:
            raise DataError(
                f"{where} contains ids of type {sample.tokens.dtype.name}, but {self.first} contains ids of type "
                f"{self.dtype.name}. Write all ids of the corpus with the larger type."
            )
        if len(sample.tokens) > MAX_SAMPLE_LEN:
            raise DataError(
                f"{where} holds {len(sample.tokens)} tokens, more than {MAX_SAMPLE_LEN}. Cut the sample in two."
            )
        largest = int(sample.tokens.max())
        if largest >= self.tokenizer.vocab_size:
            raise DataError(
                f"{where}: id {largest} is outside the vocabulary of {self.tokenizer.vocab_size} ids. Give the "
                "tokenizer that made these tars with `--tokenizer-file`."
            )

    def _records(self, sample: TarSample) -> npt.NDArray[np.void]:
        """Return the records of a sample's documents. Documents that do not end in end-of-text are counted."""
        ends = np.append(sample.starts[1:], len(sample.tokens))
        raw = sample.tokens.view(np.uint8).data
        size = sample.tokens.itemsize
        first_bytes = sample.starts * size
        end_bytes = ends * size
        records = np.empty(len(ends), dtype=RECORD)
        records["offset"] = sample.offset + first_bytes
        records["tokens"] = ends - sample.starts
        records["crc32"] = [zlib.crc32(raw[first:end]) for first, end in zip(first_bytes, end_bytes, strict=True)]
        if self.tokenizer.end_of_text is not None:
            last_ids = sample.tokens[ends - 1]
            is_unended = last_ids != self.tokenizer.end_of_text
            self.num_unended += int(is_unended.sum())
        return records

    def _add_decoded(self, sample: TarSample, info: SplitInfo) -> None:
        """Add the bytes and characters of a sample's decoded text to `info`.

        The text is decoded only for a tokenizer whose ids do not always decode to the same bytes.
        """
        for ids in np.split(sample.tokens, sample.starts[1:]):
            text_ids = ids[ids != self.tokenizer.end_of_text]
            text = self.tokenizer.decode(text_ids.tolist())
            raw = text_bytes_of(text)
            info.text_bytes += len(raw)
            info.text_characters += count_characters(raw)


def text_sizes(spellings: Sequence[bytes], counts: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Return (bytes in UTF-8, characters) of a text in which each id occurs as often as `counts` says.

    `spellings` are the bytes that each id decodes to.
    """
    num_bytes = np.array([len(spelling) for spelling in spellings], dtype=np.int64)
    num_characters = np.array([count_characters(spelling) for spelling in spellings], dtype=np.int64)
    return int(num_bytes @ counts), int(num_characters @ counts)
