"""Saved tensors at ZeRO stage 3 do not keep the graph of a forward pass in memory."""

from __future__ import annotations

import gc
import weakref

import torch

from txl_dist.train.engine.zero3_saved_tensors import saves_no_weights


def test_a_pass_without_a_backward_pass_is_freed_though_operations_save_their_outputs() -> None:
    weights = torch.nn.Parameter(torch.rand(4, 3))
    with saves_no_weights():
        output = torch.nn.functional.linear(torch.rand(2, 3), weights).exp()
    alive = weakref.ref(output)
    del output
    gc.collect()
    assert alive() is None


def test_gradients_are_those_of_plain_autograd() -> None:
    values = torch.rand(4, 3)
    inputs = torch.rand(2, 3)

    def gradient() -> torch.Tensor:
        weights = torch.nn.Parameter(values.clone())
        torch.nn.functional.linear(inputs, weights).exp().softmax(-1).square().sum().backward()
        assert weights.grad is not None
        return weights.grad

    expected = gradient()
    with saves_no_weights():
        assert torch.equal(gradient(), expected)
