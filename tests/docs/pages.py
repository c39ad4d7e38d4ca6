"""The pages of the documentation as data: fenced blocks with their marks, headings, links.

A mark is an HTML comment on the line above a fence, which neither GitHub nor mkdocs shows:

    <!-- run -->              the block is run by test_blocks.py as it stands, with the other blocks of its page
    <!-- file: NAME -->       the block is saved under this name, as the page tells its reader to do
    <!-- not run: REASON -->  a shell block that no test runs, and why

A ```text block behind a block that is run is what it prints; `...` stands for anything, alone on a line for any lines.
Several blanks stand for several: columns are as wide as their values.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOK = sorted((ROOT / "tools/experiments/notebook").glob("*.md"))
"""Pages of measurements. They are no part of the site, and name settings, commands and files as the site does."""
SHELLS = ("bash", "sh", "shell", "console")
FENCE = re.compile(
    r"^(?P<ticks>```+)(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=ticks)\s*$", re.MULTILINE | re.DOTALL
)
MARK = re.compile(r"<!-- (run|file|not run)(?:: (.+?))? -->\s*$")


class Block(NamedTuple):
    """A fenced block."""

    page: str
    line: int
    """Of its opening fence, counted from 1."""
    language: str
    text: str
    mark: str
    """run, file, not run, or empty."""
    detail: str
    """Name of the file, or the reason."""
    is_output: bool
    """A text block right behind one that is run: what that prints."""

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    content = page.read_text(encoding="utf-8")
    found: list[Block] = []
    end_of_last = 0
    for match in FENCE.finditer(content):
        between = content[end_of_last : match.start()]
        mark = MARK.search(between)
        was_run = bool(found) and found[-1].mark == "run"
        found.append(
            Block(
                page=page.name,
                line=content.count("\n", 0, match.start()) + 1,
                language=match["language"],
                text=match["text"],
                mark=mark[1] if mark else "",
                detail=(mark[2] or "") if mark else "",
                is_output=match["language"] == "text" and was_run and not between.strip(),
            )
        )
        end_of_last = match.end()
    return found


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def code_of(page: Path) -> list[str]:
    """Inline code and the text of all blocks, which are what speaks of settings, flags and files."""
    return [*re.findall(r"`([^`\n]+)`", prose_of(page)), *(block.text for block in blocks_of(page))]


def headings_of(page: Path) -> list[str]:
    """Its headings as a reader sees them, in order."""
    titles = re.findall(r"^#+ (.+?)\s*$", prose_of(page), re.MULTILINE)
    return [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]


def anchors_of(page: Path) -> set[str]:
    """The anchors of its headings that GitHub and mkdocs spell alike; a link to any other is broken on one of them."""
    titles = headings_of(page)
    return {github_anchor(title) for title in titles} & {mkdocs_anchor(title) for title in titles}


def github_anchor(title: str) -> str:
    """GitHub removes punctuation and writes each blank as a hyphen."""
    return re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-")


def mkdocs_anchor(title: str) -> str:
    """Markdown's `toc` also joins hyphens that follow each other."""
    return re.sub(r"[\s-]+", "-", github_anchor(title)).strip("-")


def links_of(text: str) -> list[str]:
    """Targets of all links in Markdown without its fenced blocks: inline, by reference, in HTML."""
    inline = re.findall(r"\]\(\s*<?([^)\s>]+)", text)
    by_reference = re.findall(r"^ *\[[^\]]+\]:\s*<?([^\s>]+)", text, re.MULTILINE)
    in_html = re.findall(r"""<[a-z]+ [^>]*\b(?:href|src)=["']?([^"'\s>]+)""", text)
    return inline + by_reference + in_html


def pattern_of(output: str) -> re.Pattern[str]:
    """A regular expression for what a block prints: `...` in a line is anything in it, alone any lines."""
    lines = []
    for line in output.rstrip("\n").split("\n"):
        if line.strip() == "...":
            lines.append(r"(?:.*\n)*?")
        else:
            anything = ".*?".join(re.escape(part.rstrip()) for part in line.split("..."))
            lines.append(re.sub(r"(?:\\ ){2,}", "[ ]{2,}", anything) + r"[ \t]*\n")
    return re.compile("^" + "".join(lines), re.MULTILINE)
