"""Count the prose of docs, README and docstrings: words, long sentences, semicolons, and faulty docstrings.

    python -m tools.checks.prose                   # this checkout
    python -m tools.checks.prose --root CHECKOUT   # another checkout
    python -m tools.checks.prose --places          # also list every docstring that is counted as a fault

Prose is a page without code blocks, tables, headings, HTML comments and the targets of links. A sentence ends at one of
.!? before a blank, or at a blank line. The words of a page are all words of the file, as `wc -w` counts them.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

from tools.checks.sources import ROOT, Docstring, docstrings, package_files

LONGEST = 25
"""Largest number of words in a sentence that is not counted as long."""
FEWEST = 4
"""Smallest number of words in a docstring that is not counted as too short."""


class Prose(NamedTuple):
    """Counts of one or more pages."""

    pages: int
    words: int
    """All words of the files, as `wc -w` counts them."""
    prose_words: int
    sentences: int
    long_sentences: int
    semicolons: int

    @property
    def long_pct(self) -> float:
        """Sentences over 25 words, in percent."""
        return 100 * self.long_sentences / max(1, self.sentences)

    @property
    def semicolons_per_1000(self) -> float:
        """Semicolons in 1,000 words of prose."""
        return 1000 * self.semicolons / max(1, self.prose_words)


def prose_of(page: str) -> str:
    """Return only the prose of a Markdown page, without code, tables, headings, comments and link targets."""
    text = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<[^>\n]+>", "", text)
    lines = []
    for line in text.splitlines():
        if line.lstrip().startswith(("|", "#")):
            lines.append("")
            continue
        item = re.match(r"\s*(?:[-*+]|\d+\.)\s+", line)  # an item of a list begins a sentence
        lines += ["", line[item.end() :]] if item else [line]
    return "\n".join(lines)


def sentences_of(prose: str) -> list[str]:
    """Split prose at .!? before a blank, and at blank lines."""
    found = []
    for paragraph in re.split(r"\n\s*\n", prose):
        for sentence in re.split(r"(?<=[.!?])[)\"'*_`]*\s+", " ".join(paragraph.split())):
            if re.search(r"\w", sentence):
                found.append(sentence)
    return found


def count_pages(pages: list[Path]) -> Prose:
    """Count the prose of Markdown files."""
    words = prose_words = semicolons = 0
    lengths: list[int] = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        prose = prose_of(text)
        words += len(text.split())
        prose_words += len(prose.split())
        semicolons += prose.count(";")
        lengths += [len(sentence.split()) for sentence in sentences_of(prose)]
    return Prose(
        pages=len(pages),
        words=words,
        prose_words=prose_words,
        sentences=len(lengths),
        long_sentences=sum(length > LONGEST for length in lengths),
        semicolons=semicolons,
    )


def all_docstrings(root: Path) -> list[Docstring]:
    """Return every docstring of the package in a checkout."""
    return [docstring for path in package_files(root) for docstring in docstrings(path, root)]


def begins_with(docstring: Docstring, word: str) -> bool:
    """Return whether `word` is the first word of a docstring."""
    return docstring.text.split(maxsplit=1)[:1] == [word]


def is_too_short(docstring: Docstring) -> bool:
    """Return whether a docstring has three words or fewer."""
    return len(docstring.text.split()) < FEWEST


def docstring_faults(root: Path) -> dict[str, list[Docstring]]:
    """Return the faulty docstrings by kind of fault."""
    every = all_docstrings(root)
    return {
        'begin with "Of"': [docstring for docstring in every if begins_with(docstring, "Of")],
        'begin with "What"': [docstring for docstring in every if begins_with(docstring, "What")],
        "have three words or fewer": [docstring for docstring in every if is_too_short(docstring)],
    }


def report(name: str, prose: Prose) -> str:
    """Return one line with the counts of some pages."""
    return (
        f"{name:<8}{prose.pages:>4} pages {prose.words:>7,} words; prose {prose.prose_words:>7,} words, "
        f"{prose.sentences:>5,} sentences, {prose.long_pct:>4.1f} % over {LONGEST} words, "
        f"{prose.semicolons_per_1000:.1f} semicolons per 1,000 words"
    )


def main() -> None:
    """Print the counts of docs, README and docstrings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to count")
    parser.add_argument("--places", action="store_true", help="list the docstrings that are counted as faults")
    options = parser.parse_args()
    root: Path = options.root.resolve()
    print(report("docs", count_pages(sorted((root / "docs").glob("*.md")))))
    print(report("README", count_pages([root / "README.md"])))
    sentences = [sentence for docstring in all_docstrings(root) for sentence in sentences_of(prose_of(docstring.text))]
    long = sum(len(sentence.split()) > LONGEST for sentence in sentences)
    print(
        f"docstrings: {len(all_docstrings(root)):,}; {len(sentences):,} sentences, "
        f"{100 * long / max(1, len(sentences)):.1f} % over {LONGEST} words"
    )
    for fault, where in docstring_faults(root).items():
        fields = sum(docstring.kind == "field" for docstring in where)
        print(f"  {len(where):>4} {fault}: {len(where) - fields} of modules, classes, functions; {fields} of fields")
        if options.places:
            for docstring in where:
                print(f"       {docstring.place} {docstring.name or '(module)'}: {docstring.text.splitlines()[0]}")


if __name__ == "__main__":
    main()
