"""Measure `txl prepare` on a Ray cluster of two nodes on this machine: its gain, its memory, and the local pool's gain.

    python -m tools.benchmarks.prepare_cluster TEXT.jsonl [...] --tokenizer-file T [--megabytes 220] [--rounds 3]
    python -m tools.benchmarks.prepare_cluster TEXT.jsonl --tokenizer-file T --parts 10000       memory, no timing
    python -m tools.benchmarks.prepare_cluster TEXT.jsonl --megabytes 0.05 --rounds 1              the smallest, seconds

A line of a file is a JSON object with a `text`. If the files have less text than wanted, they are repeated with a
number before each document. All variants prepare the same files with the same tokenizer, which is `byte` without
`--tokenizer-file`. A cluster has one or two nodes with one CPU each, and no dashboard. It is started before the time
begins, and each of its processes has run once. The bar: the cluster gains at least 0.85 of what the pool gains from one
worker to two.

With `--parts`, the input is cut into this many parts. The tool prints the largest resident memory of the process that
starts the preparation, and the largest use of the object store, sampled 20 times per second.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.benchmarks.measuring import announced, positive
from tools.benchmarks.prepare import read_texts
from txl_dist.errors import TxlError

BAR = 0.85
MOST_MB = 300
_NUM_FILES = 8
_STORE_BYTES = 100 * 2**20
_SAMPLE_S = 0.05


def main() -> None:
    """Measure the gain, or with `--parts` the memory, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="file of JSON lines, each with a text")
    parser.add_argument("--megabytes", type=float, default=220.0, help="megabytes of text to use")
    parser.add_argument("--rounds", type=positive, default=3, help="timed runs of each variant")
    parser.add_argument("--tokenizer-file", type=Path, help="tokenizer to use instead of bytes")
    parser.add_argument("--parts", type=positive, help="measure the memory for this many parts")
    arguments = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_bytes = write_inputs(folder / "texts", arguments.files, num_bytes=int(arguments.megabytes * 1e6))
        settings: dict[str, Any] = {"inputs": [folder / "texts"], "valid_fraction": 0.0, "kind": "byte"}
        if arguments.tokenizer_file is not None:
            settings["tokenizer_path"] = arguments.tokenizer_file
            del settings["kind"]
        if arguments.parts:
            settings["block_bytes"] = max(1, num_bytes // arguments.parts)
            measure_memory(folder / "corpus", settings)
        else:
            measure_gain(folder / "corpus", settings, num_bytes=num_bytes, rounds=arguments.rounds)


def write_inputs(folder: Path, files: list[Path], *, num_bytes: int) -> int:
    """Write about `num_bytes` bytes of text as eight files of JSON lines. Returns the size of the files in bytes."""
    folder.mkdir()
    texts = read_texts(files, num_bytes=num_bytes)
    written = 0
    number = 0
    paths = [folder / f"{part}.jsonl" for part in range(_NUM_FILES)]
    streams = [path.open("w", encoding="utf-8") for path in paths]
    while written < num_bytes:
        text = texts[number % len(texts)]
        if number >= len(texts):
            text = f"{number} {text}"
        streams[number % _NUM_FILES].write(json.dumps({"text": text}) + "\n")
        written += len(text.encode())
        number += 1
    for stream in streams:
        stream.close()
    return sum(path.stat().st_size for path in paths)


def measure_gain(output: Path, settings: dict[str, Any], *, num_bytes: int, rounds: int) -> None:
    """Time the pool and the cluster with one and two workers in turns, and print rates and gains."""
    seconds: dict[str, list[float]] = {}
    for _ in announced(range(1, rounds + 1), what="round"):
        for count in (1, 2):
            seconds.setdefault(f"pool, {count}", []).append(timed(output, {**settings, "num_workers": count}))
            with ray_cluster(count) as address:
                taken = timed(output, {**settings, "cluster": f"ray={address}"})
            seconds.setdefault(f"cluster, {count}", []).append(taken)
    best = {name: min(times) for name, times in seconds.items()}
    print(f"{num_bytes / 1e6:.1f} MB of JSON lines, best of {rounds}")
    for name in sorted(best):
        print(f"  {name:<11} {best[name]:8.2f} s  {num_bytes / best[name] / 1e6:6.2f} MB/s")
    pool = best["pool, 1"] / best["pool, 2"]
    cluster = best["cluster, 1"] / best["cluster, 2"]
    print(f"  gain from 1 to 2: pool {pool:.2f}, cluster {cluster:.2f}, ratio {cluster / pool:.2f}  (bar: {BAR})")


def timed(output: Path, settings: dict[str, Any]) -> float:
    """Prepare a corpus and return the seconds."""
    from txl_dist.data.prepare.cluster import prepare_on_cluster
    from txl_dist.data.prepare.run import prepare_corpus

    prepare = prepare_on_cluster if "cluster" in settings else prepare_corpus
    begin = time.perf_counter()
    prepare(output, overwrite=True, **settings)
    return time.perf_counter() - begin


@contextmanager
def ray_cluster(num_nodes: int) -> Iterator[str]:
    """Start nodes with one CPU each, and yield the address of the cluster."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": _STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(**node)
        yield cluster.address
    finally:
        cluster.shutdown()


def measure_memory(output: Path, settings: dict[str, Any]) -> None:
    """Prepare on two nodes, and print the largest memory of this process and of the object store."""
    import ray

    stopped = threading.Event()
    used = [0.0]

    def sample() -> None:
        while not stopped.wait(_SAMPLE_S):
            if ray.is_initialized():
                total = ray.cluster_resources().get("object_store_memory", 0.0)
                used.append(total - ray.available_resources().get("object_store_memory", total))

    before = resident_mb()
    with ray_cluster(2) as address:
        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        seconds = timed(output, {**settings, "cluster": f"ray={address}"})
        stopped.set()
        thread.join()
    print(f"block_bytes {settings['block_bytes']:,}, {seconds:.0f} s")
    print(f"  this process: {before:.0f} MB before, at most {resident_mb():.0f} MB  (bar: {MOST_MB})")
    print(f"  object store: at most {max(used) / 1e6:.1f} MB  (bar: {MOST_MB})")


def resident_mb() -> float:
    """Return the largest resident memory of this process so far in megabytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"prepare_cluster: {error}")
