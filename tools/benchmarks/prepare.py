"""Measure how fast `txl prepare` is with one and two workers, compared with the tokenizer alone, in the same run.

    python -m tools.benchmarks.prepare TEXT.jsonl [...] [--rounds 3] [--megabytes 64] [--tokenizer-file T]
    python -m tools.benchmarks.prepare TEXT.jsonl --rounds 1 --megabytes 0.1 --vocab-size 300  the smallest, seconds

A line of a file is a JSON object with a `text`. All variants encode the same texts with the same BPE tokenizer, which
is given or learned here from a part of the texts. The threads of the tokenizer's library are off. Rates are bytes of
text per second in the best round. The rates of half of the corpus show the fixed costs. `bare` only calls the library's
`encode_batch_fast` on texts in memory, in the pieces that our tokenizer makes. It does not read or parse files, and it
does not copy the ids.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.benchmarks.measuring import announced, positive
from txl_dist.errors import DataError, TxlError

BARS = {"2 workers / 1 worker": 1.6, "1 worker / bare": 0.7}


def main() -> None:
    """Measure all variants, and print the rates and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="file of JSON lines, each with a text")
    parser.add_argument("--rounds", type=positive, default=3, help="timed runs of each variant")
    parser.add_argument("--megabytes", type=float, default=64.0, help="megabytes of text to use")
    parser.add_argument(
        "--vocab-size", type=int, default=16_384, help="vocabulary size of the tokenizer that is learned here"
    )
    parser.add_argument("--tokenizer-file", type=Path, help="use this tokenizer instead of learning one")
    arguments = parser.parse_args()
    texts = read_texts(arguments.files, num_bytes=int(arguments.megabytes * 1e6))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, half = folder / "whole.jsonl", folder / "half.jsonl"
        sizes = {whole: write(whole, texts), half: write(half, texts[: len(texts) // 2])}
        tokenizer = arguments.tokenizer_file or learn(texts, folder, vocab_size=arguments.vocab_size)
        runs = {
            "bare": lambda: bare(texts, tokenizer),
            "1 worker": lambda: prepare(whole, folder, tokenizer, num_workers=1),
            "2 workers": lambda: prepare(whole, folder, tokenizer, num_workers=2),
            "1 worker, half": lambda: prepare(half, folder, tokenizer, num_workers=1),
            "2 workers, half": lambda: prepare(half, folder, tokenizer, num_workers=2),
        }
        best = {name: min(seconds) for name, seconds in interleaved(runs, rounds=arguments.rounds).items()}
    rates = {name: sizes[half if "half" in name else whole] / seconds / 1e6 for name, seconds in best.items()}
    print(f"{sizes[whole] / 1e6:.1f} MB of text in {len(texts):,} documents, best of {arguments.rounds}")
    for name, rate in rates.items():
        print(f"  {name:<16} {best[name]:8.2f} s  {rate:6.2f} MB/s")
    ratios = {
        "2 workers / 1 worker": rates["2 workers"] / rates["1 worker"],
        "1 worker / bare": rates["1 worker"] / rates["bare"],
    }
    for name, ratio in ratios.items():
        print(f"  {name:<22} {ratio:5.2f}  (bar: {BARS[name]})")


def read_texts(files: list[Path], *, num_bytes: int) -> list[str]:
    """Return the first documents of the files, about `num_bytes` bytes in all. Blank lines are skipped.

    Raises DataError if a file cannot be read, if a line has no text, or if there are fewer than two documents.
    """
    texts: list[str] = []
    for path in files:
        for number, line in enumerate(lines_of(path), 1):
            if num_bytes <= 0:
                break
            if not line.strip():
                continue
            texts.append(text_of(line, where=f"{path}, line {number}"))
            num_bytes -= len(texts[-1].encode())
    if len(texts) < 2:
        raise DataError(
            f"documents in the files: {len(texts)}. Type files with two or more, because half of them is measured too."
        )
    return texts


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file. Raises DataError if it cannot be read as UTF-8."""
    try:
        with path.open(encoding="utf-8") as stream:
            yield from stream
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def text_of(line: str, *, where: str) -> str:
    """Return the text of a record. Raises DataError if the line is not a JSON object with a text."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        record = None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where}: not a JSON object with a text. Write each document as one line {{"text": "..."}}.')
    return text


def write(path: Path, texts: list[str]) -> int:
    """Write the texts as JSON lines, and return the number of bytes of the texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return sum(len(text.encode()) for text in texts)


def learn(texts: list[str], folder: Path, *, vocab_size: int) -> Path:
    """Learn a BPE tokenizer from the first ten million characters, and return its file."""
    from txl_dist.tokenizers.training import train_tokenizer

    sample, held = [], 0
    for text in texts:
        sample.append(text)
        held += len(text)
        if held > 10e6:
            break
    path = folder / "tokenizer.json"
    train_tokenizer("bpe", lambda: sample, vocab_size=vocab_size).save(path)
    return path


def bare(texts: list[str], tokenizer_file: Path) -> None:
    """Encode all texts with the tokenizer library alone, in the pieces that our tokenizer makes, 32 at a time."""
    from txl_dist.tokenizers.subwords import cut_pieces
    from txl_dist.tokenizers.tokenizer import load_tokenizer

    library: Any = load_tokenizer(tokenizer_file)._library  # type: ignore[attr-defined]
    for text in texts:
        pieces = cut_pieces(text)
        for first in range(0, len(pieces), 32):
            library.encode_batch_fast(pieces[first : first + 32], add_special_tokens=False)


def prepare(source: Path, folder: Path, tokenizer_file: Path, *, num_workers: int) -> None:
    """Run the whole preparation into a folder, and remove the folder."""
    from txl_dist.data.prepare.run import prepare_corpus

    settings: dict[str, Any] = {"inputs": [source], "tokenizer_path": tokenizer_file, "valid_fraction": 0.0}
    prepare_corpus(folder / "corpus", **settings, num_workers=num_workers)
    shutil.rmtree(folder / "corpus")


def interleaved(runs: dict[str, Any], *, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each run. All runs take turns in each round, so that other load on the machine slows all of
    them."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in announced(range(1, rounds + 1), what="round"):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"prepare: {error}")
