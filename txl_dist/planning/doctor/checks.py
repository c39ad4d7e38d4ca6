"""Verdicts of `txl doctor` on each machine and on the network between machines: what is wrong, and how to repair it.

    ok        nothing is wrong, or what is wrong has no effect on a run
    warning   a run works, but slower, less safely, or not with every setting
    problem   a run fails, or gives wrong results: exit code 1

The functions depend only on the facts that `machine`, `disk` and `fabric` have found. The limits in these functions are
judgements of experienced users, not measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from txl_dist.console.formatting import counted, format_bytes
from txl_dist.planning.doctor.fabric import Reduce
from txl_dist.planning.doctor.machine import WATCHED, Facts

Verdict = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """Result of one check: its name, its verdict, the facts that were found, and a remedy."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""
    """Sentence that says what to do. It is empty if nothing is to be done."""


def first_of(name: str, found: str, *rules: tuple[object, Verdict, str]) -> Finding:
    """Return a finding with the verdict and remedy of the first rule that applies, or with the verdict ok if no rule
    applies.

    A rule is (condition, verdict, remedy). `name` and `found` are the finding's name and the facts.
    """
    for holds, verdict, remedy in rules:
        if holds:
            return Finding(name, verdict, found, remedy)
    return Finding(name, "ok", found)


def judge(facts: Facts, *, is_cut_off: bool = False) -> list[Finding]:
    """Return the findings of all checks of one machine.

    `is_cut_off` says that the machine cannot reach the other machines of the job.
    """
    findings = [finding for check in CHECKS for finding in check(facts)]
    return [*findings, _host_name(facts, is_cut_off=is_cut_off)]


def _versions(facts: Facts) -> Iterator[Finding]:
    listed = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    met = f"Python {facts.python}, {listed}; all requirements are met"
    if facts.unmet:
        found = f"unmet: {'; '.join(facts.unmet)}"
    else:
        found = met
    remedy = (
        'Install the required versions: pip install -c constraints.txt -e ".". torch below 2.10 loads pickles unsafely.'
    )
    yield first_of("versions", found, (facts.unmet, "problem", remedy))


