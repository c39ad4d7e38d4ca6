"""Leaving an engine and its process groups, so that the same process can make new ones.

All private names of torch and DeepSpeed that recovery needs, and other training does not, are in this file.

torch and DeepSpeed expect one job per process. Some of their state outlives the groups and the engine, and differs
between a process that stayed and its new peers:

    torch: number of groups made       part of the names under which ranks look for each other in the store
    DeepSpeed: references to groups    keep the sockets of the groups open
    DeepSpeed: ids of parameters       ZeRO-3 compares them between ranks
    DeepSpeed: ids of modules          a default argument that counts on. ZeRO-3 compares them too
    DeepSpeed: modules of engines      a stack and a cache of ZeRO-3 keep the modules of closed engines in memory

`check_regroup` refuses versions that have other names, before a run begins.

gloo does not end everything whose sockets are shut down, and offers no other way to end it:

    a message that was sent or has arrived in part    `Pair::signalException` of gloo/transport/tcp/pair.cc wakes
                                                      neither `tx_` nor `rx_`. Their collective waits for the timeout
                                                      in `UnboundBuffer::waitSend` or `waitRecv`
    a group whose other rank does not connect         `Device::connectAsListener` has no socket yet, and no timeout.
                                                      `Pair::waitUntilConnected` waits for a multiple of it

So with recovery the main thread leaves them behind: see `end_waits_if`. The thread of gloo that is stuck ends with the
timeout, and keeps the tensors of its collective until then. It does not touch them, because their socket is closed.
While the engine is built the timeout is `engine.start_timeout_s`, and the tensors are the weights.

On a GPU a collective of NCCL runs on the device, where no socket can be shut down. `NcclCut` aborts its communicators
too. This part has not been run on a GPU. Its tests run on a CPU, with fakes.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from typing_extensions import override

from txl_dist.distributed.collectives import uses_gpu, waiting
from txl_dist.distributed.socket_cut import SocketCut
from txl_dist.errors import ConfigError

POLL_S = 0.1
"""Seconds between two looks of a waiting main thread for the loss of a rank."""
DESTROY_S = 1.0
"""Longest time in seconds that `leave_groups` waits for the groups to be destroyed."""
_LEFT_BEHIND = "a rank of this generation was lost, and gloo still waits for it"
_MODULE_COUNTER = (
    "deepspeed.runtime.zero.parameter_offload",
    "DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__",
)
_MODULE_STACK = ("deepspeed.runtime.zero.parameter_offload", "FWD_MODULE_STACK")
_MODULE_CACHE = (
    "deepspeed.runtime.zero.partitioned_param_coordinator",
    "PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release.__closure__",
)
_NAMES = (
    ("torch.distributed.distributed_c10d", "_world.group_count"),
    ("deepspeed.utils.groups", "_release_process_group_references"),
    ("deepspeed.runtime.zero.partition_parameters", "Init.param_id"),
    _MODULE_COUNTER,
    _MODULE_STACK,
    _MODULE_CACHE,
    ("torch.distributed.distributed_c10d", "_world.pg_map"),
    ("torch.distributed", "Work._get_op_type"),
    ("torch._C._distributed_c10d", "OpType.UNKNOWN"),
)
"""Private names that `empty_engine`, `leave_groups` and `end_waits_if` use: module, and path of the attribute."""
_GPU_NAMES = (
    ("torch.distributed.distributed_c10d", "_world.pg_names"),
    ("torch.distributed", "ProcessGroup._get_backend"),
    ("torch.distributed", "ProcessGroupNCCL.abort"),
    ("torch.distributed", "ProcessGroupNCCL._group_start"),
    ("torch.distributed", "ProcessGroupNCCL._group_end"),
)
"""Private names that `NcclCut` uses in addition."""
_LATE_MODULES = (
    "torch._dynamo",  # with the first optimizer
    "torch._subclasses.schema_check_mode",
    "deepspeed.module_inject.auto_ep_layer",  # these with the first engine
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.utils.pin_memory",
)
"""Modules that torch and DeepSpeed import late."""
_NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else torch ends the process at the first error of a communicator
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # an abort may leave errors of CUDA behind
    "NCCL_NVLS_ENABLE": "0",  # an abort may hang with NVLink SHARP
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for GPUs must not start CUDA, or a spare could not fork
}
"""Environment variables that NCCL and torch need for an abort, set before they are imported or asked for a GPU."""


def set_nccl_variables(environment: MutableMapping[str, str]) -> None:
    """Set the variables of `_NCCL_VARIABLES` that are not set. Without a GPU they have no effect."""
    for name, value in _NCCL_VARIABLES.items():
        environment.setdefault(name, value)


def check_regroup(*, on_gpu: bool = False) -> None:
    """Raise ConfigError if this version of torch or DeepSpeed lacks a name that recovery uses."""
    names = [*_NAMES, *(_GPU_NAMES if on_gpu else ())]
    for module, path in names:
        try:
            _attribute(module, path)
        except (ImportError, AttributeError):
            package = module.partition(".")[0]
            raise ConfigError(
                f"recover.spares: {package} {version(package)} has no {module}.{path}, so ranks cannot regroup. "
                f"Install the version of {package} that constraints.txt lists, or set recover.spares to 0."
            ) from None


def import_late_modules() -> None:
    """Import what torch and DeepSpeed import late, before a replacement needs it.

    No version is refused for lack of such a module, which costs a replacement a part of a second.
    """
    for name in _LATE_MODULES:
        with suppress(ImportError):
            import_module(name)


def empty_engine(engine: Any) -> None:
    """End an engine of DeepSpeed. Its module and the engine hold no values afterwards.

    Something may still refer to them, for instance the traceback of an error.
    """
    module = engine.module
    engine.destroy()  # removes the hooks through which gradients keep it alive
    _forget_modules()
    for part in module.modules():  # a flat module leaves views in its parts
        views = [name for name, value in vars(part).items() if isinstance(value, Tensor)]
        for name in views:
            del vars(part)[name]
    for parameter in module.parameters():
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)
        vars(parameter).clear()
    vars(engine).clear()


def _forget_modules() -> None:
    """Empty the stack and the cache in which ZeRO-3 keeps the modules of engines until the process ends.

    A run without recovery comes here too. With a version that lacks these names it only needs more memory.
    """
    missing = (ImportError, AttributeError, IndexError, TypeError)
    with suppress(*missing):
        _attribute(*_MODULE_STACK).clear()
    with suppress(*missing):
        _attribute(*_MODULE_CACHE)[0].cell_contents.cache_clear()  # in a decorator of DeepSpeed


def leave_groups() -> None:
    """Destroy all process groups, and reset what torch and DeepSpeed count. The engine must be closed before.

    A process that calls this function is like a new process to its peers. It uses no collective. A group with a
    collective that gloo does not end is destroyed after its timeout, in a thread.
    """
    groups = list(_attribute("torch.distributed.distributed_c10d", "_world").pg_map)
    if groups:
        torch_dist.destroy_process_group()
    _attribute("deepspeed.utils.groups", "_release_process_group_references")(None)
    _attribute("torch.distributed.distributed_c10d", "_world").group_count = 0
    _attribute("deepspeed.runtime.zero.partition_parameters", "Init").param_id = 0
    counter = _attribute(*_MODULE_COUNTER)[0]
    counter[:] = [0]
    _forget_modules()  # of an engine that was not built to its end
    gc.collect()
    destroying = threading.Thread(target=groups.clear, name="destroy groups", daemon=True)
    destroying.start()
    destroying.join(DESTROY_S)


def end_waits_if(must_leave: Callable[[], bool]) -> None:
    """Make this process leave waits of gloo for other ranks soon after `must_leave` becomes true: for a collective,
    and for the connections of a new group. The caller gets a ConnectionError.

    It holds for all later waits of this process, also those in torch and DeepSpeed. On a GPU waits stay as they are,
    because a wait of NCCL with a time limit would block the host.
    """
    if uses_gpu():
        return
    work_type: Any = torch_dist.Work
    group_type: Any = torch_dist.ProcessGroupGloo
    wait, make_group = work_type.wait, group_type.__init__
    kinds = _attribute("torch._C._distributed_c10d", "OpType")
    to_one_rank = {int(kind) for kind in (kinds.SEND, kinds.RECV, kinds.RECVANYSOURCE)}
    ignores_limit = int(kinds.UNKNOWN)  # reduce_scatter, which waits for an all_reduce of its own
    limit = timedelta(seconds=POLL_S)

    def wait_or_leave(work: Any, timeout: timedelta = timedelta(0)) -> bool:
        kind = work._get_op_type()
        if timeout or kind in to_one_rank:  # such a message fails when its wait reaches a limit
            return bool(wait(work, timeout))
        if kind == ignores_limit:
            return bool(_run_or_leave(lambda: wait(work), must_leave))
        while not work.is_completed():
            is_last = must_leave()  # asked before the wait, which gives a cut the time to take effect
            try:
                return bool(wait(work, limit))
            except RuntimeError:  # of the limit, or the collective's own, which the wait below raises again
                if is_last:
                    raise ConnectionError(_LEFT_BEHIND) from None
        return bool(wait(work))

    def wait_marked(work: Any, timeout: timedelta = timedelta(0)) -> bool:
        with waiting():  # DeepSpeed also waits for handles in functions that do not count as collectives
            return wait_or_leave(work, timeout)

    def make_group_or_leave(*words: Any, **named: Any) -> None:
        _run_or_leave(lambda: make_group(*words, **named), must_leave)

    work_type.wait = wait_marked
    group_type.__init__ = make_group_or_leave


def _run_or_leave(call: Callable[[], Any], must_leave: Callable[[], bool]) -> Any:
    """Run `call` in a thread, and return its result. Once `must_leave` is true, the thread is left behind."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread
            result.set_exception(error)

    threading.Thread(target=run, name="wait of gloo", daemon=True).start()
    while not result.done():
        is_last = must_leave()
        futures_wait([result], timeout=POLL_S)
        if is_last and not result.done():
            raise ConnectionError(_LEFT_BEHIND)
    return result.result()


