"""Kernels that are compiled on a CPU are found in another checkout, as on the machine with the GPU."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.benchmarks import gpu_kernels

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


COUNTED = """#!/bin/sh
case "$1" in --version) ;; *) echo compiles >> {starts} ;; esac
exec {tool} "$@"
"""
"""A compiler that adds a line to a file when it compiles."""


def count_compilers(folder: Path, patched: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let Triton start compilers that are counted. Returns a function that returns the number of starts since the last
    call."""
    from triton import knobs

    starts = folder / "starts.txt"
    tools = {"CC": str(shutil.which("gcc")), "TRITON_PTXAS_PATH": knobs.nvidia.ptxas.path}
    tools["TRITON_PTXAS_BLACKWELL_PATH"] = knobs.nvidia.ptxas_blackwell.path  # newer Tritons use it for sm_90 too
    for variable, tool in tools.items():
        counted = folder / variable
        counted.write_text(COUNTED.format(starts=starts, tool=tool))
        counted.chmod(0o755)
        patched.setenv(variable, str(counted))

    def started() -> int:
        lines = starts.read_text().splitlines() if starts.exists() else []
        starts.unlink(missing_ok=True)
        return len(lines)

    return started


def test_a_second_checkout_with_the_packed_kernels_starts_no_compiler_until_a_kernel_is_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, packed, second = tmp_path / "cache", tmp_path / "kernels.tar.gz", tmp_path / "second"
    started = count_compilers(tmp_path, monkeypatch)
    for folder in ("txl_dist", "tools"):
        shutil.copytree(ROOT / folder, second / folder)

    first = gpu_kernels.compiled("one kernel", cache)
    assert (first["kernels"], first["stopped"]) == (1, "")
    assert first["compiled"] == started() >= 1

    assert gpu_kernels.pack(cache, packed) >= 2
    shutil.rmtree(cache)
    subprocess.run(["tar", "xzf", packed, "-C", "/"], check=True)  # as gpu_offline.sh does it
    assert {path.suffix for path in cache.rglob("*.*") if path.stat().st_size} <= {".cubin", ".json", ".so"}

    monkeypatch.setattr(gpu_kernels, "ROOT", second)
    found = gpu_kernels.compiled("one kernel", cache)
    assert (found["kernels"], found["compiled"], found["stopped"]) == (1, 0, "")
    assert started() == 0

    source = second / "txl_dist/model/kernels/head_width.py"
    words = source.read_text(encoding="utf-8")
    assert words.count("tile -= num_tiles") == 1
    source.write_text(words.replace("tile -= num_tiles", "tile = tile - num_tiles"), encoding="utf-8")
    edited = gpu_kernels.compiled("one kernel", cache)
    assert (edited["kernels"], edited["compiled"], edited["stopped"]) == (1, 1, "")
    assert started() == 1


FIRST = """
import json, sys
from tools.benchmarks.gpu_kernels import CompilingRecorder, launch_tests
from tools.benchmarks.gpu_sections import FIRST_TESTS
recorder = CompilingRecorder()
stopped = launch_tests(recorder, FIRST_TESTS)
print(json.dumps([stopped, sorted({key.split()[0] for key in recorder.launches})]))
"""


def kernels() -> set[str]:
    """Functions of txl_dist/model/kernels that read their place in the grid: those that are launched."""
    found = set()
    for path in (ROOT / "txl_dist/model/kernels").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and "tl.program_id" in ast.unparse(function):
                found.add(function.name)
    return found


def test_the_first_tests_on_a_gpu_launch_every_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stopped, launched = json.loads(done.stdout.splitlines()[-1])
    assert stopped == []
    assert len(launched) > 12
    assert kernels() - set(launched) == set()
