"""Hash the results that a change of the code must keep: losses, checkpoints, bundles and streams of small runs.

    python -m tools.checks.guard --out before.json              # on the commit before a change
    python -m tools.checks.guard --compare before.json          # on the commit after it; exit code 1 if they differ
    python -m tools.checks.guard --root CHECKOUT --out x.json   # hashes another checkout with this file

Each part prepares a corpus, trains, resumes from an older checkpoint, evaluates, exports and inspects the results. It
uses only the command line, so one version of this file can measure any commit. It runs with one thread and fixed seeds
on the CPU. `quickstart` is the first 60 steps of configs/quickstart.toml in fp32. `zero0` to `zero3` and `bf16` are
tiny runs on two ranks with different settings. Paths, times, versions of code and formats, and hashes of settings are
not compared. RENAMED maps today's names to those of version 0.2, so that a renamed setting or key is not a difference,
but a changed value is. The hashes are equal only on the same machine with the same versions of all packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TINY = """
[run]
dir = "run"
[data]
path = "corpus"
[model]
num_layers = 2
width = 32
num_heads = 2
head_width = 16
ff_width = 48
cutoffs = [60, 150]
div_value = 2
dropout = 0.1
[optim]
lr = 2e-3
clip_norm = 0.5
warmup_steps = 3
[train]
num_lanes = 4
segment_len = 8
memory_len = 12
microbatch_lanes = 1
max_steps = 12
[eval]
every_steps = 6
num_lanes = 2
[checkpoint]
every_steps = 4
[metrics]
log_every_steps = 1
"""
PARTS = {
    "quickstart": "--engine.precision fp32 --train.max_steps 60 --checkpoint.every_steps 20 "
    "--metrics.sample_every_steps 30 --metrics.log_every_steps 1 --eval.max_tokens 20000",
    "zero0": "--engine.zero_stage 0 --model.positions learned_relative --model.num_distances 12 --optim.name lamb",
    "zero1": "--engine.zero_stage 1 --data.document_border mask --model.attention_dropout 0.1",
    "zero2": "--engine.zero_stage 2 --model.same_length memory --model.clamp_len 10 --optim.name adam "
    "--model.share_biases False --engine.activation_checkpointing True",
    "zero3": "--engine.zero_stage 3 --model.pre_norm True --model.final_norm True --checkpoint.asynchronous False "
    "--data.more_paths second --data.weights 3 1",
    "bf16": "--engine.precision bf16 --train.max_steps 4 --checkpoint.every_steps 2 --eval.every_steps 0 "
    "--eval.max_tokens 64",
}
# Keys of a row of metrics.jsonl that are compared. The others measure the machine.
NUMBERS = ("loss", "lr", "grad_norm", "tokens_seen", "tokens", "epoch", "loss_by_position", "memory_gain")
NO_FACTS = {
    *("checkpoint", "run", "path", "code_version", "bytes"),  # paths, authors, and sizes that depend on them
    *("config_fingerprint", "config_sha256", "self_sha256"),  # hashes of texts that contain names
    *("format_version", "version"),
}
"""Keys of JSON whose values can differ between two commits with equal results."""


class Renamed(NamedTuple):
    """A key of JSON that was renamed after version 0.2."""

    old: str
    new: str
    values: tuple[tuple[Any, Any], ...] = ()
    """(old value, new value) of the values that were renamed too. All other values are the same."""


RENAMED: tuple[Renamed, ...] = (
    Renamed("kind", "kind", (("look", "memory"),)),
    Renamed("rest", "unread"),
    Renamed("stage", "phase"),
    Renamed("document_border", "document_mask", (("carry", False), ("mask", True))),
)
"""Every renamed key of a JSON file or of a row of metrics.jsonl, in any file."""


class Workplace:
    """A temporary folder for the runs, and the command line of the package in `root`."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.folder = folder
        for name, seed in (("corpus", 1), ("second", 2)):
            write_documents(folder / f"{name}.jsonl", seed=seed)

    def txl(self, *words: str) -> str:
        """Run `python -m txl_dist` with these arguments, and return its standard output."""
        return self._run([sys.executable, "-m", "txl_dist", *words])

    def train(self, *words: str) -> None:
        """Train to the end on two ranks with DeepSpeed's launcher."""
        launcher = str(Path(sys.executable).parent / "deepspeed")
        port = ["--num_accelerators", "2", "--master_port", str(free_port())]
        self._run([launcher, *port, "--module", "txl_dist", "train", *words])

    def _run(self, command: list[str]) -> str:
        rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {key: value for key, value in os.environ.items() if key not in rank} | {
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(self.root),
        }
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        if done.returncode != 0:
            said = (done.stdout + done.stderr)[-4000:]
            raise SystemExit(f"{said}\nexit code {done.returncode} of {' '.join(command)}")
        return done.stdout


