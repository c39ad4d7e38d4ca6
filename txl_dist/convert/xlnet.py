"""Import and export of folders of Hugging Face's XLNetLMHeadModel (Yang et al. 2019).

A folder has config.json, and model.safetensors or pytorch_model.bin. The content stream of XLNet is this package's
Transformer-XL with a GELU network, biases u and v per layer, embeddings without a factor, and a plain softmax whose
weights are the embeddings. Most tensors differ only in their names, but these differ in other ways too:

    q, k, v, r      are [D, N, H]. Here they are matrices [N H, D], and the keys and values are in one matrix.
    o               is [D, N, H]. Here it is a matrix [D, N H].
    mask_emb        is [1, 1, D], the input of every query row. Here it is `target_row`, [D].
    r_s_bias        and seg_embed are the segment terms: scores that depend on whether two tokens are in the same text
                    of a pair of texts. If a model of this package has no segment terms, its export has zeros for them.

Shapes: D model width, N heads, H head width.
"""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from txl_dist.artifacts import ArtifactKind
from txl_dist.config.schema import ModelSection
from txl_dist.console.logging import logger
from txl_dist.convert.huggingface import read_parts
from txl_dist.convert.huggingface_tokenizer import library_tokenizer, special_tokens_of
from txl_dist.convert.import_checks import (
    Imported,
    PeerSettings,
    only_tensors,
    read_peer_settings,
    refuse,
    section,
    shape_problems,
)
from txl_dist.convert.key_mapping import Weights, without_storage
from txl_dist.convert.output_dir import check_reread, replaced_folder, require_older_export, write_json
from txl_dist.errors import CheckpointError
from txl_dist.inference.bundle import DTYPES, Package
from txl_dist.inference.card import README, write_readme
from txl_dist.io.files import write_bytes
from txl_dist.io.tensor_files import write_tensors
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.foreign import SentencePieceTokenizer
from txl_dist.tokenizers.importing import open_tokenizer

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
"""Names of the tensors of the segment terms, which a model can lack. Segment terms are attention scores that depend on
whether two tokens are in the same text of a pair of texts."""

