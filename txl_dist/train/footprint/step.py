"""Bytes alive in forward and backward of one micro-batch, followed on tensors without storage.

The step itself runs on torch's meta tensors, so no formula has to follow the code. Around it lies what DeepSpeed does
with each gradient: kept to the end (`stays`), or put into a bucket of `BUCKET_LEN` that is exchanged when it is full,
behind a flat copy of it, while the backward pass goes on (`sharded` at stage 2, `gathered` at stage 3). At stage 3 also
the weights count that are gathered: those of one block and those of none.

    follow   runs the step and notes each storage that is made or freed, each gradient that is complete; slow, kept
    replay   adds the bytes up, by what becomes of the gradients; so stages share what was followed

Two pools are added up apart, as the C library has them (`allocator`): large storages go back when freed, small ones
stay in its heap. The Triton kernels do not run here. Those of rows are left out between what they are given and what
they make; for attention stands something that keeps what its kernels keep.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
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
from txl_dist.model.kernels.launch import SCORE_BUFFER_BYTES, unsupported_shape_reason
from txl_dist.model.memory import AttentionMask
from txl_dist.model.relative_attention import Terms
from txl_dist.model.transformer_xl import Batch, SegmentLoss, TransformerXL
from txl_dist.train.engine.deepspeed_config import BUCKET_LEN, PERSISTENT_LEN
from txl_dist.train.engine.flat import FlatModule
from txl_dist.vocabulary_clusters import ClusterRows, sizes_for

Exchange = Literal["stays", "dropped", "sharded", "added", "gathered"]
"""What becomes of a gradient. dropped: it is added to others, which the caller counts; added: that, once exchanged."""


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
    on_gpu: bool
    for_graphs: bool = False
    """Batches have few different shapes (`text.clusters.size_ladder`)."""
    memory_lens: tuple[int, ...] = ()


class Peak(NamedTuple):
    """Most bytes alive at once, besides parameters, buckets and the memory given."""

    alive: float
    scores: float
    """What attention keeps for the backward pass, scores foremost, at that time."""
    large: float
    """The most of the large storages alone."""
    small: float
    """The most of the small ones alone."""


class Made(NamedTuple):
    """A storage; `key` is its own among all events."""

    key: int
    size: int
    is_score: bool


class Freed(NamedTuple):
    """A storage that was made before."""

    key: int


class Complete(NamedTuple):
    """The gradient of a parameter, in a storage that is freed thereafter."""

    key: int
    length: int


Event = Made | Freed | Complete


class Trace(NamedTuple):
    """A step that was followed."""

    events: tuple[Event, ...]
    num_values: int
    """Of all parameters, alignment included."""
    gathered_bytes: float
    """Of weights that a rank has whole at stage 3."""
    value_bytes: int
    on_gpu: bool


@lru_cache(maxsize=16)
def follow(step: MicroStep) -> Trace:
    """Run a step whose gradients are dropped when they are complete. Allocates nothing."""
    has_position_bias = step.model.scheme.has_position_bias
    shape_reason = unsupported_shape_reason(
        step.dtype, head_width=step.model.head_width, has_position_bias=has_position_bias
    )
    uses_kernels = step.attention in ("auto", "triton") and step.on_gpu and shape_reason is None
    with _without_storage(step.model), _made_in(step.dtype), _as_on_gpu(step) if step.on_gpu else nullcontext():
        model = TransformerXL(
            step.model,
            vocab_size=step.vocab_size,
            recompute_every=step.recompute_every,
            attention="plain" if step.attention == "plain" else "fused",
            memory_lens=step.memory_lens,
        )
        events = _Events()
        for block in model.blocks:
            attention: Any = block.attention
            attention.attend = events.as_scores(_KernelLike.attend if uses_kernels else attention.attend)
            if uses_kernels:
                attention.supports_fused_qkv = lambda hidden, takes=attention.uses_products: takes
                attention.attend_fused_qkv = events.as_scores(_KernelLike.attend_fused_qkv)
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


def replay(trace: Trace, *, exchange: Exchange, num_owners: int = 1) -> Peak:
    """Add the bytes up. Gradients are cut up for `num_owners` ranks where they are sharded.

    A rank keeps its part of the gradients, those exchanged first at worst. At stage 3 that is a buffer which is there
    from the start, so it is not counted.
    """
    live, alive, size = _Sum(), dict[int, Made](), trace.value_bytes
    stays = exchange == "stays"
    if exchange == "gathered":
        live.add(trace.gathered_bytes)
    # gloo's reduce-scatter, which stage 3 calls, takes a copy of what it is given; its reduce does not.
    num_copies = 2 if exchange == "gathered" and not trace.on_gpu else 1
    own_left = trace.num_values / num_owners if exchange == "sharded" else 0.0
    filled, kept = 0, set[int]()

    def flush() -> None:
        nonlocal filled, own_left
        copies = num_copies * filled * size
        live.add(copies)
        live.add(-copies)
        own = min(filled, own_left)
        live.add(own * size)
        own_left -= own
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
    """Bytes alive, and the most of them so far."""

    def __init__(self) -> None:
        self.large = self.small = self.scores = 0.0
        self.peak = Peak(0.0, 0.0, 0.0, 0.0)

    def add(self, size: float, *, is_large: bool = True, is_score: bool = False) -> None:
        """So many bytes more; negative if less."""
        if is_large:
            self.large += size
        else:
            self.small += size
        if is_score:
            self.scores += size
        if size > 0:
            alive, scores, large, small = self.peak
            if self.large + self.small > alive:
                alive, scores = self.large + self.small, self.scores
            self.peak = Peak(alive, scores, max(large, self.large), max(small, self.small))


class _Events(TorchDispatchMode):
    """Notes the storages that operations make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[Event] = []
        self._keys: dict[int, int] = {}
        """Of the storages that are alive, by where torch has them."""
        self._next_key = 0
        self._makes_scores = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and isinstance(args[1], Tensor) and args[0].layout != args[1].layout:
            result = torch.empty_like(args[0] if _has_storage(args[0]) else args[1])  # meta lacks dense + sparse
        else:
            result = func(*args, **(kwargs or {}))
        for value in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if _has_storage(value) and (storage := value.untyped_storage())._cdata not in self._keys:
                self._note(storage)
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

    def ignore(self, given: Iterable[object]) -> None:
        """What was there before."""
        for value in given:
            if _has_storage(value):
                self._keys[value.untyped_storage()._cdata] = -1

    def complete(self, parameter: Tensor) -> None:
        """The gradient of a parameter: note and drop it."""
        assert parameter.grad is not None
        key = self._keys[parameter.grad.untyped_storage()._cdata]
        self.noted.append(Complete(key, parameter.numel()))
        parameter.grad = None

    def _note(self, storage: torch.UntypedStorage) -> None:
        place, key = storage._cdata, self._next_key
        self._next_key += 1
        self._keys[place] = key
        self.noted.append(Made(key, storage.nbytes(), self._makes_scores))
        weakref.finalize(storage, self._forget, place, key)

    def _forget(self, place: int, key: int) -> None:
        del self._keys[place]
        self.noted.append(Freed(key))


