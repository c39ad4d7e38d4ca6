"""Compare our training with the original authors' code: the same initial weights, and the same tokens at every step.

    python -m tools.experiments.parity data/tinyshakespeare --original DIR          add to notebook/parity.csv
    python -m tools.experiments.parity data/tinyshakespeare --original DIR --check  20 steps without dropout: the same?
    python -m tools.experiments.parity --table      the tables of notebook/results.md and notebook/parity.svg

DIR is the folder `pytorch` of their code. A pair is one seed on one corpus:

    theirs    their train.py, run by benchmarks/original_train.py with the flags of `SIZES`. It draws the initial
              weights. Before its first step all batches of its iterator are compared with our lanes (batch rows), and
              the run ends if an id differs.
    ours      `txl train` with `run.init`, the same weights after `txl import`. Sizes, batch, steps, Adam, learning
              rate, clipping and dropout rates are the same. Dropout draws other random numbers, so the two curves are
              two samples.
    scored    the weights of both at the same steps, with `txl evaluate` on the whole split `valid`, with memory.

Both programs run on one thread and take turns of some seconds. The other program is stopped during a turn, so that load
on the machine slows both equally. Two clocks measure the program's own turns: elapsed seconds, and CPU seconds, which
the table shows. Both clocks begin after the first step, and include everything that the program does during training,
also saving weights.

`--steps` sets fewer steps than those of the sizes. It shows the result of their program with a schedule for the time in
which ours makes all steps. The second table compares the two.

A pair that is recorded is not run again. A pair that was trained but not scored is scored. A pair that was interrupted
during training begins again, because their program cannot restore its memory. Training lasts at most one epoch, because
at its end their iterator begins with an empty memory and ours does not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

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
from tools.experiments.trainings import ENVIRONMENT, records_in, run_txl
from txl_dist.config.load import Config, config_to_toml, load_config
from txl_dist.data.loader.corpora import open_corpora
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.data.loader.stream import LaneStream
from txl_dist.errors import ConfigError, DataError, TxlError
from txl_dist.inference.bundle import load_bundle

RECORDS, PAGE, PLOT = NOTEBOOK / "parity.csv", NOTEBOOK / "results.md", NOTEBOOK / "parity.svg"
BEGIN = "<!-- table: python -m tools.experiments.parity --table -->"
BEGIN_EQUAL_SECONDS = "<!-- table: python -m tools.experiments.parity --table (equal seconds) -->"
LEAST_SEEDS = 3
TURN_S = 5.0
NUM_POINTS = 5
"""Number of points of a curve. A point is a step at which weights are saved and scored. The points are evenly spaced
and include the last step."""
EVALUATION = ("--split", "valid", "--num-lanes", "8")
"""Flags of `txl evaluate` for both programs."""
THEIRS, OURS = "original", "txl_dist"
CHECK_TOLERANCE = 1e-5
"""Largest allowed relative difference of a training loss with `--check`."""


class Size(NamedTuple):
    """Settings that both programs get."""

    num_layers: int
    num_heads: int
    head_width: int
    width: int
    ff_width: int
    cutoffs: tuple[int, ...]
    dropout: float
    attention_dropout: float
    num_lanes: int
    segment_len: int
    memory_len: int
    lr: float
    max_steps: int
    clip_norm: float = 0.25


SIZES = {
    "tinyshakespeare": Size(4, 4, 32, 128, 512, (), 0.1, 0.0, 16, 64, 64, 1e-3, 900),
    "wikitext-2": Size(4, 4, 32, 128, 512, (4000, 12000), 0.1, 0.0, 16, 64, 64, 2.5e-4, 900),
}
"""Settings by the name of the corpus' folder. A run has at most one epoch, and a pair takes about ten minutes of one
core. The learning rate for words is the authors' rate for their base model of WikiText-103. At 1e-3 without warm-up,
one of three seeds did not begin to learn in either program, so that the result depended on the seed
(notebook/log.md)."""


def checked_size(size: Size) -> Size:
    """Return the settings for `--check`: without dropout, narrow, and 20 steps long."""
    size = size._replace(num_layers=2, num_heads=2, head_width=16, width=32, ff_width=64)
    return size._replace(dropout=0.0, attention_dropout=0.0, num_lanes=4, max_steps=20)


def points_of(size: Size) -> list[int]:
    """Return the steps that are scored."""
    return [size.max_steps * index // NUM_POINTS for index in range(1, NUM_POINTS + 1)]


# Theirs


def words_of(size: Size, *, seed: int, place: Path) -> list[str]:
    """Return the arguments of their program. There is no warm-up, which is their default, because with a warm-up their
    first update has the full learning rate."""
    flags = {
        "n_layer": size.num_layers, "n_head": size.num_heads, "d_head": size.head_width, "d_model": size.width,
        "d_inner": size.ff_width, "dropout": size.dropout, "dropatt": size.attention_dropout, "optim": "adam",
        "lr": size.lr, "scheduler": "cosine", "warmup_step": 0, "clip": size.clip_norm, "batch_size": size.num_lanes,
        "tgt_len": size.segment_len, "eval_tgt_len": size.segment_len, "mem_len": size.memory_len, "seed": seed,
        "max_step": size.max_steps, "eval-interval": size.max_steps, "log-interval": size.max_steps + 1,
        "dataset": "wt103", "work_dir": place / "log",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [*words, *(["--adaptive"] if size.cutoffs else [])]


def lane_segments(config: Config) -> Iterator[np.ndarray]:
    """Yield the ids [lanes, T+1] of each step of our run, from the first step."""
    train = config.train
    corpora = open_corpora(config.data, num_lanes=train.num_lanes, seed=config.run.seed)
    lanes = range(train.num_lanes)
    return (
        one.tokens for one, _ in LaneStream(corpora.train, corpora.begin, segment_len=train.segment_len, lanes=lanes)
    )


def check_batches(batches: Any, config: Config) -> None:
    """Compare the batches of their iterator, (data [T, B], target [T, B], T), with our lanes, step by step.

    Raises DataError if ids differ, and ConfigError if the steps are more than an epoch.
    """
    steps, theirs = config.train.max_steps, iter(batches)
    data_TB: Any
    target_TB: Any
    for step, tokens in zip(range(steps), lane_segments(config), strict=False):
        data_TB, target_TB, length = next(theirs, (None, None, 0))
        if length != config.train.segment_len:
            raise ConfigError(
                f"train.max_steps={steps} is more than an epoch of {step} whole batches. Take fewer steps."
            )
        for name, found, ours in (("input", data_TB, tokens[:, :-1]), ("target", target_TB, tokens[:, 1:])):
            if not np.array_equal(found.t().numpy(), ours):
                lane, position = np.argwhere(found.t().numpy() != ours)[0]
                raise DataError(
                    f"step {step}, lane {lane}, position {position}: their {name} is another id than ours. "
                    "Prepare a training split of one document: ours come in an order of their own."
                )


class Recorded:
    """Their training iterator, extended: it records each finished step, and saves the model at the scored steps."""

    def __init__(self, batches: Any, *, place: Path, points: Sequence[int], variables: dict[str, Any]) -> None:
        """Wrap their batches. `variables` are the global variables of their program, and `place` is the folder to write
        to."""
        self._batches, self._place, self._variables = batches, place, variables
        self._points, self._loss = {0, *points}, 0.0

    def __iter__(self) -> Iterator[Any]:
        """Yield their batches. A step is the time between two batches."""
        for step, batch in enumerate(self._batches):
            self.note(step)
            yield batch

    def note(self, step: int) -> None:
        """Record that `step` steps are finished."""
        total = self._variables["train_loss"]  # their sum of losses over steps
        row = {"step": step, "time_s": time.time(), "loss": total - self._loss}
        self._loss = total
        with (self._place / "steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if step in self._points:
            path = self._place / f"step-{step}.pt"
            torch.save(self._variables["model"], path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)


class LastStep:
    """Replaces their validation iterator. They evaluate after the last step, and this iterator then ends their
    program."""

    def __init__(self, recorded: Recorded, step: int) -> None:
        self._recorded, self._step = recorded, step

    def __iter__(self) -> Iterator[Any]:
        self._recorded.note(self._step)
        raise SystemExit(0)


def train_theirs(folder: Path, *, place: Path, config: Config) -> None:
    """Run their program in this process, which is a child of this tool."""
    from tools.benchmarks.original_train import prepare, run_train
    from tools.benchmarks.peers import load

    job = json.loads((place / "job.json").read_text(encoding="utf-8"))
    size = Size(**job["size"])
    path = prepare(folder)
    make = load("data_utils", path).LMOrderedIterator
    variables: dict[str, Any] = {}
    corpus = open_corpus(config.data.path)
    ids = torch.from_numpy(corpus.split("train").read_all().astype("int64"))
    check_batches(make(ids, size.num_lanes, size.segment_len), config)
    kept: list[Recorded] = []

    def get_iterator(split: str, *words: Any, **named: Any) -> Any:
        if split == "train":
            batches = make(ids, *words, **named)
            kept.append(Recorded(batches, place=place, points=points_of(size), variables=variables))
            return kept[0]
        return LastStep(kept[0], size.max_steps)

    data = ModuleType("data_utils")
    shown = SimpleNamespace(vocab=range(corpus.vocab_size), get_iterator=get_iterator)
    data.get_lm_corpus = lambda folder, dataset: shown  # type: ignore[attr-defined]
    words = words_of(size, seed=config.run.seed, place=place)
    run_train(path, words, cutoffs=size.cutoffs, data=data, variables=variables)


# Ours


def our_config(size: Size, *, corpus: Path, seed: int, place: Path, model: dict[str, Any] | None = None) -> Config:
    """Return the settings of our run. `model` is the section of the imported weights, or None if it is not known
    yet."""
    own = {"dropout": size.dropout, "attention_dropout": size.attention_dropout}
    own |= {f"{name}_dropout": -1.0 for name in ("embed", "distance", "projection", "ff", "output")}
    optim = {"name": "adam", "lr": size.lr, "schedule": "cosine_from_start", "clip_norm": size.clip_norm}
    train = {"num_lanes": size.num_lanes, "microbatch_lanes": size.num_lanes, "segment_len": size.segment_len}
    train |= {"memory_len": size.memory_len, "max_steps": size.max_steps}
    every = size.max_steps // NUM_POINTS
    return Config.model_validate(
        {
            "run": {"dir": str(place / "run"), "seed": seed, "init": str(place / "begin") if model else ""},
            "data": {"path": str(corpus), "eval_split": ""},
            "model": (model or {}) | own,
            "optim": optim,
            "train": train,
            "engine": {"zero_stage": 0, "num_threads": 1},
            "checkpoint": {"every_steps": every, "keep_last": NUM_POINTS},
            "metrics": {"log_every_steps": 1, "tensorboard": False},
        }
    )


# Clocks


class Turn(NamedTuple):
    """A period of time in which one program ran while the other one was stopped."""

    begin: float
    end: float
    """Begin and end of the turn, in seconds since 1970."""
    cpu_begin: float
    cpu_end: float
    """CPU seconds of the program at the begin and at the end of the turn."""


def spent(turns: Sequence[Turn], moment: float) -> tuple[float, float]:
    """Return (elapsed seconds, CPU seconds) of a program up to a moment. Within a turn the CPU seconds are interpolated
    linearly."""
    wall, cpu = 0.0, turns[0].cpu_begin
    for turn in turns:
        if moment <= turn.begin:
            break
        length = min(moment, turn.end) - turn.begin
        wall += length
        cpu = turn.cpu_begin + (turn.cpu_end - turn.cpu_begin) * length / max(turn.end - turn.begin, 1e-9)
    return wall, cpu


def take_turn(child: psutil.Process, *, seconds: float, until: Path | None = None) -> Turn:
    """Continue a stopped program for `seconds`, until its end, or until the file `until` exists. Then stop the program
    again."""
    begin, cpu_begin = time.time(), _cpu_seconds(child)
    child.resume()
    while not _has_ended(child) and time.time() < begin + seconds and not (until and until.exists()):
        time.sleep(0.02)
    if not _has_ended(child):
        child.suspend()
    return Turn(begin, time.time(), cpu_begin, _cpu_seconds(child))


def _cpu_seconds(child: psutil.Process) -> float:
    times = child.cpu_times()
    return float(times.user + times.system)


def _has_ended(child: psutil.Process) -> bool:
    return bool(child.status() == psutil.STATUS_ZOMBIE)  # an ended child stays a zombie until its exit code is read


# A pair


def job_of(size: Size, *, corpus: Path) -> dict[str, Any]:
    """Return the settings and the corpus of a pair, as job.json stores them. A corpus that was prepared again can have
    another fingerprint."""
    job = {"size": size._asdict(), "data": open_corpus(corpus).fingerprint}
    return dict(json.loads(json.dumps(job)))


def train_pair(folder: Path, size: Size, *, corpus: Path, seed: int, place: Path) -> None:
    """Train both programs in turns and write turns.json to `place`. Raises TxlError if a program fails."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "job.json").write_text(json.dumps(job_of(size, corpus=corpus)), encoding="utf-8")
    plain = our_config(size, corpus=corpus, seed=seed, place=place)
    (place / "lanes.toml").write_text(config_to_toml(plain), encoding="utf-8")
    program = [sys.executable, "-m", "tools.experiments.parity", "--theirs", str(place)]
    program += ["--original", str(folder)]
    children, turns = {THEIRS: _start(program, log=place / "theirs.log")}, {THEIRS: list[Turn](), OURS: list[Turn]()}
    try:
        drawn = place / "step-0.pt"
        turns[THEIRS].append(take_turn(_view(children[THEIRS]), seconds=1800.0, until=drawn))
        if not drawn.exists():
            raise TxlError(f"theirs ended before its first step; see {place / 'theirs.log'}.")
        begin = _imported(drawn, bundle=place / "begin", corpus=corpus, size=size)
        model = load_bundle(begin).model.section.model_dump()
        ours = our_config(size, corpus=corpus, seed=seed, place=place, model=model)
        (place / "ours.toml").write_text(config_to_toml(ours), encoding="utf-8")
        command = [sys.executable, "-m", "txl_dist", "train", str(place / "ours.toml")]
        children[OURS] = _start(command, log=place / "ours.log")
        views = {name: _view(child) for name, child in children.items()}
        while running := [name for name, view in views.items() if not _has_ended(view)]:
            for name in running:
                turns[name].append(take_turn(views[name], seconds=TURN_S))
    finally:
        for child in children.values():
            if child.poll() is None:
                child.kill()
                child.wait()
    for name, child in children.items():
        if child.wait():
            raise TxlError(f"{name} ended with {child.returncode}; see the logs in {place}.")
    (place / "turns.json").write_text(json.dumps(turns), encoding="utf-8")


