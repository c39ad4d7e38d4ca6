"""Folders of Hugging Face's TransfoXLLMHeadModel (transformers 4.x, `models.deprecated.transfo_xl`), in and out.

The names are the original's behind `transformer.`; the columns of the tail clusters are in natural order; the biases u
and v stand in every layer, and with `untie_r` False at the top as well. A folder holds config.json and
pytorch_model.bin or model.safetensors. What we write is read back and compared before it replaces anything.

Hugging Face begins with a memory of zeros that is attended; score with `zero_memory` to see its numbers.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from txl_dist.artifacts import ArtifactKind
from txl_dist.config.schema import ModelSection
from txl_dist.convert.checks import Imported, count, only_tensors, read_json, refuse
from txl_dist.convert.key_mapping import Weights, partners, to_original
from txl_dist.convert.original import OriginalSettings, model_of, read_weights
from txl_dist.convert.vocabulary import read_vocabulary
from txl_dist.errors import CheckpointError
from txl_dist.inference.bundle import DTYPES, Package
from txl_dist.inference.card import README, write_readme
from txl_dist.io.files import write_bytes
from txl_dist.io.manifest import replace_folder
from txl_dist.io.tensor_files import write_tensors
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.word_tokenizer import END_OF_LINE

PREFIX = "transformer."
BIASES = ("r_w_bias", "r_r_bias")
TOKENIZER = "txl_tokenizer.json"
VOCABULARIES = (TOKENIZER, "vocab.pkl", "vocab.bin", "vocab.txt")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
WRITTEN = {"config.json", "model.safetensors", TOKENIZER, "vocab.txt", "tokenizer_config.json", README}


def import_huggingface(path: Path, *, told: dict[str, Any]) -> Imported:
    """Read a folder. Raises CheckpointError, or DataError for its vocabulary."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder. Name the folder with config.json and the weights.")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} holds no config.json. Name the folder that save_pretrained wrote.")
    config = read_json(path / "config.json")
    if config.get("model_type", "transfo-xl") != "transfo-xl":
        raise CheckpointError(f"{path / 'config.json'} is of a {config['model_type']} model, not of transfo-xl.")
    if config.get("attn_type", 0) != 0:
        raise CheckpointError(f"{path / 'config.json'} has attn_type {config['attn_type']}; transformers knows only 0.")
    found = model_of(
        _original_names(only_tensors(_read_parts(path), where=str(path)), where=str(path)),
        OriginalSettings.of(_with_defaults(config), told, where=str(path / "config.json")),
        same_length="memory",
        ties_are_listed=False,
        where=str(path),
        shown=_their_name,
    )
    vocabulary = next((path / name for name in VOCABULARIES if (path / name).is_file()), None)
    if vocabulary is None:
        return found
    return dataclasses.replace(found, tokenizer=read_vocabulary(vocabulary, vocab_size=found.vocab_size))


