"""Measure the seconds from the command to a fixed validation loss, on two cores. notebook/speedrun.md has the rules.

    python -m tools.experiments.speedrun configs/quickstart.toml MORE.toml --seeds 5 --peer-original DIR    measure
    python -m tools.experiments.speedrun --table                                                    write the table

An entry is a recipe, trained by `txl launch --num_accelerators 2`, or the original authors' own train.py on the same
ids (benchmarks/original_train.py). `--then NAME "--optim.lr 4e-3 ..."` adds an entry: the first recipe with these
settings and with those of each `--then` before it. Entries take turns, seed by seed. A row is appended to speedrun.csv
at once. A run that has a row for the same settings and corpus is not measured again. An interrupted run is resumed
(ours) or begins again (theirs), and the seconds of all its starts count. A recipe with engine.precision = "auto" is
trained in fp32, which the original uses. `--then "bf16" "--engine.precision bf16"` adds an entry in bf16.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import psutil

from tools.experiments.recording import NOTEBOOK, append_rows, markdown, origin, put_table, read_rows, spread
from tools.experiments.trainings import run_txl
from txl_dist.config.load import Config, changed, config_to_toml, load_config, setting_names, unknown_setting, value_of
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.errors import ConfigError, TxlError

RECORDS, PAGE = NOTEBOOK / "speedrun.csv", NOTEBOOK / "speedrun.md"
TARGET_NATS = 4.10
"""Largest allowed mean of the validation loss over an entry's seeds, in nats per token."""
LEAST_SEEDS = 3
CORES = 2
EVALUATION = ("--num-lanes", "16")
"""Flags of `txl evaluate` for all entries, on the whole split. Each lane (batch row) keeps its memory through the
split."""
ORIGINAL = "original"
BEGIN = "<!-- table: python -m tools.experiments.speedrun --table -->"
_HEAD = (
    "entry",
    "seeds",
    "validation loss, nats per token",
    "seconds",
    "times as fast as the original",
    "reaches the target",
)


class Record(NamedTuple):
    """Result of one run."""

    entry: str
    settings: str
    """Hash of the settings. Rows with another hash are other entries."""
    seed: int
    seconds: float
    """Seconds from the command to its end, summed over all its starts."""
    starts: int
    held_out_nats: float
    bits_per_byte: float
    corpus: str
    commit: str
    cpu: str
    torch: str
    others: float
    """Average number of cores that other programs and other virtual machines used during the training. Above 0.1 the
    seconds are not those of an idle machine."""
    date: str


class Entry(NamedTuple):
    """A recipe or code that takes part in the comparison."""

    name: str
    settings: str
    config: Config | None
    """Settings of the run. An entry of the original has the settings of the recipe whose sizes it uses."""
    words: tuple[str, ...] = ()
    """Arguments of the original's program."""
    folder: Path | None = None
    """Folder of the original's code, or None for our code."""


def entry_of(name: str, config: Config) -> Entry:
    """Return the entry of a recipe."""
    nowhere = changed(config, {"run.seed": 0, "run.dir": "", "data.path": ""})
    return Entry(name, hashlib.sha256(config_to_toml(nowhere).encode()).hexdigest()[:12], config)


def with_flags(config: Config, flags: str) -> Config:
    """Return the settings with the changes of flags of `txl train`. Raises ConfigError."""
    values: dict[str, list[str]] = {}
    words: list[str] = []
    for word in shlex.split(flags):
        if word.startswith("--"):
            name, words = word.removeprefix("--"), []
            if name not in setting_names():
                raise ConfigError(unknown_setting(name))
            values[name] = words
        elif not values:
            raise ConfigError(f"{flags!r} does not begin with a setting, as --optim.lr.")
        else:
            words.append(word)
    return changed(config, {name: value_of(name, words) for name, words in values.items()})


def entries_of(recipes: Sequence[Path], steps: Sequence[tuple[str, str]], *, corpus: Path) -> list[Entry]:
    """Return the first recipe, then this recipe with more and more settings, then the other recipes. Raises
    ConfigError."""
    first, *others = (entry_of(path.stem, _settings_of(path, corpus=corpus)) for path in recipes)
    entries = [first]
    for name, flags in steps:
        config = entries[-1].config
        assert config is not None
        entries.append(entry_of(name, with_flags(config, flags)))
    return [*entries, *others]


def _settings_of(recipe: Path, *, corpus: Path) -> Config:
    """Return the settings of a recipe with this corpus. They mean the same work on every processor."""
    config = changed(load_config(recipe), {"data.path": str(corpus)})
    if config.engine.precision == "auto":
        config = changed(config, {"engine.precision": "fp32"})
    return config


