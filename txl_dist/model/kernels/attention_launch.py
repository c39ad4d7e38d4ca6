"""Relative attention by the Triton kernels of `kernels/relative_attention.py`: when they can run, and how they are run.

`triton_relative_attention` is what `relative_attention` is, for half precision on a GPU. Between forward and backward
it keeps the inputs, the context and one number per query and head. What is of T x K numbers is a score buffer for some
lanes and heads at a time, a chunk. `launches` is the whole plan, for any sizes and without a device.

Kernels are launched without waiting for the device: the seed of dropout is a tensor, drawn from the device's default
generator, so that activation checkpointing, which restores that generator, makes the same mask again.

Shapes: B lanes, T queries, K keys, N heads, H head width.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from txl_dist.config.schema import ModelSection, TrainSection
from txl_dist.model.memory import AttentionMask
from txl_dist.model.relative_attention import Terms

MAX_HEAD_WIDTH = 128
HEAD_WIDTH_MULTIPLE = 16
"""Head widths between are padded by zeros, so that every row of a head begins at a multiple of 16 bytes."""
SCORE_BUFFER_BYTES = 192 * 2**20
"""Of a chunk. 30 MB stay in the L2 cache of an H100 or H200 (50 and 60 MB), but make launches many and too small to
fill a device; into this a layer of each recipe fits. Which is better is measured by
`python -m tools.benchmarks.attention --buffers`."""
MAX_MATRICES = 65_535 // 8
"""Score matrices in a chunk: an axis of a CUDA grid has at most 65,535 programs, 8 for a matrix."""
NUM_MULTIPROCESSORS = 132
"""Of an H100 or H200: what a wave of programs is counted for."""
FORWARD = ("distance_scores", "attend")
BACKWARD = (
    *("distance_scores", "key_value_gradients", "query_gradients"),
    *("distance_query_gradients", "distance_gradients"),
)
"""The kernels in order, for each chunk."""
SUM = "sum_parts"
"""The one behind all chunks of the backward."""
WIDTH_ROWS = 32
"""Of heads, that a program of `set_width` copies."""
KEEP_LEVELS = 65_536
"""Dropout's rate is a multiple of one part in so many."""


class Tile(NamedTuple):
    """How a kernel is compiled: one program's part of the scores, its warps, and how many loads it has under way."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    resident: int
    """Programs that a multiprocessor of sm_90 holds at a time, by their registers, shared memory and warps."""
    max_registers: int | None = None
    """For each thread: 168 let three programs of four warps share a multiprocessor."""


class Sizes(NamedTuple):
    """What decides how attention is cut into launches."""

    B: int
    T: int
    K: int
    N: int
    H: int
    """Of the padded head."""
    has_dropout: bool = False
    value_bytes: int = 2

    @classmethod
    def of(cls, model: ModelSection, train: TrainSection, *, lanes: int) -> Self:
        """Of a micro-batch of so many lanes, the memory full, in half precision."""
        head_width = _ceil_div(model.head_width, HEAD_WIDTH_MULTIPLE) * HEAD_WIDTH_MULTIPLE
        num_keys, has_dropout = train.memory_len + train.segment_len, model.attention_dropout > 0
        return cls(lanes, train.segment_len, num_keys, model.num_heads, head_width, has_dropout)

    @property
    def row_len(self) -> int:
        """Of the score buffer, in numbers: K rounded up to 16."""
        return _ceil_div(self.K, 16) * 16

    @property
    def matrix_len(self) -> int:
        """Scores of one lane and head, in numbers."""
        return self.T * self.row_len


class Shape(NamedTuple):
    """What the kernels know of the sizes; a value that divides by 16, or is 1 or None, is compiled in."""

    T: int
    K: int
    S: int
    """K rounded up to 16: a row of the score buffer."""
    num_heads: int
    query_stride: int
    """From one query to the next, in numbers."""
    key_stride: int
    """From one key or value to the next."""
    past_stride: int
    """The same in the memory, where it lies apart."""
    oldest: int | None
    """See `AttentionMask`."""


class KernelChunk(NamedTuple):
    """The lanes and heads whose scores are in the buffer together."""

    first_lane: int
    num_lanes: int
    first_head: int
    num_heads: int


class Launch(NamedTuple):
    """One launch of a kernel of `kernels/relative_attention.py`."""

    kernel: str
    tile: Tile
    grid: tuple[int, ...]
    """Of programs."""
    chunk: KernelChunk

    @property
    def waves(self) -> float:
        """How many times over its programs fill an H100 or H200."""
        return math.prod(self.grid) / (NUM_MULTIPROCESSORS * self.tile.resident)


def unsupported_shape_reason(dtype: torch.dtype, *, head_width: int, has_position_bias: bool) -> str | None:
    """Why the kernels cannot compute attention of this kind on any device; None if they can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bf16 or fp16 and the model in {str(dtype).removeprefix('torch.')}"
    if head_width > MAX_HEAD_WIDTH:
        return f"the head width {head_width} is over {MAX_HEAD_WIDTH}"
    if not has_position_bias:
        return "it knows sinusoids of the distance, not encodings that are learned"
    return None