def _gathered_bytes(model: TransformerXL) -> float:
    """Stage 3: the weights that a rank has whole. A block is gathered into a flat tensor, and copied out of it."""
    of_blocks = {id(parameter) for parameter in model.blocks.parameters()}
    others = (p.nbytes for p in model.parameters() if id(p) not in of_blocks and p.numel() > PERSISTENT_LEN)
    return float(2 * sum(p.nbytes for p in model.blocks[0].parameters()) + sum(others))


@contextmanager
def _without_storage(model: ModelSection) -> Iterator[None]:
    """Meta tensors, or fake ones, which take four times as long, where torch chooses the function by the device: its
    own attention would keep the scores of meta tensors."""
    calls_torch = not model.scheme.has_distance_terms
    with FakeTensorMode() if calls_torch else nullcontext(), torch.device("cpu" if calls_torch else "meta"):
        yield


@contextmanager
def _made_in(dtype: torch.dtype) -> Iterator[None]:
    """Parameters in that type from the start: fake ones cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _as_on_gpu(step: MicroStep) -> Iterator[None]:
    """Logits in as large chunks as on a GPU, torch's dropout, and what the kernels of rows make, though not by them:
    tensors without storage are on none."""
    sizes = (fused_softmax.CHUNK_ROWS, fused_softmax.CHUNK_LOGITS, fused_softmax.CACHED_LOGITS)
    before, draws, runs, start = [size["cpu"] for size in sizes], dropout.torch_draws, rows.runs, rows.start
    try:
        for size in sizes:
            size["cpu"] = size["cuda"]
        dropout.torch_draws = lambda x: True
        rows.runs = lambda setting, x: rows.fits(step.attention, x)
        rows.start = lambda *arguments, **constants: None
        yield
    finally:
        dropout.torch_draws, rows.runs, rows.start = draws, runs, start
        for size, value in zip(sizes, before, strict=True):
            size["cpu"] = value


class _KernelLike(torch.autograd.Function):
    """Makes what the Triton kernels make, and keeps what they keep for the backward pass."""

    @staticmethod
    def attend(terms: Terms, *, visible: AttentionMask) -> Tensor:
        """Called as `Attention.attend`."""
        key_value = torch.stack([terms.key_BKNH, terms.value_BKNH], 2)
        context: Tensor = _KernelLike.apply(  # type: ignore[no-untyped-call]
            visible.num_keys, terms.query_BTNH.unsqueeze(2), key_value, terms.distance_KNH
        )
        return context

    @staticmethod
    def attend_fused_qkv(segment: Tensor, past: Tensor, *, distance_KNH: Tensor, visible: AttentionMask) -> Tensor:
        """Called as `Attention.attend_fused_qkv`."""
        context: Tensor = _KernelLike.apply(  # type: ignore[no-untyped-call]
            visible.num_keys, segment, past, distance_KNH
        )
        return context

    @staticmethod
    def forward(ctx: Any, num_keys: int, segment: Tensor, keys: Tensor, distance: Tensor) -> Tensor:
        query = segment[:, :, 0]
        context, _scores = query.new_empty(query.shape), _score_buffer(query, num_keys)
        normalizers = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(segment, keys, distance, context, normalizers)
        ctx.num_keys = num_keys
        return context

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        segment, keys, distance, context, _ = ctx.saved_tensors
        # Queries with either bias, the scores of a chunk, and eight sums of the distances' gradient in fp32.
        _temporary = torch.empty_like(context), torch.empty_like(context), _score_buffer(context, ctx.num_keys)
        _sums = distance.new_empty(8, *distance.shape, dtype=torch.float32)
        return None, *(torch.empty_like(tensor) for tensor in (segment, keys, distance))


def _score_buffer(query_BTNH: Tensor, num_keys: int) -> Tensor:
    rows = query_BTNH[..., 0].numel()
    length = min(rows * -(-num_keys // 16) * 16, SCORE_BUFFER_BYTES // query_BTNH.element_size())
    return query_BTNH.new_empty(length)


def _batch(model: TransformerXL, step: MicroStep) -> Batch:
    """Ids without values, and partitions of the size that these shares make."""
    shape, num_tokens = (step.lanes, step.segment_len), step.lanes * step.segment_len
    counts = [int(num_tokens * share) for share in step.cluster_shares]
    multiple = ROWS_MULTIPLE["cuda" if step.on_gpu else "cpu"]

    def partition(num_clusters: int) -> tuple[ClusterRows, ...] | None:
        if num_clusters == 1:
            return None
        if step.for_graphs:
            sizes = sizes_for(counts, edges=model.softmax.edges, num_tokens=num_tokens)
        else:
            sizes = tuple(multiple * max(1, -(-count // multiple)) for count in counts)
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
