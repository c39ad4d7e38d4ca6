"""Verdicts of `txl doctor` on the facts of one machine: what is wrong, and what to do about it. Pure functions.

    ok        as it should be, or of no consequence
    warning   a run works, but slower, less safely, or not with every setting
    problem   a run fails, or gives wrong results: exit code 1

A limit here is a judgement, not a measurement: it says where experience begins to look for the cause elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from txl_dist.ops.doctor.machine import Facts

Verdict = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """What one check found."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""
    """A sentence; empty where nothing is to be done."""


def judge(facts: Facts, *, is_several: bool = False, has_met: bool = False) -> list[Finding]:
    """All checks of one machine, each with a finding at least.

    `is_several`: the job has other machines too. `has_met`: and its ranks have connected to each other.
    """
    findings = [finding for check in CHECKS for finding in check(facts)]
    local_name_hurts = is_several and not has_met
    return [*findings, *_host_name(facts, hurts=local_name_hurts), *_interfaces(facts, is_several=is_several)]


def _versions(facts: Facts) -> Iterator[Finding]:
    listed = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    if facts.unmet:
        remedy = (
            'Install what is asked for: pip install -c constraints.txt -e ".". torch below 2.10 loads pickles unsafely.'
        )
        yield Finding("versions", "problem", f"unmet: {'; '.join(facts.unmet)}", remedy)
    else:
        yield Finding("versions", "ok", f"Python {facts.python}, {listed}; all requirements are met")
    if facts.environment.get("TRITON_INTERPRET") == "1":
        yield Finding(
            "TRITON_INTERPRET",
            "problem" if facts.devices else "warning",
            "kernels run in Triton's interpreter, thousands of times slower; with triton 3.6 and numpy 2.4 it fails",
            "Unset TRITON_INTERPRET, which is for tests.",
        )


def _devices(facts: Facts) -> Iterator[Finding]:
    if not facts.devices:
        yield _no_devices(facts)
    for index, device in enumerate(facts.devices):
        name, major = f"GPU {index}", device.capability[0]
        text = f"{device.name}, {device.memory_gib:.0f} GiB, capability {major}.{device.capability[1]}"
        if not device.has_code:
            remedy = "Install a build of torch for this GPU (https://pytorch.org lists them)."
            yield Finding(name, "problem", f"{text}: this torch has no code for it", remedy)
        elif device.ecc_errors.isdigit() and int(device.ecc_errors) > 0:
            remedy = "Take the GPU out of service, or reset it; then watch nvidia-smi -q -d ECC."
            yield Finding(name, "problem", f"{text}: {device.ecc_errors} uncorrected memory errors", remedy)
        elif device.free_gib < 0.9 * device.memory_gib:
            remedy = "nvidia-smi lists the processes; end the one that does not belong here."
            yield Finding(name, "warning", f"{text}: only {device.free_gib:.1f} GiB of it are free", remedy)
        elif major < 8:
            remedy = "Use --engine.precision fp16 or fp32."
            yield Finding(name, "warning", f"{text}: bf16 is emulated", remedy)
        elif not device.peak_tflops:
            remedy = "Set metrics.peak_tflops from the datasheet to have MFU reported."
            yield Finding(name, "warning", f"{text}: its peak is not known", remedy)
        else:
            yield Finding(name, "ok", f"{text}, peak {device.peak_tflops:g} TFLOP/s in bf16")


def _no_devices(facts: Facts) -> Finding:
    if not facts.num_driver_gpus:
        return Finding("GPU", "ok", "none; runs are on the CPU (fp32 is fast here, fp16 is refused)")
    seen = f"the driver {facts.driver} sees {facts.num_driver_gpus} GPUs, this process uses none"
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        if name in facts.environment:
            value = facts.environment[name]
            return Finding("GPU", "warning", f"{seen}: {name}={value!r}", f"Unset {name} if that is not meant.")
    if not facts.torch_cuda:
        remedy = "Install the build of torch with CUDA (pip install torch without the cpu index)."
        return Finding("GPU", "problem", f"{seen}: this torch is built without CUDA", remedy)
    remedy = f"Update the driver to one for CUDA {facts.torch_cuda}, or install a torch for an older CUDA."
    return Finding("GPU", "problem", f"{seen}: torch for CUDA {facts.torch_cuda} cannot use it", remedy)


