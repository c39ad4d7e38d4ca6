"""Measure how long a run takes to end: after the death or the freezing of a rank, and after a request to stop.

    python -m tools.benchmarks.measure_ends [--trials 5] [--ranks 2]
    python -m tools.benchmarks.measure_ends --trials 1 --ranks 1 --cases "the file RUN/STOP"       the smallest size

The program starts `txl launch` on a small corpus several times and causes the fault while the run makes steps of about
50 ms. For each case it prints the seconds until the last of the other ranks has ended, and the seconds until `txl
launch` has ended, as median and maximum. It runs on CPUs only.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tools.benchmarks.measuring import announced, positive

SETTINGS = """
[data]
path = "corpus"
eval_split = ""
[model]
num_layers = 4
width = 128
num_heads = 4
head_width = 32
ff_width = 512
cutoffs = []
[train]
num_lanes = 16
segment_len = 64
memory_len = 64
microbatch_lanes = 4
max_steps = 100000
[engine]
precision = "fp32"
timeout_s = 4
[metrics]
log_every_steps = 1
"""
FROZEN = "a rank is stopped by SIGSTOP (engine.timeout_s = 4)"
Strike = Callable[[psutil.Process, list[psutil.Process], Path], psutil.Process | None]
"""A function that causes a fault. It gets the launcher, the ranks and the run's folder. It returns the rank that it has
killed or frozen, or None."""


def kill(victim: int) -> Strike:
    """Return a function that kills a rank with SIGKILL."""

    def strike(_: psutil.Process, ranks: list[psutil.Process], run: Path) -> psutil.Process:
        ranks[victim].kill()
        return ranks[victim]

    return strike


def freeze(_: psutil.Process, ranks: list[psutil.Process], run: Path) -> psutil.Process:
    """Stop the last rank with SIGSTOP, so that it exists but does nothing."""
    ranks[-1].send_signal(signal.SIGSTOP)
    return ranks[-1]


def stop_file(_: psutil.Process, ranks: list[psutil.Process], run: Path) -> None:
    """Create the file RUN/STOP, which every rank obeys."""
    (run / "STOP").touch()


def terminate(launcher: psutil.Process, ranks: list[psutil.Process], run: Path) -> None:
    """Send SIGTERM to `txl launch`, as a scheduler does."""
    launcher.terminate()


CASES: dict[str, Strike] = {
    "kill -9 of rank 0": kill(0),
    "kill -9 of the last rank": kill(-1),
    FROZEN: freeze,
    "the file RUN/STOP": stop_file,
    "SIGTERM to txl launch": terminate,
}


def prepare_corpus(folder: Path) -> None:
    """Write ends.toml and the corpus that it names."""
    (folder / "ends.toml").write_text(SETTINGS, encoding="utf-8")
    text = "\n\n".join(f"text {number} " * 200 for number in range(200))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    words = ["prepare", "text.txt", "--out", "corpus", "--tokenizer", "byte", "--documents", "blank_line"]
    command = [sys.executable, "-m", "txl_dist", *words, "--valid-fraction", "0.1"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def start_launcher(folder: Path, run: Path, *words: str, num_ranks: int) -> subprocess.Popen[bytes]:
    """Start `txl launch ends.toml`, with its output in the file `output`. Return the launcher once the run trains."""
    words = ("launch", "--num_accelerators", str(num_ranks), "ends.toml", "--run.dir", str(run), *words)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": path}
    log = run / "log.txt"
    num_before = log.stat().st_size if log.exists() else 0
    with (folder / "output").open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "txl_dist", *words], cwd=folder, env=environment, stdout=output, stderr=output
        )
    while not log.exists() or b"  train  " not in log.read_bytes()[num_before:]:
        if process.poll() is not None:
            sys.exit((folder / "output").read_text())
        time.sleep(0.05)
    return process


def launched_ranks(launcher: psutil.Process) -> list[psutil.Process]:
    """Return the processes that the launcher has started as ranks, in the order of the ranks."""
    found = [child for child in launcher.children(recursive=True) if any("--local_rank=" in w for w in child.cmdline())]
    of_rank = {child.environ()["RANK"]: child for child in found if "deepspeed.launcher.launch" not in child.cmdline()}
    return [of_rank[rank] for rank in sorted(of_rank, key=int)]


def measure(folder: Path, strike: Strike, *, num_ranks: int) -> tuple[float, float, int]:
    """Run one trial. Return (seconds until the other ranks had ended, seconds until `txl launch` had ended, exit code
    of `txl launch`)."""
    run = folder / f"run-{random.getrandbits(40)}"
    process = start_launcher(folder, run, num_ranks=num_ranks)
    launcher = psutil.Process(process.pid)
    time.sleep(random.random())
    ranks = launched_ranks(launcher)
    start_s = time.monotonic()
    dead = strike(launcher, ranks, run)
    waiting = [rank for rank in ranks if rank != dead]
    ranks_s = 0.0
    while process.poll() is None or waiting:
        waiting = [rank for rank in waiting if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
        ranks_s = ranks_s or (0.0 if waiting else time.monotonic() - start_s)
        time.sleep(0.02)
    return ranks_s, time.monotonic() - start_s, process.returncode


def main() -> None:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=positive, default=5, help="runs of each case")
    parser.add_argument(
        "--ranks", type=positive, default=2, help="ranks of each run; a case that ends one rank needs two"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="; ".join(CASES))
    arguments = parser.parse_args()
    print("| what | trials | other ranks gone, s | txl launch gone, s | exit code |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_corpus(folder)
        for case in announced(arguments.cases, what="case"):
            found = [measure(folder, CASES[case], num_ranks=arguments.ranks) for _ in range(arguments.trials)]
            ranks_s, launch_s, codes = zip(*found, strict=True)
            times = (f"{statistics.median(values):.1f}, at most {max(values):.1f}" for values in (ranks_s, launch_s))
            print(
                f"| {case} | {len(found)} | {' | '.join(times)} | {', '.join(map(str, sorted(set(codes))))} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
