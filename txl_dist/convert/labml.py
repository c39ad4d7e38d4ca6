"""Import of state dicts of labml's annotated Transformer-XL (labml_nn.transformers.xl).

The model has pre-norm with a final norm, learned relative positions in each layer, and biases on values and on
attention's output. Embeddings are not scaled, and the output weights are not tied to the embeddings. The tables of
positions have a row for every distance to the past and to the future. A table has 2 P rows, and distance 0 is at row P.
A language model reads only rows 0 to P, so only these rows are imported. The number of heads is computed from the
tables' shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from txl_dist.config.schema import ModelSection
from txl_dist.convert.import_checks import (
    Imported,
    PeerSettings,
    count,
    dim_size,
    only_tensors,
    refuse,
    section,
    shape_problems,
)
from txl_dist.convert.key_mapping import Weights, without_storage
from txl_dist.convert.original import read_weights

_IN_LAYER = {
    "self_attn.query.linear.weight": "attention.query.weight",
    "self_attn.value.linear.bias": "attention.key_value.value_bias",
    "self_attn.output.weight": "attention.output.weight",
    "self_attn.output.bias": "attention.output.bias",
    "self_attn.query_pos_bias": "attention.content_bias",
    "norm_self_attn.weight": "attention_norm.weight",
    "norm_self_attn.bias": "attention_norm.bias",
    "feed_forward.layer1.weight": "ff_in.weight",
    "feed_forward.layer1.bias": "ff_in.bias",
    "feed_forward.layer2.weight": "ff_out.weight",
    "feed_forward.layer2.bias": "ff_out.bias",
    "norm_ff.weight": "ff_norm.weight",
    "norm_ff.bias": "ff_norm.bias",
}
_AROUND = {
    "src_embed.weight": "embedding.weight_0",
    "transformer.norm.weight": "final_norm.weight",
    "transformer.norm.bias": "final_norm.bias",
    "generator.weight": "softmax.weight_0",
    "generator.bias": "softmax.bias_0",
}
_TABLES = {"key_pos_embeddings": "attention.distance.weight", "key_pos_bias": "attention.distance.bias"}
_FIRST = "transformer.layers.0.self_attn.key_pos_embeddings"


class LabmlSettings(PeerSettings):
    """Settings of labml's experiment configuration."""

    n_vocab: int | None = None
    d_model: int | None = None
    heads: int | None = None
    d_ff: int | None = None
    n_layers: int | None = None
    seq_len: int | None = None
    mem_len: int | None = None
    dropout: float = 0.0


def import_labml(path: Path, *, user_settings: dict[str, Any]) -> Imported:
    """Read a state dict of labml's Transformer-XL. Returns the model with the settings and names of txl_dist.

    `user_settings` are the user's settings, by labml's names. Raises CheckpointError if the file cannot be read, or
    does not fit the settings.
    """
    settings = LabmlSettings.of({}, user_settings, where=str(path))
    peer_weights = only_tensors(read_weights(path), where=str(path))
    model = _section(peer_weights, settings, where=str(path))
    vocab_size = settings.n_vocab or dim_size(peer_weights, "src_embed.weight", 0, dims=2, where=str(path))
    _check(peer_weights, model, vocab_size=vocab_size, where=str(path))
    weights = {our_name: peer_weights[name] for name, our_name in _names(model).items()}
    for layer in range(model.num_layers):
        attention = f"transformer.layers.{layer}.self_attn"
        key = peer_weights[f"{attention}.key.linear.weight"]
        value = peer_weights[f"{attention}.value.linear.weight"]
        weights[f"blocks.{layer}.attention.key_value.weight"] = torch.cat([key, value])
        for name, our_name in _TABLES.items():
            table = peer_weights[f"{attention}.{name}"]
            num_rows = _zero_row(table.shape[0]) + 1
            weights[f"blocks.{layer}.{our_name}"] = table[:num_rows].flip(0)
    return Imported(
        model=model,
        weights=weights,
        vocab_size=vocab_size,
        segment_len=settings.seq_len or 0,
        memory_len=-1 if settings.mem_len is None else settings.mem_len,
        tokenizer=None,
    )


def _section(peer_weights: Weights, settings: LabmlSettings, *, where: str) -> ModelSection:
    """Return the model section. Settings that are not given are computed from the tensors' shapes."""
    num_layers = settings.n_layers or count(peer_weights, "transformer.layers.")
    # The last layer is checked first, so that a wrong number of layers is an error before they are all built.
    dim_size(peer_weights, f"transformer.layers.{num_layers - 1}.norm_ff.weight", 0, dims=1, where=where)
    layer1 = "transformer.layers.0.feed_forward.layer1.weight"
    has_value_bias = any(name.endswith(".value.linear.bias") for name in peer_weights)  # not in older versions
    values = {
        "num_layers": num_layers,
        "width": settings.d_model or dim_size(peer_weights, "src_embed.weight", 1, dims=2, where=where),
        "num_heads": settings.heads or dim_size(peer_weights, _FIRST, 1, dims=3, where=where),
        "head_width": dim_size(peer_weights, _FIRST, 2, dims=3, where=where),
        "ff_width": settings.d_ff or dim_size(peer_weights, layer1, 0, dims=2, where=where),
        "tie_weights": False,
        "pre_norm": True,
        "final_norm": True,
        "share_biases": False,
        "positions": "learned_relative",
        "num_distances": _zero_row(dim_size(peer_weights, _FIRST, 0, dims=3, where=where)) + 1,
        "value_bias": has_value_bias,
        "output_bias": True,
        "scale_embedding": False,
        "dropout": settings.dropout,
        "attention_dropout": settings.dropout,
        "embed_dropout": 0.0,
        "output_dropout": 0.0,
    }
    return section(values, where=where)


def _zero_row(num_rows: int) -> int:
    """Return the row of distance 0.

    Distance 0 is at the middle row of a whole table, or at the last row if the rows of the future were cut off.
    """
    if num_rows % 2 == 0:
        return num_rows // 2
    return num_rows - 1


def _names(model: ModelSection) -> dict[str, str]:
    """Return this package's name for each name of labml, for tensors that are equal in both programs."""
    names = dict(_AROUND)
    for layer in range(model.num_layers):
        for name, our_name in _IN_LAYER.items():
            names[f"transformer.layers.{layer}.{name}"] = f"blocks.{layer}.{our_name}"
        if not model.value_bias:
            del names[f"transformer.layers.{layer}.self_attn.value.linear.bias"]
    return names


def _check(peer_weights: Weights, model: ModelSection, *, vocab_size: int, where: str) -> None:
    """Raise CheckpointError if a tensor is missing, not expected, or of another shape than the model needs."""
    weights = without_storage(model, vocab_size=vocab_size)
    expected: dict[str, tuple[int, ...]] = {}
    for name, our_name in _names(model).items():
        expected[name] = tuple(weights[our_name].shape)
    inner = model.num_heads * model.head_width
    num_rows = peer_weights[_FIRST].shape[0]
    for layer in range(model.num_layers):
        attention = f"transformer.layers.{layer}.self_attn"
        expected[f"{attention}.key.linear.weight"] = (inner, model.width)
        expected[f"{attention}.value.linear.weight"] = (inner, model.width)
        expected[f"{attention}.key_pos_embeddings"] = (num_rows, model.num_heads, model.head_width)
        expected[f"{attention}.key_pos_bias"] = (num_rows, model.num_heads)
    refuse(shape_problems(peer_weights, expected), where=where)
