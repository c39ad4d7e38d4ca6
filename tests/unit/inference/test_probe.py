"""The probe: a few fixed tokens whose recorded losses depend on every weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.models import tiny_section
from txl_dist.inference.probe import PROBE_LEN, probe_error, probe_of
from txl_dist.model.transformer_xl import TransformerXL


@pytest.mark.parametrize("settings", [{}, {"segment_terms": True}], ids=["plain", "segment terms"])
def test_the_probe_of_a_model_of_any_order_depends_on_every_weight(settings: dict[str, Any]) -> None:
    torch.manual_seed(2)
    section = tiny_section(init_std=0.2, any_order=True, share_biases=False, **settings)
    model = TransformerXL(section, vocab_size=40).eval()
    probe = probe_of(model, memory_len=16)
    assert probe["losses"].shape == (1, 2 * PROBE_LEN)
    assert probe["losses"].isfinite().all()
    assert probe_error(model, probe, memory_len=16) == 0.0
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            before = parameter.clone()
            parameter.mul_(1.5).add_(0.1 * torch.randn_like(parameter))
            assert probe_error(model, probe, memory_len=16) > 1e-3, name
            parameter.copy_(before)
    assert probe_error(model, probe, memory_len=0) > 1e-3