def unsupported_reason(query_BTNH: Tensor, *, has_position_bias: bool) -> str | None:
    """Why the kernels cannot compute attention of these queries; None if they can."""
    shape_reason = unsupported_shape_reason(
        query_BTNH.dtype, head_width=query_BTNH.shape[-1], has_position_bias=has_position_bias
    )
    return unsupported_device_reason(query_BTNH) or shape_reason


def unsupported_device_reason(on_device: Tensor) -> str | None:
    """Why Triton's kernels cannot run where this tensor is; None if they can."""
    if not on_device.is_cuda:
        return f"it runs on a CUDA device and the model is on {on_device.device}"
    if not _has_triton():
        return "triton is not installed"
    if lacking := missing_compiler_reason():
        return lacking
    if torch.cuda.get_device_capability(on_device.device) < (8, 0):
        return f"{torch.cuda.get_device_name(on_device.device)} is older than Ampere (compute capability 8.0)"
    return None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def missing_compiler_reason() -> str:
    """What is missing to compile what starts a kernel, as Triton does when the first one runs; empty if nothing."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        return "Triton needs a C compiler (gcc or clang, or the one that CC names), and there is none"
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        return "Triton needs Python.h, the headers of Python, to compile, and it is missing"
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("#include <Python.h>\n")
            command = [compiler, str(source), "-shared", "-fPIC", "-I", include, "-o", str(source.with_suffix(".so"))]
            tried = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"Triton needs a C compiler, and {compiler} does not run ({error})"
    if tried.returncode == 0:
        return ""
    why = next(filter(None, tried.stderr.splitlines()), f"exit code {tried.returncode}")
    return f"Triton needs a C compiler, and {compiler} cannot compile with Python.h ({why})"


def triton_relative_attention(terms: Terms, *, visible: AttentionMask, dropout: float = 0.0) -> Tensor:
    """Attend, like `relative_attention`. `unsupported_reason` says whether it can. Returns context_BTNH."""
    query, key, value, *others = terms[:6]  # which are all there, where there is no obstacle
    return _attend(query.unsqueeze(2), torch.stack([key, value], 2), None, *others, visible=visible, dropout=dropout)


def triton_attention_of_products(
    segment_BT3NH: Tensor,
    past_BM2NH: Tensor,
    *,
    distance_KNH: Tensor,
    content_bias_NH: Tensor,
    position_bias_NH: Tensor,
    visible: AttentionMask,
    dropout: float = 0.0,
) -> Tensor:
    """The same of queries, keys and values of the segment, and keys and values of the memory, as products made them:
    nothing is joined, and their gradients are as whole as they are."""
    past = past_BM2NH if past_BM2NH.shape[1] else None
    others = (distance_KNH, content_bias_NH, position_bias_NH)
    return _attend(segment_BT3NH, None, past, *others, visible=visible, dropout=dropout)


def _attend(
    segment_BTGNH: Tensor,
    key_value_BK2NH: Tensor | None,
    past_BM2NH: Tensor | None,
    *others: Tensor | None,
    visible: AttentionMask,
    dropout: float,
) -> Tensor:
    """Queries are the first of G; without `key_value_BK2NH`, keys and values of the segment the others."""
    seed = torch.randint(2**63 - 1, (1,), device=segment_BTGNH.device) if dropout > 0 else None
    context: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        segment_BTGNH,
        key_value_BK2NH,
        past_BM2NH,
        *others,
        visible.query_document_BT.contiguous(),
        visible.key_document_BK.contiguous(),
        seed,
        visible.oldest,
        round(dropout * KEEP_LEVELS),
    )
    return context


def tiles(head_width: int, *, has_dropout: bool) -> dict[str, tuple[Tile, ...]]:
    """By kernel, for heads of this width, the largest first: chosen so that no registers spill on sm_90."""
    narrow, whole = head_width <= 64, head_width in (32, 64)
    small = {
        "distance_scores": Tile(64, 128, 4, 1, resident=3 if narrow else 2),
        "attend": Tile(64, 64, 4, 2, resident=3 if whole else 2, max_registers=168 if whole else None),
        "key_value_gradients": Tile(32, 64, 4, 3, resident=2) if narrow else Tile(32, 64, 8, 2, resident=1),
        "query_gradients": Tile(64, 64, 4, 4 if narrow else 3, resident=3),
        "distance_query_gradients": Tile(64, 64, 4, 4 if narrow else 3, resident=3),
        "distance_gradients": Tile(64, 64, 4, 3, resident=4 if narrow else 2),
        SUM: Tile(32, 64, 4, 1, resident=16),
    }
    large: dict[str, Tile] = {}
    if head_width == 64:
        large = {
            "key_value_gradients": Tile(32, 128, 8, 3, resident=1),
            "query_gradients": Tile(128, 64, 4, 3, resident=3),
            "distance_query_gradients": Tile(128, 64, 4, 3, resident=3),
            "distance_gradients": Tile(64, 128, 8, 3, resident=2),
        }
        if not has_dropout:
            large["attend"] = Tile(128, 64, 4, 2, resident=2)
    elif head_width == 128:
        large = {
            "attend": Tile(128, 64, 8, 2, resident=1),
            "query_gradients": Tile(128, 64, 8, 3, resident=2),
            "distance_query_gradients": Tile(128, 64, 8, 3, resident=2),
            "distance_gradients": Tile(64, 128, 8, 3, resident=1),
        }
    return {kernel: (large[kernel], tile) if kernel in large else (tile,) for kernel, tile in small.items()}


def launches(sizes: Sizes, *, backward: bool) -> list[Launch]:
    """What is launched for one layer, in order: the whole plan, which knows no device."""
    all_chunks, kernels = list(chunks(sizes)), BACKWARD if backward else FORWARD
    chosen = {kernel: _tile(kernel, sizes, all_chunks[0]) for kernel in kernels}
    planned = [
        Launch(kernel, chosen[kernel], _grid(kernel, chosen[kernel], sizes, chunk, all_chunks[0]), chunk)
        for chunk in all_chunks
        for kernel in kernels
    ]
    if backward:
        (tile,), bias_len = tiles(sizes.H, has_dropout=sizes.has_dropout)[SUM], sizes.N * sizes.H
        grid = (2 * _ceil_div(bias_len, tile.columns) + _ceil_div(sizes.K * bias_len, tile.columns),)
        planned.append(Launch(SUM, tile, grid, all_chunks[-1]))
    return planned


def _tile(kernel: str, sizes: Sizes, largest: KernelChunk) -> Tile:
    """The largest whose programs fill a device, and hardly compute more that is not there than the smallest's."""
    *_, smallest = options = tiles(sizes.H, has_dropout=sizes.has_dropout)[kernel]

    def covered(tile: Tile) -> int:
        across = tile.columns if kernel in ("key_value_gradients", "distance_gradients") else tile.rows
        return across * _grid(kernel, tile, sizes, largest, largest)[0]

    for tile in options:
        fills = Launch(kernel, tile, _grid(kernel, tile, sizes, largest, largest), largest).waves >= 1
        if fills and covered(tile) <= covered(smallest) * 9 / 8:
            return tile
    return smallest


