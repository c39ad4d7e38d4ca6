"""The names of the original PyTorch code, which NVIDIA's and Hugging Face's codes inherited, beside ours.

One table serves reading and writing: `to_original` is also what says, on tensors without storage, which names and
shapes a file must have. What differs from ours besides names:

    qkv_net            rows of query, key, value; ours are `query` and `key_value`
    cluster_weight     row i stands for tail cluster C - i; ours for i + 1: flipped
    r_w_bias           one for all layers, or (learned positions) [L, N, H]; ours stands in every layer that uses it
    r_emb, r_bias      [L, P, ...], the last row being distance 0; ours the first: flipped
    tied tensors       appear under both names, or under one

Shapes: C tail clusters, L layers, P rows of a table, N heads, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from txl_dist.config.schema import ModelSection
from txl_dist.model.transformer_xl import TransformerXL

Weights = dict[str, Tensor]

_IN_LAYER = {
    "attention.output.weight": "dec_attn.o_net.weight",
    "attention_norm.weight": "dec_attn.layer_norm.weight",
    "attention_norm.bias": "dec_attn.layer_norm.bias",
    "ff_in.weight": "pos_ff.CoreNet.0.weight",
    "ff_in.bias": "pos_ff.CoreNet.0.bias",
    "ff_out.weight": "pos_ff.CoreNet.3.weight",
    "ff_out.bias": "pos_ff.CoreNet.3.bias",
    "ff_norm.weight": "pos_ff.layer_norm.weight",
    "ff_norm.bias": "pos_ff.layer_norm.bias",
}
_RELATIVE = {"attention.distance.weight": "dec_attn.r_net.weight"}
_ABSOLUTE = {"attention.query.weight": "dec_attn.q_net.weight", "attention.key_value.weight": "dec_attn.kv_net.weight"}
_SHARED = {"attention.content_bias": "r_w_bias", "attention.position_bias": "r_r_bias"}
_PER_LAYER = {our: f"dec_attn.{their}" for our, their in _SHARED.items()}
_TABLES = {"attention.distance.weight": "r_emb", "attention.distance.bias": "r_bias"}


def to_original(weights: Weights, model: ModelSection) -> Weights:
    """Our weights, tied ones under each of their names (`TransformerXL.state_dict`), under the original's names."""
    theirs = {their: weights[our] for their, our in one_to_one(model).items() if our in weights}
    if model.positions != "absolute":
        for layer in range(model.num_layers):
            query, key_value = (weights[f"blocks.{layer}.attention.{name}.weight"] for name in ("query", "key_value"))
            theirs[f"layers.{layer}.dec_attn.qkv_net.weight"] = torch.cat([query, key_value])
    if model.positions == "learned_relative":
        for our, their in {"attention.content_bias": "r_w_bias", **_TABLES}.items():
            stacked = torch.stack([weights[f"blocks.{layer}.{our}"] for layer in range(model.num_layers)])
            theirs[their] = stacked.flip(1) if our in _TABLES else stacked
    for name in ("cluster_weight", "cluster_bias") if model.cutoffs else ():
        theirs[f"crit.{name}"] = weights[f"softmax.{name}"].flip(0)
    return theirs


def from_original(theirs: Weights, model: ModelSection) -> Weights:
    """The inverse of `to_original`; a tied or shared tensor may stand under one of its names only, on both sides."""
    weights = {our: theirs[their] for their, our in one_to_one(model).items() if their in theirs}
    if model.positions != "absolute":
        inner = model.num_heads * model.head_width
        for layer in range(model.num_layers):
            query, key_value = theirs[f"layers.{layer}.dec_attn.qkv_net.weight"].split([inner, 2 * inner])
            weights[f"blocks.{layer}.attention.query.weight"] = query
            weights[f"blocks.{layer}.attention.key_value.weight"] = key_value
    if model.positions == "learned_relative":
        for layer in range(model.num_layers):
            weights[f"blocks.{layer}.attention.content_bias"] = theirs["r_w_bias"][layer]
            weights |= {f"blocks.{layer}.{our}": theirs[their][layer].flip(0) for our, their in _TABLES.items()}
    for name in ("cluster_weight", "cluster_bias") if model.cutoffs else ():
        weights[f"softmax.{name}"] = theirs[f"crit.{name}"].flip(0)
    return weights


def one_to_one(model: ModelSection) -> dict[str, str]:
    """{their name: our name} of tensors that are the same on both sides. Tables and projections that a model lacks, or
    that are tied, are listed all the same."""
    in_layer = dict(_IN_LAYER)
    if model.positions == "absolute":
        in_layer |= _ABSOLUTE
    if model.positions == "relative":
        in_layer |= _RELATIVE if model.share_biases else _RELATIVE | _PER_LAYER
    names = {
        f"layers.{layer}.{their}": f"blocks.{layer}.{our}"
        for layer in range(model.num_layers)
        for our, their in in_layer.items()
    }
    if model.positions == "relative" and model.share_biases:
        names |= {their: f"blocks.0.{our}" for our, their in _SHARED.items()}
    for i in range(len(model.cutoffs) + 1):
        names |= {
            f"word_emb.emb_layers.{i}.weight": f"embedding.weight_{i}",
            f"word_emb.emb_projs.{i}": f"embedding.projection_{i}",
            f"crit.out_layers.{i}.weight": f"softmax.weight_{i}",
            f"crit.out_layers.{i}.bias": f"softmax.bias_{i}",
            f"crit.out_projs.{i}": f"softmax.projection_{i}",
        }
    return names


def partners(model: ModelSection) -> dict[str, str]:
    """{the softmax's name of a tensor: the embedding's name of it} for all tensors that this model ties."""
    num_tables = 1 if model.div_value == 1 else len(model.cutoffs) + 1
    tied: dict[str, str] = {}
    if model.tie_weights:
        tied |= {f"crit.out_layers.{i}.weight": f"word_emb.emb_layers.{i}.weight" for i in range(num_tables)}
    for i, is_tied in enumerate(model.tie_projections):
        if is_tied:
            tied[f"crit.out_projs.{i}"] = f"word_emb.emb_projs.{min(i, num_tables - 1)}"
    return tied


def shapes_of(model: ModelSection, *, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every name of the original and the shape it must have, tied tensors under both names."""
    ours = without_storage(model, vocab_size=vocab_size)
    return {name: tuple(tensor.shape) for name, tensor in to_original(ours, model).items()}


def without_storage(model: ModelSection, *, vocab_size: int) -> Weights:
    """Our weights, tied ones under each of their names, as shapes only. Allocates nothing."""
    with torch.device("meta"):
        return dict(TransformerXL(model, vocab_size=vocab_size).state_dict())
