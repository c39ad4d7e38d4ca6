"""Prove that a commit only moved code: the syntax trees before and after it are equal, with module names mapped.

    python -m tools.checks.same_code --before OLD --moves moves.txt
    python -m tools.checks.same_code --before OLD --after NEW --moves moves.txt --folders txl_dist tests

A line of the table of moves is `OLD NEW`, two paths within the checkout. Blank lines and text after # are ignored. A
file that is not in the table was not moved. Imports are not compared, because formatters sort them again. mypy and the
tests check that imported names exist. In all other code, each dotted name or path of an old module is replaced by the
new one before the comparison. The exit code is 1 if a file differs, is missing or is new.
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

from tools.checks.sources import ROOT, is_docstring

FOLDERS = ("txl_dist", "tests", "tools")


def read_moves(path: Path) -> dict[str, str]:
    """Return the table of moves: the new path by the old path."""
    moves = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.partition("#")[0].split()
        if words:
            old, new = words
            moves[old] = new
    return moves


class Renaming:
    """Replaces the names of moved modules in texts and in code."""

    def __init__(self, moves: dict[str, str]) -> None:
        self._pairs = dict(moves)
        for old, new in moves.items():
            self._pairs[old.removesuffix(".py")] = new.removesuffix(".py")
            self._pairs[_dotted(old)] = _dotted(new)
        longest_first = sorted(self._pairs, key=len, reverse=True)
        words = "|".join(re.escape(old) for old in longest_first)
        self._pattern = re.compile(rf"(?<![\w/])(?:{words})(?!\w)") if moves else None

    def of_text(self, text: str) -> str:
        """Return a text with the new names instead of the old ones."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._pairs[match[0]], text)


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def canonical(source: str, renaming: Renaming) -> str:
    """Return the code of a file in a canonical form: without imports and docstrings, with module names mapped."""
    text = ast.unparse(_WithoutImports().visit(ast.parse(source)))
    return renaming.of_text(text)


class _WithoutImports(ast.NodeTransformer):
    """Removes imports and docstrings. A body that is then empty becomes `pass`."""

    def visit(self, node: ast.AST) -> ast.AST:
        """Remove imports and docstrings below a node."""
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [one for one in body if not isinstance(one, ast.Import | ast.ImportFrom) and not is_docstring(one)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
        return super().generic_visit(node)


def python_files(root: Path, folders: tuple[str, ...]) -> set[str]:
    """Return the path of every Python file in some folders of a checkout."""
    return {path.relative_to(root).as_posix() for folder in folders for path in (root / folder).rglob("*.py")}


def differences(before: Path, after: Path, moves: dict[str, str], folders: tuple[str, ...]) -> list[str]:
    """Return a line for every file that differs, is missing or is new."""
    renaming = Renaming(moves)
    old_files, new_files = python_files(before, folders), python_files(after, folders)
    expected = {moves.get(old, old): old for old in old_files}
    found = [f"{new}: new" for new in sorted(new_files - expected.keys())]
    for new, old in sorted(expected.items()):
        if new not in new_files:
            found.append(f"{new}: missing (was {old})")
            continue
        was = canonical((before / old).read_text(encoding="utf-8"), renaming)
        now = canonical((after / new).read_text(encoding="utf-8"), Renaming({}))
        if was != now:
            found.append(f"{new}: differs from {old} in {_first_difference(was, now)}")
    return found


def _first_difference(was: str, now: str) -> str:
    for before, after in zip(was.splitlines(), now.splitlines(), strict=False):
        if before != after:
            return f"`{before.strip()[:90]}` -> `{after.strip()[:90]}`"
    return "its length"


def main() -> int:
    """Compare two checkouts and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout before the moves")
    parser.add_argument("--after", type=Path, default=ROOT, help="checkout after the moves")
    parser.add_argument("--moves", type=Path, required=True, help="table of moves")
    parser.add_argument("--folders", nargs="+", default=FOLDERS, help="folders to compare")
    options = parser.parse_args()
    moves = read_moves(options.moves)
    found = differences(options.before, options.after, moves, tuple(options.folders))
    print("\n".join(found) if found else f"the same code in {' '.join(options.folders)}; {len(moves)} files moved")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
