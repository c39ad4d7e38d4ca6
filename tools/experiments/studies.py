"""Measure the effect of one setting, with all others equal: runs with the same seeds, scored on the same tokens.

    python -m tools.experiments.studies memory --corpus data/books --corpus data/stdlib   add to notebook/studies.csv
    python -m tools.experiments.studies softmax --corpus data/wikitext-2
    python -m tools.experiments.studies --table        write the tables of notebook/results.md, and study_*.svg

    memory     a memory of 0, 1, 2 and 4 times the segment
    borders    memory across document borders, or a mask at the borders; both score the same tokens
    softmax    adaptive softmax, and full softmax
    norm       norm before each block, and after each block
    precision  ZeRO 0 to 3 and bf16, compared with fp32, on two ranks
    sizes      three widths, from which tools/experiments/prediction.py predicts the loss of `larger`
    larger     the predicted model; train it after the prediction is committed

All runs use configs/modern_quickstart.toml in fp32 except for the one setting, with the same number of steps and
tokens. The loss is that of the whole validation split, with memory. The loss by position comes from the last evaluation
during training. Seconds are those of the steps. Compare them only if no other program ran, with `--jobs 1`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.experiments.recording import (
    NOTEBOOK,
    ROOT,
    append_rows,
    markdown,
    origin,
    picture,
    put_table,
    read_rows,
    spread,
)
from tools.experiments.trainings import cutoffs_below, flags_of, records_in, run_txl, side_by_side
from txl_dist.config.load import Config, changed, check_config, load_config
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.errors import ConfigError, TxlError
from txl_dist.model.transformer_xl import TransformerXL

RECORDS, PAGE = NOTEBOOK / "studies.csv", NOTEBOOK / "results.md"
RECIPE = ROOT / "configs/modern_quickstart.toml"
COLOURS = ("#2f7ed8", "#d9680f", "#2e9b4f", "#9a62d0", "#d9434e", "#1799a8")
NUM_EVALUATIONS, EVALUATED_TOKENS = 5, 61_440
"""Number of evaluations during training, and tokens of each evaluation."""
_HEAD = ("corpus", "variant", "seeds", "nats per token", "bits per byte", "beside the first", "seconds", "GiB")


class Study(NamedTuple):
    """One question: the variants to compare."""

    variants: dict[str, dict[str, Any]]
    """Changed settings of each variant. The first variant is the one with which the others are compared."""
    steps: int
    ranks: int = 1


def _sized(width: int) -> dict[str, Any]:
    heads = {"model.num_heads": width // 32, "model.head_width": 32}
    return {"model.width": width, "model.ff_width": 4 * width, **heads, "optim.name": "muon", "optim.lr": 1.6e-2}


STUDIES = {
    "memory": Study({f"memory {length}": {"train.memory_len": length} for length in (0, 64, 128, 256)}, 600),
    "borders": Study({border: {"data.document_mask": border == "mask"} for border in ("carry", "mask")}, 900),
    "softmax": Study({"adaptive": {}, "full": {"model.cutoffs": ()}}, 300),
    "norm": Study({"pre-norm": {}, "post-norm": {"model.pre_norm": False, "model.final_norm": False}}, 900),
    "precision": Study(
        {f"fp32, ZeRO-{stage}": {"engine.zero_stage": stage} for stage in range(4)}
        | {"bf16, ZeRO-1": {"engine.precision": "bf16"}},
        300,
        ranks=2,
    ),
    "sizes": Study({f"width {width}": _sized(width) for width in (64, 96, 128)}, 900),
    "larger": Study({f"width {width}": _sized(width) for width in (224,)}, 900),
}


class Record(NamedTuple):
    """Result of one run."""

    study: str
    corpus: str
    variant: str
    seed: int
    steps: int
    nats: float
    """Loss in nats per token of the whole validation split."""
    bits_per_byte: float
    """Bits per byte, or nan if the corpus does not have the number of its bytes."""
    seconds: float
    """Seconds of the run's steps."""
    peak_gib: float
    """Peak memory of a rank in GiB."""
    parameters: int
    """Number of parameters outside the tables of embedding and softmax."""
    curve: str
    """`step:loss` of the evaluations during training."""
    by_position: str
    """Losses by position in the segment, in bins, from the first tokens to the last."""
    data: str
    """First 12 digits of the corpus' fingerprint."""
    commit: str
    cpu: str
    date: str


def folder_of(study: str, *, corpus: str, data: str, variant: str, steps: int, seed: int, trial: bool) -> str:
    """Return the name of a run's folder. Runs that differ in an argument have other names, so that none resumes
    another."""
    words = [study, corpus, data, variant, str(steps), str(seed), *(["trial"] if trial else [])]
    return "-".join(words).replace(", ", "-").replace(" ", "_")


