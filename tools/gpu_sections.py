"""What `bench_gpu.py` measures, a function per section; each runs in a process of its own and returns table rows.

    ceilings    what the device can do: a copy, and a product of half-precision matrices
    exact       the Triton kernels beside the plain equation in fp64: relative errors of the result and of all gradients
    kernels     relative attention alone, forward and backward, by everything that can compute it
    step        a whole training step of one recipe by one code (see trainers.py)
    precision   300 steps in fp32, bf16 and fp16 on text that can be learnt

Operations are those of `txl_dist.model.flops`: what is computed on masked pairs does not count. On a CPU (`rehearse`)
sizes are tiny, everything is fp32 and Triton stays out: it shows that the program runs, its figures mean nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from measuring import milliseconds
from peers import nvidia, original
from torch import Tensor
from trainers import OurTrainer, PeerTrainer, Sizes, Trainer, zipf_segments

from txl_dist.config import load_config
from txl_dist.model.flops import flops_by_part, peak_tflops
from txl_dist.model.fused_attention import fused_relative_attention
from txl_dist.model.memory import EMPTY, Memory, Visibility, visible_keys
from txl_dist.model.relative_attention import Terms, relative_attention
from txl_dist.sections import ModelSection

Row = dict[str, object]
RECIPES = {
    "enwik8_base": (204, 22),
    "enwik8_large": (204, 32),
    "nvidia_wt103_base": (267_735, 128),
    "wt103_large": (267_735, 64),
}
"""Vocabulary and lanes on one device; lanes are halved until they fit."""
CODES = ("original TF32", "nvidia fp16", "ours plain", "ours fused", "ours triton", "ours graphed")
"""The last replays forward and backward as one CUDA graph: here belongs what the engine will offer of it."""


class Shape(NamedTuple):
    """Of one call of attention."""

    name: str
    lanes: int
    queries: int
    memory: int
    heads: int
    head_width: int


SHAPES = (
    Shape("enwik8 base", 22, 512, 512, 8, 64),
    Shape("enwik8 large", 8, 768, 768, 8, 128),
    Shape("wt103 base", 60, 150, 150, 10, 41),
    Shape("NVIDIA wt103 base", 32, 192, 192, 8, 64),
    Shape("wt103 large", 16, 384, 384, 16, 64),
)
ODD_SHAPES = (
    Shape("odd", 3, 37, 23, 5, 40),
    Shape("no memory", 2, 128, 0, 4, 64),
    Shape("long memory", 2, 64, 640, 4, 32),
)
TINY_SHAPES = (Shape("tiny", 2, 16, 16, 2, 16), Shape("odd", 1, 7, 5, 3, 8))


class Inputs(NamedTuple):
    """Of attention, in one type; the first six want gradients."""

    query: Tensor
    key: Tensor
    value: Tensor
    distance: Tensor
    content_bias: Tensor
    position_bias: Tensor
    visible: Visibility

    def call(self, attend: Callable[..., Tensor]) -> Tensor:
        """As `Attention` calls."""
        return attend(Terms(*self[:6]), visible=self.visible)

    def cast(self, dtype: torch.dtype) -> Inputs:
        """Leaves of another type with the same values."""
        return Inputs(*(x.detach().to(dtype).requires_grad_() for x in self[:6]), self.visible)


def inputs_of(shape: Shape, *, dtype: torch.dtype, device: str, documents: bool = False) -> Inputs:
    """Random ones; with `documents` part of the memory is empty and a document begins inside the segment."""
    generator = torch.Generator(device).manual_seed(0)
    _, B, T, M, N, H = shape

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype).requires_grad_()

    document_BM = torch.zeros(B, M, dtype=torch.int64, device=device)
    document_BT = torch.zeros(B, T, dtype=torch.int64, device=device)
    if documents:
        document_BM[:, : M // 3] = EMPTY
        document_BT[:, T // 2 :] = 1
    visible = visible_keys(Memory(torch.empty(0, device=device), document_BM), document_BT)
    K = T + M
    # Keys and values lie as the model has them on a GPU: side by side, as their one projection makes them.
    key, value = (x.requires_grad_() for x in draw(B, K, 2, N, H).detach().unbind(2))
    return Inputs(draw(B, T, N, H), key, value, draw(K, N, H), draw(N, H), draw(N, H), visible)


def ceilings(*, device: str, rehearse: bool) -> list[Row]:
    """Copy in GB/s (read and written) and products in TFLOP/s; best of ten."""
    size = 1 << (22 if rehearse else 30)
    source, target = torch.ones(size, device=device), torch.empty(size, device=device)
    copy_ms = min(milliseconds(lambda: target.copy_(source)) for _ in range(10))
    side, dtype = (256, torch.float32) if rehearse else (8192, torch.bfloat16)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product_ms = min(milliseconds(lambda: left @ right) for _ in range(10))
    return [
        {"what": "copy, GB/s", "figure": 8 * size / copy_ms / 1e6},
        {
            "what": f"{dtype} product of {side}^3, TFLOP/s".removeprefix("torch."),
            "figure": 2 * side**3 / product_ms / 1e9,
        },
    ]


def exact(*, device: str, rehearse: bool) -> list[Row]:
    """Norm of the error by the norm of the exact, which is the equation in fp64 on the same rounded numbers."""
    attend, dtypes = (fused_relative_attention, (torch.float32,)) if rehearse else (_triton(), _HALVES)
    found: list[Row] = []
    for shape in TINY_SHAPES if rehearse else (*SHAPES, *ODD_SHAPES):
        shape = shape._replace(lanes=min(shape.lanes, 3))
        for dtype in dtypes:
            for documents in (False, True):
                given = inputs_of(shape, dtype=dtype, device=device, documents=documents)
                true = given.cast(torch.float64)
                results = given.call(attend), true.call(relative_attention)
                towards = torch.randn_like(results[1]).to(dtype)
                mine = torch.autograd.grad(results[0], given[:6], towards)
                theirs = torch.autograd.grad(results[1], true[:6], towards.double())
                pairs = zip(
                    ("result", "q", "k", "v", "R", "u", "v bias"),
                    (results[0], *mine),
                    (results[1], *theirs),
                    strict=True,
                )
                errors = {name: float((a.double() - b).norm() / b.norm()) for name, a, b in pairs}
                row: Row = {"shape": shape.name, "type": str(dtype)[6:], "documents": str(documents)}
                found.append(row | errors)
    return found


_HALVES = (torch.bfloat16, torch.float16)


def kernels(*, device: str, rehearse: bool) -> list[Row]:
    """Milliseconds and TFLOP/s, forward and backward; a variant that fails says why instead."""
    found: list[Row] = []
    dtype = torch.float32 if rehearse else torch.bfloat16
    for shape in TINY_SHAPES if rehearse else SHAPES:
        _, B, T, M, N, H = shape
        product = 2 * B * N * H * T * (M + (T + 1) / 2)  # operations of one of the three products of the forward pass
        for name, attend in attentions(rehearse=rehearse).items():
            row: Row = {"shape": shape.name, "variant": name}
            try:
                forward_ms, both_ms = _attention_ms(inputs_of(shape, dtype=dtype, device=device), attend)
                row |= {"forward ms": forward_ms, "backward ms": both_ms - forward_ms}
                row |= {"forward TFLOP/s": 3 * product / forward_ms / 1e9, "both TFLOP/s": 9 * product / both_ms / 1e9}
            except Exception as error:  # noqa: BLE001  of whatever kind, the others are to be measured
                row |= {"forward ms": _first_line(error)}
            found.append(row)
    return found


def _attention_ms(given: Inputs, attend: Callable[..., Tensor]) -> tuple[float, float]:
    towards = torch.randn_like(given.query)
    forward_ms = _best(lambda: given.call(attend))
    return forward_ms, _best(lambda: torch.autograd.grad(given.call(attend), given[:6], towards))


def attentions(*, rehearse: bool) -> dict[str, Callable[..., Tensor]]:
    """Everything that can compute relative attention, with the signature of the plain equation."""
    variants: dict[str, Callable[..., Tensor]] = {"plain": relative_attention, "fused": fused_relative_attention}
    variants["sdpa"] = _sdpa
    if not rehearse:
        variants |= {"triton": _triton(), "flex": _Flex()}
    return variants


def _triton() -> Callable[..., Tensor]:
    from txl_dist.model.kernels.launch import triton_relative_attention

    return triton_relative_attention


def _shifted_terms(terms: Terms) -> tuple[Tensor, Tensor]:
    """Terms (b)+(d) by distance, [N, B, T, K+1] with the zero column in front; by key, a view of it, [N, B, T, K]."""
    query, _, _, distance, _, position_bias, _ = terms
    (B, T, N, H), K = query.shape, distance.shape[0]
    position_query = (query + position_bias).permute(2, 0, 1, 3).reshape(N, B * T, H)
    products = torch.bmm(position_query, F.pad(distance.permute(1, 2, 0), (1, 0))).view(N, B, T * (K + 1))
    return products.view(N, B, T, K + 1), products[:, :, T:].view(N, B, T, K)


def _sdpa(terms: Terms, *, visible: Visibility) -> Tensor:
    """torch's memory-efficient kernel with the shifted view as bias; its other backends are wrong or refuse."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    (query, key, value), (_, shifted) = terms[:3], _shifted_terms(terms)
    scale = query.shape[-1] ** -0.5
    hidden_BTK = ~visible.mask()
    bias = (shifted * scale).masked_fill_(hidden_BTK, float("-inf")).transpose(0, 1)
    content_query = (query + terms.content_bias_NH).transpose(1, 2)
    backend = SDPBackend.EFFICIENT_ATTENTION if query.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        context = F.scaled_dot_product_attention(
            content_query, key.transpose(1, 2), value.transpose(1, 2), attn_mask=bias, scale=scale
        )
    return context.transpose(1, 2)


