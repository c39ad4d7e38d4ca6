"""What this process finds on its machine, for `txl doctor`: plain facts, without a verdict (those are in `checks`).

    gather(...) -> Facts        versions, devices, processors, memory, limits, network, environment, disk, corpus

Whatever cannot be found out (no /proc, no nvidia-smi, no cgroup) is an empty or neutral value, never an error. Sizes
are in GiB, times in ms, speeds of disks in MiB/s and of interfaces in Mbit/s. Takes one to ten seconds, most of them
for the disk.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from packaging.requirements import Requirement

from txl_dist import __version__
from txl_dist.dist import local_world_size, uses_gpu
from txl_dist.model.flops import peak_tflops
from txl_dist.model.kernels.launch import lacks_compiler
from txl_dist.ops.doctor.disk import Corpus, Disk, measure_corpus, measure_disk
from txl_dist.train.footprint.room import control_groups, host_room_bytes

GIB = 2**30
WATCHED = ("txl_dist", "torch", "deepspeed", "numpy", "triton")
"""Versions that have to agree between nodes."""
TRAPS = (
    *("CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "GLOO_SOCKET_IFNAME", "LD_PRELOAD"),
    *("NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME"),
    *("OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TRITON_INTERPRET"),
    "TXL_FAULT",
)
"""Environment variables that change what a run does, or how fast. No others are read: their values may be secret."""


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


class Interface(NamedTuple):
    """One network interface that is up."""

    name: str
    speed_mbit: int
    """0 where it is not known."""
    addresses: tuple[str, ...]
    """IPv4."""


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
    """gloo, nccl: version, or "yes"; missing where torch lacks it."""
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
    shm_leftovers: int
    limits: dict[str, int]
    """nofile, memlock (bytes), nproc, core (bytes): soft limits, -1 means none."""
    has_infiniband: bool
    interfaces: tuple[Interface, ...]
    host_address: str
    """What the host name resolves to; empty if it does not."""
    environment: dict[str, str]
    """Of `TRAPS`, where set."""
    orphans: tuple[int, ...]
    """Processes of this project whose parent is gone."""
    programs: dict[str, str]
    """deepspeed, pdsh, ssh: where they are, if they are."""
    lacks_compiler: str
    """What Triton misses to compile; empty for nothing."""
    busy_port: int
    """Where ranks would meet by default, if something listens there; 0 if nothing does, or ranks have met."""
    hostfile: str
    """That the deepspeed launcher takes without being asked; empty if there is none."""
    deepspeed_env: dict[str, tuple[str, ...]]
    """Per .deepspeed_env file that the launcher reads: its lines up to the equals sign."""
    disk: Disk
    corpus: Corpus | None


def gather(*, run_dir: Path, data: str = "") -> Facts:
    """Look around. `run_dir` need not exist: its nearest parent that does is measured. `data`: a corpus, if given."""
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    drivers = _drivers()
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
        shm_leftovers=sum(
            len(list(Path("/dev/shm").glob(name))) for name in ("torch_*", "sem.mp-*", "psm_*", "nccl-*")
        ),
        limits={
            name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[0]  # RLIM_INFINITY is -1
            for name in ("nofile", "memlock", "nproc", "core")
        },
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        interfaces=tuple(_interfaces()),
        host_address=_host_address(),
        environment={name: os.environ[name] for name in TRAPS if name in os.environ},
        orphans=tuple(_orphans()),
        programs=_programs(),
        lacks_compiler=lacks_compiler(),
        busy_port=_busy_port(),
        hostfile="/job/hostfile" if os.path.isfile("/job/hostfile") else "",
        deepspeed_env=_deepspeed_env(),
        disk=measure_disk(run_dir),
        corpus=measure_corpus(data) if data else None,
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _unmet() -> list[str]:
    found = []
    try:
        lines = importlib.metadata.requires("txl_dist") or []
    except importlib.metadata.PackageNotFoundError:  # run from its source, as in our images
        return []
    for line in lines:
        need = Requirement(line)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        version = _version(need.name)
        if not version or not need.specifier.contains(version, prereleases=True):
            found.append(f"{need.name}{need.specifier} (is {version or 'not installed'})")
    return found


def _drivers() -> list[str]:
    """The driver's version, once per GPU that it sees."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


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
        backends["gloo"] = "yes"
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


def _interfaces() -> list[Interface]:
    addresses = psutil.net_if_addrs()
    return [
        Interface(name, state.speed, tuple(a.address for a in addresses.get(name, []) if a.family == socket.AF_INET))
        for name, state in psutil.net_if_stats().items()
        if state.isup
    ]


def _host_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _programs() -> dict[str, str]:
    names = {name: shutil.which(name) for name in ("deepspeed", "pdsh", "ssh")}
    if "RANK" in os.environ:  # a launcher did without our PATH
        names["deepspeed"] = shutil.which("deepspeed", path=str(Path(sys.executable).parent))
    return {name: path for name, path in names.items() if path}


def _busy_port() -> int:
    port = int(os.environ.get("MASTER_PORT", "29500"))
    with socket.socket() as probe:
        probe.settimeout(1.0)
        is_busy = "RANK" not in os.environ and probe.connect_ex(("127.0.0.1", port)) == 0
    return port if is_busy else 0


def _orphans() -> list[int]:
    found, own = [], {process.pid for process in (psutil.Process(), *psutil.Process().parents())}
    for process in psutil.process_iter(["ppid", "cmdline"]):
        words = process.info["cmdline"] or []
        if process.info["ppid"] == 1 and process.pid not in own and "txl_dist" in words:
            found.append(process.pid)
    return found


def _deepspeed_env() -> dict[str, tuple[str, ...]]:
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    places = {Path.home() / name, Path.cwd() / name}
    lines = {str(path): path.read_text(encoding="utf-8").splitlines() for path in sorted(places) if path.is_file()}
    # Values may be secrets.
    return {path: tuple("".join(line.partition("=")[:2]) for line in content) for path, content in lines.items()}


def _text(path: str | Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return Path(path).read_text(encoding="utf-8").strip()
    return ""
