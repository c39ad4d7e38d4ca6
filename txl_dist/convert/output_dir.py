"""What all exports to other programs' formats end with: a folder that is whole."""

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
    """An empty folder to write into. When the block ends it gets a manifest and takes the place of `out`.

    Raises CheckpointError if `out` is something else than an older folder of this kind, or cannot be written.
    """
    out = out.resolve()
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty and detect_artifact(out) is not kind:
        raise CheckpointError(f"{out} exists and is not {kind.value}. Choose another output folder.")
    temporary = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        with translate_errors(CheckpointError, f"cannot write {out}", "Choose a folder that can be written."):
            temporary.mkdir(parents=True)
            yield temporary
            write_manifest(temporary, {name: describe_file(temporary / name) for name in files_of(temporary)})
            replace_folder(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
