"""Checkpoints for tests without training: copies of the golden checkpoint, changed and with new manifests."""

import json
import shutil
from pathlib import Path
from typing import Any

from txl_dist.artifacts import checkpoint_folder
from txl_dist.io.manifest import MANIFEST, describe_file, files_of, write_manifest

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint_v2"
GOLDEN_CHECKPOINT = GOLDEN / "step_000000016"


def golden_at(run_dir: Path, step: int) -> Path:
    """Copy the golden checkpoint to a run as the checkpoint of another step, and return its folder."""
    folder = checkpoint_folder(run_dir, step)
    shutil.copytree(GOLDEN_CHECKPOINT, folder)
    if step != 16:
        change_state(folder, step=step)
    return folder


def change_state(folder: Path, **values: Any) -> None:
    """Change values in state.json, and write a new manifest."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8")) | values
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    sign(folder)


def sign(folder: Path) -> None:
    """Write a manifest for the current files of a folder."""
    (folder / MANIFEST).unlink(missing_ok=True)
    write_manifest(folder, {name: describe_file(folder / name) for name in files_of(folder)})
