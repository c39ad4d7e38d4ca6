"""Tiny corpora for tests: seeded random text, prepared through the public door."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from txl_dist.data.loader.corpus import Corpus
from txl_dist.data.prepare.run import prepare_corpus

ALPHABET = "etaoin shrdlu\nETAOIN\t.,()0123 \u00e9\u00df\u4e2d\u0416\u2028\U0001f600"


def random_text(generator: random.Random, *, length: int, alphabet: str = ALPHABET) -> str:
    """Characters drawn evenly from the alphabet."""
    return "".join(generator.choices(alphabet, k=length))


def random_texts(*, count: int, seed: int = 0, longest: int = 200) -> list[str]:
    """Texts of 1 to `longest` characters."""
    generator = random.Random(seed)
    return [random_text(generator, length=generator.randint(1, longest)) for _ in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """One document per line; ids are doc0, doc1 ..."""
    lines = [json.dumps({"id": f"doc{i}", "text": text}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tiny_corpus(
    folder: Path, *, texts: list[str] | None = None, name: str = "corpus", shard_len: int = 700, **settings: Any
) -> Corpus:
    """A byte-level corpus of 60 short documents over several small shards, unless told otherwise."""
    given = random_texts(count=60) if texts is None else texts
    source = write_jsonl(folder / f"{name}.jsonl", given)
    values: dict[str, Any] = {"kind": "byte", "valid_fraction": 0.2, "shard_len": shard_len, **settings}
    return prepare_corpus(folder / name, inputs=[source], **values).corpus


def flip_bit(path: Path, *, offset: int | None = None) -> None:
    """Flip one bit of a file, in its middle unless told otherwise."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if offset is None else offset] ^= 1
    path.write_bytes(data)
