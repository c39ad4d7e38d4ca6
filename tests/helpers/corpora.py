"""Tiny corpora for tests: random text from a seed, prepared by the public function."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from txl_dist.data.loader.corpus import Corpus
from txl_dist.data.prepare.run import prepare_corpus

ALPHABET = "etaoin shrdlu\nETAOIN\t.,()0123 \u00e9\u00df\u4e2d\u0416\u2028\U0001f600"


def random_text(generator: random.Random, *, length: int, alphabet: str = ALPHABET) -> str:
    """Return `length` characters, drawn uniformly from the alphabet."""
    return "".join(generator.choices(alphabet, k=length))


def random_texts(*, count: int, seed: int = 0, longest: int = 200) -> list[str]:
    """Return `count` texts of 1 to `longest` characters."""
    generator = random.Random(seed)
    return [random_text(generator, length=generator.randint(1, longest)) for _ in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """Write one document per line, with the ids doc0, doc1 ..., and return the path."""
    lines = [json.dumps({"id": f"doc{i}", "text": text}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tiny_corpus(
    folder: Path, *, texts: list[str] | None = None, name: str = "corpus", shard_len: int = 700, **settings: Any
) -> Corpus:
    """Prepare a corpus. The default is 60 short documents in bytes, in several small shards."""
    given = random_texts(count=60) if texts is None else texts
    source = write_jsonl(folder / f"{name}.jsonl", given)
    values: dict[str, Any] = {"kind": "byte", "valid_fraction": 0.2, "shard_len": shard_len, **settings}
    return prepare_corpus(folder / name, inputs=[source], **values).corpus


def flip_bit(path: Path, *, offset: int | None = None) -> None:
    """Flip one bit of a file. The default is a bit in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if offset is None else offset] ^= 1
    path.write_bytes(data)
