"""Golden files of the original PyTorch code: their settings and weights in our words."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.sections import ModelSection

GOLDEN = Path(__file__).parents[1] / "golden"


def read_golden(name: str) -> tuple[dict, dict[str, Tensor]]:
    """(the original's configuration, all tensors)."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        return json.loads(file.metadata()["config"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def model_section(original: dict) -> ModelSection:
    """The original's configuration as ours, without dropout."""
    num_projections = len(original["cutoffs"]) + 1
    return ModelSection(
        num_layers=original["n_layer"],
        width=original["d_model"],
        num_heads=original["n_head"],
        head_width=original["d_head"],
        ff_width=original["d_inner"],
        embed_width=original["d_embed"],
        cutoffs=tuple(original["cutoffs"]),
        div_value=original["div_val"],
        tie_weights=original["tie_weight"],
        tie_projections=tuple((original["tie_projs"] * num_projections)[:num_projections]),
        pre_norm=original["pre_lnorm"],
        same_length="memory" if original["same_length"] else "off",
        clamp_len=max(0, original["clamp_len"]),
        dropout=0.0,
    )


def our_names(tensors: dict[str, Tensor], *, prefix: str, original: dict) -> dict[str, Tensor]:
    """The original's weights (or gradients) under our parameter names. Its tail clusters' columns are reversed."""
    ours = {}
    inner = original["n_head"] * original["d_head"]
    for key, value in tensors.items():
        if not key.startswith(prefix) or key.endswith("inv_freq"):
            continue
        name = key.removeprefix(prefix)
        parts = name.split(".")
        if name in ("r_w_bias", "r_r_bias"):
            leaf = "content_bias" if name == "r_w_bias" else "position_bias"
            for layer in range(original["n_layer"]):
                ours[f"blocks.{layer}.attention.{leaf}"] = value
        elif parts[0] == "word_emb":
            ours[f"embedding.{'weight' if parts[1] == 'emb_layers' else 'projection'}_{parts[2]}"] = value
        elif parts[0] == "crit":
            if parts[1] in ("cluster_weight", "cluster_bias"):
                ours[f"softmax.{parts[1]}"] = value.flip(0)
            elif parts[1] == "out_layers":
                ours[f"softmax.{parts[3]}_{parts[2]}"] = value
            else:
                ours[f"softmax.projection_{parts[2]}"] = value
        else:
            block = f"blocks.{parts[1]}."
            if parts[3] == "qkv_net":
                ours[block + "attention.query.weight"] = value[:inner]
                ours[block + "attention.key_value.weight"] = value[inner:]
            else:
                names = {
                    "dec_attn.o_net": "attention.output",
                    "dec_attn.r_net": "attention.distance",
                    "dec_attn.layer_norm": "attention_norm",
                    "pos_ff.CoreNet.0": "ff_in",
                    "pos_ff.CoreNet.3": "ff_out",
                    "pos_ff.layer_norm": "ff_norm",
                }
                ours[block + names[".".join(parts[2:-1])] + "." + parts[-1]] = value
    return ours


def golden_model(original: dict, tensors: dict[str, Tensor]) -> TransformerXL:
    """Our model with the golden file's weights."""
    torch.manual_seed(0)
    model = TransformerXL(model_section(original), vocab_size=original["n_token"])
    weights = our_names(tensors, prefix="weights.", original=original)
    if original["tie_weight"]:
        tied = {
            k.replace("embedding.weight", "softmax.weight"): v for k, v in weights.items() if "embedding.weight" in k
        }
        weights = tied | weights
    model.load_state_dict(weights)
    return model
