"""Relative attention by the Triton kernels: when they can run, and how they are launched.

`triton_relative_attention` computes the same as `relative_attention`, in half precision on a GPU. Between forward and
backward pass the function keeps the inputs, the context, and one number per query and head. The kernels are in
`kernels/relative_attention.py`. Only the score buffer has T x K numbers per lane and head. It holds the scores of a
chunk: some lanes and heads at a time. `launches` plans all launches for given sizes, and needs no device.

With `keeps_scores` the function also keeps the distance scores of the forward pass, T x K numbers per lane and head.
The backward pass then computes one product less and passes over the scores one time less. The results have the same
bits.

No launch waits for the device. The seed of dropout is a tensor, drawn from the device's default generator. Activation
checkpointing restores that generator, so recomputation draws the same mask.

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
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from txl_dist.config.schema import ModelSection, TrainSection
from txl_dist.errors import first_and_last_line
from txl_dist.model.memory import AttentionMask
from txl_dist.model.relative_attention import Terms

MAX_HEAD_WIDTH = 128
HEAD_WIDTH_MULTIPLE = 16
"""Multiple to which the kernels pad heads, by zeros. With such a width every row of a head begins at a multiple of 16
bytes."""
SCORE_BUFFER_BYTES = 192 * 2**20
"""Largest score buffer of a chunk, in bytes. The scores of one layer fit in it for every recipe. A buffer of 30 MB
would stay in the L2 cache of an H100 or H200 (50 and 60 MB). But then there would be many launches, and each would be
too small to fill a device. The section `sweep` of tools/benchmarks/gpu.py measures sizes below and above the cache."""
MAX_MATRICES = 65_535 // 8
"""Largest number of score matrices in a chunk. An axis of a CUDA grid has at most 65,535 programs, and a matrix needs 8
programs."""
NUM_MULTIPROCESSORS = 132
"""Number of multiprocessors of an H100 or H200. A wave is the number of programs that they run at a time."""
FORWARD = ("distance_scores", "attend")
"""Names of the kernels of the forward pass, in order. They are launched for each chunk."""
BACKWARD = (
    "distance_scores",
    "key_value_gradients",
    "query_gradients",
    "distance_query_gradients",
    "distance_gradients",
)
"""Names of the kernels of the backward pass, in order. They are launched for each chunk."""
SUM = "sum_parts"
"""Name of the kernel that runs once after all chunks of the backward pass."""
WIDTH_ROWS = 32
"""Number of rows that one program of the kernel `set_width` copies. A row is one head at one position."""
KEEP_LEVELS = 65_536
"""Number of levels of the dropout rate, which is rounded to a multiple of 1 / KEEP_LEVELS."""


class Tile(NamedTuple):
    """Sizes with which a kernel is compiled: the part of the scores that one program computes, its warps and its stages
    of loads."""

    rows: int
    """Rows of scores that a program computes at a time."""
    columns: int
    """Columns of scores that a program computes at a time."""
    num_warps: int
    """Number of warps of a program."""
    num_stages: int
    """Number of stages of Triton's software pipeline, in which a program loads data before it needs them."""
    resident: int
    """Number of programs that a multiprocessor of sm_90 holds at a time. Registers, shared memory and warps limit it.
    """
    max_registers: int | None = None
    """Largest number of registers per thread, or None for no limit. With 168 registers, a multiprocessor holds three
    programs of four warps."""