def export_huggingface(out: Path, package: Package, *, dtype: str = "fp32") -> None:
    """Write a folder that transformers 4.46.3 loads.

    Raises CheckpointError with the reason for a model that the format cannot express, or a folder in the way.
    """
    model, tokenizer = package.section, package.tokenizer
    if reasons := inexpressible(model):
        raise CheckpointError(f"a Hugging Face folder cannot express this model: {'; '.join(reasons)}.")
    out = out.resolve()
    if out.exists() and not _is_ours(out):
        raise CheckpointError(f"{out} exists and is no export of ours. Choose another output folder.")
    cast = dict(package.open(dtype, where=str(out)).model.state_dict())  # tied tensors under each of their names
    config = _config(package, dtype=dtype)
    temporary = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        write_bytes(temporary / "config.json", json.dumps(config, indent=2).encode() + b"\n")
        write_tensors(temporary / "model.safetensors", _their_names(cast, model), metadata={"format": "pt"})
        tokenizer.save(temporary / TOKENIZER)
        _write_vocabulary(temporary, tokenizer)
        back = import_huggingface(temporary, told={}).weights
        different = [name for name, tensor in back.items() if not torch.equal(tensor, cast[name].float())]
        if different:
            raise CheckpointError(f"{out} would not give back {', '.join(different[:3])}. Report this defect.")
        num_bytes = (temporary / "model.safetensors").stat().st_size
        write_readme(temporary, package.described(dtype=dtype, num_bytes=num_bytes), ArtifactKind.HUGGINGFACE)
        replace_folder(temporary, out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {out}: {error}. Choose a folder that can be written.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """Whether an older export lies there or nothing, so that nothing is lost by replacing it."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return not names or {TOKENIZER, "config.json"} <= names <= WRITTEN


def _write_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    """What TransfoXLTokenizer reads, where it can: words, one of which stands for the unknown ones.

    Its special tokens are named, because it would add those of its defaults behind the vocabulary.
    """
    symbols = tokenizer.symbols
    unknown = next((symbol for symbol in ("<unk>", "<UNK>") if symbol in symbols), None)
    if unknown is None or any(symbol.split() != [symbol] for symbol in symbols):
        return
    end = _end(tokenizer)
    special = {"unk_token": unknown, "eos_token": unknown if end is None else symbols[end]}
    config = {"tokenizer_class": "TransfoXLTokenizer", "additional_special_tokens": [], **special}
    write_bytes(folder / "vocab.txt", "\n".join(symbols).encode() + b"\n")
    write_bytes(folder / "tokenizer_config.json", json.dumps(config, indent=2).encode() + b"\n")


def inexpressible(model: ModelSection) -> list[str]:
    """What of a model transformers' TransfoXL lacks, in words; empty if it has all of it."""
    plain = ModelSection()
    names = ["activation", "final_norm", "value_bias", "output_bias", "scale_embedding"]
    names += ["norm", "query_key_norm", "residual_scalars", "value_residual"]
    names += ["project_same_width"] if model.div_value > 1 else []
    rates = ["embed_dropout", "distance_dropout", "projection_dropout", "ff_dropout", "output_dropout"]
    different = [name for name in names if getattr(model, name) != getattr(plain, name)]
    different += [name for name in rates if model.rate(getattr(model, name)) != model.dropout]
    reasons = [f"model.{name}={getattr(model, name)!r}" for name in different]
    if model.positions != "relative":
        reasons.append(f"model.positions={model.positions!r} (it has relative ones only)")
    if model.width % 2:
        reasons.append(f"model.width={model.width} is odd (its sinusoids come in pairs)")
    return reasons


def _read_parts(folder: Path) -> dict[str, Any]:
    """The state dict of a folder: of one file, or of several that an index lists."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            content: dict[str, Any] = read_weights(folder / name)
            return content
        if (folder / f"{name}.index.json").is_file():
            index = read_json(folder / f"{name}.index.json").get("weight_map")
            if not isinstance(index, dict) or not all(isinstance(part, str) for part in index.values()):
                raise CheckpointError(f"{folder / name}.index.json has no weight_map of file names. Copy it again.")
            # Only the last part of each name: an index must not lead out of its folder.
            parts = [read_weights(folder / Path(part).name) for part in sorted(set(index.values()))]
            return {key: tensor for part in parts for key, tensor in only_tensors(part, where=str(folder)).items()}
    raise CheckpointError(f"{folder} holds neither {' nor '.join(WEIGHTS)}, whole or in parts. Copy it again.")


def _original_names(theirs: Weights, *, where: str) -> Weights:
    if "word_emb.emb_layers.0.weight" in theirs and "crit.out_layers.0.bias" not in theirs:
        raise CheckpointError(f"{where} is a model without the softmax (TransfoXLModel). Save a TransfoXLLMHeadModel.")
    weights = {name.removeprefix(PREFIX): _turned(name, tensor) for name, tensor in theirs.items()}
    for bias in BIASES if BIASES[0] in weights else ():
        for layer in range(count(weights, "layers.")):
            alias = weights.pop(f"layers.{layer}.dec_attn.{bias}", None)
            if alias is None or bias not in weights or not torch.equal(alias, weights[bias]):
                name = f"{PREFIX}layers.{layer}.dec_attn.{bias}"
                refuse([f"{name} is missing or differs from {PREFIX}{bias}, whose alias it is"], where=where)
    return weights


def _turned(name: str, tensor: Tensor) -> Tensor:
    """The rows of tail clusters stand in the other order there."""
    return tensor.flip(0) if name in ("crit.cluster_weight", "crit.cluster_bias") else tensor


def _their_name(name: str) -> str:
    return name if name.startswith("crit.") else PREFIX + name


def _their_names(weights: Weights, model: ModelSection) -> Weights:
    theirs = to_original(weights, model)
    tied = partners(model)
    named = {_their_name(name): _turned(name, tensor) for name, tensor in theirs.items() if name not in tied}
    for bias in BIASES if model.share_biases else ():
        for layer in range(model.num_layers):
            named[f"{PREFIX}layers.{layer}.dec_attn.{bias}"] = theirs[bias]
    named[f"{PREFIX}pos_emb.inv_freq"] = 1 / (10000 ** (torch.arange(0.0, model.width, 2.0) / model.width))
    # Copies: the file format refuses tensors that share memory.
    return {name: tensor.detach().clone().contiguous() for name, tensor in named.items()}


def _config(package: Package, *, dtype: str) -> dict[str, Any]:
    """config.json. A window of memory_len + 1 keys is said there as one of memory_len keys over a longer memory."""
    model, is_wider = package.section, package.section.same_length == "memory_and_self"
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
        "eos_token_id": _end(package.tokenizer),
        "torch_dtype": str(DTYPES[dtype]).removeprefix("torch."),
    }


def _end(tokenizer: Tokenizer) -> int | None:
    if tokenizer.end_of_text is not None:
        return tokenizer.end_of_text
    return tokenizer.symbols.index(END_OF_LINE) if END_OF_LINE in tokenizer.symbols else None


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers assumes where config.json is silent."""
    cutoffs = config.get("cutoffs")
    num_tails = len(cutoffs) if isinstance(cutoffs, list) else 0
    defaults = {
        "tie_word_embeddings": True,
        "tie_projs": [False] + [bool(config.get("proj_share_all_but_first", True))] * num_tails,
        "untie_r": True,
        "same_length": True,
        "clamp_len": 1000,
        "mem_len": 1600,
        "dropout": 0.1,
    }
    known = {**defaults, **config}
    # It knows no segments: as long as the memory is a length that it can work with.
    return known if known.get("tgt_len") else {**known, "tgt_len": known["mem_len"]}
