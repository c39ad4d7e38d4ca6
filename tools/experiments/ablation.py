"""Measure the gain of each switch of `switches` at equal training time.

    python -m tools.experiments.ablation --corpus stdlib=DIR --corpus wikitext-2=DIR --runs DIR \
        --csv tools/experiments/notebook/ablation.csv

All runs have the quickstart's model and batch, one thread and one rank. A run lasts `--seconds`: the number of its
steps is this time divided by the milliseconds of a step. These are the minima of interleaved rounds of all variants, so
that other load on the machine cannot decide the result. The schedule ends with the last step. The result is the
validation loss at the end, on the first 122,880 tokens of the validation split.

    cost     milliseconds of a step of every variant
    rates    AdamW and Muon over a grid of learning rates, per corpus; the best rate is used in the next parts
    alone    AdamW with one switch
    whole    the switches of `WHOLE` together, without each of them, and with each of the other switches
    seeds    two more seeds of AdamW, Muon and the whole, and of each switch whose gain (alone or in the whole) is above
             minus twice AdamW's standard deviation

Every row of the CSV is one run or one cost. A run that has a row is not repeated, and an interrupted run is resumed.
`--table` runs nothing, and writes the table of notebook/ablation.md from the CSV.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.benchmarks.measuring import interleaved
from tools.benchmarks.switches import QUICKSTART, SWITCHES, WHOLE, EngineStep, config_with
from tools.benchmarks.trainers import Sizes, zipf_segments
from tools.experiments.recording import NOTEBOOK, Rows, markdown, put_table, spread
from tools.experiments.trainings import records_in, side_by_side
from tools.experiments.trainings import train as make_run
from txl_dist.config.load import changed
from txl_dist.distributed.collectives import distributed_context

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
COLUMNS = ("kind", "corpus", "variant", "lr", "seed", "steps", "ms_per_step", "loss", "wall_s")
VOCAB_SIZE = 4_096
EVAL_TOKENS = 122_880
PAGE = NOTEBOOK / "ablation.md"
BEGIN = "<!-- table: python -m tools.experiments.ablation --csv tools/experiments/notebook/ablation.csv --table -->"


class Run(NamedTuple):
    """One training run of the ablation."""

    corpus: str
    variant: str
    lr: float
    seed: int = 1

    @property
    def in_whole(self) -> bool:
        """Whether the variant is the whole or a change of it."""
        return self.variant.startswith("whole")

    @property
    def switches(self) -> tuple[str, ...]:
        """Switches that the name of the variant stands for."""
        if self.in_whole:
            _, *changes = self.variant.split()
            names = [name for name in WHOLE if f"-{name}" not in changes]
            return (*names, *(change[1:] for change in changes if change.startswith("+")))
        return () if self.variant == "adamw" else tuple(self.variant.split("+"))


def variants() -> list[str]:
    """Return the names of all variants."""
    changes = [f"whole -{name}" if name in WHOLE else f"whole +{name}" for name in SWITCHES if name != "muon"]
    return ["adamw", *SWITCHES, "whole", *changes]


class Records(Rows):
    """The CSV of costs and runs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, COLUMNS)

    def cost_ms(self, variant: str) -> float | None:
        """Return the milliseconds of a variant's step, or None if they were not measured."""
        return next(
            (float(r["ms_per_step"]) for r in self.rows if (r["kind"], r["variant"]) == ("cost", variant)), None
        )

    def losses(self, corpus: str, variant: str, *, lr: float | None = None) -> list[float]:
        """Return the losses of a variant, in the order of the seeds."""
        own = [r for r in self.rows if (r["kind"], r["corpus"], r["variant"]) == ("run", corpus, variant)]
        own.sort(key=lambda r: int(r["seed"]))
        return [float(r["loss"]) for r in own if lr is None or float(r["lr"]) == lr]

    def has(self, run: Run) -> bool:
        """Return whether the CSV has a row for the run."""
        key = (run.corpus, run.variant, run.lr, run.seed)
        return any(
            (r["corpus"], r["variant"], float(r["lr"]), int(r["seed"])) == key for r in self.rows if r["kind"] == "run"
        )

    def best_rate(self, corpus: str, variant: str) -> float:
        """Return the learning rate of the grid with the lowest loss of the first seed."""
        return min(RATES, key=lambda lr: self.losses(corpus, variant, lr=lr)[0])