class _Flex:
    """FlexAttention, compiled, reading the terms (b)+(d) inside its score function."""

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.attend = torch.compile(flex_attention, dynamic=False)
        self.create_mask, self.masks = create_block_mask, dict[tuple[int, int], Any]()

    def __call__(self, terms: Terms, *, visible: Visibility) -> Tensor:
        query, key, value = terms[:3]
        T, K, scale = query.shape[1], key.shape[1], query.shape[-1] ** -0.5
        products = _shifted_terms(terms)[0]
        if (T, K) not in self.masks:
            near = lambda b, h, i, j: j <= i + K - T  # noqa: E731
            self.masks[T, K] = self.create_mask(near, None, None, T, K, device=query.device)

        def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + products[h, b, i, torch.clamp(j - i + T, 0, K)] * scale

        heads = ((query + terms.content_bias_NH).transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        context: Tensor = self.attend(*heads, score_mod=score, block_mask=self.masks[T, K], scale=scale)
        return context.transpose(1, 2)


def step(
    recipe: str, code: str, *, device: str, rehearse: bool, configs: Path, peers: dict[str, Path | None]
) -> list[Row]:
    """Tokens per second, MFU and peak memory of one code on one recipe."""
    vocab_size, lanes = RECIPES[recipe]
    while True:
        sizes = Sizes.of(load_config(configs / f"{recipe}.toml"), vocab_size=vocab_size, num_lanes=lanes)
        try:
            return [
                {"recipe": recipe, "code": code}
                | _timed(_shrunk(sizes) if rehearse else sizes, code, device=device, peers=peers)
            ]
        except torch.OutOfMemoryError:
            if lanes == 1:
                raise
            lanes //= 2
        torch.cuda.empty_cache()


def _timed(sizes: Sizes, code: str, *, device: str, peers: dict[str, Path | None]) -> Row:
    trainer, segments = trainer_of(sizes, code, device=device, peers=peers), zipf_segments(sizes)
    given = [next(segments) for _ in range(8)]
    first_loss = float(trainer.step(given[0]))
    for ids in given[1:3]:
        trainer.step(ids)
    guess_ms = milliseconds(lambda: trainer.step(given[3]))
    steps = min(200, max(4, round(4000 / guess_ms))) if device == "cuda" else 4

    def some() -> None:
        for number in range(steps):
            loss = trainer.step(given[number % len(given)])
        assert math.isfinite(float(loss)), "the loss is not finite"

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # a try with more lanes, which did not fit, has left its own peak
    step_ms = min(milliseconds(some) for _ in range(2)) / steps
    flops = flops_by_part(
        sizes.model,
        vocab_size=sizes.vocab_size,
        segment_len=sizes.segment_len,
        memory_len=sizes.memory_len,
        microbatch_lanes=sizes.num_lanes,
    )
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    tflops, peak = sum(flops.values()) * sizes.tokens / step_ms / 1e9, peak_tflops(name, precision="bf16")
    return {
        "lanes": sizes.num_lanes,
        "step ms": step_ms,
        "tokens/s": 1000 * sizes.tokens / step_ms,
        "MFU % (of bf16 peak)": 100 * tflops / peak if peak else float("nan"),
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan"),
        "first loss": first_loss,
    }


def trainer_of(sizes: Sizes, code: str, *, device: str, peers: dict[str, Path | None]) -> Trainer:
    """One of `CODES`. Ours in bf16; on a CPU all in fp32."""
    if code == "original TF32":
        torch.set_float32_matmul_precision("high")
        return PeerTrainer(original(_given(peers, "original")), sizes, device=device)
    if code == "nvidia fp16":
        return PeerTrainer(nvidia(_given(peers, "nvidia")), sizes, device=device, nvidia=True, half=device == "cuda")
    kernel = {"plain": "plain", "fused": "fused", "triton": "triton", "graphed": "auto"}[code.split()[1]]
    precision = "bf16" if device == "cuda" else "fp32"
    return OurTrainer(sizes, attention=kernel, device=device, precision=precision, graphed="graphed" in code)  # type: ignore[arg-type]


def _given(peers: dict[str, Path | None], name: str) -> Path:
    folder = peers[name]
    if folder is None:
        raise ValueError(f"not measured: --peer-{name} was not given")
    return folder


def _shrunk(sizes: Sizes) -> Sizes:
    """A recipe for a rehearsal: the same kinds of parts, of sizes that a CPU runs at once."""
    small = {"num_layers": 2, "width": 32, "num_heads": 2, "head_width": 16, "ff_width": 64}
    cutoffs = (100, 200, 300) if sizes.model.cutoffs else ()
    model = ModelSection.model_validate(
        sizes.model.model_dump() | small | {"cutoffs": cutoffs, "div_value": min(2, sizes.model.div_value)}
    )
    return Sizes(model, 400, 2, 16, 16)


def precision(*, device: str, rehearse: bool) -> list[Row]:
    """Losses along the way; the text's own entropy is the last row."""
    steps, every = (6, 3) if rehearse else (300, 25)
    model = ModelSection(
        num_layers=2 if rehearse else 6,
        width=32 if rehearse else 512,
        num_heads=2 if rehearse else 8,
        head_width=16 if rehearse else 64,
        ff_width=64 if rehearse else 2048,
        cutoffs=(100, 300),
        dropout=0.0,
    )
    sizes = Sizes(model, 1000, 2, 16, 16) if rehearse else Sizes(model, 1000, 32, 256, 256)
    curves: dict[str, list[float]] = {}
    for kind in ("fp32",) if rehearse else ("fp32", "bf16", "fp16"):
        trainer = OurTrainer(sizes, attention="auto", device=device, precision=kind)
        text, losses = learnable_segments(sizes), []
        for number in range(steps + 1):
            loss = trainer.step(next(text))
            if number % every == 0:
                losses.append(float(loss))
        curves[kind] = losses
    rows: list[Row] = [
        {"step": n * every} | {kind: curve[n] for kind, curve in curves.items()} for n in range(steps // every + 1)
    ]
    return [*rows, {"step": "entropy"} | dict.fromkeys(curves, math.log(4))]


def learnable_segments(sizes: Sizes) -> Iterable[np.ndarray]:
    """Endless ids [lanes, T + 1] in which each word is followed by one of four, evenly: ln 4 nats are left."""
    generator = np.random.default_rng(0)
    successors = generator.integers(0, sizes.vocab_size, (sizes.vocab_size, 4))
    ids = generator.integers(0, sizes.vocab_size, sizes.num_lanes)
    while True:
        columns = [ids]
        for _ in range(sizes.segment_len):
            ids = successors[ids, generator.integers(0, 4, sizes.num_lanes)]
            columns.append(ids)
        yield np.stack(columns, axis=1)


def _best(action: Callable[[], object], *, least_ms: float = 300.0) -> float:
    """Smallest of the runs that fit into about that time, at least 3, after two to warm up."""
    for _ in range(2):
        milliseconds(action)
    began, times = time.perf_counter(), []
    while len(times) < 3 or 1000 * (time.perf_counter() - began) < least_ms:
        times.append(milliseconds(action))
    return min(times)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
