"""The kernels of a block's rows compute the same as their plain functions, in Triton's interpreter, and compile
well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.model.kernels.test_kernels_compiled import compiled, machine_of, pytestmark
from tests.unit.model.kernels.test_kernels_interpreted import FOUND, obstacle
from txl_dist.model.activation import ActivatedLinear
from txl_dist.model.residual_norm import Drop, ResidualLayerNorm, ResidualRmsNorm, residual_sum
from txl_dist.train.engine.adam_update import update_group

__all__ = ["compiled", "pytestmark"]
in_interpreter = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
EVERY_RUN = [
    *("layer", "layer_odd_dropout", "layer_one_row", "layer_padded", "rms", "rms_padded", "sum_dropout"),
    *("relu_dropout", "gelu", "layer_bf16"),
]
NIGHTLY = [
    *("layer_dropout", "layer_wide", "layer_sum_alone", "rms_dropout", "relu", "gelu_dropout", "relu2_dropout"),
    *("rms_bf16", "relu_bf16", "gelu_bf16"),
]
CASES = [*EVERY_RUN, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)]
ROOT = Path(__file__).parents[4]
RESIDENT_WARPS = 12
"""On a multiprocessor, at least."""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> FOUND:
    """What each check found, all from one process: starting one costs more than most checks."""
    is_nightly = any(item.get_closest_marker("nightly") for item in request.session.items)
    nightly = [*NIGHTLY, "other_models"] if is_nightly else []
    names = [*EVERY_RUN, *nightly, "whole_models", "recomputed", "places_differ", "adam_steps"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.model.kernels.interpreted_rows", *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: values for line in done.stdout.splitlines() for name, values in json.loads(line).items()}


@in_interpreter
@pytest.mark.parametrize("name", CASES)
def test_results_and_all_gradients_are_those_of_the_twin(found: FOUND, name: str) -> None:
    """In bf16 they differ by its rounding. 8 bits of mantissa are 2e-3 from one rounding, and there are several."""
    most = 2e-2 if name.endswith("bf16") else 1e-6
    assert len(found[name]) >= 3
    assert {output: error for output, error in found[name].items() if not error < most} == {}


@in_interpreter
@pytest.mark.parametrize("models", ["whole_models", pytest.param("other_models", marks=pytest.mark.nightly)])
def test_whole_models_are_those_without_kernels(found: FOUND, models: str) -> None:
    """Both in fp32, whose roundings go through all layers; attention is by its kernels, too."""
    assert len(found[models]) == 3
    assert {name: error for name, error in found[models].items() if not error < 1e-5} == {}


@in_interpreter
def test_recomputation_makes_the_same_dropout_again(found: FOUND) -> None:
    for name, difference in found["recomputed"].items():
        assert difference == 0.0 if name.startswith("same") else difference > 0.1, name


@in_interpreter
def test_the_three_dropouts_of_a_layer_know_nothing_of_each_other(found: FOUND) -> None:
    """256 x 256 drawings each: a standard deviation is 0.002."""
    assert found["places_differ"].values() == pytest.approx([0.7**2 + 0.3**2] * 3, abs=0.01)


@in_interpreter
def test_adams_step_is_torchs(found: FOUND) -> None:
    """The model's weights are these rounded to bf16. The interpreter cuts them off instead."""
    for name, error in found["adam_steps"].items():
        assert error < (5e-3 if name.endswith("weights") else 1e-6), (name, error)


@pytest.mark.parametrize("gradients", [torch.bfloat16, torch.float32])
def test_adams_step_moves_vectors_and_keeps_all_in_registers(
    gradients: torch.dtype, compiled: dict[str, Any], tmp_path: Path
) -> None:
    masters = torch.zeros(2, 4096, requires_grad=True)
    optimizer = torch.optim.AdamW([masters], lr=0.1)
    parts = [torch.zeros(4096, dtype=gradients)] * 2
    weights = torch.zeros(2, 4096, dtype=torch.bfloat16)
    update_group(optimizer, optimizer.param_groups[0], parts, weights, divisor=2.0)
    check_machine("adam_step", compiled["adam_step"], tmp_path, is_aligned=True)