class Sizes(NamedTuple):
    """Sizes of one layer's attention, from which `launches` plans the launches of kernels. B is the number of lanes
    (batch rows), T of queries, K of keys and N of heads."""

    B: int
    T: int
    K: int
    N: int
    H: int
    """Head width in numbers, padding included."""
    has_dropout: bool = False
    value_bytes: int = 2
    """Bytes of one number, which are 2 in half precision."""

    @classmethod
    def of(cls, model: ModelSection, train: TrainSection, *, lanes: int) -> Self:
        """Return the sizes for a micro-batch in half precision, with a full memory. `lanes` is the number of rows of
        the micro-batch."""
        head_width = _ceil_div(model.head_width, HEAD_WIDTH_MULTIPLE) * HEAD_WIDTH_MULTIPLE
        return cls(
            B=lanes,
            T=train.segment_len,
            K=train.memory_len + train.segment_len,
            N=model.num_heads,
            H=head_width,
            has_dropout=model.attention_dropout > 0,
        )

    @property
    def row_len(self) -> int:
        """Length of a row of the score buffer, in numbers: K rounded up to a multiple of 16."""
        return _ceil_div(self.K, 16) * 16

    @property
    def matrix_len(self) -> int:
        """Length of the score matrix of one lane and head, in numbers."""
        return self.T * self.row_len


class Shape(NamedTuple):
    """Sizes and strides that are passed to the kernels as one argument.

    Triton compiles a kernel again for None, for the value 1, and for values that are multiples of 16.
    """

    T: int
    K: int
    S: int
    """Length of a row of the score buffer: K rounded up to a multiple of 16."""
    num_heads: int
    query_stride: int
    """Distance from one query to the next, in numbers."""
    key_stride: int
    """Distance from one key or value to the next, in numbers."""
    past_stride: int
    """Distance from one key or value of the memory to the next, in numbers, if the memory is a separate tensor."""
    oldest: int | None
    """First key that query 0 sees, or None if queries see all earlier keys. It is `AttentionMask.oldest`."""


class KernelChunk(NamedTuple):
    """Lanes and heads whose scores are in the buffer at the same time."""

    first_lane: int
    num_lanes: int
    first_head: int
    num_heads: int


class Launch(NamedTuple):
    """Planned launch of one kernel of `kernels/relative_attention.py`, for one chunk."""

    kernel: str
    tile: Tile
    grid: tuple[int, ...]
    """Number of programs along each axis of the grid."""
    chunk: KernelChunk

    @property
    def waves(self) -> float:
        """Number of programs divided by the number that an H100 or H200 runs at a time."""
        num_resident = NUM_MULTIPROCESSORS * self.tile.resident
        return math.prod(self.grid) / num_resident


def unsupported_shape_reason(
    dtype: torch.dtype, *, head_width: int, has_position_bias: bool, in_any_order: bool = False
) -> str | None:
    """Return why the kernels cannot compute attention with this type, width, bias and order on any device. Returns None
    if they can.

    With `in_any_order` queries can see later keys (XLNet).
    """
    if in_any_order:
        return "the kernels compute causal attention only, and the model predicts in any order (model.any_order)"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bf16 or fp16, but the model computes in {str(dtype).removeprefix('torch.')}"
    if head_width > MAX_HEAD_WIDTH:
        return f"the head width {head_width} is above {MAX_HEAD_WIDTH}"
    if not has_position_bias:
        return "it supports only sinusoids of the distance, not learned encodings"
    return None


def unsupported_reason(query_BTNH: Tensor, *, has_position_bias: bool, in_any_order: bool = False) -> str | None:
    """Return why the kernels cannot compute attention of these queries on their device, or None if they can.

    With `in_any_order` queries can see later keys (XLNet).
    """
    shape_reason = unsupported_shape_reason(
        query_BTNH.dtype,
        head_width=query_BTNH.shape[-1],
        has_position_bias=has_position_bias,
        in_any_order=in_any_order,
    )
    if in_any_order:
        return shape_reason
    return unsupported_device_reason(query_BTNH) or shape_reason


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton kernels can run on this device."""
    return device.type == "cuda" and unsupported_device_reason(torch.empty(0, device=device)) is None


def unsupported_device_reason(on_device: Tensor) -> str | None:
    """Return why Triton kernels cannot run on this tensor's device, or None if they can."""
    if not on_device.is_cuda:
        return f"it needs a CUDA device, but the model is on {on_device.device}"
    if not _has_triton():
        return "triton is not installed"
    if lacking := missing_compiler_reason():
        return lacking
    if torch.cuda.get_device_capability(on_device.device) < (8, 0):
        return f"{torch.cuda.get_device_name(on_device.device)} is older than Ampere (compute capability 8.0)"
    return failed_kernel_reason(on_device.device) or None


