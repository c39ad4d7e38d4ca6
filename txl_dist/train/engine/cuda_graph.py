"""Forward, loss and backward of a micro-batch as one CUDA graph, recorded once per shape and then replayed.

A micro-step of a small model is about a thousand kernels, which a GPU runs faster than Python can launch them. A replay
copies the inputs into the recorded inputs, launches the graph, and passes the recorded gradients to autograd. The
loss that `GraphedModule` returns has its own backward pass, which only returns these gradients. So DeepSpeed's hooks
and buckets work as usual. Dropout stays a function of the seed: a replay starts from the current state of the default
generator.

Shapes are static, except that clusters of the adaptive softmax have a few sizes (`vocabulary_clusters.size_ladder`).
Each shape gets a graph of its own, up to `MAX_GRAPHS` graphs. Further shapes run without a graph, and so does any new
shape after a recording ran out of memory. All graphs share the inputs, results and gradients of the first graph, so
each further graph needs little memory. The first shape, which is usually the most frequent shape, needs no extra copy.

The memory (hidden states) that a replay returns is not copied. Its tensors share the storage of the recorded results,
until the next call copies them into the recorded inputs. From then on they share the storage of these inputs, so a
skipped step finds the memory before it. A memory that the caller holds for longer is moved to a storage of its own.

    micro-batches per step   copies of a memory per micro-batch
    1                        1, into the recorded inputs
    2 or more                2, because the next micro-batch overwrites the recorded results

A memory that is not as long as the segment is written once more, by the model itself (`Memory.append`).

Limitations: the memory of a micro-step stays reserved. CUDA graphs do not work with ZeRO-3, whose hooks gather weights
within the micro-step. CUDA graphs do not work with activation checkpointing either, because it reads the state of the
generator.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from txl_dist.console.logging import logger
from txl_dist.errors import first_line

MAX_GRAPHS = 16
"""Maximum number of graphs. Each shape of a micro-batch needs its own graph."""
WARM_UPS = 3
"""Number of times that a function runs before it is recorded. In these runs libraries choose kernels and allocate
workspaces."""

Recorder = Callable[[Callable[[], Any]], Callable[[], None]]
"""Function that records the kernels that its argument launches. It returns a function that launches these kernels
again."""


class _Graph(NamedTuple):
    """Recorded forward and backward pass of one micro-batch, for one shape."""

    outputs: list[Tensor]
    """Loss, then the tensors of the memory, then one gradient per parameter."""
    spec: Any
    """Structure of the result (loss and memory), as a pytree specification of torch. From it the flat outputs are put
    together again."""
    replay: Callable[[], None]
    """Function that launches the graph."""


class GraphedModule(nn.Module):
    """Wrapper of a module whose training calls are recorded once per shape and then replayed.

    The module must return a scalar loss first, then new tensors that need no gradient. These tensors keep their values,
    but views of them are overwritten by later calls.
    """

    def __init__(self, module: nn.Module, *, scale: Callable[[], float], record: Recorder | None = None) -> None:
        """Wrap a module. `record` makes the recordings, by default with `record_on_gpu`.

        `scale` returns the factor by which the loss will be multiplied before the backward pass.
        """
        super().__init__()
        self.module = module
        # One pool of memory is enough: recordings run one after the other, and their results are kept.
        if torch.cuda.is_available():
            pool = torch.cuda.graph_pool_handle()
        else:
            pool = None
        self._scale = scale
        self._record = record or functools.partial(record_on_gpu, pool=pool)
        self._is_full = False
        self._graphs: dict[Any, _Graph] = {}
        self._inputs: dict[Any, Tensor] = {}
        """Tensors that the graphs read, by position, shape and type."""
        self._outputs: dict[Any, Tensor] = {}
        """Results and gradients that all graphs share, by position, shape and type."""
        self._lent: list[weakref.ref[Tensor]] = []
        """Returned tensors that share the storage of recorded results or inputs."""

    def forward(self, *arguments: Any) -> Any:
        """Return the module's result. In training the recording for this shape is replayed. In evaluation the module
        itself is called."""
        values, spec = tree_flatten(arguments)
        key = (spec, *(_signature(value) for value in values))
        is_known = key in self._graphs
        if not self.training or not torch.is_grad_enabled():
            return self.module(*arguments)
        if not is_known and (self._is_full or len(self._graphs) >= MAX_GRAPHS):
            if not self._is_full:
                logger.warning(
                    "engine.cuda_graph: micro-batches have more than %d shapes. Micro-batches of other shapes run "
                    "without a CUDA graph",
                    MAX_GRAPHS,
                )
            self._is_full = True
            return self.module(*arguments)
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        scale = torch.full((), self._scale(), dtype=torch.float32, device=parameters[0].device)
        inputs = [value for value in values if isinstance(value, Tensor)] + [scale]
        static = self._copy_inputs(inputs)
        if not is_known:
            try:
                self._graphs[key] = self._recorded(values, spec, static, parameters)
            except RuntimeError as error:
                if not _ran_out_of_memory(error):
                    raise
                self._is_full = True
                logger.warning(
                    "engine.cuda_graph: GPU memory has no room for another CUDA graph. Micro-batches of other shapes "
                    "run without a CUDA graph"
                )
        if key not in self._graphs:  # after the handler, whose error keeps the recording's tensors alive
            _free_cached_memory()
            return self.module(*arguments)
        graph = self._graphs[key]
        graph.replay()
        loss, *rest = graph.outputs[: -len(parameters)]
        gradients = graph.outputs[-len(parameters) :]
        lent = [result.detach() for result in rest]
        self._lent += map(weakref.ref, lent)
        return tree_unflatten([_Delivered.apply(loss, gradients, *parameters), *lent], graph.spec)  # type: ignore[no-untyped-call]

    def _copy_inputs(self, inputs: list[Tensor]) -> list[Tensor]:
        """Copy the inputs of a call into the recorded inputs, and return the recorded inputs.

        Lent tensors that the caller still holds keep their values: inputs of this call now share the storage of the
        recorded inputs. All others get a storage of their own, because the replay will overwrite theirs.
        """
        for place, value in zip(_places(inputs), inputs, strict=True):
            if place not in self._inputs:
                self._inputs[place] = torch.empty_like(value)
        static = [self._inputs[place] for place in _places(inputs)]
        static_by_input = {id(value): place for value, place in zip(inputs, static, strict=True)}
        lent = [tensor for reference in self._lent if (tensor := reference()) is not None]
        returned = [tensor for tensor in lent if id(tensor) in static_by_input]
        held = [tensor for tensor in lent if id(tensor) not in static_by_input]
        copies = [torch.empty_like(tensor) for tensor in held]
        _copy(copies, held)
        _copy(static, inputs)
        for tensor, copied in zip(held, copies, strict=True):
            tensor.data = copied
        for tensor in returned:
            tensor.data = static_by_input[id(tensor)]
        self._lent = [weakref.ref(tensor) for tensor in returned]
        return static

    def _recorded(self, values: list[Any], spec: Any, static: list[Tensor], parameters: Sequence[Tensor]) -> _Graph:
        """Record forward and backward pass for inputs of a new shape, and return the graph. `static` are the recorded
        inputs. Raises RuntimeError if memory runs out."""
        static_inputs = iter(static)
        arguments = tree_unflatten([next(static_inputs) if isinstance(v, Tensor) else v for v in values], spec)
        scale = static[-1]
        outputs: list[Tensor] = []
        specs: list[Any] = []

        def micro_step() -> None:
            results, result_spec = tree_flatten(self.module(*arguments))
            gradients = torch.autograd.grad(results[0] * scale, parameters)
            made = [*(result.detach() for result in results), *gradients]
            outputs[:] = [self._outputs.get(place, value) for place, value in zip(_places(made), made, strict=True)]
            copied = [(shared, value) for shared, value in zip(outputs, made, strict=True) if shared is not value]
            _copy([shared for shared, _ in copied], [value for _, value in copied])
            specs[:] = [result_spec]

        if scale.device.type == "cuda":
            devices = [scale.device]
        else:
            devices = []
        with torch.random.fork_rng(devices):  # later draws are as if nothing had been recorded
            replay = self._record(micro_step)
        self._outputs |= dict(zip(_places(outputs), outputs, strict=True))
        return _Graph(outputs, specs[0], replay)


def record_on_gpu(run: Callable[[], Any], *, pool: Any = None) -> Callable[[], None]:
    """Record a function on the current GPU, with memory from a pool that recordings may share. Returns the function
    that replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # The reader thread continues to pin memory meanwhile, which must not make this recording fail.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    return graph.replay


