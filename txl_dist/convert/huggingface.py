"""Import and export of folders of Hugging Face's TransfoXLLMHeadModel (transformers 4.x, `deprecated.transfo_xl`).

The tensors have the names of the original code, with the prefix `transformer.`. The columns of tail clusters are in
natural order. The biases u and v are in every layer. If `untie_r` is False, the two biases are at the top level as
well. A folder has config.json, and pytorch_model.bin or model.safetensors. An export is read back and compared with the
model before it replaces an older folder.

Hugging Face's model begins with a memory of zeros, and its queries attend to these zeros. Use `zero_memory` when
scoring to get the same numbers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl_dist.artifacts import ArtifactKind
from txl_dist.config.schema import ModelSection
from txl_dist.convert.import_checks import Imported, count, only_tensors, read_peer_settings, refuse
from txl_dist.convert.key_mapping import Weights, partners, to_original
from txl_dist.convert.original import OriginalSettings, model_of, read_weights
from txl_dist.convert.output_dir import check_reread, replaced_folder, require_older_export, write_json
from txl_dist.convert.vocabulary import read_vocabulary
from txl_dist.errors import CheckpointError
from txl_dist.inference.bundle import DTYPES, Package, require_causal
from txl_dist.inference.card import README, write_readme
from txl_dist.io.files import write_bytes
from txl_dist.io.tensor_files import write_tensors
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.word_tokenizer import END_OF_LINE

PREFIX = "transformer."
BIASES = ("r_w_bias", "r_r_bias")
TOKENIZER = "txl_tokenizer.json"
VOCABULARIES = (TOKENIZER, "vocab.pkl", "vocab.bin", "vocab.txt")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
WRITTEN = {"config.json", "model.safetensors", TOKENIZER, "vocab.txt", "tokenizer_config.json", README}


def import_huggingface(path: Path, *, user_settings: dict[str, Any]) -> Imported:
    """Read a folder with a model of Hugging Face's TransfoXL. Returns the model with the settings and names of
    txl_dist.

    `user_settings` are settings, by Hugging Face's names, that the folder's config.json lacks. Raises CheckpointError
    if the model cannot be read, and DataError if the vocabulary cannot be read.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder. Name the folder with config.json and the weights.")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} holds no config.json. Name the folder that save_pretrained wrote.")
    config = read_peer_settings(path / "config.json")
    if config.get("model_type", "transfo-xl") != "transfo-xl":
        raise CheckpointError(
            f"{path / 'config.json'} belongs to a {config['model_type']} model, not to a transfo-xl "
            "model. Name another folder."
        )
    if config.get("attn_type", 0) != 0:
        raise CheckpointError(
            f"{path / 'config.json'} has attn_type {config['attn_type']}, but transformers supports only attn_type 0."
        )
    peer_weights = only_tensors(read_parts(path), where=str(path))
    imported = model_of(
        _original_names(peer_weights, where=str(path)),
        OriginalSettings.of(_with_defaults(config), user_settings, where=str(path / "config.json")),
        same_length="memory",
        ties_are_listed=False,
        where=str(path),
        shown=_huggingface_name,
    )
    for name in VOCABULARIES:
        if (path / name).is_file():
            tokenizer = read_vocabulary(path / name, vocab_size=imported.vocab_size)
            return dataclasses.replace(imported, tokenizer=tokenizer)
    return imported


def export_huggingface(out: Path, package: Package, *, dtype: str = "fp32") -> None:
    """Write a folder that transformers 4.46.3 loads as TransfoXL.

    Raises CheckpointError if the format cannot express the model, or if `out` is a folder that is not such an export.
    """
    model = package.section
    require_causal(model, where="the model")
    tokenizer = package.tokenizer
    reasons = inexpressible(model)
    if reasons:
        raise CheckpointError(
            f"a Hugging Face folder cannot express this model: {'; '.join(reasons)}. Export a bundle."
        )
    out = out.resolve()
    require_older_export(out, needed={TOKENIZER, "config.json"}, written=WRITTEN)
    cast = dict(package.open(dtype, where=str(out)).model.state_dict())  # has tied tensors under each of their names
    config = _config(package, dtype=dtype)
    with replaced_folder(out) as folder:
        write_json(folder / "config.json", config)
        write_tensors(folder / "model.safetensors", _huggingface_names(cast, model), metadata={"format": "pt"})
        tokenizer.save(folder / TOKENIZER)
        _write_vocabulary(folder, tokenizer)
        check_reread(import_huggingface(folder, user_settings={}).weights, cast, where=out)
        num_bytes = (folder / "model.safetensors").stat().st_size
        write_readme(folder, package.described(dtype=dtype, num_bytes=num_bytes), ArtifactKind.HUGGINGFACE)


