"""The part of check_huggingface.sh that runs in this project's environment.

    huggingface_ours.py random WORK [--seed N]     make WORK/KIND/bundle, a small random bundle, of every kind
    huggingface_ours.py values WORK [--seed N]     for every WORK/NAME/bundle make WORK/NAME/values.safetensors

In the file of values, `ids` [B, S * T] int64 are random tokens. `empty.0` ... `zero.{S-1}` [B, T, V] are the
log-probabilities of the whole vocabulary after each token, by segment. The memory is passed from segment to segment. It
begins empty, or with the attended zeros with which Hugging Face begins. `rounding.empty` and `rounding.zero` are the
largest differences between fp32, in which transformers computes, and fp64.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from txl_dist.config.schema import ModelSection
from txl_dist.inference.bundle import Package, load_bundle, write_bundle
from txl_dist.inference.probe import probe_of
from txl_dist.model.memory import attended
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.tokenizers.training import train_tokenizer

NUM_LANES, NUM_SEGMENTS = 2, 4
MOST_VALUES = 1 << 21
"""Largest number of log-probabilities in a segment. A large vocabulary gets shorter segments, so that the values fit
into memory."""

SIZES: dict[str, Any] = {"num_layers": 3, "width": 24, "num_heads": 3, "head_width": 10, "ff_width": 40, "dropout": 0.0}
CLUSTERS: dict[str, Any] = {"cutoffs": (40, 120), "div_value": 2, "tie_projections": (False, True, True)}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_untied": {"tie_weights": False, "share_biases": False},
    "plain_narrow": {"embed_width": 16},
    "div4": {**CLUSTERS, "div_value": 4},
    "div4_biases_per_layer": {**CLUSTERS, "div_value": 4, "share_biases": False},
    "div2_projections_untied": {**CLUSTERS, "tie_projections": (), "share_biases": False},
    "div2_nothing_tied": {**CLUSTERS, "tie_projections": (), "tie_weights": False},
    "div2_narrow": {**CLUSTERS, "embed_width": 16},
    "div1": {**CLUSTERS, "div_value": 1, "tie_projections": ()},
    "div1_narrow": {**CLUSTERS, "div_value": 1, "embed_width": 16},
    "clamp_same_length": {**CLUSTERS, "clamp_len": 7, "same_length": "memory", "share_biases": False},
    "window_and_self": {"clamp_len": 9, "same_length": "memory_and_self"},
    "pre_norm": {**CLUSTERS, "pre_norm": True},
    "norm_eps": {"norm_eps": 1e-2, "share_biases": False},
    "no_memory": {"memory_len": 0},
    "long_memory": {"memory_len": 400, "clamp_len": 300},
    "half": {**CLUSTERS, "dtype": "bf16"},
}
"""Settings of model and bundle in which each kind differs from SIZES and from a bundle in fp32 with a memory of 20
tokens."""


def main() -> None:
    """Run the given command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["random", "values"])
    parser.add_argument("work", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.command == "random":
        for kind, changes in KINDS.items():
            write_random_bundle(arguments.work / kind / "bundle", seed=arguments.seed, **changes)
    else:
        for path in sorted(arguments.work.glob("*/bundle")):
            save_file(values_of(path, seed=arguments.seed), path.with_name("values.safetensors"))


def write_random_bundle(
    folder: Path, *, seed: int, memory_len: int = 20, dtype: str = "fp32", segment_len: int = 16, **changes: Any
) -> None:
    """Write a bundle of byte tokens. Its random weights are so large that each weight has a visible effect."""
    tokenizer = train_tokenizer("byte", lambda: ["the cat sat on the mat, the dog did not"])
    section = ModelSection.model_validate({**SIZES, **changes})
    torch.manual_seed(seed)
    model = TransformerXL(section, vocab_size=tokenizer.vocab_size).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    package = Package(
        section=section,
        weights=dict(model.named_parameters()),
        tokenizer=tokenizer,
        segment_len=segment_len,
        memory_len=memory_len,
        source={"random": seed},
        probe=probe_of(model, memory_len=memory_len),
    )
    write_bundle(folder, package, dtype=dtype)


def values_of(path: Path, *, seed: int) -> dict[str, Tensor]:
    """Return random tokens and the log-probabilities after each token, in the format that the module's docstring
    describes."""
    bundle = load_bundle(path)
    model, vocab_size = bundle.model, bundle.model.vocab_size
    segment_len = min(bundle.segment_len, max(1, MOST_VALUES // (vocab_size * NUM_LANES)))
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(vocab_size, (NUM_LANES, NUM_SEGMENTS * segment_len), generator=generator)
    values = {"ids": ids_BS}
    for start in ("empty", "zero"):
        # In fp32, as in from_pretrained, for every type of stored weights.
        found = run(model.float(), ids_BS.split(segment_len, dim=1), memory_len=bundle.memory_len, start=start)
        exact = run(model.double(), ids_BS.split(segment_len, dim=1), memory_len=bundle.memory_len, start=start)
        values |= {f"{start}.{i}": log_p_BTV for i, log_p_BTV in enumerate(found)}
        values[f"rounding.{start}"] = torch.stack(
            [(a - b).abs().max() for a, b in zip(found, exact, strict=True)]
        ).max()
    return values


@torch.no_grad()
def run(model: TransformerXL, segments: Sequence[Tensor], *, memory_len: int, start: str) -> list[Tensor]:
    """Return log p of the whole vocabulary after every token, [B, T, V] for each segment."""
    memory = model.empty_memory(num_lanes=NUM_LANES, memory_len=memory_len)
    if start == "zero":
        memory = attended(memory)
    found = []
    for tokens_BT in segments:
        hidden_BTD, memory = model(tokens_BT, memory)
        found.append(model.softmax.log_probabilities(hidden_BTD.flatten(0, 1)).unflatten(0, tokens_BT.shape))
    return found


if __name__ == "__main__":
    main()
