"""Time per generated token, beside another commit of this project, and beside Hugging Face's TransfoXL.

    python -m tools.benchmarks.decode [--against COMMIT_OR_FOLDER] [--huggingface PYTHON]

The quickstart's model with random weights, a vocabulary of 4,096, fp32, one thread; the past is read in segments of 64,
and tokens are drawn as `txl generate` draws them. Every variant runs in a process of its own that keeps its texts, and
they take turns: in each round each makes some more tokens.

    --against      a commit, which is unpacked into a temporary folder, or a folder with another checkout
    --huggingface  the Python of an environment with transformers 4.46.3 (check_huggingface.sh makes one): its own
                   forward with mems, over exported weights, without the last norm, which it does not know; both take
                   the likeliest token, and must take the same ones

    x by min, x by median   how many times as many tokens per second as the base line: the first row of the table
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.benchmarks.measuring import Timing, add_measure_options, interleaved, print_table, speedup, write_json
from txl_dist.config.schema import ModelSection
from txl_dist.convert.huggingface import export_huggingface
from txl_dist.convert.vocabulary import identity_tokenizer
from txl_dist.errors import ConfigError
from txl_dist.inference.bundle import Package
from txl_dist.model.transformer_xl import TransformerXL

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASES = {
    "memory 128": {"rows": 1, "memory": 128, "past": 256},
    "memory 4,096, past 4,096": {"rows": 1, "memory": 4096, "past": 4096},
    "memory 4,096, past 20,000": {"rows": 1, "memory": 4096, "past": 20_000},
    "16 rows, memory 128": {"rows": 16, "memory": 128, "past": 256},
}
TINY_CASES = {
    "memory 8": {"rows": 1, "memory": 8, "past": 12},
    "2 rows, memory 8": {"rows": 2, "memory": 8, "past": 12},
}
NUM_CHECKED = 16
"""Tokens that ours and Hugging Face's must both take."""


class Worker:
    """A process that generates: `tools/benchmarks/decode_worker.py`, with a Python and the folder of a package."""

    def __init__(self, job: dict[str, Any], folder: Path, *, python: str, package: Path) -> None:
        self.cases = job["cases"]
        file = Path(tempfile.mkstemp(suffix=".json", dir=folder)[1])
        file.write_text(json.dumps(job), encoding="utf-8")
        self.command = [python, str(HERE / "decode_worker.py"), str(file)]
        self.process = subprocess.Popen(
            self.command,
            env={"PYTHONPATH": f"{package}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    def __call__(self, case: str, num_tokens: int) -> int:
        """Make so many tokens of each row; the id of the last one of the first row."""
        assert self.process.stdin is not None
        print(case, num_tokens, file=self.process.stdin, flush=True)
        return int(self._line())

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self.command)} ended; its message stands above")
        return line


def unpacked(commit: str, folder: Path, *, parts: tuple[str, ...] = ("txl_dist",)) -> Path:
    """Parts of the repository as they were at a commit, or the folder itself that is named."""
    if Path(commit).is_dir():
        return Path(commit)
    archive = subprocess.run(["git", "archive", commit, *parts], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise ConfigError(f"--against {commit} is neither a folder nor a commit: {archive.stderr.decode().strip()}.")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def exported(section: ModelSection, *, vocab_size: int, segment_len: int, out: Path) -> None:
    """The weights that the worker draws too, as Hugging Face's."""
    torch.manual_seed(0)
    package = Package(
        section=section,
        weights=TransformerXL(section, vocab_size=vocab_size).state_dict(),
        tokenizer=identity_tokenizer(vocab_size),
        segment_len=segment_len,
        memory_len=1,
        source={},
        probe={},
    )
    export_huggingface(out, package)


def check_agreement(workers: dict[str, Worker]) -> None:
    """Whether all take the same tokens."""
    for case in next(iter(workers.values())).cases:
        taken = [[worker(case, 1) for _ in range(NUM_CHECKED)] for worker in workers.values()]
        assert taken[0] == taken[1], f"{case}: {taken}"


def table_of(timings: dict[str, Timing], *, num_rows: dict[str, int], num_tokens: int) -> list[dict[str, object]]:
    """A row per case and variant: times of a token of all its rows, tokens per second, times the base's."""
    base, table = next(iter(timings)), []
    for name, timing in timings.items():
        more = num_rows[name] / num_rows[base]
        by_min, by_median = speedup(timings, name, base=base)
        row: dict[str, object] = {"case": name, "min ms": timing.min_ms / num_tokens}
        row |= {"median ms": timing.median_ms / num_tokens}
        row |= {"tokens per s": num_rows[name] * num_tokens / timing.min_ms * 1000}
        table.append(row | {"x by min": by_min * more, "x by median": by_median * more})
    return table


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT_OR_FOLDER")
    parser.add_argument("--huggingface", metavar="PYTHON")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each row in a round")
    parser.add_argument("--tiny", action="store_true", help="a size that is over in seconds, to try the program")
    add_measure_options(parser)
    arguments = parser.parse_args()
    section = ModelSection(
        num_layers=4,
        width=128,
        num_heads=4,
        head_width=32,
        ff_width=512,
        cutoffs=(512, 2048),
        pre_norm=True,
        final_norm=arguments.huggingface is None,
        dropout=0.0,
    )
    cases = TINY_CASES if arguments.tiny else CASES
    alone = {case: sizes for case, sizes in cases.items() if sizes["rows"] == 1}
    job: dict[str, Any] = {"section": section.model_dump(mode="json"), "vocab_size": 4096, "segment_len": 64}
    job |= {"cases": cases, "sampling": {"temperature": 0.8, "top_k": 40}}
    workers = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.huggingface:
            job |= {"cases": alone, "sampling": {"temperature": 0.0}}
            exported(section, vocab_size=4096, segment_len=64, out=folder / "theirs")
            theirs = job | {"huggingface": str(folder / "theirs")}
            workers["huggingface"] = Worker(theirs, folder, python=arguments.huggingface, package=ROOT)
        elif arguments.against:
            package = unpacked(arguments.against, folder)
            workers[arguments.against] = Worker(job | {"cases": alone}, folder, python=sys.executable, package=package)
        workers["ours"] = Worker(job, folder, python=sys.executable, package=ROOT)
        if arguments.huggingface:
            check_agreement(workers)
        actions = {
            f"{case}: {who}": partial(worker, case, arguments.tokens)
            for case in cases
            for who, worker in workers.items()
            if case in worker.cases
        }
        timings = interleaved(actions, rounds=arguments.rounds)
        for worker in workers.values():
            worker.close()
    num_rows = {name: cases[name.partition(":")[0]]["rows"] for name in timings}
    table = table_of(timings, num_rows=num_rows, num_tokens=arguments.tokens)
    title = f"generation, quickstart's sizes, fp32, 1 thread, {arguments.rounds} rounds of {arguments.tokens} tokens"
    print_table(title, table)
    if arguments.json:
        write_json(arguments.json, {title: table})


if __name__ == "__main__":
    main()
