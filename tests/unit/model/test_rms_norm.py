"""The RMS norm equals torch's, and its gradient is that of its result."""

import pytest
import torch
import torch.nn.functional as F

from txl_dist.model.rms_norm import RmsNorm, rms_norm


@pytest.mark.parametrize("gain", [1.0, 1.2])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_it_is_torchs_with_and_without_gradient(eps: float, gain: float) -> None:
    x = torch.randn(3, 5, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))[:, :, 1]
    expected = gain * F.rms_norm(x, (8,), eps=eps)
    torch.testing.assert_close(rms_norm(x, eps=eps, gain=gain), expected, rtol=1e-12, atol=0)
    x.requires_grad_()
    torch.testing.assert_close(rms_norm(x, eps=eps, gain=gain), expected, rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, eps=eps, gain=gain), (x,))


def test_bf16_is_normed_in_fp32() -> None:
    x = torch.full((2, 4096), 3.0, dtype=torch.bfloat16, requires_grad=True)  # the sum of squares has no bf16
    normed = RmsNorm(eps=0.0)(x)
    assert normed.dtype == torch.bfloat16
    assert (normed == 1).all()
    normed.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.abs().max() < 1e-2, "a longer vector has the same norm"


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    normed = rms_norm(x, eps=1e-5)
    normed.sum().backward()
    assert not normed.any()
    assert x.grad is not None
    assert x.grad.isfinite().all()
