"""Measure how many bits per byte compressors need for the validation text of a corpus, for comparison with models.

    python -m tools.experiments.anchors data/books       measures the figures that notebook/anchors.csv does not contain
    python -m tools.experiments.anchors data/books --split test --trial      prints figures without recording them
    python -m tools.experiments.anchors --table          writes the table of notebook/results.md, from
                                                         notebook/anchors.csv and notebook/recipes.csv

The text is the one for which `txl evaluate --split valid` prints bits per byte: the documents in the order of the
files, decoded to bytes from their tokens. Each end-of-text token becomes a byte FF, which UTF-8 does not contain,
because both a model and a compressor must encode where documents end. The size is divided by the bytes of the text
without these marks.

    cold      size of the validation text alone
    primed    size of (training text and validation text) - size of (training text), with the same settings

Limitations: bzip2 compresses blocks of 900 kB separately, so priming hardly helps it. The dictionary of xz contains
both texts up to 1.5 GiB, and the window of zstd up to 2 GiB. PPMd starts again when its model has filled 3 GiB. Sizes
are those of files with their headers (about 130 bytes for 7z). The sizes of the program and of a model are not counted,
as in papers. A primed program is useless without the training text.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.experiments.recipes import COLUMNS as SCORED_COLUMNS
from tools.experiments.recipes import RECORDS as SCORED
from tools.experiments.recording import NOTEBOOK, Rows, markdown, put_table, today
from tools.experiments.texts import mark_of_text, marked_text
from txl_dist import __version__
from txl_dist.config.load import Config, changed
from txl_dist.data.loader.bits_per_byte import text_units
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.errors import TxlError
from txl_dist.evaluation.scoring import score_baselines

RECORDS, PAGE = NOTEBOOK / "anchors.csv", NOTEBOOK / "results.md"
BEGIN = "<!-- table: python -m tools.experiments.anchors --table -->"


class Compressor(NamedTuple):
    """A compressor that reads from a pipe. In its command, WINDOW is replaced by the number of bytes that its window
    must contain, and OUT by the file to write. Without OUT it writes to a pipe."""

    name: str
    command: str
    package: str
    """Name of the package in Debian and Ubuntu."""

    @property
    def program(self) -> str:
        """Name of the program that must be installed."""
        return self.command.split()[0]


# The text comes from a pipe, because zstd and 7z choose other settings for a file of known size. PPMd would choose a
# smaller memory, which could be full in one compression and not in the other. For tiny Shakespeare at order 16, the
# difference of the sizes would be 23 % too small.
COMPRESSORS = (
    Compressor("bzip2 -9", "bzip2 -9 --stdout", "bzip2"),
    Compressor("xz -9e", "xz --threads=1 --lzma2=preset=9e,dict=WINDOW --stdout", "xz-utils"),
    Compressor("zstd -22", "zstd --ultra -22 --long=31 --size-hint=WINDOW --single-thread --stdout --quiet", "zstd"),
    Compressor("PPMd, order 6", "7z a -si -m0=PPMd:mem=3g:o=6 OUT", "p7zip-full"),
    Compressor("PPMd, order 8", "7z a -si -m0=PPMd:mem=3g:o=8 OUT", "p7zip-full"),
    Compressor("PPMd, order 16", "7z a -si -m0=PPMd:mem=3g:o=16 OUT", "p7zip-full"),
)
WINDOWS = (64 << 20, 1536 << 20)
"""Smallest and largest window of xz -9 in this program, in bytes."""


class Texts(NamedTuple):
    """Texts that are compressed. Sizes do not include the marks. The first 12 digits of the sha256 do."""

    corpus: str
    split: str
    documents: int
    bytes: int
    sha256: str
    train_bytes: int
    train_sha256: str


class Figure(NamedTuple):
    """Bits per byte that one compressor or counting model needs for the validation text."""

    anchor: str
    command: str
    version: str
    cold: float | None
    """Bits per byte without the training text. None for counting models, which need it."""
    primed: float
    cold_size: int | None = None
    primed_size: int | None = None
    """Compressed sizes in bytes. None for counting models."""
    seconds: float | None = None
    """Seconds of all compressions. None for counting models."""


Row = dict[str, str]
"""A row of notebook/anchors.csv: the texts, a figure and the date."""
COLUMNS = (*Texts._fields, *Figure._fields, "date")


def compressed_size(command: str, text: bytes) -> int:
    """Return the bytes of the compressed text. Raises TxlError if the command fails."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.7z"
        words = [str(made) if word == "OUT" else word for word in command.split()]
        done = subprocess.run(words, input=text, capture_output=True, check=False)
        if done.returncode:
            told = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise TxlError(f"{command} ended with {done.returncode}: {told[-300:]}")
        return made.stat().st_size if made.exists() else len(done.stdout)


def version_of(program: str) -> str:
    """Return the first number with a dot in the program's output."""
    words = [program] if program == "7z" else [program, "--version"]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    found = re.search(r"\d+\.[\d.]*\d", done.stdout + done.stderr)
    return found[0] if found else ""


def counted(corpus: Corpus, *, split: str, train: str) -> Iterator[Figure]:
    """Yield the figures of order 0 and bigrams of the corpus' own tokens, as `txl evaluate --baselines` computes
    them."""
    held_out = corpus.split(split)
    config = changed(Config(), {"data.train_split": train})
    tokens = f"{corpus.tokenizer.kind} tokens, {corpus.vocab_size:,} ids"
    for name, scores in score_baselines(held_out, config, units=text_units([held_out], mask_documents=False)).items():
        command = f"txl evaluate --baselines, {tokens}"
        yield Figure(name, command, __version__, None, round(scores["bits_per_byte"], 4))


