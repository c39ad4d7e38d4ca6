"""Relative attention by the Triton kernels of `kernels/relative_attention.py`: when they can run, and how they are run.

`triton_relative_attention` is what `relative_attention` is, for half precision on a GPU. Between forward and backward
it keeps the inputs, the context and one number per query and head. What is of T x K numbers is a score buffer for some
lanes and heads at a time, small enough to stay in the GPU's L2 cache while the kernels of a chunk pass it on.

Kernels are launched without waiting for the device: the seed of dropout is a tensor, drawn from the device's default
generator, so that activation checkpointing, which restores that generator, makes the same mask again.

Shapes: B lanes, T queries, K keys, N heads, H head width.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from txl_dist.model.memory import Visibility
from txl_dist.model.relative_attention import Terms

MAX_HEAD_WIDTH = 128
HEAD_WIDTH_MULTIPLE = 16
"""Head widths between are padded by zeros, so that every row of a head begins at a multiple of 16 bytes."""
SCORE_BUFFER_BYTES = 30 * 2**20
"""Of a chunk: most of the L2 cache of an H100 or H200 (50 and 60 MB)."""
MAX_MATRICES = 65_535 // 8
"""Score matrices in a chunk: an axis of a CUDA grid has at most 65,535 programs, 8 for a matrix."""
KEEP_LEVELS = 65_536
"""Dropout's rate is a multiple of one part in so many."""


class Tile(NamedTuple):
    """How a kernel is compiled: one program's part of the scores, its warps, and how many loads it has under way."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """For each thread: 168 let three programs of four warps share a multiprocessor."""


class Shape(NamedTuple):
    """What the kernels know of the sizes; a value that divides by 16, or is 1 or None, is compiled in."""

    T: int
    K: int
    S: int
    """K rounded up to 16: a row of the score buffer."""
    num_heads: int
    key_stride: int
    """From one key or value to the next, in numbers."""
    oldest: int | None
    """See `Visibility`."""


class Chunk(NamedTuple):
    """The lanes and heads whose scores are in the buffer together."""

    first_lane: int
    num_lanes: int
    first_head: int
    num_heads: int


def mismatch(dtype: torch.dtype, *, head_width: int, has_position_bias: bool) -> str | None:
    """Why the kernels cannot compute attention of this kind on any device; None if they can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bf16 or fp16 and the model in {str(dtype).removeprefix('torch.')}"
    if head_width > MAX_HEAD_WIDTH:
        return f"the head width {head_width} is over {MAX_HEAD_WIDTH}"
    if not has_position_bias:
        return "it knows sinusoids of the distance, not encodings that are learned"
    return None