def _devices(facts: Facts) -> Iterator[Finding]:
    for index, device in enumerate(facts.devices):
        major, minor = device.capability
        yield first_of(
            f"GPU {index}",
            f"{device.name}, capability {major}.{minor}, {device.free_gib:.1f} of {device.memory_gib:.1f} GiB free, "
            f"peak {f'{device.peak_tflops:g} TFLOP/s in bf16' if device.peak_tflops else 'not known'}",
            (
                not device.has_code,
                "problem",
                "This build of torch has no code for the GPU. Install a build that has (pytorch.org).",
            ),
            (
                device.free_gib < 0.9 * device.memory_gib,
                "warning",
                "End the processes that use the GPU. nvidia-smi lists them.",
            ),
            (major < 8, "warning", "The GPU emulates bf16 and has no TF32. Use --engine.precision fp16 or fp32."),
            (not device.peak_tflops, "warning", "Set metrics.peak_tflops from the datasheet to have MFU reported."),
        )
    if facts.devices:
        return
    if not facts.num_driver_gpus:
        if facts.cpu_bf16.is_fast:
            precision = "bf16"
        else:
            precision = "fp32"
        found = f"none, so runs use the CPU. engine.precision=auto is {precision} ({facts.cpu_bf16.reason})"
        yield Finding("GPU", "ok", found)
        return
    cuda = facts.torch_cuda
    hidden = [name for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES") if name in facts.environment]
    why = ", ".join(f"{name}={facts.environment[name]!r}" for name in hidden) or f"torch for CUDA {cuda}"
    yield first_of(
        "GPU",
        f"the driver {facts.driver} sees {counted(facts.num_driver_gpus, 'GPU')}, but this process uses none: {why}",
        (hidden, "warning", f"Unset {' and '.join(hidden)} if this is not intended."),
        (not cuda, "problem", "Install the build of torch with CUDA (pip install torch without the cpu index)."),
        (True, "problem", f"Update the driver to one for CUDA {cuda}, or install a torch for an older CUDA."),
    )


def _backends(facts: Facts) -> Iterator[Finding]:
    missing = {"gloo", *(["nccl"] if facts.devices else [])} - facts.backends.keys()
    listed = ", ".join(f"{name} {version}".strip() for name, version in facts.backends.items())
    if missing:
        found = f"torch lacks {' and '.join(sorted(missing))}"
    else:
        found = listed
    remedy = "Install an official build of torch for Linux, which has both."
    yield first_of("backends", found, (missing, "problem", remedy))


def _cores(facts: Facts) -> Iterator[Finding]:
    ranks = facts.num_local_ranks
    threads = facts.environment.get("OMP_NUM_THREADS", "")
    cores = min(facts.num_cores, facts.cgroup_cores or facts.num_cores)
    if facts.cgroup_cores:
        limit = f", of which the control group allows {facts.cgroup_cores:g}"
    else:
        limit = ""
    fair = max(1, int(cores / ranks))
    count = int(threads) if threads.isdigit() else 0
    own = f"Set --engine.num_threads {fair}: a rank counts all cores, not only the cores that it may use."
    fewer = f"Set OMP_NUM_THREADS to {fair}: threads that wait for a core slow down all ranks."
    yield first_of(
        "cores",
        f"{counted(facts.num_cores, 'core')}{limit} for {counted(ranks, 'rank')}"
        + (f", OMP_NUM_THREADS={threads}" if threads else ""),
        (threads and not count, "problem", "Set OMP_NUM_THREADS to a number of 1 or more, or unset it."),
        (cores < ranks, "warning", "Give the job at least one core per rank, or start fewer ranks."),
        (cores < facts.num_cores and not threads, "warning", own),
        (count * ranks > facts.num_cores, "warning", fewer),
    )


def _memory(facts: Facts) -> Iterator[Finding]:
    remedy = "Free memory, or raise the limit. A rank needs about 1 GiB in addition to its model."
    found = f"{facts.room_gib:.1f} of {facts.memory_gib:.1f} GiB are available to processes"
    yield first_of("memory", found, (facts.room_gib < 1.5 * facts.num_local_ranks, "problem", remedy))
    more = (
        "NCCL needs more shared memory: docker run --shm-size=8g (or --ipc=host), or remove the files of "
        "dead processes from /dev/shm."
    )
    full = "Remove the files of dead processes from /dev/shm. Such files hold memory until the next boot."
    yield first_of(
        "/dev/shm",
        f"{facts.shm_free_gib:.2f} of {facts.shm_gib:.2f} GiB free",
        (len(facts.devices) > 1 and facts.shm_free_gib < 1, "problem", more),
        (facts.shm_free_gib < facts.shm_gib / 2, "warning", full),
    )
    yield first_of(
        "open files",
        "no limit" if facts.max_files < 0 else f"at most {facts.max_files} for a process",
        (0 <= facts.max_files < 256, "problem", "Run ulimit -n 65536: each lane may keep a shard open."),
        (0 <= facts.max_files < 4096, "warning", "Run ulimit -n 65536, for runs of many lanes and shards."),
    )

    pins = "Run ulimit -l unlimited (docker run --ulimit memlock=-1): InfiniBand pins its buffers."
    if facts.has_infiniband:
        if facts.max_pinned < 0:
            found = "no limit"
        else:
            found = f"at most {format_bytes(facts.max_pinned)} for a process"
        yield first_of("pinned memory", found, (facts.max_pinned >= 0, "problem", pins))


def _disk(facts: Facts) -> Iterator[Finding]:
    disk = facts.disk
    lacks = [what for what, works in (("renaming", disk.renames), ("file locking", disk.locks)) if not works]
    state = disk.error or ", ".join([f"{disk.free_gib:.1f} GiB free", *(f"no {what}" for what in lacks)])
    fit = "Check that checkpoint.keep_last + 1 checkpoints fit (txl train CONFIG --dry-run estimates their size)."
    yield first_of(
        "disk",
        f"{disk.folder} ({disk.kind or 'kind not known'}): {state}",
        (disk.error, "problem", "Correct the permissions of the folder, or choose another --run-dir."),
        (not disk.renames, "problem", "Put the run on another file system: a checkpoint is committed by renaming it."),
        (disk.free_gib < 1, "problem", "Free disk space. A checkpoint that does not fit is lost."),
        (disk.kind in ("tmpfs", "ramfs"), "warning", "Put the run on a disk: files in memory are lost at a reboot."),
        (not disk.locks, "warning", "Put data.cache_dir on a local disk: ranks share downloads there by file locks."),
        (disk.free_gib < 20, "warning", fit),
    )


def _corpus(facts: Facts) -> Iterator[Finding]:
    corpus = facts.corpus
    if corpus:
        found = corpus.error or f"{corpus.location}: {counted(corpus.tokens, 'token')}"
        remedy = "Give the path of a corpus that txl prepare wrote, as this machine sees the path."
        yield first_of("corpus", found, (corpus.error, "problem", remedy))


def _programs(facts: Facts) -> Iterator[Finding]:
    lacks_launcher = "deepspeed" not in facts.programs and "RANK" not in facts.environment
    remedy = (
        "Activate the environment that contains deepspeed, also in non-login shells. Or start runs with torchrun or "
        "srun."
    )
    if lacks_launcher:
        found = "the program deepspeed is not on PATH"
    else:
        found = f"on PATH: {', '.join(facts.programs)}"
    yield first_of("launcher", found, (lacks_launcher, "warning", remedy))
    if facts.devices:
        remedy = "Install gcc and the headers of Python (Debian: gcc python3-dev), or use --engine.attention fused."
        found = facts.missing_compiler_reason or "Triton finds what it needs, and DeepSpeed needs none"
        yield first_of("compiler", found, (facts.missing_compiler_reason, "problem", remedy))


DANGERS = {
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "torch.load runs code in files",
    "TXL_FAILPOINTS": "faults are injected on purpose, as in tests",
}
"""Environment variables that a run should not have, and the effect of each variable."""


def _variables(facts: Facts) -> Iterator[Finding]:
    for name, effect in DANGERS.items():
        value = facts.environment.get(name, "")
        if value not in ("", "0"):
            yield Finding(name, "problem", f"is {value}: {effect}", f"Unset {name} if this is not intended.")
    up = {"lo", *facts.interfaces}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = facts.environment.get(name, "")
        if not value or value.startswith("^"):  # ^ names those that NCCL leaves out
            continue
        is_prefix = name.startswith("NCCL") and not value.startswith("=")
        named = [interface.partition(":")[0] for interface in value.removeprefix("=").split(",")]
        unknown = [interface for interface in named if not _is_up(interface, up, is_prefix=is_prefix)]
        if unknown:
            found = f"names {', '.join(unknown)}, which is not an active interface of this machine"
        else:
            found = value
        remedy = f"Set {name} to one of {', '.join(sorted(up))}; the names can differ between nodes."
        yield first_of(name, found, (unknown, "problem", remedy))
    for path in facts.broken_launcher_files:
        remedy = "Write NAME=VALUE in every line, without blank lines: the deepspeed launcher fails on other lines."
        yield Finding(".deepspeed_env", "problem", f"{path} has a line without an equals sign", remedy)


def _host_name(facts: Facts, *, is_cut_off: bool) -> Finding:
    """Check the host name. The backend gloo listens at the host name's address, unless a network interface is set."""
    is_local = not facts.host_address or facts.host_address.startswith("127.")
    listed = ", ".join(f"{name} {address}" for name, address in facts.interfaces.items())
    remedy = "Set GLOO_SOCKET_IFNAME to the interface between the nodes, or correct /etc/hosts."
    return first_of(
        "host name",
        f"{facts.host} resolves to {facts.host_address or 'nothing'}; interfaces: {listed or 'none but lo'}",
        (is_local and is_cut_off and "GLOO_SOCKET_IFNAME" not in facts.environment, "problem", remedy),
    )


def _is_up(interface: str, up: set[str], *, is_prefix: bool) -> bool:
    """Return whether a network interface is up.

    With `is_prefix`, `interface` may be only the beginning of the interface's name, as in NCCL.
    """
    if is_prefix:
        return any(name.startswith(interface) for name in up)
    return interface in up


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _versions,
    _devices,
    _backends,
    _cores,
    _memory,
    _disk,
    _corpus,
    _variables,
    _programs,
)