def _grid(kernel: str, tile: Tile, sizes: Sizes, chunk: KernelChunk, largest: KernelChunk) -> tuple[int, ...]:
    """Programs along each axis, as the kernel's docstring has them."""
    matrices, residues, classes = chunk.num_lanes * chunk.num_heads, 8 * chunk.num_heads, _ceil_div(sizes.T, 8)
    class_tiles = _ceil_div(classes * chunk.num_lanes, tile.rows)
    distance_tiles = _ceil_div(8 * classes + sizes.K - sizes.T + 8, tile.columns)  # n from -8 ceil(T / 8) to M + 7
    if kernel == "distance_scores":
        return distance_tiles, class_tiles, residues
    if kernel == "distance_query_gradients":
        return class_tiles, residues
    if kernel == "distance_gradients":
        # Rows are split into the same parts in all chunks: where one would be less than a wave, so many that it is one.
        wave, most = NUM_MULTIPROCESSORS * tile.resident, _ceil_div(classes * largest.num_lanes, tile.rows)
        return distance_tiles, min(_ceil_div(wave, distance_tiles * 8 * largest.num_heads), most), residues
    return _ceil_div(sizes.K, tile.columns) if kernel == "key_value_gradients" else _ceil_div(
        sizes.T, tile.rows
    ), matrices


