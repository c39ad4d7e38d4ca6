"""State dicts of labml's annotated Transformer-XL (labml_nn.transformers.xl).

Pre-norm with a final norm, learned relative positions per layer, biases on values and attention's output, embeddings
not scaled, output rows not tied. Its tables hold a row for every distance to the past and to the future, distance 0 at
row P of 2 P; a language model reads rows 0 to P only, and only those are kept. The tables tell the number of heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from txl_dist.config.schema import ModelSection
from txl_dist.convert.checks import (
    Imported,
    PeerSettings,
    count,
    only_tensors,
    refuse,
    section,
    shape_problems,
    size,
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
    """The experiment's configuration."""

    n_vocab: int | None = None
    d_model: int | None = None
    heads: int | None = None
    d_ff: int | None = None
    n_layers: int | None = None
    seq_len: int | None = None
    mem_len: int | None = None
    dropout: float = 0.0


def import_labml(path: Path, *, told: dict[str, Any]) -> Imported:
    """Read a state dict. Raises CheckpointError."""
    settings = LabmlSettings.of({}, told, where=str(path))
    theirs = only_tensors(read_weights(path), where=str(path))
    model = _section(theirs, settings, where=str(path))
    vocab_size = settings.n_vocab or size(theirs, "src_embed.weight", 0, dims=2, where=str(path))
    _check(theirs, model, vocab_size=vocab_size, where=str(path))
    weights = {our: theirs[their] for their, our in _names(model).items()}
    for layer in range(model.num_layers):
        attention = f"transformer.layers.{layer}.self_attn"
        weights[f"blocks.{layer}.attention.key_value.weight"] = torch.cat(
            [theirs[f"{attention}.key.linear.weight"], theirs[f"{attention}.value.linear.weight"]]
        )
        for their, our in _TABLES.items():
            table = theirs[f"{attention}.{their}"]
            weights[f"blocks.{layer}.{our}"] = table[: _zero_row(table.shape[0]) + 1].flip(0)
    return Imported(
        model=model,
        weights=weights,
        vocab_size=vocab_size,
        segment_len=settings.seq_len or 0,
        memory_len=-1 if settings.mem_len is None else settings.mem_len,
        tokenizer=None,
    )


def _section(theirs: Weights, settings: LabmlSettings, *, where: str) -> ModelSection:
    num_layers = settings.n_layers or count(theirs, "transformer.layers.")
    size(theirs, f"transformer.layers.{num_layers - 1}.norm_ff.weight", 0, dims=1, where=where)
    layer1 = "transformer.layers.0.feed_forward.layer1.weight"
    values = {
        "num_layers": num_layers,
        "width": settings.d_model or size(theirs, "src_embed.weight", 1, dims=2, where=where),
        "num_heads": settings.heads or size(theirs, _FIRST, 1, dims=3, where=where),
        "head_width": size(theirs, _FIRST, 2, dims=3, where=where),
        "ff_width": settings.d_ff or size(theirs, layer1, 0, dims=2, where=where),
        "tie_weights": False,
        "pre_norm": True,
        "final_norm": True,
        "share_biases": False,
        "positions": "learned_relative",
        "num_distances": _zero_row(size(theirs, _FIRST, 0, dims=3, where=where)) + 1,
        "value_bias": any(name.endswith(".value.linear.bias") for name in theirs),  # older versions have none
        "output_bias": True,
        "scale_embedding": False,
        "dropout": settings.dropout,
        "attention_dropout": settings.dropout,
        "embed_dropout": 0.0,
        "output_dropout": 0.0,
    }
    return section(values, where=where)


def _zero_row(num_rows: int) -> int:
    """Row of distance 0: half-way in a whole table, the last one where the rows of the future were cut off."""
    return num_rows // 2 if num_rows % 2 == 0 else num_rows - 1


def _names(model: ModelSection) -> dict[str, str]:
    """{their name: our name} of tensors that are the same on both sides."""
    names = dict(_AROUND)
    for layer in range(model.num_layers):
        names |= {f"transformer.layers.{layer}.{their}": f"blocks.{layer}.{our}" for their, our in _IN_LAYER.items()}
        if not model.value_bias:
            del names[f"transformer.layers.{layer}.self_attn.value.linear.bias"]
    return names


def _check(theirs: Weights, model: ModelSection, *, vocab_size: int, where: str) -> None:
    ours = without_storage(model, vocab_size=vocab_size)
    expected = {their: tuple(ours[our].shape) for their, our in _names(model).items()}
    inner, rows = model.num_heads * model.head_width, theirs[_FIRST].shape[0]
    for layer in range(model.num_layers):
        attention = f"transformer.layers.{layer}.self_attn"
        expected |= {f"{attention}.{name}.linear.weight": (inner, model.width) for name in ("key", "value")}
        expected[f"{attention}.key_pos_embeddings"] = (rows, model.num_heads, model.head_width)
        expected[f"{attention}.key_pos_bias"] = (rows, model.num_heads)
    refuse(shape_problems(theirs, expected), where=where)
