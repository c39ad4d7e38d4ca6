"""Prediction of the bytes that forward and backward pass of a micro-batch hold at once. The
operations are traced on tensors without storage.

The step itself runs on torch's meta tensors, so there is no second formula that must agree with the code. DeepSpeed's
use of each gradient is added. A gradient stays to the end (`stays`), or goes into a bucket of `BUCKET_LEN` values. A
full bucket is copied flat and exchanged while the backward pass continues (`sharded` at stage 2, `gathered` at stage
3). At stage 3 the gathered weights count too: the weights of one block, and the weights outside the blocks.

    follow   runs the step and notes each storage made or freed, and each complete gradient. Results are cached
    replay   adds up the bytes for one use of the gradients. So several stages share one trace

Large and small storages are summed separately, because the C library has two pools (`distributed.malloc`). The library
returns large storages when they are freed, and keeps small ones in its heap. The Triton kernels do not run here.
Row-wise kernels only allocate their results. A substitute for the attention kernels keeps the same tensors for the
backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from txl_dist.config.schema import AttentionKernel, ModelSection
from txl_dist.distributed.malloc import MAPPED_BYTES
from txl_dist.model import dropout, fused_softmax
from txl_dist.model.adaptive_embedding import ROWS_MULTIPLE
from txl_dist.model.kernels import rows
from txl_dist.model.kernels.attention_launch import SCORE_BUFFER_BYTES, unsupported_shape_reason
from txl_dist.model.memory import AttentionMask
from txl_dist.model.prediction_order import PredictionOrder
from txl_dist.model.relative_attention import Terms
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL
from txl_dist.train.engine.deepspeed_config import BUCKET_LEN, PERSISTENT_LEN
from txl_dist.train.engine.flat import FlatModule
from txl_dist.train.engine.padding import pad_widths
from txl_dist.vocabulary_clusters import ClusterRows, sizes_for

Exchange = Literal["stays", "dropped", "sharded", "added", "gathered"]
"""Use of a gradient after it is complete. With `stays` the gradient is kept to the end of the pass. With `sharded`
(ZeRO stage 2) it is exchanged, and each rank keeps a part. With `gathered` (ZeRO stage 3) the same happens, and the
gathered weights count too. With `dropped` it is added to other gradients, which the caller counts. With `added` it is
added to other gradients after its bucket is exchanged."""


class MicroStep(NamedTuple):
    """Settings that determine the memory of forward and backward pass of one micro-batch.

    `follow` caches its result by this value, so ZeRO stages and plans with equal settings are traced once.
    """

    model: ModelSection
    vocab_size: int
    cluster_shares: tuple[float, ...]
    """Share of the tokens in each cluster of the vocabulary."""
    lanes: int
    """Number of lanes (batch rows) in the micro-batch."""
    segment_len: int
    memory_len: int
    dtype: torch.dtype
    attention: AttentionKernel
    recompute_every: int
    is_flat: bool
    """Whether the parameters of blocks are stored in flat parameters (`FlatModule`)."""
    on_gpu: bool
    keeps_scores: bool = False
    """Whether the Triton kernels keep distance scores for the backward pass."""
    for_graphs: bool = False
    """Whether batches have only a few different shapes (`vocabulary_clusters.size_ladder`), as CUDA graphs require."""
    pads_widths: bool = False
    """Whether the engine pads widths (`engine.pad_widths`)."""
    memory_lens: tuple[int, ...] = ()
    step_len: int = 0
    """Number of tokens by which the position in the text advances per step. Only XLNet's objective (prediction in any
    order) uses this field."""
    num_targets: int = 0
    """Number of predicted tokens per segment with XLNet's objective. 0 means that every token predicts the next
    token."""


class Peak(NamedTuple):
    """Largest number of bytes alive at once in forward and backward pass of a micro-batch.

    Parameters, buckets and the memory that the step receives are not included.
    """

    alive: float
    """Largest number of bytes of all storages together."""
    scores: float
    """Bytes that attention keeps for the backward pass at the moment of the peak. Most of these bytes are attention
    scores."""
    large: float
    """Largest number of bytes of large storages alone."""
    small: float
    """Largest number of bytes of small storages alone."""


class Made(NamedTuple):
    """Event of a trace: an operation allocates a storage of `size` bytes. `key` is unique among all events.

    `is_score` says whether attention keeps the storage for its backward pass.
    """

    key: int
    size: int
    is_score: bool


class Freed(NamedTuple):
    """Event of a trace: the storage with this key is freed."""

    key: int


class Complete(NamedTuple):
    """Event of a trace: the gradient of a parameter is complete. It has `length` values, and its storage is freed
    afterwards."""

    key: int
    length: int


Event = Made | Freed | Complete


class Trace(NamedTuple):
    """Record of the allocations of one forward and backward pass. `replay` computes the peak from it."""

    events: tuple[Event, ...]
    """Allocations, releases and complete gradients, in the order of the step."""
    num_values: int
    """Number of values of all parameters, including padding for alignment."""
    gathered_bytes: float
    """Bytes of the weights that a rank has gathered at once at stage 3."""
    value_bytes: int
    """Bytes of one value of a gradient."""
    on_gpu: bool


@lru_cache(maxsize=16)
def follow(step: MicroStep) -> Trace:
    """Trace a forward and backward pass on tensors without storage. Nothing is allocated.

    Each gradient is dropped when it is complete.
    """
    with ExitStack() as stack:
        stack.enter_context(_without_storage(step.model))
        stack.enter_context(_default_dtype(step.dtype))
        if step.on_gpu:
            stack.enter_context(_as_on_gpu(step))
        model = TransformerXL(
            step.model,
            vocab_size=step.vocab_size,
            recompute_every=step.recompute_every,
            attention="plain" if step.attention == "plain" else "fused",
            memory_lens=step.memory_lens,
        )
        if step.pads_widths:
            pad_widths(model)
        events = _Events()
        for block in model.blocks:
            _watch_scores(block.attention, events, step)
        memory = model.empty_memory(num_lanes=step.lanes, memory_len=step.memory_len)
        batch = _batch(model, step)
        module: nn.Module = SegmentLoss(model)
        if step.is_flat:
            module = FlatModule(module, prefix="model.")
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(events.complete)
        events.ignore(tree_iter((list(module.parameters()), list(module.buffers()), memory, batch)))
        with events:
            loss, _ = module(batch, memory, 1.0)
            loss.backward()
        num_values = sum(parameter.numel() for parameter in module.parameters())
        # The new memory is alive at the end.
        return Trace(tuple(events.noted), num_values, _gathered_bytes(model), step.dtype.itemsize, step.on_gpu)


def _uses_kernels(step: MicroStep) -> bool:
    """Return whether the Triton kernels compute attention in this step."""
    if step.attention not in ("auto", "triton") or not step.on_gpu:
        return False
    model = step.model
    reason = unsupported_shape_reason(
        step.dtype,
        head_width=model.head_width,
        has_position_bias=model.scheme.has_position_bias,
        # With "triton" txl plan asks for the storages of the kernels, also where the kernels cannot run.
        in_any_order=model.any_order and step.attention == "auto",
    )
    return reason is None


def _watch_scores(attention: Any, events: _Events, step: MicroStep) -> None:
    """Make `events` mark as scores the storages that an attention layer allocates. If the step uses the Triton kernels,
    the layer's function is replaced by a function that allocates the same storages as the kernels."""
    if not _uses_kernels(step):
        attention.attend = events.as_scores(attention.attend)
        return
    uses_products = attention.uses_products
    attention.attend = events.as_scores(partial(_KernelLike.attend, keeps_scores=step.keeps_scores))
    attention.supports_fused_qkv = lambda hidden: uses_products
    attention.attend_fused_qkv = events.as_scores(partial(_KernelLike.attend_fused_qkv, keeps_scores=step.keeps_scores))


