"""A whole micro-step on torch's meta device, which stores no values: waiting for a result raises an error there, and so
does a tensor that is on the CPU by mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.models import POSITIONS, tiny_section
from tests.helpers.waits import Waits
from txl_dist.data.loader.stream import plain_segment
from txl_dist.model.transformer_xl import SegmentLoss, TransformerXL
from txl_dist.train.batch import BatchMaker, to_device

CUTOFFS = {"cutoffs": (10, 30), "div_value": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    **POSITIONS,
    "clusters": CUTOFFS,
    "one_table": CUTOFFS | {"div_value": 1},
    "same_length": {"same_length": "memory", "dropout": 0.1, "attention_dropout": 0.1},
}
LANES, LENGTH, VOCAB_SIZE = 2, 6, 50
META = torch.device("meta")


@pytest.mark.parametrize("masks_documents", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_micro_step_runs_without_waiting_for_the_device(name: str, dtype: torch.dtype, masks_documents: bool) -> None:
    section = tiny_section(**VARIANTS[name])
    clusters = (0, *section.cutoffs, VOCAB_SIZE)
    maker = BatchMaker(clusters if section.div_value > 1 else (0, VOCAB_SIZE), clusters, masks_documents)
    ids = torch.randint(0, VOCAB_SIZE, (LANES, LENGTH + 1)).numpy()
    module = SegmentLoss(TransformerXL(section, vocab_size=VOCAB_SIZE)).to(META, dtype)
    batch = to_device(maker.batch(plain_segment(ids)), META)
    memory = module.model.empty_memory(num_lanes=LANES, memory_len=0 if name == "absolute" else 9)
    with Waits() as waits:
        for _ in range(2):
            loss, memory = module(batch, memory, float(LANES * LENGTH))
            loss.backward()
    assert waits.places == []
    assert loss.device == torch.stack(memory.hidden).device == META
    assert all(p.grad is not None and p.grad.device == META for p in module.parameters())


def test_values_cannot_be_asked_for_there() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        torch.ones(3, device=META).sum().item()
    with pytest.raises(NotImplementedError):
        torch.ones(3, device=META).nonzero()
