"""Output folder of exports to other programs' formats. The folder is written as a whole or not at all."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from txl_dist.artifacts import ArtifactKind, detect_artifact
from txl_dist.convert.key_mapping import Weights
from txl_dist.errors import CheckpointError, translate_errors
from txl_dist.io.files import write_bytes
from txl_dist.io.manifest import describe_file, files_of, replace_folder, write_manifest


@contextmanager
def replaced_folder(out: Path) -> Iterator[Path]:
    """Yield an empty temporary folder for an export. At the end of the block the folder is renamed to `out`.

    An older folder `out` is then deleted. After an error in the block `out` is as before. Raises CheckpointError if the
    folder cannot be written.
    """
    temporary = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    remedy = "Choose a folder that can be written."
    try:
        with translate_errors(CheckpointError, f"cannot write {out}", remedy, of=(OSError, SafetensorError)):
            temporary.mkdir(parents=True)
            yield temporary
            replace_folder(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def new_folder(out: Path, *, kind: ArtifactKind) -> Iterator[Path]:
    """Yield an empty temporary folder for an export.

    At the end of the block a manifest is written into the folder, and the folder is renamed to `out`. An older folder
    `out` is then deleted.

    Raises CheckpointError if `out` cannot be written, or is neither empty nor an older folder of this kind.
    """
    out = out.resolve()
    is_empty = out.is_dir() and not any(out.iterdir())
    may_replace = not out.exists() or is_empty or detect_artifact(out) is kind
    if not may_replace:
        raise CheckpointError(f"{out} exists and is not {kind.value}. Choose another output folder.")
    with replaced_folder(out) as folder:
        yield folder
        files = {name: describe_file(folder / name) for name in files_of(folder)}
        write_manifest(folder, files)


def require_older_export(out: Path, *, needed: Set[str], written: Set[str]) -> None:
    """Raise CheckpointError if `out` contains files that no export wrote.

    Replacing `out` could then lose a user's files. The folder `out` can be missing, empty or an older export. An older
    export has all files of `needed`, and no files except the files of `written`.
    """
    if not out.exists():
        return
    names = {path.name for path in out.iterdir()} if out.is_dir() else {""}
    if names and not needed <= names <= written:
        raise CheckpointError(f"{out} exists and was not written by `txl export`. Choose another output folder.")


def check_reread(reread: Weights, exported: Weights, *, where: Path) -> None:
    """Raise CheckpointError if weights that were read back from a folder differ from the exported weights."""
    different = [name for name, tensor in reread.items() if not torch.equal(tensor, exported[name].float())]
    if different:
        raise CheckpointError(
            f"{where}: some tensors were read back from the written files, and differ from the exported weights: "
            f"{', '.join(different[:3])}. Report this defect."
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object to a file."""
    text = json.dumps(content, indent=2)
    write_bytes(path, text.encode() + b"\n")
