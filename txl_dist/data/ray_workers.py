"""Executor that runs tasks on the nodes of a Ray cluster (`txl prepare --cluster ray`).

Ray retries a task on another node if its node or its process is lost. Tasks and results are small: names of files,
positions and counts. So neither this process nor Ray's object store holds text or tokens. Each node must have the same
version of txl_dist and of the tokenizer library. `RayWorkers.check` checks this on all nodes before any work, and each
process of a node that joins later checks it again.

Limitations: a task whose process was lost `_MAX_RETRIES` times ends the preparation. This process must run on a node of
the cluster, or connect through Ray's client server (`ray://HOST:10001`).
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from typing_extensions import override

import txl_dist
from txl_dist.config.registry import load_plugins, loaded_plugins
from txl_dist.console.logging import logger
from txl_dist.data.workers import Workers, use_one_thread
from txl_dist.errors import ConfigError, DataError, TxlError, UnreachableError, first_line

Task = TypeVar("Task")
Result = TypeVar("Result")

_MAX_RETRIES = 5
_CONNECT_S = 5.0
"""Seconds to wait for an answer from the address of a cluster. Ray itself waits for minutes."""
_PROBE_S = 120.0
"""Seconds to wait for the check of a node, which starts a process and imports txl_dist."""
_LOOK_S = 10.0
"""Seconds between two looks at the list of nodes."""
_TASKS_PER_CPU = 3
"""Number of tasks in flight per CPU of the cluster. Results are taken in order, so other nodes need more tasks while
one task is slow or runs again."""
_PACKAGES = ("data", "io", "tokenizers")
"""Packages of txl_dist whose code decides the content of a corpus."""


class Software(NamedTuple):
    """Versions of the software that can change the content of a corpus."""

    txl_dist: str
    code: str
    """Hash of the source files of `_PACKAGES`."""
    tokenizers: str
    numpy: str


class _Setup(NamedTuple):
    """Facts that each process of a node needs before its first task."""

    software: Software
    plugins: tuple[str, ...]


class RayWorkers(Workers):
    """Executor that runs each task on one CPU of a Ray cluster."""

    def __init__(self, ray: Any, setup: _Setup, *, num_workers: int) -> None:
        """Run at most `num_workers` tasks at a time, or one on each CPU of the cluster if `num_workers` is 0."""
        self._ray = ray
        self._setup = setup
        self._num_workers = num_workers
        self._run = ray.remote(num_cpus=1, max_retries=_MAX_RETRIES)(_run)
        self._nodes = _nodes(ray)
        self._looked = time.monotonic()

    @override
    def check(self, action: Callable[[str], None]) -> None:
        """Check the software of every node, and call `action` there with the name of the node.

        Raises DataError for a node that has other software or cannot import txl_dist, and what `action` raises.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray = self._ray
        probe = ray.remote(num_cpus=0, max_retries=0)(_probe)
        references = {}
        for node, name in self._nodes.items():
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            references[name] = probe.options(scheduling_strategy=on_node).remote(self._setup, action, name)
        for name, reference in references.items():
            try:
                ray.get(reference, timeout=_PROBE_S)
            except ray.exceptions.RayTaskError as error:
                raise _error_of_task(error, node=name) from None
            except ray.exceptions.RayError as error:
                raise UnreachableError(
                    f"node {name} of the cluster does not work: {first_line(error)}. Remove this node from the "
                    "cluster, or repair it."
                ) from None

    @override
    def in_order(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield the result of `function` for each task, in the order of the tasks.

        A task whose node is lost runs on another node. Raises errors as `Workers.in_order` does.
        """
        setup = self._ray.put((self._setup, function))  # once for all tasks, because `function` may hold settings
        in_flight: deque[Any] = deque()
        waiting = iter(tasks)
        is_exhausted = False
        while in_flight or not is_exhausted:
            while not is_exhausted and len(in_flight) < self._max_in_flight():
                for task in waiting:
                    in_flight.append(self._run.remote(setup, task))
                    break
                else:
                    is_exhausted = True
            if in_flight:
                yield self._result(in_flight.popleft())

    def _result(self, reference: Any) -> Any:
        """Wait for the result of a task, and note the node that made it."""
        self._look_at_nodes()
        while not self._ray.wait([reference], timeout=_LOOK_S)[0]:
            self._look_at_nodes()
        try:
            node, result = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise _error_of_task(error) from None
        except self._ray.exceptions.RayError as error:
            raise DataError(
                f"a task was lost again and again (tries: {_MAX_RETRIES + 1}), perhaps because host memory ran out: "
                f"{first_line(error)}. Give each CPU of the cluster more memory, then run the same command again. It "
                "keeps the work that is finished."
            ) from error
        self.where = self._nodes.get(node, node[:8])
        return result

    def _max_in_flight(self) -> int:
        if self._num_workers:
            return self._num_workers
        return _TASKS_PER_CPU * max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def _look_at_nodes(self) -> None:
        """Log the nodes that were lost or joined since the last look."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        nodes = _nodes(self._ray)
        for node in self._nodes.keys() - nodes.keys():
            logger.warning("node %s was lost. Its unfinished tasks run again on other nodes", self._nodes[node])
        for node in nodes.keys() - self._nodes.keys():
            logger.info("node %s joined", nodes[node])
        self._nodes = nodes


@contextmanager
def connect(address: str, *, num_workers: int) -> Iterator[RayWorkers]:
    """Connect to a Ray cluster, and disconnect when the `with` block ends.

    `address` is empty for the cluster of RAY_ADDRESS or of this machine. At most `num_workers` tasks run at a time, or
    one on each CPU of the cluster if `num_workers` is 0. Raises ConfigError if the package ray is missing, and
    UnreachableError if there is no cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"--cluster ray needs the package ray ({error}). Run `pip install 'txl_dist[ray]'` on every node."
        ) from error
    _connect(ray, address)
    try:
        setup = _Setup(software(), tuple(plugin.name for plugin in loaded_plugins()))
        yield RayWorkers(ray, setup, num_workers=num_workers)
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Connect to the cluster. Raises UnreachableError that names the address and the remedy."""
    wanted = address or os.environ.get("RAY_ADDRESS", "")
    remedy = (
        "Start a cluster with `ray start --head` on one node and `ray start --address=HEAD:6379` on the others, and "
        "run this command on one of them, or give its address with --cluster ray=ADDRESS."
    )
    if wanted in ("", "auto"):
        wanted = _address_of_machine(remedy)
    if wanted != "auto":
        _check_port(wanted, remedy)
    try:
        ray.init(address=wanted, log_to_driver=False, configure_logging=False, logging_level="ERROR")
    except (Exception, SystemExit) as error:  # noqa: BLE001  Ray exits if its control service does not answer
        raise UnreachableError(f"cannot connect to a Ray cluster {wanted}: {first_line(error)}. {remedy}") from None


def _address_of_machine(remedy: str) -> str:
    """Return the address of the cluster that this machine belongs to, or `auto` if only `ray.init` can find it.

    Ray keeps this address in a file, also after the cluster has died. Raises UnreachableError if there is none.
    """
    try:
        from ray._private.services import get_ray_address_from_environment

        return str(get_ray_address_from_environment("auto", None))
    except ConnectionError as error:
        raise UnreachableError(f"this machine belongs to no Ray cluster: {first_line(error)} {remedy}") from None
    except (ImportError, TypeError):  # another version of Ray
        return "auto"


def _check_port(address: str, remedy: str) -> None:
    """Raise ConfigError or UnreachableError unless a server accepts connections at HOST:PORT."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--cluster ray={address}: the address must be HOST:PORT or ray://HOST:PORT.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreachableError(f"no Ray cluster answers at {address}: {reason}. {remedy}") from None


def _error_of_task(error: Any, *, node: str = "") -> Exception:
    """Return the exception that a task raised, or an error for a node without txl_dist."""
    cause = error.cause
    if isinstance(cause, TxlError):
        return cause
    if isinstance(cause, ImportError) or "RaySystemError" in str(error):  # the task could not be loaded
        lines = [line for line in str(error).splitlines() if line.strip()]
        return DataError(
            f"node {node or 'of the cluster'} cannot run tasks of txl_dist: {lines[-1].strip()}. Install txl_dist "
            f"{txl_dist.__version__} and the same packages on every node."
        )
    return error  # type: ignore[no-any-return]


def _nodes(ray: Any) -> dict[str, str]:
    """Return the names of the nodes that are alive, by id. Nodes of one machine get a part of the id as suffix."""
    alive = {node["NodeID"]: str(node["NodeManagerHostname"]) for node in ray.nodes() if node["Alive"]}
    counts = Counter(alive.values())
    return {node: host if counts[host] == 1 else f"{host}-{node[:6]}" for node, host in alive.items()}


@lru_cache(maxsize=1)
def software() -> Software:
    """Return the versions of this machine's software that can change the content of a corpus."""
    root = Path(txl_dist.__file__).parent
    state = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            state.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return Software(txl_dist.__version__, state.hexdigest()[:16], version("tokenizers"), version("numpy"))


def _run(shared: tuple[_Setup, Callable[[Task], Result]], task: Task) -> tuple[str, Result]:
    """Run a task on a node. Returns (id of the node, result)."""
    import ray

    setup, function = shared
    node = ray.get_runtime_context().get_node_id()
    _begin(setup, socket.gethostname())
    return node, function(task)


def _probe(setup: _Setup, check: Callable[[str], None], name: str) -> None:
    """Check on a node that tasks can run there."""
    _begin(setup, name)
    check(name)


@lru_cache(maxsize=1)
def _begin(setup: _Setup, name: str) -> None:
    """Set up this process for tasks, once. Raises DataError if the node has other software than the main process."""
    ours = software()
    if ours != setup.software:
        pairs = zip(Software._fields, setup.software, ours, strict=True)
        differences = [f"{field} {here} instead of {there}" for field, there, here in pairs if here != there]
        raise DataError(
            f"node {name} has other software than the machine that started the preparation: {', '.join(differences)}. "
            "Results would differ. Install the same versions on every node."
        )
    use_one_thread()
    _load(setup.plugins)


def _load(plugins: Sequence[str]) -> None:
    """Load plugins, of which a process of a node knows none."""
    load_plugins(plugins)
