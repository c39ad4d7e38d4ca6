"""A bundle of a random model and a corpus with the same tokenizer, for tests of evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.helpers.corpora import tiny_corpus
from tests.helpers.models import tiny_section
from txl_dist.config.schema import TargetLengths
from txl_dist.data.loader.corpus import Corpus
from txl_dist.inference.bundle import Package, write_bundle
from txl_dist.inference.probe import probe_of
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.tokenizers.tokenizer import load_tokenizer

SEGMENT_LEN, MEMORY_LEN = 16, 24
NO_LENGTHS = TargetLengths()


class Made(NamedTuple):
    """A corpus, and a bundle of a random model with the same tokenizer."""

    corpus: Corpus
    bundle: Path
    weights: dict[str, Tensor]
    settings: dict[str, Any]


TEXTS = ["abc" * 40 + "d" * i for i in range(12)]


def make(
    folder: Path,
    *,
    document_mask: bool = False,
    texts: list[str] = TEXTS,
    kind: str = "byte",
    vocab_size: int = 0,
    begins_documents: bool = True,
    memory_len: int = MEMORY_LEN,
    target_lengths: TargetLengths = NO_LENGTHS,
    **settings: Any,
) -> Made:
    """Make the corpus and the bundle in a folder. `settings` are those of the section [model]."""
    folder.mkdir(exist_ok=True)
    corpus = tiny_corpus(folder, texts=texts, valid_fraction=0.3, kind=kind, vocab_size=vocab_size)
    tokenizer = load_tokenizer(corpus.folder / "tokenizer.json")
    torch.manual_seed(1)
    section = tiny_section(init_std=0.2, **settings)
    model = TransformerXL(section, vocab_size=tokenizer.vocab_size).eval()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    package = Package(
        section=section,
        weights=weights,
        tokenizer=tokenizer,
        segment_len=SEGMENT_LEN,
        target_lengths=target_lengths,
        memory_len=memory_len,
        document_mask=document_mask,
        begins_documents=begins_documents,
        source={"step": 1},
        probe=probe_of(model, memory_len=memory_len),
    )
    write_bundle(folder / "bundle", package)
    return Made(corpus, folder / "bundle", weights, settings)