def differences(nodes: Mapping[str, Facts]) -> list[Finding]:
    """Return a finding for each fact that should be equal on all nodes but differs."""
    compared = {node: _compared(facts) for node, facts in nodes.items()}
    findings = []
    for name in next(iter(compared.values())):
        nodes_of_value: dict[str, list[str]] = {}
        for node, values in compared.items():
            value = values[name] or "none"
            nodes_of_value.setdefault(value, []).append(node)
        if len(nodes_of_value) > 1:
            groups = []
            for value, names in nodes_of_value.items():
                groups.append(f"{value} on {', '.join(names)}")
            listed = "; ".join(groups)
            verdict, remedy = BEARABLE.get(name, UNBEARABLE)
            findings.append(Finding("differences", verdict, f"{name}: {listed}", remedy))
    if not findings:
        num_nodes = counted(len(nodes), "node")
        findings.append(Finding("differences", "ok", f"none between {num_nodes} in versions, GPUs and ranks"))
    return findings


BEARABLE: dict[str, tuple[Verdict, str]] = {
    "driver": ("warning", "Update the older drivers, so that all nodes have the same version."),
    "GPUs": ("warning", "Every step waits for the slowest GPU. Exclude its node, or accept the lower speed."),
    "bf16 of the CPU": (
        "warning",
        "engine.precision=auto is fp32 if a node is slow in bf16. Exclude the slow nodes, or accept the lower speed.",
    ),
    "ranks": ("warning", "Check the slots in the hostfile if this is not intended."),
}
UNBEARABLE: tuple[Verdict, str] = ("problem", "Make the nodes equal: the same image, or the same constraints.txt.")