TOKENIZERS = ("txl_tokenizer.json", "tokenizer.json", "spiece.model")
"""Names of the files that may hold the tokenizer, in the order in which they are tried."""
WRITTEN = {"config.json", "model.safetensors", *TOKENIZERS, "tokenizer_config.json", README}
"""Names of the files that an export may have."""
SPECIAL_TOKENS = {
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "cls_token": "<cls>",
    "sep_token": "<sep>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
"""Special tokens of XLNet's own vocabulary, by the names that tokenizer_config.json gives them."""
_ACTIVATIONS = {"gelu": "gelu", "relu": "relu"}
"""This package's name for each activation that both programs have."""


class XlnetSettings(PeerSettings):
    """Settings in the config.json of an XLNet model."""

    vocab_size: int
    n_layer: int
    d_model: int
    n_head: Annotated[int, Field(gt=0)]
    d_inner: int
    d_head: int | None = None
    ff_activation: str = "gelu"
    attn_type: Literal["bi", "uni"] = "bi"
    mem_len: int | None = None
    reuse_len: Annotated[int | None, Field(ge=0)] = None
    bi_data: bool = False
    clamp_len: int = -1
    dropout: float = 0.1
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    seq_len: Annotated[int | None, Field(ge=0)] = None
    same_length: bool = False


def import_xlnet(path: Path, *, user_settings: dict[str, Any]) -> Imported:
    """Read a folder with a model of Hugging Face's XLNet. Returns the model with the settings and names of txl_dist.

    `user_settings` are settings, by Hugging Face's names, that replace the settings in config.json. `seq_len` is the
    length of a segment. A model of `attn_type` "uni" becomes a Transformer-XL that predicts the next token. Raises
    CheckpointError, or DataError for a tokenizer that cannot be read.
    """
    config_file = path / "config.json"
    if not config_file.is_file():
        raise CheckpointError(f"{path} has no config.json. Name the folder that save_pretrained wrote.")
    config = read_peer_settings(config_file)
    if config.get("model_type", "xlnet") != "xlnet":
        raise CheckpointError(
            f"{config_file} describes a model of type {config['model_type']}, not xlnet. Name the folder of an "
            "XLNet model."
        )
    settings = XlnetSettings.of(config, user_settings, where=str(config_file))
    if settings.bi_data:
        logger.warning(
            "%s: bi_data is true. The model was trained on texts in both directions, which txl_dist does not train. It "
            "reads every text forwards",
            config_file,
        )
    if settings.same_length and settings.attn_type == "uni":
        raise CheckpointError(
            f"{config_file}: same_length is true and attn_type is 'uni', but txl_dist imports such models only with "
            "same_length false, where each token sees the whole memory. Set same_length to false if this is intended."
        )
    peer_weights = only_tensors(read_parts(path), where=str(path))
    head = peer_weights.pop("lm_loss.weight", None)
    embedding = peer_weights.get(f"{PREFIX}word_embedding.weight")
    ties_weights = head is None or (embedding is not None and torch.equal(head, embedding))
    has_segment_terms = any(
        bool(tensor.any()) for name, tensor in peer_weights.items() if name.endswith(tuple(_SEGMENT_TERMS))
    )
    model = _section(
        settings,
        segment_terms=has_segment_terms and settings.attn_type == "bi",
        tie_weights=ties_weights,
        where=str(config_file),
    )
    vocab_size = settings.vocab_size
    expected = _expected_shapes(model.model_copy(update={"any_order": True}), vocab_size=vocab_size)
    refuse(shape_problems(peer_weights, expected), where=str(path))
    weights = from_xlnet(peer_weights, model)
    if not ties_weights:
        assert head is not None
        weights["softmax.weight_0"] = head
    reuse_len = settings.reuse_len or 0
    return Imported(
        model=model,
        weights=weights,
        vocab_size=vocab_size,
        segment_len=settings.seq_len or 2 * reuse_len,
        memory_len=-1 if settings.mem_len is None else settings.mem_len,
        reuse_len=reuse_len if settings.attn_type == "bi" else 0,
        tokenizer=_tokenizer_in(path, vocab_size=vocab_size),
    )


def _section(settings: XlnetSettings, *, segment_terms: bool, tie_weights: bool, where: str) -> ModelSection:
    """Return the model section. Raises CheckpointError for an activation that this package lacks."""
    if settings.ff_activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"{where}: ff_activation is {settings.ff_activation!r}, but txl_dist imports only models with "
            f"{' or '.join(_ACTIVATIONS)}."
        )
    values = {
        "num_layers": settings.n_layer,
        "width": settings.d_model,
        "num_heads": settings.n_head,
        "head_width": settings.d_head or settings.d_model // settings.n_head,
        "ff_width": settings.d_inner,
        "activation": _ACTIVATIONS[settings.ff_activation],
        "clamp_len": max(0, settings.clamp_len),
        "dropout": settings.dropout,
        "attention_dropout": settings.dropout,
        "norm_eps": settings.layer_norm_eps,
        "init_std": settings.initializer_range,
        "share_biases": False,
        "scale_embedding": False,
        "tie_weights": tie_weights,
        "any_order": settings.attn_type == "bi",
        "segment_terms": segment_terms,
    }
    return section(values, where=where)