def _write_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the files of TransfoXLTokenizer, if this tokenizer can express the vocabulary.

    TransfoXLTokenizer can express a vocabulary of words if one of the words stands for unknown words. The files name
    the special tokens. Without these names TransfoXLTokenizer would add its default special tokens after the
    vocabulary.
    """
    symbols = tokenizer.symbols
    unknowns = [symbol for symbol in ("<unk>", "<UNK>") if symbol in symbols]
    has_blanks = any(symbol.split() != [symbol] for symbol in symbols)
    if not unknowns or has_blanks:
        return
    unknown = unknowns[0]
    end = _end_of_text(tokenizer)
    config = {
        "tokenizer_class": "TransfoXLTokenizer",
        "additional_special_tokens": [],
        "unk_token": unknown,
        "eos_token": unknown if end is None else symbols[end],
    }
    lines = "\n".join(symbols)
    write_bytes(folder / "vocab.txt", lines.encode() + b"\n")
    write_json(folder / "tokenizer_config.json", config)


def inexpressible(model: ModelSection) -> list[str]:
    """Return descriptions of a model's settings that transformers' TransfoXL lacks.

    The result is empty if TransfoXL has all of the model's settings.
    """
    default = ModelSection()
    names = ["activation", "final_norm", "value_bias", "output_bias", "scale_embedding"]
    names += ["norm", "query_key_norm", "residual_scalars", "value_residual"]
    if model.div_value > 1:
        names.append("project_same_width")
    rates = ["embed_dropout", "distance_dropout", "projection_dropout", "ff_dropout", "output_dropout"]
    different = [name for name in names if getattr(model, name) != getattr(default, name)]
    for name in rates:
        rate = model.rate(getattr(model, name))
        if rate != model.dropout:
            different.append(name)
    reasons = [f"model.{name}={getattr(model, name)!r}" for name in different]
    if model.positions != "relative":
        reasons.append(f"model.positions={model.positions!r} (a Hugging Face folder has only relative positions)")
    if model.width % 2:
        reasons.append(f"model.width={model.width} is odd (the sinusoids of a Hugging Face folder need an even width)")
    return reasons


def read_parts(folder: Path) -> dict[str, Any]:
    """Read the state dict of a folder, from one file or from several files that an index lists."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            content: dict[str, Any] = read_weights(folder / name)
            return content
        if (folder / f"{name}.index.json").is_file():
            index = read_peer_settings(folder / f"{name}.index.json").get("weight_map")
            if not isinstance(index, dict) or not all(isinstance(part, str) for part in index.values()):
                raise CheckpointError(
                    f"{folder / name}.index.json is damaged: its weight_map lacks the tensors' file names. Copy the "
                    "file again."
                )
            weights: dict[str, Any] = {}
            # Only the last part of each name is used, so that an index cannot lead out of its folder.
            for file_name in sorted(set(index.values())):
                part = read_weights(folder / Path(file_name).name)
                weights |= only_tensors(part, where=str(folder))
            return weights
    raise CheckpointError(
        f"{folder} contains no weights: neither {' nor '.join(WEIGHTS)}, nor an index ({WEIGHTS[0]}.index.json) of "
        "weights in several files. Copy the folder again."
    )


def _original_names(peer_weights: Weights, *, where: str) -> Weights:
    """Return Hugging Face's weights under the original code's names.

    If the layers share biases, Hugging Face's weights also have a copy of the biases in every layer. The copies are
    compared with the shared biases and dropped. Raises CheckpointError for a model without softmax.
    """
    if "word_emb.emb_layers.0.weight" in peer_weights and "crit.out_layers.0.bias" not in peer_weights:
        raise CheckpointError(
            f"{where} is a model without a softmax layer (TransfoXLModel). Save a TransfoXLLMHeadModel."
        )
    weights: Weights = {}
    for name, tensor in peer_weights.items():
        weights[name.removeprefix(PREFIX)] = _flip_clusters(name, tensor)
    if BIASES[0] not in weights:
        return weights
    for bias in BIASES:
        for layer in range(count(weights, "layers.")):
            alias = weights.pop(f"layers.{layer}.dec_attn.{bias}", None)
            is_alias = alias is not None and bias in weights and torch.equal(alias, weights[bias])
            if not is_alias:
                name = f"{PREFIX}layers.{layer}.dec_attn.{bias}"
                refuse([f"{name} is missing, or differs from {PREFIX}{bias}, to which it must be equal"], where=where)
    return weights