def _backends(facts: Facts) -> Iterator[Finding]:
    missing = [name for name in ("gloo", *(["nccl"] if facts.devices else [])) if name not in facts.backends]
    listed = ", ".join(f"{name} {version}".removesuffix(" yes") for name, version in facts.backends.items())
    if missing:
        remedy = "Install an official build of torch for Linux, which has both."
        yield Finding("backends", "problem", f"torch lacks {' and '.join(missing)}", remedy)
    else:
        yield Finding("backends", "ok", listed)


def _processors(facts: Facts) -> Iterator[Finding]:
    cores = min(facts.num_cores, facts.cgroup_cores or facts.num_cores)
    limit = f", of which the control group allows {facts.cgroup_cores:g}" if facts.cgroup_cores else ""
    found = f"{facts.num_cores} cores{limit} for {facts.num_local_ranks} ranks"
    threads = facts.environment.get("OMP_NUM_THREADS", "")
    if cores < facts.num_local_ranks:
        yield Finding("processors", "warning", found, "Give the job a core per rank at least, or start fewer ranks.")
    elif facts.cgroup_cores and facts.cgroup_cores < facts.num_cores and not threads:
        threads_per_rank = max(1, int(cores / facts.num_local_ranks))
        remedy = f"Set --engine.num_threads {threads_per_rank}: by itself a rank counts cores, not what it may use."
        yield Finding("processors", "warning", found, remedy)
    else:
        yield Finding("processors", "ok", found)
    if threads and not (threads.isdigit() and int(threads) > 0):
        yield Finding("OMP_NUM_THREADS", "problem", f"is {threads!r}", "Set it to a number of 1 or more, or unset it.")
    elif threads and int(threads) * facts.num_local_ranks > facts.num_cores:
        found = f"{threads} threads for each of {facts.num_local_ranks} ranks on {facts.num_cores} cores"
        remedy = (
            f"Set it to {max(1, facts.num_cores // facts.num_local_ranks)}: threads that wait for a core slow all down."
        )
        yield Finding("OMP_NUM_THREADS", "warning", found, remedy)
    elif threads:
        yield Finding("OMP_NUM_THREADS", "ok", f"{threads}; it wins over engine.num_threads=0")


def _memory(facts: Facts) -> Iterator[Finding]:
    limit = f"; the control group allows {facts.cgroup_memory_gib:.1f}" if facts.cgroup_memory_gib else ""
    found = f"{facts.available_gib:.1f} of {facts.memory_gib:.1f} GiB available{limit}"
    usable = min(facts.available_gib, facts.cgroup_memory_gib or facts.available_gib)
    if usable < 1.5 * facts.num_local_ranks:
        remedy = "Free some, or raise the limit: a rank needs about 1 GiB before its model."
        yield Finding("memory", "problem", found, remedy)
    else:
        yield Finding("memory", "ok", found)
    if facts.swap_used_gib > 1:
        remedy = "Find what fills the memory: a rank that is swapped out holds up all others."
        yield Finding("swap", "warning", f"{facts.swap_used_gib:.1f} GiB are in use", remedy)
    else:
        yield Finding("swap", "ok", f"{facts.swap_used_gib:.1f} GiB in use")
    kernel = f"overcommit {facts.overcommit}, transparent huge pages {facts.huge_pages or 'not known'}"
    if facts.overcommit == 2:
        remedy = "Set vm.overcommit_memory to 0: libraries reserve far more address space than they use."
        yield Finding("kernel", "warning", kernel, remedy)
    else:
        yield Finding("kernel", "ok", kernel)


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    room = f"{facts.shm_free_gib:.2f} of {facts.shm_gib:.2f} GiB free"
    found = f"{room}, {facts.shm_leftovers} files of torch, nccl or Python"
    if len(facts.devices) > 1 and facts.shm_free_gib < 1:
        remedy = "NCCL needs more: docker run --shm-size=8g (or --ipc=host), or remove files of dead processes there."
        yield Finding("/dev/shm", "problem", found, remedy)
    elif facts.shm_gib and facts.shm_free_gib < facts.shm_gib / 2:
        remedy = "Remove files of dead processes: they hold memory until the next boot."
        yield Finding("/dev/shm", "warning", found, remedy)
    else:
        yield Finding("/dev/shm", "ok", found)


