"""XLNet's golden numbers, which Hugging Face's own code produced, and a naive model that loops over rows and keys.

See `tests/golden/README.md` for the files. Shapes: B lanes, T segment, m targets, M memory, D width.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from txl_dist.config.schema import AttentionKernel, ModelSection
from txl_dist.convert.xlnet import from_xlnet
from txl_dist.model.memory import EMPTY, Memory
from txl_dist.model.prediction_order import PredictionOrder
from txl_dist.model.transformer_xl import TransformerXL

GOLDEN = Path(__file__).parents[1] / "golden" / "xlnet"


class Golden(NamedTuple):
    """A case: its tensors, and the facts of its metadata."""

    tensors: dict[str, Tensor]
    num_segments: int
    memory_len: int
    reuse_len: int

    def of(self, name: str, segment: int) -> Tensor:
        return self.tensors[f"{name}.{segment}"]


def read_golden(case: str, folder: Path = GOLDEN) -> Golden:
    with safe_open(folder / f"{case}.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        metadata = file.metadata()
    shape = json.loads(metadata["shape"])
    settings = json.loads(metadata["settings"])
    config = json.loads((folder / "config.json").read_text()) | settings
    num_tokens = shape["T"]
    return Golden(
        load_file(folder / f"{case}.safetensors"),
        int(metadata["num_segments"]),
        config["mem_len"],
        config.get("reuse_len") or num_tokens,
    )


def section_of(folder: Path = GOLDEN, **settings: Any) -> ModelSection:
    config = json.loads((folder / "config.json").read_text())
    ours: dict[str, Any] = {
        "num_layers": config["n_layer"],
        "width": config["d_model"],
        "num_heads": config["n_head"],
        "head_width": config["d_head"],
        "ff_width": config["d_inner"],
        "clamp_len": max(0, config["clamp_len"]),
        "norm_eps": config["layer_norm_eps"],
        "activation": "gelu",
        "share_biases": False,
        "scale_embedding": False,
        "any_order": True,
        "dropout": 0.0,
    }
    return ModelSection(**(ours | settings))


def golden_model(
    *, attention: AttentionKernel, dtype: torch.dtype = torch.float32, folder: Path = GOLDEN, **settings: Any
) -> TransformerXL:
    """The model of a folder. Set `segment_terms` for the typed case."""
    section = section_of(folder, **settings)
    peer_weights = load_file(folder / "model.safetensors")
    vocab_size = len(peer_weights["transformer.word_embedding.weight"])
    model = TransformerXL(section, vocab_size=vocab_size, attention=attention)
    missing = model.load_state_dict(from_xlnet(peer_weights, section), strict=False)
    assert set(missing.missing_keys) <= {"softmax.weight_0"}
    assert not missing.unexpected_keys
    return model.to(dtype)


def levels_of(
    order_BT: Tensor, is_target_BT: Tensor, is_functional_BT: Tensor, *, reuse_len: int
) -> tuple[Tensor, ...]:
    """(query levels, key levels) of ranks within the two halves of a segment, by the formula of the golden's README."""
    num_tokens = order_BT.shape[1]
    step = num_tokens + 3
    half_T = (torch.arange(num_tokens) >= reuse_len).long()
    open_BT = ~(is_target_BT.bool() | is_functional_BT.bool())
    key_BT = torch.where(open_BT, 0, 1 + order_BT)
    query_BT = torch.where(open_BT, 1, 1 + order_BT + is_functional_BT.long())
    return half_T * step + query_BT, half_T * step + key_BT


def order_of(golden: Golden, segment: int, *, with_types: bool = False) -> PredictionOrder:
    """The order of a golden segment. Targets that are padding have the place 0, and their label does not count."""
    tokens_BT = golden.of("input_ids", segment)
    if f"order.{segment}" in golden.tensors:
        query_BT, key_BT = levels_of(
            golden.of("order", segment),
            golden.of("is_target", segment),
            golden.of("is_functional", segment),
            reuse_len=golden.reuse_len,
        )
    else:  # from left to right
        key_BT = query_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    place_Bm = golden.of("target_mapping", segment).argmax(dim=2)
    type_BT = golden.of("token_type_ids", segment) if with_types else None
    return PredictionOrder(query_BT, key_BT, place_Bm, golden.reuse_len, type_BT)


def first_memory(model: TransformerXL, golden: Golden, *, like: Tensor) -> Memory:
    """The memory before the first segment: what the golden gives, or nothing."""
    num_lanes = golden.of("input_ids", 0).shape[0]
    if "mems_in.0" not in golden.tensors:
        return model.empty_memory(num_lanes=num_lanes, memory_len=golden.memory_len)
    hidden = tuple(
        golden.tensors[f"mems_in.{layer}"].transpose(0, 1).to(like.dtype) for layer in range(model.section.num_layers)
    )
    missing = golden.memory_len - hidden[0].shape[1]
    padding = hidden[0].new_zeros(num_lanes, missing, hidden[0].shape[2])
    document_BM = torch.zeros(num_lanes, golden.memory_len, dtype=torch.int64)
    document_BM[:, :missing] = EMPTY
    return Memory(tuple(torch.cat([padding, one], dim=1) for one in hidden), document_BM)
