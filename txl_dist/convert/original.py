"""Weights of the original PyTorch code (kimiyoung/transformer-xl), and what its descendants share with it.

A `model.pt` is a whole pickled module: it tells everything but the vocabulary. A plain state dict tells what its shapes
tell; the rest (cutoffs with div_val 1, heads of absolute attention, pre_lnorm, clamp_len, same_length, lengths) comes
from settings, a JSON object under the names of the constructor's arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from txl_dist.config.load import check_vocabulary
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
from txl_dist.convert.key_mapping import Weights, from_original, partners, shapes_of
from txl_dist.convert.safe_unpickle import Inert, modules_tensors, read_torch_file
from txl_dist.errors import CheckpointError, ConfigError, translate_errors

POSITIONS = {0: "relative", 1: "learned_relative", 2: "absolute"}
TABLE, SHARED, CLUSTERS = "word_emb.emb_layers.{}.weight", "word_emb.emb_projs.", "crit.cluster_weight"
STATE_DICTS = ("model_state", "model_state_dict", "state_dict", "model", "module")
"""Under which key trainers save the weights: the peers, Lightning, DeepSpeed."""
_MOST_NESTED = 8
Window = Literal["memory", "memory_and_self"]


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
    untie_r: bool | None = None
    ext_len: int = 0
    """Not used: segments that overlap are a matter of evaluation here (eval.overlap_len)."""
    tgt_len: int | None = None
    mem_len: int | None = None
    dropout: float = 0.0
    dropatt: float = 0.0
    init_std: float = 0.02
    proj_init_std: float = 0.01
    layer_norm_epsilon: float = 1e-5


def import_original(path: Path, *, told: dict[str, Any]) -> Imported:
    """Read `model.pt`, a folder that holds one, or a state dict (.pt, .safetensors). Raises CheckpointError."""
    file = path / "model.pt" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{path} holds no model.pt. Name the file with the weights.")
    content, found = read_weights(file), {}
    if isinstance(content, Inert):
        while type(content).__name__.endswith("DataParallel"):  # or DistributedDataParallel
            content = _child(content, "module")
        found = _settings_of_module(content, where=str(file))
        content = modules_tensors(content)
    # torch.save keeps tied tensors under each of their names; the other format cannot.
    return model_of(
        only_tensors(content, where=str(file)),
        OriginalSettings.of(found, told, where=str(file)),
        same_length="memory",
        ties_are_listed=file.suffix != ".safetensors",
        where=str(file),
    )


def read_weights(file: Path) -> Any:
    """The content of a .safetensors or torch.save file; of dicts around a state dict, the state dict."""
    if file.suffix == ".safetensors":
        with translate_errors(
            CheckpointError, f"{file} cannot be read", "Copy it again.", of=(OSError, SafetensorError)
        ):
            return load_file(file)
    content = read_torch_file(file)
    if not isinstance(content, dict):
        return content
    if "model_config" in content:
        raise CheckpointError(f"{file} is a checkpoint of NVIDIA's code. Import it with --format nvidia.")
    for _ in range(_MOST_NESTED):
        inner = [content[key] for key in STATE_DICTS if isinstance(content.get(key), dict | Inert)]
        if not inner:
            return content
        content = inner[0]
        if not isinstance(content, dict):
            return content
    raise CheckpointError(f"{file} holds dicts in dicts, and no state dict. Save the model's state_dict().")


def model_of(
    theirs: Weights,
    settings: OriginalSettings,
    *,
    same_length: Window,
    ties_are_listed: bool,
    where: str,
    shown: Callable[[str], str] = str,
) -> Imported:
    """A model under the original's names.

    `same_length` is what that setting means there; `ties_are_listed`, that a tied tensor stands under both its names;
    `shown` turns the original's name of a key into the file's, for errors. Raises CheckpointError.
    """
    model = section_of(theirs, settings, same_length=same_length, where=where)
    if model.positions == "learned_relative" and settings.clamp_len == 1:
        # Only distance 0 is ever read; our clamp_len cannot say so.
        theirs = {**theirs, "r_emb": theirs["r_emb"][:, -1:], "r_bias": theirs["r_bias"][:, -1:]}
        model = model.model_copy(update={"num_distances": 1, "clamp_len": 0})
    vocab_size = settings.n_token or settings.vocab_size or sum(_table_sizes(theirs, where=where))
    try:
        check_vocabulary(model, vocab_size=vocab_size)
        expected = shapes_of(model, vocab_size=vocab_size)
    except ConfigError as error:
        raise CheckpointError(
            f"{where}: cutoffs={list(model.cutoffs)} must increase and lie below the vocabulary size {vocab_size}. "
            "Correct the settings."
        ) from error
    tied = {name: other for name, other in partners(model).items() if name in expected}
    problems = shape_problems(theirs, expected, optional=() if ties_are_listed else tied, shown=shown)
    problems += [
        f"{shown(name)} differs from {shown(other)}, to which the settings tie it"
        for name, other in tied.items()
        if not problems and name in theirs and not torch.equal(theirs[name], theirs[other])
    ]
    refuse(problems, where=where)
    return Imported(
        model=model,
        weights=from_original({tied.get(name, name): tensor for name, tensor in theirs.items()}, model),
        vocab_size=vocab_size,
        segment_len=settings.tgt_len or 0,
        memory_len=-1 if settings.mem_len is None else settings.mem_len,
        tokenizer=None,
    )


def section_of(theirs: Weights, settings: OriginalSettings, *, same_length: Window, where: str) -> ModelSection:
    """The model that settings tell, and shapes where they are silent. Raises CheckpointError naming what is missing."""
    positions = _positions(theirs, settings, where=where)
    has_own = any(name.endswith(".dec_attn.r_w_bias") for name in theirs)
    per_layer = has_own if settings.untie_r is None else settings.untie_r
    num_heads, head_width = _heads(theirs, settings, positions=positions, per_layer=per_layer, where=where)
    num_layers = settings.n_layer or count(theirs, "layers.")
    # The last one first: a wrong number must not build a thousand layers to find out.
    size(theirs, f"layers.{num_layers - 1}.dec_attn.layer_norm.weight", 0, dims=1, where=where)
    num_tables = count(theirs, "word_emb.emb_layers.")
    widths = [size(theirs, TABLE.format(i), 1, dims=2, where=where) for i in range(max(1, num_tables))]
    width = settings.d_model or size(theirs, "layers.0.dec_attn.layer_norm.weight", 0, dims=1, where=where)
    embed_width = settings.d_embed or widths[0]
    clamp_len, cutoffs = max(0, settings.clamp_len), _cutoffs(theirs, settings, where=where)
    values = {
        "num_layers": num_layers,
        "width": width,
        "num_heads": num_heads,
        "head_width": head_width,
        "ff_width": settings.d_inner or size(theirs, "layers.0.pos_ff.CoreNet.0.weight", 0, dims=2, where=where),
        "embed_width": 0 if embed_width == width else embed_width,
        "cutoffs": cutoffs,
        "div_value": settings.div_val or _div_value(widths),
        "tie_weights": _ties_weights(theirs, settings, num_tables=num_tables),
        "tie_projections": _tied_projections(theirs, settings, num_clusters=len(cutoffs) + 1),
        "pre_norm": settings.pre_lnorm,
        "share_biases": positions == "relative" and not per_layer,
        "same_length": same_length if settings.same_length else "off",
        # The original keeps that many rows of a learned table, so its largest distance is one less.
        "clamp_len": max(0, clamp_len - 1) if positions == "learned_relative" else clamp_len,
        "positions": positions,
        "num_distances": size(theirs, "r_emb", 1, dims=4, where=where) if positions == "learned_relative" else 0,
        "norm_eps": settings.layer_norm_epsilon,
        "dropout": settings.dropout,
        "attention_dropout": settings.dropatt,
        "init_std": settings.init_std,
        "projection_init_std": settings.proj_init_std,
    }
    return section(values, where=where)


def _positions(theirs: Weights, settings: OriginalSettings, *, where: str) -> str:
    """As told, else by the names. Raises CheckpointError for what this program does not have."""
    if "out_layer.weight" in theirs or settings.sample_softmax > 0:
        raise CheckpointError(f"{where} has a sampled softmax, which the peers' codes cannot run either.")
    is_absolute = any(name.endswith(".q_net.weight") for name in theirs)
    found = (
        3 if is_absolute and "r_emb" in theirs else 2 if is_absolute else int("r_emb" in theirs or "r_bias" in theirs)
    )
    kind = found if settings.attn_type is None else settings.attn_type
    if kind not in POSITIONS:
        raise CheckpointError(
            f"{where} has attn_type {kind}; this program has 0, 1 and 2. (3, Al-Rfou, adds its positions to the memory "
            "twice in the original, so that no two segments agree.)"
        )
    if kind == 2 and settings.pre_lnorm:
        raise CheckpointError(
            f"{where} has attn_type 2 with pre_lnorm: there the original makes queries from states that are not "
            "normalised, a defect that this program does not repeat, so its numbers would differ."
        )
    return POSITIONS[kind]


def _heads(
    theirs: Weights, settings: OriginalSettings, *, positions: str, per_layer: bool, where: str
) -> tuple[int, int]:
    """Heads and their width: as told, else from the biases; absolute attention has none."""
    if settings.n_head and settings.d_head:
        return settings.n_head, settings.d_head
    if positions == "absolute":
        inner = size(theirs, "layers.0.dec_attn.q_net.weight", 0, dims=2, where=where)
        if not settings.n_head:
            raise CheckpointError(
                f"{where}: weights of absolute attention do not tell the number of heads. Give it with --settings: "
                'a JSON file with {"n_head": 8, ...}.'
            )
        return settings.n_head, inner // settings.n_head
    name = "layers.0.dec_attn.r_w_bias" if per_layer else "r_w_bias"
    dims = 3 if positions == "learned_relative" else 2
    return (
        settings.n_head or size(theirs, name, -2, dims=dims, where=where),
        settings.d_head or size(theirs, name, -1, dims=dims, where=where),
    )


def _cutoffs(theirs: Weights, settings: OriginalSettings, *, where: str) -> tuple[int, ...]:
    """As told, else from the sizes of the tables; one table for several clusters does not tell."""
    sizes = _table_sizes(theirs, where=where)
    if settings.cutoffs is not None:
        # Some codes list the vocabulary size as the last cutoff.
        vocab_size = settings.n_token or settings.vocab_size or sum(sizes)
        return tuple(cutoff for cutoff in settings.cutoffs if cutoff != vocab_size)
    if len(sizes) == 1 and CLUSTERS in theirs:
        raise CheckpointError(
            f"{where}: {CLUSTERS} has shape {list(theirs[CLUSTERS].shape)}, and one table of embeddings does not tell "
            'where its clusters begin. Give the cutoffs with --settings: {"cutoffs": [20000, 40000], ...} in a file.'
        )
    return tuple(itertools.accumulate(sizes))[:-1]


def _table_sizes(theirs: Weights, *, where: str) -> list[int]:
    """Rows of each table of embeddings."""
    num_tables = max(1, count(theirs, "word_emb.emb_layers."))
    return [size(theirs, TABLE.format(i), 0, dims=2, where=where) for i in range(num_tables)]


def _div_value(widths: list[int]) -> int:
    """The smallest divisor that gives these widths; 1 if none does, which the check of shapes will then say."""
    divisors = range(1 if len(widths) == 1 else 2, widths[0] + 1)
    return next((d for d in divisors if [widths[0] // d**i for i in range(len(widths))] == widths), 1)


def _ties_weights(theirs: Weights, settings: OriginalSettings, *, num_tables: int) -> bool:
    """As told; else whether both tables are equal."""
    for told in (settings.tie_weight, settings.tie_word_embeddings):
        if told is not None:
            return told
    return all(_is_same(theirs, f"crit.out_layers.{i}.weight", TABLE.format(i)) for i in range(num_tables))


def _tied_projections(theirs: Weights, settings: OriginalSettings, *, num_clusters: int) -> tuple[bool, ...]:
    """Per cluster, as told, else by equality; empty where none is tied."""
    num_shared = count(theirs, SHARED)
    if not num_shared:
        return ()
    if settings.tie_projs is not None:
        ties = (*settings.tie_projs, *[False] * num_clusters)[:num_clusters]
    else:
        others = [f"{SHARED}{min(i, num_shared - 1)}" for i in range(num_clusters)]
        ties = tuple(_is_same(theirs, f"crit.out_projs.{i}", other) for i, other in enumerate(others))
    return ties if any(ties) else ()


def _is_same(theirs: Weights, name: str, other: str) -> bool:
    return name in theirs and other in theirs and torch.equal(theirs[name], theirs[other])


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
