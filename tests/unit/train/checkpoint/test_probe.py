"""The probe of a checkpoint: the properties on which it must not depend."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.helpers.models import tiny_model
from txl_dist.model.transformer_xl import SegmentLoss
from txl_dist.train.batch import batch_maker
from txl_dist.train.checkpoint.engine_probe import make_probe


def test_a_probe_is_of_fp32_products_whatever_steps_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny_model().eval(), []

    def losses(batch: Any, memory: Any) -> Any:
        seen.append(torch.get_float32_matmul_precision())
        with torch.no_grad():
            return SegmentLoss(model)(batch, memory)

    engine = Mock(model=model, empty_memory=model.empty_memory, losses=losses)
    torch.set_float32_matmul_precision("high")
    try:
        make_probe(engine, batch_maker(model, mask_documents=False), memory_lens=[3] * model.section.num_layers)
        assert torch.get_float32_matmul_precision() == "high", "steps go on as they were"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == ["highest", "highest"]
