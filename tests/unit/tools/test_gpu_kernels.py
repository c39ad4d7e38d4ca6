"""Kernels that are compiled on a CPU are found in another checkout, as on the machine with the GPU."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tools.benchmarks import gpu_kernels

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


@pytest.mark.nightly  # test_gpu_offline.py unpacks a smaller archive
def test_a_second_checkout_finds_the_packed_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, packed, second = tmp_path / "cache", tmp_path / "kernels.tar.gz", tmp_path / "second"
    for folder in ("txl_dist", "tools"):
        shutil.copytree(ROOT / folder, second / folder)
    first = gpu_kernels.compiled("one kernel", cache)
    assert (first["kernels"], first["stopped"]) == (1, "")
    assert first["compiled"] >= 1
    assert gpu_kernels.pack(cache, packed) >= 2
    shutil.rmtree(cache)
    with tarfile.open(packed) as archive:
        assert {Path(name).suffix for name in archive.getnames()} <= {".cubin", ".json", ".so"}
        archive.extractall("/", filter=tarfile.tar_filter)
    monkeypatch.setattr(gpu_kernels, "ROOT", second)
    found = gpu_kernels.compiled("one kernel", cache)
    assert (found["kernels"], found["compiled"], found["stopped"]) == (1, 0, "")


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
    # The steps of enwik8_base, which come before all tests, launch the kernel of Adam.
    assert kernels() - set(launched) == {"adam_step"}
