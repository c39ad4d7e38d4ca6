"""Folders that are either complete or absent: written under a temporary name, renamed at the end, and verifiable.

All files are written into the folder `NAME.tmp-NONCE` and flushed to the disk, the manifest last. Then the folder is
renamed to `NAME`. A crash before the rename leaves a temporary folder that no program reads. `MANIFEST.json` lists the
size in bytes and the sha256 of every file, and contains a hash of itself. So a truncated file or a flipped bit is found
before loading.

Two kinds of files can be changed, added and removed, and the folder still counts as complete. People edit the files in
`FOR_PEOPLE`, which no program reads. Version control, hubs and desktops create hidden files at the top of the folder.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from txl_dist.errors import CheckpointError
from txl_dist.io.files import (
    canonical_hash,
    flush_folder,
    parse_json,
    read_bytes,
    resolve_inside,
    sha256_of_file,
    unique_path,
    write_hashed_json,
)

MANIFEST = "MANIFEST.json"
FOR_PEOPLE = ("README.md", "LICENSE")
"""Names of files that people write and edit, and that no program reads."""
FORMAT_VERSION = 1


def describe_file(path: Path) -> dict[str, Any]:
    """Flush a file to the disk, and return its entry for a manifest: its size in bytes and its sha256."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def files_of(folder: Path) -> list[str]:
    """Return the sorted relative paths of all files and links below a folder, without the manifest."""
    names = []
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            names.append(path.relative_to(folder).as_posix())
    return sorted(name for name in names if name != MANIFEST)


def write_manifest(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest as the last file of a folder. Flush the manifest and all folders to the disk."""
    content: dict[str, Any] = {"format_version": FORMAT_VERSION, "files": dict(sorted(files.items()))}
    write_hashed_json(folder / MANIFEST, content)
    subfolders = [path for path in folder.rglob("*") if path.is_dir()]
    for path in [*subfolders, folder]:
        flush_folder(path)


def commit_folder(temporary: Path, final: Path) -> None:
    """Rename a finished temporary folder to its final name.

    If a folder already has the final name, this folder counts as damaged. It is renamed to NAME.damaged-1,
    NAME.damaged-2 and so on.
    """
    if os.path.lexists(final):
        final.rename(unique_path(final, "damaged"))
    temporary.rename(final)
    flush_folder(final.parent)


def replace_folder(temporary: Path, final: Path) -> None:
    """Rename a finished temporary folder to its final name. An older folder of that name is deleted afterwards."""
    old = final.with_name(f"{final.name}.old-{secrets.token_hex(4)}")
    if os.path.lexists(final):
        final.rename(old)
    temporary.rename(final)
    flush_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def listed_files(manifest: bytes, *, where: str) -> dict[str, Any]:
    """Return the entries of a manifest, a size in bytes and a sha256 for each file name.

    `where` names the manifest in messages. Raises CheckpointError if the manifest is damaged or of another version.
    """
    try:
        content = parse_json(manifest)
        expected_hash = content.pop("self_sha256")
        files: dict[str, Any] = dict(content["files"])
        version = content["format_version"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{where} cannot be read ({error!r})") from error
    if canonical_hash(content) != expected_hash:
        raise CheckpointError(f"{where} does not match its own hash")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{where} has format version {version}, but this version of txl_dist reads {FORMAT_VERSION}"
        )
    if not all(isinstance(facts, dict) and {"bytes", "sha256"} <= facts.keys() for facts in files.values()):
        raise CheckpointError(f"{where} does not list the size and the sha256 of every file")
    return files


def problems_of(folder: Path, *, part: int = 0, num_parts: int = 1) -> list[str]:
    """Return one line for each difference of a folder from its manifest.

    Several processes can share the work. Process number `part` of `num_parts`, counted from 0, checks its share of the
    files. The folder is complete if the result is empty in every process.
    """
    path = folder / MANIFEST
    try:
        files = listed_files(read_bytes(path), where=str(path))
    except FileNotFoundError:
        return [f"{path} is missing"]
    except OSError as error:
        return [f"{path} cannot be read ({error!r})"]
    except CheckpointError as error:
        return [str(error)]
    problems = []
    if part == 0:
        for name in files_of(folder):
            if name not in files and not _may_differ(name):
                problems.append(f"{name} is not in the manifest")
    checked = [name for name in sorted(files) if not _may_differ(name)]
    for name in checked[part::num_parts]:
        problem = _file_problem(folder, name, files[name])
        if problem:
            problems.append(problem)
    return problems


def _may_differ(name: str) -> bool:
    """Return whether a file may differ from the manifest: a file for people, or a hidden file at the top."""
    top = name.partition("/")[0]
    return name in FOR_PEOPLE or (top.startswith(".") and top not in (".", ".."))


def check_folder(folder: Path, *, remedy: str) -> None:
    """Raise CheckpointError if a folder differs from its manifest.

    The message lists up to five differences and ends with `remedy`.
    """
    problems = problems_of(folder)
    if problems:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems[:5])}. {remedy}")


def _file_problem(folder: Path, name: str, facts: dict[str, Any]) -> str | None:
    """Return how a file differs from its entry in the manifest, or None if it does not differ."""
    try:
        path = resolve_inside(folder, name, nested=True)
        size = path.stat().st_size
        if size != facts["bytes"]:
            return f"{name} has {size} bytes instead of {facts['bytes']}"
        if sha256_of_file(path) != facts["sha256"]:
            return f"{name} does not match its sha256"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except ValueError as error:
        return str(error)
    return None
