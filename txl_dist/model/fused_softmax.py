"""The weighted sum of (adaptive) softmax losses and all its gradients in one pass, as one autograd function.

Gradients are made in the forward pass, chunk of tokens by chunk, since everything that they need is there:

    logits   Exist for one chunk only, in one buffer for all chunks, and become their own gradient in place.
    tables   Have one buffer for their gradient each; where clusters are slices of one table, they write to slices of
             its buffer. (Autograd makes a gradient of the size of the whole table for every slice.)
    tokens   A token weighs nothing where its weight is 0, and so do the padded rows of a partition.
    types    In half precision the gradient of the logits is made relative to the largest weight, so that one over a
             number of tokens does not make it vanish; that weight comes in at the end, with the loss scale. Sums over
             tokens, of losses and of gradients of parameters, are kept in at least fp32.

On a GPU one Triton kernel adds the bias and turns logits into gradients, passing over them in place of 24 operations.
The backward pass only multiplies by the incoming scalar, in place: it works once. Nothing waits for the device.

Shapes: S tokens, D model width, E width of a table, V its rows; R rows of a cluster, c of them in a chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from txl_dist.model.kernels import attention_launch
from txl_dist.model.relative_attention import at_least_fp32

CHUNK_ROWS = {"cpu": 64, "cuda": 1024}
"""As many tokens in a chunk at least, by kind of device: each chunk reads the weights and writes their gradient."""
CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**25}
"""As many logits in a chunk at most, where that allows for more tokens."""
ALIGNMENT = 16
"""Rows of logits begin at multiples of this: cuBLAS is slow with odd leading dimensions."""
CACHED_LOGITS = {"cpu": 2**17, "cuda": 2**62}
"""As many become their gradient at a time, of one token at least: on a CPU they stay in the cache meanwhile."""
KERNEL_TILE = 4096
"""Logits that a program of the Triton kernel holds at a time, by eight warps: of one row, or of several short ones."""


class Columns(NamedTuple):
    """Some columns of logits: a slice of a table and of its bias."""

    weight_VE: Tensor
    bias_V: Tensor
    low: int
    high: int


class Cluster(NamedTuple):
    """A softmax of some of the tokens."""

    rows_R: Tensor | None
    """Which tokens, padded with S; None: all, in order."""
    targets_R: Tensor
    """The column of each; of padded rows any."""
    columns: tuple[Columns, ...]
    """Side by side."""
    projection_DE: Tensor | None
    """Transposed, it takes the hidden states to the width of the tables; None where that is theirs."""

    @property
    def num_columns(self) -> int:
        """Width of its logits."""
        return sum(columns.high - columns.low for columns in self.columns)


def fused_linear_cross_entropy(hidden_SD: Tensor, clusters: Sequence[Cluster], *, weight_S: Tensor) -> Tensor:
    """sum over tokens of weight * (sum of a token's losses in its clusters), in nats; a scalar, at least fp32.

    The slices of a table must cover it once. The weights are constants: they get no gradient.
    """
    parameters: dict[Tensor, None] = {}  # a set in order: what is tied among clusters is one
    for cluster in clusters:
        for columns in cluster.columns:
            parameters |= {columns.weight_VE: None, columns.bias_V: None}
        if cluster.projection_DE is not None:
            parameters[cluster.projection_DE] = None
    loss: Tensor = _WeightedLoss.apply(  # type: ignore[no-untyped-call]
        clusters, weight_S, hidden_SD, *parameters
    )
    return loss


class _WeightedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, clusters: Sequence[Cluster], weight_S: Tensor, hidden_SD: Tensor, *parameters: Tensor
    ) -> Tensor:
        weight_S = weight_S.to(at_least_fp32(hidden_SD.dtype))
        is_half = hidden_SD.dtype != weight_S.dtype
        largest = weight_S.abs().max().clamp(min=torch.finfo(weight_S.dtype).tiny) if is_half else None
        with_hidden, *needed = ctx.needs_input_grad[2:]
        wanted = [x for x, is_needed in zip(parameters, needed, strict=True) if is_needed]
        share_S = weight_S if largest is None else weight_S / largest
        sums = _Sums(clusters, hidden_SD, share_S, parameters=wanted, with_hidden=with_hidden)
        for cluster in clusters:
            sums.add(cluster)
        hidden = None if sums.hidden is None else sums.hidden[:-1]
        ctx.save_for_backward(largest, hidden, *(sums.parameters.get(x) for x in parameters))
        ctx.dtypes, ctx.is_spent = [x.dtype for x in (hidden_SD, *parameters)], False
        return (sums.loss[:-1] * weight_S).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_spent:
            raise RuntimeError("the gradients of the fused softmax were freed by an earlier backward pass")
        ctx.is_spent = True
        largest, *gradients = ctx.saved_tensors
        if largest is not None or not _is_known_as_one(incoming):
            factor = incoming if largest is None else incoming * largest
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)
        return None, None, *(None if g is None else g.to(t) for g, t in zip(gradients, ctx.dtypes, strict=True))


def _is_known_as_one(scalar: Tensor) -> bool:
    """Whether a tensor is 1 and the host knows it without waiting: on a CPU, unless the tensor is a fake."""
    return scalar.device.type == "cpu" and type(scalar) is Tensor and bool(scalar.numpy() == 1)


class _Sums:
    """Losses and gradients, as the clusters add to them. One row more than tokens stands for padded rows."""

    def __init__(
        self,
        clusters: Sequence[Cluster],
        hidden_SD: Tensor,
        share_S: Tensor,
        *,
        parameters: Sequence[Tensor],
        with_hidden: bool,
    ) -> None:
        self.hidden_SD, self.share = hidden_SD, F.pad(share_S, (0, 1))
        self.loss = torch.zeros_like(self.share)
        self.hidden = F.pad(torch.zeros_like(hidden_SD), (0, 0, 0, 1)) if with_hidden else None
        # The first chunk of a cluster overwrites what its slice of a table holds: zeros would cost a pass over it.
        # Where it is the only one nothing is summed, and the table's gradient has the type that products have.
        tables = {columns.weight_VE for cluster in clusters for columns in cluster.columns}
        has_sums = [len(one.targets_R) > _chunk_shape(one, hidden_SD.device)[0] for one in clusters]
        summed = {columns.weight_VE for one in itertools.compress(clusters, has_sums) for columns in one.columns}
        self.parameters = {
            x: (torch.empty_like if x in tables else torch.zeros_like)(
                x, dtype=x.dtype if x in tables - summed else share_S.dtype
            )
            for x in parameters
        }
        self.by_kernel = runs_kernel(hidden_SD)
        # Zeros where products in half precision on a CPU read beyond a row's end, times zero: that must not be NaN.
        reads_beyond = hidden_SD.dtype.itemsize == 2 and not self.by_kernel
        make = hidden_SD.new_zeros if reads_beyond else hidden_SD.new_empty
        self.buffer = make(max(math.prod(_chunk_shape(one, hidden_SD.device)) for one in clusters))

    def add(self, cluster: Cluster) -> None:
        """All chunks of a cluster."""
        num_rows, length, stride = cluster.targets_R.shape[0], *_chunk_shape(cluster, self.hidden_SD.device)
        bias = _padded_bias(cluster, stride) if self.by_kernel else None
        if bias is not None:  # the kernel reads whole rows, and leaves zeros behind their last column
            self.buffer[: length * stride].view(-1, stride)[:, cluster.num_columns :].zero_()
        for start in range(0, num_rows, length):
            stop = min(start + length, num_rows)
            logits = self.buffer[: (stop - start) * stride].view(-1, stride)[:, : cluster.num_columns]
            self._add_chunk(cluster, start, stop, logits=logits, bias=bias)

    def _add_chunk(self, cluster: Cluster, start: int, stop: int, *, logits: Tensor, bias: Tensor | None) -> None:
        if cluster.rows_R is None:
            rows: Tensor | slice = slice(start, stop)
            hidden_cD = self.hidden_SD[start:stop]
        else:
            rows = cluster.rows_R[start:stop]
            hidden_cD = self.hidden_SD[rows.clamp(max=self.hidden_SD.shape[0] - 1)]
        projection = cluster.projection_DE
        inner_cE = hidden_cD if projection is None else hidden_cD @ projection
        pieces = logits.split([columns.high - columns.low for columns in cluster.columns], dim=1)
        targets_c, share_c = cluster.targets_R[start:stop], self.share[rows]
        if bias is not None:
            for piece, (weight, _, low, high) in zip(pieces, cluster.columns, strict=True):
                torch.mm(inner_cE, weight[low:high].t(), out=piece)
            self.loss[rows] += _into_gradient_by_kernel(logits, bias, targets_c, share_c)
        else:
            for piece, (weight, bias_V, low, high) in zip(pieces, cluster.columns, strict=True):
                torch.addmm(bias_V[low:high], inner_cE, weight[low:high].t(), out=piece)
            self.loss[rows] += _into_gradient(logits, targets_c[:, None], share_c[:, None])
        gradient = torch.zeros_like(inner_cE)
        for piece, (weight, bias_V, low, high) in zip(pieces, cluster.columns, strict=True):
            gradient = torch.addmm(gradient, piece, weight[low:high], out=gradient)
            self._accumulate(weight, slice(low, high), piece.t(), inner_cE, overwrite=start == 0)
            if bias_V in self.parameters:
                self.parameters[bias_V][low:high] += piece.sum(0, dtype=self.share.dtype)
        if projection is not None:
            self._accumulate(projection, slice(None), hidden_cD.t(), gradient)
            gradient = gradient @ projection.t()
        if self.hidden is not None:
            self.hidden[rows] += gradient

    def _accumulate(
        self, parameter: Tensor, rows: slice, left: Tensor, right: Tensor, *, overwrite: bool = False
    ) -> None:
        if parameter not in self.parameters:
            return
        total = self.parameters[parameter][rows]
        if total.dtype == left.dtype:
            torch.addmm(total, left, right, beta=0.0 if overwrite else 1.0, out=total)
        elif overwrite:
            total.copy_(left @ right)
        else:
            total.add_(left @ right)


def _chunk_shape(cluster: Cluster, device: torch.device) -> tuple[int, int]:
    """Tokens in a chunk, and the length of a row of logits in the buffer."""
    num_rows, stride = cluster.targets_R.shape[0], math.ceil(cluster.num_columns / ALIGNMENT) * ALIGNMENT
    kind = "cuda" if device.type == "cuda" else "cpu"
    most = max(CHUNK_ROWS[kind], CHUNK_LOGITS[kind] // stride)
    return math.ceil(num_rows / math.ceil(num_rows / most)), stride


def runs_kernel(hidden_SD: Tensor) -> bool:
    """Whether the Triton kernel makes the gradients of logits on this device and in this type."""
    return hidden_SD.dtype != torch.float64 and attention_launch.unsupported_device_reason(hidden_SD) is None


def _padded_bias(cluster: Cluster, stride: int) -> Tensor:
    """As `logits_to_gradient` wants it: -inf where a row of the buffer has no column."""
    biases = [columns.bias_V[columns.low : columns.high] for columns in cluster.columns]
    return F.pad(torch.cat(biases).float(), (0, stride - cluster.num_columns), value=-math.inf)


def _into_gradient_by_kernel(logits_cV: Tensor, bias: Tensor, targets_c: Tensor, share_c: Tensor) -> Tensor:
    """`_into_gradient` of logits + bias in one pass, for rows that lie as far apart as the bias is long."""
    from txl_dist.model.kernels.softmax import logits_to_gradient

    num_rows, stride = len(logits_cV), len(bias)
    columns = min(1 << (stride - 1).bit_length(), KERNEL_TILE)
    rows, loss_c = KERNEL_TILE // columns, torch.empty_like(share_c)
    kernel: Any = logits_to_gradient[(math.ceil(num_rows / rows),)]
    kernel(logits_cV, bias, targets_c, share_c, loss_c, num_rows, stride, ROWS=rows, COLUMNS=columns, num_warps=8)
    return loss_c


def _into_gradient(logits_cV: Tensor, targets_c1: Tensor, share_c1: Tensor) -> Tensor:
    """Put share * (softmax - one-hot target) where the logits are; returns the losses, [c]."""
    num_rows = max(1, CACHED_LOGITS["cuda" if logits_cV.is_cuda else "cpu"] // logits_cV.shape[1])
    pieces = (x.split(num_rows) for x in (logits_cV, targets_c1, share_c1))
    return torch.cat([_rows_into_gradient(*rows) for rows in zip(*pieces, strict=True)])


def _rows_into_gradient(logits_rV: Tensor, targets_r1: Tensor, share_r1: Tensor) -> Tensor:
    wide = logits_rV.to(share_r1.dtype)  # itself unless the type is a half one
    target = wide.gather(1, targets_r1)
    largest = wide.amax(1, keepdim=True)
    total = wide.sub_(largest).exp_().sum(1, keepdim=True)
    wide.mul_(share_r1 / total)
    wide.scatter_(1, targets_r1, wide.gather(1, targets_r1) - share_r1)
    if wide is not logits_rV:
        logits_rV.copy_(wide)
    return (total.log() + largest - target).squeeze(1)
