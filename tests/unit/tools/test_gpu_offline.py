"""The script that measures a GPU on a machine without network: it is rehearsed on a CPU, by the documented command.

Each run of all tests rehearses one section in the present environment. The nightly run makes an environment with the
machine's packages, collects the wheels that it lacks, and rehearses the whole first run. It downloads gigabytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tools.benchmarks import gpu
from tools.benchmarks.gpu_kernels import FOLDER
from tools.benchmarks.gpu_rows import all_entries
from tools.benchmarks.gpu_wheels import MACHINE, collect, names_in

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "tools/experiments/notebook/gpu.md"
SCRIPT = "tools/benchmarks/gpu_offline.sh"
CHECKOUT = ("configs", "tests", "tools", "txl_dist", "constraints.txt", "pyproject.toml")
"""What the rehearsal needs of a checkout."""
STARTUP = """
import os
with open(os.environ["SEEN"], "a") as seen:
    seen.write(os.environ.get("TRITON_CACHE_DIR", "") + "\\n")
"""
"""A module that Python imports when it starts, if it is on the path."""


def make_wheel(folder: Path, name: str = "seen", *, needs: tuple[str, ...] = ()) -> None:
    """A wheel with `STARTUP`."""
    about = f"{name}-1.0.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {need}" for need in needs)]
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sitecustomize.py", STARTUP)
        wheel.writestr(f"{about}/METADATA", "\n".join(lines) + "\n")
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


def test_the_collected_wheels_are_what_the_project_needs_and_the_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    make_wheel(index, "direct", needs=("in_direct>=1", "Present", "absent; extra == 'more'", "absent; os_name == 'no'"))
    make_wheel(index, "in_direct", needs=("direct",))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    names = collect(tmp_path / "wheels", ["direct>=0.5", "present"], present=names_in(["# all", "present==2  # here"]))
    assert names == ["direct-1.0-py3-none-any.whl", "in_direct-1.0-py3-none-any.whl"]
    assert sorted(path.name for path in (tmp_path / "wheels").iterdir()) == names


def command_of_the_page(begin: str, *, end: str = "") -> str:
    """The only command of the page that begins and ends so."""
    lines = [line.strip() for line in PAGE.read_text(encoding="utf-8").splitlines()]
    (command,) = [line for line in lines if line.startswith(begin) and line.endswith(end)]
    return command


def test_the_page_shows_the_commands_that_are_rehearsed() -> None:
    assert command_of_the_page("python -m tools.benchmarks.gpu_wheels ").endswith(" .whl")
    measured = command_of_the_page(f"bash {SCRIPT} ", end="--run 1")
    assert command_of_the_page(f"bash {SCRIPT} ", end=" --rehearse") == f"{measured} --rehearse"


class Machine(NamedTuple):
    """A checkout with the collected wheels, and an environment with the machine's packages."""

    checkout: Path
    environment: dict[str, str]

    def run(self, command: str, *, limit_s: int) -> None:
        """Run a command of the page. `timeout` also ends the processes that it starts."""
        words = ["timeout", "--kill-after=20", str(limit_s), "bash", "-c", command]
        done = subprocess.run(
            words, cwd=self.checkout, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def machine_python() -> str:
    """Python 3.12 if it is there and runs, otherwise this Python."""
    for name in ("python3.12", sys.executable):
        if path := shutil.which(name):
            done = subprocess.run([path, "-c", "import ensurepip, venv"], capture_output=True, check=False)
            if done.returncode == 0:
                return path
    raise AssertionError("this Python has no venv")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("machine")
    checkout, venv = folder / "checkout", folder / "venv"
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DS_ACCELERATOR")}
    own |= {"PATH": f"{venv / 'bin'}:{own['PATH']}", "TXL_SITE": str(folder / "site"), "VIRTUAL_ENV": str(venv)}
    subprocess.run([machine_python(), "-m", "venv", str(venv)], check=True)
    probe = f"python -m pip download -q --no-deps --retries 0 --timeout 15 -d {folder / 'probe'} hjson"
    if subprocess.run(["bash", "-c", probe], env=own, capture_output=True, check=False).returncode:
        pytest.skip("the package index cannot be reached, so the machine's packages cannot be installed")
    checkout.mkdir()
    for path in (ROOT / name for name in CHECKOUT):
        if path.is_dir():
            shutil.copytree(path, checkout / path.name)
        else:
            shutil.copy(path, checkout)
    made = Machine(checkout, own)
    try:
        made.run(f"python -m pip install -q -r {MACHINE}", limit_s=1500)
        made.run(command_of_the_page("python -m tools.benchmarks.gpu_wheels "), limit_s=600)
        (checkout / ".whl/commit").write_text("0123abcd\n")
        yield made
    finally:
        shutil.rmtree(venv, ignore_errors=True)  # gigabytes


Rows = dict[str, list[dict[str, Any]]]


def rehearsed(machine: Machine, *words: str) -> Rows:
    """The rows by section of the page's rehearsal, which ends by itself before ten minutes are over."""
    shutil.rmtree(machine.checkout / "OUT", ignore_errors=True)
    command = command_of_the_page(f"bash {SCRIPT} ", end=" --rehearse")
    machine.run(" ".join([command, *words]), limit_s=580)
    out = machine.checkout / "OUT"
    assert {path.name for path in out.iterdir()} == {"gpu.jsonl", "gpu.jsonl.log", "log.txt", "smi.txt"}
    entries = list(all_entries(out / "gpu.jsonl"))
    found: Rows = {section.name: [] for section in gpu.RUNS[1]}
    for entry in entries:
        if "state" not in entry:
            found[entry["section"]].append(entry)
    planned = {(entry["section"], job) for entry in entries if entry.get("state") == "plans" for job in entry["jobs"]}
    assert {(section, row["job"]) for section, rows in found.items() for row in rows} == planned
    assert {section for section, _ in planned} == found.keys()
    return found


def errors_in(found: Rows) -> dict[str, list[str]]:
    """The errors of the sections that have some."""
    errors = {section: [row["error"] for row in rows if "error" in row] for section, rows in found.items()}
    return {section: words for section, words in errors.items() if words}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(3000)
def test_the_documented_call_measures_all_sections_with_the_packages_of_the_machine(machine: Machine) -> None:
    assert errors_in(rehearsed(machine)) == {}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(3000)
def test_with_the_packages_of_the_machine_a_killed_a_raising_and_a_hanging_job_cost_a_row_each(
    machine: Machine,
) -> None:
    found = rehearsed(machine, "--break device=kill --break twins=raise --break engine=hang")
    errors = errors_in(found)
    assert errors.keys() == {"device", "twins", "engine"}
    assert errors["device"] == ["killed by SIGKILL."]
    assert errors["twins"] == ["RuntimeError: on purpose"]
    (hung,) = errors["engine"]
    assert hung.startswith("took longer than ")
