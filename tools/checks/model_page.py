"""Write docs/model.md, which compares the model with the paper's equations, from the code and from model_page.md.

    python -m tools.checks.model_page            write the page
    python -m tools.checks.model_page --check    report whether the page is stale, with exit code 1 if it is

A paragraph of model_page.md that begins with CODE is replaced by the source of a function, without its docstring:

    CODE memory.py Memory.append until "return "        shows the function up to the line that contains this text; the
    > "torch._foreach_copy_" the paper's line           next CODE of the function continues there. A line with > puts
                                                        the paper's equation above the line that contains the text.

The program raises an error if a text is in no line or in several lines, or if lines of a function are not shown. SHIFT
is replaced by a drawing of the relative shift, which the model's own line of code computes.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
MODEL, WORDS, PAGE = ROOT / "txl_dist/model", ROOT / "tools/checks/model_page.md", ROOT / "docs/model.md"
MADE_BY = (
    "<!-- Made by `python -m tools.checks.model_page`; edit the code, or tools/checks/model_page.md, not this page. -->"
)
CODE = re.compile(r'^CODE (\S+) (\S+)(?: until "(.+)")?\n((?:> .*\n)*)', re.MULTILINE)
NOTE = re.compile(r'^> "(.+?)" (.+)$', re.MULTILINE)


def model_page(words: str) -> str:
    """Return the Markdown of the page. Raises ValueError if a text of model_page.md does not match the code."""
    left: dict[tuple[str, str], list[str]] = {}

    def shown(match: re.Match[str]) -> str:
        file, name, until, notes = match.groups()
        title = ""
        if (file, name) not in left:
            left[file, name] = source_of((MODEL / file).read_text(encoding="utf-8"), name)
            title = f"`txl_dist/model/{file}`, `{name}`:\n\n"
        lines = left[file, name]
        end = _place(until, lines, where=name) if until else len(lines)
        if not lines[:end]:
            raise ValueError(f"{name}: all of its lines are shown already")
        shown, left[file, name] = textwrap.dedent("\n".join(lines[:end])).strip("\n").split("\n"), lines[end:]
        for text, equation in NOTE.findall(notes):
            place = _place(text, shown, where=name)
            indentation = re.match(" *", shown[place])
            assert indentation is not None
            shown.insert(place, f"{indentation[0]}#> {equation}")
        return f"{title}```python\n{chr(10).join(shown).strip()}\n```\n"

    page = CODE.sub(shown, words.replace("MADE_BY", MADE_BY))
    if cut := [name for (_, name), lines in left.items() if lines]:
        raise ValueError(f"lines at the end of these functions are not shown: {', '.join(cut)}")
    return page.replace("\nSHIFT\n", f"\n```text\n{drawn_shift(num_queries=3, memory_len=2)}\n```\n")


def _place(text: str, lines: list[str], *, where: str) -> int:
    places = [index for index, line in enumerate(lines) if text in line and "#>" not in line]
    if len(places) != 1:
        raise ValueError(f"{where}: {text!r} is in {len(places)} of the remaining lines, but must be in one")
    return places[0]


def source_of(module: str, name: str) -> list[str]:
    """Return the lines of a function, or of `Class.method`, without its docstring. Raises ValueError if it does not
    exist."""
    node: Any = ast.parse(module)
    for part in name.split("."):
        found = [one for one in node.body if getattr(one, "name", None) == part]
        if len(found) != 1:
            raise ValueError(f"{name}: the module has {len(found)} definitions of {part}, but must have one")
        (node,) = found
    lines = module.splitlines()
    begin, docstring = node.lineno - 1, node.body[0]
    if ast.get_docstring(node) is None:
        return lines[begin : node.end_lineno]
    return lines[begin : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]


def drawn_shift(*, num_queries: int, memory_len: int) -> str:
    """Return a drawing of the relative shift of products `i.d` of query i and distance d. `-` is the column of
    zeros."""
    T, K = num_queries, num_queries + memory_len
    products = [["-", *(f"{i}.{K - 1 - column}" for column in range(K))] for i in range(T)]
    labels = [label for row in products for label in row]
    lines = source_of((MODEL / "relative_attention.py").read_text(encoding="utf-8"), "relative_attention")
    names: dict[str, Any] = {"terms_bd": torch.arange(len(labels)).view(1, T, K + 1), "N": 1, "B": 1, "T": T, "K": K}
    begin = _place("flat_bd = ", lines, where="relative_attention")
    end = _place("shifted_bd = flat_bd", lines, where="relative_attention") + 1
    exec(textwrap.dedent("\n".join(lines[begin:end])), names)
    shifted = [[labels[place] for place in row] for row in names["shifted_bd"][0].tolist()]
    drawn = ["products, a zero column in front      shifted: row i is of query i, column j of key j"]
    for before, after in zip(products, shifted, strict=True):
        drawn.append("".join(f"{cell:<5}" for cell in before).ljust(38) + "  ".join(f"{cell:<3}" for cell in after))
    return "\n".join(line.rstrip() for line in drawn)


def is_stale() -> bool:
    """Return whether docs/model.md differs from the page of the current code and texts. Raises ValueError as
    `model_page` does."""
    page = model_page(WORDS.read_text(encoding="utf-8"))
    return not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page


def main() -> int:
    """Write the page, or with --check report whether it is stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is stale")
    check, stale = parser.parse_args().check, is_stale()
    if stale and not check:
        PAGE.write_text(model_page(WORDS.read_text(encoding="utf-8")), encoding="utf-8")
    print("docs/model.md " + ("is up to date" if not stale else "is stale" if check else "is written"))
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
