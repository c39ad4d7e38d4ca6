"""Make the golden checkpoint of a format: `python -m tests.helpers.golden_checkpoint tests/golden/checkpoint_vN`.

A tiny run of ZeRO-1 on 2 ranks uses every part of the format: adaptive softmax, both moments, memories of four lanes
(batch rows) in two files, a skipped step, and a rewind with skipped text. The program stores one checkpoint, the corpus
and the settings. `expected.json` contains what any later version must read from the checkpoint, and the losses after
it. The checkpoint of a released version is never made again. Version 2 was made without `memory_lens`, and version 3
with it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.corpora import random_texts, tiny_corpus
from tests.helpers.job import Job
from txl_dist.artifacts import checkpoint_folder
from txl_dist.config.load import config_from_dict, config_to_toml
from txl_dist.train.checkpoint.fragments import FragmentFiles
from txl_dist.train.checkpoint.memories import load_lane_memory
from txl_dist.train.checkpoint.validate import read_state

STEP, LAST_STEP = 16, 20
FAULTS = "nan:0:3,spike:0:10,spike:0:11"
SETTINGS: dict[str, dict[str, Any]] = {
    "run": {"dir": "run"},
    "data": {"path": "corpus", "eval_split": ""},
    "model": {
        "num_layers": 2,
        "width": 16,
        "num_heads": 2,
        "head_width": 8,
        "ff_width": 24,
        "cutoffs": [64, 160],
        "div_value": 2,
        "tie_projections": [False, True, True],
        "dropout": 0.0,
    },
    "optim": {"lr": 2e-3, "schedule": "constant"},
    "train": {
        "num_lanes": 4,
        "segment_len": 8,
        "memory_len": 12,
        "memory_lens": [5, 12],
        "microbatch_lanes": 1,
        "max_steps": LAST_STEP,
    },
    "engine": {"zero_stage": 1},
    "checkpoint": {"every_steps": 4, "keep_last": 10},
    "guard": {"spike_window": 4, "spike_patience": 2, "on_spike": "rewind"},
    "metrics": {"log_every_steps": 1, "tensorboard": False},
}


def losses_of(run_dir: Path) -> dict[int, float]:
    """Return the last recorded loss of each step."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """Return the facts that a reader must find in a checkpoint, in any format of its files."""
    saved, files = read_state(checkpoint), FragmentFiles(checkpoint / "engine")
    lengths = {name: torch.Size(shape).numel() for name, shape in saved.values["parameters"].items()}
    memory = load_lane_memory(checkpoint, lanes=range(SETTINGS["train"]["num_lanes"]))
    return {
        "step": saved.step,
        "tokens_seen": saved.values["tokens_seen"],
        "values": {
            kind: sha256_of(files.read(kind, name, start=0, length=lengths[name]) for name in sorted(lengths))
            for kind in files.kinds
        },
        "updates": files.step_of(min(lengths)),
        "memory": sha256_of([*memory.hidden, memory.document_BM]),
        "position": [one.position for one in saved.stream.corpora],
        "left_out": [list(map(list, one.skips)) for one in saved.stream.corpora],
        "skipped_steps": saved.health.skipped_steps,
        "rewinds": saved.health.rewinds,
        "probe_losses": load_file(checkpoint / "probe.safetensors")["losses"].view(-1).tolist(),
    }


def sha256_of(tensors: Iterable[Tensor]) -> str:
    """Return the sha256 of the tensors' bytes, one tensor after the other."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def make(folder: Path) -> None:
    """Train, and copy the checkpoint, the corpus, the settings and the expected facts to `folder`."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        tiny_corpus(here, texts=random_texts(count=30, longest=120), shard_len=3000, valid_fraction=0.0)
        settings = config_to_toml(config_from_dict(SETTINGS, source="SETTINGS"))
        (here / "settings.toml").write_text(settings, encoding="utf-8")
        with Job("train", "settings.toml", log=here / "log", ranks=2, cwd=here, fault=FAULTS) as job:
            assert job.wait(limit_s=300) == [0, 0], job.text
        checkpoint = checkpoint_folder(here / "run", STEP)
        losses = losses_of(here / "run")
        facts = facts_of(checkpoint) | {"next_losses": [losses[step] for step in range(STEP + 1, LAST_STEP + 1)]}
        (folder / "expected.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        for name in ("settings.toml", "corpus", f"run/checkpoints/{checkpoint.name}"):
            copy = shutil.copytree if (here / name).is_dir() else shutil.copy
            copy(here / name, folder / Path(name).name)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