def replay(trace: Trace, *, exchange: Exchange, num_owners: int = 1) -> Peak:
    """Compute the peak memory of a trace. `exchange` says what happens to each complete gradient (see `Exchange`).

    Sharded gradients are divided among `num_owners` ranks, and a rank keeps its part of these gradients. The prediction
    is for the rank whose part is exchanged first, which is the worst case. At stage 3 the part is in a buffer that
    exists from the start, so the part is not counted.
    """
    live = _Sum()
    alive: dict[int, Made] = {}
    kept: set[int] = set()
    size = trace.value_bytes
    stays = exchange == "stays"
    if exchange == "gathered":
        live.add(trace.gathered_bytes)
    # gloo's reduce-scatter, which stage 3 calls, copies its input; its reduce does not.
    if exchange == "gathered" and not trace.on_gpu:
        num_copies = 2
    else:
        num_copies = 1
    if exchange == "sharded":
        local_left = trace.num_values / num_owners
    else:
        local_left = 0.0
    filled = 0

    def flush() -> None:
        nonlocal filled, local_left
        copies = num_copies * filled * size
        live.add(copies)
        live.add(-copies)
        local = min(filled, local_left)
        live.add(local * size)
        local_left -= local
        filled = 0

    for event in trace.events:
        match event:
            case Made(key, bytes_made, is_score):
                alive[key] = event
                live.add(bytes_made, is_large=bytes_made >= MAPPED_BYTES, is_score=is_score)
            case Freed(key) if key not in kept:
                _, bytes_made, is_score = alive.pop(key)
                live.add(-bytes_made, is_large=bytes_made >= MAPPED_BYTES, is_score=is_score)
            case Complete(key, length) if stays:
                kept.add(key)
            case Complete(key, length) if exchange in ("sharded", "added", "gathered"):
                if filled + length > BUCKET_LEN:
                    flush()
                filled += length
    if exchange in ("sharded", "added", "gathered"):
        flush()
    return live.peak


