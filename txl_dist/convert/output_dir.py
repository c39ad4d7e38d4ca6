"""Output folder of exports to other programs' formats. The folder is written as a whole or not at all."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from txl_dist.artifacts import ArtifactKind, detect_artifact
from txl_dist.errors import CheckpointError, translate_errors
from txl_dist.io.manifest import describe_file, files_of, replace_folder, write_manifest


@contextmanager
def new_folder(out: Path, *, kind: ArtifactKind) -> Iterator[Path]:
    """Yield an empty folder for an export. At the end of the block it gets a manifest and replaces the folder `out`.

    Raises CheckpointError if `out` cannot be written, or is neither empty nor an older folder of this kind.
    """
    out = out.resolve()
    is_empty = out.is_dir() and not any(out.iterdir())
    may_replace = not out.exists() or is_empty or detect_artifact(out) is kind
    if not may_replace:
        raise CheckpointError(f"{out} exists and is not {kind.value}. Choose another output folder.")
    temporary = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        with translate_errors(CheckpointError, f"cannot write {out}", "Choose a folder that can be written."):
            temporary.mkdir(parents=True)
            yield temporary
            files = {name: describe_file(temporary / name) for name in files_of(temporary)}
            write_manifest(temporary, files)
            replace_folder(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
