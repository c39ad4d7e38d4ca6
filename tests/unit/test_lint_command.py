"""launch/lint.sh: which checks it runs, and the meaning of its exit code. The checks are stand-ins."""

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
    *device_count* | *torch.__version__* | *"-m pip "*) echo 0 ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
CHECK = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>calls
[[ "$(basename "$0") $*" != "$FAILING"* ]]
"""


def lint(folder: Path, *, failing: str) -> tuple[int, list[str]]:
    """Run the script where one check fails, or none. Returns (exit code, commands of the checks)."""
    shutil.copytree(ROOT / "launch", folder / "launch")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name, text in (("python", PYTHON), ("ruff", CHECK), ("mypy", CHECK)):
        (folder / ".venv" / "bin" / name).write_text(text)
        (folder / ".venv" / "bin" / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "VENV"}
    environment |= {"FAILING": failing or "nothing", "PYTHON": sys.executable}
    done = subprocess.run(["bash", str(folder / "launch/lint.sh")], env=environment, check=False)
    return done.returncode, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("failing", ["", "ruff check", "ruff format", "mypy"])
def test_every_check_runs_and_one_that_fails_fails_the_script(tmp_path: Path, failing: str) -> None:
    code, commands = lint(tmp_path, failing=failing)
    assert commands == ["ruff check -q .", "ruff format --check -q .", "mypy --no-error-summary"]
    assert code == (1 if failing else 0)
