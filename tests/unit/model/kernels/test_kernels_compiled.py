"""The compiled kernels for an H100 or H200 (sm_90): they are launched, but no GPU runs them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tools.benchmarks.fake_gpu import HopperDriver
from txl_dist.model import fused_softmax
from txl_dist.model.fused_softmax import Cluster, Columns, fused_linear_cross_entropy
from txl_dist.model.kernels import attention_launch
from txl_dist.model.kernels.attention_launch import (
    BACKWARD,
    FORWARD,
    SUM,
    tiles,
    triton_attention_of_products,
    triton_relative_attention,
)
from txl_dist.model.memory import AttentionMask
from txl_dist.model.relative_attention import Terms

TRITON = importlib.util.find_spec("triton")
CUOBJDUMP = Path(TRITON.origin).parent / "backends/nvidia/bin/cuobjdump" if TRITON and TRITON.origin else None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CUOBJDUMP is None or not CUOBJDUMP.is_file(), reason="triton with its cuobjdump is not installed"
    ),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET is set"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

MAX_SHARED_BYTES, MULTIPROCESSOR_SHARED_BYTES = 227 * 1024, 228 * 1024
NUM_REGISTERS, SOFTMAX_THREADS = 64 * 1024, 256


PREPARING = "distance_scores without scores"
"""The kernel of the backward pass if the forward pass has kept the scores."""
LARGE = 512
"""Queries that the largest tiles are for."""


class Problem(NamedTuple):
    """What decides what is compiled."""

    head_width: int
    dtype: torch.dtype = torch.bfloat16
    dropout: float = 0.0
    oldest: int | None = None
    T: int = 64
    M: int = 64
    of_products: bool = True
    """Whether keys and values of the memory lie apart."""
    keeps_scores: bool = False


PROBLEMS = {
    "narrow": Problem(64),
    "narrow_dropout": Problem(64, dropout=0.1),
    "narrow_fp16_dropout": Problem(64, dtype=torch.float16, dropout=0.1),
    "wide": Problem(128),
    "wide_dropout": Problem(128, dropout=0.1),
    "narrow_together": Problem(64, dropout=0.1, of_products=False),
    "nothing_divides": Problem(41, dropout=0.1, T=37, M=24),
    "window": Problem(64, oldest=0, keeps_scores=True),
    "narrow_large_tiles": Problem(64, T=LARGE, M=LARGE),
    "narrow_large_tiles_dropout": Problem(64, dropout=0.1, T=LARGE, M=LARGE),
    "narrow_large_tiles_window": Problem(64, oldest=0, T=LARGE, M=LARGE),
    "wide_large_tiles": Problem(128, T=LARGE, M=LARGE),
    "wide_large_tiles_dropout": Problem(128, dropout=0.1, T=LARGE, M=LARGE),
    "wide_large_tiles_window": Problem(128, oldest=0, T=LARGE, M=LARGE),
}
NIGHTLY = (
    *("narrow", "narrow_dropout", "narrow_fp16_dropout", "narrow_together", "wide", "wide_dropout"),
    *("narrow_large_tiles", "narrow_large_tiles_dropout", "narrow_large_tiles_window"),
    *("wide_large_tiles_dropout", "wide_large_tiles_window"),
)
"""Problems that only nightly tests compile. The others have narrow, wide and odd heads, a window and large tiles."""


class Machine(NamedTuple):
    """Machine code and what it takes."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    code: str

    def resident(self, num_warps: int) -> int:
        """Programs that a multiprocessor holds at a time: registers are given to warps in steps of 8 per thread."""
        of_a_warp = -(-self.registers // 8) * 8 * 32
        by_shared = MULTIPROCESSOR_SHARED_BYTES // (self.shared_bytes + 1024)
        return min(NUM_REGISTERS // of_a_warp // num_warps, by_shared, 64 // num_warps)

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.code))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """By name, the kernels that were launched since; they are compiled for sm_90 and not run."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels: dict[str, Any] = {}
    used: list[JITFunction[Any]] = []
    run: Callable[..., Any] = JITFunction.run

    def compile_only(self: JITFunction[Any], *arguments: Any, warmup: bool, **settings: Any) -> Any:
        used.append(self)
        kernel = run(self, *arguments, warmup=True, **settings)
        name = self.fn.__name__
        kernels[PREPARING if name == "distance_scores" and arguments[3] is None else name] = kernel
        return kernel

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", HopperDriver())
    yield kernels
    for kernel in used:
        kernel.device_caches.clear()  # what was compiled for device 0 is not for the one that may really be there


def launch_all(problem: Problem) -> None:
    H, dtype, dropout, oldest, T, M, of_products, keeps_scores = problem
    B, N = 2, 2
    leaves = [torch.zeros(shape, dtype=dtype) for shape in [(B, T, N, H), (B, M + T, 2, N, H), (M + T, N, H), (N, H)]]
    query, key_value, distance, bias = [leaf.requires_grad_() for leaf in leaves]
    documents = torch.zeros(B, M + T, dtype=torch.int64)
    visible = AttentionMask(documents[:, M:], documents, oldest)
    if of_products:
        segment = torch.zeros(B, T, 3, N, H, dtype=dtype, requires_grad=True)
        context = triton_attention_of_products(
            segment,
            key_value[:, :M],
            distance_KNH=distance,
            content_bias_NH=bias,
            position_bias_NH=bias,
            visible=visible,
            dropout=dropout,
            keeps_scores=keeps_scores,
        )
    else:
        key, value = key_value.unbind(2)
        terms = Terms(query, key, value, distance, bias, bias)
        context = triton_relative_attention(terms, visible=visible, dropout=dropout)
    context.sum().backward()


def machine_of(kernel: Any, folder: Path) -> Machine:
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    usage, code = (
        subprocess.run([str(CUOBJDUMP), flag, str(binary)], capture_output=True, text=True, check=True).stdout
        for flag in ("--dump-resource-usage", "--dump-sass")
    )
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    return Machine(int(registers), int(stack), kernel.metadata.shared, code)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else []) for name in PROBLEMS]
)
def test_machine_code_is_what_the_design_promises(
    name: str, compiled: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_width, _, dropout, oldest, T, *_ = PROBLEMS[name]
    fills = T >= LARGE
    if fills:
        monkeypatch.setattr(attention_launch, "NUM_MULTIPROCESSORS", 1)
    launch_all(PROBLEMS[name])
    others = [*(["set_width"] if head_width % 16 else []), *([PREPARING] if PROBLEMS[name].keeps_scores else [])]
    assert set(compiled) == {*FORWARD, *BACKWARD, SUM, *others}
    for kernel, built in compiled.items():
        machine = machine_of(built, tmp_path)
        num_warps = built.metadata.num_warps
        print(kernel, machine._replace(code=""), "HGMMA", machine.count(r"\bHGMMA\b"), machine.resident(num_warps))
        assert machine.stack_bytes == 0, kernel
        assert machine.count(r"\b(LDL|STL)\b") == 0, f"registers of {kernel} spill"
        assert machine.shared_bytes < MAX_SHARED_BYTES, kernel
        if kernel == "set_width":  # whose rows begin anywhere
            continue
        # Numbers of two bytes move eight at a time.
        if kernel != SUM:  # which writes a few numbers of many that it reads
            assert machine.count(r"\bSTG\.\S*U?16\b") == 0, kernel
        assert machine.count(r"\bLDG\.\S*U?16\b") == 0, kernel
        assert machine.count(r"\bLDG(STS)?\.\S*128\b") > 0, kernel
        assert machine.count(r"\b(ATOM|ATOMG|RED)\b") == 0, f"{kernel} sums in no fixed order"
        if kernel == PREPARING:
            assert machine.count(r"\bHGMMA\b") == 0, "scores that are kept are computed again"
            continue
        if kernel != SUM:
            assert machine.count(r"\bHGMMA\b") > 0, f"{kernel} does not use Hopper's tensor cores"
        assert machine.count(r"\bHMMA\b") == 0, kernel
        options = tiles(-(-head_width // 16) * 16, has_dropout=dropout > 0)[kernel]
        tile = options[0 if fills else -1]
        assert (built.metadata.num_warps, built.metadata.num_stages) == (tile.num_warps, tile.num_stages)
        if oldest is None and kernel != SUM:
            assert machine.resident(tile.num_warps) == tile.resident, f"a wave of {kernel} is not what is counted"
        if kernel not in ("distance_scores", SUM):
            assert machine.count(r"\bLDGSTS\.\S*128\b") > 0, f"{kernel} loads nothing ahead"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_columns", [204, 20_003], ids=["bytes", "words"])
def test_the_softmax_moves_vectors_and_keeps_all_in_registers(
    dtype: torch.dtype,
    num_columns: int,
    compiled: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_softmax, "runs_kernel", lambda hidden_SD: True)
    weight, bias = torch.zeros(num_columns, 16, dtype=dtype), torch.zeros(num_columns, dtype=dtype)
    targets, share = torch.zeros(64, dtype=torch.int64), torch.ones(64)
    clusters = [Cluster(None, targets, (Columns(weight, bias, 0, num_columns),), None)]
    fused_linear_cross_entropy(torch.zeros(64, 16, dtype=dtype), clusters, weight_S=share)
    machine = machine_of(compiled["logits_to_gradient"], tmp_path)
    print(machine._replace(code=""))
    assert machine.stack_bytes == 0
    assert machine.count(r"\b(LDL|STL)\b") == 0
    assert machine.registers * SOFTMAX_THREADS * 2 <= NUM_REGISTERS  # two programs on a multiprocessor
    assert machine.count(r"\b(LDG|STG)\.\S*U?16\b") == 0
    assert machine.count(r"\bLDG\.\S*128\b") > 0
    assert machine.count(r"\bSTG\.\S*128\b") > 0
    assert machine.count(r"\b(ATOM|ATOMG|RED)\b") == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_gradient_is_multiplied_by_vectors_and_in_registers(
    dtype: torch.dtype, compiled: dict[str, Any], tmp_path: Path
) -> None:
    fused_softmax._multiply_unless_one(torch.zeros(16, 4096, dtype=dtype), torch.ones(()))
    machine = machine_of(compiled["multiply_unless_one"], tmp_path)
    assert machine.stack_bytes == 0
    assert machine.count(r"\b(LDL|STL)\b") == 0
    assert machine.count(r"\bLDG\.\S*128\b") > 0
    assert machine.count(r"\bSTG\.\S*128\b") > 0


def test_importing_the_launcher_does_not_import_triton() -> None:
    program = "import sys, txl_dist.model.kernels.attention_launch; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_softmax_is_compiled_once_for_chunks_that_begin_anywhere() -> None:
    from txl_dist.model.kernels.softmax import logits_to_gradient

    anywhere = {parameter.name for parameter in logits_to_gradient.params if parameter.do_not_specialize_on_alignment}
    assert anywhere == {"TARGETS", "SHARE"}
