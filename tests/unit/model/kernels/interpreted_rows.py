"""Compare the kernels of a block's rows in Triton's interpreter with their plain functions. It is a program, like
`interpreted`.

`python -m tests.unit.model.kernels.interpreted_rows NAME...` prints the results of these checks as JSON.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from tests.unit.model.kernels.interpreted import relative_error, write_kept  # first: it turns the interpreter on

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from tests.helpers.adam_steps import errors_of_adam
from tests.helpers.models import VOCAB_SIZE, random_tokens, tiny_section
from txl_dist.model import activation, residual_norm
from txl_dist.model.activation import ActivatedLinear
from txl_dist.model.kernels import attention_launch, rows
from txl_dist.model.residual_norm import Drop, ResidualLayerNorm, ResidualRmsNorm, residual_sum
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.train.engine.padding import pad_widths

PLAIN = {"relu": F.relu, "gelu": F.gelu, "relu2": lambda x: F.relu(x).square()}


class Case(NamedTuple):
    """A sum and its norm, or an activation (`kind`)."""

    kind: str
    width: int
    rate: float = 0.0
    used: str = "both"
    """Which of sum and norm has a gradient."""
    dtype: torch.dtype = torch.float32
    num_rows: int = 333
    num_multiprocessors: int = 1
    """With few, a program has several tiles of rows."""
    padding: int = 0
    """Columns of zeros at the end of the rows, a part of the width."""


CASES = {
    "layer": Case("layer", 512, used="normed", num_rows=37),
    "layer_dropout": Case("layer", 64, rate=0.3),
    "layer_odd_dropout": Case("layer", 41, rate=0.1, used="normed"),
    "layer_one_row": Case("layer", 410, rate=0.3, num_rows=1),
    "layer_wide": Case("layer", 2500, rate=0.3, num_rows=9),
    "layer_sum_alone": Case("layer", 64, rate=0.3, used="sum"),
    "layer_padded": Case("layer", 48, rate=0.3, padding=7),
    "rms_padded": Case("rms", 48, rate=0.3, padding=7),
    "rms": Case("rms", 64),
    "rms_dropout": Case("rms", 41, rate=0.3),
    "sum_dropout": Case("sum", 41, rate=0.3),
    "relu": Case("relu", 210),
    "relu_dropout": Case("relu", 210, rate=0.3),
    "gelu": Case("gelu", 41),
    "gelu_dropout": Case("gelu", 130, rate=0.3),
    "relu2_dropout": Case("relu2", 128, rate=0.3),
    "layer_bf16": Case("layer", 64, rate=0.3, dtype=torch.bfloat16),
    "rms_bf16": Case("rms", 64, rate=0.3, dtype=torch.bfloat16),
    "relu_bf16": Case("relu", 128, rate=0.3, dtype=torch.bfloat16),
    "gelu_bf16": Case("gelu", 128, rate=0.3, dtype=torch.bfloat16),
}


MODELS: dict[str, dict[str, Any]] = {
    "paper": {"value_bias": True},
    "pre_norm": {"pre_norm": True, "activation": "gelu"},
    # Where keys are normed and values mixed, products are not attended with as they are.
    "modern": {
        **{"norm": "rms", "pre_norm": True, "activation": "relu2"},
        **dict.fromkeys(["residual_scalars", "query_key_norm", "value_residual"], True),
    },
    "gated": {"norm": "rms", "activation": "swiglu"},
}
MODELS |= {"padded": {}, "padded_modern": MODELS["modern"]}


def drawn_mask(shape: tuple[int, int], seed: Tensor, rate: float) -> Tensor:
    """What the kernels' dropout keeps of [rows, width]."""
    num_rows, width = shape
    mask = torch.empty(shape, dtype=torch.int8)
    tile = triton.next_power_of_2(num_rows), triton.next_power_of_2(max(width, 16))
    write_kept[(1, 1)](mask, seed, attention_launch.threshold_of(rate), *shape, 1, ROWS=tile[0], COLUMNS=tile[1])
    return mask.bool()


def module_of(case: Case) -> Any:
    generator = torch.Generator().manual_seed(2)
    if case.kind in PLAIN:
        module: Any = ActivatedLinear(24, case.width, activation=case.kind)
    else:
        width = case.width - case.padding
        module = ResidualRmsNorm(eps=1e-5, width=width) if case.kind == "rms" else ResidualLayerNorm(width)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator).to(case.dtype)
        parameter.data = values if case.kind in PLAIN else F.pad(values + 1, (0, case.padding))
    return module