def original_entry(folder: Path, like: Config, *, more: Sequence[str]) -> Entry:
    """Return the entry of the authors' code with the sizes, lengths, batch, steps, learning rate and clipping of a
    recipe, where the code has flags for them. The flags `more` come last and override others."""
    model, optim, train = like.model, like.optim, like.train
    flags = {
        "dataset": "wt103", "n_layer": model.num_layers, "n_head": model.num_heads, "d_head": model.head_width,
        "d_model": model.width, "d_inner": model.ff_width, "dropout": model.dropout, "dropatt": model.attention_dropout,
        "optim": "adam", "lr": optim.lr, "warmup_step": optim.warmup_steps, "clip": optim.clip_norm,
        "batch_size": train.num_lanes, "tgt_len": train.segment_len, "eval_tgt_len": train.segment_len,
        "mem_len": train.memory_len, "max_step": train.max_steps, "max_eval_steps": 1,
    }  # fmt: skip
    words = ["--adaptive", *(["--pre_lnorm"] if model.pre_norm else [])]
    words += [word for name, value in flags.items() for word in (f"--{name}", str(value))] + list(more)
    steps = argparse.ArgumentParser()
    steps.add_argument("--max_step")
    words += ["--eval-interval", steps.parse_known_args(words)[0].max_step]  # their program saves at each evaluation
    settings = hashlib.sha256(json.dumps([words, model.cutoffs]).encode()).hexdigest()[:12]
    return Entry(ORIGINAL, settings, like, tuple(words), folder)


def measure(entry: Entry, *, seed: int, out: Path, corpus: Path) -> Record:
    """Train and score one run. Raises TxlError if a command fails, and KeyboardInterrupt if it was interrupted."""
    place = out / f"{entry.name.replace(' ', '_')}-{entry.settings}" / f"seed-{seed}"
    clock = place.with_suffix(".json")
    known = json.loads(clock.read_text(encoding="utf-8")) if clock.is_file() else None
    if known is None or (entry.folder and not known["done"]):
        shutil.rmtree(place, ignore_errors=True)  # it cannot be resumed, or its seconds are unknown
    known = known or {"seconds": 0.0, "others_s": 0.0, "starts": 0, "done": False}
    place.parent.mkdir(parents=True, exist_ok=True)
    if not known["done"]:
        command = _command(entry, seed=seed, place=place, corpus=corpus)
        began, others_s = time.perf_counter(), _others_seconds()
        try:
            _run(command, log=place.with_suffix(".log"))
            known["done"] = True
        finally:
            known["seconds"] += time.perf_counter() - began
            known["others_s"] += _others_seconds() - others_s
            known["starts"] += 1
            clock.write_text(json.dumps(known), encoding="utf-8")
    scored = place
    if entry.folder:
        (weights,) = place.glob("*/*/model.pt")
        scored = place / "bundle"
        run_txl("import", weights, scored, "--format", "original", "--vocab", corpus / "tokenizer.json")
    results = place / "speedrun.json"
    run_txl("evaluate", scored, "--data", corpus, *EVALUATION, "--json", results)
    found = json.loads(results.read_text(encoding="utf-8"))["model"]
    return Record(
        entry=entry.name,
        settings=entry.settings,
        seed=seed,
        seconds=round(known["seconds"], 1),
        starts=known["starts"],
        held_out_nats=round(found["loss"], 5),
        bits_per_byte=round(found["bits_per_byte"], 5),
        corpus=open_corpus(corpus).fingerprint[:12],
        torch=version("torch"),
        others=round(known["others_s"] / known["seconds"], 2),
        **origin(),
    )


def _command(entry: Entry, *, seed: int, place: Path, corpus: Path) -> list[str]:
    assert entry.config is not None
    if entry.folder:
        cutoffs = map(str, entry.config.model.cutoffs)
        program = [sys.executable, "-m", "tools.benchmarks.original_train", str(entry.folder), str(corpus), *cutoffs]
        return [*program, "--", *entry.words, "--seed", str(seed), "--work_dir", str(place / "run")]
    settings = place.with_suffix(".toml")
    own = changed(entry.config, {"run.seed": seed, "run.dir": str(place)})
    settings.write_text(config_to_toml(own), encoding="utf-8")
    return [sys.executable, "-m", "txl_dist", "launch", "--num_accelerators", str(CORES), str(settings)]


