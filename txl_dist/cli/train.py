"""Parts of `txl train` that need no torch: its usage, its list of recipes, and the check of its configuration file."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import txl_dist
from txl_dist.artifacts import ArtifactKind, detect_artifact
from txl_dist.console.suggest import did_you_mean
from txl_dist.errors import ConfigError
from txl_dist.io.files import open_text

_MOST_OF_A_TITLE = 70


def usage() -> str:
    """Return the usage text of `txl train`, with the list of recipes (configuration files for known results)."""
    lines = ["usage: txl train CONFIG.toml [--section.key value ...]      all flags: txl train --help", ""]
    recipes = find_recipes()
    if not recipes:
        return "\n".join([*lines, "Recipes are annotated configuration files in the folder configs/ of the project."])
    lines.append("recipes:")
    width = max(len(str(path)) for path in recipes)
    for path in recipes:
        lines.append(f"  {path!s:<{width}}  {_title(path)}")
    return "\n".join(lines)


def find_recipes() -> list[Path]:
    """Return the paths of the recipes (configuration files) in the first folder that has any.

    The folders are configs/ in the current folder, configs/ next to the package, and the folder to which an
    installation copies configs/.
    """
    folders = (
        Path("configs"),
        Path(txl_dist.__file__).parents[1] / "configs",
        Path(sys.prefix, "share/txl_dist/configs"),
    )
    for folder in folders:
        recipes = sorted(folder.glob("*.toml"))
        if recipes:
            return recipes
    return []


def _title(recipe: Path) -> str:
    """Return the beginning of the first sentence in the header of a recipe."""
    with open_text(recipe, errors="replace") as file:
        line = file.readline().lstrip("# ").strip()
    title = re.split(r"[.;](?:\s+[A-Z]|$)| \(", line)[0]
    if len(title) <= _MOST_OF_A_TITLE:
        return title
    whole_words = title[:_MOST_OF_A_TITLE].rsplit(" ", 1)[0]
    return f"{whole_words} ..."


_REMEDIES = {
    ArtifactKind.NOTHING: "Name a TOML file. `txl train` without arguments lists the recipes.",
    ArtifactKind.RUN: "Resume this run with `txl train {file}/config.toml`.",
    ArtifactKind.CORPUS: "Train on this corpus with `txl train CONFIG.toml --data.path {file}`.",
    ArtifactKind.BUNDLE: "Start a run with the bundle's weights: `txl train {file}/train.toml --init {file} "
    "--data.path CORPUS`.",
    ArtifactKind.CHECKPOINT: "Start a run from this checkpoint: `txl train {file}/config.toml --resume {file} "
    "--run.dir NEW`.",
    ArtifactKind.HUGGINGFACE: "Convert the folder to a bundle with `txl import {file} BUNDLE --format huggingface`, "
    "then start a run with --init BUNDLE.",
    ArtifactKind.HUGGINGFACE_CODE: "Start a run with the bundle that was exported to this folder: --init BUNDLE.",
    ArtifactKind.ONNX: "Start a run with the bundle that was exported to this folder: --init BUNDLE.",
}
"""Remedies for a folder that is given in place of a configuration file, by its kind."""


def check_config_file(file: str) -> None:
    """Refuse a folder, and a missing file whose name is similar to a recipe's name. Raises ConfigError."""
    if os.path.isdir(file):
        kind = detect_artifact(file)
        remedy = _REMEDIES[kind].format(file=file)
        if kind is ArtifactKind.NOTHING:
            name = "a folder"
        else:
            name = kind.value
        raise ConfigError(f"{file} is {name}, not a configuration file. {remedy}")
    if not os.path.lexists(file):
        recipes = {path.stem: path for path in find_recipes()}
        hint = did_you_mean(Path(file).stem, recipes, spell=lambda name: str(recipes[name]))
        if hint:
            raise ConfigError(f"cannot read the config file {file}: the file does not exist.{hint}")