@functools.cache
def failed_kernel_reason(device: torch.device) -> str:
    """Compile and run one small kernel on a GPU. Return why it failed, or an empty string if its result is right.

    It fails for example on a GPU that is newer than Triton's assembler. The host waits for the device, once per
    process.
    """
    try:
        is_right = run_small_kernel(device).tolist() == [[[1.0] * 8 + [0.0] * 8]]
    except Exception as error:  # noqa: BLE001  Triton, its compilers and the driver raise errors of many types
        words = first_and_last_line(str(error))
        return f"a small Triton kernel failed on {device} ({type(error).__name__}: {words})"
    return "" if is_right else f"a small Triton kernel computed a wrong result on {device}"


def run_small_kernel(device: torch.device) -> Tensor:
    """Pad a head of eight ones by eight zeros with the kernel `set_width`. Returns [1, 1, 16] in bf16."""
    (padded,) = with_width([torch.ones(1, 1, 8, dtype=torch.bfloat16, device=device)], 16)
    return padded


def launching_on(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which the tensor's GPU is the current one. Triton launches kernels on the current GPU.

    A model on `cuda:1` would otherwise pass addresses of one GPU to a kernel on another.
    """
    if not tensor.is_cuda:
        return nullcontext()  # the interpreter
    context: AbstractContextManager[None] = torch.cuda.device(tensor.device)
    return context


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def missing_compiler_reason() -> str:
    """Return what is missing to compile a kernel's launcher, or an empty string if nothing is missing.

    Triton compiles a launcher in C, against Python's headers, when the first kernel runs. This function compiles a
    small C file in the same way.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        return "Triton needs a C compiler (gcc or clang, or the compiler in the variable CC), but found none"
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        return "Triton needs Python.h (the headers of Python) to compile, but this file is missing"
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("#include <Python.h>\n")
            library = source.with_suffix(".so")
            command = [compiler, str(source), "-shared", "-fPIC", "-I", include, "-o", str(library)]
            tried = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"Triton needs a C compiler, but {compiler} does not run ({error})"
    if tried.returncode == 0:
        return ""
    why = next(filter(None, tried.stderr.splitlines()), f"exit code {tried.returncode}")
    return f"Triton needs a C compiler, but {compiler} cannot compile with Python.h ({why})"


def triton_relative_attention(
    terms: Terms, *, visible: AttentionMask, dropout: float = 0.0, keeps_scores: bool = False
) -> Tensor:
    """Attend by content and distance with the Triton kernels. Returns context_BTNH, like `relative_attention`.

    Call this function only if `unsupported_reason` returns None. The kernels use all fields of `terms` except
    `distance_bias_KN`. With `keeps_scores` the distance scores are kept for the backward pass.
    """
    query, key, value, *others = terms[:6]
    key_value = torch.stack([key, value], 2)
    return _attend(
        query.unsqueeze(2),
        key_value,
        None,
        *others,
        visible=visible,
        scale=terms.scale,
        dropout=dropout,
        keeps_scores=keeps_scores,
    )


def triton_attention_of_products(
    segment_BT3NH: Tensor,
    past_BM2NH: Tensor,
    *,
    distance_KNH: Tensor,
    content_bias_NH: Tensor,
    position_bias_NH: Tensor,
    visible: AttentionMask,
    head_width: int | None = None,
    dropout: float = 0.0,
    keeps_scores: bool = False,
) -> Tensor:
    """Attend with the Triton kernels to the results of fused projections. Returns context_BTNH.

    `segment_BT3NH` holds queries, keys and values of the segment. `past_BM2NH` holds keys and values of the memory. The
    kernels read these tensors without copies, and each tensor gets one gradient. `head_width` is the width of a head
    without padding. None means that heads are not padded. With `keeps_scores` the distance scores are kept for the
    backward pass.
    """
    scale = (head_width or segment_BT3NH.shape[-1]) ** -0.5
    past = past_BM2NH if past_BM2NH.shape[1] else None
    others = (distance_KNH, content_bias_NH, position_bias_NH)
    return _attend(
        segment_BT3NH,
        None,
        past,
        *others,
        visible=visible,
        scale=scale,
        dropout=dropout,
        keeps_scores=keeps_scores,
    )


def _attend(
    segment_BTGNH: Tensor,
    key_value_BK2NH: Tensor | None,
    past_BM2NH: Tensor | None,
    *others: Tensor | None,
    visible: AttentionMask,
    scale: float,
    dropout: float,
    keeps_scores: bool,
) -> Tensor:
    """Attend with the Triton kernels. Returns context_BTNH.

    `segment_BTGNH` holds the segment's queries first along axis G. If `key_value_BK2NH` is None, the segment's keys and
    values follow them, and `past_BM2NH` holds the keys and values of the memory. Otherwise `key_value_BK2NH` holds the
    keys and values of all K positions.
    """
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
        scale,
        threshold_of(dropout),
        keeps_scores,
    )
    return context


