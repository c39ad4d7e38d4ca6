"""Matrices decay, biases and norms do not; the settings of this run hold, whatever a checkpoint restored."""

import torch

from txl_dist.model.transformer_xl import SegmentLoss, TransformerXL
from txl_dist.sections import ModelSection, OptimSection
from txl_dist.train.optim import apply_settings, build_optimizer


def optimizer_of(optim: OptimSection) -> tuple[SegmentLoss, torch.optim.Optimizer]:
    module = SegmentLoss(
        TransformerXL(ModelSection(num_layers=1, cutoffs=(5,), final_norm=True, pre_norm=True), vocab_size=9)
    )
    return module, build_optimizer(module, optim)


def test_every_parameter_is_in_one_group_and_only_matrices_decay() -> None:
    module, optimizer = optimizer_of(OptimSection(weight_decay=0.1))
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    assert sorted(names[id(p)] for group in optimizer.param_groups for p in group["params"]) == sorted(names.values())
    assert all("norm" not in names[id(p)] and "bias" not in names[id(p)] for p in decayed["params"])
    assert all("norm" in names[id(p)] or "bias" in names[id(p)] for p in kept["params"])


def test_settings_replace_those_that_a_checkpoint_restored() -> None:
    _, optimizer = optimizer_of(OptimSection(weight_decay=0.0, betas=(0.8, 0.9)))
    apply_settings(optimizer.param_groups, OptimSection(weight_decay=0.3, betas=(0.5, 0.6), eps=1e-5))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert all(group["betas"] == (0.5, 0.6) and group["eps"] == 1e-5 for group in optimizer.param_groups)
