"""`txl inspect`: show facts about corpora, lanes (rows of a batch), runs and checkpoints."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from txl_dist.artifacts import ArtifactKind, require
from txl_dist.config.registry import load_plugins
from txl_dist.console.echo import echo
from txl_dist.io.files import write_output
from txl_dist.report.inspect_options import InspectOptions


def inspect(
    path: Positional[str],
    question: Annotated[InspectOptions, arg(name="")],
    json: Path | None = None,
    plugins: tuple[str, ...] = (),
) -> None:
    """Show a corpus, its clusters, a shard, a document, a run, a checkpoint, or what a lane reads at a step.

    Args:
        path: Folder or URL of a corpus, or local folder of a run or checkpoint.
        question: Facts that are shown.
        json: Write the results to this file as JSON.
        plugins: Python modules to import first, which runs their code.
    """
    load_plugins(plugins)
    kind = require(path, ArtifactKind.CORPUS, ArtifactKind.RUN, ArtifactKind.CHECKPOINT)
    question.check(path, kind)
    from txl_dist.report.inspect_run import answer

    facts, lines = answer(path, kind, question)
    echo("\n".join(lines))
    if json is not None:
        write_output(json, dumps(facts, indent=1).encode() + b"\n")
