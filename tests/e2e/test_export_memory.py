"""An export needs little memory: less than the size of the weights in the exported type."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.helpers.launch import train, txl
from tools.benchmarks.export import MIB, measured

pytestmark = [pytest.mark.dist, pytest.mark.slow]
RANKS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step at ZeRO-3 on four ranks; nearly all of its 26 million weights are one table."""
    folder = tmp_path_factory.mktemp("large")
    words = [f"w{number:05x}" for number in range(50_000)]
    random.Random(0).shuffle(words)
    (folder / "train.txt").write_text(" ".join(words), encoding="utf-8")
    (folder / "valid.txt").write_text(" ".join(words[:50]), encoding="utf-8")
    prepare = ["prepare", "train.txt", "--valid", "valid.txt", "--out", "corpus", "--tokenizer", "word"]
    result = txl(*prepare, cwd=folder)
    assert result.returncode == 0, result.stderr
    (folder / "large.toml").write_text(
        """
[run]
dir = "run"
[data]
path = "corpus"
[model]
num_layers = 2
width = 512
num_heads = 8
head_width = 64
ff_width = 512
[train]
num_lanes = 4
segment_len = 8
memory_len = 8
microbatch_lanes = 1
max_steps = 1
[eval]
num_lanes = 4
[engine]
zero_stage = 3
precision = "fp32"
""",
        encoding="utf-8",
    )
    train("large.toml", cwd=folder, ranks=RANKS)
    return folder / "run"


@pytest.mark.parametrize(("dtype", "least_mib"), [("bf16", 50), pytest.param("fp32", 100, marks=pytest.mark.nightly)])
def test_an_export_of_a_run_of_four_ranks_fits_into_1_3_times_its_weights(
    run: Path, dtype: str, least_mib: int
) -> None:
    found = measured(run, dtype)
    assert found["bytes"] >= least_mib * MIB
    assert found["peak"] <= 1.3 * found["bytes"]


@pytest.mark.nightly
def test_so_does_an_export_of_a_bundle(run: Path, tmp_path: Path) -> None:
    result = txl("export", str(run), "bundle", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for dtype in ("fp32", "bf16"):
        found = measured(tmp_path / "bundle", dtype)
        assert found["peak"] <= 1.3 * found["bytes"], dtype