class _Sum:
    """Counter of the bytes that are alive now, and of the largest number so far."""

    def __init__(self) -> None:
        self.large = self.small = self.scores = 0.0
        self.peak = Peak(0.0, 0.0, 0.0, 0.0)

    def add(self, size: float, *, is_large: bool = True, is_score: bool = False) -> None:
        """Add bytes that are allocated. A negative size means that they are freed."""
        if is_large:
            self.large += size
        else:
            self.small += size
        if is_score:
            self.scores += size
        if size > 0:
            alive, scores, large, small = self.peak
            if self.large + self.small > alive:
                alive = self.large + self.small
                scores = self.scores
            self.peak = Peak(alive, scores, max(large, self.large), max(small, self.small))


class _Events(TorchDispatchMode):
    """Recorder of the storages that operations allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[Event] = []
        self._keys: dict[int, int] = {}
        """Keys of the storages that are alive, by their address."""
        self._next_key = 0
        self._makes_scores = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and isinstance(args[1], Tensor) and args[0].layout != args[1].layout:
            result = torch.empty_like(args[0] if _has_storage(args[0]) else args[1])  # meta lacks dense + sparse
        else:
            result = func(*args, **(kwargs or {}))
        values = (result,) if isinstance(result, Tensor) else tree_iter(result)
        for value in values:
            if not _has_storage(value):
                continue
            storage = value.untyped_storage()
            if storage._cdata not in self._keys:
                self._note(storage)
        return result

    def as_scores(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function that calls `attend`, and marks as scores the storages that are made during the call."""

        def called(*arguments: Any, **named: Any) -> Tensor:
            self._makes_scores = True
            try:
                return attend(*arguments, **named)
            finally:
                self._makes_scores = False

        return called

    def ignore(self, existing: Iterable[object]) -> None:
        """Register the storages that existed before the step, so that they are not counted."""
        for value in existing:
            if _has_storage(value):
                self._keys[value.untyped_storage()._cdata] = -1

    def complete(self, parameter: Tensor) -> None:
        """Note that the gradient of a parameter is complete, and drop it."""
        assert parameter.grad is not None
        key = self._keys[parameter.grad.untyped_storage()._cdata]
        self.noted.append(Complete(key, parameter.numel()))
        parameter.grad = None

    def _note(self, storage: torch.UntypedStorage) -> None:
        place = storage._cdata
        key = self._next_key
        self._next_key += 1
        self._keys[place] = key
        self.noted.append(Made(key, storage.nbytes(), self._makes_scores))
        weakref.finalize(storage, self._forget, place, key)

    def _forget(self, place: int, key: int) -> None:
        del self._keys[place]
        self.noted.append(Freed(key))


