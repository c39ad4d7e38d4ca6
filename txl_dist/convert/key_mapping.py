"""Map between this package's tensor names and the names of the original PyTorch code.

NVIDIA's and Hugging Face's code use the original names too. The same table is used for reading and writing. Called on
tensors without storage, `to_original` also gives the names and shapes that a file must have. Most tensors differ only
in their names, but these differ in other ways too:

    qkv_net            has rows of query, key, value. Here they are in `query` and `key_value`.
    cluster_weight     has tail cluster C - i in row i. Here row i has cluster i + 1, so rows are flipped.
    r_w_bias           is shared by all layers, or [L, N, H] with learned positions. Here it is in every layer.
    r_emb, r_bias      are [L, P, ...], with distance 0 in the last row. Here it is in the first row (rows are flipped).
    tied tensors       are in both programs under both of their names, or only under one of them.

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
    """Return this package's weights under the original code's names.

    Tied weights must be under each of their names, as in `TransformerXL.state_dict`.
    """
    original: Weights = {}
    for original_name, our_name in one_to_one(model).items():
        if our_name in weights:
            original[original_name] = weights[our_name]
    if model.positions != "absolute":
        for layer in range(model.num_layers):
            attention = f"blocks.{layer}.attention"
            query_key_value = [weights[f"{attention}.query.weight"], weights[f"{attention}.key_value.weight"]]
            original[f"layers.{layer}.dec_attn.qkv_net.weight"] = torch.cat(query_key_value)
    if model.positions == "learned_relative":
        original["r_w_bias"] = _stack_layers(weights, "attention.content_bias", model)
        for our_name, original_name in _TABLES.items():
            original[original_name] = _stack_layers(weights, our_name, model).flip(1)
    if model.cutoffs:
        for name in ("cluster_weight", "cluster_bias"):
            original[f"crit.{name}"] = weights[f"softmax.{name}"].flip(0)
    return original


def _stack_layers(weights: Weights, name: str, model: ModelSection) -> Tensor:
    """Stack the tensors of all layers into one tensor [L, ...]."""
    tensors = [weights[f"blocks.{layer}.{name}"] for layer in range(model.num_layers)]
    return torch.stack(tensors)


def from_original(original: Weights, model: ModelSection) -> Weights:
    """Return the original's weights under this package's names. This is the inverse of `to_original`.

    If a tensor is tied or shared, the argument can have the tensor under only one of its names. Then the result has it
    under only one name too.
    """
    weights: Weights = {}
    for original_name, our_name in one_to_one(model).items():
        if original_name in original:
            weights[our_name] = original[original_name]
    if model.positions != "absolute":
        inner = model.num_heads * model.head_width
        for layer in range(model.num_layers):
            query_key_value = original[f"layers.{layer}.dec_attn.qkv_net.weight"]
            query, key_value = query_key_value.split([inner, 2 * inner])
            weights[f"blocks.{layer}.attention.query.weight"] = query
            weights[f"blocks.{layer}.attention.key_value.weight"] = key_value
    if model.positions == "learned_relative":
        for layer in range(model.num_layers):
            weights[f"blocks.{layer}.attention.content_bias"] = original["r_w_bias"][layer]
            for our_name, original_name in _TABLES.items():
                rows = original[original_name][layer]
                weights[f"blocks.{layer}.{our_name}"] = rows.flip(0)
    if model.cutoffs:
        for name in ("cluster_weight", "cluster_bias"):
            weights[f"softmax.{name}"] = original[f"crit.{name}"].flip(0)
    return weights


def one_to_one(model: ModelSection) -> dict[str, str]:
    """Return this package's name for each name of the original, for tensors that are equal in both programs.

    Embedding tables and projections that are tied, or that the model lacks, are included.
    """
    in_layer = dict(_IN_LAYER)
    if model.positions == "absolute":
        in_layer |= _ABSOLUTE
    if model.positions == "relative":
        in_layer |= _RELATIVE
        if not model.share_biases:
            in_layer |= _PER_LAYER
    names: dict[str, str] = {}
    for layer in range(model.num_layers):
        for our_name, original_name in in_layer.items():
            names[f"layers.{layer}.{original_name}"] = f"blocks.{layer}.{our_name}"
    if model.positions == "relative" and model.share_biases:
        for our_name, original_name in _SHARED.items():
            names[original_name] = f"blocks.0.{our_name}"
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
    """Return the tensors that a model ties, as a dict from the softmax's name to the embedding's name.

    All names are the original code's names.
    """
    if model.div_value == 1:
        num_tables = 1
    else:
        num_tables = len(model.cutoffs) + 1
    tied: dict[str, str] = {}
    if model.tie_weights:
        for i in range(num_tables):
            tied[f"crit.out_layers.{i}.weight"] = f"word_emb.emb_layers.{i}.weight"
    for i, is_tied in enumerate(model.tie_projections):
        if is_tied:
            tied[f"crit.out_projs.{i}"] = f"word_emb.emb_projs.{min(i, num_tables - 1)}"
    return tied


def shapes_of(model: ModelSection, *, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by the original's name. Tied tensors are under both of their names."""
    weights = without_storage(model, vocab_size=vocab_size)
    original = to_original(weights, model)
    return {name: tuple(tensor.shape) for name, tensor in original.items()}


def without_storage(model: ModelSection, *, vocab_size: int) -> Weights:
    """Return this package's weights as tensors with shapes but without values, which take no memory.

    Tied weights are under each of their names.
    """
    with torch.device("meta"):
        return dict(TransformerXL(model, vocab_size=vocab_size).state_dict())