def _compared(facts: Facts) -> dict[str, str]:
    values = {"Python": facts.python}
    for name in WATCHED:
        values[name] = facts.versions.get(name, "")
    values["CUDA of torch"] = facts.torch_cuda
    values["NCCL"] = facts.backends.get("nccl", "")
    values["driver"] = facts.driver
    values["GPUs"] = ", ".join(device.name for device in facts.devices)
    if facts.devices:
        cpu_bf16 = "not used"
    elif facts.cpu_bf16.is_fast:
        cpu_bf16 = "fast"
    else:
        cpu_bf16 = "slow"
    values["bf16 of the CPU"] = cpu_bf16
    values["ranks"] = str(facts.num_local_ranks)
    return values


def judge_reduce(figures: Sequence[Reduce], *, num_nodes: int, on_gpu: bool) -> Finding:
    """Return a finding about the latency and bandwidth between all ranks."""
    best = max(figure.bus_gb_s for figure in figures)
    direct = (
        "Check nvidia-smi topo -m and NCCL_DEBUG=INFO. GPUs without a direct connection communicate through the host."
    )
    network = "Check that *_SOCKET_IFNAME names the fast network (NCCL_DEBUG=INFO prints the network that NCCL uses)."
    measured = []
    for figure in figures:
        size = format_bytes(figure.num_bytes)
        measured.append(f"{size} {figure.ms:.3g} ms ({figure.bus_gb_s:.3g} GB/s)")
    if on_gpu:
        least_network = 1.0
    else:
        least_network = 0.1
    is_direct_slow = on_gpu and num_nodes == 1 and best < 5
    is_network_slow = num_nodes > 1 and best < least_network
    return first_of(
        "all-reduce",
        ", ".join(measured),
        (is_direct_slow, "warning", direct),
        (is_network_slow, "warning", network),
    )
