"""The script that measures a GPU on a machine without network: it is rehearsed on a CPU, by the documented command."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.benchmarks.gpu_kernels import FOLDER
from tools.benchmarks.gpu_rows import all_entries

ROOT = Path(__file__).parents[3]
SCRIPT = "tools/benchmarks/gpu_offline.sh"
STARTUP = """
import os
with open(os.environ["SEEN"], "a") as seen:
    seen.write(os.environ.get("TRITON_CACHE_DIR", "") + "\\n")
"""
"""A module that Python imports when it starts, if it is on the path."""


def make_wheel(folder: Path) -> None:
    """A wheel with `STARTUP`."""
    about = "seen-1.0.dist-info"
    with zipfile.ZipFile(folder / "seen-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sitecustomize.py", STARTUP)
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: seen\nVersion: 1.0\n")
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(
            f"{about}/RECORD", f"sitecustomize.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n"
        )


@pytest.mark.slow
def test_one_command_installs_wheels_unpacks_kernels_and_leaves_rows_after_a_job_is_killed(tmp_path: Path) -> None:
    wheels, out, kernel = tmp_path / "wheels", tmp_path / "out", tmp_path / "unpacked/kernel.cubin"
    for folder in (wheels, out, kernel.parent):
        folder.mkdir()
    make_wheel(wheels)
    kernel.write_text("kernel")
    with tarfile.open(wheels / "kernels.tar.gz", "w:gz") as archive:
        archive.add(kernel, arcname=str(kernel.relative_to("/")))
    (wheels / "commit").write_text("0123abcd\n")
    kernel.unlink()
    own = {"TXL_SITE": str(tmp_path / "site"), "SEEN": str(tmp_path / "seen.txt")}
    own |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", SCRIPT, str(wheels), str(out), "--run", "1", "--rehearse", "--only", "device"]
    command += ["--break", "device=kill"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert kernel.read_text() == "kernel"
    assert str(FOLDER) in (tmp_path / "seen.txt").read_text().splitlines()
    assert {path.name for path in out.iterdir()} == {"gpu.jsonl", "gpu.jsonl.log", "log.txt", "smi.txt"}
    (opened,) = [entry for entry in all_entries(out / "gpu.jsonl") if entry.get("state") == "opens"]
    assert opened["commit"] == "0123abcd"
    found = [entry for entry in all_entries(out / "gpu.jsonl") if "state" not in entry]
    assert [row.get("error") for row in found] == ["killed by SIGKILL.", *[None] * 6]
    assert [row["job"] for row in found][1:] == ["copies"] * 2 + ["products"] + ["launches"] * 3
    assert "device: " in (out / "log.txt").read_text()


def test_the_page_shows_the_command_that_is_rehearsed() -> None:
    page = (ROOT / "tools/experiments/notebook/gpu.md").read_text(encoding="utf-8")
    assert f"bash {SCRIPT} " in page
    assert "--only" not in next(line for line in page.splitlines() if line.startswith(f"bash {SCRIPT} "))
