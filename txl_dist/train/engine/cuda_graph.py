"""Forward, loss and backward of a micro-batch as one CUDA graph: what the host says once, the GPU repeats.

A small model's micro-step is a thousand kernels that a GPU finishes faster than Python can name them. Shapes are static
here (memory too, from the first step), so a micro-step is recorded once per shape and then replayed: copy the inputs
into the recorded ones, launch, and hand the recorded gradients to autograd. For that the loss leaves `GraphedModule`
with a backward that only gives these gradients: DeepSpeed's hooks and buckets see what they always see.

The clusters of the adaptive softmax have few sizes (`text.clusters.size_ladder`), each of which is a graph of its own,
up to `MAX_GRAPHS`, beyond which a micro-step runs without; so does any new one once a recording found no memory.
Dropout stays a function of the seed: a replay begins with the state that the default generator has then.

All graphs share one set of inputs, results and gradients: those of the first one, into which the others copy theirs. So
one more graph holds little memory of its own, and the shape that is met first, as a rule the most frequent one, needs
no copy.

What it gives up: the memory that a micro-step needs stays reserved. Not for ZeRO-3, whose hooks gather weights within
the micro-step, nor with activation checkpointing, which asks for the state of the generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from txl_dist.console.logging import logger

MAX_GRAPHS = 16
WARM_UPS = 3
"""Runs before the recording, in which libraries choose and allocate what they will use."""

Recorder = Callable[[Callable[[], Any]], Callable[[], None]]
"""Given a function without arguments: record what it launches, and return what launches it again."""


class _Graph(NamedTuple):
    inputs: list[Tensor]
    outputs: list[Tensor]
    """Loss, then the memory; then a gradient per parameter."""
    spec: Any
    """How loss and memory were nested."""
    replay: Callable[[], None]


class GraphedModule(nn.Module):
    """A module whose training calls are replayed. It returns a scalar loss first, and then tensors without gradient."""

    def __init__(self, module: nn.Module, *, scale: Callable[[], float], record: Recorder | None = None) -> None:
        """`scale` is what the loss will be multiplied by before the backward pass."""
        super().__init__()
        self.module = module
        # One pool of memory will do: recordings run one after the other, and what they give is kept.
        pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        self._scale, self._record = scale, record or functools.partial(record_on_gpu, pool=pool)
        self._is_full = False
        self._graphs: dict[Any, _Graph] = {}
        self._inputs: dict[Any, Tensor] = {}
        self._outputs: dict[Any, Tensor] = {}
        """By place, shape and type: what all graphs share."""

    def forward(self, *arguments: Any) -> Any:
        """What the module gives."""
        values, spec = tree_flatten(arguments)
        key = (spec, *(_signature(value) for value in values))
        is_known = key in self._graphs
        if not self.training or not torch.is_grad_enabled():
            return self.module(*arguments)
        if not is_known and (self._is_full or len(self._graphs) >= MAX_GRAPHS):
            if not self._is_full:
                logger.warning("engine.cuda_graph: more than %d shapes; other ones run without a graph", MAX_GRAPHS)
            self._is_full = True
            return self.module(*arguments)
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        scale = torch.full((), self._scale(), dtype=torch.float32, device=parameters[0].device)
        inputs = [value for value in values if isinstance(value, Tensor)] + [scale]
        if not is_known:
            try:
                self._graphs[key] = self._recorded(values, spec, inputs, parameters)
            except RuntimeError as error:
                if not _ran_out_of_memory(error):
                    raise
                self._is_full = True
                logger.warning("engine.cuda_graph: no memory for another shape; such ones run without a graph")
        if key not in self._graphs:  # behind the handler, whose error holds what the recording has made
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return self.module(*arguments)
        graph = self._graphs[key]
        _copy(graph.inputs, inputs)
        graph.replay()
        results = graph.outputs[: -len(parameters)]
        gradients = graph.outputs[-len(parameters) :]
        # The next replay writes over them.
        loss, *rest = kept = [torch.empty_like(result) for result in results]
        _copy(kept, results)
        return tree_unflatten([_Delivered.apply(loss, gradients, *parameters), *rest], graph.spec)  # type: ignore[no-untyped-call]

    def _recorded(self, values: list[Any], spec: Any, inputs: list[Tensor], parameters: Sequence[Tensor]) -> _Graph:
        for place, value in zip(_places(inputs), inputs, strict=True):
            if place not in self._inputs:
                self._inputs[place] = torch.empty_like(value)
        static = [self._inputs[place] for place in _places(inputs)]
        torch._foreach_copy_(static, inputs)
        of_tensors = iter(static)
        arguments = tree_unflatten([next(of_tensors) if isinstance(v, Tensor) else v for v in values], spec)
        scale = static[-1]
        outputs: list[Tensor] = []
        specs: list[Any] = []

        def micro_step() -> None:
            results, result_spec = tree_flatten(self.module(*arguments))
            gradients = torch.autograd.grad(results[0] * scale, parameters)
            made = [*(result.detach() for result in results), *gradients]
            outputs[:] = [self._outputs.get(place, value) for place, value in zip(_places(made), made, strict=True)]
            copied = [(shared, own) for shared, own in zip(outputs, made, strict=True) if shared is not own]
            _copy([shared for shared, _ in copied], [own for _, own in copied])
            specs[:] = [result_spec]

        devices = [scale.device] if scale.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # what follows draws as if nothing had been recorded
            replay = self._record(micro_step)
        self._outputs |= dict(zip(_places(outputs), outputs, strict=True))
        return _Graph(static, outputs, specs[0], replay)


def record_on_gpu(run: Callable[[], Any], *, pool: Any = None) -> Callable[[], None]:
    """Record a function on the current GPU, with memory from a pool that recordings may share."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # The reader thread goes on pinning memory meanwhile, which may not make this recording fail.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    return graph.replay


def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """In a few launches: one copies tensors of one type."""
    for dtype in {value.dtype for value in values}:
        pairs = [pair for pair in zip(into, values, strict=True) if pair[1].dtype == dtype]
        torch._foreach_copy_([place for place, _ in pairs], [value for _, value in pairs])


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Also where CUDA, ending the recording that this broke off, raised another error."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or _ran_out_of_memory(error.__context__))


def _signature(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else value


def _places(values: Sequence[Tensor]) -> list[Any]:
    return [(index, _signature(value)) for index, value in enumerate(values)]


class _Delivered(torch.autograd.Function):
    """The loss, whose gradients are known already; they hold the scale that the loss will be multiplied by."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.gradients
