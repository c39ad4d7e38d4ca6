"""Training runs for the comparisons of tables 6 and 10 of the paper: settings, scores and tables.

A trial has recurrence or not, a kind of position encoding, and a loss over the whole segment or over its recent half.
It is scored with an attention length A. Each target attends to A - S + 1 to A tokens, including its own input, and S
tokens are scored at a time. A model that was trained with a memory keeps the other tokens in its memory. A model
without memory runs these tokens again. S is half of the shortest training segment, so that a model with half loss is
scored at trained positions. A model with absolute positions and a memory is scored with its whole training segment,
beginning at A = 2 S, because its positions in the memory would otherwise differ from training.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tools.experiments.recording import NOTEBOOK, ROOT, Rows, markdown, origin, put_table, spread
from tools.experiments.trainings import (
    commits_of,
    cutoffs_below,
    flags_of,
    mark_of,
    named,
    run_txl,
    seconds_of,
    side_by_side,
    train,
)
from txl_dist.config.load import Config, changed, check_config, load_config
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.errors import TxlError
from txl_dist.planning.hardware import GpuCluster, find_gpu
from txl_dist.planning.plan import Plan, PlanOptions, make_plan
from txl_dist.planning.text import plan_lines

PAGE = NOTEBOOK / "paper.md"
UNMEASURED = "Not measured yet."
MOST_AGAIN = 4
"""Largest attention length of a model without memory, in training segments. The time of scoring grows with it."""
COLUMNS = (
    *("corpus", "recurrence", "positions", "loss", "seed", "steps", "segment", "settings", "attention", "nats"),
    *("train_s", "commit", "cpu", "date"),
)


class Size(NamedTuple):
    """Settings of the runs at one of the program's sizes, and the kind of machine."""

    recipe: Path
    changes: dict[str, Any]
    """Changes of the recipe's settings in all trials."""
    segment_len: int
    """Length in tokens of the training segment and of the memory."""
    lengths: tuple[int, ...]
    """Attention lengths for scoring, in tokens."""
    steps: int
    """Number of steps of each run."""
    on_gpu: bool = False


ALONE = {"engine.zero_stage": 0, "engine.precision": "fp32", "train.microbatch_lanes": 32}
MUON = {"optim.name": "muon", "optim.muon_momentum": 0.9, "optim.lr": 1.6e-2}
"""Settings of notebook/speedrun.md with the same block. Muon needs half as many steps as Adam."""
TINY_MODEL = {"model.num_layers": 1, "model.width": 16, "model.num_heads": 1, "model.head_width": 16}
SIZES = {
    "tiny": Size(ROOT / "configs/quickstart.toml", ALONE | TINY_MODEL | {"model.cutoffs": ()}, 8, (8, 16), 2),
    "cores": Size(ROOT / "configs/quickstart.toml", ALONE | MUON, 64, (64, 128, 256, 512), 450),
    "paper": Size(ROOT / "configs/wt103_base.toml", {}, 128, (128, 256, 384, 512, 640), 200_000, on_gpu=True),
}
"""`tiny` tries the program. `cores` takes some minutes per run on one of two cores. `paper` is for a cluster."""


class Trial(NamedTuple):
    """A row of the table."""

    recurrence: bool
    positions: Literal["ours", "Shaw", "absolute"]
    loss: Literal["full", "half"]
    more: tuple[tuple[str, Any], ...] = ()
    """Other settings, by `section.key`. The column `loss` of the table names them."""

    @property
    def words(self) -> dict[str, str]:
        """Columns of the row that describe the trial."""
        told = "".join(f", {key.partition('.')[2]} {value}" for key, value in self.more)
        return {
            "recurrence": "yes" if self.recurrence else "no",
            "positions": self.positions,
            "loss": self.loss + told,
        }

    @property
    def name(self) -> str:
        """Name of the trial in the names of folders."""
        return (
            "-".join(("recurrent" if self.recurrence else "alone", self.positions, self.words["loss"]))
            .replace(", ", "-")
            .replace(" ", "_")
        )


def config_of(trial: Trial, size: Size, *, segment_len: int = 0) -> Config:
    """Return the settings of a trial. Without `segment_len` they have the segment length of the size. Raises
    ConfigError."""
    segment_len = segment_len or size.segment_len
    memory_len = size.segment_len if trial.recurrence else 0
    lengths = {"train.segment_len": segment_len, "train.memory_len": memory_len, "train.max_steps": size.steps}
    values: dict[str, Any] = dict(lengths)
    if trial.positions == "Shaw":
        values |= {"model.positions": "learned_relative", "model.num_distances": segment_len + memory_len}
    if trial.positions == "absolute":
        values |= {"model.positions": "absolute", "model.absolute_with_memory": trial.recurrence}
    if trial.loss == "half":
        values["train.half_loss"] = True
    config = changed(load_config(size.recipe), size.changes | values | dict(trial.more))
    check_config(config)
    return config


