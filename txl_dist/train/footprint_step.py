"""Bytes alive in forward and backward of one micro-batch, followed on tensors without storage.

The step itself runs on torch's fake tensors, so no formula has to follow the code. Around it lies what DeepSpeed does
with each gradient: kept to the end (`stays`), or put into a bucket of `BUCKET_LEN` that is exchanged when it is full,
behind a flat copy of it, while the backward pass goes on (`sharded` at stage 2, `gathered` at stage 3). At stage 3 also
the weights count that are gathered: those of one block and those of none.

Two pools are followed apart, as the C library has them (`allocator`): large storages go back when freed, small ones
stay in its heap. The Triton kernels do not run here; something that keeps what they keep stands for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from txl_dist.model.adaptive_embedding import ROWS_MULTIPLE
from txl_dist.model.kernels.launch import mismatch
from txl_dist.model.memory import empty_memory
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL
from txl_dist.sections import AttentionKernel, ModelSection
from txl_dist.text.clusters import ClusterRows
from txl_dist.train.allocator import MAPPED_BYTES
from txl_dist.train.deepspeed_config import BUCKET_LEN, PERSISTENT_LEN
from txl_dist.train.flat import FlatModule

Exchange = Literal["stays", "dropped", "sharded", "gathered"]


class MicroStep(NamedTuple):
    """All that the bytes of a micro-batch depend on; stages and plans that share it are followed once."""

    model: ModelSection
    vocab_size: int
    cluster_shares: tuple[float, ...]
    lanes: int
    segment_len: int
    memory_len: int
    dtype: torch.dtype
    attention: AttentionKernel
    recompute_every: int
    is_flat: bool
    """Blocks lie in flat parameters (`FlatModule`)."""
    exchange: Exchange
    """What becomes of a gradient. dropped: it is added to others, which the caller counts."""
    num_owners: int
    """Ranks that gradients are cut up for."""
    on_gpu: bool


class Peak(NamedTuple):
    """Most bytes alive at once, besides parameters, buckets and the memory given."""

    alive: float
    scores: float
    """What attention keeps for the backward pass, scores foremost, at that time."""
    large: float
    """The most of the large storages alone."""
    small: float
    """The most of the small ones alone."""


@lru_cache(maxsize=64)
def micro_step_peak(step: MicroStep) -> Peak:
    """Follow the step. Allocates nothing."""
    is_relative = step.model.positions == "relative"
    unfit = mismatch(step.dtype, head_width=step.model.head_width, has_position_bias=is_relative)
    uses_kernels = step.attention in ("auto", "triton") and step.on_gpu and unfit is None
    with FakeTensorMode(), _made_in(step.dtype):
        model = TransformerXL(
            step.model,
            vocab_size=step.vocab_size,
            recompute_every=step.recompute_every,
            attention="plain" if step.attention == "plain" else "fused",
        )
        live = _LiveBytes()
        for block in model.blocks:
            attention: Any = block.attention
            attention.attend = live.as_scores(_KernelLike.attend if uses_kernels else attention.attend)
        memory = empty_memory(
            num_layers=step.model.num_layers,
            num_lanes=step.lanes,
            memory_len=step.memory_len,
            width=step.model.width,
            dtype=step.dtype,
        )
        batch = _batch(model, step)
        module: nn.Module = SegmentLoss(model)
        if step.is_flat:
            module = FlatModule(module, prefix="model.")
        lengths = [parameter.numel() for parameter in module.parameters()]
        own_len = sum(lengths) / step.num_owners if step.exchange == "sharded" else 0.0
        is_exchanged = step.exchange in ("sharded", "gathered")
        # gloo's reduce-scatter, which stage 3 calls, takes a copy of what it is given; its reduce does not.
        num_copies = 2 if step.exchange == "gathered" and not step.on_gpu else 1
        size = step.dtype.itemsize
        buckets = _Buckets(live, size=size, num_copies=num_copies, own_len=own_len) if is_exchanged else None
        if step.exchange != "stays":
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(_gradient_hook(buckets))
        if step.exchange == "gathered":
            live.add(_gathered_bytes(model))
        with live:
            loss, _ = module(batch, memory, 1.0)
            loss.backward()
        if buckets is not None:
            buckets.flush()
    return live.peak()


def _gradient_hook(buckets: _Buckets | None) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if buckets is not None:
            buckets.take(parameter.numel())
        parameter.grad = None

    return hook


class _LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = {"large": 0.0, "small": 0.0, "scores": 0.0}
        self._peak = {"alive": 0.0, "scores": 0.0, "large": 0.0, "small": 0.0}
        self._known: set[int] = set()
        self._makes_scores = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {value.untyped_storage()._cdata for value in tree_iter((args, kwargs)) if _has_storage(value)}
        for value in tree_iter(result):
            if _has_storage(value) and value.untyped_storage()._cdata not in self._known | given:
                self._follow(value.untyped_storage())
        return result

    def as_scores(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """What it makes is counted as scores, but for its result."""

        def called(*arguments: Any, **named: Any) -> Tensor:
            self._makes_scores = True
            try:
                return attend(*arguments, **named)
            finally:
                self._makes_scores = False

        return called

    def add(self, size: float, *, pool: str = "large", is_scores: bool = False) -> None:
        """So many bytes more; negative if less."""
        now, peak = self._now, self._peak
        now[pool] += size
        now["scores"] += size if is_scores else 0.0
        peak[pool] = max(peak[pool], now[pool])
        if (alive := now["large"] + now["small"]) > peak["alive"]:
            peak["alive"], peak["scores"] = alive, now["scores"]

    def peak(self) -> Peak:
        """Up to now."""
        return Peak(**self._peak)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        pool, is_scores = "large" if size >= MAPPED_BYTES else "small", self._makes_scores
        self._known.add(key)
        self.add(size, pool=pool, is_scores=is_scores)
        weakref.finalize(storage, self._forget, key, size, pool, is_scores)

    def _forget(self, key: int, size: int, pool: str, is_scores: bool) -> None:
        self._known.discard(key)
        self.add(-size, pool=pool, is_scores=is_scores)


class _Buckets:
    """Stages 2 and 3: gradients are exchanged a bucket at a time, behind a flat copy of it; a part stays here."""

    def __init__(self, live: _LiveBytes, *, size: int, num_copies: int, own_len: float) -> None:
        """`size` of a value in bytes; `num_copies` of a bucket while it is exchanged; `own_len` values stay here, those
        exchanged first at worst. At stage 3 they go into a buffer that is there from the start, so none are counted."""
        self._live, self._size, self._num_copies, self._own_left = live, size, num_copies, own_len
        self._filled = 0

    def take(self, length: int) -> None:
        """The gradient of a parameter is moved into the bucket."""
        if self._filled + length > BUCKET_LEN:
            self.flush()
        self._filled += length

    def flush(self) -> None:
        """Exchange what the bucket holds."""
        copies = self._num_copies * self._filled * self._size
        self._live.add(copies)
        self._live.add(-copies)
        kept = min(self._filled, self._own_left)
        self._live.add(kept * self._size)
        self._own_left -= kept
        self._filled = 0


def _gathered_bytes(model: TransformerXL) -> float:
    """Stage 3: the weights that a rank has whole. A block is gathered into a flat tensor, and copied out of it."""
    of_blocks = {id(parameter) for parameter in model.blocks.parameters()}
    others = (p.nbytes for p in model.parameters() if id(p) not in of_blocks and p.numel() > PERSISTENT_LEN)
    return float(2 * sum(p.nbytes for p in model.blocks[0].parameters()) + sum(others))


@contextmanager
def _made_in(dtype: torch.dtype) -> Iterator[None]:
    """Parameters in that type from the start: fake ones cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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


def _batch(model: TransformerXL, step: MicroStep) -> Batch:
    """Ids without values, and partitions of the size that these shares make."""
    shape, num_tokens = (step.lanes, step.segment_len), step.lanes * step.segment_len
    multiple = ROWS_MULTIPLE["cuda" if step.on_gpu else "cpu"]

    def partition(num_clusters: int) -> tuple[ClusterRows, ...] | None:
        if num_clusters == 1:
            return None
        sizes = [multiple * max(1, -(-int(num_tokens * share) // multiple)) for share in step.cluster_shares]
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
