"""Comments at the beginning of the recipes in configs/, as text."""

from __future__ import annotations

from pathlib import Path

import txl_dist

CONFIGS = Path(txl_dist.__file__).parent.parent / "configs"


def header(name: str) -> str:
    """Return the comment at the beginning of a recipe."""
    lines = (CONFIGS / f"{name}.toml").read_text(encoding="ascii").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])
