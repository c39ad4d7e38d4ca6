"""Facts of the machine for `txl doctor`, without verdicts. The module `checks` makes the verdicts.

    gather_facts(...) -> Facts    versions, devices, cores, memory, network, programs, disk, corpus

A fact that cannot be read (no /proc, no nvidia-smi, no cgroup) is an empty or neutral value, never an error. Sizes are
in GiB.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from packaging.requirements import Requirement

from txl_dist import __version__
from txl_dist.distributed.collectives import local_world_size, uses_gpu
from txl_dist.io.files import read_text
from txl_dist.launcher.deepspeed_files import environment_files
from txl_dist.model.flops import peak_tflops
from txl_dist.model.kernels.attention_launch import missing_compiler_reason
from txl_dist.planning.doctor.disk import CorpusShards, Disk, try_corpus, try_disk
from txl_dist.train.engine.precision import Bf16Support, bf16_support
from txl_dist.train.footprint.room import control_groups, host_room_bytes
from txl_dist.train.preflight import drivers_of_gpus
from txl_dist.version import installed_version

GIB = 2**30
WATCHED = ("txl_dist", "torch", "deepspeed", "numpy", "triton")
"""Packages whose versions must be the same on all nodes."""
READ = (
    "CUDA_VISIBLE_DEVICES",
    "DS_ACCELERATOR",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "RANK",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
    "TXL_FAILPOINTS",
)
"""Environment variables that the checks need. Other variables are not read, because their values may be secret."""


class Device(NamedTuple):
    """GPU of this machine, as torch describes it."""

    name: str
    memory_gib: float
    free_gib: float
    capability: tuple[int, int]
    """Compute capability of the GPU: (major number, minor number)."""
    has_code: bool
    """True if this build of torch has code for the GPU."""
    peak_tflops: float
    """Peak of the GPU in TFLOP/s for bf16. The value is 0 if the peak is unknown."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about one machine, as one process sees it."""

    host: str
    python: str
    versions: dict[str, str]
    """Installed versions of the packages in `WATCHED`."""
    unmet: tuple[str, ...]
    """Requirements of this package that are not met, each followed by the installed version."""
    torch_cuda: str
    """CUDA version that torch was built for. It is empty for a build without CUDA."""
    driver: str
    """Version of the NVIDIA driver as nvidia-smi reports it. It is empty if there is no driver."""
    num_driver_gpus: int
    """Number of GPUs that nvidia-smi lists. Torch can see fewer GPUs."""
    devices: tuple[Device, ...]
    """GPUs that this process can use."""
    backends: dict[str, str]
    """Backends of torch for communication, gloo and nccl, with their versions if they have one."""
    num_cores: int
    """Number of CPU cores that this process may use."""
    cgroup_cores: float
    """CPU time that the control group may use, in cores. A value of 0 means no limit."""
    num_local_ranks: int
    """Number of ranks of the job on this machine. It is 1 without a job."""
    memory_gib: float
    room_gib: float
    """Memory in GiB that processes may still allocate, within the limits of their control groups."""
    shm_gib: float
    """Size of /dev/shm in GiB. It is 0 if there is no /dev/shm."""
    shm_free_gib: float
    max_files: int
    """Number of files that a process may hold open (the soft limit). A value of -1 means no limit."""
    max_pinned: int
    """Number of bytes that a process may pin in memory (the soft limit). A value of -1 means no limit."""
    has_infiniband: bool
    interfaces: dict[str, str]
    """IPv4 address of each network interface that is up, except the interface lo."""
    host_address: str
    """Address that the host name resolves to. It is empty if the name does not resolve."""
    environment: dict[str, str]
    """Values of the environment variables in `READ` that are set."""
    broken_launcher_files: tuple[str, ...]
    """Files named .deepspeed_env that the launcher cannot read."""
    programs: tuple[str, ...]
    """Those of the programs deepspeed, pdsh and ssh that are on PATH."""
    missing_compiler_reason: str
    """Reason why Triton cannot compile. It is empty if Triton can compile."""
    cpu_bf16: Bf16Support
    """Whether this machine's CPU is fast in bf16."""
    disk: Disk
    corpus: CorpusShards | None


