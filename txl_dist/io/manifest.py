"""A folder that is whole or does not exist: manifest, verification, and the one rename that commits.

Everything is written into `NAME.tmp-NONCE`, the manifest last, all of it fsynced; then the folder is renamed to `NAME`.
A crash before the rename leaves a temporary folder that nobody reads. `MANIFEST.json` lists every file with its bytes
and sha256 and ends with a hash of itself, so that a truncation or a flipped bit anywhere is found before loading.

Not held against a folder: `FOR_PEOPLE`, which no program reads and people edit, and hidden files at its top, which
version control, hubs and desktops leave there. They may change, appear and go.
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
    read_json,
    resolve_inside,
    sha256_of_file,
    unique_path,
    write_hashed_json,
)

MANIFEST = "MANIFEST.json"
FOR_PEOPLE = ("README.md", "LICENSE")
"""Files that people write and edit; no program reads them."""
FORMAT_VERSION = 1


def describe_file(path: Path) -> dict[str, Any]:
    """Bytes and sha256 of a file, after forcing it to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def files_of(folder: Path) -> list[str]:
    """Everything below a folder but its folders and the manifest, as sorted relative paths."""
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    found = (path.relative_to(folder).as_posix() for path in files)
    return sorted(name for name in found if name != MANIFEST)


def write_manifest(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest, as the last file of a folder, and force it and all folders to disk."""
    content: dict[str, Any] = {"format_version": FORMAT_VERSION, "files": dict(sorted(files.items()))}
    write_hashed_json(folder / MANIFEST, content)
    for parent in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        flush_folder(parent)


def commit_folder(temporary: Path, final: Path) -> None:
    """Publish a finished temporary folder. What lies in the way is damaged, and is moved aside, never deleted."""
    if os.path.lexists(final):
        final.rename(unique_path(final, "damaged"))
    temporary.rename(final)
    flush_folder(final.parent)


def replace_folder(temporary: Path, final: Path) -> None:
    """Publish a finished temporary folder in the place of an older one, which is deleted only then."""
    old = final.with_name(f"{final.name}.old-{secrets.token_hex(4)}")
    if os.path.lexists(final):
        final.rename(old)
    temporary.rename(final)
    flush_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def problems_of(folder: Path, *, part: int = 0, num_parts: int = 1) -> list[str]:
    """What differs from the manifest, one line each; empty if the folder is whole.

    Several processes may share the work: each looks at its part of the files, and the folder is whole if all find so.
    """
    path = folder / MANIFEST
    try:
        content = read_json(path)
        expected_hash = content.pop("self_sha256")
        files: dict[str, Any] = dict(content["files"])
        version = content["format_version"]
    except FileNotFoundError:
        return [f"{path} is missing"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return [f"{path} cannot be read ({error!r})"]
    if canonical_hash(content) != expected_hash:
        return [f"{path} does not match its own hash"]
    if version != FORMAT_VERSION:
        return [f"{path} has format version {version}; this program knows {FORMAT_VERSION}"]
    if not all(isinstance(facts, dict) and {"bytes", "sha256"} <= facts.keys() for facts in files.values()):
        return [f"{path} does not say the bytes and the sha256 of every file"]
    checked = [name for name in sorted(files) if not _is_free(name)]
    surplus = [name for name in files_of(folder) if name not in files and not _is_free(name)] if part == 0 else []
    strangers = [f"{name} is not in the manifest" for name in surplus]
    mine = checked[part::num_parts]
    return strangers + [problem for name in mine if (problem := _file_problem(folder, name, files[name]))]


def _is_free(name: str) -> bool:
    """Whether a file may differ from the manifest: one for people, or one that is hidden at the top."""
    top = name.partition("/")[0]
    return name in FOR_PEOPLE or (top.startswith(".") and top not in (".", ".."))


def check_folder(folder: Path, *, remedy: str) -> None:
    """Raise CheckpointError listing what is damaged in a folder, if anything is."""
    problems = problems_of(folder)
    if problems:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems[:5])}. {remedy}")


def _file_problem(folder: Path, name: str, facts: dict[str, Any]) -> str | None:
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
