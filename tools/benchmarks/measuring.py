"""How the benchmarks measure: variants in turn in one process, memory in new processes, and ratios next to the figures.

Time. On a shared machine the same code can run 1.5 times slower a minute later. So the variants take turns. After one
warm-up call each, every round runs each variant once. The tables report the minimum over the rounds (the speed of the
code without disturbance), the median (its usual speed), and the ratios of both to a baseline of the same run.

Memory. A variant leaves freed pages to the variants after it. So each peak is measured in a new process. The benchmark
starts itself again with `--only VARIANT --measure memory` and reads the last line of the child's output.

    timings = interleaved({"plain": plain_step, "fused": fused_step}, rounds=6)
    peaks = {name: peak_in_fresh_process(name) for name in timings}          # the child prints peak_mib(step)
    print_table("stack A", rows(timings, base="plain", peaks=peaks))
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table


class Timing(NamedTuple):
    """Minimum and median over the rounds of one variant, in milliseconds."""

    min_ms: float
    median_ms: float


def interleaved(variants: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, Timing]:
    """Run each variant once to warm up. Then run all variants once per round and time them.

    On a GPU a run ends when the device has finished it.
    """
    times_ms: dict[str, list[float]] = {name: [] for name in variants}
    for action in variants.values():
        milliseconds(action)
    for _ in range(rounds):
        for name, action in variants.items():
            times_ms[name].append(milliseconds(action))
    return {name: Timing(min(times), statistics.median(times)) for name, times in times_ms.items()}


T = TypeVar("T")


def announced(sizes: Sequence[T], *, what: str) -> Iterator[T]:
    """Yield the sizes. Before each size print its position among all sizes on standard error."""
    for number, size in enumerate(sizes, 1):
        print(f"{what} {size}: {number} of {len(sizes)} ...", file=sys.stderr, flush=True)
        yield size


def milliseconds(action: Callable[[], object]) -> float:
    """Run `action` and return its milliseconds. On a GPU the device's work is included."""
    _wait_for_device()
    began = time.perf_counter()
    action()
    _wait_for_device()
    return (time.perf_counter() - began) * 1000


def speedup(timings: Mapping[str, Timing], name: str, *, base: str) -> Timing:
    """Return how many times faster a variant is than the baseline: (ratio of minima, ratio of medians)."""
    mine, theirs = timings[name], timings[base]
    return Timing(theirs.min_ms / mine.min_ms, theirs.median_ms / mine.median_ms)


def positive(word: str) -> int:
    """Return the number of a flag. Raises ArgumentTypeError if it is not a whole number of 1 or more."""
    try:
        number = int(word)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is not a whole number of 1 or more")
    return number


def add_measure_options(parser: argparse.ArgumentParser) -> None:
    """Add `--rounds` and `--json` to a parser, and the options `--only` and `--measure`, with which
    `peak_in_fresh_process` starts a benchmark again."""
    parser.add_argument("--rounds", type=positive, default=8, help="timed runs of each variant")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the figures there")
    parser.add_argument("--only", default=None, metavar="VARIANT", help="measure only this variant")
    parser.add_argument("--measure", choices=("all", "memory"), default="all")


def peak_mib(action: Callable[[], object], *, runs: int = 2) -> float:
    """Return by how many MiB memory grows while `action` runs. On a GPU it is torch's allocated memory, otherwise the
    resident memory.

    Memory that was allocated before the call is not counted. Call it in a new process (`peak_in_fresh_process`).
    """
    import torch  # here, because gpu.py counts seconds and needs no torch itself

    small = torch.ones(64, 64, requires_grad=True)
    (small @ small).sum().backward()  # allocates buffers of the libraries before the measurement
    if torch.cuda.is_available():
        _wait_for_device()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _repeat(action, runs)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    resident_peak_mib()
    before_kib = _status_kib("VmRSS")
    _repeat(action, runs)
    return (_status_kib("VmHWM") - before_kib) / 1024


def resident_peak_mib() -> float:
    """Return the largest resident memory of this process since the last call, in MiB."""
    peak = _status_kib("VmHWM") / 1024
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    return peak


def print_peak(peak: float) -> None:
    """Print the peak as JSON, in the last line of the child of `peak_in_fresh_process`."""
    print(json.dumps({"peak_mib": peak}))


def peak_in_fresh_process(variant: str, *, arguments: Sequence[str] = ()) -> float:
    """Return the peak memory of one variant in MiB. The program is run again with its own arguments, followed by
    `arguments`.

    Raises RuntimeError with the end of the child's error output if the child fails.
    """
    program = sys.modules["__main__"].__spec__
    assert program is not None, "start the benchmark with `python -m`"
    command = [sys.executable, "-m", program.name, *sys.argv[1:], *arguments, "--only", variant, "--measure", "memory"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}:\n{child.stderr[-2000:]}")
    return float(json.loads(child.stdout.splitlines()[-1])["peak_mib"])


def rows(
    timings: Mapping[str, Timing],
    *,
    base: str,
    peaks: Mapping[str, float] | None = None,
    more: Mapping[str, Mapping[str, object]] | None = None,
) -> list[dict[str, object]]:
    """Return a row per variant: times, speed-ups over `base`, peaks in MiB and as a share of the base's peak, then the
    columns of `more`."""
    table = []
    for name, timing in timings.items():
        by_min, by_median = speedup(timings, name, base=base)
        row: dict[str, object] = {"variant": name, "min ms": timing.min_ms, "median ms": timing.median_ms}
        row |= {"x by min": by_min, "x by median": by_median}
        if peaks is not None:
            row |= {"peak MiB": peaks[name], "of base": peaks[name] / peaks[base]}
        table.append(row | dict((more or {}).get(name, {})))
    return table


def print_table(title: str, table: Sequence[Mapping[str, Any]]) -> None:
    """Print a table to the console, with numbers rounded to significant digits. The columns are those of the first
    row."""
    drawn = Table(title=title)
    for column in table[0]:
        drawn.add_column(column, justify="left" if isinstance(table[0][column], str) else "right")
    for row in table:
        drawn.add_row(*(_text(value) for value in row.values()))
    Console(width=150).print(drawn)


def write_json(path: Path, tables: Mapping[str, Iterable[Mapping[str, object]]], **facts: object) -> None:
    """Write all tables by title, with the version of torch, the number of threads and other facts."""
    import torch  # here, because gpu.py counts seconds and needs no torch itself

    content = {"torch": torch.__version__, "threads": torch.get_num_threads(), **facts}
    content["tables"] = {title: list(table) for title, table in tables.items()}
    path.write_text(json.dumps(without_nan(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def without_nan(value: Any) -> Any:
    """Return the value with None in place of floats that are not finite, because JSON has no NaN."""
    if isinstance(value, Mapping):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.{0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2}f}"


def _repeat(action: Callable[[], object], runs: int) -> None:
    for _ in range(runs):
        action()
    _wait_for_device()


def _wait_for_device() -> None:
    import torch  # here, because gpu.py counts seconds and needs no torch itself

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _status_kib(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return int(found[1])
