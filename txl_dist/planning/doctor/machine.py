"""What this process finds on its machine, for `txl doctor`: plain facts, without a verdict (those are in `checks`).

    gather(...) -> Facts        versions, devices, cores, memory, network, programs, disk, corpus

Whatever cannot be found out (no /proc, no nvidia-smi, no cgroup) is an empty or neutral value, never an error. Sizes
are in GiB.
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
from txl_dist.model.kernels.launch import missing_compiler_reason
from txl_dist.planning.doctor.disk import CorpusShards, Disk, try_corpus, try_disk
from txl_dist.train.footprint.room import control_groups, host_room_bytes
from txl_dist.train.preflight import drivers_of_gpus

GIB = 2**30
WATCHED = ("txl_dist", "torch", "deepspeed", "numpy", "triton")
"""Versions that have to agree between nodes."""
READ = (
    *("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "RANK"),
    *("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TXL_FAULT"),
)
"""Environment variables that verdicts hang on. No others are read: their values may be secret."""


class Device(NamedTuple):
    """One GPU."""

    name: str
    memory_gib: float
    free_gib: float
    capability: tuple[int, int]
    has_code: bool
    """This build of torch has code for it."""
    peak_tflops: float
    """In bf16; 0 where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One machine, as one process sees it."""

    host: str
    python: str
    versions: dict[str, str]
    """Of `WATCHED`, where installed."""
    unmet: tuple[str, ...]
    """Requirements of this package that what is installed does not meet, with what is."""
    torch_cuda: str
    """CUDA that torch was built for; empty for none."""
    driver: str
    """NVIDIA's, as nvidia-smi says it; empty for none."""
    num_driver_gpus: int
    devices: tuple[Device, ...]
    """GPUs that this process can use."""
    backends: dict[str, str]
    """gloo, nccl: version if it has one; missing where torch lacks it."""
    num_cores: int
    """That this process may run on."""
    cgroup_cores: float
    """Processor time that its control group may use, in cores; 0 means no limit."""
    num_local_ranks: int
    memory_gib: float
    room_gib: float
    """What processes may still take, swap included, within the limits of their control groups."""
    shm_gib: float
    shm_free_gib: float
    max_files: int
    """That a process may hold open: the soft limit; -1 means none."""
    max_pinned: int
    """Bytes that a process may pin in memory: the soft limit; -1 means none."""
    has_infiniband: bool
    interfaces: dict[str, str]
    """Network interfaces that are up, without lo, with their IPv4 address."""
    host_address: str
    """What the host name resolves to; empty if it does not."""
    environment: dict[str, str]
    """Of `READ`, where set."""
    broken_launcher_files: tuple[str, ...]
    """Of the .deepspeed_env files that the launcher reads, those that it fails on."""
    programs: tuple[str, ...]
    """deepspeed, pdsh, ssh: those on PATH."""
    lacks_compiler: str
    """What Triton misses to compile; empty for nothing."""
    disk: Disk
    corpus: CorpusShards | None


def gather(*, run_dir: Path, data: str = "") -> Facts:
    """Look around. `run_dir` need not exist: its nearest parent that does is tried. `data`: a corpus, if given."""
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    drivers = drivers_of_gpus()
    return Facts(
        host=socket.gethostname(),
        python=platform.python_version(),
        versions={name: version for name in WATCHED if (version := _version(name))} | {"txl_dist": __version__},
        unmet=tuple(_unmet()),
        torch_cuda=torch.version.cuda or "",
        driver=drivers[0] if drivers else "",
        num_driver_gpus=len(drivers),
        devices=tuple(map(_device, range(torch.cuda.device_count()))) if uses_gpu() else (),
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
        lacks_compiler=missing_compiler_reason(),
        disk=try_disk(run_dir),
        corpus=try_corpus(data) if data else None,
    )


def _broken_launcher_files() -> Iterator[str]:
    for path in environment_files():
        with suppress(OSError, UnicodeDecodeError):  # what cannot be read here, the launcher says itself
            if not all("=" in line for line in read_text(path).splitlines()):
                yield str(path)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _unmet() -> Iterator[str]:
    with suppress(importlib.metadata.PackageNotFoundError):  # run from its source, as in our images
        for need in map(Requirement, importlib.metadata.requires("txl_dist") or []):
            applies = need.marker is None or need.marker.evaluate({"extra": ""})
            version = _version(need.name)
            if applies and not (version and need.specifier.contains(version, prereleases=True)):
                yield f"{need.name}{need.specifier} (is {version or 'not installed'})"


def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    # Code for 8.0 runs on 8.6 too; ptx of an older architecture is compiled when it is first used.
    compiled = [name.partition("_")[2].rstrip("af") for name in torch.cuda.get_arch_list()]
    return Device(
        name=properties.name,
        memory_gib=total / GIB,
        free_gib=free / GIB,
        capability=(properties.major, properties.minor),
        has_code=any(one[:-1] == str(properties.major) and int(one[-1]) <= properties.minor for one in compiled),
        peak_tflops=peak_tflops(properties.name, precision="bf16"),
    )


def _backends() -> dict[str, str]:
    backends = {}
    if torch.distributed.is_gloo_available():
        backends["gloo"] = ""
    if torch.distributed.is_nccl_available():
        backends["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return backends


def _cgroup_cores() -> float:
    limits = []
    for group, is_v2 in control_groups("cpu"):
        quota, _, period = _text(group / ("cpu.max" if is_v2 else "cpu.cfs_quota_us")).partition(" ")
        if quota not in ("", "max", "-1"):
            limits.append(int(quota) / int(period or "100000"))
    return min(limits, default=0.0)


def _interfaces() -> dict[str, str]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup} - {"lo"}
    return {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if name in up and address.family == socket.AF_INET
    }


def _host_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _text(path: str | Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return Path(path).read_text(encoding="utf-8").strip()
    return ""
