"""One autograd function that computes the weighted sum of (adaptive) softmax losses, and all gradients of the sum, in
one pass.

The forward pass computes the gradients too, one chunk of tokens at a time, while the chunk's logits exist:

    logits   Logits exist for one chunk at a time, in one buffer for all chunks. Their gradient overwrites them.
    tables   Each table has one buffer for its gradient. Clusters that are slices of one table write to slices of it.
             (Autograd would make a gradient as large as the whole table for every slice.)
    tokens   Tokens of weight 0 contribute nothing. The padded rows of a partition contribute nothing either.
    types    In fp16 the gradient of the logits is divided by the largest weight. Otherwise a weight of one over the
             number of tokens would make the gradient underflow. The backward pass multiplies by that weight, together
             with the loss scale. Losses and parameters' gradients are summed over tokens in fp32 or fp64.

On a GPU one Triton kernel adds the bias and turns logits into gradients. It replaces 24 operations. The backward pass
only multiplies the gradients by the incoming scalar, in place. So it can run only once. A second Triton kernel does
this without a pass over the gradients if the scalar is 1. No operation waits for the device.

Shapes: S tokens, D model width, E width of a table, V rows of a table, R rows (tokens) of a cluster, c rows of a
cluster in one chunk, r rows of a chunk that fit the cache. In logits_cV and logits_rV, V is the cluster's number of
columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from txl_dist.config.schema import AttentionKernel
from txl_dist.model.kernels import attention_launch
from txl_dist.model.relative_attention import at_least_fp32

CHUNK_ROWS = {"cpu": 64, "cuda": 1024}
"""Number of tokens that a chunk may have whatever its number of logits, by kind of device. Each chunk reads all weights
and writes their gradient, so small chunks are slow. The tokens are divided into chunks of about equal size."""
CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**28}
"""Largest number of logits in a chunk that has more than CHUNK_ROWS tokens, by kind of device. On a GPU all tokens of
the recipes are one chunk, so nothing is summed over chunks, and a table's gradient has the table's type."""
ALIGNMENT = 16
"""Multiple to which a row of logits is padded, in numbers. cuBLAS is slow with odd leading dimensions."""
CACHED_LOGITS = {"cpu": 2**17, "cuda": 2**62}
"""Largest number of logits that are turned into gradients at a time, by kind of device. On a CPU they stay in the
cache. On a GPU the number is too large to be a limit. The logits of one token are never split."""
KERNEL_TILE = 4096
"""Number of logits that a program (eight warps) of the Triton kernel holds at a time. They come from one row, or from
several short rows."""


class Columns(NamedTuple):
    """Slice of a table that gives some columns of a cluster's logits: rows [low, high) of the table and of its bias."""

    weight_VE: Tensor
    bias_V: Tensor
    low: int
    high: int

    @property
    def num_columns(self) -> int:
        """Number of columns of logits that the slice has."""
        return self.high - self.low


class Cluster(NamedTuple):
    """Description of one cluster's softmax for `fused_linear_cross_entropy`: its tokens, targets and columns."""

    rows_R: Tensor | None
    """Indices of the cluster's tokens among the S tokens, int64. Padded rows have the index S. None means all tokens,
    in order."""
    targets_R: Tensor
    """Target column of each token, int64. The targets of padded rows are arbitrary."""
    columns: tuple[Columns, ...]
    """Slices of tables that give the columns of the cluster's logits. The columns are joined in the order of the
    slices."""
    projection_DE: Tensor | None
    """Projection from model width to table width. None if the hidden states have the width of the tables."""

    @property
    def num_columns(self) -> int:
        """Number of columns of logits that the cluster has."""
        return sum(columns.num_columns for columns in self.columns)


def fused_linear_cross_entropy(
    hidden_SD: Tensor, clusters: Sequence[Cluster], *, weight_S: Tensor, kernel: AttentionKernel = "auto"
) -> Tensor:
    """Compute the weighted sum of all tokens' losses as a scalar in nats, in fp32 or fp64.

    A token's loss is the sum of its losses in its clusters, and `weight_S` holds each token's weight. The slices of a
    table must cover the table exactly once. `weight_S` gets no gradient. `kernel` is `engine.attention`. If it is plain
    or fused, the Triton kernel does not run.
    """
    by_kernel = kernel in ("auto", "triton") and runs_kernel(hidden_SD)
    parameters: dict[Tensor, None] = {}  # an ordered set: a tensor that clusters share is in it once
    for cluster in clusters:
        for columns in cluster.columns:
            parameters[columns.weight_VE] = None
            parameters[columns.bias_V] = None
        if cluster.projection_DE is not None:
            parameters[cluster.projection_DE] = None
    loss: Tensor = _WeightedLoss.apply(  # type: ignore[no-untyped-call]
        clusters, by_kernel, weight_S, hidden_SD, *parameters
    )
    return loss