def _expected_shapes(model: ModelSection, *, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a folder must have, by XLNet's names."""
    weights = without_storage(model, vocab_size=vocab_size)
    return {name: tuple(tensor.shape) for name, tensor in to_xlnet(weights, model).items()}


def _tokenizer_in(folder: Path, *, vocab_size: int) -> Tokenizer | None:
    """Return the tokenizer of a folder. Returns None if no tokenizer in the folder has as many ids as the model."""
    for name in TOKENIZERS:
        if (folder / name).is_file():
            tokenizer = open_tokenizer(folder / name)
            if tokenizer.vocab_size == vocab_size:
                return tokenizer
            logger.warning(
                "%s has %d ids, and the model has %d. The tokenizer is left out",
                folder / name,
                tokenizer.vocab_size,
                vocab_size,
            )
    return None


def export_xlnet(out: Path, package: Package, *, dtype: str = "fp32") -> None:
    """Write a folder that transformers loads as XLNetLMHeadModel, or as an XLNet model for classification.

    A model that predicts the next token is written with `attn_type` "uni".

    The folder is read back and compared bit for bit. Raises CheckpointError if XLNet cannot express the model, or if
    `out` cannot be written or contains other files than such an export.
    """
    reasons = inexpressible(package.section)
    if reasons:
        raise CheckpointError(
            f"an XLNet folder cannot express this model: {'; '.join(reasons)}. Train with the settings of "
            "XLNet, or export a bundle."
        )
    if rates := other_dropout_rates(package.section):
        logger.warning(
            "an XLNet folder has one dropout rate. It will hold model.dropout=%s, and not %s. The scores are the same. "
            "To train with equal rates, set these settings to the value of model.dropout",
            package.section.dropout,
            ", ".join(rates),
        )
    out = out.resolve()
    require_older_export(out, needed={TOKENIZERS[0], "config.json"}, written=WRITTEN)
    cast = dict(package.open(dtype, where=str(out)).model.state_dict())
    written = to_xlnet(cast, package.section)
    with replaced_folder(out) as folder:
        write_json(folder / "config.json", _config(package, dtype=dtype))
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in written.items()}
        write_tensors(folder / "model.safetensors", tensors, metadata={"format": "pt"})
        _write_tokenizer(folder, package.tokenizer)
        check_reread(import_xlnet(folder, user_settings={}).weights, cast, where=out)
        num_bytes = (folder / "model.safetensors").stat().st_size
        described = package.described(dtype=dtype, num_bytes=num_bytes)
        write_readme(folder, dataclasses.replace(described, is_xlnet_folder=True), ArtifactKind.HUGGINGFACE)


def inexpressible(model: ModelSection) -> list[str]:
    """Return descriptions of a model's settings that XLNet lacks. The result is empty if XLNet has all of the model's
    settings."""
    required = {
        "share_biases": False,
        "scale_embedding": False,
        "tie_weights": True,
        "cutoffs": (),
        "div_value": 1,
        "positions": "relative",
        "same_length": "off",
        "norm": "layer",
        "pre_norm": False,
        "final_norm": False,
        "query_key_norm": False,
        "residual_scalars": False,
        "value_residual": False,
        "value_bias": False,
        "output_bias": False,
    }
    reasons = [
        f"model.{name} is {getattr(model, name)!r}, not {value!r}"
        for name, value in required.items()
        if getattr(model, name) != value
    ]
    if model.activation not in _ACTIVATIONS.values():
        reasons.append(f"model.activation is {model.activation!r}, not 'gelu' or 'relu'")
    if model.num_heads * model.head_width != model.width:
        reasons.append("model.num_heads * model.head_width is not model.width")
    if model.embed_width_or_default() != model.width:
        reasons.append(f"model.embed_width is {model.embed_width}, not 0")
    return reasons


def other_dropout_rates(model: ModelSection) -> list[str]:
    """Return the dropout settings whose rate differs from `model.dropout`, with their values."""
    names = [name for name in ModelSection.model_fields if name.endswith("_dropout")]
    rates = {name: model.rate(getattr(model, name)) for name in names}
    return [f"model.{name}={rate}" for name, rate in rates.items() if rate != model.dropout]