def _run(command: Sequence[str], *, log: Path) -> None:
    """Run a command to its end. A request to stop is sent to the command, and its end is awaited. Raises TxlError if
    the command fails."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "GOMP_SPINCOUNT": "10000"}
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    if code:
        raise TxlError(f"{' '.join(command[:6])} ... ended with {code}; see {log}.")


def _others_seconds() -> float:
    """Return the CPU seconds of all cores that were not used by the ended children of this program. Only differences of
    two calls have a meaning."""
    cores, children = psutil.cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = cores.user + cores.system + cores.nice + cores.irq + cores.softirq + cores.steal
    return float(busy - children.ru_utime - children.ru_stime)


def read_records() -> list[Record]:
    """Return the records of the repository."""
    return read_rows(RECORDS, Record)


def table_of(records: Sequence[Record]) -> list[str]:
    """Return the Markdown table with a row per entry, in the order of the records: means over all seeds, with their
    standard deviation.

    An entry counts if it has the seeds 0 to n - 1, with n at least `LEAST_SEEDS`, and a mean loss of at most
    `TARGET_NATS`.
    """
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.entry, record.settings, record.corpus), []).append(record)
    base = next((_mean_seconds(rows) for (name, _, _), rows in groups.items() if name == ORIGINAL), None)
    lines = []
    for (name, settings, _), rows in groups.items():
        shown = f"{name} ({settings})" if [key[0] for key in groups].count(name) > 1 else name
        losses, seconds = [row.held_out_nats for row in rows], [row.seconds for row in rows]
        times = f"{base / _mean_seconds(rows):.2f}" if base else ""
        loss = f"{spread(losses, digits=4)}, worst {max(losses):.4f}"
        lines.append([shown, str(len(rows)), loss, spread(seconds, digits=1), times, judged(rows)])
    return markdown(_HEAD, lines)


def judged(rows: Sequence[Record]) -> str:
    """Return whether an entry reaches the target, or the reason why it is not judged."""
    if sorted(row.seed for row in rows) != list(range(len(rows))) or len(rows) < LEAST_SEEDS:
        return f"not judged: seeds 0 to {LEAST_SEEDS - 1} at least"
    return "yes" if round(statistics.fmean(row.held_out_nats for row in rows), 4) <= TARGET_NATS else "no"


def _mean_seconds(rows: Sequence[Record]) -> float:
    return statistics.fmean(row.seconds for row in rows)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Measure the entries and seeds without rows, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", type=Path, nargs="*", help="TOML files; the original takes the sizes of the first")
    parser.add_argument(
        "--then",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "FLAGS"),
        help="add an entry with one more change",
    )
    parser.add_argument("--seeds", type=int, default=LEAST_SEEDS, metavar="N", help="seeds 0 to N - 1")
    parser.add_argument("--peer-original", type=Path, metavar="DIR", help="folder `pytorch` of the authors' code")
    parser.add_argument(
        "--original-flags", default="", metavar="FLAGS", help="flags of its train.py that override others"
    )
    parser.add_argument("--corpus", type=Path, default=Path("data/stdlib"))
    parser.add_argument("--out", type=Path, default=Path("runs/speedrun"))
    parser.add_argument("--table", action="store_true", help="write the table of notebook/speedrun.md from the records")
    parser.add_argument("--trial", action="store_true", help="print the rows without recording them")
    arguments = parser.parse_args()
    if arguments.table:
        put_table(PAGE, BEGIN, table_of(read_records()))
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < CORES:
        raise ConfigError(f"the rules require {CORES} cores, but this process can use only {len(cores)}.")
    os.sched_setaffinity(0, cores[:CORES])
    signal.signal(signal.SIGTERM, _interrupt)
    corpus, out = arguments.corpus.resolve(), arguments.out.resolve()
    if not arguments.recipes:
        parser.error("type the file of a recipe")
    entries = entries_of(arguments.recipes, arguments.then, corpus=corpus)
    if arguments.peer_original:
        like = entries[0].config
        assert like is not None
        entries.insert(0, original_entry(arguments.peer_original, like, more=arguments.original_flags.split()))
    fingerprint = open_corpus(corpus).fingerprint[:12]
    cases = list(itertools.product(range(arguments.seeds), entries))
    for number, (seed, entry) in enumerate(cases, 1):
        key = (entry.name, entry.settings, seed, fingerprint)
        if key in {(row.entry, row.settings, row.seed, row.corpus) for row in read_records()}:
            continue
        print(f"{entry.name}, seed {seed}: {number} of {len(cases)} ...", file=sys.stderr, flush=True)
        record = measure(entry, seed=seed, out=out, corpus=corpus)
        print(record, flush=True)
        if not arguments.trial:
            append_rows(RECORDS, Record._fields, [record])


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"speedrun: {error}")
    except KeyboardInterrupt:
        sys.exit("speedrun: stopped; the same command continues")
