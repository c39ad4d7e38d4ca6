"""A sweep of real runs in which one run fails: the others finish, the table shows the reason, and the same command
resumes."""

import csv
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_a_failing_run_is_a_row_and_a_finished_one_is_not_made_again(
    tmp_path: Path, config_file: Path, warm_bin: Path
) -> None:
    # The third attention is for GPUs, which only the run itself finds missing.
    grid = ["--grid", "engine.attention=fused,plain,triton"]
    # Its runs are started by the same `python`, and are forked too.
    command = [
        str(warm_bin / "python"),
        "-m",
        "txl_dist",
        "sweep",
        str(config_file),
        *grid,
        "--jobs",
        "2",
        "--out",
        "found",
        "--train.max_steps",
        "4",
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1, result.stderr
    table = result.stdout.splitlines()
    assert table[0].split() == ["settings", "validation", "deviation", "seeds"]
    assert {line.split()[0] for line in table[1:3]} == {"engine.attention=fused", "engine.attention=plain"}
    assert table[3].split()[:4] == ["engine.attention=triton", "-", "-", "0"]
    assert "engine.attention=triton cannot run" in table[3]
    assert any(line.startswith("best: engine.attention=") for line in table)
    assert (tmp_path / "found" / "compare.html").is_file()
    with (tmp_path / "found" / "sweep.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] == "done" for row in rows] == [True, True, False]
    assert [row["steps"] for row in rows] == ["4", "4", ""]

    logs = sorted((tmp_path / "found").glob("*.log"))
    before = [path.stat().st_mtime_ns for path in logs]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 1, again.stderr
    assert "2 of them done" in again.stderr
    changed = [path.name for path, old in zip(logs, before, strict=True) if path.stat().st_mtime_ns != old]
    assert changed == ["engine.attention=triton,seed=1.log"]
    assert again.stdout.splitlines()[1:3] == table[1:3]