def _limits(facts: Facts) -> Iterator[Finding]:
    files, locked, processes = (facts.limits[name] for name in ("nofile", "memlock", "nproc"))
    listed = ", ".join(f"{name} {'unlimited' if value < 0 else value}" for name, value in facts.limits.items())
    if 0 <= files < 256:
        yield Finding("limits", "problem", listed, "Run ulimit -n 65536: each lane may hold a shard open.")
    elif 0 <= files < 4096:
        yield Finding("limits", "warning", listed, "Run ulimit -n 65536, for runs of many lanes and shards.")
    elif 0 <= processes < 1024:
        yield Finding("limits", "warning", listed, "Run ulimit -u unlimited: threads count as processes.")
    elif facts.has_infiniband and locked >= 0:
        remedy = "Run ulimit -l unlimited (docker run --ulimit memlock=-1): InfiniBand pins its buffers."
        yield Finding("limits", "problem", listed, remedy)
    else:
        yield Finding("limits", "ok", listed)


def _clock(facts: Facts) -> Iterator[Finding]:
    if facts.is_clock_synchronised is False:
        remedy = "Start chrony or systemd-timesyncd; logs of several nodes, and https and S3, rely on it."
        yield Finding("clock", "warning", "the kernel says that it is not synchronised", remedy)
    else:
        state = "is synchronised" if facts.is_clock_synchronised else "cannot be asked here"
        yield Finding("clock", "ok", state)


def _text(facts: Facts) -> Iterator[Finding]:
    if facts.encoding.lower().replace("-", "") != "utf8":
        remedy = "Set LANG=C.UTF-8 or PYTHONUTF8=1: names and texts that are not ASCII fail otherwise."
        yield Finding("locale", "warning", f"text is {facts.encoding}", remedy)
    else:
        yield Finding("locale", "ok", facts.encoding)


def _disk(facts: Facts) -> Iterator[Finding]:
    disk = facts.disk
    where = f"{disk.folder} ({disk.kind or 'kind not known'})"
    if disk.error:
        yield Finding("disk", "problem", f"{where}: {disk.error}", "Mend its permissions or choose another --run-dir.")
        return
    inodes = "" if disk.free_inodes < 0 else f", {disk.free_inodes:,} inodes"
    free = f"{where}: {disk.free_gib:.1f} GiB{inodes} free"
    if disk.free_gib < 1 or 0 <= disk.free_inodes < 1000:
        yield Finding("disk space", "problem", free, "Free some: a save that finds no room is lost.")
    elif disk.free_gib < 20:
        remedy = "See that checkpoint.keep_last + 1 checkpoints fit (txl train CONFIG --dry-run estimates their size)."
        yield Finding("disk space", "warning", free, remedy)
    else:
        yield Finding("disk space", "ok", free)
    speed = f"write {disk.write_mib_s:.0f} MiB/s, read {disk.read_mib_s:.0f} MiB/s, force 4 KiB {disk.force_ms:.1f} ms"
    if disk.write_mib_s < 50 or disk.force_ms > 100:
        remedy = "Keep checkpoint.asynchronous on and checkpoint.every_steps high, or put the run on a faster disk."
        yield Finding("disk speed", "warning", speed, remedy)
    else:
        yield Finding("disk speed", "ok", speed)
    if not disk.renames:
        remedy = "Put the run on another file system: a checkpoint is committed by a rename."
        yield Finding("disk promises", "problem", "a rename over another file does not replace it", remedy)
    elif disk.kind in ("tmpfs", "ramfs"):
        remedy = "Put the run on a disk: what is here is gone after a reboot, and takes memory."
        yield Finding("disk promises", "warning", f"{disk.kind} is memory", remedy)
    elif not disk.locks:
        remedy = "Put data.cache_dir on a local disk: ranks of a node share its downloads by locks."
        yield Finding("disk promises", "warning", "rename works, file locks do not", remedy)
    else:
        yield Finding("disk promises", "ok", "rename, force and file locks work")


