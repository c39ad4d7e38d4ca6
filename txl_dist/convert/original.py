"""Import of the weights of the original PyTorch code (kimiyoung/transformer-xl).

The importers of programs that were derived from this code use the functions here too. A file `model.pt` is a whole
pickled module, with all settings and without the vocabulary. A plain state dict contains no settings. Some settings are
computed from the shapes of tensors. The other settings (cutoffs if div_val is 1, the number of heads if attention is
absolute, pre_lnorm, clamp_len, same_length, lengths) are read from the user's JSON object. Its keys are the names of
the constructor's arguments.
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
from txl_dist.convert.key_mapping import Weights, from_original, partners, shapes_of
from txl_dist.convert.safe_unpickle import Inert, modules_tensors, read_torch_file
from txl_dist.errors import CheckpointError, ConfigError, translate_errors

POSITIONS = {0: "relative", 1: "learned_relative", 2: "absolute"}
TABLE, SHARED, CLUSTERS = "word_emb.emb_layers.{}.weight", "word_emb.emb_projs.", "crit.cluster_weight"
STATE_DICTS = ("model_state", "model_state_dict", "state_dict", "model", "module")
"""Keys under which other Transformer-XL code, Lightning and DeepSpeed save the weights in a checkpoint."""
_MAX_NESTING = 8
Window = Literal["memory", "memory_and_self"]


class OriginalSettings(PeerSettings):
    """Arguments of MemTransformerLM, as in NVIDIA's model_config and Hugging Face's config.json."""

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
    """Number of tokens by which segments overlap in evaluation. The import ignores this setting, because evaluation in
    txl_dist has the setting eval.overlap_len."""
    tgt_len: int | None = None
    mem_len: int | None = None
    dropout: float = 0.0
    dropatt: float = 0.0
    init_std: float = 0.02
    proj_init_std: float = 0.01
    layer_norm_epsilon: float = 1e-5


def import_original(path: Path, *, user_settings: dict[str, Any]) -> Imported:
    """Read a model of the original code: `model.pt`, a folder that holds it, or a state dict (.pt, .safetensors).

    Returns the model with the settings and names of txl_dist. Raises CheckpointError if the file cannot be read or does
    not fit the format.
    """
    if path.is_dir():
        file = path / "model.pt"
    else:
        file = path
    if not file.is_file():
        raise CheckpointError(f"{path} holds no model.pt. Name the file with the weights.")
    content = read_weights(file)
    from_file: dict[str, Any] = {}
    if isinstance(content, Inert):
        while type(content).__name__.endswith("DataParallel"):  # or DistributedDataParallel
            content = _child(content, "module")
        from_file = _settings_of_module(content, where=str(file))
        content = modules_tensors(content)
    # torch.save keeps tied tensors under each of their names; safetensors cannot.
    return model_of(
        only_tensors(content, where=str(file)),
        OriginalSettings.of(from_file, user_settings, where=str(file)),
        same_length="memory",
        ties_are_listed=file.suffix != ".safetensors",
        where=str(file),
    )


def read_weights(file: Path) -> Any:
    """Read a file of safetensors or torch.save. If its content is a dict that contains a state dict, return the state
    dict."""
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
    for _ in range(_MAX_NESTING):
        nested = [content[key] for key in STATE_DICTS if isinstance(content.get(key), dict | Inert)]
        if not nested:
            return content
        content = nested[0]
        if not isinstance(content, dict):
            return content
    raise CheckpointError(f"{file} holds nested dicts, not a state dict. Save the model's state_dict().")


def model_of(
    peer_weights: Weights,
    settings: OriginalSettings,
    *,
    same_length: Window,
    ties_are_listed: bool,
    where: str,
    shown: Callable[[str], str] = str,
) -> Imported:
    """Build a model of txl_dist from weights under the original code's names.

    Raises CheckpointError if the weights do not fit the settings.

    Args:
        same_length: The value of `model.same_length` for the other program's same_length=True.
        ties_are_listed: True if the weights have a tied tensor under both of its names.
        shown: Maps a tensor's original name to its name in the file, for errors.
    """
    model = section_of(peer_weights, settings, same_length=same_length, where=where)
    if model.positions == "learned_relative" and settings.clamp_len == 1:
        # Only distance 0 is ever read, and our clamp_len has no value for that.
        last_rows = {name: peer_weights[name][:, -1:] for name in ("r_emb", "r_bias")}
        peer_weights = {**peer_weights, **last_rows}
        model = model.model_copy(update={"num_distances": 1, "clamp_len": 0})
    vocab_size = settings.n_token or settings.vocab_size or sum(_table_sizes(peer_weights, where=where))
    try:
        check_vocabulary(model, vocab_size=vocab_size)
        expected = shapes_of(model, vocab_size=vocab_size)
    except ConfigError as error:
        raise CheckpointError(
            f"{where}: cutoffs={list(model.cutoffs)} must increase and be below the vocabulary size {vocab_size}. "
            "Correct the settings."
        ) from error
    tied = {name: other for name, other in partners(model).items() if name in expected}
    may_be_missing = () if ties_are_listed else tied
    refuse(shape_problems(peer_weights, expected, optional=may_be_missing, shown=shown), where=where)
    problems = []
    for name, other in tied.items():
        if name in peer_weights and not torch.equal(peer_weights[name], peer_weights[other]):
            problems.append(f"{shown(name)} differs from {shown(other)}, but the settings tie the two tensors")
    refuse(problems, where=where)
    by_first_name = {tied.get(name, name): tensor for name, tensor in peer_weights.items()}
    return Imported(
        model=model,
        weights=from_original(by_first_name, model),
        vocab_size=vocab_size,
        segment_len=settings.tgt_len or 0,
        memory_len=-1 if settings.mem_len is None else settings.mem_len,
        tokenizer=None,
    )


def section_of(peer_weights: Weights, settings: OriginalSettings, *, same_length: Window, where: str) -> ModelSection:
    """Return the model section. Settings that are not given are computed from the tensors' shapes.

    Raises CheckpointError with the name of a missing tensor or setting.
    """
    positions = _positions(peer_weights, settings, where=where)
    per_layer = any(name.endswith(".dec_attn.r_w_bias") for name in peer_weights)
    if settings.untie_r is not None:
        per_layer = settings.untie_r
    num_heads, head_width = _heads(peer_weights, settings, positions=positions, per_layer=per_layer, where=where)
    num_layers = settings.n_layer or count(peer_weights, "layers.")
    # The last layer is checked first, so that a wrong number of layers is an error before they are all built.
    dim_size(peer_weights, f"layers.{num_layers - 1}.dec_attn.layer_norm.weight", 0, dims=1, where=where)
    num_tables = count(peer_weights, "word_emb.emb_layers.")
    widths = []
    for i in range(max(1, num_tables)):
        table_width = dim_size(peer_weights, TABLE.format(i), 1, dims=2, where=where)
        widths.append(table_width)
    width = settings.d_model or dim_size(peer_weights, "layers.0.dec_attn.layer_norm.weight", 0, dims=1, where=where)
    ff_width = settings.d_inner or dim_size(peer_weights, "layers.0.pos_ff.CoreNet.0.weight", 0, dims=2, where=where)
    embed_width = settings.d_embed or widths[0]
    clamp_len = max(0, settings.clamp_len)
    cutoffs = _cutoffs(peer_weights, settings, where=where)
    num_distances = 0
    if positions == "learned_relative":
        # The original keeps clamp_len rows of a learned table, so its largest distance is one less.
        clamp_len = max(0, clamp_len - 1)
        num_distances = dim_size(peer_weights, "r_emb", 1, dims=4, where=where)
    values = {
        "num_layers": num_layers,
        "width": width,
        "num_heads": num_heads,
        "head_width": head_width,
        "ff_width": ff_width,
        "embed_width": 0 if embed_width == width else embed_width,
        "cutoffs": cutoffs,
        "div_value": settings.div_val or _div_value(widths),
        "tie_weights": _ties_weights(peer_weights, settings, num_tables=num_tables),
        "tie_projections": _tied_projections(peer_weights, settings, num_clusters=len(cutoffs) + 1),
        "pre_norm": settings.pre_lnorm,
        "share_biases": positions == "relative" and not per_layer,
        "same_length": same_length if settings.same_length else "off",
        "clamp_len": clamp_len,
        "positions": positions,
        "num_distances": num_distances,
        "norm_eps": settings.layer_norm_epsilon,
        "dropout": settings.dropout,
        "attention_dropout": settings.dropatt,
        "init_std": settings.init_std,
        "projection_init_std": settings.proj_init_std,
    }
    return section(values, where=where)


def _positions(peer_weights: Weights, settings: OriginalSettings, *, where: str) -> str:
    """Return the positional scheme, by the setting or by the tensors' names.

    Raises CheckpointError for a scheme that txl_dist does not have.
    """
    if "out_layer.weight" in peer_weights or settings.sample_softmax > 0:
        raise CheckpointError(
            f"{where} has a sampled softmax, which neither txl_dist nor the original code can evaluate."
        )
    kind = settings.attn_type
    if kind is None:
        is_absolute = any(name.endswith(".q_net.weight") for name in peer_weights)
        if is_absolute:
            if "r_emb" in peer_weights:
                kind = 3
            else:
                kind = 2
        else:
            if "r_emb" in peer_weights or "r_bias" in peer_weights:
                kind = 1
            else:
                kind = 0
    if kind not in POSITIONS:
        raise CheckpointError(
            f"{where} has attn_type {kind}, but txl_dist supports only attn_type 0, 1 and 2. "
            "In the original code, attn_type 3 (Al-Rfou) adds positional encodings to a memory that already contains "
            "them, so that losses depend on how the text is cut into segments."
        )
    if kind == 2 and settings.pre_lnorm:
        raise CheckpointError(
            f"{where} has attn_type 2 with pre_lnorm, and cannot be imported. The original code computes the queries "
            "from states that are not normalized. txl_dist does not reproduce this defect, so its losses would differ."
        )
    return POSITIONS[kind]


def _heads(
    peer_weights: Weights, settings: OriginalSettings, *, positions: str, per_layer: bool, where: str
) -> tuple[int, int]:
    """Return (number of heads, width of a head), from the settings or from the shape of the biases.

    Absolute attention has no biases. Raises CheckpointError for absolute attention if the number of heads is not given.
    """
    if settings.n_head and settings.d_head:
        return settings.n_head, settings.d_head
    if positions == "absolute":
        inner = dim_size(peer_weights, "layers.0.dec_attn.q_net.weight", 0, dims=2, where=where)
        if not settings.n_head:
            raise CheckpointError(
                f"{where}: the weights of absolute attention do not contain the number of heads. Write the "
                'number into a JSON file, for instance {"n_head": 8}, and give the path of this file with --settings.'
            )
        return settings.n_head, inner // settings.n_head
    if per_layer:
        name = "layers.0.dec_attn.r_w_bias"
    else:
        name = "r_w_bias"
    if positions == "learned_relative":
        dims = 3
    else:
        dims = 2
    num_heads = settings.n_head or dim_size(peer_weights, name, -2, dims=dims, where=where)
    head_width = settings.d_head or dim_size(peer_weights, name, -1, dims=dims, where=where)
    return num_heads, head_width


def _cutoffs(peer_weights: Weights, settings: OriginalSettings, *, where: str) -> tuple[int, ...]:
    """Return the cutoffs, from the settings or from the sizes of the tables.

    Raises CheckpointError if the settings have no cutoffs and several clusters share one table.
    """
    sizes = _table_sizes(peer_weights, where=where)
    if settings.cutoffs is not None:
        # Some codes list the vocabulary size as the last cutoff.
        vocab_size = settings.n_token or settings.vocab_size or sum(sizes)
        return tuple(cutoff for cutoff in settings.cutoffs if cutoff != vocab_size)
    if len(sizes) == 1 and CLUSTERS in peer_weights:
        shape = list(peer_weights[CLUSTERS].shape)
        raise CheckpointError(
            f"{where}: the softmax has several clusters ({CLUSTERS} has shape {shape}), but their cutoffs cannot be "
            "computed, because all clusters share one table of embeddings. Write the cutoffs into a JSON file, for "
            'instance {"cutoffs": [20000, 40000]}, and give the path of this file with --settings.'
        )
    return tuple(itertools.accumulate(sizes))[:-1]


def _table_sizes(peer_weights: Weights, *, where: str) -> list[int]:
    """Return the number of rows of each embedding table."""
    num_tables = max(1, count(peer_weights, "word_emb.emb_layers."))
    sizes = []
    for i in range(num_tables):
        size = dim_size(peer_weights, TABLE.format(i), 0, dims=2, where=where)
        sizes.append(size)
    return sizes


def _div_value(widths: list[int]) -> int:
    """Return the smallest divisor for which cluster i has the width widths[0] // divisor**i.

    `widths` are the widths of the clusters' embeddings. If there is no such divisor, return 1. The check of shapes then
    fails later.
    """
    if len(widths) == 1:
        smallest = 1
    else:
        smallest = 2
    for divisor in range(smallest, widths[0] + 1):
        divided = [widths[0] // divisor**i for i in range(len(widths))]
        if divided == widths:
            return divisor
    return 1


def _ties_weights(peer_weights: Weights, settings: OriginalSettings, *, num_tables: int) -> bool:
    """Return True if embedding and softmax are tied.

    If the settings do not contain this fact, embedding and softmax count as tied if all of their tables are equal.
    """
    if settings.tie_weight is not None:
        return settings.tie_weight
    if settings.tie_word_embeddings is not None:
        return settings.tie_word_embeddings
    are_same = [_is_same(peer_weights, f"crit.out_layers.{i}.weight", TABLE.format(i)) for i in range(num_tables)]
    return all(are_same)


def _tied_projections(peer_weights: Weights, settings: OriginalSettings, *, num_clusters: int) -> tuple[bool, ...]:
    """Return, for each cluster, True if its input projection and its output projection are tied.

    The result is empty if no projection is tied. If the settings do not contain this fact, two projections count as
    tied if they are equal.
    """
    num_projections = count(peer_weights, SHARED)
    if not num_projections:
        return ()
    ties = []
    for i in range(num_clusters):
        if settings.tie_projs is not None:
            ties.append(i < len(settings.tie_projs) and settings.tie_projs[i])
        else:
            input_projection = f"{SHARED}{min(i, num_projections - 1)}"
            ties.append(_is_same(peer_weights, f"crit.out_projs.{i}", input_projection))
    if any(ties):
        return tuple(ties)
    return ()


def _is_same(weights: Weights, name: str, other: str) -> bool:
    """Return True if both tensors exist and are equal."""
    if name not in weights or other not in weights:
        return False
    return torch.equal(weights[name], weights[other])


def _settings_of_module(module: Inert, *, where: str) -> dict[str, Any]:
    """Return the constructor's arguments of a pickled MemTransformerLM. The arguments are read from the module's
    attributes."""
    state = vars(module)
    if type(module).__name__ != "MemTransformerLM":
        raise CheckpointError(
            f"{where} is a pickled {type(module).__name__}, not a MemTransformerLM (the original code's model class)."
        )
    sizes = ["n_token", "n_layer", "n_head", "d_model", "d_head", "d_embed", "tgt_len", "mem_len"]
    choices = ["attn_type", "same_length", "clamp_len", "sample_softmax"]
    settings = {name: state[name] for name in sizes + choices if name in state}
    embedding_state = vars(_child(module, "word_emb"))
    layers = _child(module, "layers")
    settings |= {name: embedding_state[name] for name in ("div_val", "cutoffs") if name in embedding_state}
    attention = _child(_child(layers, "0"), "dec_attn")
    settings["pre_lnorm"] = vars(attention).get("pre_lnorm", False)
    settings["dropout"] = vars(_child(module, "drop")).get("p", 0.0)
    settings["dropatt"] = vars(_child(attention, "dropatt")).get("p", 0.0)
    return settings


def _child(module: Inert, name: str) -> Inert:
    modules = vars(module).get("_modules", {})
    if not isinstance(modules.get(name), Inert):
        raise CheckpointError(
            f"a pickled {type(module).__name__} has no submodule {name}. The file may be "
            "incomplete. Copy the file again."
        )
    child: Inert = modules[name]
    return child
