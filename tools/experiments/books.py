"""Write the training, validation and test texts of `books_bytes_cpu` and `books_bpe_cpu` from a repository of books.

    git clone https://github.com/mlschmitt/classic-books-markdown && git -C classic-books-markdown checkout 9448827
    python -m tools.experiments.books classic-books-markdown books      books/train, books/valid, books/test: JSON lines
    txl prepare books/train --valid books/valid --test books/test --tokenizer byte --out data/classic-books

A book is a file AUTHOR/TITLE.md, whose line ends are converted to line feeds. The books of at least 200,000 bytes are
ordered by the sha256 of their names (AUTHOR/TITLE). The first 12 of them are the validation split, and the next 12 the
test split. The training split consists of the first 258 of all books in the order of their names, without those of the
other splits. These are 252 books, up to Ernest Renan.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from txl_dist.errors import DataError, TxlError

HELD_OUT, LEAST_BYTES, FIRST = 12, 200_000, 258


def books_of(folder: Path) -> dict[str, str]:
    """Return the texts by name, in the order of the names. Raises DataError if the folder contains fewer than 258
    books."""
    files = {str(path.relative_to(folder).with_suffix("")): path for path in folder.glob("*/*.md")}
    texts = {name: files[name].read_bytes().decode().replace("\r\n", "\n") for name in sorted(files)}
    if len(texts) < FIRST:
        raise DataError(
            f"{folder} holds {len(texts)} books AUTHOR/TITLE.md, fewer than {FIRST}. Clone the repository again."
        )
    return texts


def splits_of(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the names of the books in each split, from the sizes of the books in bytes."""
    large = sorted(
        (name for name, size in sizes.items() if size >= LEAST_BYTES),
        key=lambda name: hashlib.sha256(name.encode()).digest(),
    )
    valid, test = large[:HELD_OUT], large[HELD_OUT : 2 * HELD_OUT]
    train = [name for name in sorted(sizes)[:FIRST] if name not in {*valid, *test}]
    return {"train": train, "valid": sorted(valid), "test": sorted(test)}


def write(texts: Mapping[str, str], names: Sequence[str], *, path: Path) -> None:
    """Write books to a file of JSON lines, one book per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"id": name, "text": texts[name]}, ensure_ascii=False) + "\n" for name in names)
    path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Write the three splits and print their sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="folder of a clone of github.com/mlschmitt/classic-books-markdown")
    parser.add_argument("out", type=Path, help="folder for train, valid and test")
    arguments = parser.parse_args()
    texts = books_of(arguments.clone)
    for split, names in splits_of({name: len(text.encode()) for name, text in texts.items()}).items():
        write(texts, names, path=arguments.out / split / "books.jsonl")
        print(f"{split}: {len(names)} books, {sum(len(texts[name].encode()) for name in names):,} bytes")


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"books: {error}")
