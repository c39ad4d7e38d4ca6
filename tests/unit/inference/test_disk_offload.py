"""A network that reads its weights piece by piece computes the same as the network with all weights in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.models import POSITIONS, VARIANTS, VOCAB_SIZE, random_tokens, tiny_model
from txl_dist.inference import disk_offload as streamed
from txl_dist.inference import weights
from txl_dist.inference.disk_offload import DiskOffloadedXL
from txl_dist.inference.probe import log_probabilities

MEMORY_LEN = 6
ALL: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "absolute": POSITIONS["absolute"],
    "untied": {"tie_weights": False, "cutoffs": (5, 20), "div_value": 2},
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_scores_are_those_of_the_network_however_small_the_pieces(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    model = tiny_model(dtype=dtype, **ALL[name]).eval()
    held = {key: parameter.detach() for key, parameter in model.named_parameters()}
    network = DiskOffloadedXL(model.section, vocab_size=VOCAB_SIZE, weights=held, dtype=dtype)
    memory_len = MEMORY_LEN if model.section.scheme.uses_memory else 0
    tokens = random_tokens(2, 14)
    expected = log_probabilities(model, tokens, segment_len=7, memory_len=memory_len)
    found = log_probabilities(network, tokens, segment_len=7, memory_len=memory_len)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    assert (found - expected).abs().max() <= tolerance
    assert torch.equal(found, expected) or model.section.cutoffs, "only the head of clusters is multiplied in parts"
    monkeypatch.setattr(weights, "_PIECE_VALUES", 25)  # two rows of the embedding
    monkeypatch.setattr(streamed, "_MOST_LOGITS", 3 * VOCAB_SIZE)  # three positions
    found = log_probabilities(network, tokens, segment_len=7, memory_len=memory_len)
    assert (found - expected).abs().max() <= tolerance
    kept = {name for name, parameter in network.named_parameters() if not parameter.is_meta}
    assert {name.rpartition(".")[2] for name in kept} <= {"content_bias", "position_bias", "value_share"}