def gather_facts(*, run_dir: Path, data: str = "") -> Facts:
    """Gather the facts about this machine.

    `run_dir` need not exist, because its nearest parent folder that exists is checked. `data` is a corpus to open, or
    empty.
    """
    if os.path.isdir("/dev/shm"):
        shm = shutil.disk_usage("/dev/shm")
    else:
        shm = None
    drivers = drivers_of_gpus()
    versions = {name: installed_version(name) for name in WATCHED}
    versions = {name: version for name, version in versions.items() if version} | {"txl_dist": __version__}
    if uses_gpu():
        num_devices = torch.cuda.device_count()
    else:
        num_devices = 0
    return Facts(
        host=socket.gethostname(),
        python=platform.python_version(),
        versions=versions,
        unmet=tuple(_unmet()),
        torch_cuda=torch.version.cuda or "",
        driver=drivers[0] if drivers else "",
        num_driver_gpus=len(drivers),
        devices=tuple(_device(index) for index in range(num_devices)),
        backends=_backends(),
        num_cores=len(os.sched_getaffinity(0)),
        cgroup_cores=_cgroup_cores(),
        num_local_ranks=local_world_size(1),
        memory_gib=psutil.virtual_memory().total / GIB,
        room_gib=min(psutil.virtual_memory().available, host_room_bytes()) / GIB,  # not by swapping
        shm_gib=shm.total / GIB if shm else 0.0,
        shm_free_gib=shm.free / GIB if shm else 0.0,
        max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],  # RLIM_INFINITY is -1
        max_pinned=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        interfaces=_interfaces(),
        host_address=_host_address(),
        environment={name: os.environ[name] for name in READ if name in os.environ},
        broken_launcher_files=tuple(_broken_launcher_files()),
        programs=tuple(name for name in ("deepspeed", "pdsh", "ssh") if shutil.which(name)),
        missing_compiler_reason=missing_compiler_reason(),
        cpu_bf16=bf16_support(torch.device("cpu")),
        disk=try_disk(run_dir),
        corpus=try_corpus(data) if data else None,
    )


def _broken_launcher_files() -> Iterator[str]:
    """Yield each .deepspeed_env file that has a line without an equals sign."""
    for path in environment_files():
        with suppress(OSError, UnicodeDecodeError):  # the launcher itself reports a file that cannot be read
            if not all("=" in line for line in read_text(path).splitlines()):
                yield str(path)


def _unmet() -> Iterator[str]:
    """Yield the requirements of this package that are not met, each followed by the installed version."""
    with suppress(importlib.metadata.PackageNotFoundError):  # run from its source, as in our images
        for text in importlib.metadata.requires("txl_dist") or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is not None and not marker.evaluate({"extra": ""}):
                continue
            version = installed_version(requirement.name)
            if not version or not requirement.specifier.contains(version, prereleases=True):
                yield f"{requirement.name}{requirement.specifier} (is {version or 'not installed'})"


def _device(index: int) -> Device:
    """Read the facts about one GPU of this machine."""
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    has_code = False
    for name in torch.cuda.get_arch_list():  # sm_86, compute_90, sm_120a
        architecture = name.partition("_")[2].rstrip("af")
        # Code for 8.0 runs on 8.6 too; ptx of an older architecture is compiled when it is first used.
        if architecture[:-1] == str(properties.major) and int(architecture[-1]) <= properties.minor:
            has_code = True
            break
    return Device(
        name=properties.name,
        memory_gib=total / GIB,
        free_gib=free / GIB,
        capability=(properties.major, properties.minor),
        has_code=has_code,
        peak_tflops=peak_tflops(properties.name, precision="bf16"),
    )


def _backends() -> dict[str, str]:
    """Return the backends of torch for communication, with their versions."""
    backends = {}
    if torch.distributed.is_gloo_available():
        backends["gloo"] = ""
    if torch.distributed.is_nccl_available():
        backends["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return backends


def _cgroup_cores() -> float:
    """Return the smallest CPU limit of the control groups, in cores. A value of 0 means no limit."""
    limits = []
    for group, is_v2 in control_groups("cpu"):
        if is_v2:
            file_name = "cpu.max"
        else:
            file_name = "cpu.cfs_quota_us"
        quota, _, period = _text(group / file_name).partition(" ")
        if quota not in ("", "max", "-1"):
            limits.append(int(quota) / int(period or "100000"))
    return min(limits, default=0.0)


def _interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface that is up, except the interface lo."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup} - {"lo"}
    interfaces = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if name in up and address.family == socket.AF_INET:
                interfaces[name] = address.address
    return interfaces


def _host_address() -> str:
    """Return the address of the host name, or an empty string if the name does not resolve."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _text(path: str | Path) -> str:
    """Read a small text file. Returns an empty string if it cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return Path(path).read_text(encoding="utf-8").strip()
    return ""
