"""Commands that take a while say what they do before they import large libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.made_runs import make_run

PROGRAM = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "matplotlib", "deepspeed", "psutil"):
            print("HEAVY", name, file=sys.stderr, flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
from txl_dist.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plan small.toml --gpus 1 --gpu h100 --vocab-size 100", "txl plan: simulating steps of small.toml"),
        ("doctor", "txl doctor: checking this machine"),
        ("report runs/a", "txl report: reading runs/a"),
        ("compare runs/a runs/b", "txl compare: reading 2 runs"),
    ],
)
def test_the_first_words_come_on_standard_error_before_anything_heavy_is_imported(
    words: str, expected: str, tmp_path: Path
) -> None:
    """So they come at once, and standard output stays for results."""
    (tmp_path / "small.toml").write_text("[model]\nnum_layers = 1\n", encoding="utf-8")
    for name in "ab":
        make_run(tmp_path / "runs" / name, max_steps=20)
    command = [sys.executable, "-c", PROGRAM, *words.split()]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    first, *rest = result.stderr.splitlines()
    assert first.startswith(expected)
    assert all(line.startswith("HEAVY ") for line in rest)
    assert expected not in result.stdout