def _start(command: Sequence[str], *, log: Path) -> subprocess.Popen[bytes]:
    """Start a program and stop it at once. It has its own process group, so that the kernel ends it if this process is
    killed."""
    with log.open("wb") as file:
        child = subprocess.Popen(
            command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0
        )
    psutil.Process(child.pid).suspend()
    return child


def _view(child: subprocess.Popen[bytes]) -> psutil.Process:
    return psutil.Process(child.pid)


def _imported(weights: Path, *, bundle: Path, corpus: Path, size: Size) -> Path:
    lengths = ("--segment-len", size.segment_len, "--memory-len", size.memory_len)
    run_txl("import", weights, bundle, "--format", "original", "--vocab", corpus / "tokenizer.json", *lengths)
    return bundle


def losses_of(place: Path) -> dict[str, dict[int, tuple[float, float]]]:
    """Return for both programs, by finished steps, (moment, training loss of the step)."""
    theirs = [json.loads(line) for line in (place / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = {THEIRS: theirs[1:], OURS: list(records_in(place / "run", "train").values())}
    return {name: {row["step"]: (row["time_s"], row["loss"]) for row in rows} for name, rows in kept.items()}


def score_pair(size: Size, *, corpus: Path, place: Path) -> Iterator[tuple[str, int, float, float, float]]:
    """Yield (program, step, elapsed seconds, CPU seconds, validation loss in nats per token) of each point of both
    curves."""
    turns = {
        name: [Turn(*one) for one in rows] for name, rows in json.loads((place / "turns.json").read_text()).items()
    }
    for name, rows in losses_of(place).items():
        wall_0, cpu_0 = spent(turns[name], rows[1][0])
        for step in points_of(size):
            wall, cpu = spent(turns[name], rows[step][0])
            scored = place / f"run/checkpoints/step_{step:09d}"
            if name == THEIRS:
                scored = _imported(place / f"step-{step}.pt", bundle=place / f"bundle-{step}", corpus=corpus, size=size)
            results = place / f"{name}-{step}.json"
            if not results.exists():
                run_txl("evaluate", scored, "--data", corpus, *EVALUATION, "--json", results)
            loss = json.loads(results.read_text(encoding="utf-8"))["model"]["loss"]
            yield name, step, wall - wall_0, cpu - cpu_0, loss


def check(folder: Path, size: Size, *, corpus: Path, place: Path) -> float:
    """Train both programs with small settings and without dropout. Return the largest relative difference of a step's
    training loss."""
    small = checked_size(size)
    train_pair(folder, small, corpus=corpus, seed=1, place=place)
    theirs, ours = (losses_of(place)[name] for name in (THEIRS, OURS))
    assert list(theirs) == list(ours) == list(range(1, small.max_steps + 1))
    for step, (_, loss) in theirs.items():
        print(f"step {step:>3}   original {loss:.7f}   txl_dist {ours[step][1]:.7f}")
    return max(abs(ours[step][1] / loss - 1) for step, (_, loss) in theirs.items())


# Records


class Record(NamedTuple):
    """A point of a curve, which is a row of the records."""

    corpus: str
    seed: int
    program: str
    step: int
    seconds: float
    """Elapsed seconds of the program's own turns, after the end of its first step."""
    cpu_seconds: float
    """CPU seconds in the same period."""
    held_out_nats: float
    """Validation loss in nats per token."""
    settings: str
    data: str
    commit: str
    cpu: str
    torch: str
    date: str


def read_records() -> list[Record]:
    """Return the records of the repository."""
    return read_rows(RECORDS, Record)


def measure(folder: Path, size: Size, *, corpus: Path, seed: int, out: Path) -> list[Record]:
    """Train and score a pair, and return its rows. Raises TxlError."""
    place = out / f"{corpus.name}-{seed}"
    job = place / "job.json"
    is_same = job.is_file() and json.loads(job.read_text(encoding="utf-8")) == job_of(size, corpus=corpus)
    if not (is_same and (place / "turns.json").is_file()):
        train_pair(folder, size, corpus=corpus, seed=seed, place=place)
    common = {
        "settings": settings_of(size),
        "data": open_corpus(corpus).fingerprint[:12],
        "torch": version("torch"),
    } | origin()
    rows = []
    for program, step, wall, busy, loss in score_pair(size, corpus=corpus, place=place):
        numbers = {"seconds": round(wall, 2), "cpu_seconds": round(busy, 2), "held_out_nats": round(loss, 5)}
        rows.append(Record(corpus=corpus.name, seed=seed, program=program, step=step, **numbers, **common))  # type: ignore[arg-type]
        print(
            f"{corpus.name}, seed {seed}, {program:<8} step {step:>5} {wall:8.1f} s {busy:8.1f} s {loss:.5f}",
            flush=True,
        )
    return rows


def settings_of(size: Size) -> str:
    """Return all settings that both programs get, in one line."""
    return " ".join(f"{name}={value}" for name, value in size._asdict().items()).replace(", ", ",")


# The table and the picture

_HEAD = (
    "corpus", "pairs", "original, nats", "txl_dist, nats", "difference of the means",
    "deviation of a pair's", "original, s", "txl_dist, s", "times as fast", "s to the original's last loss",
    "original behind at equal s, nats", "at most 0.01 nats apart",
)  # fmt: skip


class Pair(NamedTuple):
    """The two curves of a seed, in the order of the steps."""

    theirs: list[Record]
    ours: list[Record]


def pairs_of(records: Sequence[Record]) -> dict[tuple[str, str, str], list[Pair]]:
    """Return the pairs by corpus, settings and data."""
    found: dict[tuple[str, str, str], dict[int, dict[str, list[Record]]]] = {}
    for row in records:
        seeds = found.setdefault((row.corpus, row.settings, row.data), {})
        seeds.setdefault(row.seed, {}).setdefault(row.program, []).append(row)
    return {
        key: [Pair(*(sorted(one[name], key=lambda row: row.step) for name in (THEIRS, OURS))) for one in seeds.values()]
        for key, seeds in found.items()
    }


def rate_of(row: Record) -> float:
    """Return the learning rate of both programs."""
    return float(dict(word.split("=") for word in row.settings.split())["lr"])


def seconds_to(curve: Sequence[Record], loss: float) -> float | None:
    """Return the CPU seconds until a loss is reached, interpolated between two points. Return None if it is not
    reached."""
    for before, after in itertools.pairwise(curve):
        if after.held_out_nats <= loss < before.held_out_nats:
            share = (before.held_out_nats - loss) / (before.held_out_nats - after.held_out_nats)
            return before.cpu_seconds + share * (after.cpu_seconds - before.cpu_seconds)
    return curve[0].cpu_seconds if curve[0].held_out_nats <= loss else None


def loss_at(curve: Sequence[Record], seconds: float) -> float:
    """Return the loss after `seconds` CPU seconds, interpolated between points. Outside the curve it is the loss of the
    nearest end."""
    return float(np.interp(seconds, [row.cpu_seconds for row in curve], [row.held_out_nats for row in curve]))


def table_of(records: Sequence[Record]) -> list[str]:
    """Return the Markdown table with a row per corpus: means over its pairs, with their standard deviation."""
    lines = []
    for (corpus, _, _), pairs in pairs_of(records).items():
        theirs, ours = ([curves[side][-1] for curves in pairs] for side in (0, 1))
        apart = [mine.held_out_nats - other.held_out_nats for other, mine in zip(theirs, ours, strict=True)]
        mean = statistics.fmean(apart)
        clocks = [[row.cpu_seconds for row in rows] for rows in (theirs, ours)]
        reached = [seconds_to(pair.ours, pair.theirs[-1].held_out_nats) for pair in pairs]
        known = [seconds for seconds in reached if seconds is not None]
        behind = [loss_at(pair.theirs, pair.ours[-1].cpu_seconds) - pair.ours[-1].held_out_nats for pair in pairs]
        cells = [
            f"{corpus}, {theirs[0].step} steps, rate {rate_of(theirs[0]):g}",
            str(len(pairs)),
            *(spread([row.held_out_nats for row in rows], digits=4) for rows in (theirs, ours)),
            f"{mean:+.4f}",
            f"{statistics.stdev(apart):.4f}" if len(apart) > 1 else "",
            *(spread(clock, digits=1) for clock in clocks),
            f"{statistics.fmean(clocks[0]) / statistics.fmean(clocks[1]):.2f}",
            (spread(known, digits=1) if known else "")
            + (f" ({len(pairs) - len(known)} never)" if len(known) < len(pairs) else ""),
            spread(behind, digits=4),
            ("yes" if abs(mean) <= 0.01 else "no") if len(pairs) >= LEAST_SEEDS else f"fewer than {LEAST_SEEDS} pairs",
        ]
        lines.append(cells)
    return markdown(_HEAD, lines)


_HEAD_EQUAL_SECONDS = (
    "corpus", "pairs", "original's steps, of", "its seconds to those of txl_dist", "original, nats", "txl_dist, nats",
    "original behind, nats",
)  # fmt: skip


def equal_seconds_table(records: Sequence[Record]) -> list[str]:
    """Return the Markdown table that compares their program with fewer planned steps and ours with more, from the same
    initial weights.

    The seconds of their program are those of its longer runs in turns with ours, for the shorter number of steps.
    """
    groups = pairs_of(records)
    lines = []
    for (shorter, theirs), (longer, ours) in itertools.permutations(groups.items(), 2):
        steps, of = theirs[0].theirs[-1].step, ours[0].ours[-1].step
        if told_but_steps(shorter) != told_but_steps(longer) or steps >= of:
            continue
        planned = {pair.theirs[-1].seed: pair.theirs[-1].held_out_nats for pair in theirs}
        both = [(planned[pair.ours[-1].seed], pair) for pair in ours if pair.ours[-1].seed in planned]
        if not both:
            continue
        pace = statistics.fmean(pair.theirs[-1].cpu_seconds / pair.ours[-1].cpu_seconds for _, pair in both)
        reached = [pair.ours[-1].held_out_nats for _, pair in both]
        cells = [
            f"{shorter[0]}, rate {rate_of(ours[0].ours[-1]):g}",
            str(len(both)),
            f"{steps}, {of}",
            f"{steps / of * pace:.3f}",
            spread([loss for loss, _ in both], digits=4),
            spread(reached, digits=4),
            spread([loss - our_loss for (loss, _), our_loss in zip(both, reached, strict=True)], digits=4, sign="+"),
        ]
        lines.append(cells)
    return markdown(_HEAD_EQUAL_SECONDS, lines) if lines else []


def told_but_steps(key: tuple[str, str, str]) -> tuple[str, str, str]:
    """Return the key of a group (corpus, settings, data) without the number of steps."""
    corpus, settings, data = key
    return corpus, " ".join(word for word in settings.split() if not word.startswith("max_steps=")), data


def write_table() -> None:
    """Write the tables of notebook/results.md and draw notebook/parity.svg."""
    records = read_records()
    put_table(PAGE, BEGIN, table_of(records) if records else [])
    put_table(PAGE, BEGIN_EQUAL_SECONDS, equal_seconds_table(records))
    if records:
        draw(records, out=PLOT)


def draw(records: Sequence[Record], *, out: Path) -> None:
    """Draw a row of diagrams per corpus: validation loss over steps, and over CPU seconds."""
    groups = pairs_of(records)
    with picture(out, width=8.4, height=3.1 * len(groups)) as figure:
        for axes, ((corpus, _, _), pairs) in zip(
            figure.subplots(len(groups), 2, squeeze=False), groups.items(), strict=True
        ):
            for axis, clock in zip(axes, ("step", "cpu_seconds"), strict=True):
                for side, colour in ((0, "#d9680f"), (1, "#2f7ed8")):
                    for index, pair in enumerate(pairs):
                        xs = [getattr(row, clock) for row in pair[side]]
                        ys = [row.held_out_nats for row in pair[side]]
                        label = pair[side][0].program if not index else None
                        axis.plot(xs, ys, color=colour, marker=".", label=label)
                axis.set(xlabel="seconds of one core" if clock == "cpu_seconds" else clock)
            axes[0].set(ylabel=f"{corpus}, rate {rate_of(pairs[0].ours[0]):g}: nats per token")
            axes[1].legend()


def main() -> None:
    """Measure the pairs without rows, check the losses, or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", type=Path, nargs="*", help=f"prepared corpora, in folders named {', '.join(SIZES)}")
    parser.add_argument("--original", type=Path, metavar="DIR", help="folder `pytorch` of the authors' code")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of the pairs")
    parser.add_argument("--steps", type=int, default=0, help="number of steps; 0 means those of the sizes")
    parser.add_argument("--out", type=Path, default=Path("runs/parity"), help="folder of the runs")
    parser.add_argument(
        "--trial", action="store_true", help="print the points without adding them to notebook/parity.csv"
    )
    parser.add_argument("--check", action="store_true", help="compare the losses of 20 small steps without dropout")
    parser.add_argument("--table", action="store_true", help="write the table and the picture from notebook/parity.csv")
    parser.add_argument("--theirs", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        write_table()
        return
    if arguments.original is None or not (arguments.corpora or arguments.theirs):
        parser.error("type the folder of a corpus, and --original DIR")
    if arguments.theirs:
        train_theirs(arguments.original, place=arguments.theirs, config=load_config(arguments.theirs / "lanes.toml"))
        return
    out, folder = arguments.out.resolve(), arguments.original.resolve()
    number, total = 0, len(arguments.seeds) * len(arguments.corpora)
    for seed in arguments.seeds:
        for corpus in (path.resolve() for path in arguments.corpora):
            number += 1
            if corpus.name not in SIZES:
                raise ConfigError(f"{corpus} is named none of {', '.join(SIZES)}. Prepare one of them.")
            size = SIZES[corpus.name]
            size = size._replace(max_steps=arguments.steps) if arguments.steps else size
            if size.max_steps % NUM_POINTS:
                raise ConfigError(f"--steps {size.max_steps} must be divisible by {NUM_POINTS}, the points of a curve.")
            if arguments.check:
                error = check(folder, size, corpus=corpus, place=out / f"{corpus.name}-check")
                print(f"{corpus.name}: largest relative difference {error:.1e}")
                if not error <= CHECK_TOLERANCE:
                    sys.exit(f"parity: the losses differ by more than {CHECK_TOLERANCE:.0e}")
                continue
            key = (corpus.name, seed, settings_of(size), open_corpus(corpus).fingerprint[:12])
            if (
                key in {(row.corpus, row.seed, row.settings, row.data) for row in read_records()}
                and not arguments.trial
            ):
                continue
            print(f"{corpus.name}, seed {seed}: {number} of {total} ...", file=sys.stderr, flush=True)
            rows = measure(folder, size, corpus=corpus, seed=seed, out=out)
            if not arguments.trial:
                append_rows(RECORDS, Record._fields, rows)
        if arguments.check:
            return


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        try:
            main()
        except TxlError as error:
            sys.exit(f"parity: {error}")
        except KeyboardInterrupt:
            sys.exit("parity: stopped; the same command continues")