class _WeightedLoss(torch.autograd.Function):
    """Autograd function of `fused_linear_cross_entropy`. The forward pass computes and keeps the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        clusters: Sequence[Cluster],
        by_kernel: bool,
        weight_S: Tensor,
        hidden_SD: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        weight_S = weight_S.to(at_least_fp32(hidden_SD.dtype))
        largest: Tensor | None = None
        share_S = weight_S
        if hidden_SD.dtype == torch.float16:
            tiny = torch.finfo(weight_S.dtype).tiny
            largest = weight_S.abs().max().clamp(min=tiny)
            share_S = weight_S / largest
        with_hidden, *needed = ctx.needs_input_grad[3:]
        trained = [x for x, is_needed in zip(parameters, needed, strict=True) if is_needed]
        sums = _Sums(clusters, hidden_SD, share_S, parameters=trained, with_hidden=with_hidden, by_kernel=by_kernel)
        for cluster in clusters:
            sums.add(cluster)
        if sums.hidden is None:
            d_hidden = None
        else:
            d_hidden = sums.hidden[:-1]
        d_parameters = [sums.parameters.get(x) for x in parameters]
        ctx.save_for_backward(largest, d_hidden, *d_parameters)
        ctx.dtypes = [hidden_SD.dtype, *(x.dtype for x in parameters)]
        ctx.by_kernel = by_kernel
        ctx.is_spent = False
        loss_S = sums.loss[:-1]
        return (loss_S * weight_S).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_spent:
            raise RuntimeError(
                "the gradients of the fused softmax were freed by an earlier backward pass. Run the forward pass again "
                "before each backward pass."
            )
        ctx.is_spent = True
        largest, *gradients = ctx.saved_tensors
        if largest is not None or not _is_known_as_one(incoming):
            if largest is None:
                factor = incoming
            else:
                factor = incoming * largest
            for gradient in gradients:
                if gradient is not None and ctx.by_kernel:
                    _multiply_unless_one(gradient, factor)
                elif gradient is not None:
                    gradient.mul_(factor)
        cast: list[Tensor | None] = []
        for gradient, dtype in zip(gradients, ctx.dtypes, strict=True):
            cast.append(None if gradient is None else gradient.to(dtype))
        return None, None, None, *cast


def _is_known_as_one(scalar: Tensor) -> bool:
    """Return True if a tensor's value is 1 and the host knows that without waiting for the device.

    The host knows the values of tensors on a CPU, except FakeTensors.
    """
    if scalar.device.type != "cpu" or type(scalar) is not Tensor:
        return False
    return bool(scalar.numpy() == 1)


class _Sums:
    """Sums of losses and gradients over clusters. Tensors with a row per token have one additional row, for padded
    rows."""

    def __init__(
        self,
        clusters: Sequence[Cluster],
        hidden_SD: Tensor,
        share_S: Tensor,
        *,
        parameters: Sequence[Tensor],
        with_hidden: bool,
        by_kernel: bool,
    ) -> None:
        self.hidden_SD = hidden_SD
        self.share = F.pad(share_S, (0, 1))
        self.loss = torch.zeros_like(self.share)
        self.hidden: Tensor | None = None
        if with_hidden:
            self.hidden = hidden_SD.new_zeros(len(hidden_SD) + 1, hidden_SD.shape[1])
        self.parameters = _gradient_buffers(parameters, clusters, like=hidden_SD, sum_dtype=share_S.dtype)
        self._begun: set[tuple[Tensor, int | None]] = set()
        """(parameter, first row of a slice) of each gradient that holds a sum. Other rows hold arbitrary numbers until
        their first product."""
        self.by_kernel = by_kernel
        # On a CPU, products in half precision read numbers after a row's end and multiply them by zero. They must not
        # be NaN, so the buffer begins with zeros.
        reads_beyond = hidden_SD.dtype.itemsize == 2 and not self.by_kernel
        if reads_beyond:
            new_buffer = hidden_SD.new_zeros
        else:
            new_buffer = hidden_SD.new_empty
        most_logits = max(math.prod(_chunk_shape(cluster, hidden_SD.device)) for cluster in clusters)
        self.buffer = new_buffer(most_logits)

    def add(self, cluster: Cluster) -> None:
        """Add the losses and gradients of a cluster to the sums, one chunk of tokens at a time."""
        num_rows = cluster.targets_R.shape[0]
        chunk_len, stride = _chunk_shape(cluster, self.hidden_SD.device)
        bias: Tensor | None = None
        if self.by_kernel:
            # The kernel reads and writes whole rows. After the last column it needs zeros, and leaves zeros.
            bias = _padded_bias(cluster, stride)
            rows = self.buffer[: chunk_len * stride].view(-1, stride)
            if cluster.num_columns < stride:
                rows[:, cluster.num_columns :].zero_()
        for start in range(0, num_rows, chunk_len):
            stop = min(start + chunk_len, num_rows)
            rows = self.buffer[: (stop - start) * stride].view(-1, stride)
            logits = rows[:, : cluster.num_columns]
            self._add_chunk(cluster, start, stop, logits=logits, bias=bias)

    def _add_chunk(self, cluster: Cluster, start: int, stop: int, *, logits: Tensor, bias: Tensor | None) -> None:
        """Add the losses and gradients of the rows [start, stop) of a cluster.

        `logits` is the part of the buffer for these rows. `bias` is the kernel's bias (see `_padded_bias`), or None if
        the kernel does not run.
        """
        if cluster.rows_R is None:
            rows: Tensor | slice = slice(start, stop)
            hidden_cD = self.hidden_SD[start:stop]
        else:
            rows = cluster.rows_R[start:stop]
            hidden_cD = self.hidden_SD[rows.clamp(max=self.hidden_SD.shape[0] - 1)]
        projection = cluster.projection_DE
        if projection is None:
            inner_cE = hidden_cD
        else:
            inner_cE = hidden_cD @ projection
        pieces = logits.split([columns.num_columns for columns in cluster.columns], dim=1)
        targets_c = cluster.targets_R[start:stop]
        share_c = self.share[rows]
        if bias is not None:
            for piece, (weight, _, low, high) in zip(pieces, cluster.columns, strict=True):
                torch.mm(inner_cE, weight[low:high].t(), out=piece)
            loss_c = _into_gradient_by_kernel(logits, bias, targets_c, share_c)
        else:
            for piece, (weight, bias_V, low, high) in zip(pieces, cluster.columns, strict=True):
                torch.addmm(bias_V[low:high], inner_cE, weight[low:high].t(), out=piece)
            loss_c = _into_gradient(logits, targets_c[:, None], share_c[:, None])
        _add_rows(self.loss, rows, loss_c)
        # From here on `pieces` hold the gradients of the logits.
        d_hidden = torch.empty_like(inner_cE)
        for index, (piece, (weight, bias_V, low, high)) in enumerate(zip(pieces, cluster.columns, strict=True)):
            torch.addmm(d_hidden, piece, weight[low:high], beta=float(index > 0), out=d_hidden)
            self._accumulate(weight, slice(low, high), piece.t(), inner_cE)
            if bias_V in self.parameters:
                total = self.parameters[bias_V][low:high]
                if start == 0:
                    torch.sum(piece, 0, dtype=total.dtype, out=total)
                else:
                    total += piece.sum(0, dtype=total.dtype)
        if projection is not None:
            self._accumulate(projection, slice(None), hidden_cD.t(), d_hidden)
            d_hidden = d_hidden @ projection.t()
        if self.hidden is not None:
            _add_rows(self.hidden, rows, d_hidden)

    def _accumulate(self, parameter: Tensor, rows: slice, left: Tensor, right: Tensor) -> None:
        """Add the product left right to some rows of a parameter's gradient. The first product overwrites the rows."""
        if parameter not in self.parameters:
            return
        overwrite = (parameter, rows.start) not in self._begun
        self._begun.add((parameter, rows.start))
        total = self.parameters[parameter][rows]
        if total.dtype == left.dtype:
            torch.addmm(total, left, right, beta=0.0 if overwrite else 1.0, out=total)
        elif overwrite:
            total.copy_(left @ right)
        else:
            total.add_(left @ right)