def measure_costs(records: Records, *, rounds: int) -> None:
    """Measure the cost of all variants without a cost. The variants take turns."""
    missing = [name for name in variants() if records.cost_ms(name) is None]
    if not missing:
        return
    configs = {name: config_with(Run("", name, 0.0).switches) for name in missing}
    with distributed_context(timeout_s=600, num_threads=1) as ranks:
        steps = {name: EngineStep(config, ranks, vocab_size=VOCAB_SIZE) for name, config in configs.items()}
        base = config_with()
        segments = zipf_segments(Sizes.of(base, vocab_size=VOCAB_SIZE, num_lanes=base.train.num_lanes))
        turns = {name: itertools.cycle(list(itertools.islice(segments, 3))) for name in steps}
        actions = {name: partial(_step, steps[name], turns[name]) for name in steps}
        timings = interleaved(actions, rounds=rounds)
    for name, timing in timings.items():
        records.add(kind="cost", variant=name, ms_per_step=f"{timing.min_ms:.2f}")


def _step(step: EngineStep, segments: Iterator[np.ndarray]) -> object:
    return step(next(segments))


def train(run: Run, records: Records, *, corpora: dict[str, str], folder: Path, seconds: float) -> None:
    """Make one training run and add its row. Raises RuntimeError with the end of its output if it fails."""
    cost = records.cost_ms(run.variant)
    assert cost is not None
    steps = int(seconds * 1000 / cost)
    name = f"{run.corpus}-{run.variant}-{run.lr:g}-{run.seed}".replace(" ", "")
    places = {
        "data.path": corpora[run.corpus],
        "run.dir": str(folder / name),
        "run.seed": run.seed,
        "eval.max_tokens": EVAL_TOKENS,
        "checkpoint.every_steps": 0,
        "metrics.tensorboard": False,
        "metrics.sample_every_steps": 0,
    }
    config = config_with(run.switches, optim__lr=run.lr, train__max_steps=steps)
    wall_s = make_run(changed(config, places), base=QUICKSTART)
    *_, last = records_in(folder / name, "eval").values()
    records.add(
        kind="run",
        corpus=run.corpus,
        variant=run.variant,
        lr=run.lr,
        seed=run.seed,
        steps=last["step"],
        ms_per_step=cost,
        loss=f"{last['loss']:.5f}",
        wall_s=f"{wall_s:.1f}",
    )


def phases(records: Records, corpora: list[str]) -> Iterator[list[Run]]:
    """Yield lists of runs that can be made in parallel. Each list depends on the results of the lists before it."""
    yield [Run(c, v, lr) for c in corpora for v in ("adamw", "muon") for lr in RATES]
    rate = {(c, v): records.best_rate(c, v) for c in corpora for v in ("adamw", "muon")}
    yield [Run(c, name, rate[c, "adamw"]) for name in SWITCHES if name != "muon" for c in corpora]
    yield [Run(c, name, rate[c, "muon"]) for name in variants() if name.startswith("whole") for c in corpora]
    yield [Run(c, "adamw", rate[c, "adamw"], seed) for c in corpora for seed in (2, 3)]
    more = []
    for c in corpora:
        base = records.losses(c, "adamw", lr=rate[c, "adamw"])
        for name in variants()[1:]:
            kind = "muon" if name == "muon" or Run(c, name, 0.0).in_whole else "adamw"
            reference = base[0] if kind == "adamw" or name in ("muon", "whole") else records.losses(c, "whole")[0]
            gain = reference - records.losses(c, name, lr=rate[c, kind])[0]
            if "-" in name:
                gain = -gain  # the gain of the switch that is missing
            if name in ("muon", "whole") or gain > -2 * statistics.stdev(base):
                more += [Run(c, name, rate[c, kind], seed) for seed in (2, 3)]
    yield more