def outcome(case: Case, drop: Drop, dtype: torch.dtype) -> dict[str, Tensor]:
    """Results and all gradients."""
    generator, module = torch.Generator().manual_seed(0), module_of(case).to(dtype)

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator).to(case.dtype).to(dtype)
        values[..., shape[-1] - case.padding :] = 0
        return values

    if case.kind in PLAIN:
        x, gradient = drawn(case.num_rows, 24).requires_grad_(), drawn(case.num_rows, case.width)
        result = module(x, drop)
        result.backward(gradient)
        found = {"result": result.detach(), "x": x.grad}
    else:
        shape = (3, case.num_rows // 3, case.width) if case.num_rows % 3 == 0 else (case.num_rows, case.width)
        residual, update = (drawn(*shape).requires_grad_() for _ in range(2))
        if case.kind == "sum":
            results = (residual_sum(residual, update, drop),)
        else:
            results = module(residual, update, drop)
            results = {"both": results, "sum": results[:1], "normed": results[1:]}[case.used]
        torch.autograd.backward(results, [drawn(*shape) for _ in results])
        found = {str(i): x.detach() for i, x in enumerate(results)} | {"residual": residual.grad, "update": update.grad}
    return found | {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@contextmanager
def dropping(mask: Tensor, rate: float) -> Iterator[None]:
    """Inside, torch's dropout keeps what this mask says."""
    scale = 1 / (1 - attention_launch.threshold_of(rate) / 65536)

    def dropped(x: Tensor, rate: float) -> Tensor:
        return x * mask.view_as(x) * scale if rate else x

    plain = {name: lambda x, rate, f=f: dropped(f(x), rate) for name, f in PLAIN.items()}
    with (
        mock.patch.object(residual_norm, "dropout", dropped),
        mock.patch.dict(activation.ACTIVATIONS, plain),
    ):
        yield


def relative_errors(name: str) -> dict[str, float]:
    """Of results and all gradients, against the twin in fp64."""
    case, seed = CASES[name], torch.tensor([11])
    with mock.patch.object(rows, "MAX_PARTS", 4 * case.num_multiprocessors):
        measured = outcome(case, Drop(case.rate, True, seed if case.rate else None), case.dtype)
    with dropping(drawn_mask((case.num_rows, case.width), seed, case.rate), case.rate):
        exact = outcome(case, Drop(case.rate), torch.float64)
    assert measured.keys() == exact.keys()
    assert not any(values[..., case.width - case.padding :].any() for values in measured.values() if case.padding)
    return {output: relative_error(measured[output], exact[output]) for output in exact}


def trained(
    section: Any,
    *,
    by_kernel: bool,
    recompute_every: int = 0,
    seed: int = 3,
    backward: bool = True,
    pads: bool = False,
) -> dict[str, Tensor]:
    """Hidden states of the second of two segments, and all gradients; by the kernels of attention, too."""
    torch.manual_seed(0)
    model = TransformerXL(section, vocab_size=VOCAB_SIZE, recompute_every=recompute_every).train()
    if pads:
        pad_widths(model)
    with ExitStack() as stack:
        if by_kernel:
            stack.enter_context(mock.patch.object(rows, "runs", return_value=True))
            for name in ("unsupported_device_reason", "unsupported_shape_reason"):
                stack.enter_context(mock.patch.object(attention_launch, name, return_value=None))
        torch.manual_seed(seed)
        _, memory = model(random_tokens(1, 5), model.empty_memory(num_lanes=1, memory_len=4))
        hidden, _ = model(random_tokens(1, 5, seed=1), memory)
        if backward:
            gradient = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
            gradient[..., section.width :] = 0  # padding
            hidden.backward(gradient)
    return {"hidden": hidden.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def whole_models(*names: str) -> dict[str, float]:
    """Largest relative error of hidden states and gradients of a model in fp32, beside that without kernels."""
    found = {}
    for name in names:
        section, pads = tiny_section(num_layers=2, **MODELS[name], dropout=0.0), name.startswith("padded")
        ours, torchs = (trained(section, by_kernel=by_kernel, pads=pads) for by_kernel in (True, False))
        assert ours.keys() == torchs.keys()
        found[name] = max(relative_error(ours[key], torchs[key].double()) for key in torchs)
    return found


def recomputed() -> dict[str, float]:
    """Largest difference of a gradient under activation checkpointing, and of hidden states by another seed."""
    found = {}
    for pre_norm in (False, True):
        section = tiny_section(num_layers=1, pre_norm=pre_norm, dropout=0.3, activation="gelu")
        once, twice = (trained(section, by_kernel=True, recompute_every=n) for n in (0, 1))
        other = trained(section, by_kernel=True, seed=4, backward=False)
        found[f"same seed, pre_norm {pre_norm}"] = max((once[k] - twice[k]).abs().max().item() for k in once)
        found[f"other seed, pre_norm {pre_norm}"] = (once["hidden"] - other["hidden"]).abs().max().item()
    return found


def places_differ() -> dict[str, float]:
    """Part of numbers that two of the seeds of a layer treat alike, for the three pairs; 0.58 where they know nothing
    of each other at a rate of 0.3."""
    seeds = rows.draw_seeds(3, like=torch.empty(0))
    masks = [drawn_mask((256, 256), seed, 0.3).double() for seed in seeds]
    pairs = [(0, 1), (0, 2), (1, 2)]
    return {f"{a} {b}": (masks[a] == masks[b]).double().mean().item() for a, b in pairs}


def adam_steps() -> dict[str, float]:
    """Largest relative errors after three steps, compared with torch's in fp64: coupled and decoupled decay."""
    kinds = (torch.optim.Adam, torch.optim.AdamW)
    found = {kind.__name__: errors_of_adam(kind, device="cpu") for kind in kinds}
    return {f"{kind}, {name}": error for kind, errors in found.items() for name, error in errors.items()}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    # Memory that nothing was written to holds NaN: what is read but was never written would show.
    torch.use_deterministic_algorithms(True)
    checks = {"recomputed": recomputed, "places_differ": places_differ, "adam_steps": adam_steps}
    checks |= {"whole_models": partial(whole_models, "paper", "modern", "padded")}
    checks |= {"other_models": partial(whole_models, "pre_norm", "gated", "padded_modern")}
    with np.errstate(all="ignore"):
        for name in names:
            found = checks[name]() if name in checks else relative_errors(name)
            assert not any(math.isnan(value) for value in found.values()), (name, found)
            print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
