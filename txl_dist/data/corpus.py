"""Reading a prepared corpus: the index, its splits, and shards that are mapped into memory, not parsed.

Damage is an error that names the file, the document and the remedy, found as early as it is cheap to find:

    opening a corpus     index.json: version, its own hash
    opening a shard      size of the tar (a cut at a member boundary is silent in other readers), hash of its .idx
    touching a document  crc32 of its tokens, ids below the vocabulary size; once per open shard
    `verify_corpus`      all of that for every document, and sha256 of every file

What it gives up: the sha256 of a whole shard is not checked at each opening; it would cost seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from txl_dist.data.shards import (
    FORMAT_VERSION,
    INDEX_NAME,
    RECORD,
    TOKENIZER_NAME,
    ShardInfo,
    SplitInfo,
    Tokens,
)
from txl_dist.errors import DataError
from txl_dist.files import canonical_hash, sha256_of_file
from txl_dist.text.tokenizer import Tokenizer, load_tokenizer

_REMEDY = "Restore the file from a copy, or run `txl prepare` again."


class Shard:
    """One open shard: documents by their index in file order."""

    def __init__(self, path: Path, info: ShardInfo, *, dtype: np.dtype[Any], vocab_size: int) -> None:
        """Raises DataError if the tar or its records are missing or not those that the index describes."""
        idx_path = path.with_name(path.name + ".idx")
        try:
            num_bytes, records = path.stat().st_size, idx_path.read_bytes()
            _check_size(path, num_bytes, info)
            if hashlib.sha256(records).hexdigest() != info.idx_sha256:
                raise DataError(f"{idx_path} is damaged: its sha256 is not the one in the index. {_REMEDY}")
            # A plain array over the map: slicing np.memmap itself is three times slower.
            self._bytes = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        except OSError as error:
            raise DataError(f"cannot read {error.filename or path}: {error.strerror or error}. {_REMEDY}") from error
        table = np.frombuffer(records, dtype=RECORD)
        self.path = path
        self.lengths: npt.NDArray[np.int64] = table["tokens"].astype(np.int64)
        """Tokens of each document."""
        self.starts: npt.NDArray[np.int64] = np.cumsum(self.lengths) - self.lengths
        """First token of each document, counted in the shard."""
        self._offsets = table["offset"].astype(np.int64)
        self._crc32s = table["crc32"]
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._is_checked = np.zeros(len(table), dtype=bool)

    def document(self, index: int) -> Tokens:
        """Tokens of one document, a view into the file. Raises DataError if they are damaged."""
        first = int(self._offsets[index])
        raw = self._bytes[first : first + int(self.lengths[index]) * self._dtype.itemsize]
        if not self._is_checked[index]:
            self._check(raw, index)
            self._is_checked[index] = True
        return raw.view(self._dtype)

    def _check(self, raw: npt.NDArray[np.uint8], index: int) -> None:
        if zlib.crc32(raw.data) != int(self._crc32s[index]):
            raise DataError(f"{self.path}, document {index}: damaged, its crc32 differs from the record. {_REMEDY}")
        largest = int(raw.view(self._dtype).max())
        if largest >= self._vocab_size:
            raise DataError(
                f"{self.path}, document {index}: id {largest} is outside the vocabulary of {self._vocab_size}. "
                + _REMEDY
            )


def _check_size(path: Path, num_bytes: int, info: ShardInfo) -> None:
    if num_bytes != info.bytes:
        raise DataError(f"{path} has {num_bytes} bytes, the index says {info.bytes}: cut or replaced. {_REMEDY}")


class Split:
    """One split of a corpus. Keeps no file open; `Shards` does."""

    def __init__(self, corpus: Corpus, name: str, info: SplitInfo) -> None:
        self.name = name
        self.documents = info.documents
        self.tokens = info.tokens
        self.text_bytes = info.text_bytes
        self.text_characters = info.text_characters
        self.shards = tuple(info.shards)
        self.shard_tokens: npt.NDArray[np.int64] = np.array([shard.tokens for shard in info.shards], dtype=np.int64)
        self._corpus = corpus

    def bits_per_unit(self, loss: float) -> dict[str, float]:
        """A mean loss in nats per token as bits per byte and bits per character of the text.

        Exact when the loss is that of the whole split: the tokens, end-of-text among them, spell all of its text.
        Its first token, which nothing predicts, counts like an average one. For another loss, of a part of the
        split or of the text trained on, it is an estimate: that text may have more or fewer bytes per token.
        """
        bits = loss / math.log(2) * self.tokens
        return {"bits_per_byte": bits / self.text_bytes, "bits_per_character": bits / self.text_characters}

    def check_files(self) -> None:
        """Look at every shard's size, but into none. Raises DataError if one is missing or has another size."""
        for info in self.shards:
            path = self._corpus.path / info.name
            try:
                num_bytes = path.stat().st_size
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror or error}. {_REMEDY}") from error
            _check_size(path, num_bytes, info)

    def open_shard(self, index: int) -> Shard:
        """Map one shard. Raises DataError if it is missing or damaged."""
        info = self.shards[index]
        corpus = self._corpus
        return Shard(corpus.path / info.name, info, dtype=corpus.dtype, vocab_size=corpus.vocab_size)

    def each_document(self) -> Iterator[Tokens]:
        """All documents in file order."""
        for index in range(len(self.shards)):
            shard = self.open_shard(index)
            for document in range(len(shard.lengths)):
                yield shard.document(document)

    def read_all(self) -> Tokens:
        """All tokens in file order, in memory."""
        tokens = np.empty(self.tokens, dtype=self._corpus.dtype)
        filled = 0
        for document in self.each_document():
            tokens[filled : filled + len(document)] = document
            filled += len(document)
        return tokens


