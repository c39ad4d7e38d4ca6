"""Run `txl` commands in other processes and read their records, for programs that compare settings."""

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
"""Environment of the runs: one thread per rank and no GPU. It is copied when this module is imported, before a program
joins a process group and sets the variables of its own rank."""


class CommandError(TxlError, RuntimeError):
    """Raised if a command fails, with the end of its output."""


def flags_of(config: Config, *, base: Path) -> list[str]:
    """Return the flags that change the recipe `base` to these settings."""
    plain = dict(flat(load_config(base)))
    differing = {key: value for key, value in flat(config) if value != plain[key]}
    values = {key: value if isinstance(value, list) else [value] for key, value in differing.items()}
    return [word for key, words in values.items() for word in (f"--{key}", *map(str, words))]


def run_txl(*words: object) -> float:
    """Run a `txl` command on one thread and return its seconds. Raises CommandError if it fails."""
    command, began = [sys.executable, "-m", "txl_dist", *map(str, words)], time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    if result.returncode:
        last_words = f"{result.stdout[-1000:]}{result.stderr[-1000:]}"
        raise CommandError(f"{' '.join(command)} ended with {result.returncode}:", *last_words.splitlines())
    return time.monotonic() - began


def train(config: Config, *, base: Path) -> float:
    """Train the run of a recipe with these settings to its end, or resume it. Return the seconds of this start."""
    return run_txl("train", base, *flags_of(config, base=base))


def records_of(run: Path) -> list[dict[str, Any]]:
    """Return the records in a run's metrics.jsonl. A line that was cut by a kill is skipped, and lines after it are
    read."""
    found = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def records_in(run: Path, kind: str) -> dict[int, dict[str, Any]]:
    """Return the records of a kind by step, in order. If a resumed run wrote a step twice, the last record counts. The
    dictionary is empty before the run begins."""
    rows = records_of(run) if (run / "metrics.jsonl").is_file() else []
    found = {row["step"]: row for row in rows if row["kind"] == kind}
    return {step: found[step] for step in sorted(found)}


def seconds_of(run: Path) -> float:
    """Return the seconds of all starts of a run, each from its first record to its last. They include evaluations and
    checkpoints. They do not include the start of the processes (some seconds) and the pauses between two starts."""
    starts: list[list[float]] = []
    for record in records_of(run):
        if record.get("event") == "start":
            starts.append([])
        if starts and "time_s" in record:
            starts[-1].append(record["time_s"])
    return sum(times[-1] - times[0] for times in starts)


def starts_of(run: Path) -> list[dict[str, Any]]:
    """Return the record of each start of a run. Raises CommandError if the run was not started."""
    found = [record for record in records_of(run) if record.get("event") == "start"]
    if not found:
        raise CommandError(f"{run} has not been started")
    return found


def commits_of(run: Path) -> str:
    """Return the short hash of the commit that trained the run, in the form of `recording.commit`. There are several if
    it was resumed with other code."""
    told = [str(start.get("commit", "")) for start in starts_of(run)]
    return " ".join(dict.fromkeys(one[:7] + "+" * one.endswith("-dirty") for one in told))


def named(corpus: Corpus) -> str:
    """Return the name of a corpus and the first 8 digits of its fingerprint, which identify the corpus in rows."""
    return f"{corpus.name} {corpus.fingerprint[:8]}"


def cutoffs_below(cutoffs: Iterable[int], *, vocab_size: int) -> tuple[int, ...]:
    """Return the cutoffs below a vocabulary size. There are none for a vocabulary of bytes, which then has a plain
    softmax."""
    return tuple(one for one in cutoffs if one < vocab_size)


def mark_of(config: Config) -> str:
    """Return the first 8 digits of a hash of all settings, which identify the settings in rows."""
    return hashlib.sha256(json.dumps(dict(flat(config)), sort_keys=True, default=str).encode()).hexdigest()[:8]


def side_by_side(work: Callable[[_Item], None], items: Iterable[_Item], *, jobs: int) -> None:
    """Call `work` for all items, `jobs` of them in parallel. If a call fails, items that have not begun are skipped,
    and its error is raised.

    A line on standard error shows how many items are done.
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
