"""Matrices decay, biases and norms do not. The settings of this run apply, whatever a checkpoint restored.

Each optimizer is compared with its equations in a loop over tensors.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from txl_dist.config.load import choices_of
from txl_dist.config.schema import OPTIMIZERS, ModelSection, OptimSection
from txl_dist.model.transformer_xl import SegmentLoss, TransformerXL
from txl_dist.train.engine import adam_update
from txl_dist.train.engine.optimizer import BUILDERS, apply_settings, build_optimizer


def optimizer_of(optim: OptimSection) -> tuple[SegmentLoss, torch.optim.Optimizer]:
    module = SegmentLoss(
        TransformerXL(ModelSection(num_layers=1, cutoffs=(5,), final_norm=True, pre_norm=True), vocab_size=9)
    )
    return module, build_optimizer(module.named_parameters(), optim)


def test_every_name_has_its_facts_and_can_be_built() -> None:
    assert set(OPTIMIZERS) == set(BUILDERS) == set(choices_of("optim.name"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_parameter_is_in_one_group_and_only_matrices_decay(name: str) -> None:
    module, optimizer = optimizer_of(OptimSection(name=name, weight_decay=0.1))
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    assert sorted(names[id(p)] for group in optimizer.param_groups for p in group["params"]) == sorted(names.values())
    assert all("norm" not in names[id(p)] and "bias" not in names[id(p)] for p in decayed["params"])
    assert all("norm" in names[id(p)] or "bias" in names[id(p)] for p in kept["params"])


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb"])
def test_settings_replace_those_that_a_checkpoint_restored(name: str) -> None:
    _, optimizer = optimizer_of(OptimSection(name=name, weight_decay=0.0, betas=(0.8, 0.9)))
    apply_settings(optimizer.param_groups, OptimSection(name=name, weight_decay=0.3, betas=(0.5, 0.6), eps=1e-5))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert all(group["betas"] == (0.5, 0.6) and group["eps"] == 1e-5 for group in optimizer.param_groups)


def test_sgd_has_momentum_and_no_betas() -> None:
    _, optimizer = optimizer_of(OptimSection(name="sgd", momentum=0.5))
    apply_settings(optimizer.param_groups, OptimSection(name="sgd", momentum=0.9, weight_decay=0.3))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert all(group["momentum"] == 0.9 and "betas" not in group for group in optimizer.param_groups)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW], ids=lambda kind: kind.__name__)
def test_the_kernel_replaces_only_steps_of_adam_that_it_computes(
    kind: type[torch.optim.Adam], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam_update, "unsupported_device_reason", lambda x: None)
    plain, special = (nn.Parameter(torch.zeros(3)) for _ in range(2))

    def replaced(**options: bool) -> bool:
        optimizer = kind([{"params": [plain]}, {"params": [special], **options}])
        return adam_update.kernel_updates(optimizer, plain, setting="auto")

    assert replaced()
    assert replaced(fused=True)
    assert replaced(foreach=True)
    assert replaced(decoupled_weight_decay=True)
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        assert not replaced(**{option: True}), option


@pytest.mark.parametrize("is_decoupled", [False, True])
def test_the_kernel_decays_weights_as_the_optimizers_options_say(
    is_decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[float, bool]] = []
    monkeypatch.setattr(
        adam_update, "start_step", lambda *given, is_decoupled: started.append((given[2][1], is_decoupled))
    )
    master = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([master], lr=0.5, weight_decay=0.1, decoupled_weight_decay=is_decoupled)
    adam_update.update_group(optimizer, optimizer.param_groups[0], [torch.ones(3)], torch.ones(3), divisor=1.0)
    ((decay, decouples),) = started
    assert decouples is is_decoupled
    assert math.isclose(decay, 0.05 if is_decoupled else 0.1)


class Weights(nn.Module):
    """A matrix of norm 100, which lamb counts as 10, a small one, a zero one, one without gradient, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        values = {"large": 10.0, "small": 0.1, "zero": 0.0, "resting": 1.0, "bias": 0.5}
        for name, scale in values.items():
            shape = (10,) if name == "bias" else (10, 10)
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(scale * drawn))


def steps_of(optim: OptimSection, *, count: int, lr: float) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """(weights before each step and after the last, the gradients of each step) of the optimizer under test."""
    module, generator = Weights(), torch.Generator().manual_seed(2)
    optimizer = build_optimizer(module.named_parameters(), optim)
    weights, gradients = [], []
    for _ in range(count):
        weights.append({name: p.detach().clone() for name, p in module.named_parameters()})
        for name, p in module.named_parameters():
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad = drawn * (0.0 if name == "resting" else 1e-3)
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return [*weights, {name: p.detach().clone() for name, p in module.named_parameters()}], gradients


def assert_weights(found: list[dict[str, Tensor]], expected: list[dict[str, Any]]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name, weight in one.items():
            torch.testing.assert_close(weight, other[name], rtol=1e-9, atol=1e-12, msg=f"{name} after {index} steps")


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_is_nvidias_step_for_step(weight_decay: float) -> None:
    b1, b2, eps, lr = 0.8, 0.95, 1e-6, 0.02
    optim = OptimSection(name="lamb", lr=1.0, betas=(b1, b2), eps=eps, weight_decay=weight_decay)
    weights, gradients = steps_of(optim, count=20, lr=lr)
    expected = [weights[0]]
    m = {name: torch.zeros_like(w) for name, w in weights[0].items()}
    v = {name: torch.zeros_like(w) for name, w in weights[0].items()}
    ratios = set()
    for gradient in gradients:
        after = {}
        for name, w in expected[-1].items():
            g = gradient[name]
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g * g
            s = m[name] / (v[name].sqrt() + eps) + (0.0 if name == "bias" else weight_decay) * w
            norm_w, norm_s = min(float(w.norm()), 10.0), float(s.norm())
            ratio = 1.0 if norm_w == 0 or norm_s == 0 else norm_w / (norm_s + eps)
            ratios.add((name, ratio == 1.0, norm_w == 10.0))
            after[name] = w - lr * ratio * s
        expected.append(after)
    assert_weights(weights, expected)
    assert {("zero", True, False), ("large", False, True), ("small", False, False)} <= ratios, "every branch is taken"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_the_textbooks(momentum: float) -> None:
    optim = OptimSection(name="sgd", lr=1.0, momentum=momentum, weight_decay=0.1)
    weights, gradients = steps_of(optim, count=5, lr=0.3)
    expected = [weights[0]]
    buffer = {name: torch.zeros_like(w) for name, w in weights[0].items()}
    for gradient in gradients:
        after = {}
        for name, w in expected[-1].items():
            buffer[name] = momentum * buffer[name] + gradient[name] + (0.0 if name == "bias" else 0.1) * w
            after[name] = w - 0.3 * buffer[name]
        expected.append(after)
    assert_weights(weights, expected)