def _gradient_buffers(
    parameters: Sequence[Tensor], clusters: Sequence[Cluster], *, like: Tensor, sum_dtype: torch.dtype
) -> dict[Tensor, Tensor]:
    """Allocate the gradient of each parameter.

    The first product overwrites the gradient, so the gradient need not be set to zero first. If a table's slices and a
    projection get one product each, nothing is summed, and the gradient has the parameter's type. All other gradients
    have the type `sum_dtype`.
    """
    num_products: dict[Tensor, int] = {}
    for cluster in clusters:
        chunk_len, _ = _chunk_shape(cluster, like.device)
        num_chunks = math.ceil(len(cluster.targets_R) / chunk_len)
        for columns in cluster.columns:
            num_products[columns.weight_VE] = max(num_chunks, num_products.get(columns.weight_VE, 0))
        if cluster.projection_DE is not None:
            num_products[cluster.projection_DE] = num_chunks + num_products.get(cluster.projection_DE, 0)
    gradients: dict[Tensor, Tensor] = {}
    for parameter in parameters:
        if num_products.get(parameter) == 1:
            gradients[parameter] = torch.empty_like(parameter)
        else:
            gradients[parameter] = torch.empty_like(parameter, dtype=sum_dtype)
    return gradients


def _add_rows(total: Tensor, rows: Tensor | slice, values: Tensor) -> None:
    """Add values to some rows of a tensor, in place. Of equal rows only the last row of `total`, for padding, occurs,
    so the order of additions does not matter."""
    if isinstance(rows, slice):
        total[rows].add_(values)
    else:
        total.index_add_(0, rows, values)