def threshold_of(rate: float) -> int:
    """Return the dropout rate as a number of levels of 1 / KEEP_LEVELS, rounded.

    The result is below KEEP_LEVELS, so that some values are always kept.
    """
    threshold = round(rate * KEEP_LEVELS)
    return min(threshold, KEEP_LEVELS - 1)


def tiles(head_width: int, *, has_dropout: bool) -> dict[str, tuple[Tile, ...]]:
    """Return the tiles that each kernel may use for heads of this width, the largest first.

    The tiles are small enough that no registers spill on sm_90.
    """
    if head_width <= 64:
        small = {
            "distance_scores": Tile(64, 128, 4, 1, resident=3),
            "attend": Tile(64, 64, 4, 2, resident=2),
            "key_value_gradients": Tile(32, 64, 4, 3, resident=2),
            "query_gradients": Tile(64, 64, 4, 4, resident=3),
            "distance_query_gradients": Tile(64, 64, 4, 4, resident=3),
            "distance_gradients": Tile(64, 64, 4, 3, resident=4),
            SUM: Tile(32, 64, 4, 1, resident=16),
        }
    else:
        small = {
            "distance_scores": Tile(64, 128, 4, 1, resident=2),
            "attend": Tile(64, 64, 4, 2, resident=2),
            "key_value_gradients": Tile(32, 64, 8, 2, resident=1),
            "query_gradients": Tile(64, 64, 4, 3, resident=3),
            "distance_query_gradients": Tile(64, 64, 4, 3, resident=3),
            "distance_gradients": Tile(64, 64, 4, 3, resident=2),
            SUM: Tile(32, 64, 4, 1, resident=16),
        }
    if head_width in (32, 64):
        small["attend"] = Tile(64, 64, 4, 2, resident=3, max_registers=168)
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
    options: dict[str, tuple[Tile, ...]] = {}
    for kernel, tile in small.items():
        options[kernel] = (large[kernel], tile) if kernel in large else (tile,)
    return options


