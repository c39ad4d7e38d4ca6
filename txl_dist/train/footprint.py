"""Bytes that a rank will hold, predicted without allocating them (`txl train --dry-run`).

The working set of a micro-batch (activations, gradients on their way, buffers) is not a formula that would have to
follow the code: the step itself runs on torch's fake tensors, which have shapes but no storage, and the bytes alive
are followed. Weights, optimizer state and memories are counted: they only depend on the ZeRO stage. The Triton
kernels do not run there; something that keeps what they keep, and nothing of the size of the scores, stands for them.

Not predicted: the program itself and the libraries (about 0.6 GiB of host memory per rank, on a GPU the CUDA context),
fragmentation, and reader threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from txl_dist.config import BatchPlan, Config
from txl_dist.infer.bundle import DTYPES
from txl_dist.model.adaptive_embedding import ROWS_MULTIPLE
from txl_dist.model.flops import count_parameters
from txl_dist.model.kernels.launch import mismatch
from txl_dist.model.memory import empty_memory
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL
from txl_dist.text.clusters import ClusterRows
from txl_dist.train.engine import BUCKET_LEN


def bytes_per_rank(
    config: Config, *, plan: BatchPlan, vocab_size: int, cluster_shares: Sequence[float], on_gpu: bool
) -> dict[str, float]:
    """Bytes of a rank at its fullest, by what holds them; the sum is the peak.

    `cluster_shares` are those of the tokens, one per cluster of the vocabulary. With offload the optimizer is left out.
    """
    train, engine, size = config.train, config.engine, DTYPES[config.engine.precision].itemsize
    parameters, world, stage = count_parameters(config.model, vocab_size=vocab_size), plan.world_size, engine.zero_stage
    lane_memory = config.model.num_layers * train.memory_len * config.model.width * size
    own = parameters / (world if stage >= 1 else 1)
    has_masters = stage >= 1 or engine.precision != "fp32"
    gradients = size * (own if stage >= 2 else parameters)
    micro_step = micro_step_bytes(
        config,
        plan=plan,
        vocab_size=vocab_size,
        cluster_shares=cluster_shares,
        keeps_gradients=stage < 2 and plan.num_microbatches == 1,
        on_gpu=on_gpu,
    )
    if stage >= 2 or plan.num_microbatches > 1:
        micro_step += gradients
    update = gradients + (4 * own if has_masters else 0)  # the optimizer has them in fp32
    bucket = BUCKET_LEN if on_gpu else min(BUCKET_LEN, parameters)  # a CPU's memory is held once it is touched
    return {
        "weights": size * (own if stage == 3 else parameters),
        "gradients": gradients,
        "optimizer": 0.0 if on_gpu and engine.offload_optimizer else own * (12 if has_masters else 8),
        "buckets": 0.0 if stage == 0 else float(bucket * size * (2 if on_gpu and world > 1 else 1)),
        # Of all lanes before the step, and after it but for the micro-batch at work.
        "memories": float(lane_memory * (2 * plan.lanes_per_rank - plan.microbatch_lanes)),
        "activations": max(micro_step, update) - gradients,
    }


def micro_step_bytes(
    config: Config,
    *,
    plan: BatchPlan,
    vocab_size: int,
    cluster_shares: Sequence[float],
    keeps_gradients: bool,
    on_gpu: bool,
) -> float:
    """Most bytes alive at once in forward and backward of one micro-batch, besides parameters and the memory given.

    `keeps_gradients`: they count from where they are made to the end; else only until they are added to others.
    """
    dtype, attention = DTYPES[config.engine.precision], config.engine.attention
    is_relative = config.model.positions == "relative"
    unfit = mismatch(dtype, head_width=config.model.head_width, has_position_bias=is_relative)
    uses_kernels = attention in ("auto", "triton") and on_gpu and unfit is None
    with FakeTensorMode(), _made_in(dtype):
        model = TransformerXL(
            config.model,
            vocab_size=vocab_size,
            recompute_every=config.engine.recompute_every if config.engine.activation_checkpointing else 0,
            attention="plain" if attention == "plain" else "fused",
        )
        if uses_kernels:
            for block in model.blocks:
                block.attention.attend = _KernelLike.attend  # type: ignore[union-attr]
        memory = empty_memory(
            num_layers=config.model.num_layers,
            num_lanes=plan.microbatch_lanes,
            memory_len=config.train.memory_len,
            width=config.model.width,
            dtype=dtype,
        )
        multiple = ROWS_MULTIPLE["cuda" if on_gpu else "cpu"]
        batch = _batch(model, config, lanes=plan.microbatch_lanes, cluster_shares=cluster_shares, multiple=multiple)
        if not keeps_gradients:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(_drop)
        with _LiveBytes() as live:
            loss, _ = SegmentLoss(model)(batch, memory, 1.0)
            loss.backward()
    return float(live.peak)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def _made_in(dtype: torch.dtype) -> Iterator[None]:
    """Parameters in that type from the start: fake ones cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {value.untyped_storage()._cdata for value in tree_iter((args, kwargs)) if _has_storage(value)}
        for value in tree_iter(result):
            if _has_storage(value) and value.untyped_storage()._cdata not in self._known | given:
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class _KernelLike(torch.autograd.Function):
    """Keeps what the Triton kernels keep for the backward pass."""

    @staticmethod
    def attend(query: Tensor, key: Tensor, value: Tensor, *, distances: Any, visible: Any) -> Tensor:
        """Called as `RelativeAttention.attend`."""
        context: Tensor = _KernelLike.apply(query, key, value, distances.key_KNH)  # type: ignore[no-untyped-call]
        return context

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, distance: Tensor) -> Tensor:
        context = torch.empty_like(query)
        normalizers = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, distance, context, normalizers)
        return context

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:4])


def _batch(
    model: TransformerXL, config: Config, *, lanes: int, cluster_shares: Sequence[float], multiple: int
) -> Batch:
    """Ids without values, and partitions of the size that these shares make."""
    shape, num_tokens = (lanes, config.train.segment_len), lanes * config.train.segment_len

    def partition(num_clusters: int) -> tuple[ClusterRows, ...] | None:
        if num_clusters == 1:
            return None
        sizes = [multiple * max(1, -(-int(num_tokens * share) // multiple)) for share in cluster_shares]
        return tuple(ClusterRows(*(torch.empty(size, dtype=torch.int64) for _ in range(2))) for size in sizes)

    ids_BT = torch.empty(shape, dtype=torch.int64)
    return Batch(
        tokens_BT=ids_BT,
        targets_BT=ids_BT,
        scored_BT=torch.empty(shape, dtype=torch.float32),
        document_BT=None,
        token_partition=partition(len(model.embedding.edges) - 1),
        target_partition=partition(len(model.softmax.edges) - 1),
    )


def _has_storage(value: object) -> TypeGuard[Tensor]:
    """A sparse tensor's parts were seen when they were made."""
    return isinstance(value, Tensor) and value.layout == torch.strided
