"""The house rules that hold the package up, read from its source: floors, who may import what, size, language.

    0 errors console files sections config     1 dist faults log manifest processes progress rng run_files
    2 text     3 data | model
    4 infer, convert     5 train, ops     6 verbs, cli, __main__

Imports point down. Floors 3 holds two rooms that do not know each other; convert may use infer, and ops train.
"""

from __future__ import annotations

import ast
import fnmatch
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import txl_dist

PACKAGE = Path(txl_dist.__file__).parent
FLOOR = {
    "__init__": 0,
    "errors": 0,
    "sections": 0,
    "config": 0,
    "suggest": 0,
    "tables": 0,
    "dist": 1,
    "meeting": 1,
    "processes": 1,
    "progress": 1,
    "faults": 1,
    "console": 0,
    "files": 0,
    "log": 1,
    "rng": 1,
    "run_files": 1,
    "manifest": 1,
    "text": 2,
    "data": 3,
    "model": 3,
    "infer": 4,
    "convert": 4,
    "train": 5,
    "ops": 5,
    "verbs": 6,
    "cli": 6,
    "__main__": 6,
}
NEIGHBOURS = {("convert", "infer"), ("ops", "train")}
LIGHT = {
    *("__init__", "__main__", "errors", "files", "sections", "suggest", "config", "run_files"),
    *("text", "data", "verbs", "cli"),
}
"""Rooms that can be imported without torch."""
BRINGS_TORCH = {"torch", "deepspeed", "webdataset", "safetensors.torch"}
MAX_LINES = 400
MAX_FUNCTION_LINES = 60

FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def room_of(name: str) -> str:
    """`model/block.py` and `txl_dist.model.block` are in the room `model`; `cli.py` is its own."""
    parts = name.removesuffix(".py").split("/") if "/" in name or name.endswith(".py") else name.split(".")[1:]
    return parts[0] if parts else "__init__"


def tree_of(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))


def imported_names(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Full dotted names, `from a import b` giving a.b, which may be a module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def statements_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: everything but the insides of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from statements_on_import(child)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def files_importing(package: str) -> set[str]:
    return {file for file in FILES if any(is_within(name, package) for name in imported_names(ast.walk(tree_of(file))))}


def test_every_file_has_a_floor() -> None:
    assert len(FILES) > 20
    assert [file for file in FILES if room_of(file) not in FLOOR] == []


@pytest.mark.parametrize("file", FILES)
def test_imports_point_down(file: str) -> None:
    here = room_of(file)
    for name in imported_names(ast.walk(tree_of(file))):
        if not is_within(name, "txl_dist"):
            continue
        there = room_of(name) if room_of(name) in FLOOR else "__init__"  # `from txl_dist import __version__`
        is_down = FLOOR[there] < FLOOR[here] or (FLOOR[here] in (0, 1, 6) and FLOOR[there] == FLOOR[here])
        assert here == there or is_down or (here, there) in NEIGHBOURS, f"{file} imports {name}"


def test_each_library_stays_in_its_room() -> None:
    assert files_importing("deepspeed") <= {"train/engine/zero.py", "train/checkpoint/read.py"}
    assert {room_of(file) for file in files_importing("webdataset")} <= {"data"}
    assert files_importing("tensorboard") | files_importing("torch.utils.tensorboard") <= {"train/report/sinks.py"}
    assert {room_of(file) for file in files_importing("tyro")} <= {"cli", "verbs"}
    assert {file for file in FILES if room_of(file) in ("text", "data")} & files_importing("torch") == set()


@pytest.mark.parametrize("file", [file for file in FILES if room_of(file) in LIGHT])
def test_light_rooms_import_no_torch_not_even_through_others(file: str) -> None:
    seen, waiting = set(), [file]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in imported_names(statements_on_import(tree_of(current))):
            assert not any(is_within(name, heavy) for heavy in BRINGS_TORCH), f"{file} reaches {name} by {current}"
            if is_within(name, "txl_dist"):
                path = name.split(".")[1:]
                steps = ["/".join(path[:length]) for length in range(1, len(path) + 1)]
                candidates = [f"{step}{tail}" for step in steps for tail in (".py", "/__init__.py")]
                waiting += [candidate for candidate in candidates if candidate in FILES]


@pytest.mark.parametrize("file", FILES)
def test_a_file_says_what_it_is_in_plain_ascii_and_can_be_read_at_one_sitting(file: str) -> None:
    content = (PACKAGE / file).read_bytes()
    assert content.isascii()
    assert ast.get_docstring(tree_of(file))
    assert len(content.splitlines()) <= MAX_LINES
    functions = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.FunctionDef)]
    too_long = [f.name for f in functions if (f.end_lineno or 0) - f.lineno + 1 > MAX_FUNCTION_LINES]
    assert too_long == []


def test_the_rules_see_what_they_forbid() -> None:
    source = "import a.b\ndef f():\n    from c import d\nif True:\n    from e.f import g\n"
    assert set(imported_names(ast.walk(ast.parse(source)))) == {"a.b", "c.d", "e.f.g"}
    assert set(imported_names(statements_on_import(ast.parse(source)))) == {"a.b", "e.f.g"}
    assert (room_of("model/block.py"), room_of("cli.py"), room_of("txl_dist.model.block"), room_of("txl_dist")) == (
        "model",
        "cli",
        "model",
        "__init__",
    )
    assert is_within("torch.nn", "torch")
    assert not is_within("torchvision", "torch")


def test_pytest_looks_into_every_folder_of_tests() -> None:
    """Its default leaves out a folder named `dist`, without a word."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
    skipped = settings["ini_options"]["norecursedirs"]
    folders = {
        path.relative_to(PACKAGE.parent / "tests").parts[0] for path in (PACKAGE.parent / "tests").rglob("test_*.py")
    }
    assert {"unit", "dist", "e2e", "gpu"} <= folders
    assert not [folder for folder in folders if any(fnmatch.fnmatch(folder, pattern) for pattern in skipped)]
