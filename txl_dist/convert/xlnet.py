"""Import and export of folders of Hugging Face's XLNetLMHeadModel (Yang et al. 2019).

A folder has config.json, and model.safetensors or pytorch_model.bin. The content stream of XLNet is this package's
Transformer-XL with a GELU network, biases u and v per layer, embeddings without a factor, and a plain softmax whose
weights are the embeddings. Most tensors differ only in their names, but these differ in other ways too:

    q, k, v, r      are [D, N, H]. Here they are matrices [N H, D], and the keys and values are in one matrix.
    o               is [D, N, H]. Here it is a matrix [D, N H].
    mask_emb        is [1, 1, D], the input of every query row. Here it is `target_row`, [D].
    r_s_bias        and seg_embed are the segment terms. A model without segment terms has zeros there.

Shapes: D model width, N heads, H head width.
"""

from __future__ import annotations

import torch

from txl_dist.config.schema import ModelSection
from txl_dist.convert.key_mapping import Weights

PREFIX = "transformer."
_IN_LAYER = {
    "rel_attn.r_w_bias": "attention.content_bias",
    "rel_attn.r_r_bias": "attention.position_bias",
    "rel_attn.layer_norm.weight": "attention_norm.weight",
    "rel_attn.layer_norm.bias": "attention_norm.bias",
    "ff.layer_1.weight": "ff_in.weight",
    "ff.layer_1.bias": "ff_in.bias",
    "ff.layer_2.weight": "ff_out.weight",
    "ff.layer_2.bias": "ff_out.bias",
    "ff.layer_norm.weight": "ff_norm.weight",
    "ff.layer_norm.bias": "ff_norm.bias",
}
"""This package's name for each tensor of a layer that is equal in both programs."""
_SEGMENT_TERMS = {"rel_attn.r_s_bias": "attention.segment_bias", "rel_attn.seg_embed": "attention.segment_encoding"}
"""Names of the tensors of the segment terms, which a model may lack."""


def from_xlnet(peer_weights: Weights, model: ModelSection) -> Weights:
    """Return XLNet's weights under this package's names.

    `peer_weights` are those of XLNetLMHeadModel. The tied weight of the softmax is under the embedding's name only.
    """
    weights: Weights = {
        "embedding.weight_0": peer_weights[f"{PREFIX}word_embedding.weight"],
        "softmax.bias_0": peer_weights["lm_loss.bias"],
        "target_row": peer_weights[f"{PREFIX}mask_emb"].flatten(),
    }
    for layer in range(model.num_layers):
        theirs = f"{PREFIX}layer.{layer}."
        ours = f"blocks.{layer}."
        for their_name, our_name in _names_in_layer(model).items():
            weights[ours + our_name] = peer_weights[theirs + their_name]
        query, key, value, distance = (
            peer_weights[f"{theirs}rel_attn.{name}"].flatten(1).t().contiguous() for name in "qkvr"
        )
        weights[f"{ours}attention.query.weight"] = query
        weights[f"{ours}attention.key_value.weight"] = torch.cat([key, value])
        weights[f"{ours}attention.distance.weight"] = distance
        weights[f"{ours}attention.output.weight"] = peer_weights[f"{theirs}rel_attn.o"].flatten(1)
    return weights


def to_xlnet(weights: Weights, model: ModelSection) -> Weights:
    """Return this package's weights under XLNet's names. It is the inverse of `from_xlnet`.

    A model without segment terms gets zeros for them, which change no score.
    """
    heads = (model.width, model.num_heads, model.head_width)
    peer_weights: Weights = {
        f"{PREFIX}word_embedding.weight": weights["embedding.weight_0"],
        f"{PREFIX}mask_emb": weights["target_row"][None, None],
        "lm_loss.bias": weights["softmax.bias_0"],
    }
    for layer in range(model.num_layers):
        theirs = f"{PREFIX}layer.{layer}."
        ours = f"blocks.{layer}."
        for their_name, our_name in _names_in_layer(model).items():
            peer_weights[theirs + their_name] = weights[ours + our_name]
        if not model.segment_terms:
            bias = weights[f"{ours}attention.content_bias"]
            peer_weights[f"{theirs}rel_attn.r_s_bias"] = torch.zeros_like(bias)
            peer_weights[f"{theirs}rel_attn.seg_embed"] = torch.zeros_like(torch.stack([bias, bias]))
        key, value = weights[f"{ours}attention.key_value.weight"].chunk(2)
        matrices = {
            "q": weights[f"{ours}attention.query.weight"],
            "k": key,
            "v": value,
            "r": weights[f"{ours}attention.distance.weight"],
        }
        for name, matrix in matrices.items():
            peer_weights[f"{theirs}rel_attn.{name}"] = matrix.t().reshape(heads)
        peer_weights[f"{theirs}rel_attn.o"] = weights[f"{ours}attention.output.weight"].reshape(heads)
    return peer_weights


def _names_in_layer(model: ModelSection) -> dict[str, str]:
    """Return this package's name for each tensor of a layer that only changes its name."""
    if model.segment_terms:
        return _IN_LAYER | _SEGMENT_TERMS
    return _IN_LAYER
