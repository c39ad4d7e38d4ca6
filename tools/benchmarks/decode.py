"""Measure the time per generated token, and compare it with another commit of this project or with Hugging Face's
TransfoXL.

    python -m tools.benchmarks.decode [--against COMMIT_OR_FOLDER] [--huggingface PYTHON]
    python -m tools.benchmarks.decode --bf16 [--size quickstart | wide]

The model has the sizes of the quickstart, random weights and a vocabulary of 4,096. It runs in fp32 on one thread,
reads the text before the first token in segments of 64 tokens, and samples tokens as `txl generate` does. Every variant
runs in its own process, which keeps the state of its texts. The variants take turns: in each round each of them
generates some more tokens.

    --against      a commit, which is unpacked into a temporary folder, or a folder with another checkout
    --huggingface  the Python of an environment with transformers 4.46.3 (check_huggingface.sh makes it).
                   transformers runs its own forward pass with mems over the exported weights. The model then has no
                   final norm, because TransfoXL has none. Both programs take the most likely token, and the tokens
                   must be equal.
    --bf16         compares bf16 with fp32 in each case, the baseline of the case
    --size wide    6 layers of width 512 instead of the sizes of the quickstart

    x by min, x by median   tokens per second, as a multiple of those of the baseline (the first row of the table)
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
QUICKSTART = ModelSection(
    num_layers=4,
    width=128,
    num_heads=4,
    head_width=32,
    ff_width=512,
    cutoffs=(512, 2048),
    pre_norm=True,
    final_norm=True,
    dropout=0.0,
)
WIDE = QUICKSTART.model_copy(update={"num_layers": 6, "width": 512, "num_heads": 8, "head_width": 64, "ff_width": 2048})
SIZES = {"quickstart": QUICKSTART, "wide": WIDE}
NUM_CHECKED = 16
"""Number of generated tokens that must be equal in our program and in Hugging Face's."""


class Worker:
    """A process that generates tokens with `tools/benchmarks/decode_worker.py`, a given Python and the folder of a
    package."""

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
        """Generate `num_tokens` tokens of each row of a case. Return the id of the last token of the first row."""
        assert self.process.stdin is not None
        print(case, num_tokens, file=self.process.stdin, flush=True)
        return int(self._line())

    def close(self) -> None:
        """End the process and wait for its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self.command)} ended. Read its message above.")
        return line


def unpacked(commit: str, folder: Path, *, parts: tuple[str, ...] = ("txl_dist",)) -> Path:
    """Unpack parts of the repository at a commit into `folder`, and return it. If `commit` names a folder, return that
    folder."""
    if Path(commit).is_dir():
        return Path(commit)
    archive = subprocess.run(["git", "archive", commit, *parts], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise ConfigError(f"--against {commit} is neither a folder nor a commit: {archive.stderr.decode().strip()}.")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def exported(section: ModelSection, *, vocab_size: int, segment_len: int, out: Path) -> None:
    """Write the random weights that the worker also uses, in the format of Hugging Face."""
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
    """Raise AssertionError if the workers do not generate the same tokens."""
    for case in next(iter(workers.values())).cases:
        taken = [[worker(case, 1) for _ in range(NUM_CHECKED)] for worker in workers.values()]
        assert taken[0] == taken[1], f"{case}: {taken}"


def table_of(timings: dict[str, Timing], *, num_rows: dict[str, int], num_tokens: int) -> list[dict[str, object]]:
    """Return a row per case and variant: time for one token of every row, tokens per second, and the multiple of the
    baseline."""
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
    """Start the workers, measure all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT_OR_FOLDER")
    parser.add_argument("--huggingface", metavar="PYTHON")
    parser.add_argument("--bf16", action="store_true", help="compare bf16 with fp32")
    parser.add_argument("--size", choices=SIZES, default="quickstart", help="sizes of the model")
    parser.add_argument("--tokens", type=int, default=32, help="tokens that each row generates in a round")
    parser.add_argument("--tiny", action="store_true", help="use a tiny size that takes seconds, to try the program")
    add_measure_options(parser)
    arguments = parser.parse_args()
    if arguments.bf16 and (arguments.huggingface or arguments.against):
        parser.error("--bf16 compares with fp32 only: remove --huggingface and --against")
    section = SIZES[arguments.size].model_copy(update={"final_norm": arguments.huggingface is None})
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
        if arguments.bf16:
            workers["ours, bf16"] = Worker(job | {"dtype": "bfloat16"}, folder, python=sys.executable, package=ROOT)
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
    table = []
    groups = [timings]
    if arguments.bf16:
        groups = [{name: t for name, t in timings.items() if name.startswith(f"{case}:")} for case in cases]
    for group in groups:
        table += table_of(group, num_rows=num_rows, num_tokens=arguments.tokens)
    title = f"generation, sizes {arguments.size}, 1 thread, {arguments.rounds} rounds of {arguments.tokens} tokens"
    print_table(title, table)
    if arguments.json:
        write_json(arguments.json, {title: table})


if __name__ == "__main__":
    main()