def _chunk_shape(cluster: Cluster, device: torch.device) -> tuple[int, int]:
    """Return (tokens in a chunk, length of a row of logits in the buffer)."""
    num_rows = cluster.targets_R.shape[0]
    stride = math.ceil(cluster.num_columns / ALIGNMENT) * ALIGNMENT
    if device.type == "cuda":
        kind = "cuda"
    else:
        kind = "cpu"
    most_rows = max(CHUNK_ROWS[kind], CHUNK_LOGITS[kind] // stride)
    num_chunks = math.ceil(num_rows / most_rows)
    return math.ceil(num_rows / num_chunks), stride


def runs_kernel(hidden_SD: Tensor) -> bool:
    """Return True if the Triton kernel can compute the gradients of logits on this device and in this type."""
    return hidden_SD.dtype != torch.float64 and attention_launch.unsupported_device_reason(hidden_SD) is None


def _padded_bias(cluster: Cluster, stride: int) -> Tensor:
    """Return the bias for `logits_to_gradient`, [stride] in fp32.

    It is -inf for the padding at the end of a buffer row.
    """
    bias = cluster.columns[0].bias_V.new_full((stride,), -math.inf, dtype=torch.float32)
    pieces = bias[: cluster.num_columns].split([columns.num_columns for columns in cluster.columns])
    for piece, (_, bias_V, low, high) in zip(pieces, cluster.columns, strict=True):
        piece.copy_(bias_V[low:high])
    return bias


def _into_gradient_by_kernel(logits_cV: Tensor, bias: Tensor, targets_c: Tensor, share_c: Tensor) -> Tensor:
    """Apply `_into_gradient` to logits + bias by the Triton kernel, in one pass. Returns the losses, [c].

    The distance between two rows of logits equals the length of the bias.
    """
    from txl_dist.model.kernels.softmax import logits_to_gradient

    num_rows = len(logits_cV)
    stride = len(bias)
    next_power_of_2 = 1 << (stride - 1).bit_length()
    columns = min(next_power_of_2, KERNEL_TILE)
    rows = KERNEL_TILE // columns
    loss_c = torch.empty_like(share_c)
    num_programs = math.ceil(num_rows / rows)
    kernel: Any = logits_to_gradient[(num_programs,)]
    with attention_launch.launching_on(logits_cV):
        kernel(logits_cV, bias, targets_c, share_c, loss_c, num_rows, stride, ROWS=rows, COLUMNS=columns, num_warps=8)
    return loss_c


def _multiply_unless_one(gradient: Tensor, factor: Tensor) -> None:
    """Multiply a contiguous gradient in place by a scalar of the same device, by a Triton kernel."""
    from txl_dist.model.kernels.softmax import multiply_unless_one

    size = gradient.numel()
    kernel: Any = multiply_unless_one[(math.ceil(size / KERNEL_TILE),)]
    with attention_launch.launching_on(gradient):
        kernel(gradient, factor, size, BLOCK=KERNEL_TILE, num_warps=8)


def _into_gradient(logits_cV: Tensor, targets_c1: Tensor, share_c1: Tensor) -> Tensor:
    """Replace logits by their gradient, share * (softmax - one-hot target). Returns the losses, [c]."""
    if logits_cV.is_cuda:
        kind = "cuda"
    else:
        kind = "cpu"
    num_rows = max(1, CACHED_LOGITS[kind] // logits_cV.shape[1])
    pieces = zip(logits_cV.split(num_rows), targets_c1.split(num_rows), share_c1.split(num_rows), strict=True)
    losses = [_rows_into_gradient(*piece) for piece in pieces]
    return torch.cat(losses)


def _rows_into_gradient(logits_rV: Tensor, targets_r1: Tensor, share_r1: Tensor) -> Tensor:
    """Do the work of `_into_gradient` for as many rows as fit the cache. Returns the losses, [r]."""
    wide = logits_rV.to(share_r1.dtype)  # the same tensor, except in half precision
    target_logit = wide.gather(1, targets_r1)
    largest = wide.amax(1, keepdim=True)
    exponentials = wide.sub_(largest).exp_()
    total = exponentials.sum(1, keepdim=True)
    wide.mul_(share_r1 / total)
    d_target = wide.gather(1, targets_r1) - share_r1
    wide.scatter_(1, targets_r1, d_target)
    if wide is not logits_rV:
        logits_rV.copy_(wide)
    loss_r1 = total.log() + largest - target_logit
    return loss_r1.squeeze(1)
