"""Count names that make a file or a function hard to find: entries at the root, and names in two places.

    python -m tools.checks.names                   # this checkout
    python -m tools.checks.names --root CHECKOUT

A root entry is a module or a package at the top of the package. A file name is counted if two packages have a file of
that name. A public name is counted if two modules define a function or a class of that name at their top level.
`__init__.py` and the files that an export copies (convert/huggingface_code) are not counted.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from tools.checks.sources import PACKAGE, ROOT, package_files, top_definitions

COPIED = "huggingface_code"
CLI = ("cli",)
"""Folders of commands. They are not counted, because the file of a command and the package that does its work have the
same name."""


def root_entries(root: Path) -> tuple[list[str], list[str]]:
    """Return the modules and the packages at the top of the package."""
    entries = sorted((root / PACKAGE).iterdir())
    files = [path.name for path in entries if path.suffix == ".py"]
    return files, [path.name for path in entries if path.is_dir() and any(path.rglob("*.py"))]


def shared_file_names(root: Path) -> dict[str, list[str]]:
    """Return the file names that two or more packages use, with their folders. Commands are not counted."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in package_files(root):
        folder = path.parent.relative_to(root / PACKAGE)
        if path.name not in ("__init__.py", "__main__.py") and not set(CLI) & set(folder.parts):
            homes[path.name].append(folder.as_posix())
    return {name: folders for name, folders in sorted(homes.items()) if len(folders) > 1}


def shared_public_names(root: Path) -> dict[str, list[str]]:
    """Return the public functions and classes that two or more modules define, with the files."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in package_files(root):
        if COPIED in path.parts:
            continue
        file = path.relative_to(root / PACKAGE).as_posix()
        for name in {definition.name for definition in top_definitions(path)}:
            if not name.startswith("_"):
                homes[name].append(file)
    return {name: files for name, files in sorted(homes.items()) if len(files) > 1}


def main() -> None:
    """Print the counts and the names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to count")
    root: Path = parser.parse_args().root.resolve()
    files, folders = root_entries(root)
    print(f"entries at the package's root: {len(files) + len(folders)}, of which {len(files)} files")
    for what, shared in (
        ("file names in two packages", shared_file_names(root)),
        ("public names in two modules", shared_public_names(root)),
    ):
        print(f"{what}: {len(shared)}")
        for name, homes in shared.items():
            print(f"    {name}: {', '.join(homes)}")


if __name__ == "__main__":
    main()
