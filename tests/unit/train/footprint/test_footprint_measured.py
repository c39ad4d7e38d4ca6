"""Predicted bytes of a rank compared with those of real runs with the real launcher, one run per ZeRO stage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from txl_dist.distributed.malloc import _has_huge_pages

ROOT = Path(__file__).parents[4]


@pytest.mark.nightly  # test_footprint.py measures smaller models in one process
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.skipif(not _has_huge_pages(), reason="without huge pages the allocator is left as it is")
@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ((3,), []),
        ((0, 1, 2), []),
        pytest.param((1,), ["--recipes", "xlnet", "--softmax", "plain", "--lanes", "8"], id="xlnet"),
    ],
    ids=str,
)
def test_what_a_rank_holds_at_each_stage_is_foreseen_within_a_tenth(
    stages: tuple[int, ...], words: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "footprint.json"
    words = ["--sizes", "30", "--stages", *map(str, stages), "--ranks", "2", "--folder", str(tmp_path), *words]
    command = [sys.executable, "-m", "tools.benchmarks.footprint", *words, "--json", str(file)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text(encoding="utf-8"))["tables"]["footprint"]
    assert [row["stage"] for row in rows] == [*stages]
    assert all(row["measured MiB"] > 500 for row in rows)
    assert all(0.9 < row["ratio"] < 1.1 for row in rows), rows