def chunks(sizes: Sizes) -> Iterator[KernelChunk]:
    """Every (lane, head) once. All lanes of some heads where they fit: their gradient of R is then made at once."""
    num_lanes, num_heads = sizes.B, sizes.N
    fit = min(max(1, SCORE_BUFFER_BYTES // (sizes.matrix_len * sizes.value_bytes)), MAX_MATRICES)
    lanes = _even_part(num_lanes, fit)
    heads = _even_part(num_heads, max(1, fit // lanes))
    for first_head in range(0, num_heads, heads):
        for first_lane in range(0, num_lanes, lanes):
            yield KernelChunk(
                first_lane, min(lanes, num_lanes - first_lane), first_head, min(heads, num_heads - first_head)
            )


def _even_part(whole: int, most: int) -> int:
    return _ceil_div(whole, _ceil_div(whole, most))


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


class _Kernels:
    """The kernels for one set of inputs: what is common to their launches."""

    def __init__(
        self, inputs: _Products, *, num_keys: int, oldest: int | None, has_dropout: bool, backward: bool
    ) -> None:
        from txl_dist.model.kernels import relative_attention

        self.source = relative_attention
        query, key = inputs.query, inputs.key
        B, T, N, self.head_width = query.shape
        sizes = Sizes(B, T, num_keys, N, self.head_width, has_dropout, query.element_size())
        self.launches = launches(sizes, backward=backward)
        strides = query.stride(1), key.stride(1), 2 * N * self.head_width
        self.shape = Shape(T, num_keys, sizes.row_len, N, *strides, oldest)
        largest = self.launches[0].chunk  # the first is
        self.scores = query.new_empty(largest.num_lanes * largest.num_heads * sizes.matrix_len)

    def largest_grid(self, name: str) -> tuple[int, ...]:
        """Of the first chunk: no other has more programs along any axis."""
        return next(launch.grid for launch in self.launches if launch.kernel == name)

    def run(self, launch: Launch, *arguments: Any) -> None:
        """Launch one kernel with these arguments and the chunk's."""
        tile, chunk = launch.tile, launch.chunk
        kernel: Any = getattr(self.source, launch.kernel)
        where = () if launch.kernel == SUM else (chunk.num_lanes, chunk.first_lane, chunk.first_head)
        kernel[launch.grid](
            *arguments,
            *where,
            **self._constants(launch),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            maxnreg=tile.max_registers,
        )

    def _constants(self, launch: Launch) -> dict[str, int]:
        """What is compiled in, besides `Shape`."""
        tile, block_h = launch.tile, 1 << (self.head_width - 1).bit_length()
        constants = {"ROWS": tile.rows, "COLUMNS": tile.columns}
        if launch.kernel == SUM:
            return constants
        constants |= {"H": self.head_width, "BLOCK_H": block_h}
        if launch.kernel == "attend":
            constants["STAGES"] = tile.num_stages
        return constants | {"CAST": self.source.IS_INTERPRETED}


class _Products(NamedTuple):
    """Where queries and keys begin in what products made: each tensor [B, S, G, N, H], contiguous."""

    query: Tensor
    key: Tensor
    past: Tensor | None

    @classmethod
    def of(cls, segment: Tensor, key_value: Tensor | None, past: Tensor | None) -> Self:
        """As `_attend` is given them, or their gradients."""
        key = segment[:, :, 1] if key_value is None else key_value[:, :, 0]
        return cls(segment[:, :, 0], key, None if past is None else past[:, :, 0])


class _Attention(torch.autograd.Function):
    """Inputs and gradients as in `_attend`."""

    @staticmethod
    def forward(
        ctx: Any,
        segment: Tensor,
        key_value: Tensor | None,
        past: Tensor | None,
        distance: Tensor,
        content_bias: Tensor,
        position_bias: Tensor,
        query_document: Tensor,
        key_document: Tensor,
        seed: Tensor | None,
        oldest: int | None,
        threshold: int,
    ) -> Tensor:
        head_width = segment.shape[-1]
        scale, padding = head_width**-0.5, -head_width % HEAD_WIDTH_MULTIPLE
        given: list[Any] = [segment, key_value, past, distance, content_bias, position_bias]
        if padding:
            given = _with_width(given, head_width + padding)
        given = [x if x is None else x.contiguous() for x in given]
        segment, key_value, past, distance, content_bias, position_bias = given
        inputs, num_keys = _Products.of(segment, key_value, past), key_document.shape[1]
        kernels = _Kernels(inputs, num_keys=num_keys, oldest=oldest, has_dropout=threshold > 0, backward=False)
        query, shape, scores = inputs.query, kernels.shape, kernels.scores
        B, T, N, _ = query.shape
        context, lse = query.new_empty(query.shape), query.new_empty(B, N, T, dtype=torch.float32)
        documents = (query_document, key_document, seed)
        arguments = {
            "distance_scores": (query, distance, position_bias, scores, *[None] * 6, shape, 1.0),
            "attend": (*inputs, content_bias, scores, *documents, context, lse, shape, scale, threshold),
        }
        for launch in kernels.launches:
            kernels.run(launch, *arguments[launch.kernel])
        ctx.save_for_backward(*given, *documents, context, lse)
        ctx.settings = (oldest, scale, threshold, head_width)
        return with_width([context], head_width)[0] if padding else context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        segment, key_value, past, distance, content_bias, position_bias, *documents, context, lse = ctx.saved_tensors
        oldest, scale, threshold, head_width = ctx.settings
        inputs, K = _Products.of(segment, key_value, past), documents[1].shape[1]
        query = inputs.query
        d_context = gradients[0].contiguous()
        if query.shape[-1] != head_width:
            (d_context,) = with_width([d_context], query.shape[-1])
        kernels = _Kernels(inputs, num_keys=K, oldest=oldest, has_dropout=threshold > 0, backward=True)
        (B, _, N, H), shape, scores = query.shape, kernels.shape, kernels.scores
        content_query, position_query, delta = (torch.empty_like(x) for x in (context, context, lse))
        d_segment = torch.empty_like(segment)
        d_key_value, d_past = (None if x is None else torch.empty_like(x) for x in (key_value, past))
        made = _Products.of(d_segment, d_key_value, d_past)
        row_tiles, _ = kernels.largest_grid("query_gradients")
        class_tiles, _ = kernels.largest_grid("distance_query_gradients")
        _, parts, _ = kernels.largest_grid("distance_gradients")
        lane_starts = sorted({launch.chunk.first_lane for launch in kernels.launches})
        content_parts, distance_parts = lse.new_empty(B * row_tiles, N, H), lse.new_empty(8 * parts, K, N, H)
        # The last of several chunks of lanes may have fewer tiles than the others.
        filled = lse.new_empty if len(lane_starts) == 1 else lse.new_zeros
        position_parts = filled(len(lane_starts), 8 * class_tiles, N, H)
        sums = [query.new_empty(shape) for shape in [(K, N, H), (N, H), (N, H)]]
        num_parts = (8 * parts, B * row_tiles, len(lane_starts) * 8 * class_tiles)
        kept_part = 1 - threshold / KEEP_LEVELS
        d_scale = scale / kept_part
        prepared = (content_bias, context, d_context, content_query, position_query, delta)
        loaded = (content_query, *inputs[1:], scores, *documents, d_context, lse, delta)
        arguments: dict[str, tuple[Any, ...]] = {
            "distance_scores": (query, distance, position_bias, scores, *prepared, shape, kept_part),
            "key_value_gradients": (*loaded, *made[1:], shape, scale, threshold, d_scale),
            "query_gradients": (*inputs[1:], scores, made.query, content_parts, shape, d_scale),
            "distance_gradients": (position_query, scores, distance_parts, shape, d_scale),
            "sum_parts": (distance_parts, content_parts, position_parts, *sums, *num_parts, K * N * H, N * H),
        }
        for launch in kernels.launches:
            part = position_parts[lane_starts.index(launch.chunk.first_lane)]
            arguments["distance_query_gradients"] = (distance, scores, made.query, part, shape, d_scale)
            kernels.run(launch, *arguments[launch.kernel])
        found = [d_segment, d_key_value, d_past, *sums]
        return *(found if head_width == H else _with_width(found, head_width)), *[None] * 5


def _with_width(tensors: Sequence[Tensor | None], width: int) -> list[Tensor | None]:
    """`with_width` of those that are there."""
    made = iter(with_width([x for x in tensors if x is not None], width))
    return [x if x is None else next(made) for x in tensors]


def with_width(tensors: Sequence[Tensor], width: int) -> list[Tensor]:
    """Of each [..., N, H] a contiguous [..., N, width]: zeros behind each head, or fewer numbers. One launch."""
    from txl_dist.model.kernels.head_width import set_width

    *_, num_heads, head_width = tensors[0].shape
    flat = [x.flatten(0, -3) if x.dim() > 2 else x[None] for x in tensors]
    flat = [x if x.stride()[1:] == (head_width, 1) else x.contiguous() for x in flat]
    made = [x.new_empty(*x.shape[:-1], width) for x in tensors]
    num_rows = [len(x) * num_heads for x in flat]
    kernel: Any = set_width[(sum(_ceil_div(rows, WIDTH_ROWS) for rows in num_rows),)]
    kernel(
        *(tuple(x) for x in (flat, made, num_rows, [x.stride(0) for x in flat])),
        num_heads,
        H=head_width,
        H_TO=width,
        ROWS=WIDTH_ROWS,
        BLOCK_H=1 << (max(head_width, width) - 1).bit_length(),
    )
    return made
