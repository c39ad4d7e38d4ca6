"""Kernels are launched on the GPU that holds their tensors, also if another GPU is the current one."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tools.benchmarks import fake_gpu
from txl_dist.model import fused_softmax
from txl_dist.model.fused_softmax import Cluster, Columns, fused_linear_cross_entropy
from txl_dist.model.kernels import attention_launch, rows
from txl_dist.model.kernels.attention_launch import triton_relative_attention
from txl_dist.model.memory import AttentionMask
from txl_dist.model.relative_attention import Terms

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


class Launches:
    """A recorder that keeps the current device at each launch of a kernel."""

    def __init__(self) -> None:
        self.devices: dict[str, set[int]] = {}

    def operation(self, function: Any, arguments: tuple[Any, ...], settings: dict[str, Any], result: Any) -> None:
        pass

    def kernel(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
        self.devices.setdefault(kernel.fn.__name__, set()).add(fake_gpu.CURRENT[-1])


def test_every_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    second = torch.device("cuda", 1)
    monkeypatch.setattr(fake_gpu, "_CUDA", second)
    monkeypatch.setattr(attention_launch, "missing_compiler_reason", lambda: "")
    launches = Launches()
    with fake_gpu.fake_gpu(launches) as device:
        assert device == second
        shapes = [(1, 8, 2, 24), (1, 16, 2, 24), (1, 16, 2, 24), (16, 2, 24), (2, 24), (2, 24)]
        leaves = [torch.empty(shape, dtype=torch.bfloat16, device=device).requires_grad_() for shape in shapes]
        documents = torch.zeros(1, 16, dtype=torch.int64, device=device)
        context = triton_relative_attention(Terms(*leaves), visible=AttentionMask(documents[:, 8:], documents, None))
        context.sum().backward()
        rows.summed(torch.empty(2, 32, device=device), dtype=torch.bfloat16)
        hidden, weight = (torch.empty(4, 8, dtype=torch.bfloat16, device=device) for _ in range(2))
        assert fused_softmax.runs_kernel(hidden)
        cluster = Cluster(None, documents[0, :4], (Columns(weight, weight[:, 0], 0, 4),), None)
        hidden.requires_grad_()
        fused_linear_cross_entropy(hidden, [cluster], weight_S=torch.empty(4, device=device)).backward()
    assert {"attend", "query_gradients", "set_width", "sum_all"} <= launches.devices.keys()
    assert {"logits_to_gradient", "multiply_unless_one"} <= launches.devices.keys()
    assert {name for name, devices in launches.devices.items() if devices != {1}} == set()