def _corpus(facts: Facts) -> Iterator[Finding]:
    corpus = facts.corpus
    if corpus is None:
        return
    if corpus.error:
        yield Finding("corpus", "problem", corpus.error, "Name what txl prepare wrote, as this machine sees it.")
        return
    speed = f", read {corpus.read_mib_s:.0f} MiB/s" if corpus.read_mib_s else ""
    found = f"{corpus.location}: {corpus.tokens:,} tokens{speed}"
    if 0 < corpus.read_mib_s < 20:
        yield Finding("corpus", "warning", found, "Copy it to a local disk, or raise data.prefetch_depth.")
    else:
        yield Finding("corpus", "ok", found)


SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("0", "the host waits for every kernel"),
    "NCCL_IB_DISABLE": ("0", "NCCL does not use InfiniBand"),
    "NCCL_P2P_DISABLE": ("0", "GPUs do not talk to each other directly"),
    "NCCL_SHM_DISABLE": ("0", "NCCL does not use shared memory"),
    "LD_PRELOAD": ("", "libraries are replaced in every process"),
}
"""Variables that slow a run down: (the value that does nothing, what others do)."""


def _environment(facts: Facts) -> Iterator[Finding]:
    environment, is_clean = facts.environment, True
    for name, (harmless, effect) in SLOW.items():
        if environment.get(name, harmless) != harmless:
            is_clean = False
            yield Finding(name, "warning", f"is {environment[name]}: {effect}", f"Unset {name} if that is not meant.")
    for name, loud in (("TORCH_DISTRIBUTED_DEBUG", "DETAIL"), ("NCCL_DEBUG", "TRACE")):
        if environment.get(name, "").upper() == loud:
            is_clean = False
            yield Finding(name, "warning", f"is {loud}: every collective is checked or logged", f"Unset {name}.")
    if environment.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") not in ("", "0"):
        is_clean, name = False, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
        yield Finding(name, "problem", "torch.load runs code that files hold", f"Unset {name}.")
    if environment.get("TXL_FAULT"):
        is_clean = False
        yield Finding("TXL_FAULT", "problem", "faults are made to happen on purpose", "Unset it; it is for tests.")
    if is_clean:
        yield Finding("environment", "ok", "no variable that slows a run down or endangers it")


def _programs(facts: Facts) -> Iterator[Finding]:
    if "deepspeed" in facts.programs:
        tools = ", ".join(name for name in ("pdsh", "ssh") if name in facts.programs)
        found = f"{facts.programs['deepspeed']}; for several nodes: {tools or 'neither pdsh nor ssh, so --no_ssh'}"
        yield Finding("launcher", "ok", found)
    else:
        remedy = "Activate the environment that has it, also in shells without login; or start with torchrun or srun."
        yield Finding("launcher", "warning", "there is no program deepspeed on PATH", remedy)
    yield _compiler(facts)
    if facts.hostfile:
        remedy = "Remove it, or give --hostfile (or --num_gpus for this machine only)."
        found = f"{facts.hostfile} exists: the deepspeed launcher takes its nodes without being asked"
        yield Finding("hostfile", "warning", found, remedy)
    for path, lines in facts.deepspeed_env.items():
        if any(not line.strip().endswith("=") for line in lines):
            remedy = "Write NAME=VALUE in every line, without blank lines: the deepspeed launcher fails on others."
            yield Finding(".deepspeed_env", "problem", f"{path} has a line without an equals sign", remedy)
        else:
            names = ", ".join(line.rstrip("=") for line in lines)
            yield Finding(".deepspeed_env", "ok", f"{path} sets on every node: {names or 'nothing'}")
    if facts.busy_port:
        remedy = "Give --master_port to deepspeed, or use txl launch, which finds a free one."
        yield Finding("port", "warning", f"something listens at {facts.busy_port}, where ranks would meet", remedy)
    if facts.orphans:
        remedy = "See what they are (ps -fp PID); a rank that hangs holds its GPU and its run directory."
        pids = ", ".join(map(str, facts.orphans[:10]))
        yield Finding("processes", "warning", f"txl_dist runs without a parent: pid {pids}", remedy)
    else:
        yield Finding("processes", "ok", "none of ours is left behind")


