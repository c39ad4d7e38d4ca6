"""Compare the kernels in Triton's interpreter with the plain function in fp64. It is a program, because
TRITON_INTERPRET acts at import.

`python -m tests.unit.model.kernels.interpreted NAME...` prints the results of these checks as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import InterpretedFunction, _patch_lang

from tests.helpers.models import tiny_model
from tests.unit.model.test_adaptive_softmax import VARIANTS
from tests.unit.model.test_fused_softmax import both
from txl_dist.model import fused_softmax
from txl_dist.model import relative_attention as twin
from txl_dist.model.kernels import attention_launch
from txl_dist.model.kernels.relative_attention import kept
from txl_dist.model.memory import EMPTY, AttentionMask
from txl_dist.model.relative_attention import Terms

OUTPUTS = ("context", "query", "key_value", "distance", "content_bias", "position_bias")
SMALL_BUFFER = 12_000


PATCHED = set[str]()
"""Modules of Triton whose functions compute in the interpreter by now."""


def _call_in_kernel(self: InterpretedFunction[Any], *arguments: Any, **constants: Any) -> Any:
    """Call a function inside a kernel. Triton's own method turns the language into the interpreter's at each call,
    which is a quarter of all the time: the kernel has done that for its module, and for Triton's once is enough."""
    module = self.fn.__module__
    if module.startswith("triton.") and module not in PATCHED:
        _patch_lang(self.fn)
        PATCHED.add(module)
    return self.rewrite()(*arguments, **constants)


InterpretedFunction.__call__ = _call_in_kernel


class Case(NamedTuple):
    """Sizes, and what is particular about them."""

    T: int
    M: int
    B: int = 1
    N: int = 1
    H: int = 32
    rows: int | None = None
    """Of every tile, so that small problems have many; None for those of a GPU."""
    columns: int = 16
    documents: str = "one"
    oldest: int | None = None
    dropout: float = 0.0
    buffer_bytes: int = attention_launch.SCORE_BUFFER_BYTES
    num_multiprocessors: int = attention_launch.NUM_MULTIPROCESSORS
    """With few, a small problem has the largest tiles."""
    dtype: torch.dtype = torch.float32


CASES = {
    "odd": Case(21, 13, B=2, N=2, rows=16, buffer_bytes=5_000),
    "nvidia_base_shape": Case(150, 150, H=41),
    "one_token": Case(1, 0, B=2, N=2),
    "one_token_after_memory": Case(1, 37, B=2, rows=16, columns=32),
    "no_memory": Case(40, 0, B=2, H=128),
    "whole_eights": Case(64, 64, N=2, H=64),
    "empty_memory": Case(24, 40, B=2, rows=16, documents="empty"),
    "borders": Case(37, 23, B=3, rows=16, columns=32, documents="borders", buffer_bytes=SMALL_BUFFER),
    "many_tiles": Case(150, 20, B=2, rows=16, columns=16),
    "window": Case(33, 20, B=2, rows=16, documents="borders", oldest=1),
    "window_over_many_tiles": Case(300, 20, B=3, documents="borders", oldest=0),
    "window_longer_than_memory": Case(70, 5, rows=16, documents="borders", oldest=0),
    "large_tiles": Case(128, 128, B=2, N=2, H=64, documents="borders", num_multiprocessors=1),
    "large_tiles_of_one_document": Case(128, 384, H=128, num_multiprocessors=1),
    "dropout": Case(37, 23, B=2, rows=16, columns=32, dropout=0.3, buffer_bytes=SMALL_BUFFER),
    "bf16": Case(24, 16, rows=16, documents="borders", dropout=0.2, dtype=torch.bfloat16),
}

OF_PRODUCTS = ("odd", "nvidia_base_shape", "one_token", "one_token_after_memory", "dropout")
"""Cases that are computed a second time, of products that lie apart: where keys lie does not depend on documents."""
KEPT = ("odd", "one_token", "window", "dropout")
"""Cases that are computed again with distance scores that the forward pass keeps: several chunks and one chunk."""