def obstacle(query_BTNH: Tensor, *, has_position_bias: bool) -> str | None:
    """Why the kernels cannot compute attention of these queries; None if they can."""
    if not query_BTNH.is_cuda:
        return f"it runs on a CUDA device and the model is on {query_BTNH.device}"
    if not _has_triton():
        return "triton is not installed"
    if lacking := lacks_compiler():
        return lacking
    if torch.cuda.get_device_capability(query_BTNH.device) < (8, 0):
        return f"{torch.cuda.get_device_name(query_BTNH.device)} is older than Ampere (compute capability 8.0)"
    return mismatch(query_BTNH.dtype, head_width=query_BTNH.shape[-1], has_position_bias=has_position_bias)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def lacks_compiler() -> str:
    """What is missing to compile what starts a kernel, as Triton does when the first one runs; empty if nothing."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        return "Triton needs a C compiler (gcc or clang, or the one that CC names), and there is none"
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        return "Triton needs Python.h, the headers of Python, to compile, and it is missing"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <Python.h>\n")
        command = [compiler, str(source), "-shared", "-fPIC", "-I", include, "-o", str(source.with_suffix(".so"))]
        try:
            tried = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            return f"Triton needs a C compiler, and {compiler} does not run ({error})"
    if tried.returncode == 0:
        return ""
    why = next(filter(None, tried.stderr.splitlines()), f"exit code {tried.returncode}")
    return f"Triton needs a C compiler, and {compiler} cannot compile with Python.h ({why})"


def triton_relative_attention(terms: Terms, *, visible: Visibility, dropout: float = 0.0) -> Tensor:
    """Attend, like `relative_attention`. `obstacle` says whether it can. Returns context_BTNH."""
    query_BTNH, head_width = terms.query_BTNH, terms.query_BTNH.shape[-1]
    inputs: tuple[Any, ...] = terms[:6]  # which are all there, where there is no obstacle
    if padding := -head_width % HEAD_WIDTH_MULTIPLE:
        inputs = tuple(F.pad(x, (0, padding)) for x in inputs)
    seed = torch.randint(2**63 - 1, (1,), device=query_BTNH.device) if dropout > 0 else None
    context: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        *inputs,
        visible.query_document_BT.contiguous(),
        visible.key_document_BK.contiguous(),
        seed,
        visible.oldest,
        head_width**-0.5,
        round(dropout * KEEP_LEVELS),
    )
    return context[..., :head_width] if padding else context


def tiles(head_width: int) -> dict[str, Tile]:
    """By kernel, for heads of this width: chosen so that no registers spill on sm_90, with dropout or without."""
    narrow, whole = head_width <= 64, head_width in (32, 64)
    return {
        "distance_scores": Tile(64, 128, 4, 1),
        "attend": Tile(64, 64, 4, 2, max_registers=168 if whole else None),
        "prepare_backward": Tile(64, 0, 4, 1),
        "key_value_gradients": Tile(32, 64, 4, 3) if narrow else Tile(32, 64, 8, 2),
        "query_gradients": Tile(64, 64, 4, 3),
        "distance_query_gradients": Tile(64, 64, 4, 3),
        "distance_gradients": Tile(64, 64, 4, 3),
    }


def chunks(num_lanes: int, num_heads: int, *, matrix_bytes: int) -> Iterator[Chunk]:
    """Every (lane, head) once. All lanes of some heads where they fit: their gradient of R is then made at once."""
    fit = min(max(1, SCORE_BUFFER_BYTES // matrix_bytes), MAX_MATRICES)
    lanes = _even_part(num_lanes, fit)
    heads = _even_part(num_heads, max(1, fit // lanes))
    for first_head in range(0, num_heads, heads):
        for first_lane in range(0, num_lanes, lanes):
            yield Chunk(first_lane, min(lanes, num_lanes - first_lane), first_head, min(heads, num_heads - first_head))


def _even_part(whole: int, most: int) -> int:
    return _ceil_div(whole, _ceil_div(whole, most))


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


class _Kernels:
    """The kernels for one set of inputs: what is common to their launches."""

    def __init__(self, query: Tensor, key: Tensor, *, oldest: int | None) -> None:
        from txl_dist.model.kernels import relative_attention

        self.source = relative_attention
        B, T, N, self.head_width = query.shape
        K = key.shape[1]
        self.tiles = tiles(self.head_width)
        self.shape = Shape(T, K, _ceil_div(K, 16) * 16, N, key.stride(1), oldest)
        matrix_bytes = T * self.shape.S * query.element_size()
        self.chunks = list(chunks(B, N, matrix_bytes=matrix_bytes))
        self.scores = query.new_empty(self.chunks[0].num_lanes * self.chunks[0].num_heads * T * self.shape.S)

    def num_row_tiles(self, name: str) -> int:
        """Tiles of queries."""
        return _ceil_div(self.shape.T, self.tiles[name].rows)

    def num_class_tiles(self, num_lanes: int, name: str) -> int:
        """Tiles of the queries of one residue."""
        return _ceil_div(_ceil_div(self.shape.T, 8) * num_lanes, self.tiles[name].rows)

    def num_distance_tiles(self, name: str) -> int:
        """Tiles of n, from -8 ceil(T / 8) to M + 7."""
        return _ceil_div(_ceil_div(self.shape.T, 8) * 8 + self.shape.K - self.shape.T + 8, self.tiles[name].columns)

    def score_distances(self, query: Tensor, distance: Tensor, position_bias: Tensor, chunk: Chunk) -> None:
        """Fill the buffer with terms (b) + (d) of a chunk."""
        name = "distance_scores"
        grid = (self.num_distance_tiles(name), self.num_class_tiles(chunk.num_lanes, name), 8 * chunk.num_heads)
        where = (chunk.num_lanes, chunk.first_lane, chunk.first_head)
        self.run(name, grid, query, distance, position_bias, self.scores, self.shape, *where)

    def run(self, name: str, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch one kernel. `grid` counts programs."""
        tile = self.tiles[name]
        kernel: Any = getattr(self.source, name)
        kernel[grid](
            *arguments,
            **self._constants(name),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            maxnreg=tile.max_registers,
        )

    def _constants(self, name: str) -> dict[str, int]:
        """What is compiled in, besides `Shape`."""
        tile = self.tiles[name]
        block_h = 1 << (self.head_width - 1).bit_length()
        constants = {"H": self.head_width, "BLOCK_H": block_h, "ROWS": tile.rows}
        if name != "prepare_backward":
            constants |= {"COLUMNS": tile.columns, "CAST": self.source.IS_INTERPRETED}
        if name == "attend":
            constants["STAGES"] = tile.num_stages
        return constants