@pytest.mark.parametrize(
    ("name", "width", "rate", "dtype"),
    [
        ("layer", 512, 0.1, torch.bfloat16),
        pytest.param("layer", 512, 0.1, torch.float16, marks=pytest.mark.nightly),
        pytest.param("layer", 512, 0.0, torch.bfloat16, marks=pytest.mark.nightly),
        ("layer", 410, 0.1, torch.bfloat16),
        ("padded layer", 416, 0.1, torch.bfloat16),
        pytest.param("layer", 1024, 0.1, torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param("layer", 4096, 0.1, torch.bfloat16, marks=pytest.mark.nightly),
        ("rms", 512, 0.1, torch.bfloat16),
        ("sum", 512, 0.1, torch.bfloat16),
    ],
)
def test_residual_and_norm_move_vectors_and_keep_all_in_registers(
    name: str, width: int, rate: float, dtype: torch.dtype, compiled: dict[str, Any], tmp_path: Path
) -> None:
    residual, update = (torch.zeros(64, width, dtype=dtype, requires_grad=True) for _ in range(2))
    drop = Drop(rate, True, torch.zeros(1, dtype=torch.int64) if rate else None)
    module = (ResidualRmsNorm(eps=1e-5) if name == "rms" else ResidualLayerNorm(width)).to(dtype)
    if name == "padded layer":
        module.normalized_shape = (410,)
    results = (residual_sum(residual, update, drop),) if name == "sum" else module(residual, update, drop)
    torch.autograd.backward(results, [torch.zeros_like(residual) for _ in results])
    assert set(compiled) == {"residual_norm", "residual_norm_gradients"} | ({"sum_all"} if "layer" in name else set())
    for kernel, built in compiled.items():
        check_machine(kernel, built, tmp_path, is_aligned=width % 8 == 0)


@pytest.mark.parametrize(
    ("name", "width", "rate", "dtype"),
    [
        ("relu", 2048, 0.1, torch.bfloat16),
        pytest.param("relu", 2048, 0.1, torch.float16, marks=pytest.mark.nightly),
        pytest.param("relu", 2048, 0.0, torch.bfloat16, marks=pytest.mark.nightly),
        ("relu", 2100, 0.1, torch.bfloat16),
        pytest.param("gelu", 2048, 0.1, torch.bfloat16, marks=pytest.mark.nightly),
        ("relu2", 2048, 0.1, torch.bfloat16),
    ],
)
def test_bias_and_activation_move_vectors_and_keep_all_in_registers(
    name: str, width: int, rate: float, dtype: torch.dtype, compiled: dict[str, Any], tmp_path: Path
) -> None:
    drop = Drop(rate, True, torch.zeros(1, dtype=torch.int64) if rate else None)
    module = ActivatedLinear(16, width, activation=name).to(dtype)
    module(torch.zeros(64, 16, dtype=dtype), drop).sum().backward()
    assert set(compiled) == {"activate", "activation_gradients", "sum_all"}
    for kernel, built in compiled.items():
        check_machine(kernel, built, tmp_path, is_aligned=width % 8 == 0)


def check_machine(kernel: str, built: Any, folder: Path, *, is_aligned: bool) -> None:
    machine, num_warps = machine_of(built, folder), built.metadata.num_warps
    print(kernel, machine._replace(code=""), machine.resident(num_warps))
    assert machine.stack_bytes == 0, kernel
    assert machine.count(r"\b(LDL|STL)\b") == 0, f"registers of {kernel} spill"
    assert machine.count(r"\b(ATOM|ATOMG|RED)\b") == 0, f"{kernel} sums in no fixed order"
    assert machine.resident(num_warps) * num_warps >= RESIDENT_WARPS, f"{kernel} leaves too few warps"
    if is_aligned:
        assert machine.count(r"\bLDG\.\S*U?16\b") == 0, kernel
        assert machine.count(r"\bLDG\.\S*128\b") > 0, kernel
        if kernel != "sum_all":  # which writes a few numbers of many that it reads
            assert machine.count(r"\bSTG\.\S*U?16\b") == 0, kernel
            assert machine.count(r"\bSTG\.\S*128\b") > 0, kernel
