"""Follow the settings through the start of a training run, and count the steps of a reader of this code.

    python -m tools.checks.walk                    # this checkout
    python -m tools.checks.walk --root CHECKOUT
    python -m tools.checks.walk --list             # also every function of the path, in the order of the calls

The program trains a tiny model for two steps in this process, on one rank. It records each function of the package that
is called on the main thread with the settings. The settings are an argument that is a `Config`, a section of a
`Config`, or an object whose attribute `config` is one of these. The path begins at train/start.py. A function is
recorded at its first call. The program prints three numbers:

- stays: groups of consecutive functions in one file; - files: files of the path; - climbs: stays in a file with a
greater height than the file of the stay before. The height of a file is one more than   the greatest height of the
files that it imports. A file that imports none of the package has height 0.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tools.checks.sources import PACKAGE, ROOT, package_files, parse

BEGIN = "train/start.py"


class Place(NamedTuple):
    """A function of the path."""

    file: str
    """Path within the package."""
    name: str
    """Qualified name: `function` or `Class.method`."""


class Counts(NamedTuple):
    """Counts of a path."""

    functions: int
    stays: int
    files: int
    climbs: int


def heights(root: Path) -> dict[str, int]:
    """Return the height of each file of the package in a checkout, by its path within the package."""
    base = root / PACKAGE
    files = {path.relative_to(base).as_posix(): path for path in package_files(root)}
    del files["__init__.py"]  # it imports modules on demand, so its height has no meaning
    needs = {file: set(imported_files(parse(path), base)) & files.keys() - {file} for file, path in files.items()}
    result = dict.fromkeys(files, 0)
    for _ in files:  # imports have no cycles, so the heights are then final
        before = dict(result)
        for file, others in needs.items():
            result[file] = max((result[other] + 1 for other in others), default=0)
        if result == before:
            break
    return result


def imported_files(tree: ast.Module, base: Path) -> Iterator[str]:
    """Yield the files of the package that a file imports, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            folder = "/".join((node.module or "").split(".")[1:])
            for alias in node.names:
                candidates = (f"{folder}/{alias.name}.py", f"{alias.name}.py" if not folder else f"{folder}.py")
                yield from (file for file in candidates if (base / file).is_file())


def count(places: list[Place], height: dict[str, int]) -> Counts:
    """Count the functions, stays, files and climbs of a path."""
    files = [file for file, _ in itertools.groupby(place.file for place in places)]
    climbs = sum(height[after] > height[before] for before, after in itertools.pairwise(files))
    return Counts(len(places), len(files), len(set(files)), climbs)


class Recorder:
    """A profile function that records the functions which are called with the settings."""

    def __init__(self, package: Path, kinds: tuple[type, ...]) -> None:
        self.package = f"{package}{os.sep}"
        self.kinds = kinds
        self.places: dict[Place, None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record the called function if it belongs to the package and gets the settings."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self.package):
            return
        file = code.co_filename.removeprefix(self.package)
        if not self.places and file != BEGIN:
            return
        num_parameters = code.co_argcount + code.co_kwonlyargcount
        values = [frame.f_locals.get(name) for name in code.co_varnames[:num_parameters]]
        if any(self._carries(value) for value in values):
            self.places.setdefault(Place(file, code.co_qualname))

    def _carries(self, value: Any) -> bool:
        return isinstance(value, self.kinds) or isinstance(getattr(value, "__dict__", {}).get("config"), self.kinds)


def write_inputs(folder: Path) -> list[str]:
    """Write a text and the settings of a tiny run. Return the arguments of the command that prepares the text."""
    text = " ".join(str(number) for number in range(4000))
    (folder / "text.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    (folder / "tiny.toml").write_text(
        f"""
[run]
dir = "{folder}/run"
[data]
path = "{folder}/corpus"
[model]
num_layers = 1
width = 8
num_heads = 1
head_width = 8
ff_width = 8
[train]
num_lanes = 2
segment_len = 4
memory_len = 4
microbatch_lanes = 2
max_steps = 2
[eval]
every_steps = 1
max_tokens = 8
[checkpoint]
every_steps = 1
""",
        encoding="utf-8",
    )
    return ["prepare", f"{folder}/text.jsonl", "--tokenizer", "byte", "--out", f"{folder}/corpus"]


def _first_module(*names: str) -> Any:
    """Import the first of these modules that exists in this version of the package."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{PACKAGE}.{name}")
    raise SystemExit(f"{PACKAGE} has no module {' or '.join(names)}.")


def record(root: Path) -> list[Place]:
    """Train with the package of a checkout and return the functions of the path."""
    sys.path.insert(0, str(root))
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    import txl_dist

    package = Path(txl_dist.__file__ or "").parent
    if package.resolve() != (root / PACKAGE).resolve():
        raise SystemExit(f"{PACKAGE} was imported from {txl_dist.__file__}, not from {root}.")
    cli, config = _first_module("cli.main", "cli"), _first_module("config.load", "config")
    recorder = Recorder(package, (config.Config.__mro__[1],))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        prepare = write_inputs(folder)
        if cli.main(prepare):
            raise SystemExit("txl prepare failed for the test text")
        sys.setprofile(recorder)
        try:
            code = cli.main(["train", str(folder / "tiny.toml")])
        finally:
            sys.setprofile(None)
    if code:
        raise SystemExit(f"the training ended with exit code {code}")
    return list(recorder.places)


def main() -> None:
    """Print the counts, and with --list the path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure")
    parser.add_argument("--list", action="store_true", help="list every function of the path")
    options = parser.parse_args()
    root: Path = options.root.resolve()
    places = record(root)
    if options.list:
        for place in places:
            print(f"    {place.file}: {place.name}")
    counts = count(places, heights(root))
    print(f"{counts.functions} functions, {counts.stays} stays in {counts.files} files, {counts.climbs} climbs")


if __name__ == "__main__":
    main()