def scoring(trial: Trial, size: Size, *, segment_len: int, attention: int) -> list[str]:
    """Return the flags of `txl evaluate` for this attention length. The list is empty if the length is too short for
    the trial, or too long to run again for each segment."""
    keeps_places = trial.recurrence and trial.positions == "absolute"
    scored_len = segment_len if keeps_places else size.segment_len // 2
    context = attention - scored_len
    if context < (scored_len if keeps_places else 0):
        return []
    if not trial.recurrence and attention > MOST_AGAIN * segment_len:
        return []
    flag = "--memory-len" if trial.recurrence else "--overlap-len"
    return ["--segment-len", str(scored_len), flag, str(context)]


class Job(NamedTuple):
    """A trial with a seed."""

    trial: Trial
    seed: int
    segment_len: int
    steps: int

    def config(self, size: Size) -> Config:
        """Return the settings of the run, without its folder and corpus. Raises ConfigError."""
        return config_of(self.trial, size._replace(steps=self.steps), segment_len=self.segment_len)

    def scorings(self, size: Size) -> dict[int, list[str]]:
        """Return the flags of `txl evaluate` for each possible attention length of the size and of the job's own
        segment."""
        lengths = sorted({*size.lengths, self.segment_len})
        flags = {one: scoring(self.trial, size, segment_len=self.segment_len, attention=one) for one in lengths}
        return {length: words for length, words in flags.items() if words}

    def name(self, size: Size) -> str:
        """Return the name of the run's folder. Runs with other settings have other names."""
        return f"{self.trial.name}-{self.segment_len}-{self.steps}-{mark_of(self.config(size))}-{self.seed}"

    def words(self, size: Size, *, corpus: Corpus) -> dict[str, str]:
        """Return the columns that identify the rows of this job."""
        numbers = {"seed": self.seed, "segment": self.segment_len, "steps": self.steps}
        told = {name: str(number) for name, number in numbers.items()}
        return self.trial.words | told | {"settings": mark_of(self.config(size)), "corpus": named(corpus)}