def write_documents(path: Path, *, seed: int) -> None:
    """Write 200 documents of 1 to 60 words from a vocabulary with skewed frequencies."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("etaoinshrdlu\u00e9\u4e2d", k=generator.randint(1, 9))) for _ in range(300)]
    weights = [1 / rank for rank in range(1, 301)]
    lines = [
        json.dumps({"text": " ".join(generator.choices(words, weights, k=generator.randint(1, 60)))})
        for _ in range(200)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_part(place: Workplace, name: str) -> dict[str, Any]:
    """Run one part and return its results: prepare, train, inspect, resume from an older checkpoint, inspect, evaluate,
    export and generate."""
    if name == "quickstart":
        corpora = {"data/stdlib": ["stdlib", "--vocab-size", "4096"]}
        config, run = str(place.root / "configs" / "quickstart.toml"), place.folder / "runs" / "quickstart"
    else:
        corpora = {
            "corpus": ["corpus.jsonl", "--tokenizer", "byte", "--shard-len", "4000"],
            "second": ["second.jsonl", "--tokenizer-file", "corpus/tokenizer.json", "--shard-len", "4000"],
        }
        config, run = "tiny.toml", place.folder / "run"
        (place.folder / config).write_text(TINY, encoding="utf-8")
    settings = PARTS[name].split()
    shown: dict[str, Any] = {}
    for folder, words in corpora.items():
        facts = place.folder / f"{Path(folder).name}.json"
        if not facts.is_file():
            place.txl("prepare", *words, "--out", folder)
            place.txl("inspect", folder, "--json", str(facts))
        shown[f"corpus {folder}"] = files_of(place.folder / folder, "*") | {"facts": plain(read(facts))}
    shutil.rmtree(run, ignore_errors=True)
    place.train(config, *settings)
    shown["trained"] = run_shown(run)
    for newer in sorted((run / "checkpoints").glob("step_*"))[1:]:
        shutil.rmtree(newer)
    (run / "DONE").unlink()
    place.train(config, *settings, "--resume", "must")
    shown["resumed"] = run_shown(run)
    newest = max((run / "checkpoints").glob("step_*"))
    place.txl("inspect", str(newest), "--json", "facts.json")
    shown["inspected"] = plain(read(place.folder / "facts.json"))
    lens = ["-1"] if name == "quickstart" else ["6", "-1"]
    place.txl("evaluate", str(run), "--memory-len", *lens, "--json", "facts.json")
    shown["evaluated"] = plain(numbers_of(read(place.folder / "facts.json")))
    bundle = place.folder / "bundle"
    place.txl("export", str(run), str(bundle))
    shown["bundle"] = files_of(bundle, "*.safetensors", "tokenizer.json") | {
        "config": plain(read(bundle / "config.json"))
    }
    words = ["--prompt", "the ", "--max-tokens", "20", "--seed", "3"]
    shown["generated"] = place.txl("generate", str(bundle), *words)
    return shown


def run_shown(run: Path) -> dict[str, Any]:
    """Return the numbers of the log, and hashes of the files and the state of every checkpoint."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    # Events depend on the machine (slow ranks, times of saves). A repeated step has a later row, which counts.
    told = [in_old_names(row) for row in rows if row["kind"] != "event"]
    last = {f"{row['kind']} {row['step']}": {key: row[key] for key in NUMBERS if key in row} for row in told}
    shown: dict[str, Any] = {
        "losses": digest(json.dumps(last, sort_keys=True).encode()),
        "loss": {key: row["loss"] for key, row in last.items() if "loss" in row},
    }
    for checkpoint in sorted((run / "checkpoints").glob("step_*")):
        state = plain(read(checkpoint / "state.json"))
        del state["corpora"]  # their paths
        shown[checkpoint.name] = files_of(checkpoint, "*.safetensors", "tokenizer.json") | {
            "stream": digest(json.dumps(state["stream"], sort_keys=True).encode()),
            "state": digest(json.dumps(state, sort_keys=True).encode()),
        }
    return shown


