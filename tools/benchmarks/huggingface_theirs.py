"""The part of check_huggingface.sh that runs in an environment with transformers and without this project.

    huggingface_theirs.py WORK     for every WORK/NAME/huggingface compare the model in this folder with the values in
                                   WORK/NAME/values.safetensors, which huggingface_ours.py wrote

The program prints the largest differences. The exit code is 1 if a difference is above 1e-5 nats, or if a tensor of a
folder is missing, unexpected or of another shape. Above 1e-5 nats the program also prints how much of the difference
fp32 explains. Two correct programs differ by more than 1e-5 in large models, at distances of thousands of tokens, and
for almost impossible words.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import logging

MODULE = "transformers.models.deprecated.transfo_xl"
"""Module of the model in transformers 4. Version 5 does not have it."""
TOLERANCE = 1e-5
"""Largest allowed difference in nats."""


def main() -> None:
    """Compare all models in the folder WORK."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, metavar="WORK", help="folder that huggingface_ours.py wrote")
    work = parser.parse_args().work
    try:
        importlib.import_module(MODULE)
    except ImportError:
        parser.error("the installed transformers does not contain TransfoXL. Install transformers 4.46.3.")
    logging.set_verbosity_error()  # transformers warns about its own deprecated class
    warnings.simplefilter("ignore")
    folders = sorted(work.glob("*/huggingface"))
    agree = [check(folder) for folder in folders]
    if not folders or not all(agree):
        sys.exit(1)


def check(folder: Path) -> bool:
    """Return whether the model in `folder` loads without problems and computes our values. Print a line with the
    result."""
    name = f"{folder.parent.name:24}"
    model_class = importlib.import_module(MODULE).TransfoXLLMHeadModel
    try:
        model, report = model_class.from_pretrained(folder, output_loading_info=True)
        problems = {kind: found for kind, found in report.items() if found}
    except RuntimeError as error:  # a tensor of another shape
        problems = {"error": str(error)}
    if problems:
        print(f"{name} does not load without problems: {problems}")
        return False
    values = load_file(folder.with_name("values.safetensors"))
    with type_as_a_type():
        worst = {start: largest_difference(model.eval(), values, start=start) for start in ("empty", "zero")}
    rounding = {start: float(values[f"rounding.{start}"]) for start in worst}
    agrees = max(worst.values()) <= TOLERANCE
    line = f"{worst['empty']:.1e} from an empty memory, {worst['zero']:.1e} from attended zeros"
    if not agrees:
        line += f"; fp32 explains {rounding['empty']:.1e} and {rounding['zero']:.1e}"
    print(f"{name} largest difference {line}{'' if agrees else ': TOO MUCH'}")
    return agrees


@torch.no_grad()
def largest_difference(model: torch.nn.Module, values: dict[str, Tensor], *, start: str) -> float:
    """Return the largest difference of log-probabilities over all segments. transformers passes its own memory from
    segment to segment."""
    ids_BS = values["ids"]
    segment_len, worst = values[f"{start}.0"].shape[1], 0.0
    config: Any = model.config
    memory: list[Tensor] | None = None  # transformers begins with zeros that are attended
    if start == "empty":
        memory = [torch.zeros(0, ids_BS.shape[0], config.d_model) for _ in range(config.n_layer)]
    for i, tokens_BT in enumerate(ids_BS.split(segment_len, dim=1)):
        output = model(tokens_BT, mems=memory, return_dict=True)
        memory = output.mems
        difference = (output.prediction_scores - values[f"{start}.{i}"]).abs().max()
        worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
    return worst


@contextlib.contextmanager
def type_as_a_type() -> Iterator[None]:
    """Make `tensor.type_as(dtype=...)` work inside the context. torch raises a TypeError for it.

    TransfoXLModel.forward of transformers 4.46.3 computes its positions with `torch.arange(...).type_as(dtype=...)`, so
    it cannot run. Inside the context the call means `.to(dtype)`. Nothing else of transformers is changed.
    """
    original: Callable[..., Tensor] = torch.Tensor.type_as

    def type_as(self: Tensor, other: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
        return original(self, other) if dtype is None else self.to(dtype)

    torch.Tensor.type_as = type_as  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type_as = original  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