def _gathered_bytes(model: TransformerXL) -> float:
    """Return the bytes of the weights that a rank has gathered at once at stage 3.

    A block is gathered into a flat tensor and copied out of it, so its weights count twice.
    """
    in_blocks = {id(parameter) for parameter in model.blocks.parameters()}
    others = 0
    for parameter in model.parameters():
        if id(parameter) not in in_blocks and parameter.numel() > PERSISTENT_LEN:
            others += parameter.nbytes
    block = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    return float(2 * block + others)


@contextmanager
def _without_storage(model: ModelSection) -> Iterator[None]:
    """Return a context manager in whose block new tensors have no storage.

    They are meta tensors, or fake tensors if torch itself computes attention. Fake tensors take four times as long. But
    torch chooses its attention function by the device of the tensors. For meta tensors torch would choose a function
    that keeps the scores.
    """
    calls_torch = not model.scheme.has_distance_terms
    if calls_torch:
        with FakeTensorMode(), torch.device("cpu"):
            yield
    else:
        with torch.device("meta"):
            yield


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Return a context manager that sets torch's default type, so that parameters have this type from the start.
    Otherwise they would have to be converted, but fake tensors cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _as_on_gpu(step: MicroStep) -> Iterator[None]:
    """Return a context manager in whose block the model allocates as on a GPU, although it has no storage on a GPU.

    fused_softmax   logits are computed in chunks as large as on a GPU
    dropout         torch draws the masks
    rows            the row-wise Triton kernels allocate their results, but are not started
    """
    with ExitStack() as stack:
        for size_by_device in (fused_softmax.CHUNK_ROWS, fused_softmax.CHUNK_LOGITS, fused_softmax.CACHED_LOGITS):
            stack.callback(size_by_device.__setitem__, "cpu", size_by_device["cpu"])
            size_by_device["cpu"] = size_by_device["cuda"]
        stack.enter_context(_replaced(dropout, "torch_draws", lambda x: True))
        stack.enter_context(_replaced(rows, "runs", lambda setting, x: rows.fits(step.attention, x)))
        stack.enter_context(_replaced(rows, "start", lambda *arguments, **constants: None))
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Return a context manager that replaces a function of a module during its block."""
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


class _KernelLike(torch.autograd.Function):
    """Substitute for the Triton kernels. It allocates and keeps the same storages as the kernels."""

    @staticmethod
    def attend(terms: Terms, *, visible: AttentionMask, keeps_scores: bool) -> Tensor:
        """Allocate the result of attention and return it. This function is called in place of `Attention.attend`."""
        key_value = torch.stack([terms.key_BKNH, terms.value_BKNH], 2)
        context: Tensor = _KernelLike.apply(  # type: ignore[no-untyped-call]
            visible.num_keys, keeps_scores, terms.query_BTNH.unsqueeze(2), key_value, terms.distance_KNH
        )
        return context

    @staticmethod
    def attend_fused_qkv(
        segment: Tensor, past: Tensor, *, distance_KNH: Tensor, visible: AttentionMask, keeps_scores: bool
    ) -> Tensor:
        """Allocate the result of attention and return it. This function is called in place of
        `Attention.attend_fused_qkv`."""
        context: Tensor = _KernelLike.apply(  # type: ignore[no-untyped-call]
            visible.num_keys, keeps_scores, segment, past, distance_KNH
        )
        return context

    @staticmethod
    def forward(ctx: Any, num_keys: int, keeps_scores: bool, segment: Tensor, keys: Tensor, distance: Tensor) -> Tensor:
        query = segment[:, :, 0]
        context = query.new_empty(query.shape)
        scores = _score_buffer(query, num_keys, holds_all=keeps_scores)
        normalizers = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(segment, keys, distance, context, normalizers, scores if keeps_scores else None)
        ctx.num_keys = num_keys
        return context

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        segment, keys, distance, context, _, kept_scores = ctx.saved_tensors
        # Queries with either bias, the scores of a chunk, and eight sums of the distances' gradient in fp32.
        _queries = torch.empty_like(context), torch.empty_like(context)
        _scores = _score_buffer(context, ctx.num_keys) if kept_scores is None else kept_scores
        _sums = distance.new_empty(8, *distance.shape, dtype=torch.float32)
        return None, None, *(torch.empty_like(tensor) for tensor in (segment, keys, distance))


def _score_buffer(query_BTNH: Tensor, num_keys: int, *, holds_all: bool = False) -> Tensor:
    """Return a buffer of scores as large as the buffer that the kernels use. The size of this buffer has an upper
    limit, unless the buffer `holds_all` scores of the layer."""
    num_queries = query_BTNH[..., 0].numel()
    padded_keys = -(-num_keys // 16) * 16
    length = num_queries * padded_keys
    if not holds_all:
        length = min(length, SCORE_BUFFER_BYTES // query_BTNH.element_size())
    return query_BTNH.new_empty(length)


def _batch(model: TransformerXL, step: MicroStep) -> Batch:
    """Return a batch of ids without storage. The sizes of its cluster partitions follow from `step.cluster_shares`."""
    shape = (step.lanes, step.segment_len)
    num_tokens = step.lanes * step.segment_len
    multiple = ROWS_MULTIPLE["cuda" if step.on_gpu else "cpu"]
    order = None
    target_shape = shape
    if step.num_targets:
        target_shape = (step.lanes, step.num_targets)
        level_BT = torch.empty(shape, dtype=torch.int64)
        place_Bm = torch.empty(target_shape, dtype=torch.int64)
        order = PredictionOrder(level_BT, level_BT, place_Bm, step.step_len)

    def partition(num_clusters: int, *, num_tokens: int = num_tokens) -> tuple[ClusterRows, ...] | None:
        if num_clusters == 1:
            return None
        counts = [int(num_tokens * share) for share in step.cluster_shares]
        if step.for_graphs:
            sizes = sizes_for(counts, edges=model.softmax.edges, num_tokens=num_tokens)
        else:
            sizes = tuple(multiple * max(1, -(-count // multiple)) for count in counts)
        clusters = []
        for size in sizes:
            positions = torch.empty(size, dtype=torch.int64)
            ids = torch.empty(size, dtype=torch.int64)
            clusters.append(ClusterRows(positions, ids))
        return tuple(clusters)

    ids_BT = torch.empty(shape, dtype=torch.int64)
    return Batch(
        tokens_BT=ids_BT,
        targets_BT=torch.empty(target_shape, dtype=torch.int64),
        scored_BT=torch.empty(target_shape, dtype=torch.float32),
        document_BT=None,
        token_partition=partition(len(model.embedding.edges) - 1),
        target_partition=partition(len(model.softmax.edges) - 1, num_tokens=step.lanes * target_shape[1]),
        order=order,
    )


def _has_storage(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a dense tensor. For a sparse tensor the result is False, because its parts are dense
    tensors that were already counted."""
    return isinstance(value, Tensor) and value.layout == torch.strided