def compressed(compressor: Compressor, held_out: bytes, primer: bytes, *, num_bytes: int) -> Figure:
    """Return the figure of an installed compressor. `num_bytes` is the size of the validation text without marks.
    Raises TxlError."""
    began, (least, most) = time.perf_counter(), WINDOWS
    window = min(max(least, len(primer) + len(held_out)), most)
    command = compressor.command.replace("WINDOW", str(window))
    cold, both, before = (compressed_size(command, text) for text in (held_out, primer + held_out, primer))
    return Figure(
        anchor=compressor.name,
        command=command,
        version=version_of(compressor.program),
        cold=round(8 * cold / num_bytes, 4),
        primed=round(8 * (both - before) / num_bytes, 4),
        cold_size=cold,
        primed_size=both - before,
        seconds=round(time.perf_counter() - began, 1),
    )


def kind_of(anchor: str) -> str:
    """Return the name of a figure without the constant in brackets."""
    return anchor.partition(" (")[0]


def of_recipes(rows: Sequence[Row]) -> dict[str, str]:
    """Return the bits per byte of the recipes (`tools/experiments/recipes.py`), by the hash of the scored text."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        if row["text"]:
            cells.setdefault(row["text"], []).append(f"{row['recipe']} {float(row['bits_per_byte']):.3f}")
    return {text: ", ".join(found) for text, found in cells.items()}


def table_of(rows: Sequence[Row], *, recipes: dict[str, str]) -> list[str]:
    """Return the Markdown table: a row per pair of texts, and a column per figure with "cold, primed" in bits per byte
    and with the recipes' results."""
    texts = dict[tuple[str, str], dict[str, Row]]()
    for row in rows:
        anchors = texts.setdefault((row["sha256"], row["train_sha256"]), {})
        anchors.setdefault(kind_of(row["anchor"]), row)  # with other tokens of the same text, the first row counts
    names = ["order 0", "bigram", *(compressor.name for compressor in COMPRESSORS)]
    lines = []
    for anchors in texts.values():
        one = next(iter(anchors.values()))
        sizes = (f"{int(one[name]):,}" for name in ("bytes", "train_bytes"))
        cells = (_bits(anchors[name]) if name in anchors else "" for name in names)
        lines.append([f"{one['corpus']}, {one['split']}", *sizes, *cells, recipes.get(one["sha256"], "")])
    return markdown(["validation split", "bytes", "behind", *names, "recipes"], lines)


def _bits(row: Row) -> str:
    return ", ".join(f"{float(row[name]):.3f}" for name in ("cold", "primed") if row[name])


def measure(corpus: Corpus, *, split: str, train: str, is_trial: bool) -> None:
    """Print each figure that is not recorded yet. Record it unless it is a trial. Raises TxlError."""
    held_out, primer = (marked_text(corpus.split(name)) for name in (split, train))
    num_bytes, train_bytes = (corpus.split(name).text_bytes for name in (split, train))
    sums = map(mark_of_text, (held_out, primer))
    texts = Texts(corpus.name, split, corpus.split(split).documents, num_bytes, next(sums), train_bytes, next(sums))
    records = Rows(RECORDS, COLUMNS)
    same = [row for row in records.rows if (row["sha256"], row["train_sha256"]) == (texts.sha256, texts.train_sha256)]
    known = set[str]() if is_trial else {row["anchor"] for row in same}
    counted_before = set[tuple[str, str]]() if is_trial else {(kind_of(row["anchor"]), row["command"]) for row in same}

    def tell(figure: Figure) -> None:
        cold = "" if figure.cold is None else f"{figure.cold:.4f}"
        print(f"{figure.anchor:<18} {cold:>7} {figure.primed:>7.4f}", flush=True)
        if not is_trial:
            records.add(**texts._asdict(), **figure._asdict(), date=today())

    print(f"{'':<18} {'cold':>7} {'primed':>7}  bits per byte of {corpus.name} ({split}), {num_bytes:,} bytes")
    for figure in counted(corpus, split=split, train=train):
        if (kind_of(figure.anchor), figure.command) not in counted_before:
            tell(figure)
    for number, compressor in enumerate(COMPRESSORS, 1):
        if compressor.name in known:
            continue
        print(f"compressor {compressor.name}: {number} of {len(COMPRESSORS)} ...", file=sys.stderr, flush=True)
        if shutil.which(compressor.program) is None:
            print(f"{compressor.name:<18} no program {compressor.program}: apt-get install {compressor.package}")
            continue
        tell(compressed(compressor, held_out, primer, num_bytes=num_bytes))


def main() -> None:
    """Measure the figures of a corpus, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="?", help="corpus that txl prepare wrote, with a lossless tokenizer")
    parser.add_argument("--split", default="valid", help="validation split")
    parser.add_argument("--train-split", default="train", help="split for priming and for the counts")
    parser.add_argument(
        "--trial", action="store_true", help="print all figures without adding them to notebook/anchors.csv"
    )
    parser.add_argument(
        "--table", action="store_true", help="write the table of notebook/results.md from notebook/anchors.csv"
    )
    arguments = parser.parse_args()
    if arguments.table:
        recipes = of_recipes(Rows(SCORED, SCORED_COLUMNS).rows)
        put_table(PAGE, BEGIN, table_of(Rows(RECORDS, COLUMNS).rows, recipes=recipes))
    elif arguments.corpus is None:
        parser.error("type the folder of a corpus")
    else:
        measure(
            open_corpus(arguments.corpus), split=arguments.split, train=arguments.train_split, is_trial=arguments.trial
        )


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"anchors: {error}")
