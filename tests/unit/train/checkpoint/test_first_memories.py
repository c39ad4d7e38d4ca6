"""The memory of lanes before their first token: empty, or zeros that are attended to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.models import random_tokens, tiny_model
from tests.helpers.tiny import tiny_config
from txl_dist.config.load import plan_batch
from txl_dist.train.checkpoint.memories import first_memories


@pytest.mark.parametrize("initial_memory", ["empty", "zeros"])
@torch.no_grad()
def test_lanes_begin_with_nothing_or_with_zeros_that_are_attended_to(initial_memory: str) -> None:
    config = tiny_config(train={"microbatch_lanes": 2})
    engine: Any = tiny_model()  # whose `empty_memory` an engine passes on
    plan = plan_batch(config.train, world_size=1)
    memories = first_memories(engine, plan, memory_len=7, initial=initial_memory)
    assert [memory.document_BM.shape for memory in memories] == [(2, 7), (2, 7)]
    assert all(not hidden_BMD.any() for memory in memories for hidden_BMD in memory.hidden)
    tokens_BT = random_tokens(2, 5)
    alone, _ = engine(tokens_BT, engine.empty_memory(num_lanes=2, memory_len=0))
    difference = (engine(tokens_BT, memories[0])[0] - alone).abs().max()
    assert difference < 1e-5 if initial_memory == "empty" else difference > 1e-3
