"""Tiny networks for tests, with weights so large that every term of the model has a visible effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from txl_dist.config.schema import ModelSection
from txl_dist.inference.generate import Decoder, Request
from txl_dist.inference.options import Sampling
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import TransformerXL

VOCAB_SIZE = 50

RECURRENT: dict[str, dict[str, Any]] = {
    "relative": {},
    "learned_relative": {"positions": "learned_relative", "num_distances": 9},
}
"""Settings of the position encodings that support a memory. Nine distances are fewer than most tests have keys."""
POSITIONS: dict[str, dict[str, Any]] = {**RECURRENT, "absolute": {"positions": "absolute"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "post_norm": {},
    "pre_norm": {"pre_norm": True, "final_norm": True},
    "adaptive": {"cutoffs": (5, 20)},
    "adaptive_pre_norm": {"cutoffs": (5, 20), "pre_norm": True},
    "adaptive_div_2": {"cutoffs": (5, 20), "div_value": 2, "tie_projections": (False, True, True)},
    "clamped": {"clamp_len": 4, "share_biases": False},
    "learned": RECURRENT["learned_relative"],
    "learned_all_distances": {"positions": "learned_relative", "num_distances": 48, "pre_norm": True},
    "learned_clamped": {"clamp_len": 4, "share_biases": False, **RECURRENT["learned_relative"]},
    "labml_like": {
        "pre_norm": True,
        "final_norm": True,
        "value_bias": True,
        "output_bias": True,
        "scale_embedding": False,
        "activation": "gelu",
        **RECURRENT["learned_relative"],
    },
    "modern": {
        "pre_norm": True,
        "final_norm": True,
        "norm": "rms",
        "activation": "relu2",
        "query_key_norm": True,
        "residual_scalars": True,
        "value_residual": True,
    },
    "modern_post_norm": {
        "activation": "swiglu",
        "query_key_norm": True,
        "value_bias": True,
        "value_residual": True,
        **RECURRENT["learned_relative"],
    },
}
"""Settings of networks with a memory, by the name of their special feature."""


def tiny_section(**changes: Any) -> ModelSection:
    """Return the settings of a tiny network. The defaults are three layers, large initial weights and no dropout."""
    values: dict[str, Any] = {
        "num_layers": 3,
        "width": 12,
        "num_heads": 2,
        "head_width": 5,
        "ff_width": 16,
        "dropout": 0.0,
        "init_std": 0.3,
        "projection_init_std": 0.3,
    }
    return ModelSection.model_validate({**values, **changes})


def tiny_model(
    *, dtype: torch.dtype = torch.float32, seed: int = 0, memory_lens: Sequence[int] = (), **changes: Any
) -> TransformerXL:
    """Return a network of `tiny_section` in training mode. Its biases are random too, so that none is zero."""
    torch.manual_seed(seed)
    model = TransformerXL(tiny_section(**changes), vocab_size=VOCAB_SIZE, memory_lens=memory_lens)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(0.0, 0.3)
            elif name.endswith(("scales", "value_share")):
                parameter.normal_(0.7, 0.3)
    return model.to(dtype)


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    """Return random ids of the tiny vocabulary."""
    return torch.randint(0, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


def segment_losses(
    model: TransformerXL,
    tokens_BS: Tensor,
    *,
    memory_len: int,
    lengths: Sequence[int],
    document_BS: Tensor | None = None,
) -> Tensor:
    """Return the losses of tokens 1 ... of each row, computed in segments of the given lengths over a memory that
    begins empty."""
    memory: Memory = model.empty_memory(num_lanes=tokens_BS.shape[0], memory_len=memory_len)
    parts, start = [], 0
    for length in lengths:
        stop = start + length
        documents = None if document_BS is None else document_BS[:, start:stop]
        hidden_BTD, memory = model(tokens_BS[:, start:stop], memory, document_BT=documents)
        parts.append(model.softmax(hidden_BTD, tokens_BS[:, start + 1 : stop + 1]))
        start = stop
    assert start == tokens_BS.shape[1] - 1
    return torch.cat(parts, dim=1)


def generated(
    model: TransformerXL,
    ids: Sequence[int],
    *,
    max_tokens: int,
    segment_len: int,
    memory_len: int,
    seed: int = 0,
    stop_at: int | None = None,
    **sampling: Any,
) -> list[int]:
    """Return the tokens that continue one text, without `stop_at`. By default they are sampled with temperature 1 and
    without limits."""
    decoder = Decoder(model, memory_len=memory_len, segment_len=segment_len)
    limits = Sampling(**{"temperature": 1.0, "top_k": 0, **sampling})
    decoder.add(0, Request(ids=tuple(ids), max_tokens=max_tokens, seed=seed, stop_at=stop_at, sampling=limits))
    written = []
    while decoder.keys:
        for token in decoder.step():
            written.append(token.id)
            if token.is_last:
                decoder.remove(0)
    return written[:-1] if written[-1] == stop_at else written