def launches(sizes: Sizes, *, backward: bool, has_scores: bool = False) -> list[Launch]:
    """Plan the launches of one layer's forward or backward pass. Returns the launches in order. The function needs no
    device.

    With `has_scores` the backward pass has the distance scores of the forward pass. The kernel `distance_scores` then
    only prepares the queries.
    """
    all_chunks = list(chunks(sizes))
    largest = all_chunks[0]
    kernels = BACKWARD if backward else FORWARD
    chosen = {kernel: _tile(kernel, sizes, largest) for kernel in kernels}
    planned: list[Launch] = []
    for chunk in all_chunks:
        for kernel, tile in chosen.items():
            grid = _grid(kernel, tile, sizes, chunk, largest)
            if has_scores and kernel == "distance_scores":
                grid = (1, *grid[1:])
            planned.append(Launch(kernel, tile, grid, chunk))
    if backward:
        (tile,) = tiles(sizes.H, has_dropout=sizes.has_dropout)[SUM]
        bias_len = sizes.N * sizes.H
        bias_tiles = _ceil_div(bias_len, tile.columns)
        distance_tiles = _ceil_div(sizes.K * bias_len, tile.columns)
        planned.append(Launch(SUM, tile, (2 * bias_tiles + distance_tiles,), all_chunks[-1]))
    return planned


def _tile(kernel: str, sizes: Sizes, largest: KernelChunk) -> Tile:
    """Choose the largest tile whose programs fill a device and waste little work.

    The programs of the chosen tile compute at most 1/8 more scores than the programs of the smallest tile. The
    additional scores are beyond the ends of a score matrix.
    """
    options = tiles(sizes.H, has_dropout=sizes.has_dropout)[kernel]
    smallest = options[-1]

    def covered(tile: Tile) -> int:
        across = tile.columns if kernel in ("key_value_gradients", "distance_gradients") else tile.rows
        num_tiles, *_ = _grid(kernel, tile, sizes, largest, largest)
        return across * num_tiles

    for tile in options:
        grid = _grid(kernel, tile, sizes, largest, largest)
        fills = Launch(kernel, tile, grid, largest).waves >= 1
        if fills and covered(tile) <= covered(smallest) * 9 / 8:
            return tile
    return smallest


def _grid(kernel: str, tile: Tile, sizes: Sizes, chunk: KernelChunk, largest: KernelChunk) -> tuple[int, ...]:
    """Return the number of programs along each axis of a kernel's grid. The kernel's docstring names the axes.

    `largest` is the largest chunk of the layer.
    """
    matrices = chunk.num_lanes * chunk.num_heads
    residues = 8 * chunk.num_heads
    classes = _ceil_div(sizes.T, 8)
    class_tiles = _ceil_div(classes * chunk.num_lanes, tile.rows)
    num_columns = 8 * classes + sizes.K - sizes.T + 8  # n from -8 ceil(T / 8) to M + 7
    distance_tiles = _ceil_div(num_columns, tile.columns)
    if kernel == "distance_scores":
        return distance_tiles, class_tiles, residues
    if kernel == "distance_query_gradients":
        return class_tiles, residues
    if kernel == "distance_gradients":
        # All chunks split the rows into the same number of parts: enough for a full wave of programs.
        wave = NUM_MULTIPROCESSORS * tile.resident
        wanted_parts = _ceil_div(wave, distance_tiles * 8 * largest.num_heads)
        most_parts = _ceil_div(classes * largest.num_lanes, tile.rows)
        return distance_tiles, min(wanted_parts, most_parts), residues
    if kernel == "key_value_gradients":
        return _ceil_div(sizes.K, tile.columns), matrices
    return _ceil_div(sizes.T, tile.rows), matrices


