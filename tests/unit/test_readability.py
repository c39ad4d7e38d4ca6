"""Rules for readable code: density, comprehensions and docstrings."""

from __future__ import annotations

import ast
from functools import cache

from tools.checks.count_code import size_of, total
from tools.checks.prose import all_docstrings, begins_with, is_too_short
from tools.checks.sources import ROOT, Definition, package_files, parse

PACKAGE = ROOT / "txl_dist"
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in package_files(ROOT)}
MOST_PER_FILE = 9.0
"""Syntax nodes per line of code. OLMo-core has 7.0 on average, litgpt 7.2, lingua 7.7, nanochat 9.8."""
MOST_ON_AVERAGE = 6.43
"""Syntax nodes per line of code over the package."""
FEWEST_LINES = 15
"""A file with fewer lines of code has no density to speak of."""
KERNELS = "model/kernels/"
"""Triton kernels are formulas: they are exempt."""
size_of_file, tree_of = cache(size_of), cache(parse)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


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


def test_no_file_is_denser_than_a_reader_can_follow() -> None:
    sizes = {file: size_of_file(path) for file, path in FILES.items() if not file.startswith(KERNELS)}
    long = {file: size.density for file, size in sizes.items() if size.lines >= FEWEST_LINES}
    assert {file: density for file, density in long.items() if density > MOST_PER_FILE} == {}


def test_the_package_as_a_whole_is_no_denser() -> None:
    assert total([size_of_file(path) for path in FILES.values()]).density <= MOST_ON_AVERAGE


def test_comprehensions_are_not_nested_and_values_not_packed() -> None:
    for file, path in FILES.items():
        tree = tree_of(path)
        assert nested_comprehensions(tree) == set(), file
        assert packed_values(tree) == 0, file
        assert "# fmt: skip" not in path.read_text(encoding="utf-8"), file


def test_docstrings_say_something() -> None:
    """`python -m tools.checks.prose --places` lists the faults."""
    docstrings = all_docstrings(ROOT)
    riddles = [each.place for each in docstrings if begins_with(each, "Of") or begins_with(each, "What")]
    assert riddles == []
    assert [each.place for each in docstrings if is_too_short(each)] == []


def test_a_public_function_of_more_than_one_statement_has_a_docstring() -> None:
    assert [file for file, path in FILES.items() if bare_functions(tree_of(path))] == []


def test_the_rules_see_what_they_forbid() -> None:
    nested = ast.parse("[[x for x in y] for y in z]\n{a for a in b}\n")
    assert len(nested_comprehensions(nested)) == 1
    assert packed_values(ast.parse("[1, *(2, 3), *rest]")) == 1
    source = "def f():\n    g()\n    return 1\ndef h():\n    '''Say it.'''\n    return 1\n"
    source += "def _p():\n    g()\n    g()\n"
    source += "class A:\n    def m(self):\n        g()\n        g()\n"
    source += "    @override\n    def o(self):\n        g()\n        g()\n"
    assert bare_functions(ast.parse(source)) == 2
