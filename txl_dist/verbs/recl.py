"""The verb that measures how far back models look."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from txl_dist.console import say
from txl_dist.errors import ConfigError
from txl_dist.ops.evaluation_settings import ReclSettings
from txl_dist.run_files import TRAINED, Kind, require


def recl(
    targets: Positional[tuple[Path, ...]],
    /,
    settings: Annotated[ReclSettings, arg(name="")],
    data: str = "",
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Measure how far back a group of models gains: the paper's relative effective context length.

    Args:
        targets: Run directories, checkpoint folders or bundles, of one tokenizer.
        settings: How it is measured.
        data: Corpus, a folder or URL; a run knows its own.
        json: Write the results, and every gain, to this file too.
        plot: Draw the losses over the length of the context into this PNG file.
    """
    if not targets:
        raise ConfigError("txl recl needs a model. Name run directories, checkpoint folders or bundles.")
    kinds = [require(target, *TRAINED) for target in targets]
    settings.check()
    if data:
        require(data, Kind.CORPUS, what="--data")
    elif Kind.BUNDLE in kinds:
        raise ConfigError(f"{targets[kinds.index(Kind.BUNDLE)]} is a bundle and knows no corpus. Name one with --data.")
    if os.environ.get("RANK", "0") == "0":
        say(f"scoring {len(targets)} models behind {len(settings.contexts)} lengths of context ...", to=sys.stderr)
    from txl_dist.ops.evaluate.recl import compare_contexts

    lines = compare_contexts(targets, data=data, settings=settings, json_path=json, plot_path=plot)
    if lines:
        say("\n".join(lines))
