"""Compare the predicted memory of a rank with the measured memory.

    python -m tools.benchmarks.footprint --sizes 50 100 --stages 0 1 2 3

Every case is a run as a user starts it: `deepspeed --num_accelerators N --module txl_dist train CONFIG`. It makes a few
steps on a CPU in fp32, saves a checkpoint after the second step, and makes one more step while the checkpoint's copy
exists. No environment variable for the allocator is set. The program reads RssAnon of every rank every few
milliseconds. The measured memory is the peak of the rank that uses most, less the memory of a process that has only
imported the same modules. The predicted memory is the sum of `bytes_per_rank`, with the cluster shares of the actual
text.

A case is a size (about that many million parameters), a ZeRO stage, a number of ranks, micro-batches per step, a
softmax, recomputation of blocks on or off, and a recipe. The recipe is the paper's, XLNet's objective, or Muon with an
average of the weights and the modern block. All combinations of the flags run one after the other. The last line of
the output is the worst ratio.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.benchmarks.measuring import announced, print_table, write_json
from txl_dist.config.load import Config, config_from_dict, config_to_toml, plan_batch
from txl_dist.data.loader.corpus import Corpus, open_corpus
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.distributed.rendezvous import free_port
from txl_dist.model.flops import count_parameters
from txl_dist.train.footprint.rank import bytes_per_rank
from txl_dist.vocabulary_clusters import cluster_edges, cluster_shares

VOCAB_SIZE, NUM_WORDS = 20_000, 400_000
CUTOFFS = {"plain": [], "adaptive": [2000, 8000]}
HEAD_WIDTH = 64
SHAPES = {5: (4, 128), 30: (6, 512), 50: (12, 512), 100: (11, 768), 200: (13, 1024)}
"""(layers, width) by size in millions of parameters, with the vocabulary above."""
SAMPLE_S = 0.004


class Case(NamedTuple):
    """One combination of the flags. `size` is in millions of parameters."""

    size: int
    stage: int
    ranks: int
    micro_batches: int
    softmax: str
    recompute: str
    recipe: str


RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "paper": ({}, {}),
    "xlnet": ({"any_order": True, "activation": "gelu", "share_biases": False, "scale_embedding": False}, {}),
    "modern": (
        {
            **{"norm": "rms", "activation": "relu2", "pre_norm": True, "final_norm": True, "query_key_norm": True},
            **{"residual_scalars": True, "value_residual": True},
        },
        {"name": "muon", "ema_decay": 0.98},
    ),
}
"""Settings of the sections [model] and [optim], by recipe."""


def main() -> None:
    """Measure all combinations of the flags and print the table."""
    options = _options()
    names = ("sizes", "stages", "ranks", "micro_batches", "softmax", "recompute", "recipes")
    factors = [getattr(options, name) for name in names]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        corpus, baseline = _make_corpus(folder), _baseline_bytes()
        rows = []
        for case in announced(list(itertools.starmap(Case, itertools.product(*factors))), what="case"):
            rows.append(_row(case, corpus, options, folder=folder, baseline=baseline))
            print(rows[-1], file=sys.stderr, flush=True)
    print_table(f"memory above the {baseline / 2**20:,.0f} MiB of a process that has only imported the modules", rows)
    worst = max((row["ratio"] for row in rows), key=lambda ratio: max(ratio, 1 / ratio))
    print(f"worst predicted / measured: {worst:.3f}")
    if options.json is not None:
        write_json(options.json, {"footprint": rows}, baseline_mib=baseline / 2**20)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 100, 200], choices=SHAPES)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], choices=range(4))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1])
    parser.add_argument("--softmax", nargs="+", default=["adaptive"], choices=CUTOFFS)
    parser.add_argument("--recompute", nargs="+", default=["off"], choices=("off", "on"))
    parser.add_argument("--recipes", nargs="+", default=["paper"], choices=RECIPES)
    parser.add_argument("--lanes", type=int, default=4, help="lanes (batch rows) of a micro-batch")
    parser.add_argument("--segment-len", type=int, default=64)
    parser.add_argument("--memory-len", type=int, default=64)
    parser.add_argument(
        "--synchronous", action="store_true", help="write checkpoints synchronously, without a copy in memory"
    )
    parser.add_argument(
        "--folder", type=Path, default=None, help="folder for the corpus and the checkpoints (several GB)"
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the figures there")
    return parser.parse_args()


def _row(case: Case, corpus: Corpus, options: argparse.Namespace, *, folder: Path, baseline: float) -> dict[str, Any]:
    config = _config(case, options, folder=folder)
    (folder / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    held = bytes_per_rank(
        config,
        plan=plan_batch(config.train, world_size=case.ranks),
        vocab_size=corpus.vocab_size,
        cluster_shares=cluster_shares(
            corpus.split("train").counts(), cluster_edges(config.model.cutoffs, vocab_size=corpus.vocab_size)
        ),
        on_gpu=False,
    )
    predicted, measured = sum(held.values()), _measured_bytes(case.ranks, folder=folder) - baseline
    parameters = count_parameters(config.model, vocab_size=corpus.vocab_size)
    return {
        **case._asdict(),
        "M params": parameters / 1e6,
        "predicted MiB": predicted / 2**20,
        "measured MiB": measured / 2**20,
        "ratio": predicted / measured,
    }


def _config(case: Case, options: argparse.Namespace, *, folder: Path) -> Config:
    layers, width = SHAPES[case.size]
    model, optim = RECIPES[case.recipe]
    objective: dict[str, Any] = {}
    if case.recipe == "xlnet":
        objective = {"objective": "permutation", "reuse_len": options.segment_len // 2}
    values = {
        "run": {"dir": str(Path(tempfile.mkdtemp(dir=folder)) / "run")},
        "data": {"path": str(folder / "corpus"), "eval_split": ""},
        "model": {
            "num_layers": layers,
            "width": width,
            "num_heads": width // HEAD_WIDTH,
            "head_width": HEAD_WIDTH,
            "ff_width": 4 * width,
            "cutoffs": CUTOFFS[case.softmax],
            **model,
        },
        "optim": optim,
        "train": {
            "num_lanes": options.lanes * case.micro_batches * case.ranks,
            "segment_len": options.segment_len,
            "memory_len": options.memory_len,
            "microbatch_lanes": options.lanes,
            "max_steps": 3,
            **objective,
        },
        "engine": {"zero_stage": case.stage, "activation_checkpointing": case.recompute == "on"},
        "checkpoint": {"every_steps": 2, "keep_last": 1, "asynchronous": not options.synchronous},
        "metrics": {"log_every_steps": 1},
    }
    return config_from_dict(values, source="footprint")


def _make_corpus(folder: Path) -> Corpus:
    """Write and prepare a corpus of words. The frequency of a word is proportional to its rank to the power -1.2, and
    each word occurs at least once."""
    weights = np.arange(1, VOCAB_SIZE + 1) ** -1.2
    drawn = np.random.default_rng(0).choice(VOCAB_SIZE, NUM_WORDS, p=weights / weights.sum())
    words = [f"w{number}" for number in (*range(VOCAB_SIZE), *drawn)]
    (folder / "text.txt").write_text(
        "\n".join(" ".join(words[start : start + 20]) for start in range(0, len(words), 20)), encoding="utf-8"
    )
    prepare_corpus(folder / "corpus", inputs=[folder / "text.txt"], kind="word", valid_fraction=0.0, num_workers=1)
    return open_corpus(folder / "corpus")


def _baseline_bytes() -> float:
    """Return the anonymous memory, in bytes, of a process that has only imported the modules of a rank."""
    program = (
        "import txl_dist.train.start; from txl_dist.train.engine.zero import import_deepspeed; import_deepspeed(); "
        "print(open('/proc/self/status').read())"
    )
    status = subprocess.run(
        [sys.executable, "-c", program], env=_environment(), capture_output=True, text=True, check=True
    )
    return _anonymous_bytes(status.stdout)


def _measured_bytes(ranks: int, *, folder: Path) -> float:
    """Run the case and return the peak of anonymous memory, in bytes, of the rank that uses most."""
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", str(ranks)]
    command += ["--master_port", str(free_port()), "--module", "txl_dist", "train", str(folder / "config.toml")]
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        launcher = subprocess.Popen(command, env=_environment(), stdout=log, stderr=subprocess.STDOUT)
        peak, looked_at = 0.0, 0.0
        pids: list[int] = []
        while launcher.poll() is None:
            if len(pids) < ranks and time.monotonic() > looked_at + 0.3:
                pids, looked_at = list(_rank_pids(launcher.pid)), time.monotonic()
            for pid in pids:
                try:
                    peak = max(peak, _anonymous_bytes(Path(f"/proc/{pid}/status").read_text(encoding="utf-8")))
                except (OSError, ValueError):  # the rank has ended
                    continue
            time.sleep(SAMPLE_S)
    if launcher.returncode != 0:
        raise RuntimeError((folder / "log.txt").read_text(encoding="utf-8")[-4000:])
    return peak


def _rank_pids(launcher: int) -> Iterator[int]:
    """Yield the process ids of the launcher's descendants that are ranks."""
    pids = [launcher]
    while pids:
        pid = pids.pop()
        try:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                pids += [int(child) for child in (thread / "children").read_text(encoding="utf-8").split()]
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"txl_dist" in words and b"train" in words and not any(b"deepspeed" in word for word in words):
            yield pid


def _anonymous_bytes(status: str) -> float:
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise ValueError(status)
    return float(found[1]) * 1024


def _environment() -> dict[str, str]:
    """Return this process's environment for a run on the CPU, without variables of another job and of the allocator."""
    strange = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in strange and not key.startswith("MALLOC_")}
    return kept | {
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }


if __name__ == "__main__":
    main()
