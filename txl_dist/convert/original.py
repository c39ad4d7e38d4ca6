"""Weights of the original PyTorch code (kimiyoung/transformer-xl), and what its descendants share with it.

A `model.pt` is a whole pickled module: it tells everything but the vocabulary. A plain state dict tells what its shapes
tell; the rest (cutoffs with div_val 1, heads of absolute attention, pre_lnorm, clamp_len, same_length, lengths) comes
from settings, a JSON object under the names of the constructor's arguments.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from txl_dist.convert.imported import (
    Imported,
    PeerSettings,
    only_tensors,
    refuse,
    section,
    settings_problems,
    weights_of,
)
from txl_dist.convert.names import Weights
from txl_dist.convert.pickles import Inert, modules_tensors, read_torch_file
from txl_dist.errors import CheckpointError
from txl_dist.sections import ModelSection

POSITIONS = {0: "relative", 1: "learned_relative", 2: "absolute"}


class OriginalSettings(PeerSettings):
    """Arguments of MemTransformerLM, of NVIDIA's model_config and of Hugging Face's config.json."""

    n_token: int | None = None
    vocab_size: int | None = None
    n_layer: int | None = None
    n_head: int | None = None
    d_head: int | None = None
    d_model: int | None = None
    d_inner: int | None = None
    d_embed: int | None = None
    div_val: int | None = None
    cutoffs: tuple[int, ...] | None = None
    tie_weight: bool | None = None
    tie_word_embeddings: bool | None = None
    tie_projs: tuple[bool, ...] | None = None
    pre_lnorm: bool = False
    attn_type: int | None = None
    same_length: bool = False
    clamp_len: int = -1
    sample_softmax: int = -1
    tgt_len: int | None = None
    mem_len: int | None = None
    dropout: float = 0.0
    dropatt: float = 0.0
    init_std: float = 0.02
    proj_init_std: float = 0.01
    layer_norm_epsilon: float = 1e-5


def import_original(path: Path, *, settings: dict[str, Any]) -> Imported:
    """Read `model.pt`, a folder that holds one, or a state dict (.pt, .safetensors). Raises CheckpointError."""
    file = path / "model.pt" if path.is_dir() else path
    content = read_weights(file)
    if isinstance(content, Inert):
        known = _settings_of_module(content, where=str(file))
        content, settings = modules_tensors(content), {**known, **settings}
    return imported(only_tensors(content, where=str(file)), settings, same_length="memory", where=str(file))


def read_weights(file: Path) -> Any:
    """The content of a .safetensors or torch.save file; of a dict around a state dict, the state dict."""
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}. Copy it again.") from error
    content = read_torch_file(file)
    if isinstance(content, dict):
        for key in ("model_state", "state_dict", "model"):
            if isinstance(content.get(key), dict | Inert):
                return content[key]
    return content


def imported(theirs: Weights, values: dict[str, Any], *, same_length: str, where: str) -> Imported:
    """A model under the original's names; `same_length` is what that setting means there. Raises CheckpointError."""
    settings = OriginalSettings.of(values, where=where)
    _check_supported(theirs, settings, where=where)
    vocab_size = sum(table.shape[0] for table in _tables(theirs))
    if not vocab_size:
        raise CheckpointError(
            f"{where} has no word_emb.emb_layers.0.weight: it is no Transformer-XL of this format. Found: "
            f"{', '.join(list(theirs)[:4])}. Name another --format."
        )
    model = section_of(theirs, settings, same_length=same_length, where=where)
    if model.positions == "learned_relative" and settings.clamp_len == 1:
        # Only distance 0 is ever read; our clamp_len cannot say so.
        theirs = {**theirs, "r_emb": theirs["r_emb"][:, -1:], "r_bias": theirs["r_bias"][:, -1:]}
        model = model.model_copy(update={"num_distances": 1, "clamp_len": 0})
    _check_settings(model, settings, vocab_size=vocab_size, where=where)
    return Imported(
        model=model,
        weights=weights_of(theirs, model, vocab_size=vocab_size, where=where),
        vocab_size=vocab_size,
        segment_len=settings.tgt_len or 0,
        memory_len=-1 if settings.mem_len is None else settings.mem_len,
        tokenizer=None,
    )


