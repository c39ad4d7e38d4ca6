"""Collect the wheels that a GPU machine without network lacks: `python -m tools.benchmarks.gpu_wheels FOLDER`.

The wheels are those of the project's dependencies and of all that they need, except the machine's packages
(gpu_machine.txt). They are for the Python and the platform of this process, which must be the machine's.
"""

from __future__ import annotations

import argparse
import email
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
MACHINE = Path(__file__).with_name("gpu_machine.txt")


def names_in(lines: Iterable[str]) -> set[str]:
    """Return the names of the packages in the lines of a requirements file."""
    wanted = [line.partition("#")[0].strip() for line in lines]
    return {canonicalize_name(Requirement(line).name) for line in wanted if line}


def collect(folder: Path, wanted: Iterable[str], *, present: set[str]) -> list[str]:
    """Write the wheels of the wanted packages, and of all that they need, into a folder. Return their file names.

    `present` are names of packages that are left out. Raises CalledProcessError if pip finds no version of a package.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seen, names = set(present), []
    waiting = [Requirement(text) for text in wanted]
    while waiting:
        one = waiting.pop()
        if canonicalize_name(one.name) in seen or not (one.marker is None or one.marker.evaluate({"extra": ""})):
            continue
        seen.add(canonicalize_name(one.name))
        one.marker = None  # it holds here
        wheel = make_wheel(folder, str(one))
        names.append(wheel.name)
        waiting += requirements_of(wheel)
    return names


def make_wheel(folder: Path, requirement: str) -> Path:
    """Download or build the wheel of a package in the version of constraints.txt. Return its path."""
    with TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", temporary, requirement]
        subprocess.run([*command, "--constraint", str(ROOT / "constraints.txt")], check=True)
        (made,) = Path(temporary).glob("*.whl")
        return made.rename(folder / made.name)


def requirements_of(wheel: Path) -> list[Requirement]:
    """Return what a wheel needs."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        about = email.message_from_bytes(archive.read(name))
    return [Requirement(text) for text in about.get_all("Requires-Dist", [])]


def main() -> int:
    """Collect the wheels, and print their names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder that gets the wheels")
    arguments = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    present = names_in(MACHINE.read_text(encoding="utf-8").splitlines())
    print("\n".join(collect(arguments.folder, project["dependencies"], present=present)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
