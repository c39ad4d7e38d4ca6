"""Compare a run that is killed several times with an uninterrupted run, and with runs of other seeds.

    python -m tools.experiments.long_run configs/quickstart.toml --data data/stdlib --steps 2000 --out runs/long
    python -m tools.experiments.long_run --table    write the table of notebook/results.md, and its picture

The runs of one recipe use two ranks and fp32, and run one after the other:

    unbroken    from its first step to its last, without interruption
    killed      SIGKILL to all its processes at `--kills` random steps; the same command resumes it each time
    moved       killed at as many other steps; after one of the kills it resumes with one rank, and after a later kill
                with two ranks again
    seed N      uninterrupted, with other seeds: shows how far equal runs differ by chance

All training losses as they were written, and the exported weights, are compared with those of the unbroken run. With
the same number of ranks they must be equal bit for bit. A run with rows in the records is not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tools.benchmarks.measuring import announced
from tools.experiments.recording import (
    NOTEBOOK,
    append_rows,
    markdown,
    origin,
    picture,
    put_table,
    read_rows,
    spread,
)
from tools.experiments.trainings import ENVIRONMENT, named, records_in, run_txl
from txl_dist.artifacts import list_checkpoints, step_of
from txl_dist.config.load import Config, changed, config_to_toml, load_config
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.errors import TxlError

RECORDS, PAGE, PLOT = NOTEBOOK / "long_run.csv", NOTEBOOK / "results.md", NOTEBOOK / "long_run.svg"
BEGIN = "<!-- table: python -m tools.experiments.long_run --table -->"
UNBROKEN, KILLED, MOVED = "unbroken", "killed", "moved"
RANKS, SAVE_EVERY, NUM_EVALUATIONS = 2, 100, 20
_HEAD = ("run", "starts on ranks", "killed behind step", "validation loss at the end, nats", "beside the unbroken run")


class Record(NamedTuple):
    """A row of the records: a point of a run, or a result of the whole run."""

    run: str
    kind: str
    """`evaluated`: `value` is the validation loss. `killed`: the step from which the run resumed. `losses` and
    `weights`: the sha256 of the training losses and of the exported weights. `same`: the comparison with the unbroken
    run."""
    step: int
    ranks: int
    value: str
    recipe: str
    steps: int
    corpus: str
    seed: int
    commit: str
    cpu: str
    date: str


class Kill(NamedTuple):
    """When to kill a run, and how to resume it."""

    step: int
    """The run is killed up to a second after the record of this step was written."""
    ranks: int
    """Number of ranks of the next start."""


def kills_of(run: str, *, steps: int, count: int, seed: int) -> list[Kill]:
    """Return the kills of a run in the order of the steps. The moved run resumes once with 1 rank and later with
    `RANKS` ranks again."""
    if run not in (KILLED, MOVED):
        return []
    chance = random.Random(f"{run} {seed}")
    moments = sorted(chance.sample(range(steps // 20, steps - steps // 20), count))
    first, last = sorted(chance.sample(range(1, count), 2)) if run == MOVED else (count, count)
    return [Kill(step, 1 if first <= index < last else RANKS) for index, step in enumerate(moments)]


def train(config: Config, kills: Sequence[Kill], *, place: Path) -> list[tuple[Kill, int]]:
    """Train from the beginning to the end with all kills. Return each kill with the step from which the next start
    resumed.

    Raises TxlError if the run ends unexpectedly or fails.
    """
    shutil.rmtree(place, ignore_errors=True)
    settings, log = place.with_suffix(".toml"), place.with_suffix(".log")
    settings.write_text(config_to_toml(config), encoding="utf-8")
    chance, resumed = random.Random(place.name), []
    for kill, ranks in zip([*kills, None], [RANKS, *(kill.ranks for kill in kills)], strict=True):
        child = _start(settings, ranks=ranks, log=log)
        while kill and child.poll() is None and max(records_in(place, "train"), default=0) < kill.step:
            time.sleep(0.2)
        is_alive = child.poll() is None
        if kill and is_alive:
            time.sleep(chance.random())
            _kill(child)
        code = child.wait()
        if kill and not (is_alive and code == -signal.SIGKILL):
            raise TxlError(f"{place.name} ended with {code} before it was killed after step {kill.step}; see {log}.")
        if kill:
            resumed.append((kill, max(map(step_of, list_checkpoints(place)), default=0)))
        elif code:
            raise TxlError(f"{place.name} ended with {code}; see {log}.")
    return resumed


def _start(settings: Path, *, ranks: int, log: Path) -> subprocess.Popen[bytes]:
    """Start the run. Each rank has one thread."""
    command = [sys.executable, "-m", "txl_dist", "launch", "--num_accelerators", str(ranks), str(settings)]
    with log.open("ab") as file:
        return subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants."""
    parent = psutil.Process(child.pid)
    for process in [parent, *parent.children(recursive=True)]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    child.wait()


