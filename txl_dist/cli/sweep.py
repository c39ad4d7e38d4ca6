"""`txl sweep`: read its words, check them, and run the grid of settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from txl_dist.artifacts import ArtifactKind, detect_artifact
from txl_dist.cli.parsing import parse, unknown_flag
from txl_dist.config.load import Config, check_vocabulary, setting_names
from txl_dist.console.echo import echo
from txl_dist.errors import ConfigError
from txl_dist.train.run_dir import check_paths


@dataclass(frozen=True)
class SweepArguments:
    """Train over a grid of settings, and name the best point. Give settings of all runs (--section.key value) as for
    txl train.

    The same command continues a sweep and skips finished runs. Exit code 1 means that a run failed and the other runs
    are done.
    """

    config: Positional[Path]
    """TOML file with the settings, see configs/."""
    grid: tuple[str, ...] = ()
    """A setting and its values, separated by commas: optim.lr=1e-3,2e-3. Several settings make a grid. In a value that
    is a list, blanks separate the entries."""
    seeds: int = 1
    """Number of runs per point of the grid. Their seeds are run.seed and the numbers after it."""
    jobs: int = 1
    """Number of runs at the same time, one process each. They share the CPU cores and use the GPUs in turn."""
    out: Path = Path("runs/sweep")
    """Folder for the runs, the table (sweep.csv) and the curves (compare.html)."""


def run_sweep(argv: Sequence[str], *, read_settings: Callable[[Sequence[str]], Config]) -> int:
    """Train over a grid of settings, and name the best point and its margin over the second-best point."""
    if argv and argv[0].startswith("-") and not {"-h", "--help"} & set(argv):
        raise ConfigError(
            "the configuration file must come first: txl sweep CONFIG --grid optim.lr=1e-3,2e-3 [--section.key value]."
        )
    arguments, words = parse(
        Annotated[SweepArguments, tyro.conf.arg(name="")], argv, prog="txl sweep", return_unknown_args=True
    )
    flags = [word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")]
    sweep_flags = [field.name for field in fields(SweepArguments)[1:]]
    for word in words:
        if word.startswith("--") and "." not in word:
            raise ConfigError(unknown_flag(word, [*sweep_flags, *setting_names()], prog="txl sweep"))
    common_settings = {flag.replace("-", "_") for flag in flags}
    for axis in arguments.grid:
        name = axis.partition("=")[0].strip().replace("-", "_")
        if name in common_settings:
            raise ConfigError(
                f"{name} is set for all runs and also in --grid. Remove the flag --{name}, or remove {name} from "
                "--grid."
            )
    base = read_settings([str(arguments.config), *words])
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs {arguments.jobs}: it must be 1 or more.")
    kind = detect_artifact(arguments.out)
    if kind is not ArtifactKind.NOTHING:
        raise ConfigError(
            f"--out {arguments.out} is {kind.value}, and a sweep must not write runs into it. "
            "Choose another folder with --out."
        )
    from txl_dist.launcher.sweep import parse_axis, train_grid

    lines, code = train_grid(
        base,
        [parse_axis(words) for words in arguments.grid],
        num_seeds=arguments.seeds,
        jobs=arguments.jobs,
        out=arguments.out,
        check=_check,
        devices=_devices,
    )
    echo("\n".join(lines))
    return code


def _check(config: Config) -> None:
    """Refuse paths and corpora that a run would refuse, as far as this can be checked without torch. Raises
    ConfigError."""
    from txl_dist.data.loader.corpora import lacks_eval_split, open_all

    check_paths(config.data.paths, run_dir=config.run.dir, init=config.run.init, resume="auto")
    corpus = open_all(config.data)[0]
    check_vocabulary(config.model, vocab_size=corpus.vocab_size)
    if lacks_eval_split(config.data, corpus):
        raise ConfigError(
            f"a sweep ranks its runs by their loss on the validation split, but {corpus.location} has no validation "
            "split. Prepare the corpus with --valid PATH or --valid-fraction, or name a split with --data.eval_split."
        )


def _devices() -> list[str]:
    """Return the visible GPUs, by their names in the variable CUDA_VISIBLE_DEVICES."""
    import torch

    from txl_dist.distributed.collectives import uses_gpu

    if not uses_gpu():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    return [str(number) for number in range(torch.cuda.device_count())]
