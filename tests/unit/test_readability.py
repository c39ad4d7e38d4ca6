"""Code that a reader can follow: density, comprehensions, docstrings. Lists of what is left may only shrink."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.checks.count_code import size_of, total
from tools.checks.prose import all_docstrings, begins_with, is_too_short
from tools.checks.sources import ROOT, Definition, package_files, parse

PACKAGE = ROOT / "txl_dist"
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in package_files(ROOT)}
MOST_PER_FILE = 9.0
"""Syntax nodes per line of code. OLMo-core has 7.0 on average, litgpt 7.2, lingua 7.7, nanochat 9.8."""
MOST_ON_AVERAGE = 6.55
"""Over the package; the aim is 6.5."""
FEWEST_LINES = 15
"""A file with fewer lines of code has no density to speak of."""
KERNELS = "model/kernels/"
"""Triton kernels are formulas: they are exempt."""
STILL_DENSE: frozenset[str] = frozenset()
"""Files above the limit that wait to be unfolded."""
STILL_NESTED: dict[str, int] = {
    "config/load.py": 1,
    "evaluation/recl.py": 3,
    "evaluation/tables.py": 1,
    "planning/doctor/checks.py": 1,
    "report/compare.py": 2,
    "report/pictures.py": 1,
    "report/records.py": 5,
    "report/report.py": 1,
    "train/callbacks.py": 2,
    "train/checkpoint/memories.py": 1,
    "train/engine/muon.py": 2,
    "train/engine/partitions.py": 1,
}
"""Nested comprehensions that wait to be unfolded, by file."""
STILL_PACKED: dict[str, int] = {
    "evaluation/recl.py": 1,
    "inference/card.py": 11,
    "planning/doctor/checks.py": 1,
    "planning/doctor/machine.py": 2,
    "train/callbacks.py": 1,
    "train/checkpoint/manager.py": 1,
    "train/monitoring/stragglers.py": 1,
}
"""Values in `*(a, b)` that only save a line, by file."""
STILL_UNFORMATTED: frozenset[str] = frozenset(
    {
        "report/figures.py",
        "train/report/metric_table.py",
    }
)
"""Files that keep code from the formatter with `# fmt: skip`."""
STILL_OF: dict[str, int] = {
    "inference": 11,
    "train": 53,
}
"""Docstrings that begin with "Of" or "What", by package."""
STILL_SHORT: dict[str, int] = {
    "inference": 3,
    "train": 20,
}
"""Docstrings of three words or fewer, by package."""
STILL_BARE: dict[str, int] = {}
"""Public functions of more than one statement without a docstring, by package."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def package_of(file: str) -> str:
    return file.removesuffix(".py").split("/")[0]


def nested_comprehensions(tree: ast.AST) -> set[int]:
    """The comprehensions that lie in another one, by their identity."""
    found: set[int] = set()
    for outer in ast.walk(tree):
        if isinstance(outer, COMPREHENSIONS):
            found |= {id(node) for node in ast.walk(outer) if isinstance(node, COMPREHENSIONS) and node is not outer}
    return found


def packed_values(tree: ast.AST) -> int:
    """Count tuples and lists that are unpacked where they stand: `[a, *(b, c)]`."""
    starred = [node for node in ast.walk(tree) if isinstance(node, ast.Starred)]
    return sum(isinstance(node.value, ast.Tuple | ast.List) for node in starred)


def bare_functions(tree: ast.Module) -> int:
    """Count public functions of more than one statement, and their classes' public methods, without a docstring."""
    found = 0
    for node in tree.body:
        methods = node.body if isinstance(node, ast.ClassDef) else [node]
        for method in methods:
            if not isinstance(method, Definition) or isinstance(method, ast.ClassDef) or method.name.startswith("_"):
                continue
            if isinstance(node, ast.ClassDef) and node.name.startswith("_"):
                continue
            is_override = any("override" in ast.unparse(decorator) for decorator in method.decorator_list)
            found += len(method.body) > 1 and not is_override and ast.get_docstring(method) is None
    return found


@pytest.mark.parametrize("file", FILES)
def test_no_file_is_denser_than_a_reader_can_follow(file: str) -> None:
    size = size_of(FILES[file])
    is_exempt = size.lines < FEWEST_LINES or file.startswith(KERNELS)
    is_dense = size.density > MOST_PER_FILE and not is_exempt
    assert is_dense is (file in STILL_DENSE), f"{size.density:.2f} syntax nodes per line"


def test_the_package_as_a_whole_is_no_denser() -> None:
    assert total([size_of(path) for path in FILES.values()]).density <= MOST_ON_AVERAGE


@pytest.mark.parametrize("file", FILES)
def test_comprehensions_are_not_nested_and_values_not_packed(file: str) -> None:
    tree = parse(FILES[file])
    assert len(nested_comprehensions(tree)) <= STILL_NESTED.get(file, 0)
    assert packed_values(tree) <= STILL_PACKED.get(file, 0)
    assert ("# fmt: skip" in FILES[file].read_text(encoding="utf-8")) <= (file in STILL_UNFORMATTED)


@pytest.mark.parametrize("package", sorted({package_of(file) for file in FILES}))
def test_docstrings_say_something(package: str) -> None:
    docstrings = [
        docstring
        for docstring in all_docstrings(ROOT)
        if package_of(Path(docstring.place.split(":")[0]).relative_to("txl_dist").as_posix()) == package
    ]
    riddles = [
        docstring.place for docstring in docstrings if begins_with(docstring, "Of") or begins_with(docstring, "What")
    ]
    assert len(riddles) <= STILL_OF.get(package, 0), riddles
    short = [docstring.place for docstring in docstrings if is_too_short(docstring)]
    assert len(short) <= STILL_SHORT.get(package, 0), short


@pytest.mark.parametrize("package", sorted({package_of(file) for file in FILES}))
def test_a_public_function_of_more_than_one_statement_has_a_docstring(package: str) -> None:
    bare = {file: bare_functions(parse(path)) for file, path in FILES.items() if package_of(file) == package}
    assert sum(bare.values()) <= STILL_BARE.get(package, 0), {file: count for file, count in bare.items() if count}


def test_the_rules_see_what_they_forbid() -> None:
    nested = ast.parse("[[x for x in y] for y in z]\n{a for a in b}\n")
    assert len(nested_comprehensions(nested)) == 1
    assert packed_values(ast.parse("[1, *(2, 3), *rest]")) == 1
    source = "def f():\n    g()\n    return 1\ndef h():\n    '''Say it.'''\n    return 1\n"
    source += "def _p():\n    g()\n    g()\n"
    source += "class A:\n    def m(self):\n        g()\n        g()\n"
    source += "    @override\n    def o(self):\n        g()\n        g()\n"
    assert bare_functions(ast.parse(source)) == 2