def losses_of(place: Path) -> dict[int, float]:
    """Return the training losses by step, as they were written."""
    return {step: one["loss"] for step, one in records_in(place, "train").items()}


def weights_of(place: Path) -> str:
    """Return the sha256 of the exported weights. Raises TxlError if the export fails."""
    bundle = place / "bundle"
    if not bundle.is_dir():
        run_txl("export", place, bundle)
    digest = hashlib.sha256()
    for path in sorted(bundle.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compare(place: Path, *, base: Path) -> str:
    """Return in words how the training losses and the weights of a run agree with those of the unbroken run."""
    ours, theirs = losses_of(place), losses_of(base)
    is_same = weights_of(place) == weights_of(base)
    if ours == theirs and is_same:
        return f"all {len(theirs)} training losses and weights bit for bit"
    weights = "weights bit for bit" if is_same else "weights not"
    if missing := theirs.keys() - ours:
        return f"lacks the training loss of step {min(missing)}, {weights}"
    alike = list(itertools.takewhile(lambda step: ours[step] == theirs[step], theirs))
    if len(alike) == len(theirs):
        return f"all {len(theirs)} training losses bit for bit, {weights}"
    return f"training losses bit for bit as far as step {alike[-1] if alike else 0}, {weights}"


def measure(run: str, config: Config, *, kills: Sequence[Kill], out: Path, recipe: str) -> list[Record]:
    """Train a run and compare it with the unbroken run. Return its rows. Raises TxlError."""
    if run in (KILLED, MOVED) and not (out / UNBROKEN).is_dir():
        raise TxlError(f"{out} has no unbroken run to compare with. Type its folder with --out, or remove its rows.")
    place = out / run.replace(" ", "_")
    died = train(changed(config, {"run.dir": str(place)}), kills, place=place)
    shared: dict[str, Any] = {"recipe": recipe, "steps": config.train.max_steps, "seed": config.run.seed}
    shared |= {"corpus": named(open_corpus(config.data.path))} | origin()
    rows = [
        Record(run, "evaluated", step, RANKS, f"{one['loss']:.6f}", **shared)
        for step, one in sorted(records_in(place, "eval").items())
    ]
    digests = {"losses": hashlib.sha256(json.dumps(losses_of(place)).encode()).hexdigest()}
    digests["weights"] = weights_of(place)
    rows += [Record(run, kind, config.train.max_steps, RANKS, value, **shared) for kind, value in digests.items()]
    rows += [Record(run, "killed", kill.step, kill.ranks, str(step), **shared) for kill, step in died]
    if run in (KILLED, MOVED):
        said = compare(place, base=out / UNBROKEN)
        rows.append(Record(run, "same", config.train.max_steps, RANKS, said, **shared))
    return rows


def groups_of(records: Sequence[Record]) -> dict[str, dict[str, list[Record]]]:
    """Return the rows by group and run. A group has the same recipe, steps and corpus. These are named only for groups
    after the first."""
    found: dict[str, dict[str, list[Record]]] = {}
    for row in records:
        about = (row.recipe, row.steps, row.corpus)
        is_first = about == (records[0].recipe, records[0].steps, records[0].corpus)
        what = "" if is_first else f", {row.recipe}, {row.steps} steps, {row.corpus}"
        found.setdefault(what, {}).setdefault(row.run, []).append(row)
    return found


def table_of(records: Sequence[Record]) -> list[str]:
    """Return the Markdown table, a row per run."""
    lines, closing = [], []
    for what, runs in groups_of(records).items():
        ends = {name: _curve(rows)[-1][1] for name, rows in runs.items()}
        for name, rows in runs.items():
            died = [row for row in rows if row.kind == "killed"]
            said = next((row.value for row in rows if row.kind == "same"), "")
            said += f"{'; ' if said else ''}{ends[name] - ends[UNBROKEN]:+.4f} at the end" if name != UNBROKEN else ""
            ranks = ", ".join(str(count) for count in (RANKS, *(row.ranks for row in died)))
            killed = ", ".join(f"{row.step} (on from {row.value})" for row in died)
            lines.append([f"{name}{what}", ranks, killed, f"{ends[name]:.4f}", said])
        seeds = [end for name, end in ends.items() if name not in (KILLED, MOVED)]
        closing += ["", f"Unbroken runs of all seeds{what}: {spread(seeds, digits=4)}."]
    return [*markdown(_HEAD, lines), *closing]


def _curve(rows: Sequence[Record]) -> list[tuple[int, float]]:
    return [(row.step, float(row.value)) for row in rows if row.kind == "evaluated"]


def draw(records: Sequence[Record], *, out: Path) -> None:
    """Draw the validation losses of all runs over their steps, with a line where a run was killed."""
    colours = {UNBROKEN: "#2f7ed8", KILLED: "#d9680f", MOVED: "#2e9b4f"}
    with picture(out, width=8.4, height=3.4) as figure:
        axes = figure.subplots()
        grouped = [(what, name, rows) for what, runs in groups_of(records).items() for name, rows in runs.items()]
        for what, name, rows in grouped:
            steps, losses = zip(*_curve(rows), strict=True)
            style = "--" if name in (KILLED, MOVED) else "-"
            look = {"color": colours.get(name, "#bbbbbb"), "zorder": 2 + (name in colours)}
            axes.plot(steps, losses, style, label=f"{name}{what}", **look)
            for row in rows:
                if row.kind == "killed":
                    axes.axvline(row.step, color=colours[name], linewidth=0.8, linestyle=":")
        axes.set(xlabel="step", ylabel="validation loss, nats per token")
        axes.legend()


def main() -> None:
    """Make the runs that have no rows, or write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", help="TOML file of the recipe")
    parser.add_argument("--data", type=Path, help="folder of the corpus")
    parser.add_argument("--out", type=Path, default=Path("runs/long"), help="folder for the runs")
    parser.add_argument("--steps", type=int, default=2_000, help="steps of every run")
    parser.add_argument("--kills", type=int, default=5, help="number of kills of the runs killed and moved")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the runs, and of the steps at which they are killed"
    )
    parser.add_argument(
        "--more-seeds", type=int, default=2, metavar="N", help="number of unbroken runs with other seeds"
    )
    parser.add_argument(
        "--trial", action="store_true", help="print the rows without adding them to notebook/long_run.csv"
    )
    parser.add_argument("--table", action="store_true", help="write the table and draw the picture")
    arguments = parser.parse_args()
    if arguments.table:
        records = read_rows(RECORDS, Record)
        put_table(PAGE, BEGIN, table_of(records))
        draw(records, out=PLOT)
        return
    if not (arguments.recipe and arguments.data):
        parser.error("type the file of a recipe, and --data with the folder of a corpus")
    if arguments.kills < 3:  # two kills after the first change the number of ranks
        parser.error("--kills must be 3 or more")
    if arguments.steps < 10 * arguments.kills:  # the steps of the kills differ and are not near the ends
        parser.error(f"--steps {arguments.steps} is too few for {arguments.kills} kills")
    corpus = open_corpus(arguments.data)
    # Trials, and runs with other steps or texts, are never compared with this unbroken run.
    words = [
        arguments.recipe.stem,
        str(arguments.steps),
        corpus.fingerprint[:8],
        *(["trial"] if arguments.trial else []),
    ]
    out = arguments.out.resolve() / "-".join(words)
    out.mkdir(parents=True, exist_ok=True)
    every = {"eval.every_steps": arguments.steps // NUM_EVALUATIONS, "checkpoint.every_steps": SAVE_EVERY}
    every |= {"metrics.log_every_steps": 1, "metrics.sample_every_steps": 0, "train.max_steps": arguments.steps}
    shared = {**every, "engine.precision": "fp32", "data.path": str(arguments.data.resolve())}
    base = changed(load_config(arguments.recipe), shared)
    seeds = {name: arguments.seed for name in (UNBROKEN, KILLED, MOVED)}
    seeds |= {f"seed {seed}": seed for seed in range(arguments.seed + 1, arguments.seed + 1 + arguments.more_seeds)}
    records = [] if arguments.trial else read_rows(RECORDS, Record)
    known = {(row.run, row.recipe, row.steps, row.corpus) for row in records}
    for run in announced(list(seeds), what="run"):
        if (run, arguments.recipe.stem, arguments.steps, named(corpus)) in known:
            print(f"{run}: recorded in {RECORDS}")
            continue
        kills = kills_of(run, steps=arguments.steps, count=arguments.kills, seed=arguments.seed)
        config = changed(base, {"run.seed": seeds[run]})
        rows = measure(run, config, kills=kills, out=out, recipe=arguments.recipe.stem)
        print(*rows, sep="\n", flush=True)
        if not arguments.trial:
            append_rows(RECORDS, Record._fields, rows)


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"long_run: {error}")
