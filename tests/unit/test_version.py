"""The text that says which code a rank runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from txl_dist import __version__, version


def test_the_code_version_names_the_packages_that_compute_and_changes_with_each_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = version.code_version()
    assert before.startswith(f"txl_dist {__version__} (code ")
    assert f"torch {torch.__version__}" in before
    copy = shutil.copytree(Path(version.__file__).parent, tmp_path / "txl_dist")
    monkeypatch.setattr(version, "__file__", str(copy / "version.py"))
    assert version.code_version() == before
    for ignored in (".#loop.py", "._loop.py", ".ipynb_checkpoints/loop-checkpoint.py"):
        (copy / ignored).parent.mkdir(exist_ok=True)
        (copy / ignored).symlink_to("nowhere")  # as an editor marks an unsaved file
    assert version.code_version() == before
    with (copy / "train" / "schedule.py").open("a", encoding="utf-8") as file:
        file.write("\n")
    assert version.code_version() != before
