"""The benchmark for a GPU, rehearsed on a CPU: what goes wrong costs the row that it goes wrong in, and no other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).parents[3] / "tools"
Rows = dict[str, list[dict[str, Any]]]


def rehearsed(path: Path, *words: str) -> Rows:
    """Rows by section."""
    command = [sys.executable, str(TOOLS / "bench_gpu.py"), "--rehearse", "--json", str(path), *words]
    began = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - began < 580
    return rows_in(path)


def rows_in(path: Path) -> Rows:
    found: Rows = {}
    for entry in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if "state" not in entry:
            found.setdefault(entry["section"], []).append(entry)
    return found


def wrong(rows: list[dict[str, Any]]) -> list[str]:
    return [row["error"] for row in rows if "error" in row]


@pytest.fixture
def gpu_rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import gpu_rows  # type: ignore[import-not-found]

    return gpu_rows


@pytest.mark.slow
def test_the_first_run_is_rehearsed_whole_with_one_job_killed_one_raising_and_one_hanging(tmp_path: Path) -> None:
    faults = ["--break", "device=kill", "--break", "twins=raise", "--break", "engine=hang"]
    found = rehearsed(tmp_path / "gpu.jsonl", *faults, "--job-seconds", "45")
    assert set(found) == {"device", "tests", "twins", "engine", "profile", "sweep", "codes"}
    assert wrong(found["device"]) == ["killed by SIGKILL."]
    assert wrong(found["twins"]) == ["RuntimeError: on purpose"]
    assert wrong(found["engine"]) == ["took longer than 45 s"]
    assert [wrong(found[name]) for name in ("tests", "profile", "sweep", "codes")] == [[]] * 4
    # The first job of each was lost, and all the others are there.
    assert [row["job"] for row in found["device"]][1:] == ["copies"] * 2 + ["products"] + ["launches"] * 3
    assert [row["job"] for row in found["twins"]][:3] == ["softmax", "embedding", "model"]
    errors = [row[name] for row in found["twins"] for name in ("result", "worst gradient", "R") if name in row]
    assert len(errors) == 16
    assert max(errors) < 1e-5
    others = ["1 fp32 graphed", "0 fp32", "2 fp32", "3 fp32", "0 fp32 graphed", "2 fp32 graphed"]
    assert [row["job"] for row in found["engine"]][1:] == [f"ZeRO-{one}" for one in others for _ in range(2)]
    assert all(row["norms off by"] < 1e-5 for row in found["engine"] if "norms" in row)
    assert [row.get("skipped", "") for row in found["codes"]] == [
        "",
        "",
        "--peer-original was not given",
        "--peer-nvidia was not given",
    ]


@pytest.mark.slow
def test_the_second_and_third_runs_are_rehearsed(tmp_path: Path) -> None:
    found = rehearsed(tmp_path / "second.jsonl", "--run", "2")
    assert [row["job"] for row in found["kernels"]] == [f"tiny, {n}" for n in ("triton", "sdpa", "fused", "plain")]
    assert not wrong(found["kernels"] + found["recipes"])
    found = rehearsed(tmp_path / "third.jsonl", "--run", "3")
    assert found["curve"][-1]["losses off by"] < 1e-4
    (resumed,) = found["resume"]
    assert (resumed["losses alike"], resumed["files alike"]) == (resumed["steps"], resumed["files"])
    assert len(found["memcheck"]) == 1


@pytest.mark.slow
def test_what_the_time_does_not_reach_is_told(tmp_path: Path) -> None:
    found = rehearsed(
        tmp_path / "gpu.jsonl", "--only", "sweep", "--seconds", "40", "--job-seconds", "90", "--break", "sweep=hang"
    )
    assert wrong(found["sweep"]) == ["the section's time ended", "no time was left", "no time was left"]
    assert [row["job"] for row in found["sweep"]] == ["as it is", "buffer 30 MB", "attend 128x64x4x2"]


@pytest.mark.slow
def test_without_a_gpu_each_section_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOLS / "bench_gpu.py"), "--only", "device", "--json", str(tmp_path / "gpu.jsonl")]
    subprocess.run(command, capture_output=True, timeout=100, check=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""})
    (row,) = rows_in(tmp_path / "gpu.jsonl")["device"]
    assert "--rehearse" in row["error"]


def test_a_row_is_whole_or_not_read(gpu_rows: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    journal = gpu_rows.Journal(path, section="device", began=1.0, skip=["a"])
    assert journal.plans(["a", "b"]) == ["b"]
    journal.begins("b")
    journal.row("b", {"figure": float("nan")})
    gpu_rows.Journal(path, section="device", began=2.0).row("c", {})
    with path.open("a") as file:
        file.write('{"began": 1.0, "section": "dev')
    assert gpu_rows.rows(path, began=1.0) == {"device": [{"job": "b", "figure": None}]}
