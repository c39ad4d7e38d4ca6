"""Trainings in processes of their own: for tools that compare settings."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from txl_dist.config.load import Config, flat, load_config
from txl_dist.data.loader.corpus import Corpus
from txl_dist.errors import TxlError

_Item = TypeVar("_Item")

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""Of the runs, a thread per rank and no GPU: as it is before a process measures, and is a rank of its own job."""


class CommandError(TxlError, RuntimeError):
    """A command failed; its last words."""


def flags_of(config: Config, *, base: Path) -> list[str]:
    """Words of a command line that make of a recipe these settings."""
    plain = dict(flat(load_config(base)))
    differing = {key: value for key, value in flat(config) if value != plain[key]}
    values = {key: value if isinstance(value, list) else [value] for key, value in differing.items()}
    return [word for key, words in values.items() for word in (f"--{key}", *map(str, words))]


def run_txl(*words: object) -> float:
    """A command, on one thread; its seconds. Raises CommandError if it fails."""
    command, began = [sys.executable, "-m", "txl_dist", *map(str, words)], time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    if result.returncode:
        last_words = f"{result.stdout[-1000:]}{result.stderr[-1000:]}"
        raise CommandError(f"{' '.join(command)} ended with {result.returncode}:", *last_words.splitlines())
    return time.monotonic() - began


def train(config: Config, *, base: Path) -> float:
    """The run of a recipe with these settings, to its end, from where it stopped; the seconds of this start."""
    return run_txl("train", base, *flags_of(config, base=base))


def records_of(run: Path) -> list[dict[str, Any]]:
    """What a run has written into metrics.jsonl; a line that a kill has cut is none, and others may stand behind it."""
    found = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def records_in(run: Path, kind: str) -> dict[int, dict[str, Any]]:
    """Those of a kind by step, in order; of what a run that went on wrote twice, the last. None before it begins."""
    rows = records_of(run) if (run / "metrics.jsonl").is_file() else []
    found = {row["step"]: row for row in rows if row["kind"] == kind}
    return {step: found[step] for step in sorted(found)}


def seconds_of(run: Path) -> float:
    """How long its starts took together, each from its first record to its last: evaluations and checkpoints are in
    it, the start of the processes (some seconds) and the pauses between two starts are not."""
    starts: list[list[float]] = []
    for record in records_of(run):
        if record.get("event") == "start":
            starts.append([])
        if starts and "time_s" in record:
            starts[-1].append(record["time_s"])
    return sum(times[-1] - times[0] for times in starts)


def starts_of(run: Path) -> list[dict[str, Any]]:
    """What it has written of each of its starts. Raises CommandError if there was none."""
    found = [record for record in records_of(run) if record.get("event") == "start"]
    if not found:
        raise CommandError(f"{run} has not been started")
    return found


def commits_of(run: Path) -> str:
    """Of the code that trained it, shortened as `recording.commit` is; several if it went on with other code."""
    told = [str(start.get("commit", "")) for start in starts_of(run)]
    return " ".join(dict.fromkeys(one[:7] + "+" * one.endswith("-dirty") for one in told))


def named(corpus: Corpus) -> str:
    """How rows tell a corpus: its name and the begin of its fingerprint."""
    return f"{corpus.name} {corpus.fingerprint[:8]}"


def cutoffs_below(cutoffs: Iterable[int], *, vocab_size: int) -> tuple[int, ...]:
    """Those that a vocabulary of so many ids has; none for bytes, which have a plain softmax."""
    return tuple(one for one in cutoffs if one < vocab_size)


def mark_of(config: Config) -> str:
    """How rows tell settings: the begin of a hash of all of them."""
    return hashlib.sha256(json.dumps(dict(flat(config)), sort_keys=True, default=str).encode()).hexdigest()[:8]


def side_by_side(work: Callable[[_Item], None], items: Iterable[_Item], *, jobs: int) -> None:
    """Do it for all, so many at a time; what has not begun when one fails is left. Raises what that one raised.

    A line on standard error says how many of them are done.
    """
    with ThreadPoolExecutor(jobs) as pool:
        try:
            futures = [pool.submit(work, item) for item in items]
            for number, one in enumerate(as_completed(futures), 1):
                one.result()
                print(f"{number} of {len(futures)} done", file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
