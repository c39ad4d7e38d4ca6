"""Golden files, and their weights in the file formats of the codes that made them."""

from __future__ import annotations

import json
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

GOLDEN = Path(__file__).parents[1] / "golden"
ORIGINAL = [
    "enwik8_like",
    "wt103_base_like",
    "wt103_large_like",
    "lm1b_like",
    "embed_projection",
    "untied",
    "pre_norm",
    "eval_same_length_clamp",
    "absolute_vanilla",
    "shaw_learned",
]
LABML = "labml_learned_positions"
HUGGING_FACE = GOLDEN / "hf_transfo_xl_tiny"
WITH_CURVE = ["enwik8_like", "wt103_base_like", "wt103_large_like", "pre_norm", "absolute_vanilla"]


def read_golden(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the other code's settings, all tensors). Tensors have the time dimension first."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        return json.loads(file.metadata()["config"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def read_huggingface() -> dict[str, Tensor]:
    """Return the results of transformers for the folder HUGGING_FACE."""
    return load_file(HUGGING_FACE / "expected.safetensors")


def state_dict(golden: dict[str, Tensor], *, prefix: str = "weights.") -> dict[str, Tensor]:
    """Return the tensors with a prefix, by the names of the other code."""
    return {key.removeprefix(prefix): value for key, value in golden.items() if key.startswith(prefix)}


def write_settings(path: Path, settings: dict[str, Any]) -> Path:
    """Write the JSON file that `txl import --settings` reads, and return its path."""
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


def write_original_module(path: Path, settings: dict[str, Any], weights: dict[str, Tensor], *, legacy: bool) -> Path:
    """Write `model.pt` as the original's train.py does: a pickled module, whose classes cannot be imported
    afterwards."""
    with foreign_classes("mem_transformer", "MemTransformerLM", "Part") as (root_class, part_class):
        root = root_class()
        shared: dict[tuple[Any, ...], nn.Parameter] = {}
        for name, value in weights.items():
            *owners, leaf = name.split(".")
            module = root
            for owner in owners:
                if owner not in module._modules:
                    module.add_module(owner, part_class())
                module = module._modules[owner]
            if leaf == "inv_freq":
                module.register_buffer(leaf, value)
            else:
                # Tied weights are one Parameter in the original.
                key = (value.shape, float(value.double().sum()), float(value.flatten()[0]))
                module.register_parameter(leaf, shared.setdefault(key, nn.Parameter(value)))
        sizes = ["n_token", "n_layer", "n_head", "d_model", "d_head", "d_embed", "tgt_len", "mem_len", "ext_len"]
        for attribute in [*sizes, "attn_type", "same_length", "clamp_len"]:
            setattr(root, attribute, settings[attribute])
        root.sample_softmax = -1
        root.word_emb.div_val, root.word_emb.cutoffs = settings["div_val"], [*settings["cutoffs"], settings["n_token"]]
        root.layers._modules["0"].dec_attn.pre_lnorm = settings["pre_lnorm"]
        root.drop, root.layers._modules["0"].dec_attn.dropatt = nn.Dropout(0.0), nn.Dropout(0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the legacy format warns that it cannot read the source of the classes
            torch.save(root, path, _use_new_zipfile_serialization=not legacy)
    return path


def write_nvidia_checkpoint(path: Path, settings: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """Write `checkpoint_last.pt` as NVIDIA's train.py does, from a model with the names of the original."""
    state = {}
    for name, value in weights.items():
        if name.startswith("crit.out_layers."):
            index, leaf = name.removeprefix("crit.out_layers.").split(".")
            if leaf == "weight" and settings["tie_weight"]:
                continue
            name = f"crit.out_layers_{'weights' if leaf == 'weight' else 'biases'}.{index}"
        state[name] = value
        if name.startswith("word_emb.emb_projs."):  # the softmax lists these weights again
            state[name.replace("word_emb.emb_projs.", "crit.shared_out_projs.")] = value
    model_config = {**settings, "dropout": 0.0, "dropatt": 0.0, "dtype": None}
    content = {
        "args": Namespace(work_dir="LM-TFM", batch_size=60),
        "model_config": model_config,
        "model_state": state,
        "optimizer_state": {"state": {}, "param_groups": []},
        "vocab": None,
        "train_step": 7,
    }
    torch.save(content, path)
    return path


@contextmanager
def foreign_classes(module_name: str, *names: str) -> Iterator[tuple[type, ...]]:
    """Yield module classes of a package that exists only inside the context, so that pickled objects cannot be imported
    later."""
    foreign = ModuleType(module_name)
    classes = tuple(type(name, (nn.Module,), {"__module__": module_name}) for name in names)
    for made in classes:
        setattr(foreign, made.__name__, made)
    sys.modules[module_name] = foreign
    try:
        yield classes
    finally:
        del sys.modules[module_name]
