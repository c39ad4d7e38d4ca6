"""Count the code of the package: files, lines, and density (syntax nodes per line).

    python -m tools.checks.count_code                    # this checkout, a line per package
    python -m tools.checks.count_code FILE ...           # these files, a line per file
    python -m tools.checks.count_code --root CHECKOUT    # another checkout
    python -m tools.checks.count_code --files 20         # also the 20 densest files
    python -m tools.checks.count_code --package olmo_core --root CHECKOUT/src   # another project's package

A line counts if a part of it is code. Docstrings, comments, blank lines and imports are not code. Syntax nodes are
those that `ast.walk` yields, without imports, docstrings and the contexts of names (`ast.Load`, `ast.Store`,
`ast.Del`).
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.checks.sources import PACKAGE, ROOT, is_docstring

TOP = "top"
"""Name for the files at the top of the package."""
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    """Size of one file, or of several together."""

    files: int
    lines: int
    """Lines of code."""
    nodes: int
    """Syntax nodes."""

    @property
    def density(self) -> float:
        """Syntax nodes per line of code."""
        return self.nodes / max(1, self.lines)


def code_lines(source: str) -> int:
    """Count the lines of a file that contain code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) or is_docstring(node):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def syntax_nodes(source: str) -> int:
    """Count the syntax nodes of a file."""
    return sum(1 for _ in _walk_code(ast.parse(source)))


def _walk_code(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom | ast.expr_context) or is_docstring(child):
            continue
        yield child
        yield from _walk_code(child)


def size_of(path: Path) -> Size:
    """Count the lines and the syntax nodes of one file."""
    source = path.read_text(encoding="utf-8")
    return Size(1, code_lines(source), syntax_nodes(source))


def total(sizes: list[Size]) -> Size:
    """Add up the sizes of files."""
    return Size(
        files=sum(size.files for size in sizes),
        lines=sum(size.lines for size in sizes),
        nodes=sum(size.nodes for size in sizes),
    )


def sizes_by_package(root: Path, package: str = PACKAGE) -> dict[str, dict[Path, Size]]:
    """Count every file, grouped by the folder at the top of the package. The group `top` contains the files outside
    these folders."""
    groups: dict[str, dict[Path, Size]] = {}
    for path in sorted((root / package).rglob("*.py")):
        inside = path.relative_to(root / package)
        group = inside.parts[0] if len(inside.parts) > 1 else TOP
        groups.setdefault(group, {})[inside] = size_of(path)
    return groups


def _line(name: str, size: Size, *, width: int = 14) -> str:
    return f"{name:<{width}}{size.files:>5} files{size.lines:>8,} lines of code{size.density:>7.2f} nodes per line"


def _print_files(paths: list[Path]) -> None:
    """Print a line per file, and the sum of all files."""
    sizes = [size_of(path) for path in paths]
    width = max(len(str(path)) for path in paths) + 1
    for path, size in zip(paths, sizes, strict=True):
        print(_line(str(path), size, width=width))
    print(_line("all", total(sizes), width=width))


def main() -> None:
    """Print a line per package or per file, and the sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="*", metavar="FILE", help="count these files instead of the package")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to count")
    parser.add_argument("--package", default=PACKAGE, help="name of the package's folder in the checkout")
    parser.add_argument("--files", type=int, default=0, metavar="N", help="also print the N densest files")
    options = parser.parse_args()
    if options.paths:
        _print_files(options.paths)
        return
    groups = sizes_by_package(options.root, options.package)
    for name in sorted(groups, key=lambda name: (name != TOP, name)):
        print(_line(name, total(list(groups[name].values()))))
    files = {path: size for group in groups.values() for path, size in group.items()}
    print(_line("all", total(list(files.values()))))
    densest = sorted(files, key=lambda path: -files[path].density)
    for path in densest[: options.files]:
        print(f"    {path.as_posix():<44}{files[path].lines:>6} lines{files[path].density:>7.2f} nodes per line")


if __name__ == "__main__":
    main()