def measure(job: Job, rows: Rows, *, size: Size, corpus: Corpus, out: Path) -> None:
    """Train, score what has no rows yet, and add the rows. Raises RuntimeError if a command fails."""
    words = job.words(size, corpus=corpus)
    known = {row["attention"] for row in rows.rows if words.items() <= row.items()}
    missing = {length: flags for length, flags in job.scorings(size).items() if str(length) not in known}
    if not missing:
        return
    run = out / job.name(size)
    places = {
        "run.dir": str(run),
        "run.seed": job.seed,
        "data.path": str(corpus.folder),
        "eval.max_tokens": 8192,  # the run is scored below
        "checkpoint.every_steps": max(1, job.steps // 4),
        "checkpoint.keep_last": 1,
        "metrics.tensorboard": False,
        "metrics.sample_every_steps": 0,
    }
    train(changed(job.config(size), places), base=size.recipe)
    for length, flags in missing.items():
        result = run / f"attention_{length}.json"
        run_txl("evaluate", run, "--num-lanes", 16, *flags, "--json", result)
        nats = json.loads(result.read_text(encoding="utf-8"))["model"]["loss"]
        about = origin() | {"commit": commits_of(run), "train_s": f"{seconds_of(run):.1f}"}
        rows.add(**words, attention=length, nats=f"{nats:.5f}", **about)


def take_over(others: Sequence[dict[str, str]], rows: Rows, *, wanted: Sequence[dict[str, str]]) -> None:
    """Add the rows of another program that belong to the wanted jobs, except rows that exist already."""
    for row in others:
        if row not in rows.rows and any(words.items() <= row.items() for words in wanted):
            rows.add(**row)


def table_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the Markdown table with a row per trial, in the order of the records: nats per token, as mean and standard
    deviation over the seeds."""
    if not rows:
        return [UNMEASURED]
    lengths = sorted({int(row["attention"]) for row in rows})
    groups: dict[tuple[str, ...], dict[tuple[int, int], float]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("recurrence", "positions", "loss", "segment", "steps", "corpus", "settings"))
        groups.setdefault(key, {})[int(row["attention"]), int(row["seed"])] = float(row["nats"])
    lines = []
    for key, found in groups.items():
        losses = [[nats for (one, _), nats in found.items() if one == length] for length in lengths]
        seeds = len({seed for _, seed in found})
        lines.append([*key[:-1], str(seeds), *(spread(own, digits=4) if own else "" for own in losses)])
    head = ("recurrence", "positions", "loss", "segment", "steps", "corpus", "seeds", *(f"at {one}" for one in lengths))
    return markdown(head, lines)


def begin_of(program: str) -> str:
    """Return the comment in front of a program's table."""
    return f"<!-- table: python -m tools.experiments.paper.{program} --table -->"


def on_a_cluster(jobs: Sequence[Job], *, size: Size, gpus: int, gpu: str, vocab_size: int, out: str) -> Iterator[str]:
    """Yield the commands of the paper's size with the choices and the output of `txl plan` for each trial. Nothing is
    run.

    Raises ConfigError for an unknown GPU.
    """
    question = PlanOptions(cluster=GpuCluster(find_gpu(gpu), 8, 50.0), gpus=gpus, vocab_size=vocab_size)
    recipe, plans = size.recipe.relative_to(ROOT), dict[tuple[Trial, int], Plan]()
    for job in jobs:
        config, run, key = job.config(size), f"{out}/{job.name(size)}", (job.trial, job.segment_len)
        if key not in plans:
            plans[key] = make_plan(config, question=question)
            yield f"\n# {', '.join(f'{name} {word}' for name, word in job.trial.words.items())}: txl plan says"
            yield from (f"#   {note}" for note in plans[key].notes)
            wanted = ("choose:", "step:", "run:", "  GiB per GPU:", "nothing fits")
            yield from (f"#   {line.strip()}" for line in plan_lines(plans[key]) if line.startswith(wanted))
        if (chosen := plans[key].chosen) is None:
            continue
        flags = " ".join([*flags_of(config, base=size.recipe), *chosen.flags])
        launcher = f"deepspeed --num_gpus {plans[key].gpus_used} --module txl_dist train {recipe}"
        yield f"{launcher} {flags} --run.dir {run} --run.seed {job.seed}"
        for words in job.scorings(size).values():
            yield f"txl evaluate {run} --split test --num-lanes 10 {' '.join(words)}"


def add_record_flags(parser: argparse.ArgumentParser, *, program: str) -> None:
    """Add the flags --csv and --table, which all programs have."""
    parser.add_argument(
        "--csv",
        type=Path,
        default=ROOT / f"tools/experiments/paper/{program}.csv",
        help="file of the records; required for --size tiny",
    )
    parser.add_argument("--table", action="store_true", help="write the table of notebook/paper.md from the records")


def options(description: str | None, *, program: str) -> argparse.ArgumentParser:
    """Return a parser with the flags of the programs that compare trials."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", choices=SIZES, default="cores", help="tiny tries the program; paper only prints the commands"
    )
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="prepared corpus with a validation split")
    parser.add_argument("--steps", type=int, default=0, help="steps of each run; 0 means the size's default")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 1 to N")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs in parallel, each on one thread")
    parser.add_argument("--out", type=Path, default=Path(f"runs/paper/{program}"), help="folder for the runs")
    parser.add_argument("--gpus", type=int, default=4, help="number of GPUs for --size paper")
    parser.add_argument("--gpu", default="h100", help="kind of the GPUs, as for txl plan")
    parser.add_argument(
        "--vocab-size", type=int, default=267_735, help="vocabulary size of the paper's corpus, in tokens"
    )
    add_record_flags(parser, program=program)
    return parser


def go(
    parser: argparse.ArgumentParser,
    jobs: Callable[[argparse.Namespace, Size], list[Job]],
    *,
    program: str,
    known: Path | None = None,
) -> None:
    """Write the table, print the commands, or make the missing runs and print the table, as the flags say. Rows of the
    same jobs in `known`, the records of another program, are taken over."""
    arguments = parser.parse_args()
    require_own_records(parser, arguments)
    if arguments.corpus is None and arguments.size != "paper" and not arguments.table:
        parser.error("--corpus is needed: name a prepared corpus, for instance data/stdlib")
    try:
        rows, size = Rows(arguments.csv, COLUMNS), SIZES[arguments.size]
        size = size._replace(steps=arguments.steps or size.steps)
        if arguments.table:
            put_table(PAGE, begin_of(program), table_of(rows.rows))
        elif size.on_gpu:
            facts = {
                "gpus": arguments.gpus,
                "gpu": arguments.gpu,
                "vocab_size": arguments.vocab_size,
                "out": str(arguments.out),
            }
            print("\n".join(on_a_cluster(jobs(arguments, size), size=size, **facts)))
        else:
            corpus, out = open_corpus(arguments.corpus.resolve()), arguments.out.resolve()
            size = fitted(size, vocab_size=corpus.vocab_size)
            wanted = jobs(arguments, size)
            if known is not None:
                words = [job.words(size, corpus=corpus) for job in wanted]
                take_over(Rows(known, COLUMNS).rows, rows, wanted=words)
            side_by_side(partial(measure, rows=rows, size=size, corpus=corpus, out=out), wanted, jobs=arguments.jobs)
            print("\n".join(table_of(rows.rows)))
    except (TxlError, RuntimeError) as error:
        sys.exit(str(error))


def fitted(size: Size, *, vocab_size: int) -> Size:
    """Return the size for a corpus with `vocab_size` ids, without cutoffs that the vocabulary does not reach."""
    cutoffs = changed(load_config(size.recipe), size.changes).model.cutoffs
    return size._replace(changes=size.changes | {"model.cutoffs": cutoffs_below(cutoffs, vocab_size=vocab_size)})


def require_own_records(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the program if rows of the size tiny would be added to the repository's records, or if the page's table would
    be written from other records."""
    is_own = arguments.csv.resolve() == parser.get_default("csv").resolve()
    if arguments.size == "tiny" and is_own:
        parser.error("--size tiny needs another file for its records: type --csv FILE")
    if arguments.table and not is_own:
        parser.error("--table writes notebook/paper.md from the repository's own records: remove --csv")
