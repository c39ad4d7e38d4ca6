"""`txl verify` on a corpus: every file against its hash, every document against its record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from txl_dist.data.corpus import Split, open_corpus
from txl_dist.data.storage import REMEDY
from txl_dist.errors import DataError
from txl_dist.files import sha256_of_file


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
            problems += _shard_problems(split, index, corpus.folder)
    return problems


def _shard_problems(split: Split, index: int, folder: Path) -> Iterator[str]:
    info = split.shards[index]
    try:
        shard = split.open_shard(index)
    except DataError as error:
        yield str(error)
        return
    if sha256_of_file(folder / info.name) != info.sha256:
        yield f"{folder / info.name} is damaged: its sha256 is not the one in the index. {REMEDY}"
    for document in range(len(shard.lengths)):
        try:
            shard.document(document)
        except DataError as error:
            yield str(error)
