"""Choose names and places of the code base at random, for a reader who judges whether they are easy to understand.

    python -m tools.checks.draw --seed "$(git rev-parse HEAD)" > draw.md

The program prints 40 public functions and classes, each with its signature and docstring only. It also prints 60
places: 20 paragraphs of docs and README, 20 docstrings and 20 error messages. The signature of a class is the arguments
of `__init__`, or its fields. The same seed chooses the same names and places from the same tree.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.checks.prose import all_docstrings, prose_of
from tools.checks.sources import PACKAGE, ROOT, Definition, package_files, parse

NUM_NAMES = 40
NUM_PLACES = 60
FEWEST_WORDS = 6
"""Number of words that a paragraph or a message needs at least to be chosen."""


def drawn(items: Sequence[str], number: int, *, seed: str) -> list[str]:
    """Choose items without repetition. The choice depends on a hash, so it is the same in every version of Python."""

    def key(item: str) -> bytes:
        return hashlib.sha256(f"{seed}\0{item}".encode()).digest()

    return sorted(sorted(items), key=key)[:number]


def public_names(root: Path) -> list[str]:
    """Return every public function, class and method with a docstring: its file, signature and docstring."""
    found = []
    for path in package_files(root):
        file = path.relative_to(root / PACKAGE).as_posix()
        for node in parse(path).body:
            if not isinstance(node, Definition) or node.name.startswith("_"):
                continue
            found += _described(node, file, node.name)
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    found += _described(inner, file, f"{node.name}.{inner.name}")
    return found


def _described(node: Definition, file: str, name: str) -> list[str]:
    docstring = ast.get_docstring(node)
    if docstring is None:
        return []
    if isinstance(node, ast.ClassDef):
        signature = f"class {name}({_arguments_of(node)})"
    else:
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        signature = f"{name}({ast.unparse(node.args)}){returns}"
    return [f"{file}\n{signature}\n{docstring}"]


def _arguments_of(node: ast.ClassDef) -> str:
    """Return the arguments of a class: those of `__init__`, or the annotated fields of its body."""
    fields = []
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            return ast.unparse(inner.args)
        if isinstance(inner, ast.AnnAssign) and not ast.unparse(inner.target).startswith("_"):
            fields.append(ast.unparse(inner))
    return ", ".join(fields)


def paragraphs(root: Path) -> list[str]:
    """Return every paragraph of prose in docs and README, with the page's name and the heading above it."""
    found = []
    for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        for heading, content in _parts_of(page.read_text(encoding="utf-8")):
            place = f"{page.name}, {heading}" if heading else page.name
            for paragraph in re.split(r"\n\s*\n", prose_of(content)):
                text = " ".join(paragraph.split())
                if len(text.split()) >= FEWEST_WORDS:
                    found.append(f"{place}: {text}")
    return found


def _parts_of(page: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, text below it) of a Markdown page. A comment in a block of code is not a heading."""
    heading, lines, is_code = "", list[str](), False
    for line in page.splitlines():
        is_code ^= line.startswith(("```", "~~~"))
        if line.startswith("#") and not is_code:
            yield heading, "\n".join(lines)
            heading, lines = line.lstrip("# "), []
        else:
            lines.append(line)
    yield heading, "\n".join(lines)


def docstring_places(root: Path) -> list[str]:
    """Return every docstring of the package with its place."""
    return [
        f"{docstring.place} {docstring.name}: {' '.join(docstring.text.split())}" for docstring in all_docstrings(root)
    ]


def messages(root: Path) -> list[str]:
    """Return every text with which the package raises an error. Values are shown as {expression}."""
    found = []
    for path in package_files(root):
        for text in _messages_in(parse(path)):
            if len(text.split()) >= FEWEST_WORDS:
                found.append(f"{path.relative_to(root).as_posix()}: {text}")
    return found


def _messages_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Error"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.JoinedStr | ast.Constant):
                    yield " ".join(_without_quotes(ast.unparse(argument)).split())


def _without_quotes(literal: str) -> str:
    """Return the text between the quotes of a string literal."""
    match = re.fullmatch(r"f?(\"{3}|'{3}|\"|')(.*)\1", literal, re.DOTALL)
    if match is None:
        return literal
    return match[2]


def main() -> None:
    """Print the chosen names and places."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", required=True, help="any text; for an inspection the hash of the final commit")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout from which to choose")
    options = parser.parse_args()
    root: Path = options.root.resolve()
    print(f"# {NUM_NAMES} names, {NUM_PLACES} places, seed {options.seed}\n\n## Names\n")
    for number, name in enumerate(drawn(public_names(root), NUM_NAMES, seed=options.seed), 1):
        print(f"{number}. {name}\n")
    print("## Places\n")
    sources = (paragraphs(root), docstring_places(root), messages(root))
    places = [place for source in sources for place in drawn(source, NUM_PLACES // 3, seed=options.seed)]
    for number, place in enumerate(places, 1):
        print(f"{number}. {place}\n")


if __name__ == "__main__":
    main()
