"""`txl recl`: measure the context length that models use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from txl_dist.artifacts import TRAINED, ArtifactKind, require
from txl_dist.cli.parsing import announce_ranks, local_source
from txl_dist.config.registry import load_plugins
from txl_dist.console.echo import echo
from txl_dist.console.formatting import counted
from txl_dist.errors import ConfigError
from txl_dist.evaluation.options import ReclOutputs, ReclSettings


def recl(
    targets: Positional[tuple[Path, ...]],
    /,
    settings: Annotated[ReclSettings, arg(name="")],
    outputs: Annotated[ReclOutputs, arg(name="")],
    data: str = "",
    plugins: tuple[str, ...] = (),
) -> None:
    """Measure the context length up to which models improve (the paper's relative effective context length).

    Args:
        targets: Run directories, checkpoint folders or bundles with the same tokenizer.
        settings: Settings of the measurement.
        outputs: Files that are written.
        data: Folder or URL of a corpus. Default: the corpus of the first model.
        plugins: Python modules to import first, which runs their code.
    """
    load_plugins(plugins)
    if not targets:
        raise ConfigError("txl recl needs a model. Name run directories, checkpoint folders or bundles.")
    targets = tuple(map(local_source, targets))
    kinds = [require(target, *TRAINED) for target in targets]
    settings.check()
    outputs.check()
    if data:
        require(data, ArtifactKind.CORPUS, what="--data")
    elif kinds[0] is ArtifactKind.BUNDLE:
        raise ConfigError(
            f"{targets[0]} is a bundle, and a bundle names no corpus. Name a corpus with --data. Or name a run or a "
            "checkpoint as the first model. The corpus of that model is then used for all models."
        )
    announce_ranks(
        f"scoring {counted(len(targets), 'model')} with {counted(len(settings.contexts), 'length')} of context"
    )
    from txl_dist.evaluation.recl import compare_contexts

    lines = compare_contexts(targets, data=data, settings=settings, outputs=outputs)
    if lines:
        echo("\n".join(lines))
