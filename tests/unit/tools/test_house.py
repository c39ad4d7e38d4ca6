"""The tools that guard and show the house: what counts as code, what is a difference, the picture of README."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.count_code import code_lines, rooms
from tools.draw_memory import draw
from tools.guard import differences, plain, tensors_of

TOOLS = Path(__file__).parents[3] / "tools"

SOURCE = '''"""A module.

Told in two paragraphs."""

from __future__ import annotations
import os, \\
    sys


class Thing:
    """A thing."""

    size: int = 0  # counted
    """In bytes."""

    def grow(self) -> str:
        # not counted

        import math
        return """a text
that is code"""


PARTS = (
    1,
)
'''


def test_code_is_counted_without_docstrings_comments_blanks_and_imports() -> None:
    assert code_lines(SOURCE) == len(["class", "size", "def", "return", "text", "PARTS", "1", ")"])
    assert code_lines("") == 0


def test_every_file_of_the_package_is_in_one_room(tmp_path: Path) -> None:
    for name in ("cli.py", "data/a.py", "data/deep/b.py", "data/__init__.py"):
        path = tmp_path / "txl_dist" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    assert {room: len(paths) for room, paths in rooms(tmp_path).items()} == {"top": 1, "data": 3}
    command = [sys.executable, str(TOOLS / "count_code.py"), "--root", str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[:4:3] for line in printed.splitlines()] == [["top", "1"], ["data", "3"], ["all", "4"]]


def test_the_guard_names_each_difference_and_nothing_else() -> None:
    old = {"run": {"step_4": {"a": "12", "b": "34"}, "loss": 2.5}, "gone": 1}
    assert list(differences(old, old)) == []
    new = {"run": {"step_4": {"a": "12", "b": "35"}, "loss": 2.5}, "came": 1}
    assert list(differences(old, new)) == ["came: only after", "gone: only before", "run > step_4 > b: 34 -> 35"]


@pytest.mark.parametrize("metadata", [{}, {"__metadata__": {"state": "abc"}}])
def test_the_guard_takes_tensors_for_equal_that_name_other_states(metadata: dict[str, object], tmp_path: Path) -> None:
    header = json.dumps(metadata | {"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\1\2")
    assert tensors_of(path) == b'{"x": {"data_offsets": [0, 2], "dtype": "U8", "shape": [2]}}\1\2'


def test_the_guard_leaves_out_where_things_lie() -> None:
    assert plain({"run": "/tmp/x", "step": 3, "parts": [{"path": "/y", "tokens": 7}]}) == {
        "step": 3,
        "parts": [{"tokens": 7}],
    }


def test_the_picture_of_the_memory_depends_on_the_numbers_alone(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 3 / step, "loss_by_position": [2.0, 1.5]} for step in (1, 2)]
    runs = {"with memory": rows, "without memory": [row | {"loss": 2.5} for row in rows]}
    for name in ("a.svg", "b.svg"):
        draw(runs, segment_len=4, out=tmp_path / name)
    picture = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert picture == (tmp_path / "b.svg").read_text(encoding="utf-8")
    assert all(f">{text}</text>" in picture for text in ("with memory", "without memory", "1.500", "2.500"))