@triton.jit
def write_kept(MASK, SEED, threshold, T, K, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """mask_BNTK by the kernels' own function. Programs: (heads, lanes)."""
    head, lane = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    mask = kept(tl.load(SEED), lane, head, i, 0, threshold, COLUMNS)
    row = ((lane * N + head) * T + i) * K
    tl.store(MASK + row[:, None] + j[None, :], mask.to(tl.int8), mask=(i < T)[:, None] & (j < K)[None, :])


def documents_of(case: Case) -> Tensor:
    """document_BK."""
    generator = torch.Generator().manual_seed(1)
    K = case.M + case.T
    if case.documents == "borders":
        documents = (torch.rand(case.B, K, generator=generator) < 0.1).long().cumsum(1)
        documents[0, : case.M // 2] = EMPTY
        return documents
    documents = torch.zeros(case.B, K, dtype=torch.int64)
    if case.documents == "empty":
        documents[:, : case.M] = EMPTY
    return documents


def drawn_inputs(case: Case) -> tuple[list[Tensor], Tensor, AttentionMask]:
    """Leaves (query, key_value, distance, u, v) and the gradient of the context, in fp64 but rounded to the type."""
    generator = torch.Generator().manual_seed(0)
    B, T, K, N, H = case.B, case.T, case.M + case.T, case.N, case.H
    shapes = [(B, T, N, H), (B, K, 2, N, H), (K, N, H), (N, H), (N, H), (B, T, N, H)]
    *leaves, gradient = [torch.randn(shape, generator=generator).to(case.dtype).double() for shape in shapes]
    documents = documents_of(case)
    return leaves, gradient, AttentionMask(documents[:, case.M :], documents, case.oldest)


def outcome(attend: Callable[..., Tensor], case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Context and gradients, as OUTPUTS."""
    leaves, gradient, visible = drawn_inputs(case)
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    query, key_value, distance, content_bias, position_bias = leaves
    key, value = key_value.unbind(2)
    context = attend(
        Terms(query, key, value, distance, content_bias, position_bias),
        visible=visible,
        dropout=case.dropout,
    )
    context.backward(gradient.to(dtype))
    return [context.detach(), *(x.grad for x in leaves if x.grad is not None)]


def attend_to_products(terms: Terms, *, visible: AttentionMask, dropout: float) -> Tensor:
    """Queries, keys and values of the segment together, and keys and values of the memory, as products make them."""
    query, key, value, distance, content_bias, position_bias, *_ = terms
    assert distance is not None
    assert content_bias is not None
    assert position_bias is not None
    past, new = ((key[:, part], value[:, part]) for part in (slice(-query.shape[1]), slice(-query.shape[1], None)))
    return attention_launch.triton_attention_of_products(
        torch.stack([query, *new], 2),
        torch.stack(past, 2),
        distance_KNH=distance,
        content_bias_NH=content_bias,
        position_bias_NH=position_bias,
        visible=visible,
        dropout=dropout,
    )


def drawn_mask(case: Case, seed: Tensor) -> Tensor:
    """mask_BNTK of what dropout keeps."""
    K = case.M + case.T
    mask = torch.empty(case.B, case.N, case.T, K, dtype=torch.int8)
    threshold = round(case.dropout * attention_launch.KEEP_LEVELS)
    rows, columns = triton.next_power_of_2(case.T), triton.next_power_of_2(max(K, 16))
    write_kept[(case.N, case.B)](mask, seed, threshold, case.T, K, case.N, ROWS=rows, COLUMNS=columns)
    return mask.bool()


def use_tiles(case: Case) -> None:
    attention_launch.SCORE_BUFFER_BYTES, attention_launch.NUM_MULTIPROCESSORS = (
        case.buffer_bytes,
        case.num_multiprocessors,
    )
    if case.rows is not None:
        tile = attention_launch.Tile(case.rows, case.columns, 1, 1, resident=1)
        attention_launch.tiles = lambda head_width, has_dropout: dict.fromkeys(
            [*attention_launch.FORWARD, *attention_launch.BACKWARD, attention_launch.SUM], (tile,)
        )


def relative_errors(name: str) -> dict[str, float]:
    """Of the context and of all gradients, against the twin in fp64; `of_products`, the largest difference to what is
    made of products that lie apart, in some cases."""
    case = CASES[name]
    use_tiles(case)
    torch.manual_seed(7)
    measured = outcome(attention_launch.triton_relative_attention, case, case.dtype)
    torch.manual_seed(7)
    kept_NBTK = drawn_mask(case, torch.randint(2**63 - 1, (1,))).transpose(0, 1)
    keep_rate = 1 - round(case.dropout * attention_launch.KEEP_LEVELS) / attention_launch.KEEP_LEVELS
    with mock.patch.object(twin.F, "dropout", lambda weights, rate, training: weights * kept_NBTK / keep_rate):
        exact = outcome(twin.relative_attention, case, torch.float64)
    errors = {output: relative_error(a, b) for output, a, b in zip(OUTPUTS, measured, exact, strict=True)}
    if name in OF_PRODUCTS:
        torch.manual_seed(7)
        of_products = outcome(attend_to_products, case, case.dtype)
        pairs = zip(measured, of_products, strict=True)
        errors["of_products"] = max((a - b).abs().max().item() for a, b in pairs)
    if name in KEPT:
        torch.manual_seed(7)
        keeping = partial(attention_launch.triton_relative_attention, keeps_scores=True)
        errors["kept_scores"] = float(not all(map(torch.equal, measured, outcome(keeping, case, case.dtype))))
    return errors


def relative_error(measured: Tensor, exact: Tensor) -> float:
    """By norms. A gradient that is exactly zero, the difference of equal sums, is as exact as these are."""
    size = exact.norm() if exact.any() else torch.tensor(exact.numel()).sqrt() * 4
    return ((measured.double() - exact).norm() / size).item()


def dropout_rates() -> dict[str, float]:
    """Part of probabilities that is kept, at a rate of 0.15: in all, and the least and the most of any column.

    And the part of places at which two heads, of one lane or of two, do the same: the least and the most of any pair.
    """
    mask_BNTK = drawn_mask(Case(256, 256, B=2, N=2, dropout=0.15), torch.tensor([3])).double()
    columns = mask_BNTK.mean((0, 1, 2))
    alike = [(a == b).double().mean().item() for a, b in combinations(mask_BNTK.flatten(0, 1), 2)]
    return {
        "all": mask_BNTK.mean().item(),
        "least": columns.min().item(),
        "most": columns.max().item(),
        "least_alike": min(alike),
        "most_alike": max(alike),
    }


def recomputed() -> dict[str, float]:
    """Largest difference of a gradient under activation checkpointing, and in a second backward pass."""
    case = Case(12, 4, rows=16, dropout=0.4)
    use_tiles(case)
    keeping = partial(attention_launch.triton_relative_attention, keeps_scores=True)

    def attend_again(*inputs: Any, **settings: Any) -> Tensor:
        context: Tensor = checkpoint(keeping, *inputs, use_reentrant=False, **settings)
        return context

    torch.manual_seed(5)
    once = outcome(attention_launch.triton_relative_attention, case, torch.float32)
    torch.manual_seed(5)
    twice = outcome(attend_again, case, torch.float32)
    torch.manual_seed(6)
    other = outcome(attention_launch.triton_relative_attention, case, torch.float32)
    difference = max((a - b).abs().max().item() for a, b in zip(once, twice, strict=True))
    (query, key_value, *distances), gradient, visible = drawn_inputs(case)
    query = query.float().requires_grad_()
    terms = Terms(query, *key_value.float().unbind(2), *(x.float() for x in distances))
    context = keeping(terms, visible=visible)
    first, second = (
        torch.autograd.grad(context, query, gradient.float(), retain_graph=retains)[0] for retains in (True, False)
    )
    return {
        "same_seed": difference,
        "other_seed": (once[0] - other[0]).abs().max().item(),
        "second_pass": (first - second).abs().max().item(),
    }


def softmax_errors() -> dict[str, float]:
    """Relative, of losses and gradients of logits, against the twin in fp64, and the largest number in the padding.

    Short rows many to a program, rows that end within a program's columns and at their end, rows that take many turns.
    """
    found, generator = {}, torch.Generator().manual_seed(0)
    for num_rows, num_columns, dtype in [
        (5, 204, torch.float32),
        (37, 17, torch.float32),
        (3, 4096, torch.float32),
        (2, 9003, torch.float32),
        (3, 9003, torch.bfloat16),
        (21, 300, torch.float16),
    ]:
        stride = -(-num_columns // 16) * 16
        buffer = torch.randn(num_rows, stride, generator=generator).mul_(5).to(dtype)
        bias, share = torch.randn(num_columns, generator=generator), torch.rand(num_rows, generator=generator)
        targets, logits = torch.randint(num_columns, (num_rows,), generator=generator), buffer[:, :num_columns]
        exact = logits.double() + bias
        expected = fused_softmax._into_gradient(exact, targets[:, None], share.double()[:, None])
        padded = torch.nn.functional.pad(bias, (0, stride - num_columns), value=float("-inf"))
        losses = fused_softmax._into_gradient_by_kernel(logits, padded, targets, share)
        kind = f"{num_columns} {str(dtype).removeprefix('torch.')}"
        found[f"{kind} losses"] = relative_error(losses, expected)
        found[f"{kind} gradient"] = relative_error(logits, exact)
        found[f"{kind} padding"] = buffer[:, num_columns:].abs().sum().item()
    return found


def weighted_losses() -> dict[str, float]:
    """Relative, of weighted loss and every gradient in fp32, clusters cut into chunks, against the plain in fp64."""
    found = {}
    for name, settings in VARIANTS.items():
        exact = tiny_model(**settings).double().softmax
        (loss, gradients), _ = both(exact, dtype=torch.float64, rounded_to=torch.float32)
        settled = {"CHUNK_ROWS": {"cpu": 4}, "CHUNK_LOGITS": {"cpu": 1}, "runs_kernel": lambda hidden_SD: True}
        with mock.patch.multiple(fused_softmax, **settled):
            _, (measured, ours) = both(tiny_model(**settings).softmax, dtype=torch.float32)
        errors = [relative_error(ours[key], expected) for key, expected in gradients.items()]
        found[name] = max(relative_error(measured, loss), *errors)
    return found


def multiplied_errors() -> dict[str, float]:
    """Largest relative difference between a gradient that the kernel multiplied and the product in fp32, rounded."""
    found, generator = {}, torch.Generator().manual_seed(0)
    for shape, dtype in [((5,), torch.float32), ((64, 64), torch.bfloat16), ((71, 150), torch.float16)]:
        gradient = torch.randn(shape, generator=generator).to(dtype)
        for factor in (1.0, 2.6):
            product = gradient.clone()
            fused_softmax._multiply_unless_one(product, torch.tensor(factor))
            name = f"{str(dtype).removeprefix('torch.')} {factor}"
            expected = (gradient.float() * factor).to(dtype)
            found[name] = ((product - expected) / expected).abs().max().item()
    return found


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    # Memory that nothing was written to holds NaN: what is read but was never written would show.
    torch.use_deterministic_algorithms(True)
    checks = {"dropout_rates": dropout_rates, "recomputed": recomputed}
    checks |= {"softmax_errors": softmax_errors, "weighted_losses": weighted_losses}
    checks |= {"multiplied_errors": multiplied_errors}
    tiles = attention_launch.tiles
    with np.errstate(all="ignore"):
        for name in names:
            attention_launch.tiles = tiles
            found = checks[name]() if name in checks else relative_errors(name)
            print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
