"""How much code there is, per room: lines without docstrings, comments, blanks and imports.

    python tools/count_code.py                  # this checkout
    python tools/count_code.py --root CHECKOUT

A room is a folder of the package, or the files at its top. A line counts once if any part of it is code.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path
from typing import TypeGuard

PACKAGE = "txl_dist"
TOP = "top"
_SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Lines of a file that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or is_docstring(node):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Whether a statement is a string alone: of a module, class or function, or below a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def rooms(root: Path) -> dict[str, list[Path]]:
    """The files of each room of the package; `top` has those of no folder."""
    found: dict[str, list[Path]] = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        inside = path.relative_to(root / PACKAGE).parts
        found.setdefault(inside[0] if len(inside) > 1 else TOP, []).append(path)
    return found


def main() -> None:
    """Print a line per room and the sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="checkout to count")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for room, paths in rooms(given.root).items():
        files[room] = len(paths)
        counts[room] = sum(code_lines(path.read_text(encoding="utf-8")) for path in paths)
    for room in sorted(counts, key=lambda room: (room != TOP, room)):
        print(f"{room:<10}{files[room]:>5} files{counts[room]:>8,} lines of code")
    print(f"{'all':<10}{files.total():>5} files{counts.total():>8,} lines of code")


if __name__ == "__main__":
    main()