def _flip_clusters(name: str, tensor: Tensor) -> Tensor:
    """Reverse the rows of a tensor with one row per tail cluster, because Hugging Face stores tail clusters in the
    opposite order.

    Any other tensor is returned unchanged.
    """
    if name in ("crit.cluster_weight", "crit.cluster_bias"):
        return tensor.flip(0)
    return tensor


def _huggingface_name(name: str) -> str:
    if name.startswith("crit."):
        return name
    return PREFIX + name


def _huggingface_names(weights: Weights, model: ModelSection) -> Weights:
    """Return the weights of txl_dist under Hugging Face's names.

    Each tensor is a copy, because the file format cannot store tensors that share memory.
    """
    original = to_original(weights, model)
    tied = partners(model)
    named: Weights = {}
    for name, tensor in original.items():
        if name not in tied:
            named[_huggingface_name(name)] = _flip_clusters(name, tensor)
    if model.share_biases:
        for bias in BIASES:
            for layer in range(model.num_layers):
                named[f"{PREFIX}layers.{layer}.dec_attn.{bias}"] = original[bias]
    exponents = torch.arange(0.0, model.width, 2.0) / model.width
    named[f"{PREFIX}pos_emb.inv_freq"] = 1 / (10000**exponents)
    return {name: tensor.detach().clone().contiguous() for name, tensor in named.items()}


def _config(package: Package, *, dtype: str) -> dict[str, Any]:
    """Return the content of config.json.

    With TransfoXL's `same_length` a query sees one key less than with this package's "memory_and_self". So for a model
    with "memory_and_self", `mem_len` is one token longer than the model's memory.
    """
    model = package.section
    is_wider = model.same_length == "memory_and_self"
    ties = model.tie_projections or (False,) * (len(model.cutoffs) + 1)
    return {
        "model_type": "transfo-xl",
        "architectures": ["TransfoXLLMHeadModel"],
        "vocab_size": package.tokenizer.vocab_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "d_head": model.head_width,
        "d_model": model.width,
        "d_inner": model.ff_width,
        "d_embed": model.embed_width_or_default(),
        "cutoffs": list(model.cutoffs),
        "div_val": model.div_value,
        "adaptive": bool(model.cutoffs),
        "tie_word_embeddings": model.tie_weights,
        "tie_projs": list(ties),
        "untie_r": not model.share_biases,
        "pre_lnorm": model.pre_norm,
        "attn_type": 0,
        "same_length": model.same_length != "off",
        "mem_len": package.memory_len + is_wider,
        "tgt_len": package.segment_len,
        "clamp_len": model.clamp_len or -1,
        "dropout": model.dropout,
        "dropatt": model.attention_dropout,
        "init_std": model.init_std,
        "proj_init_std": model.projection_init_std,
        "layer_norm_epsilon": model.norm_eps,
        "sample_softmax": -1,
        "eos_token_id": _end_of_text(package.tokenizer),
        "torch_dtype": str(DTYPES[dtype]).removeprefix("torch."),
    }


def _end_of_text(tokenizer: Tokenizer) -> int | None:
    """Return the id of the end-of-text token, else the id of the end-of-line token, else None."""
    if tokenizer.end_of_text is not None:
        return tokenizer.end_of_text
    if END_OF_LINE in tokenizer.symbols:
        return tokenizer.symbols.index(END_OF_LINE)
    return None


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json, with transformers' default values for the settings that config.json lacks."""
    cutoffs = config.get("cutoffs")
    if isinstance(cutoffs, list):
        num_tails = len(cutoffs)
    else:
        num_tails = 0
    defaults = {
        "tie_word_embeddings": True,
        "tie_projs": [False] + [bool(config.get("proj_share_all_but_first", True))] * num_tails,
        "untie_r": True,
        "same_length": True,
        "clamp_len": 1000,
        "mem_len": 1600,
        "dropout": 0.1,
    }
    settings = {**defaults, **config}
    if not settings.get("tgt_len"):
        # transformers has no segment length; that of the memory works.
        settings["tgt_len"] = settings["mem_len"]
    return settings