def table_of(records: Records) -> list[str]:
    """Return the Markdown table of each switch's gain in nats per token, alone and in the whole, per corpus."""
    corpora = list(dict.fromkeys(r["corpus"] for r in records.rows if r["kind"] == "run"))
    adamw = records.cost_ms("adamw")
    assert adamw is not None
    head = ["switch", "step", *(f"alone, {c}" for c in corpora), *(f"in the whole, {c}" for c in corpora)]
    lines = []
    for name in (*SWITCHES, "whole"):
        cells = [_gain(records, c, name, "adamw") for c in corpora]
        if name in ("muon", "whole"):
            cells += [""] * len(corpora)
        elif name in WHOLE:
            cells += [_gain(records, c, "whole", f"whole -{name}") for c in corpora]
        else:
            cells += [_gain(records, c, f"whole +{name}", "whole") for c in corpora]
        shown = f"**{name}**" if name == "whole" else f"`{name}`" + (" *" if name in WHOLE else "")
        lines.append([shown, f"{(records.cost_ms(name) or 0) / adamw:.2f}", *cells])
    return markdown(head, lines)


def bases_of(records: Records) -> list[str]:
    """Return the Markdown table of the losses with which gains are computed, and of the learning rates, per corpus."""
    lines = []
    for c in dict.fromkeys(r["corpus"] for r in records.rows if r["kind"] == "run"):
        rates = [spread(records.losses(c, "adamw", lr=lr), digits=3) for lr in RATES]
        best = records.best_rate(c, "muon")
        muon, whole = (spread(records.losses(c, name, lr=best), digits=3) for name in ("muon", "whole"))
        lines.append([c, *rates, f"{best:g}", muon, whole])
    return markdown(["corpus", *(f"AdamW at {lr:g}" for lr in RATES), "Muon's best rate", "Muon", "whole"], lines)


def _gain(records: Records, corpus: str, variant: str, beside: str) -> str:
    """Return mean and standard deviation of the gain of `variant` over `beside`, for the seeds that both have."""
    found = []
    for name in (variant, beside):
        kind = "muon" if name == "muon" or Run(corpus, name, 0.0).in_whole else "adamw"
        found.append(records.losses(corpus, name, lr=records.best_rate(corpus, kind)))
    return spread([theirs - ours for ours, theirs in zip(*found, strict=False)], digits=3, sign="+")


def main() -> None:
    """Measure costs, make the missing runs of each part, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--corpus",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="name and folder of a prepared corpus with a vocabulary of 4,096",
    )
    parser.add_argument("--csv", type=Path, required=True, help="file of the records")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="folder for the runs")
    parser.add_argument("--seconds", type=float, default=75.0, help="seconds of a run, without start and evaluation")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs in parallel")
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each variant")
    parser.add_argument("--table", action="store_true", help="write the table of notebook/ablation.md")
    arguments = parser.parse_args()
    if arguments.table:
        records = Records(arguments.csv)
        put_table(PAGE, BEGIN, [*bases_of(records), "", *table_of(records)])
        return
    if not (arguments.corpus and arguments.runs):
        parser.error("type --corpus NAME=DIR, and --runs DIR for the runs")
    corpora = dict(one.split("=", 1) for one in arguments.corpus)
    records = Records(arguments.csv)
    measure_costs(records, rounds=arguments.rounds)
    for runs in phases(records, list(corpora)):
        missing = [run for run in runs if not records.has(run)]
        work = partial(train, records=records, corpora=corpora, folder=arguments.runs, seconds=arguments.seconds)
        side_by_side(work, missing, jobs=arguments.jobs)


if __name__ == "__main__":
    main()
