"""Norms are right for vectors of any number of values."""

from __future__ import annotations

import pytest
import torch

from txl_dist.train.engine import zero
from txl_dist.train.engine.partitions import norms_of


@pytest.mark.parametrize("size", [1, 1_023, 1_024, 1_025, 1_048_575, 3_000_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_of_many_values_are_those_in_fp64(size: int, dtype: torch.dtype) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    (norm,) = norms_of([values])
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), values.double().norm(), rtol=1e-6, atol=0)


def test_the_norm_over_ranks_of_a_large_table_is_that_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "all_reduce_sum", lambda values: values)
    table, bias = torch.randn(3_000_064, generator=torch.Generator().manual_seed(1)).bfloat16().split([3_000_000, 64])
    norm = zero.norm_over_ranks([table, bias])
    torch.testing.assert_close(norm.double(), torch.cat([table, bias]).double().norm(), rtol=1e-6, atol=0)


def test_norms_of_scaled_fp16_gradients_do_not_overflow_and_what_is_not_finite_stays_so() -> None:
    large = torch.full((2_048, 3), 60_000.0, dtype=torch.float16)
    broken = [torch.tensor([1.0] * 1_500 + [value]) for value in (torch.inf, torch.nan)]
    norms = norms_of([large, large.t(), *broken])
    torch.testing.assert_close(norms[:2].double(), large.double().norm().expand(2), rtol=1e-6, atol=0)
    assert norms[2].isinf()
    assert norms[3].isnan()
