"""A tiny random model that reads and writes text."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.models import tiny_section
from txl_dist.infer.bundle import Package
from txl_dist.infer.language_model import LanguageModel
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.text.training import train_tokenizer

SEGMENT_LEN, MEMORY_LEN = 8, 24
TEXT = "the cat sat on the mat, the dog did not"


def random_model(*, seed: int = 0, document_border: str = "carry", kind: str = "byte", **changes: Any) -> LanguageModel:
    """A tiny model, of bytes unless told otherwise."""
    torch.manual_seed(seed)
    tokenizer, section = train_tokenizer(kind, lambda: [TEXT]), tiny_section(**changes)
    network = TransformerXL(section, vocab_size=tokenizer.vocab_size)
    package = Package(
        section=section,
        weights=dict(network.named_parameters()),
        tokenizer=tokenizer,
        segment_len=SEGMENT_LEN,
        memory_len=MEMORY_LEN if section.scheme.uses_memory else 0,
        document_border=document_border,
        source={},
        probe={},
    )
    return LanguageModel(package.open(where="a test"))
