"""The books of two recipes: the validation split depends only on the names and sizes of the books."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from tools.experiments import books
from txl_dist.errors import DataError

SIZES = {f"author {i % 7}/title {i:03d}": 150_000 + 10_000 * (i % 20) for i in range(300)}


def test_large_books_are_held_out_by_the_hash_of_their_names_and_the_first_others_are_trained_on() -> None:
    splits = books.splits_of(SIZES)
    assert {split: len(names) for split, names in splits.items()} == {
        "train": 258 - len({*sorted(SIZES)[:258]} & {*splits["valid"], *splits["test"]}),
        "valid": 12,
        "test": 12,
    }
    held_out = [*splits["valid"], *splits["test"]]
    assert min(SIZES[name] for name in held_out) >= 200_000
    largest = max(hashlib.sha256(name.encode()).hexdigest() for name in held_out)
    left = {name for name, size in SIZES.items() if size >= 200_000} - {*held_out}
    assert largest < min(hashlib.sha256(name.encode()).hexdigest() for name in left)
    assert splits["train"] == [name for name in sorted(SIZES)[:258] if name not in held_out]
    assert books.splits_of(dict(reversed(SIZES.items()))) == splits


def test_texts_are_those_of_the_files_with_line_feeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "FIRST", 3)
    monkeypatch.setattr(books, "HELD_OUT", 1)
    monkeypatch.setattr(books, "LEAST_BYTES", 10)
    for name, text in {"b/one": "an é\r\nof it\r\n", "a/two": "short", "c/three": "long enough", "d/four": "x"}.items():
        path = tmp_path / "clone" / f"{name}.md"
        path.parent.mkdir(parents=True)
        path.write_bytes(text.encode())
    (tmp_path / "clone/README.md").write_text("no book")
    monkeypatch.setattr(sys, "argv", ["books", str(tmp_path / "clone"), str(tmp_path / "out")])
    books.main()
    found = {
        split: [json.loads(line) for line in (tmp_path / "out" / split / "books.jsonl").read_text().splitlines()]
        for split in ("train", "valid", "test")
    }
    assert {split: len(rows) for split, rows in found.items()} == {"train": 1, "valid": 1, "test": 1}
    texts = {row["id"]: row["text"] for rows in found.values() for row in rows}
    assert texts == {"b/one": "an é\nof it\n", "a/two": "short", "c/three": "long enough"}
    with pytest.raises(
        DataError, match=r"out holds 0 books AUTHOR/TITLE\.md, fewer than 3\. Clone the repository again"
    ):
        books.books_of(tmp_path / "out")