def new_cut() -> SocketCut:
    """Return an object that ends the collectives of one generation, on the device of this process."""
    if uses_gpu():
        return NcclCut()
    return SocketCut()


class NcclCut(SocketCut):
    """Cut of the sockets of gloo, and abort of the communicators of NCCL. Not run on a GPU so far.

    An abort ends the kernels that wait for other ranks. The values that they leave behind are undefined. The abort of
    a communicator can take seconds. A rank whose thread hangs in it is silent, so it is killed and replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        self._aborted: set[str] = set()
        self._lock = threading.Lock()

    @override
    def cut(self) -> int:
        """Shut the sockets down, and abort all communicators that are not aborted yet. Returns their number.

        Several threads may call it. Each communicator is aborted once.
        """
        with self._lock:
            return self._cut()

    def _cut(self) -> int:
        backends = []
        names = _attribute("torch.distributed.distributed_c10d", "_world").pg_names
        for group, name in list(names.items()):
            if name not in self._aborted:
                with suppress(RuntimeError):  # a group of the host alone has no such backend
                    backends.append(group._get_backend(torch.device("cuda")))
                self._aborted.add(name)
        count = super().cut()
        if backends:
            backends[0]._group_start()  # else the aborts of two communicators could wait for each other
            try:
                for backend in reversed(backends):  # the newest first, as torch does
                    backend.abort()
            finally:
                backends[0]._group_end()
        return count + len(backends)


def device_works() -> bool:
    """Return whether the GPU of this process still works after an abort. On a CPU it always does.

    A new process has not used its GPU yet, and must not begin here: its device is chosen later.
    """
    if not uses_gpu() or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the next engine needs the memory
    except RuntimeError:  # errors of CUDA are
        return False
    return True


def _attribute(module: str, path: str) -> Any:
    """Return an attribute of a module by its path. Raises ImportError or AttributeError if there is none."""
    value: Any = import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return value