class _Attention(torch.autograd.Function):
    """Inputs and gradients as in `triton_relative_attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        distance: Tensor,
        content_bias: Tensor,
        position_bias: Tensor,
        query_document: Tensor,
        key_document: Tensor,
        seed: Tensor | None,
        oldest: int | None,
        scale: float,
        threshold: int,
    ) -> Tensor:
        query, distance = query.contiguous(), distance.contiguous()
        # A number of two bytes for each thread would be a load of two bytes.
        content_bias, position_bias = content_bias.float().contiguous(), position_bias.float().contiguous()
        key, value = _alike(key, value)
        kernels = _Kernels(query, key, oldest=oldest)
        (B, T, N, _), shape, scores = query.shape, kernels.shape, kernels.scores
        context, lse = torch.empty_like(query), query.new_empty(B, N, T, dtype=torch.float32)
        documents = (query_document, key_document, seed)
        for chunk in kernels.chunks:
            where = (chunk.num_lanes, chunk.first_lane, chunk.first_head)
            kernels.score_distances(query, distance, position_bias, chunk)
            grid = (kernels.num_row_tiles("attend"), chunk.num_lanes * chunk.num_heads)
            tensors = (query, key, value, content_bias, scores, *documents, context, lse)
            kernels.run("attend", grid, *tensors, shape, scale, threshold, *where)
        ctx.save_for_backward(query, key, value, distance, content_bias, position_bias, *documents, context, lse)
        ctx.settings = (oldest, scale, threshold)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, distance, content_bias, position_bias, *documents, context, lse = ctx.saved_tensors
        oldest, scale, threshold = ctx.settings
        d_context = gradients[0].contiguous()
        kernels = _Kernels(query, key, oldest=oldest)
        (B, _, N, H), K, shape, scores = query.shape, key.shape[1], kernels.shape, kernels.scores
        content_query, position_query, delta = torch.empty_like(query), torch.empty_like(query), torch.empty_like(lse)
        grid: tuple[int, ...] = (kernels.num_row_tiles("prepare_backward"), B, N)
        made = (content_query, position_query, delta)
        kept_part = 1 - threshold / KEEP_LEVELS
        tensors: tuple[Any, ...] = (query, content_bias, position_bias, context, d_context, *made)
        kernels.run("prepare_backward", grid, *tensors, shape, kept_part)

        d_query, d_key, d_value = torch.empty_like(query), key.new_empty(B, K, N, H), value.new_empty(B, K, N, H)
        row_tiles, d_scale = kernels.num_row_tiles("query_gradients"), scale / kept_part
        class_tiles = kernels.num_class_tiles(kernels.chunks[0].num_lanes, "distance_query_gradients")
        lane_chunks = len({chunk.first_lane for chunk in kernels.chunks})
        d_content_bias = lse.new_empty(B * row_tiles, N, H)
        d_position_bias = lse.new_zeros(lane_chunks, 8 * class_tiles, N, H)
        d_distance = lse.new_zeros(8, K, N, H)
        for chunk in kernels.chunks:
            where = (chunk.num_lanes, chunk.first_lane, chunk.first_head)
            matrices = chunk.num_lanes * chunk.num_heads
            kernels.score_distances(query, distance, position_bias, chunk)
            tensors = (content_query, key, value, scores, *documents, d_context, lse, delta, d_key, d_value)
            grid = (_ceil_div(K, kernels.tiles["key_value_gradients"].columns), matrices)
            kernels.run("key_value_gradients", grid, *tensors, shape, scale, threshold, d_scale, *where)
            grid = (row_tiles, matrices)
            kernels.run("query_gradients", grid, key, scores, d_query, d_content_bias, shape, d_scale, *where)
            part = d_position_bias[chunk.first_lane // kernels.chunks[0].num_lanes]
            grid = (kernels.num_class_tiles(chunk.num_lanes, "distance_query_gradients"), 8 * chunk.num_heads)
            kernels.run("distance_query_gradients", grid, distance, scores, d_query, part, shape, d_scale, *where)
            grid = (kernels.num_distance_tiles("distance_gradients"), 8 * chunk.num_heads)
            kernels.run("distance_gradients", grid, position_query, scores, d_distance, shape, d_scale, *where)
        sums = (d_distance.sum(0), d_content_bias.sum(0), d_position_bias.sum((0, 1)))
        return d_query, d_key, d_value, *(x.to(query.dtype) for x in sums), *[None] * 6


def _alike(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Both with heads together and the same strides: two views of one [B, K, 2, N, H] are as they are."""
    (B, K, _, H), strides = key.shape, key.stride()
    regular = strides[1:] == (strides[1], H, 1) and (B == 1 or strides[0] == K * strides[1])
    if regular and value.stride() == strides and strides[1] % HEAD_WIDTH_MULTIPLE == 0:
        return key, value
    return key.contiguous(), value.contiguous()
