"""The programs that check the code base: what counts as code, what is a difference, and the picture of README."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.checks import guard
from tools.checks.count_code import code_lines, size_of, sizes_by_package
from tools.checks.guard import Renamed, content_of, differences, digest, in_old_names, plain, tensors_of
from tools.experiments.draw_memory import draw

ROOT = Path(__file__).parents[3]

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


def test_syntax_nodes_are_counted_without_imports_docstrings_and_contexts(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('"""Text."""\nimport os\nx = y + 1\n')
    # Assign, Name x, BinOp, Name y, Add, Constant
    assert size_of(path) == (1, 1, 6)
    assert size_of(path).density == 6


def test_every_file_of_the_package_is_counted_in_one_folder(tmp_path: Path) -> None:
    for name in ("cli.py", "data/a.py", "data/deep/b.py", "data/__init__.py"):
        path = tmp_path / "txl_dist" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    counted = {name: len(files) for name, files in sizes_by_package(tmp_path).items()}
    assert counted == {"top": 1, "data": 3}
    command = [sys.executable, "-m", "tools.checks.count_code", "--root", str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
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


RENAMES = (Renamed("border", "mask", (("carry", False), ("mask", True))), Renamed("ema", "ema_decay"))


def test_a_renamed_key_is_no_difference_to_the_guard_and_a_changed_value_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "RENAMED", RENAMES)
    old = {"data": {"border": "carry", "seed": 1}, "optim": [{"ema": 0.5}]}
    assert plain({"data": {"mask": False, "seed": 1}, "optim": [{"ema_decay": 0.5}]}) == plain(old) == old
    for changed in (
        {"data": {"mask": True, "seed": 1}, "optim": [{"ema_decay": 0.5}]},
        {"data": {"mask": False, "seed": 2}, "optim": [{"ema_decay": 0.5}]},
        {"data": {"mask": False, "seed": 1}, "optim": [{"ema_decay": 0.25}]},
        {"data": {"mask": False}, "optim": [{"ema_decay": 0.5}]},
    ):
        assert list(differences(old, plain(changed)))


def test_values_of_another_type_are_not_renamed() -> None:
    assert in_old_names({"mask": 0}, RENAMES) == {"border": 0}  # False == 0, and yet another value


def test_the_guard_sees_a_changed_tensor_and_a_changed_number_in_a_file(tmp_path: Path) -> None:
    tensors, facts = tmp_path / "x.safetensors", tmp_path / "index.json"
    header = json.dumps({"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    hashes = set()
    for values in (b"\1\2", b"\1\3"):
        tensors.write_bytes(len(header).to_bytes(8, "little") + header + values)
        hashes.add(digest(content_of(tensors)))
    for number in (1, 2):
        facts.write_text(json.dumps({"tokens": number, "format_version": 1}))
        hashes.add(digest(content_of(facts)))
    assert len(hashes) == 4
    facts.write_text(json.dumps({"tokens": 2, "format_version": 7, "config_fingerprint": "a"}))
    assert digest(content_of(facts)) in hashes


def test_the_picture_of_the_memory_depends_on_the_numbers_alone(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 3 / step, "loss_by_position": [2.0, 1.5]} for step in (1, 2)]
    runs = {"with memory": rows, "without memory": [row | {"loss": 2.5} for row in rows]}
    for name in ("a.svg", "b.svg"):
        draw(runs, segment_len=4, out=tmp_path / name)
    picture = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert picture == (tmp_path / "b.svg").read_text(encoding="utf-8")
    assert all(f">{text}</text>" in picture for text in ("with memory", "without memory", "1.500", "2.500"))