def files_of(folder: Path, *patterns: str) -> dict[str, str]:
    """Return the sha256 of the matching files below a folder, by path. Tensor files are hashed without metadata, and
    JSON files with old names."""
    found = sorted({path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()})
    return {str(path.relative_to(folder)): digest(content_of(path)) for path in found}


def content_of(path: Path) -> bytes:
    """Return the part of a file's content that must not change."""
    if path.suffix == ".safetensors":
        return tensors_of(path)
    if path.suffix == ".json":
        return json.dumps(plain(read(path)), sort_keys=True).encode()
    return path.read_bytes()


def tensors_of(path: Path) -> bytes:
    """Return the content of a safetensors file without its metadata, which contains the hash of the saved state."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    return json.dumps(header, sort_keys=True).encode() + data[begin:]


def numbers_of(report: Any) -> Any:
    """Return the figures of `txl evaluate --json` that describe the model, without times and speeds."""
    if isinstance(report, dict):
        return {
            key: numbers_of(value) for key, value in report.items() if not key.endswith(("seconds", "per_s", "_ms"))
        }
    return [numbers_of(value) for value in report] if isinstance(report, list) else report


def plain(facts: Any) -> Any:
    """Return JSON without the keys of NO_FACTS, with the names of version 0.2."""
    if isinstance(facts, dict):
        kept = {key: plain(value) for key, value in facts.items() if key not in NO_FACTS}
        return in_old_names(kept)
    return [plain(value) for value in facts] if isinstance(facts, list) else facts


def in_old_names(facts: dict[str, Any], table: tuple[Renamed, ...] | None = None) -> dict[str, Any]:
    """Return an object with the keys and the renamed values of version 0.2."""
    renamed = {one.new: one for one in (RENAMED if table is None else table)}
    result = {}
    for key, value in facts.items():
        if key not in renamed:
            result[key] = value
            continue
        old_values = [old for old, new in renamed[key].values if new == value and type(new) is type(value)]
        result[renamed[key].old] = old_values[0] if old_values else value
    return result


def read(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def digest(data: bytes) -> str:
    """Return the sha256 of the data in hex."""
    return hashlib.sha256(data).hexdigest()


def free_port() -> int:
    """Return a TCP port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Yield a line for each place where two results differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{where} > {key}" if where else key
            if key not in old or key not in new:
                yield f"{inner}: only {'after' if key in new else 'before'}"
            else:
                yield from differences(old[key], new[key], inner)
    elif old != new:
        yield f"{where}: {str(old)[:100]} -> {str(new)[:100]}"


def main() -> int:
    """Run the parts. Print or write the results as JSON, or compare them with earlier results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="checkout to measure")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--out", type=Path, help="write the JSON to this file, not to standard output")
    parser.add_argument(
        "--compare", type=Path, help="earlier JSON; print the differences, with exit code 1 if there are any"
    )
    arguments = parser.parse_args()
    shown: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="guard-") as scratch:
        place = Workplace(arguments.root.resolve(), Path(scratch).resolve())
        for number, name in enumerate(arguments.only, 1):
            print(f"part {name}: {number} of {len(arguments.only)} ...", file=sys.stderr, flush=True)
            start_s = time.monotonic()
            shown[name] = run_part(place, name)
            shutil.rmtree(place.folder / "bundle")
            print(f"{name}: {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)
    text = json.dumps(shown, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    if not arguments.compare:
        if not arguments.out:
            print(text, end="")
        return 0
    old = {name: part for name, part in read(arguments.compare).items() if name in arguments.only}
    found = list(differences(old, json.loads(text)))
    print("\n".join(found) if found else f"the same as {arguments.compare}: {', '.join(arguments.only)}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
