"""A tiny random model that reads and generates text, for tests."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.helpers.models import tiny_section
from txl_dist.inference.bundle import Package
from txl_dist.inference.language_model import LanguageModel
from txl_dist.inference.sampling import uniform_numbers
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.tokenizers.training import train_tokenizer

SEGMENT_LEN, MEMORY_LEN = 8, 24
TEXT = "the cat sat on the mat, the dog did not"


def random_model(*, seed: int = 0, document_mask: bool = False, kind: str = "byte", **changes: Any) -> LanguageModel:
    """Return a tiny random model. Its default tokenizer has byte tokens."""
    torch.manual_seed(seed)
    tokenizer, section = train_tokenizer(kind, lambda: [TEXT]), tiny_section(**changes)
    network = TransformerXL(section, vocab_size=tokenizer.vocab_size)
    package = Package(
        section=section,
        weights=dict(network.named_parameters()),
        tokenizer=tokenizer,
        segment_len=SEGMENT_LEN,
        memory_len=MEMORY_LEN if section.scheme.uses_memory else 0,
        document_mask=document_mask,
        source={},
        probe={},
    )
    return LanguageModel(package.open(where="a test"))


def distance_to_border(lm: LanguageModel, text: str, written: list[int], seed: int) -> float:
    """Return how close the next sampled token is to another choice, for sampling without limits. It is the smaller
    distance of the two random numbers of the draw from the nearest border of their cumulative probabilities."""
    ids = [*lm.prompt(text).ids, *written]
    hidden, _ = lm.network(torch.tensor([ids]), lm.network.empty_memory(num_lanes=1, memory_len=0))
    p_V = lm.network.softmax.log_probabilities(hidden[:, -1])[0].double().exp()
    groups = p_V.split(1 + math.isqrt(len(p_V) - 1))
    first, second = uniform_numbers(seed).random((len(written) + 1, 2))[-1].tolist()
    group_borders = torch.stack([group.sum() for group in groups]).cumsum(0)
    group = groups[int((group_borders > first).nonzero()[0])]
    borders = group.cumsum(0) / group.sum()
    return min(float((group_borders - first).abs().min()), float((borders - second).abs().min()))
