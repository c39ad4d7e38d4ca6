"""Python sources of the package for the programs that count: files, definitions and docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).parents[2]
PACKAGE = "txl_dist"

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Docstring(NamedTuple):
    """One docstring and its place."""

    place: str
    """`path:line` relative to the checkout."""
    kind: str
    """`module`, `class`, `function`, or `field` (a string below an assignment)."""
    name: str
    """Dotted name of the described object, without the module."""
    text: str


def package_files(root: Path) -> list[Path]:
    """Return every Python file of the package in a checkout, sorted by path."""
    return sorted((root / PACKAGE).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Return whether a statement is only a string, as for a module, class or function, or below a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def docstrings(path: Path, root: Path) -> Iterator[Docstring]:
    """Yield the docstrings of a file in source order."""
    yield from _docstrings_in(parse(path), path.relative_to(root).as_posix(), kind="module", name="")


def _docstrings_in(parent: ast.AST, file: str, *, kind: str, name: str) -> Iterator[Docstring]:
    body: list[ast.stmt] = getattr(parent, "body", [])
    field = ""
    for position, node in enumerate(body):
        if is_docstring(node):
            assert isinstance(node.value, ast.Constant)
            text = str(node.value.value)
            if position == 0 and not isinstance(parent, ast.If):
                yield Docstring(f"{file}:{node.lineno}", kind, name, text)
            elif field:
                yield Docstring(f"{file}:{node.lineno}", "field", f"{name}.{field}".lstrip("."), text)
        field = _assigned_name(node)
        if isinstance(node, Definition):
            inner = "class" if isinstance(node, ast.ClassDef) else "function"
            yield from _docstrings_in(node, file, kind=inner, name=f"{name}.{node.name}".lstrip("."))


def _assigned_name(node: ast.stmt) -> str:
    """Return the name that a statement assigns, or an empty text."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name | ast.Attribute):
        return ast.unparse(node.target)
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Attribute):
        return ast.unparse(node.targets[0])
    return ""


def top_definitions(path: Path) -> list[Definition]:
    """Return the functions and classes that a file defines at its top level."""
    return [node for node in parse(path).body if isinstance(node, Definition)]
