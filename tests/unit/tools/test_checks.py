"""The programs that check the code base: prose, names, the path of the settings, the random choice, and moved code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import forked
from tools.checks.draw import drawn, messages, paragraphs, public_names
from tools.checks.names import root_entries, shared_file_names, shared_public_names
from tools.checks.prose import count_pages, docstring_faults, prose_of, sentences_of
from tools.checks.same_code import Renaming, differences, read_moves
from tools.checks.sources import ROOT, docstrings
from tools.checks.walk import Counts, Place, count, heights

MOST_STAYS, MOST_FILES, MOST_CLIMBS = 48, 28, 17
"""Bounds of the way of the settings through a start."""

PAGE = """# A heading; it does not count

A sentence of [a link](https://example.org/a;b). Another one; with a
semicolon <!-- a comment; --> at version 1.5 of it!

```bash
echo "code; does not count"
```

| a table; | does not |
|---|---|

- An item is a sentence
- so is `the next`. And one more?
"""
HEADED = "README.md, A heading; it does not count"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_prose_is_counted_without_code_tables_headings_comments_and_links(tmp_path: Path) -> None:
    assert sentences_of(prose_of(PAGE)) == [
        "A sentence of a link.",
        "Another one; with a semicolon at version 1.5 of it!",
        "An item is a sentence",
        "so is `the next`.",
        "And one more?",
    ]
    long = " ".join(["word"] * 26) + ".\n"
    write(tmp_path, {"a.md": PAGE, "b.md": long})
    counted = count_pages([tmp_path / "a.md", tmp_path / "b.md"])
    assert (counted.pages, counted.sentences, counted.long_sentences, counted.semicolons) == (2, 6, 1, 1)
    assert counted.prose_words == 5 + 10 + 5 + 4 + 3 + 26


def test_every_docstring_is_found_once_with_its_kind(tmp_path: Path) -> None:
    source = '"""Module."""\nX = 1\n"""Of x."""\nclass A:\n    """What it is."""\n    y: int = 0\n    """Field."""\n'
    source += "    def f(self):\n        '''Does it all well.'''\n        return 'no docstring'\n"
    write(tmp_path, {"txl_dist/a.py": source})
    found = list(docstrings(tmp_path / "txl_dist/a.py", tmp_path))
    assert [(one.kind, one.name, one.text) for one in found] == [
        ("module", "", "Module."),
        ("field", "X", "Of x."),
        ("class", "A", "What it is."),
        ("field", "A.y", "Field."),
        ("function", "A.f", "Does it all well."),
    ]
    faults = docstring_faults(tmp_path)
    assert {fault: [one.name for one in where] for fault, where in faults.items()} == {
        'begin with "Of"': ["X"],
        'begin with "What"': ["A"],
        "have three words or fewer": ["", "X", "A", "A.y"],
    }


def test_names_with_two_homes_are_found(tmp_path: Path) -> None:
    write(
        tmp_path / "txl_dist",
        {
            "__init__.py": "",
            "a.py": "def shared(): ...\ndef _private(): ...\n",
            "cli/a.py": "def other(): ...\n",
            "data/a.py": "class shared: ...\ndef _private(): ...\n",
            "data/__init__.py": "",
        },
    )
    assert root_entries(tmp_path) == (["__init__.py", "a.py"], ["cli", "data"])
    assert shared_file_names(tmp_path) == {"a.py": [".", "data"]}
    assert shared_public_names(tmp_path) == {"shared": ["a.py", "data/a.py"]}


def test_the_way_of_the_settings_is_counted_in_stays_files_and_climbs(tmp_path: Path) -> None:
    write(
        tmp_path / "txl_dist",
        {
            "__init__.py": "from txl_dist.top import a\n",
            "low.py": "",
            "mid/x.py": "from txl_dist import low\n",
            "top.py": "def f():\n    from txl_dist.mid.x import y\n",
        },
    )
    height = heights(tmp_path)
    assert height == {"low.py": 0, "mid/x.py": 1, "top.py": 2}
    way = [Place(file, "f") for file in ("top.py", "top.py", "low.py", "mid/x.py", "low.py", "top.py")]
    assert count(way, height) == Counts(functions=6, stays=5, files=3, climbs=2)


@pytest.mark.dist
def test_the_way_of_the_settings_through_a_start_stays_short(tmp_path: Path) -> None:
    """`python -m tools.checks.walk --list` shows the way."""
    out = tmp_path / "out.txt"
    words = ("-m", "tools.checks.walk")
    process = forked.start(forked.run_python, *words, variables=forked.environment(), cwd=ROOT, out=out)
    process.join(120)
    last_line = out.read_text(encoding="utf-8").splitlines()[-1]
    stays, files, climbs = re.findall(r"(\d+) (?:stays|files|climbs)", last_line)
    assert int(stays) <= MOST_STAYS
    assert int(files) <= MOST_FILES
    assert int(climbs) <= MOST_CLIMBS


def test_a_draw_depends_on_the_seed_and_the_tree_alone(tmp_path: Path) -> None:
    items = [str(number) for number in range(100)]
    assert drawn(items, 5, seed="a") == drawn(items[::-1], 5, seed="a")
    assert drawn(items, 5, seed="a") != drawn(items, 5, seed="b")
    assert len(set(drawn(items, 40, seed="a"))) == 40
    source = 'def public(a: int) -> str:\n    """Say it."""\n    raise ConfigError(f"one two three four {a} six")\n'
    write(tmp_path, {"txl_dist/a.py": source, "README.md": PAGE, "docs/b.md": "too short"})
    assert public_names(tmp_path) == ["a.py\npublic(a: int) -> str\nSay it."]
    assert messages(tmp_path) == ["txl_dist/a.py: one two three four {a} six"]
    assert [place.split(":")[0] for place in paragraphs(tmp_path)] == [HEADED, HEADED]


@pytest.fixture
def moved(tmp_path: Path) -> tuple[Path, Path, dict[str, str]]:
    before = {
        "txl_dist/old/a.py": '"""Of a."""\nfrom txl_dist.old import b\nNAME = "txl_dist.old.b"\n',
        "txl_dist/old/b.py": "def g():\n    return 1\n",
    }
    after = {
        "txl_dist/new/a.py": '"""Say what a is."""\nfrom txl_dist.new import c\nNAME = "txl_dist.new.c"\n',
        "txl_dist/new/c.py": "def g():\n    return 1\n",
    }
    table = write(
        tmp_path, {"moves": "txl_dist/old/a.py txl_dist/new/a.py # why\n\ntxl_dist/old/b.py txl_dist/new/c.py\n"}
    )
    return write(tmp_path / "before", before), write(tmp_path / "after", after), read_moves(table / "moves")


def test_a_move_is_the_same_code(moved: tuple[Path, Path, dict[str, str]]) -> None:
    assert differences(*moved, ("txl_dist",)) == []


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("new/c.py", "def g():\n    return 2\n", "new/c.py: differs"),
        ("new/a.py", 'NAME = "txl_dist.old.b"\n', "new/a.py: differs"),
        ("new/d.py", "", "new/d.py: new"),
    ],
)
def test_a_move_that_changes_more_is_named(
    file: str, text: str, told: str, moved: tuple[Path, Path, dict[str, str]]
) -> None:
    before, after, moves = moved
    (after / "txl_dist" / file).write_text(text)
    (found,) = differences(before, after, moves, ("txl_dist",))
    assert told in found


def test_a_file_that_is_lost_in_a_move_is_named(moved: tuple[Path, Path, dict[str, str]]) -> None:
    before, after, moves = moved
    (after / "txl_dist/new/c.py").unlink()
    assert differences(before, after, moves, ("txl_dist",)) == ["txl_dist/new/c.py: missing (was txl_dist/old/b.py)"]


def test_the_longest_name_is_mapped_first() -> None:
    renaming = Renaming({"txl_dist/log.py": "txl_dist/console/logging.py", "txl_dist/log_a.py": "txl_dist/b.py"})
    assert renaming.of_text("txl_dist.log.x txl_dist.log_a txl_dist/log.py my.txl_dist.logs") == (
        "txl_dist.console.logging.x txl_dist.b txl_dist/console/logging.py my.txl_dist.logs"
    )