def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy the values of tensors into other tensors, with one launch per type of tensor."""
    for dtype in {value.dtype for value in values}:
        pairs = [pair for pair in zip(into, values, strict=True) if pair[1].dtype == dtype]
        torch._foreach_copy_([place for place, _ in pairs], [value for _, value in pairs])


def _free_cached_memory() -> None:
    """Return unused memory to the GPU. A failure is only logged.

    After a recording that ran out of memory, torch's allocator can still be in the state of a recording, and refuse.
    """
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        logger.warning("engine.cuda_graph: unused GPU memory could not be freed (%s)", first_line(error))


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means that memory ran out.

    CUDA can raise a second error when the recording ends. Therefore the error during whose handling `error` was raised
    is checked too.
    """
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or _ran_out_of_memory(error.__context__))


def _signature(value: Any) -> Any:
    """Return a key for a value: (shape, type) of a tensor, or the value itself if it is no tensor. Recorded graphs are
    looked up by such keys."""
    if isinstance(value, Tensor):
        return (value.shape, value.dtype)
    return value


def _places(values: Sequence[Tensor]) -> list[Any]:
    """Return a key for each tensor: its position, shape and type. Graphs share tensors that have the same key."""
    return [(index, _signature(value)) for index, value in enumerate(values)]


class _Delivered(torch.autograd.Function):
    """Autograd function that returns a loss whose gradients are already recorded. Its backward pass returns the
    recorded gradients.

    The recorded gradients include the factor by which the loss will be multiplied.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.gradients
