"""The launches of a training step on a GPU are counted on a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.benchmarks.count_launches import in_fresh_process

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """enwik8_base by quantity, and what was printed beside the figures of an earlier commit."""
    file = tmp_path_factory.mktemp("counted") / "now.json"
    words = [
        "--recipes",
        "enwik8_base",
        "--json",
        str(file),
        "--before",
        str(ROOT / "tools/benchmarks/launches_before.json"),
    ]
    command = [sys.executable, "-m", "tools.benchmarks.count_launches", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(file.read_text(encoding="utf-8"))["recipes"]["enwik8_base"], result.stdout


def test_the_whole_step_of_a_recipe_is_counted(counted: tuple[dict[str, Any], str]) -> None:
    found, printed = counted
    assert found["launches, micro-step"] > 12 * found["launches, a layer"] > 12 * found["attention, a layer"]
    assert found["attention"] == 12 * found["attention, a layer"]
    assert found["of these Triton"] >= found["attention"]
    # Master weights and two moments read and written, a gradient read, weights written: no update moves less.
    assert found["update, bytes per parameter"] >= 3 * 8 + 2 + 2
    assert found["update, bytes per parameter"] <= 32, "the norm reads two more"
    assert found["launches, micro-step"] <= 520
    # Made by a product, read by two others, all in bf16: no softmax moves less.
    assert found["softmax, bytes per logit"] >= 3 * 2
    assert found["attention, MB a layer"] > found["of these scores"] > 0
    assert found["graphs, Zipf"] == 1
    assert found["products, micro-step"] > found["products, unaligned"] == 0
    assert found["weights, MB"] > 2 * 41
    assert all(title in printed for title in ("before", "now / before"))


@pytest.mark.parametrize(
    ("name", "most_launches"), [("wt103_base", 880), pytest.param("wt103_large", 950, marks=pytest.mark.nightly)]
)
def test_tables_of_a_large_vocabulary_are_passed_over_few_times(name: str, most_launches: int) -> None:
    found = in_fresh_process(name, layers_less=0, waves=False, pad_widths="off")  # so a value is 2 bytes in bf16
    assert found["launches, micro-step"] <= most_launches
    assert found["update, bytes per parameter"] <= 32
    # 30 of the update, and 6 to add the embedding's gradient to the softmax's, which is not scaled.
    assert 30 <= found["update, bytes per table value"] <= 36


def test_every_kernel_is_compiled_and_has_its_waves(counted: tuple[dict[str, Any], str]) -> None:
    waves = {name: value for name, value in counted[0].items() if name.startswith("waves, ")}
    assert {"waves, attend", "waves, key_value_gradients", "waves, distance_gradients"} <= set(waves)
    assert all(value > 0 for value in waves.values())


def test_lists_of_tensors_are_as_many_launches_as_cuda_makes_of_them() -> None:
    program = """
import torch
from tools.benchmarks.count_launches import multi_tensor_launches, resident_programs
def launches(*sizes, lists=1): return multi_tensor_launches([[torch.empty(n, device="meta") for n in sizes]] * lists)
# 320 blocks of 65,536 values, 110 tensors of one list, 48 of three.
print(launches(1), launches(320 * 65_536), launches(320 * 65_536 + 1), launches(*[1] * 110), launches(*[1] * 111))
print(launches(*[1] * 48, lists=3), launches(*[1] * 49, lists=3))
# 255 registers and 128 threads: four warps of 8,192 in 16,384 for each of four schedulers.
print(resident_programs(255, 0, 4), resident_programs(128, 0, 4), resident_programs(32, 100 * 1024, 4))
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["1 1 2 1 2", "1 2", "2 4 2"]
