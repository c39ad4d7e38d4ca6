"""When kernels can run, and how lanes and heads are divided into chunks."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from txl_dist.config.load import load_config
from txl_dist.model.kernels import attention_launch, rows
from txl_dist.model.kernels.attention_launch import Sizes, chunks, launches, unsupported_reason
from txl_dist.model.memory import AttentionMask
from txl_dist.model.relative_attention import Terms

RECIPES = ("enwik8_base", "enwik8_large", "wt103_base", "nvidia_wt103_base", "wt103_large")
CONFIGS = Path(__file__).parents[4] / "configs"


@pytest.fixture
def room_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sizes, int], None]:
    """Makes the score buffer hold so many matrices."""
    return lambda sizes, fit: monkeypatch.setattr(
        attention_launch, "SCORE_BUFFER_BYTES", fit * sizes.matrix_len * sizes.value_bytes
    )


@pytest.mark.parametrize(
    ("num_lanes", "num_heads", "fit"), [(1, 1, 5), (22, 8, 30), (64, 8, 30), (60, 10, 333), (7, 3, 1)]
)
def test_chunks_cover_every_lane_and_head_once_and_fit(
    num_lanes: int, num_heads: int, fit: int, room_for: Callable[[Sizes, int], None]
) -> None:
    sizes = Sizes(num_lanes, 64, 100, num_heads, 64)
    room_for(sizes, fit)
    seen: set[tuple[int, int]] = set()
    first = next(chunks(sizes))
    for chunk in chunks(sizes):
        assert 0 < chunk.num_lanes * chunk.num_heads <= min(fit, first.num_lanes * first.num_heads)
        pairs = {
            (lane, head)
            for lane in range(chunk.first_lane, chunk.first_lane + chunk.num_lanes)
            for head in range(chunk.first_head, chunk.first_head + chunk.num_heads)
        }
        assert not pairs & seen
        seen |= pairs
    assert len(seen) == num_lanes * num_heads


def test_a_matrix_that_is_larger_than_the_buffer_is_a_chunk(room_for: Callable[[Sizes, int], None]) -> None:
    sizes = Sizes(2, 64, 128, 3, 64)
    room_for(sizes._replace(T=32), 1)
    assert len(list(chunks(sizes))) == 6


def test_chunks_take_all_lanes_of_some_heads_where_these_fit(room_for: Callable[[Sizes, int], None]) -> None:
    sizes = Sizes(22, 512, 1024, 8, 64)
    room_for(sizes, 50)
    parts = list(chunks(sizes))
    assert {part.num_lanes for part in parts} == {22}
    assert [part.first_head for part in parts] == [0, 2, 4, 6]


@pytest.mark.parametrize("fit", [1, 7, 30, 1000])
def test_no_chunk_has_more_programs_than_the_first(fit: int, room_for: Callable[[Sizes, int], None]) -> None:
    """What is allocated once for all chunks has the sizes of the first."""
    sizes = Sizes(5, 150, 300, 7, 48)
    room_for(sizes, fit)
    largest: dict[str, tuple[int, ...]] = {}
    for one in launches(sizes, backward=True):
        assert all(a <= b for a, b in zip(one.grid, largest.setdefault(one.kernel, one.grid), strict=True))
    parts = {one.grid[1] for one in launches(sizes, backward=True) if one.kernel == "distance_gradients"}
    assert len(parts) == 1


@pytest.mark.parametrize(("recipe", "lanes"), [("enwik8_base", 22), *((recipe, None) for recipe in RECIPES)])
def test_a_layer_of_a_recipe_is_few_launches_of_at_least_one_wave(recipe: str, lanes: int | None) -> None:
    config = load_config(CONFIGS / f"{recipe}.toml")
    sizes = Sizes.of(config.model, config.train, lanes=lanes or config.train.microbatch_lanes)
    planned = [one for backward in (False, True) for one in launches(sizes, backward=backward)]
    assert len(planned) <= 16
    assert {one.kernel: round(one.waves, 2) for one in planned if one.waves < 1} == {}


def test_where_a_layer_does_not_fit_the_default_it_is_twice_as_many_launches() -> None:
    assert attention_launch.SCORE_BUFFER_BYTES >= 128 * 2**20
    sizes = Sizes(44, 512, 1024, 8, 64)
    assert [len(launches(sizes, backward=backward)) for backward in (False, True)] == [4, 11]


def test_a_model_on_a_cpu_is_told_that_it_is() -> None:
    assert unsupported_reason(torch.zeros(1, 1, 1, 64), has_position_bias=True) == (
        "it needs a CUDA device, but the model is on cpu"
    )


@pytest.mark.parametrize(
    ("query", "has_position_bias", "reason"),
    [
        (torch.empty(1, 1, 1, 64, dtype=torch.float32), True, "needs bf16 or fp16"),
        (torch.empty(1, 1, 1, 160, dtype=torch.bfloat16), True, "head width 160"),
        (torch.empty(1, 1, 1, 64, dtype=torch.bfloat16), False, "learned"),
        (torch.empty(1, 1, 1, 64, dtype=torch.bfloat16), True, None),
    ],
)
def test_a_model_on_a_gpu_is_told_what_stands_in_the_way(
    monkeypatch: pytest.MonkeyPatch, query: torch.Tensor, has_position_bias: bool, reason: str | None
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention_launch, "_has_triton", lambda: True)
    monkeypatch.setattr(attention_launch, "missing_compiler_reason", lambda: "")
    monkeypatch.setattr(attention_launch, "failed_kernel_reason", lambda device: "")
    found = unsupported_reason(query, has_position_bias=has_position_bias)
    assert found is None if reason is None else found is not None and reason in found


def test_without_a_compiler_or_its_headers_the_kernels_could_not_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(attention_launch, "_has_triton", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    queries = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)
    attention_launch.missing_compiler_reason.cache_clear()
    assert "needs a C compiler" in (unsupported_reason(queries, has_position_bias=True) or "")
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    attention_launch.missing_compiler_reason.cache_clear()
    assert "needs Python.h" in (unsupported_reason(queries, has_position_bias=True) or "")
    (tmp_path / "Python.h").touch()
    for script, found in (
        ("#!/bin/sh\necho 'fatal error: stdio.h is not there' >&2\nexit 1\n", "(fatal error: stdio.h is not there)"),
        ("#!/bin/sh\nexit 3\n", "(exit code 3)"),
        ("#!/no/such/shell\n", "does not run"),
    ):
        compiler.write_text(script)
        attention_launch.missing_compiler_reason.cache_clear()
        assert found in (unsupported_reason(queries, has_position_bias=True) or "")
    compiler.write_text("#!/bin/sh\nexit 0\n")
    attention_launch.missing_compiler_reason.cache_clear()
    assert attention_launch.missing_compiler_reason() == ""
    monkeypatch.setenv("CC", "no-such-compiler")  # which Triton would call all the same
    attention_launch.missing_compiler_reason.cache_clear()
    assert "but found none" in attention_launch.missing_compiler_reason()
    attention_launch.missing_compiler_reason.cache_clear()


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (
            RuntimeError("at 4:8:\n\nptxas fatal: sm_120 is unknown\n"),
            "(RuntimeError: at 4:8: ... ptxas fatal: sm_120 is",
        ),
        (torch.ones(1, 1, 16), "computed a wrong result on cpu"),
        (torch.tensor([[[1.0] * 8 + [0.0] * 8]]), None),
    ],
    ids=["raises", "wrong", "right"],
)
def test_a_small_kernel_that_fails_or_is_wrong_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, result: torch.Tensor | Exception, reason: str | None
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(attention_launch, "_has_triton", lambda: True)
    monkeypatch.setattr(attention_launch, "missing_compiler_reason", lambda: "")
    monkeypatch.setattr(attention_launch, "run_small_kernel", Mock(side_effect=[result]))
    attention_launch.failed_kernel_reason.cache_clear()
    query = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)
    found = [unsupported_reason(query, has_position_bias=True) for _ in range(2)]  # the second is remembered
    attention_launch.failed_kernel_reason.cache_clear()
    assert found[0] == found[1]
    assert found[0] is None if reason is None else reason in (found[0] or "")


def test_without_triton_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(attention_launch, "_has_triton", lambda: False)
    assert unsupported_reason(torch.empty(1, 1, 1, 64), has_position_bias=True) == "triton is not installed"


@pytest.mark.parametrize("reason", ["a small Triton kernel failed", None])
def test_a_gpu_runs_triton_if_nothing_is_missing(reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda size, device: device)  # this build of torch may have no CUDA
    monkeypatch.setattr(attention_launch, "unsupported_device_reason", lambda tensor: reason)
    assert attention_launch.runs_triton(torch.device("cuda")) is (reason is None)
    assert not attention_launch.runs_triton(torch.device("cpu"))


def test_the_kernels_of_rows_run_where_those_of_attention_do(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.zeros(2, 8, dtype=torch.bfloat16)
    assert not rows.runs("auto", half)  # on a CPU
    monkeypatch.setattr(rows, "unsupported_device_reason", lambda x: None)
    assert rows.runs("auto", half)
    assert rows.runs("triton", half.half())
    assert not rows.runs("fused", half)
    assert not rows.runs("plain", half)
    assert not rows.runs("auto", half.float())
    assert not rows.runs("auto", torch.zeros(1, rows.MAX_WIDTH + 1, dtype=torch.bfloat16))
    assert attention_launch.threshold_of(0.0) == 0
    assert 0 < attention_launch.threshold_of(0.999_999_9) < attention_launch.KEEP_LEVELS


def test_attention_keeps_some_probabilities_at_every_rate_of_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds = []

    def apply(*arguments: Any) -> torch.Tensor:
        thresholds.append(arguments[-2])
        return torch.zeros(1)

    monkeypatch.setattr(attention_launch._Attention, "apply", apply)
    x = torch.zeros(1, 4, 2, 16)
    documents = torch.zeros(1, 4, dtype=torch.int64)
    for rate in (0.0, 0.5, 0.999_999):
        terms = Terms(x, x, x, x[0], x[0, 0], x[0, 0])
        attention_launch.triton_relative_attention(
            terms, visible=AttentionMask(documents, documents, None), dropout=rate
        )
    assert thresholds == [0, 32_768, 65_535]
