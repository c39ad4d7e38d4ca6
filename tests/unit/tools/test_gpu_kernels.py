"""Kernels that are compiled on a CPU are found in another checkout, as on the machine with the GPU."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


def run(checkout: Path, *words: str, cache: Path) -> str:
    command = [sys.executable, "-m", "tools.benchmarks.gpu_kernels", *words]
    own = {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(checkout)}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | own
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiled_in(checkout: Path, cache: Path) -> dict[str, Any]:
    """The row of the smallest part, compiled in a checkout."""
    row: dict[str, Any] = json.loads(run(checkout, "--child", "one kernel", cache=cache).splitlines()[-1])
    return row


def test_a_second_checkout_compiles_only_what_the_packed_cache_lacks(tmp_path: Path) -> None:
    cache, packed, second = tmp_path / "cache", tmp_path / "kernels.tar.gz", tmp_path / "second"
    for folder in ("txl_dist", "tools"):
        shutil.copytree(ROOT / folder, second / folder, ignore=shutil.ignore_patterns("__pycache__"))
    run(ROOT, "--parts", "one kernel", "--out", str(packed), "--folder", str(cache), cache=cache)
    shutil.rmtree(cache)
    with tarfile.open(packed) as archive:
        assert {Path(name).suffix for name in archive.getnames()} <= {".cubin", ".json", ".so"}
        archive.extractall("/", filter=tarfile.tar_filter)
    found = compiled_in(second, cache)
    assert (found["kernels"], found["compiled"], found["stopped"]) == (1, 0, "")
    (kernel,) = cache.rglob("*.cubin")
    shutil.rmtree(kernel.parent)
    assert compiled_in(second, cache)["compiled"] == 1


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
