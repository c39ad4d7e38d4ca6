"""What `txl train` can know before torch is imported: its recipes, and whether its paths are what they should be."""

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
    """How to call it, and the recipes that are at hand."""
    lines = ["usage: txl train CONFIG.toml [--section.key value ...]      all flags: txl train --help", ""]
    recipes = find_recipes()
    if not recipes:
        return "\n".join([*lines, "The recipes are in the folder configs/ of the project, one annotated file each."])
    width = max(len(str(path)) for path in recipes)
    return "\n".join([*lines, "recipes:", *(f"  {path!s:<{width}}  {_title(path)}" for path in recipes)])


def find_recipes() -> list[Path]:
    """The recipes in configs/ here, beside the package, or where an installation puts them; else none."""
    places = Path("configs"), Path(txl_dist.__file__).parents[1] / "configs", Path(sys.prefix, "share/txl_dist/configs")
    return next((found for place in places if (found := sorted(place.glob("*.toml")))), [])


def _title(recipe: Path) -> str:
    """The beginning of the first sentence of a recipe's header."""
    with open_text(recipe, errors="replace") as file:
        line = file.readline().lstrip("# ").strip()
    title = re.split(r"[.;](?:\s+[A-Z]|$)| \(", line)[0]
    return title if len(title) <= _MOST_OF_A_TITLE else title[:_MOST_OF_A_TITLE].rsplit(" ", 1)[0] + " ..."


def check_config_file(file: str) -> None:
    """Raises ConfigError for a folder, with what one trains in it, and for a missing file that resembles a recipe."""
    if os.path.isdir(file):
        kind, instead = detect_artifact(file), "Name a TOML file; `txl train` alone lists the recipes."
        if kind is not ArtifactKind.NOTHING:
            instead = {
                ArtifactKind.RUN: f"Continue it with `txl train {file}/config.toml`.",
                ArtifactKind.CORPUS: f"Train on it with `txl train CONFIG.toml --data.path {file}`.",
                ArtifactKind.BUNDLE: f"Begin a run with its weights: `txl train {file}/train.toml --init {file} "
                "--data.path CORPUS`.",
                ArtifactKind.CHECKPOINT: f"Begin a run from it: `txl train {file}/config.toml --resume {file} "
                "--run.dir NEW`.",
                ArtifactKind.HUGGINGFACE: f"Make a bundle of it with `txl import {file} BUNDLE --format huggingface`, "
                "and begin a run with that: --init BUNDLE.",
            }[kind]
        what = "a folder" if kind is ArtifactKind.NOTHING else kind.value
        raise ConfigError(f"{file} is {what}, not a configuration file. {instead}")
    if not os.path.lexists(file):
        recipes = {path.stem: path for path in find_recipes()}
        hint = did_you_mean(Path(file).stem, recipes, spell=lambda name: str(recipes[name]))
        if hint:
            raise ConfigError(f"cannot read the config file {file}: there is none.{hint}")
