"""What compressors pay for a corpus' held-out text, in bits per byte: figures that a model can be set beside.

    python -m tools.experiments.anchors data/books       what notebook/anchors.csv lacks is measured, and added to it
    python -m tools.experiments.anchors data/books --split test --trial      printed, and not added
    python -m tools.experiments.anchors --table          write the table of notebook/results.md, from
                                                         notebook/anchors.csv and notebook/recipes.csv

The text is the one whose loss `txl evaluate --split valid` tells as bits per byte: the documents in file order, byte
for byte as their tokens spell them. Where an end-of-text follows a document a byte FF does here, which no UTF-8 has:
both have to say where documents end. Both sums are divided by the bytes of the text alone, without these marks.

    cold      the held-out text on its own
    primed    (training text and held-out text) - (training text), each compressed at one go with the same settings

Limitations: bzip2 forgets all that lies before its block of 900 kB, so priming brings it next to nothing. xz's
dictionary and zstd's window hold both texts up to 1.5 and 2 GiB. PPMd begins again once its model has filled 3 GiB.
Sizes are those of files, with their headers (7z's: some 130 bytes). What a program or a model takes itself is not
counted, as it is not in papers; a primed program is of no use without the training text.
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
    """A program that reads from a pipe. In its command WINDOW is replaced by the bytes that it has to look back over,
    OUT by the file to write; without OUT it writes to a pipe, too."""

    name: str
    command: str
    package: str
    """Of Debian and Ubuntu."""

    @property
    def program(self) -> str:
        """What has to be installed."""
        return self.command.split()[0]


# From a pipe, because zstd and 7z choose other settings for a file whose size they see: PPMd a smaller memory, which
# the training text fills and both texts do not. Of tiny Shakespeare, at order 16, their difference is 23 % too small.
COMPRESSORS = (
    Compressor("bzip2 -9", "bzip2 -9 --stdout", "bzip2"),
    Compressor("xz -9e", "xz --threads=1 --lzma2=preset=9e,dict=WINDOW --stdout", "xz-utils"),
    Compressor("zstd -22", "zstd --ultra -22 --long=31 --size-hint=WINDOW --single-thread --stdout --quiet", "zstd"),
    Compressor("PPMd, order 6", "7z a -si -m0=PPMd:mem=3g:o=6 OUT", "p7zip-full"),
    Compressor("PPMd, order 8", "7z a -si -m0=PPMd:mem=3g:o=8 OUT", "p7zip-full"),
    Compressor("PPMd, order 16", "7z a -si -m0=PPMd:mem=3g:o=16 OUT", "p7zip-full"),
)
WINDOWS = (64 << 20, 1536 << 20)
"""That of xz -9, and its largest, in bytes."""


class Texts(NamedTuple):
    """What is compressed. Sizes are without marks, the first 12 digits of sha256 with them."""

    corpus: str
    split: str
    documents: int
    bytes: int
    sha256: str
    train_bytes: int
    train_sha256: str


class Figure(NamedTuple):
    """What one anchor pays for the held-out text."""

    anchor: str
    command: str
    version: str
    cold: float | None
    """Bits per byte; None of what has to have counted before."""
    primed: float
    cold_size: int | None = None
    primed_size: int | None = None
    """Bytes, of a program."""
    seconds: float | None = None
    """For both, of a program."""


Row = dict[str, str]
"""Of notebook/anchors.csv: texts, a figure, and the date."""
COLUMNS = (*Texts._fields, *Figure._fields, "date")


def compressed_size(command: str, text: bytes) -> int:
    """Bytes that a command with a window makes of a text. Raises TxlError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.7z"
        words = [str(made) if word == "OUT" else word for word in command.split()]
        done = subprocess.run(words, input=text, capture_output=True, check=False)
        if done.returncode:
            told = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise TxlError(f"{command} ended with {done.returncode}: {told[-300:]}")
        return made.stat().st_size if made.exists() else len(done.stdout)


def version_of(program: str) -> str:
    """The first number with a dot that it prints."""
    words = [program] if program == "7z" else [program, "--version"]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    found = re.search(r"\d+\.[\d.]*\d", done.stdout + done.stderr)
    return found[0] if found else ""


def counted(corpus: Corpus, *, split: str, train: str) -> Iterator[Figure]:
    """Order 0 and bigrams of the corpus' own tokens, as `txl evaluate --baselines` has them."""
    held_out = corpus.split(split)
    config = changed(Config(), {"data.train_split": train})
    tokens = f"{corpus.tokenizer.kind} tokens, {corpus.vocab_size:,} ids"
    for name, scores in score_baselines(held_out, config, units=text_units([held_out], mask_documents=False)).items():
        command = f"txl evaluate --baselines, {tokens}"
        yield Figure(name, command, __version__, None, round(scores["bits_per_byte"], 4))


def compressed(compressor: Compressor, held_out: bytes, primer: bytes, *, num_bytes: int) -> Figure:
    """The figure of a program that is there; `num_bytes` of the held-out text without marks. Raises TxlError."""
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
    """Its name without its constant."""
    return anchor.partition(" (")[0]


def of_recipes(rows: Sequence[Row]) -> dict[str, str]:
    """Bits per byte of the recipes (`tools/experiments/recipes.py`), by the text that was scored, the whole of it."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        if row["text"]:
            cells.setdefault(row["text"], []).append(f"{row['recipe']} {float(row['bits_per_byte']):.3f}")
    return {text: ", ".join(found) for text, found in cells.items()}


def table_of(rows: Sequence[Row], *, recipes: dict[str, str]) -> list[str]:
    """Markdown: a row per pair of texts, a column per anchor, "cold, primed" in bits per byte, and the recipe's."""
    texts = dict[tuple[str, str], dict[str, Row]]()
    for row in rows:
        anchors = texts.setdefault((row["sha256"], row["train_sha256"]), {})
        anchors.setdefault(kind_of(row["anchor"]), row)  # of other tokens of the same text: those counted first
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
    """Print each figure that is not recorded yet, and record it unless it is a trial. Raises TxlError."""
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
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="?", help="what txl prepare made, by a tokenizer that loses nothing")
    parser.add_argument("--split", default="valid", help="validation split")
    parser.add_argument("--train-split", default="train", help="the text that primes, and is counted")
    parser.add_argument("--trial", action="store_true", help="print all figures, and add none to notebook/anchors.csv")
    parser.add_argument(
        "--table", action="store_true", help="write the table of notebook/results.md from notebook/anchors.csv"
    )
    given = parser.parse_args()
    if given.table:
        recipes = of_recipes(Rows(SCORED, SCORED_COLUMNS).rows)
        put_table(PAGE, BEGIN, table_of(Rows(RECORDS, COLUMNS).rows, recipes=recipes))
    elif given.corpus is None:
        parser.error("name a corpus")
    else:
        measure(open_corpus(given.corpus), split=given.split, train=given.train_split, is_trial=given.trial)


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"anchors: {error}")