def _config(package: Package, *, dtype: str) -> dict[str, Any]:
    """Return the content of config.json. transformers has one dropout rate for all places."""
    model = package.section
    symbols = package.tokenizer.symbols
    special_tokens = _special_tokens(package.tokenizer)
    roles = {role: symbols.index(symbol) for role, symbol in special_tokens.items()}
    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    return {
        "model_type": "xlnet",
        "architectures": ["XLNetLMHeadModel"],
        "vocab_size": package.tokenizer.vocab_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "d_head": model.head_width,
        "d_model": model.width,
        "d_inner": model.ff_width,
        "ff_activation": activations[model.activation],
        "attn_type": "bi" if model.any_order else "uni",
        "bi_data": False,
        "same_length": False,
        "clamp_len": model.clamp_len or -1,
        "mem_len": package.memory_len or None,
        "reuse_len": (package.target_lengths.reuse_len or package.segment_len) if model.any_order else None,
        "seq_len": package.segment_len,
        "use_mems_eval": False,
        "use_mems_train": False,
        "untie_r": True,
        "dropout": model.dropout,
        "layer_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": True,
        "bos_token_id": roles.get("bos_token"),
        "eos_token_id": roles.get("eos_token"),
        "pad_token_id": roles.get("pad_token"),
        "dtype": str(DTYPES[dtype]).removeprefix("torch."),
    }


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens by their names in tokenizer_config.json.

    If the vocabulary has all of XLNet's special tokens, these are returned. Otherwise the special tokens of this
    package's tokenizer are returned.
    """
    if set(SPECIAL_TOKENS.values()) <= set(tokenizer.symbols):
        return SPECIAL_TOKENS
    return special_tokens_of(tokenizer)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write txl_tokenizer.json, and the tokenizer files of transformers if they can express the tokenizer.

    With XLNet's own vocabulary, transformers puts `<sep> <cls>` after each text, as it does for Hugging Face's folders
    of XLNet.
    """
    tokenizer.save(folder / TOKENIZERS[0])
    special_tokens = _special_tokens(tokenizer)
    has_types = special_tokens is SPECIAL_TOKENS
    config: dict[str, Any] = {
        **special_tokens,
        "padding_side": "left",
        "model_input_names": ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"],
    }
    if isinstance(tokenizer, SentencePieceTokenizer):
        if tokenizer.has_foreign_ids:
            write_bytes(folder / TOKENIZERS[2], base64.b64decode(tokenizer.content))
            write_json(folder / "tokenizer_config.json", {"tokenizer_class": "XLNetTokenizer", **config})
        return
    library = library_tokenizer(tokenizer, begins_documents=False)
    if library is None:
        return
    if has_types:
        library.post_processor = _template(tokenizer)
    library.save(str(folder / TOKENIZERS[1]))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})


def _template(tokenizer: Tokenizer) -> Any:
    """Return the library's template that puts `<sep> <cls>` after a text or a pair of texts, as XLNet's tokenizer
    does."""
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(
        single="$A:0 <sep>:0 <cls>:2",
        pair="$A:0 <sep>:0 $B:1 <sep>:1 <cls>:2",
        special_tokens=[(symbol, tokenizer.symbols.index(symbol)) for symbol in ("<sep>", "<cls>")],
    )


def from_xlnet(peer_weights: Weights, model: ModelSection) -> Weights:
    """Return XLNet's weights under this package's names.

    `peer_weights` are the weights of XLNetLMHeadModel. The tied weight of the softmax is under the embedding's name
    only.
    """
    weights: Weights = {
        "embedding.weight_0": peer_weights[f"{PREFIX}word_embedding.weight"],
        "softmax.bias_0": peer_weights["lm_loss.bias"],
    }
    if model.any_order:
        weights["target_row"] = peer_weights[f"{PREFIX}mask_emb"].flatten()
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

    A model without segment terms gets zeros for the segment terms, which change no score. A model that predicts the
    next token gets zeros for the row of the targets, which transformers then reads only if targets are named.
    """
    heads = (model.width, model.num_heads, model.head_width)
    embedding = weights["embedding.weight_0"]
    if model.any_order:
        target_row = weights["target_row"]
    else:
        target_row = torch.zeros_like(embedding[0])
    peer_weights: Weights = {
        f"{PREFIX}word_embedding.weight": embedding,
        f"{PREFIX}mask_emb": target_row[None, None],
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
    """Return this package's name for each name of XLNet, for tensors of a layer that are equal in both programs."""
    if model.segment_terms:
        return _IN_LAYER | _SEGMENT_TERMS
    return _IN_LAYER