class Shards:
    """The shards of a split that are in use: opened when asked for, the longest unused one closed."""

    def __init__(self, split: Split, *, max_open: int) -> None:
        self._split = split
        self._max_open = max_open
        self._open: OrderedDict[int, Shard] = OrderedDict()

    def __getitem__(self, index: int) -> Shard:
        shard = self._open.get(index)
        if shard is None:
            shard = self._open[index] = self._split.open_shard(index)
            if len(self._open) > self._max_open:
                self._open.popitem(last=False)
        self._open.move_to_end(index)
        return shard


class Corpus:
    """A prepared corpus, as its index describes it."""

    def __init__(self, path: Path, index: dict[str, Any]) -> None:
        self.path = path
        self.vocab_size: int = index["vocab_size"]
        self.end_of_text: int | None = index["end_of_text"]
        self.dtype = np.dtype(index["dtype"]).newbyteorder("<")
        self.tokenizer_sha256: str = index["tokenizer_sha256"]
        self.fingerprint: str = index["self_sha256"]
        """Data fingerprint: equal for corpora of equal content."""
        self.statistics: dict[str, int] = index["statistics"]
        self._splits = {name: SplitInfo.from_dict(values) for name, values in index["splits"].items()}

    @property
    def split_names(self) -> tuple[str, ...]:
        """Splits that the corpus has."""
        return tuple(self._splits)

    def split(self, name: str) -> Split:
        """Raises DataError if the corpus has no such split."""
        if name not in self._splits:
            raise DataError(
                f"corpus {self.path} has no split {name!r}; it has {', '.join(self._splits)}. Name one of these, or "
                "prepare the text again with `--valid PATH` or `--valid-fraction`. Training goes without evaluation "
                'with `--data.eval_split ""`.'
            )
        return Split(self, name, self._splits[name])

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the corpus. Raises DataError if it is missing, damaged or another one."""
        path = self.path / TOKENIZER_NAME
        tokenizer = load_tokenizer(path)
        if tokenizer.fingerprint != self.tokenizer_sha256:
            raise DataError(f"{path} is not the tokenizer that made this corpus. {_REMEDY}")
        return tokenizer


def open_corpus(path: str | Path) -> Corpus:
    """Open a folder that `txl prepare` wrote. Raises DataError if its index is missing, foreign or edited."""
    folder = Path(path)
    index_path = folder / INDEX_NAME
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{folder} is no corpus: cannot read {INDEX_NAME} ({error.strerror or error}). "
            "Make one with `txl prepare`, or point data.path at one."
        ) from error
    except ValueError as error:
        raise DataError(f"{index_path} is damaged: {error}. {_REMEDY}") from error
    if not isinstance(index, dict) or "self_sha256" not in index:
        raise DataError(f"{index_path} is not the index of a corpus. Point data.path at a folder of `txl prepare`.")
    if index.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{index_path} has format version {index.get('format_version')}, this program reads {FORMAT_VERSION}. "
            "Prepare the corpus again, or use the program that wrote it."
        )
    if canonical_hash(index) != index["self_sha256"]:
        raise DataError(f"{index_path} was edited or is damaged: its content does not match its own hash. {_REMEDY}")
    return Corpus(folder, index)


def verify_corpus(path: str | Path) -> list[str]:
    """Read everything and compare it with its hashes. Returns one line per problem; none means intact."""
    try:
        corpus = open_corpus(path)
    except DataError as error:
        return [str(error)]
    problems = []
    try:
        corpus.load_tokenizer()
    except DataError as error:
        problems.append(str(error))
    for name in corpus.split_names:
        split = corpus.split(name)
        for index in range(len(split.shards)):
            problems += _shard_problems(split, index, corpus.path)
    return problems


def _shard_problems(split: Split, index: int, folder: Path) -> Iterator[str]:
    info = split.shards[index]
    try:
        shard = split.open_shard(index)
    except DataError as error:
        yield str(error)
        return
    if sha256_of_file(folder / info.name) != info.sha256:
        yield f"{folder / info.name} is damaged: its sha256 is not the one in the index. {_REMEDY}"
    for document in range(len(shard.lengths)):
        try:
            shard.document(document)
        except DataError as error:
            yield str(error)
