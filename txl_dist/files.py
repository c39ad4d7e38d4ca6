"""Files that survive a power cut, and hashes that prove what they hold. Shared by corpora, checkpoints and bundles."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import IO, Any


def canonical_hash(values: dict[str, Any]) -> str:
    """sha256 of JSON values in one spelling, leaving out the key `self_sha256`, where a file keeps this very hash."""
    rest = {key: value for key, value in values.items() if key != "self_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def hashed_json(values: dict[str, Any]) -> bytes:
    """The bytes of a JSON file that holds its own canonical hash: one spelling, so that any flipped bit shows."""
    text = json.dumps(values | {"self_sha256": canonical_hash(values)}, sort_keys=True, indent=1)
    return text.encode() + b"\n"


def write_hashed_json(path: Path, values: dict[str, Any]) -> None:
    """Write JSON together with its own canonical hash, durably."""
    write_bytes(path, hashed_json(values))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as stream:
        stream.write(data)
        flush_to_disk(stream)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old content or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    write_bytes(temporary, data)
    temporary.replace(path)
    flush_folder(path.parent)


def flush_to_disk(stream: IO[bytes]) -> None:
    """Without this a rename can survive a power cut that the content did not."""
    stream.flush()
    os.fsync(stream.fileno())


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_gone(folder: Path) -> bool:
    """Whether a folder that was there is no more. What a failing file system answers is no answer."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def free_name(path: Path, word: str) -> Path:
    """The first of NAME.word-1, NAME.word-2 ... that does not exist."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{word}-{number}")).exists():
        number += 1
    return aside


def sha256_of_bytes(data: bytes) -> str:
    """Hash of what is in memory."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Hash of a file of any size."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
