"""Version of the package, and of the code that computes."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

__version__ = "0.3.0"
"""Version of the package. `txl --version` prints it, and checkpoints record it."""

_COMPUTING = ("torch", "deepspeed", "numpy")
"""Packages whose version may change the numbers that a run computes."""


def code_version() -> str:
    """Return the versions of this package and of the packages that compute, as they are on disk now.

    The text contains a hash of the source files of this package, which changes with each edit of one.
    """
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        words = path.relative_to(root).with_suffix("").parts
        if all(map(str.isidentifier, words)) and path.is_file():  # an editor's own files are never imported
            digest.update(f"{words} ".encode())
            digest.update(path.read_bytes())
    versions = [f"txl_dist {__version__} (code {digest.hexdigest()[:12]})"]
    versions += [f"{name} {installed_version(name) or 'unknown'}" for name in _COMPUTING]
    return ", ".join(versions)


def installed_version(name: str) -> str:
    """Return the installed version of a package, or an empty string if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