def config_of(
    study: Study, variant: str, *, corpus: Path, vocab_size: int, seed: int, steps: int, place: Path
) -> Config:
    """Return the settings of a run. Raises ConfigError if they do not fit together."""
    base = load_config(RECIPE)
    lanes = base.train.num_lanes // study.ranks
    values: dict[str, Any] = {"engine.zero_stage": 1 if study.ranks > 1 else 0, "train.microbatch_lanes": lanes}
    values["engine.precision"] = "fp32"
    values |= {"train.max_steps": steps, "run.seed": seed, "run.dir": str(place), "data.path": str(corpus)}
    values |= {"eval.every_steps": max(1, steps // NUM_EVALUATIONS), "eval.max_tokens": EVALUATED_TOKENS}
    values |= {"checkpoint.every_steps": 0, "metrics.tensorboard": False, "metrics.sample_every_steps": 0}
    values["model.cutoffs"] = cutoffs_below(base.model.cutoffs, vocab_size=vocab_size)
    if study is STUDIES["softmax"] and not values["model.cutoffs"]:
        least = min(base.model.cutoffs)
        raise ConfigError(
            f"{corpus} has {vocab_size} ids, but cutoffs begin at {least}: both softmaxes are the same model."
        )
    config = changed(base, values | study.variants[variant])
    check_config(config)
    return config


def measure(name: str, *, variant: str, corpus: Path, seed: int, steps: int, out: Path, trial: bool) -> Record:
    """Train and score a run, and return its row. Raises TxlError."""
    study, data = STUDIES[name], open_corpus(corpus)
    about: dict[str, Any] = {"corpus": corpus.name, "data": data.fingerprint[:12], "variant": variant}
    about |= {"steps": steps, "seed": seed}
    place = out / folder_of(name, **about, trial=trial)
    config = config_of(study, variant, corpus=corpus, vocab_size=data.vocab_size, seed=seed, steps=steps, place=place)
    command = ("launch", "--num_accelerators", study.ranks) if study.ranks > 1 else ("train",)
    run_txl(*command, RECIPE, *flags_of(config, base=RECIPE))
    result = place / "study.json"
    run_txl("evaluate", place, "--num-lanes", 16, "--json", result)
    scored = json.loads(result.read_text(encoding="utf-8"))["model"]
    trained, evaluated = (list(records_in(place, kind).values()) for kind in ("train", "eval"))
    return Record(
        study=name,
        **about,
        nats=round(scored["loss"], 5),
        bits_per_byte=round(scored.get("bits_per_byte", math.nan), 5),
        seconds=round(statistics.median(row["step_ms"] for row in trained[1:]) * steps / 1000, 1),
        peak_gib=round(max(row["peak_gib"] for row in trained), 3),
        parameters=parameters_outside_tables(config),
        curve=" ".join(f"{row['step']}:{row['loss']:.4f}" for row in evaluated),
        by_position=" ".join(f"{loss:.4f}" for loss in evaluated[-1]["loss_by_position"]),
        **origin(),  # type: ignore[arg-type]
    )


def parameters_outside_tables(config: Config) -> int:
    """Return the number of parameters of the model's blocks."""
    with torch.device("meta"):
        model = TransformerXL(config.model, vocab_size=100_000)
    return sum(parameter.numel() for parameter in model.blocks.parameters())


def told_on(row: Record) -> tuple[str, str, int]:
    """Return the key (corpus, data, steps) of runs that can be compared."""
    return row.corpus, row.data, row.steps


def groups_of(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return groups of runs that can be compared, by name. The name is that of the corpus. Later groups of the same
    corpus also have the differing data or steps in their name."""
    first: dict[str, Record] = {}
    found: dict[str, list[Record]] = {}
    for row in records:
        base = first.setdefault(row.corpus, row)
        data = f" {row.data}" if row.data != base.data else ""
        steps = f", {row.steps} steps" if row.steps != base.steps else ""
        found.setdefault(f"{row.corpus}{data}{steps}", []).append(row)
    return found


def table_of(records: Sequence[Record]) -> list[str]:
    """Return the Markdown table with a row per group and variant. Differences use only seeds that the study's first
    variant has too."""
    groups = groups_of(records)
    lines = []
    for (name, group), variant in itertools.product(groups.items(), dict.fromkeys(row.variant for row in records)):
        first = next(iter(STUDIES[group[0].study].variants))
        base = {row.seed: row.nats for row in group if row.variant == first}
        rows = [row for row in group if row.variant == variant]
        if not rows:
            continue
        apart = [row.nats - base[row.seed] for row in rows if row.seed in base]
        cells = [name, variant, str(len(rows))]
        cells += [
            spread([row.nats for row in rows], digits=4),
            "" if math.isnan(rows[0].bits_per_byte) else f"{statistics.fmean(r.bits_per_byte for r in rows):.4f}",
        ]
        seeds = f" ({len(apart)} in common)" if len(apart) < len(rows) else ""
        cells += [spread(apart, digits=4, sign="+") + seeds if any(apart) else ""]
        cells += [f"{statistics.fmean(row.seconds for row in rows):.0f}", f"{max(row.peak_gib for row in rows):.2f}"]
        lines.append(cells)
    return markdown(_HEAD, lines)


def draw(records: Sequence[Record], *, out: Path) -> None:
    """Draw a row of diagrams per group: validation loss over steps, and by position in the segment. Values are means
    over the seeds."""
    groups = groups_of(records)
    variants = list(dict.fromkeys(row.variant for row in records))
    with picture(out, width=8.4, height=3.1 * len(groups)) as figure:
        for axes, (name, group) in zip(figure.subplots(len(groups), 2, squeeze=False), groups.items(), strict=True):
            for variant, colour in zip(variants, COLOURS, strict=False):
                rows = [row for row in group if row.variant == variant]
                if not rows:
                    continue
                curves = [[one.split(":") for one in row.curve.split()] for row in rows]
                means = [statistics.fmean(float(point[1]) for point in points) for points in zip(*curves, strict=True)]
                axes[0].plot([int(step) for step, _ in curves[0]], means, color=colour, label=variant)
                by_bin = zip(*([float(loss) for loss in row.by_position.split()] for row in rows), strict=True)
                axes[1].plot([statistics.fmean(losses) for losses in by_bin], color=colour)
            axes[0].set(xlabel="step", ylabel=f"{name}: validation nats per token")
            axes[1].set(xlabel="position in the segment, in bins")
            axes[0].legend()


def begin_of(study: str) -> str:
    """Return the comment before a study's table."""
    return f"<!-- table: python -m tools.experiments.studies --table ({study}) -->"


def ordered(records: Sequence[Record]) -> list[Record]:
    """Return the records of a study in the order of corpus, group, variant and seed."""
    groups = list(dict.fromkeys(map(told_on, records)))
    variants = list(STUDIES[records[0].study].variants)
    return sorted(
        records, key=lambda row: (row.corpus, groups.index(told_on(row)), variants.index(row.variant), row.seed)
    )


def write_tables() -> None:
    """Write the tables and pictures of all studies that have records."""
    records = read_rows(RECORDS, Record)
    for study in dict.fromkeys(row.study for row in records):
        rows = ordered([row for row in records if row.study == study])
        put_table(PAGE, begin_of(study), table_of(rows))
        draw(rows, out=NOTEBOOK / f"study_{study}.svg")


def main() -> None:
    """Make the runs without rows, or write the tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", choices=STUDIES)
    parser.add_argument(
        "--corpus", type=Path, action="append", default=[], metavar="DIR", help="prepared corpus; can be repeated"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 1 to N")
    parser.add_argument("--steps", type=int, default=0, help="steps of each run; 0 means the study's default")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs in parallel, each rank on one thread")
    parser.add_argument("--out", type=Path, default=Path("runs/studies"), help="folder for the runs")
    parser.add_argument("--trial", action="store_true", help="print the table without recording rows")
    parser.add_argument("--table", action="store_true", help="write the tables and draw the pictures")
    arguments = parser.parse_args()
    if arguments.table:
        write_tables()
        return
    if not (arguments.study and arguments.corpus):
        parser.error("type the name of a study, and --corpus DIR")
    steps, out = arguments.steps or STUDIES[arguments.study].steps, arguments.out.resolve()
    if steps < 2:  # the first step is not timed
        parser.error("--steps must be 2 or more")
    corpora = {
        path: (path.name, open_corpus(path).fingerprint[:12], steps) for path in map(Path.resolve, arguments.corpus)
    }
    known = {(row.study, told_on(row), row.variant, row.seed) for row in read_rows(RECORDS, Record)}
    missing = [
        (variant, corpus, seed)
        for seed in range(1, arguments.seeds + 1)
        for corpus, group in corpora.items()
        for variant in STUDIES[arguments.study].variants
        if arguments.trial or (arguments.study, group, variant, seed) not in known
    ]

    def run(one: tuple[str, Path, int]) -> None:
        variant, corpus, seed = one
        row = measure(
            arguments.study, variant=variant, corpus=corpus, seed=seed, steps=steps, out=out, trial=arguments.trial
        )
        print(f"{row.study}, {row.corpus}, {row.variant}, seed {row.seed}: {row.nats:.4f} nats", flush=True)
        if arguments.trial:
            rows.append(row)
        else:
            append_rows(RECORDS, Record._fields, [row])

    rows: list[Record] = []
    side_by_side(run, missing, jobs=arguments.jobs)
    if rows:
        print("\n".join(table_of(ordered(rows))))


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"studies: {error}")