def section_of(theirs: Weights, settings: OriginalSettings, *, same_length: str, where: str) -> ModelSection:
    """The model that shapes and settings describe. Raises CheckpointError naming what is missing."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in theirs:
            raise CheckpointError(f"{where}: {name} is missing. Is it of this format?")
        return tuple(theirs[name].shape)

    positions = _positions(theirs)
    per_layer = "layers.0.dec_attn.r_w_bias" in theirs
    num_heads, head_width = _heads(theirs, settings, positions=positions, per_layer=per_layer, where=where)
    widths = [table.shape[-1] for table in _tables(theirs)]
    clamp_len = max(0, settings.clamp_len)
    values = {
        "num_layers": len(_indices(theirs, "layers.{}.dec_attn.o_net.weight")),
        "width": shape("layers.0.dec_attn.layer_norm.weight")[0],
        "num_heads": num_heads,
        "head_width": head_width,
        "ff_width": shape("layers.0.pos_ff.CoreNet.0.weight")[0],
        "embed_width": widths[0],
        "cutoffs": _cutoffs(theirs, settings, where=where),
        "div_value": settings.div_val or _div_value(widths),
        "tie_weights": _ties_weights(theirs, settings),
        "tie_projections": _tied_projections(theirs, settings),
        "pre_norm": settings.pre_lnorm,
        "share_biases": positions == "relative" and not per_layer,
        "same_length": same_length if settings.same_length else "off",
        # The original keeps that many rows of a learned table, so its largest distance is one less.
        "clamp_len": max(0, clamp_len - 1) if positions == "learned_relative" else clamp_len,
        "positions": positions,
        "num_distances": shape("r_emb")[1] if positions == "learned_relative" else 0,
        "norm_eps": settings.layer_norm_epsilon,
        "dropout": settings.dropout,
        "attention_dropout": settings.dropatt,
        "init_std": settings.init_std,
        "projection_init_std": settings.proj_init_std,
    }
    if values["embed_width"] == values["width"]:
        values["embed_width"] = 0
    return section(values, where=where)


def _indices(theirs: Weights, pattern: str) -> list[int]:
    return list(itertools.takewhile(lambda i: pattern.format(i) in theirs, itertools.count()))


def _tables(theirs: Weights) -> list[Tensor]:
    """The tables of embeddings, [V_i, E_i]."""
    pattern = "word_emb.emb_layers.{}.weight"
    return [theirs[pattern.format(i)] for i in _indices(theirs, pattern)]


def _div_value(widths: list[int]) -> int:
    """The smallest divisor that gives these widths; 1 if none does, which the check of shapes will then say."""
    divisors = range(1 if len(widths) == 1 else 2, widths[0] + 1)
    return next((d for d in divisors if [widths[0] // d**i for i in range(len(widths))] == widths), 1)


def _positions(theirs: Weights) -> str:
    if "r_emb" in theirs:
        return "learned_relative"
    return "absolute" if "layers.0.dec_attn.q_net.weight" in theirs else "relative"


def _heads(
    theirs: Weights, settings: OriginalSettings, *, positions: str, per_layer: bool, where: str
) -> tuple[int, int]:
    """Heads and their width: from the shape of the biases where there are any."""
    name = "layers.0.dec_attn.r_w_bias" if per_layer else "r_w_bias"
    if positions != "absolute":
        if name not in theirs or theirs[name].dim() < 2:
            raise CheckpointError(f"{where}: {name} is missing or no matrix; it tells heads and their width.")
        return int(theirs[name].shape[-2]), int(theirs[name].shape[-1])
    if not settings.n_head:
        raise CheckpointError(
            f"{where}: weights of absolute attention do not tell the number of heads. Give it with --settings: "
            'a JSON file with {"n_head": 8, ...}.'
        )
    inner = theirs["layers.0.dec_attn.q_net.weight"].shape[0]
    return settings.n_head, inner // settings.n_head


def _cutoffs(theirs: Weights, settings: OriginalSettings, *, where: str) -> tuple[int, ...]:
    """From the sizes of the tables; from the settings where one table serves all clusters."""
    sizes = [table.shape[0] for table in _tables(theirs)]
    vocab_size = sum(sizes)
    from_tables = tuple(itertools.accumulate(sizes))[:-1]
    # Some codes list the vocabulary size as the last cutoff.
    given = tuple(cutoff for cutoff in settings.cutoffs or () if cutoff != vocab_size)
    num_tails = theirs["crit.cluster_weight"].shape[0] if "crit.cluster_weight" in theirs else 0
    if settings.cutoffs is None and len(from_tables) != num_tails:
        raise CheckpointError(
            f"{where}: crit.cluster_weight has {num_tails} rows, and one table of embeddings does not tell where these "
            'clusters begin. Give the cutoffs with --settings: a JSON file with {"cutoffs": [20000, 40000], ...}.'
        )
    cutoffs = given if settings.cutoffs is not None else from_tables
    if len(cutoffs) != num_tails or (len(sizes) > 1 and cutoffs != from_tables):
        found = f"{list(from_tables)}, by the sizes of its tables" if len(sizes) > 1 else f"{num_tails} tail clusters"
        raise CheckpointError(f"{where}: the settings say cutoffs={list(cutoffs)}, the weights have {found}.")
    return cutoffs


def _ties_weights(theirs: Weights, settings: OriginalSettings) -> bool:
    """As told; else whether both tables are equal, or only one of them is there."""
    for told in (settings.tie_weight, settings.tie_word_embeddings):
        if told is not None:
            return told
    return all(
        _is_same(theirs, f"crit.out_layers.{i}.weight", f"word_emb.emb_layers.{i}.weight")
        for i in range(len(_tables(theirs)))
    )


def _tied_projections(theirs: Weights, settings: OriginalSettings) -> tuple[bool, ...]:
    """Per cluster; empty where none is tied."""
    shared = _indices(theirs, "word_emb.emb_projs.{}")
    if not shared:
        return ()
    num_tails = theirs["crit.cluster_weight"].shape[0] if "crit.cluster_weight" in theirs else 0
    told = settings.tie_projs
    ties = []
    for i in range(num_tails + 1):
        found = _is_same(theirs, f"crit.out_projs.{i}", f"word_emb.emb_projs.{min(i, len(shared) - 1)}")
        ties.append(found if told is None else i < len(told) and told[i])
    return tuple(ties) if any(ties) else ()


def _is_same(theirs: Weights, name: str, other: str) -> bool:
    return name not in theirs or torch.equal(theirs[name], theirs[other])


def _check_supported(theirs: Weights, settings: OriginalSettings, *, where: str) -> None:
    if "out_layer.weight" in theirs or settings.sample_softmax > 0:
        raise CheckpointError(f"{where} has a sampled softmax, which the peers' codes cannot run either.")
    if settings.attn_type == 3 or ("r_emb" in theirs and "r_w_bias" not in theirs):
        raise CheckpointError(f"{where} has attn_type 3 (Al-Rfou), which this program does not have.")
    if settings.pre_lnorm and _positions(theirs) == "absolute":
        raise CheckpointError(
            f"{where} has attn_type 2 with pre_lnorm: there the original makes queries from states that are not "
            "normalised, a defect that this program does not repeat, so its numbers would differ."
        )


def _check_settings(model: ModelSection, settings: OriginalSettings, *, vocab_size: int, where: str) -> None:
    found = {
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "d_head": model.head_width,
        "d_model": model.width,
        "d_inner": model.ff_width,
        "d_embed": model.embed_width_or_default(),
        "div_val": model.div_value,
        "n_token": vocab_size,
        "vocab_size": vocab_size,
    }
    problems = settings_problems(settings, found)
    if settings.attn_type is not None and POSITIONS.get(settings.attn_type) != model.positions:
        problems.append(f"the settings say attn_type={settings.attn_type}, the weights have {model.positions} ones")
    refuse(problems, where=where)


def _settings_of_module(module: Inert, *, where: str) -> dict[str, Any]:
    """Constructor arguments of a pickled MemTransformerLM, from its attributes."""
    state = vars(module)
    if type(module).__name__ != "MemTransformerLM":
        raise CheckpointError(f"{where} is a pickled {type(module).__name__}, not a MemTransformerLM.")
    sizes = ["n_token", "n_layer", "n_head", "d_model", "d_head", "d_embed", "tgt_len", "mem_len"]
    choices = ["attn_type", "same_length", "clamp_len", "sample_softmax"]
    settings = {name: state[name] for name in sizes + choices if name in state}
    embedding, layers = _child(module, "word_emb"), _child(module, "layers")
    settings |= {name: vars(embedding)[name] for name in ("div_val", "cutoffs") if name in vars(embedding)}
    attention = _child(_child(layers, "0"), "dec_attn")
    settings["pre_lnorm"] = vars(attention).get("pre_lnorm", False)
    settings["dropout"] = vars(_child(module, "drop")).get("p", 0.0)
    settings["dropatt"] = vars(_child(attention, "dropatt")).get("p", 0.0)
    return settings


def _child(module: Inert, name: str) -> Inert:
    modules = vars(module).get("_modules", {})
    if not isinstance(modules.get(name), Inert):
        raise CheckpointError(f"a pickled {type(module).__name__} has no part {name}. Is the file whole?")
    child: Inert = modules[name]
    return child