def _compiler(facts: Facts) -> Finding:
    compiler = facts.programs.get("cc", "")
    if not facts.devices:
        return Finding("compiler", "ok", "none is needed on a CPU: no operator of DeepSpeed is compiled")
    if compiler and facts.has_python_header:
        return Finding("compiler", "ok", f"{compiler}: Triton needs it, DeepSpeed does not")
    missing = "Python.h" if compiler else "a C compiler"
    remedy = "Install gcc and the headers of Python (Debian: gcc python3-dev), or use --engine.attention fused."
    return Finding(
        "compiler", "problem", f"{missing} is missing, with which Triton compiles the starter of kernels", remedy
    )


def _host_name(facts: Facts, *, hurts: bool) -> Iterator[Finding]:
    """gloo listens at the address that the host name has, unless it is told an interface."""
    found = f"{facts.host} resolves to {facts.host_address or 'nothing'}"
    is_local = not facts.host_address or facts.host_address.startswith("127.")
    if is_local and hurts and "GLOO_SOCKET_IFNAME" not in facts.environment:
        remedy = "Set GLOO_SOCKET_IFNAME to the interface between the nodes, or mend /etc/hosts."
        yield Finding("host name", "problem", found, remedy)
    else:
        note = "; several nodes may need GLOO_SOCKET_IFNAME then" if is_local else ""
        yield Finding("host name", "ok", found + note)


def _interfaces(facts: Facts, *, is_several: bool) -> Iterator[Finding]:
    real = [interface for interface in facts.interfaces if interface.name != "lo" and interface.addresses]
    listed = ", ".join(
        f"{one.name} {' '.join(one.addresses)}" + (f" {one.speed_mbit / 1000:g} Gbit/s" if one.speed_mbit > 0 else "")
        for one in real
    )
    if not real and is_several:
        yield Finding("interfaces", "problem", "none is up with an IPv4 address", "Bring up the network between nodes.")
    elif is_several and max((one.speed_mbit for one in real), default=0) in range(1, 10000):
        remedy = "Use a faster network, or fewer, larger steps: gradients go over it at every step."
        yield Finding("interfaces", "warning", listed, remedy)
    else:
        yield Finding("interfaces", "ok", listed or "none but lo")
    up = {interface.name for interface in facts.interfaces}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = facts.environment.get(variable, "")
        names = [name.partition(":")[0] for name in value.removeprefix("=").split(",")]
        if not value or value.startswith("^"):  # ^ names those that NCCL leaves out
            continue
        is_prefix = variable.startswith("NCCL") and not value.startswith("=")
        unknown = [name for name in names if not any(one.startswith(name) if is_prefix else one == name for one in up)]
        if unknown:
            remedy = f"Set {variable} to one of {', '.join(sorted(up))}; names may differ between nodes."
            yield Finding(variable, "problem", f"names {', '.join(unknown)}, which is not up here", remedy)
        else:
            yield Finding(variable, "ok", value)


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _versions,
    _devices,
    _backends,
    _processors,
    _memory,
    _shared_memory,
    _limits,
    _clock,
    _text,
    _disk,
    _corpus,
    _environment,
    _programs,
)
