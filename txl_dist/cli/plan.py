"""`txl plan`: predict the memory and the speed of a run on GPUs that this machine does not have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import tyro

from txl_dist.cli.parsing import parse, unknown_flag
from txl_dist.config.load import Config, setting_names
from txl_dist.console.echo import echo
from txl_dist.errors import ConfigError, TxlError
from txl_dist.train.run_dir import require_corpora


@dataclass(frozen=True)
class PlanArguments:
    """Predict memory, speed, duration and scaling of a run. Give settings (--section.key value) as for txl train."""

    config: tyro.conf.Positional[Path]
    """TOML file with the settings, see configs/."""
    gpus: int
    """Number of GPUs. If the lanes (batch rows) cannot be divided among them, the plan is for fewer GPUs."""
    gpu: str
    """Kind of GPU: h200, h100, a100, a100-40gb, v100-16gb, l40s and others. A wrong name lists all kinds."""
    gpus_per_node: int = 8
    """Number of GPUs per node."""
    interconnect: float = 50.0
    """Network bandwidth between nodes in GB/s (1e9 bytes), in each direction, for all GPUs of a node together. A rate
    of 400 Gb/s is 50 GB/s."""
    intra_node: float = 0.0
    """Bus bandwidth of an all-reduce within a node in GB/s, as nccl-tests reports it. 0 means the GPU's usual
    bandwidth."""
    tokens: int = 0
    """Number of tokens to train on. 0 means the tokens of train.max_steps."""
    vocab_size: int = 0
    """Size of the vocabulary, in ids. 0: the size is read from the corpus."""
    png: Path | None = None
    """Draw the scaling curves to this file."""
    json: Path | None = None
    """Write the results to this file as JSON."""


def run_plan(argv: Sequence[str], *, read_settings: Callable[[Sequence[str]], Config]) -> None:
    """Predict memory, speed, duration and scaling of a run on GPUs that this machine does not have."""
    if argv and argv[0].startswith("-") and not {"-h", "--help"} & set(argv):
        raise ConfigError(
            "the configuration file must come first: txl plan CONFIG --gpus N --gpu KIND [--section.key value]."
        )
    arguments, words = parse(
        Annotated[PlanArguments, tyro.conf.arg(name="")], argv, prog="txl plan", return_unknown_args=True
    )
    plan_flags = [field.name for field in fields(PlanArguments)[1:]]
    for word in words:
        if word.startswith("--") and "." not in word:
            raise ConfigError(unknown_flag(word, [*plan_flags, *setting_names()], prog="txl plan"))
    config = read_settings([str(arguments.config), *words])
    vocab_size = arguments.vocab_size
    corpus_tokens = 0
    if not vocab_size:
        vocab_size, corpus_tokens = _read_corpus(config)
    echo(f"txl plan: simulating steps of {arguments.config.name}. This takes some seconds.", to=sys.stderr)
    from txl_dist.io.files import write_output
    from txl_dist.planning.hardware import GpuCluster, find_gpu
    from txl_dist.planning.plan import PlanOptions, make_plan
    from txl_dist.planning.scaling import picture
    from txl_dist.planning.text import plan_lines

    gpu = find_gpu(arguments.gpu)
    if arguments.intra_node:
        gpu = replace(gpu, bus_gb_s=arguments.intra_node)
    question = PlanOptions(
        cluster=GpuCluster(gpu, arguments.gpus_per_node, arguments.interconnect),
        gpus=arguments.gpus,
        vocab_size=vocab_size,
        corpus_tokens=corpus_tokens,
        budget_tokens=arguments.tokens,
    )
    facts = make_plan(config, question=question)
    echo("\n".join(plan_lines(facts)))
    if arguments.json is not None:
        write_output(arguments.json, facts.as_json().encode() + b"\n")
    if arguments.png is None:
        return
    if facts.chosen is None:
        echo(f"no picture was drawn to {arguments.png}, because no option fits into GPU memory")
        return
    title = f"{arguments.config.name} on {gpu.device}: predicted, not measured"
    write_output(arguments.png, picture(facts.chosen.strong, facts.chosen.weak, title=title))


def _read_corpus(config: Config) -> tuple[int, int]:
    """Return the vocabulary size, and the number of tokens in the split for training. Raises ConfigError."""
    from txl_dist.data.loader.corpora import open_all

    try:
        require_corpora(config.data.paths)
        corpora = open_all(config.data)
        num_tokens = sum(corpus.split(config.data.train_split).tokens for corpus in corpora)
    except TxlError as error:
        raise ConfigError(
            f"{error} Or give --vocab-size: a plan needs only the vocabulary size of the corpus."
        ) from error
    return corpora[0].vocab_size, num_tokens