def chunks(sizes: Sizes) -> Iterator[KernelChunk]:
    """Divide all (lane, head) pairs into chunks whose scores fit the buffer.

    If the scores of all lanes of a head fit, a chunk has all lanes of some heads. Then one launch sums the gradient of
    the encodings of these heads over all lanes.
    """
    num_lanes = sizes.B
    num_heads = sizes.N
    matrix_bytes = sizes.matrix_len * sizes.value_bytes
    most_matrices = min(max(1, SCORE_BUFFER_BYTES // matrix_bytes), MAX_MATRICES)
    lanes = _even_part(num_lanes, most_matrices)
    heads = _even_part(num_heads, max(1, most_matrices // lanes))
    for first_head in range(0, num_heads, heads):
        for first_lane in range(0, num_lanes, lanes):
            yield KernelChunk(
                first_lane=first_lane,
                num_lanes=min(lanes, num_lanes - first_lane),
                first_head=first_head,
                num_heads=min(heads, num_heads - first_head),
            )


def _even_part(whole: int, most: int) -> int:
    """Split `whole` evenly into the fewest parts that are not larger than `most`. Returns the size of a part."""
    num_parts = _ceil_div(whole, most)
    return _ceil_div(whole, num_parts)


def _ceil_div(number: int, divisor: int) -> int:
    """Divide two integers and round the result up."""
    return -(-number // divisor)


class _Kernels:
    """Launcher of the kernels for the inputs of one layer. It holds the planned launches and what all launches share:
    the shape and the buffer of scores.

    `kept_scores` are the distance scores that the forward pass has kept. With `keeps_scores` the buffer has room for
    the scores of all chunks.
    """

    def __init__(
        self,
        inputs: _Products,
        *,
        num_keys: int,
        oldest: int | None,
        has_dropout: bool,
        backward: bool,
        keeps_scores: bool = False,
        kept_scores: Tensor | None = None,
    ) -> None:
        from txl_dist.model.kernels import relative_attention

        self.source = relative_attention
        query = inputs.query
        B, T, N, H = query.shape
        self.head_width = H
        sizes = Sizes(B, T, num_keys, N, H, has_dropout, query.element_size())
        self.sizes = sizes
        self.launches = launches(sizes, backward=backward, has_scores=kept_scores is not None)
        self.shape = Shape(
            T=T,
            K=num_keys,
            S=sizes.row_len,
            num_heads=N,
            query_stride=query.stride(1),
            key_stride=inputs.key.stride(1),
            past_stride=2 * N * H,
            oldest=oldest,
        )
        self.holds_all = keeps_scores or kept_scores is not None
        if kept_scores is not None:
            self.scores = kept_scores
        elif keeps_scores:
            self.scores = query.new_empty(B * N * sizes.matrix_len)
        else:
            largest = self.launches[0].chunk
            self.scores = query.new_empty(largest.num_lanes * largest.num_heads * sizes.matrix_len)

    def scores_of(self, chunk: KernelChunk) -> Tensor:
        """Return the part of the score buffer for a chunk, [heads, lanes, T, S] as a flat tensor."""
        if not self.holds_all:
            return self.scores
        first_matrix = chunk.first_head * self.sizes.B + chunk.first_lane * chunk.num_heads
        start = first_matrix * self.sizes.matrix_len
        return self.scores[start : start + chunk.num_lanes * chunk.num_heads * self.sizes.matrix_len]

    def largest_grid(self, name: str) -> tuple[int, ...]:
        """Return the kernel's grid for the first chunk. No other chunk has more programs along any axis."""
        return next(launch.grid for launch in self.launches if launch.kernel == name)

    def run(self, launch: Launch, *arguments: Any) -> None:
        """Launch one kernel with these arguments and with the arguments of the chunk."""
        tile, chunk = launch.tile, launch.chunk
        kernel: Any = getattr(self.source, launch.kernel)
        where = () if launch.kernel == SUM else (chunk.num_lanes, chunk.first_lane, chunk.first_head)
        with launching_on(self.scores):
            kernel[launch.grid](
                *arguments,
                *where,
                **self._constants(launch),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                maxnreg=tile.max_registers,
            )

    def _constants(self, launch: Launch) -> dict[str, int]:
        """Return the kernel's compile-time arguments."""
        tile = launch.tile
        constants = {"ROWS": tile.rows, "COLUMNS": tile.columns}
        if launch.kernel == SUM:
            return constants
        constants["H"] = self.head_width
        constants["BLOCK_H"] = 1 << (self.head_width - 1).bit_length()
        if launch.kernel == "attend":
            constants["STAGES"] = tile.num_stages
        constants["CAST"] = self.source.IS_INTERPRETED
        return constants


class _Products(NamedTuple):
    """Views of the queries and keys in fused projections. A view is [B, S, N, H], one index of axis G of a contiguous
    tensor [B, S, G, N, H]."""

    query: Tensor
    key: Tensor
    past: Tensor | None

    @classmethod
    def of(cls, segment: Tensor, key_value: Tensor | None, past: Tensor | None) -> Self:
        """Return the views into the tensors that `_attend` takes, or into the gradients of these tensors."""
        key = segment[:, :, 1] if key_value is None else key_value[:, :, 0]
        past_key = None if past is None else past[:, :, 0]
        return cls(segment[:, :, 0], key, past_key)


class _Attention(torch.autograd.Function):
    """Autograd function of the function `_attend`."""

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
        scale: float,
        threshold: int,
        keeps_scores: bool,
    ) -> Tensor:
        head_width = segment.shape[-1]
        padding = -head_width % HEAD_WIDTH_MULTIPLE
        leaves: list[Any] = [segment, key_value, past, distance, content_bias, position_bias]
        if padding:
            leaves = _with_width(leaves, head_width + padding)
        leaves = [x if x is None else x.contiguous() for x in leaves]
        segment, key_value, past, distance, content_bias, position_bias = leaves
        inputs = _Products.of(segment, key_value, past)
        num_keys = key_document.shape[1]
        kernels = _Kernels(
            inputs,
            num_keys=num_keys,
            oldest=oldest,
            has_dropout=threshold > 0,
            backward=False,
            keeps_scores=keeps_scores,
        )
        query = inputs.query
        shape = kernels.shape
        B, T, N, _ = query.shape
        context = query.new_empty(query.shape)
        lse = query.new_empty(B, N, T, dtype=torch.float32)
        documents = (query_document, key_document, seed)
        only_in_backward = [None] * 6
        for launch in kernels.launches:
            scores = kernels.scores_of(launch.chunk)
            arguments = {
                "distance_scores": (query, distance, position_bias, scores, *only_in_backward, shape, 1.0),
                "attend": (*inputs, content_bias, scores, *documents, context, lse, shape, scale, threshold),
            }
            kernels.run(launch, *arguments[launch.kernel])
        kept_scores = kernels.scores if keeps_scores else None
        ctx.save_for_backward(*leaves, *documents, context, lse, kept_scores)
        ctx.has_scores = keeps_scores
        ctx.settings = (oldest, scale, threshold, head_width)
        if padding:
            (context,) = with_width([context], head_width)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        segment, key_value, past, distance, content_bias, position_bias, *others = ctx.saved_tensors
        *documents, context, lse, kept_scores = others
        oldest, scale, threshold, head_width = ctx.settings
        if not ctx.has_scores:
            kept_scores = None
        ctx.has_scores = False  # this pass writes gradients over the scores, so a second pass computes them again
        inputs = _Products.of(segment, key_value, past)
        K = documents[1].shape[1]
        query = inputs.query
        d_context = gradients[0].contiguous()
        if query.shape[-1] != head_width:
            (d_context,) = with_width([d_context], query.shape[-1])
        kernels = _Kernels(
            inputs, num_keys=K, oldest=oldest, has_dropout=threshold > 0, backward=True, kept_scores=kept_scores
        )
        B, _, N, H = query.shape
        shape = kernels.shape
        content_query = torch.empty_like(context)
        position_query = torch.empty_like(context)
        delta = torch.empty_like(lse)
        d_segment = torch.empty_like(segment)
        d_key_value = None if key_value is None else torch.empty_like(key_value)
        d_past = None if past is None else torch.empty_like(past)
        d_inputs = _Products.of(d_segment, d_key_value, d_past)
        row_tiles, _ = kernels.largest_grid("query_gradients")
        class_tiles, _ = kernels.largest_grid("distance_query_gradients")
        _, distance_splits, _ = kernels.largest_grid("distance_gradients")
        lane_starts = sorted({launch.chunk.first_lane for launch in kernels.launches})
        content_parts = lse.new_empty(B * row_tiles, N, H)
        distance_parts = lse.new_empty(8 * distance_splits, K, N, H)
        # The last of several chunks of lanes may have fewer tiles than the others, and so leave parts unwritten.
        new_parts = lse.new_empty if len(lane_starts) == 1 else lse.new_zeros
        position_parts = new_parts(len(lane_starts), 8 * class_tiles, N, H)
        d_distance = query.new_empty(K, N, H)
        d_content_bias = query.new_empty(N, H)
        d_position_bias = query.new_empty(N, H)
        parts = (distance_parts, content_parts, position_parts)
        sums = (d_distance, d_content_bias, d_position_bias)
        num_parts = (len(distance_parts), len(content_parts), len(lane_starts) * 8 * class_tiles)
        kept_part = 1 - threshold / KEEP_LEVELS
        d_scale = scale / kept_part
        prepared = (content_bias, context, d_context, content_query, position_query, delta)
        for launch in kernels.launches:
            scores = kernels.scores_of(launch.chunk)
            new_scores = scores if kept_scores is None else None
            loaded = (content_query, *inputs[1:], scores, *documents, d_context, lse, delta)
            part = position_parts[lane_starts.index(launch.chunk.first_lane)]
            arguments: dict[str, tuple[Any, ...]] = {
                "distance_scores": (query, distance, position_bias, new_scores, *prepared, shape, kept_part),
                "key_value_gradients": (*loaded, *d_inputs[1:], shape, scale, threshold, d_scale),
                "query_gradients": (*inputs[1:], scores, d_inputs.query, content_parts, shape, d_scale),
                "distance_query_gradients": (distance, scores, d_inputs.query, part, shape, d_scale),
                "distance_gradients": (position_query, scores, distance_parts, shape, d_scale),
                "sum_parts": (*parts, *sums, *num_parts, K * N * H, N * H),
            }
            kernels.run(launch, *arguments[launch.kernel])
        d_leaves: list[Tensor | None] = [d_segment, d_key_value, d_past, *sums]
        if head_width != H:
            d_leaves = _with_width(d_leaves, head_width)
        return *d_leaves, None, None, None, None, None, None, None


def _with_width(tensors: Sequence[Tensor | None], width: int) -> list[Tensor | None]:
    """Apply `with_width` to all tensors that are not None."""
    resized = iter(with_width([x for x in tensors if x is not None], width))
    return [x if x is None else next(resized) for x in tensors]


def with_width(tensors: Sequence[Tensor], width: int) -> list[Tensor]:
    """Copy tensors [..., N, H] to contiguous tensors [..., N, width], by one launch.

    If `width` is larger than H, each head is padded by zeros at its end. If `width` is smaller than H, the end of each
    head is cut off.
    """
    from txl_dist.model.kernels.head_width import set_width

    *_, num_heads, head_width = tensors[0].shape
    sources = [x.flatten(0, -3) if x.dim() > 2 else x[None] for x in tensors]
    sources = [x if x.stride()[1:] == (head_width, 1) else x.contiguous() for x in sources]
    targets = [x.new_empty(*x.shape[:-1], width) for x in tensors]
    num_rows = [len(x) * num_heads for x in sources]
    strides = [x.stride(0) for x in sources]
    num_tiles = sum(_ceil_div(rows, WIDTH_ROWS) for rows in num_rows)
    kernel: Any = set_width[(num_tiles,)]
    with launching_on(tensors[0]):
        kernel(
            tuple(sources),
            tuple(targets),
            tuple(num_rows),
            tuple(strides),
            num_heads,
            H=head_width,
            H_TO=width,
            ROWS=WIDTH_ROWS,
            BLOCK_H=1 << (max(head_width, width) - 1).bit_length(),
        )
    return targets
