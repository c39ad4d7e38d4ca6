"""launch/test.sh: which tests it chooses, and the meaning of its exit code. Python is a stand-in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = f"""#!/usr/bin/env bash
case "$*" in
    *device_count* | *torch.__version__* | *"-m pip "* | *"-m compileall "*) echo 0 ;;
    "-m pytest"*)
        printf '%s\\n' "$*" >>calls
        case "$*" in *"not alone"*) exit "$FIRST" ;; *) exit "$SECOND" ;; esac ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
CHOSEN = "(smoke or not (slow or dist)) and "
TWO_AT_A_TIME = "-n 2 --dist loadfile --no-loadscope-reorder"


def calls(folder: Path, *arguments: str, first: int = 0, second: int = 0) -> tuple[int, list[str]]:
    """(Exit code, what was called after `-m pytest`)."""
    shutil.copytree(ROOT / "launch", folder / "launch")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_time.py").write_text("pytestmark = pytest.mark.alone\n")
    (folder / "tests" / "test_other.py").touch()
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").write_text(PYTHON)
    (folder / ".venv" / "bin" / "python").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "VENV"}
    environment |= {"FIRST": str(first), "SECOND": str(second), "PYTHON": sys.executable}
    done = subprocess.run(["bash", str(folder / "launch/test.sh"), *arguments], env=environment, check=False)
    lines = (folder / "calls").read_text().splitlines()
    return done.returncode, [line.removeprefix("-m pytest ") for line in lines]


def test_the_default_is_what_is_quick_and_what_is_smoke(tmp_path: Path) -> None:
    code, called = calls(tmp_path)
    assert code == 0
    assert called == [f"-m {CHOSEN}not alone {TWO_AT_A_TIME}"]


@pytest.mark.parametrize(("word", "chosen"), [("--all", "(not nightly)"), ("--nightly", "(nightly)")])
def test_all_is_everything_but_the_nightly_tests_and_hands_other_arguments_on(
    tmp_path: Path, word: str, chosen: str
) -> None:
    code, called = calls(tmp_path, word, "--durations=15", "-k", "a or b")
    assert code == 0
    assert called == [
        f"-m {chosen} and not alone {TWO_AT_A_TIME} --durations=15 -k a or b",
        f"-m {chosen} and alone tests/test_time.py --durations=15 -k a or b",
    ]


def test_other_arguments_go_to_pytest_as_they_are(tmp_path: Path) -> None:
    code, called = calls(tmp_path, "tests/unit/model", "-k", "softmax", second=3)
    assert code == 3
    assert called == ["tests/unit/model -k softmax"]


@pytest.mark.parametrize(
    ("first", "second", "code"), [(1, 0, 1), (0, 1, 1), (5, 0, 0), (0, 5, 0), (5, 5, 5), (5, 1, 1), (2, 5, 2)]
)
def test_a_failure_of_either_part_is_one_and_no_tests_are_none_only_where_both_have_none(
    tmp_path: Path, first: int, second: int, code: int
) -> None:
    assert calls(tmp_path, "--all", first=first, second=second)[0] == code
