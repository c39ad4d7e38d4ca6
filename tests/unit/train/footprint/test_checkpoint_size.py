"""The size of a checkpoint that a dry run prints equals the size of the folder that the run then writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.corpora import tiny_corpus
from tests.helpers.launch import txl
from txl_dist.config.load import configure
from txl_dist.train.footprint.checkpoint import checkpoint_size

MODEL = ["--model.num-layers", "2", "--model.width", "128", "--model.num-heads", "4", "--model.head-width", "32"]
MODEL += ["--model.ff-width", "256"]
RUN = [
    "--train.max-steps",
    "1",
    "--train.microbatch-lanes",
    "4",
    "--train.segment-len",
    "8",
    "--optim.warmup-steps",
    "0",
]
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SMALL = ["--train.num-lanes", "4", "--train.memory-len", "8"]
LARGE = ["--train.num-lanes", "32", "--train.memory-len", "512"]
RUNS: dict[str, list[str]] = {
    "fp32, adamw, small memories": [*SMALL, "--engine.precision", "fp32"],
    "fp32, adamw, memories larger than all else": [*LARGE, "--engine.precision", "fp32"],
    "bf16, adam, large memories, ZeRO 1": [*LARGE, "--engine.precision", "bf16", "--optim.name", "adam"],
    "bf16, sgd without momentum": [*SMALL, "--engine.precision", "bf16", "--optim.name", "sgd"],
    "fp32, sgd with momentum, ZeRO 2": [*SMALL, "--optim.name", "sgd", "--optim.momentum", "0.9"],
    "fp32, muon": [*SMALL, "--optim.name", "muon", "--engine.zero-stage", "0"],
    "fp32, lamb, an average of the weights": [
        *(*SMALL, "--optim.name", "lamb", "--optim.ema_decay", "0.9", "--engine.zero-stage", "0"),
    ],
    "layers that remember differently": [*LARGE, "--train.memory-lens", "512", "64"],
}


def said_by(*words: str, cwd: Path) -> str:
    done = txl(*words, cwd=cwd, timeout_s=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return str(done.stdout)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", RUNS)
def test_the_size_that_a_dry_run_prints_is_that_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    corpus = tiny_corpus(tmp_path, valid_fraction=0.2)
    (tmp_path / "c.toml").write_text(f'[data]\npath = "{corpus.folder}"\n[run]\ndir = "run"\n')
    words = ["train", "c.toml", *MODEL, *RUN, *RUNS[name]]
    said = said_by(*words, "--dry-run", cwd=tmp_path)
    found = re.search(r"^checkpoint: ([\d.,]+) (\w+) \(weights .*, optimizer .*, memories .*\)$", said, re.MULTILINE)
    assert found is not None, said
    said_by(*words, cwd=tmp_path)
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    written = sum(path.stat().st_size for path in folder.rglob("*.safetensors") if "probe" not in path.name)
    assert float(found[1].replace(",", "")) * UNITS[found[2]] == pytest.approx(written, rel=0.03)


def test_many_lanes_make_a_checkpoint_many_times_larger_than_twelve_bytes_per_parameter() -> None:
    few = checkpoint_size(configure(train={"num_lanes": 4, "memory_len": 16, "microbatch_lanes": 4}), vocab_size=300)
    many = checkpoint_size(configure(train={"num_lanes": 512, "memory_len": 1024}), vocab_size=300)
    assert (few.weights, few.optimizer) == (many.weights, many.optimizer)
    assert few.optimizer == 2 * few.weights
    assert many.memories == few.memories * (512 * 1024) // (4 * 16)
    assert str(many).startswith(f"{many.total / 2**30:,.2f} GiB (weights ")
