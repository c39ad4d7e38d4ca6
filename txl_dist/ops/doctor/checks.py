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


def first_of(name: str, found: str, *rules: tuple[object, Verdict, str]) -> Finding:
    """With verdict and remedy of the first rule whose condition holds; ok if none does."""
    for holds, verdict, remedy in rules:
        if holds:
            return Finding(name, verdict, found, remedy)
    return Finding(name, "ok", found)


def judge(facts: Facts, *, is_several: bool = False, has_met: bool = False) -> list[Finding]:
    """All checks of one machine, each with a finding at least.

    `is_several`: the job has other machines too. `has_met`: and its ranks have connected to each other.
    """
    findings = [finding for check in CHECKS for finding in check(facts)]
    local_name_hurts = is_several and not has_met
    return [*findings, _host_name(facts, hurts=local_name_hurts), *_interfaces(facts, is_several=is_several)]


def _versions(facts: Facts) -> Iterator[Finding]:
    listed = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    met = f"Python {facts.python}, {listed}; all requirements are met"
    found = f"unmet: {'; '.join(facts.unmet)}" if facts.unmet else met
    remedy = (
        'Install what is asked for: pip install -c constraints.txt -e ".". torch below 2.10 loads pickles unsafely.'
    )
    yield first_of("versions", found, (facts.unmet, "problem", remedy))
    if facts.environment.get("TRITON_INTERPRET") == "1":
        found = "kernels run in Triton's interpreter, thousands of times slower; with triton 3.6 and numpy 2.4 it fails"
        remedy = "Unset TRITON_INTERPRET, which is for tests."
        yield Finding("TRITON_INTERPRET", "problem" if facts.devices else "warning", found, remedy)


def _devices(facts: Facts) -> Iterator[Finding]:
    for index, device in enumerate(facts.devices):
        major, minor = device.capability
        yield first_of(
            f"GPU {index}",
            f"{device.name}, capability {major}.{minor}, {device.free_gib:.1f} of {device.memory_gib:.1f} GiB free, "
            f"peak {f'{device.peak_tflops:g} TFLOP/s in bf16' if device.peak_tflops else 'not known'}",
            (not device.has_code, "problem", "This torch has no code for it: install one that has (pytorch.org)."),
            (device.free_gib < 0.9 * device.memory_gib, "warning", "End whose process it is: nvidia-smi lists them."),
            (major < 8, "warning", "It emulates bf16: use --engine.precision fp16 or fp32."),
            (not device.peak_tflops, "warning", "Set metrics.peak_tflops from the datasheet to have MFU reported."),
        )
    if facts.devices:
        return
    if not facts.num_driver_gpus:
        yield Finding("GPU", "ok", "none; runs are on the CPU (fp32 is fast here, fp16 is refused)")
        return
    cuda = facts.torch_cuda
    seen = f"the driver {facts.driver} sees {facts.num_driver_gpus} GPUs, this process uses none"
    hidden = [name for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES") if name in facts.environment]
    yield first_of(
        "GPU",
        f"{seen}: {', '.join(f'{name}={facts.environment[name]!r}' for name in hidden) or f'torch for CUDA {cuda}'}",
        (hidden, "warning", f"Unset {' and '.join(hidden)} if that is not meant."),
        (not cuda, "problem", "Install the build of torch with CUDA (pip install torch without the cpu index)."),
        (True, "problem", f"Update the driver to one for CUDA {cuda}, or install a torch for an older CUDA."),
    )


def _backends(facts: Facts) -> Iterator[Finding]:
    missing = [name for name in ("gloo", *(["nccl"] if facts.devices else [])) if name not in facts.backends]
    listed = ", ".join(f"{name} {version}".removesuffix(" yes") for name, version in facts.backends.items())
    found = f"torch lacks {' and '.join(missing)}" if missing else listed
    remedy = "Install an official build of torch for Linux, which has both."
    yield first_of("backends", found, (missing, "problem", remedy))


def _processors(facts: Facts) -> Iterator[Finding]:
    ranks, threads = facts.num_local_ranks, facts.environment.get("OMP_NUM_THREADS", "")
    cores = min(facts.num_cores, facts.cgroup_cores or facts.num_cores)
    limit = f", of which the control group allows {facts.cgroup_cores:g}" if facts.cgroup_cores else ""
    own = f"Set --engine.num_threads {max(1, int(cores / ranks))}: a rank counts cores, not what it may use of them."
    yield first_of(
        "processors",
        f"{facts.num_cores} cores{limit} for {ranks} ranks",
        (cores < ranks, "warning", "Give the job a core per rank at least, or start fewer ranks."),
        (cores < facts.num_cores and not threads, "warning", own),
    )
    if threads:
        count = int(threads) if threads.isdigit() else 0
        remedy = f"Set it to {max(1, facts.num_cores // ranks)}: threads that wait for a core slow all down."
        yield first_of(
            "OMP_NUM_THREADS",
            f"{threads} threads for each of {ranks} ranks on {facts.num_cores} cores; it wins over "
            "engine.num_threads=0",
            (count < 1, "problem", "Set it to a number of 1 or more, or unset it."),
            (count * ranks > facts.num_cores, "warning", remedy),
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    remedy = "Free some, or raise the limit: a rank needs about 1 GiB before its model."
    found = f"{facts.room_gib:.1f} of {facts.memory_gib:.1f} GiB are left to processes"
    yield first_of("memory", found, (facts.room_gib < 1.5 * facts.num_local_ranks, "problem", remedy))
    room = f"{facts.shm_free_gib:.2f} of {facts.shm_gib:.2f} GiB free"
    more = "NCCL needs more: docker run --shm-size=8g (or --ipc=host), or remove files of dead processes there."
    full = "Remove files of dead processes: they hold memory until the next boot."
    yield first_of(
        "/dev/shm",
        f"{room}, {facts.shm_leftovers} files of torch, nccl or Python",
        (len(facts.devices) > 1 and facts.shm_free_gib < 1, "problem", more),
        (facts.shm_free_gib < facts.shm_gib / 2, "warning", full),
    )


def _limits(facts: Facts) -> Iterator[Finding]:
    files, locked, processes = (facts.limits[name] for name in ("nofile", "memlock", "nproc"))
    pins = "Run ulimit -l unlimited (docker run --ulimit memlock=-1): InfiniBand pins its buffers."
    yield first_of(
        "limits",
        ", ".join(f"{name} {'unlimited' if value < 0 else value}" for name, value in facts.limits.items()),
        (0 <= files < 256, "problem", "Run ulimit -n 65536: each lane may hold a shard open."),
        (0 <= files < 4096, "warning", "Run ulimit -n 65536, for runs of many lanes and shards."),
        (0 <= processes < 1024, "warning", "Run ulimit -u unlimited: threads count as processes."),
        (facts.has_infiniband and locked >= 0, "problem", pins),
    )


def _disk(facts: Facts) -> Iterator[Finding]:
    disk = facts.disk
    where = f"{disk.folder} ({disk.kind or 'kind not known'})"
    if disk.error:
        yield Finding("disk", "problem", f"{where}: {disk.error}", "Mend its permissions or choose another --run-dir.")
        return
    fit = "See that checkpoint.keep_last + 1 checkpoints fit (txl train CONFIG --dry-run estimates their size)."
    yield first_of(
        "disk space",
        f"{where}: {disk.free_gib:.1f} GiB free",
        (disk.free_gib < 1, "problem", "Free some: a save that finds no room is lost."),
        (disk.free_gib < 20, "warning", fit),
    )
    slow = "Keep checkpoint.asynchronous on and checkpoint.every_steps high, or put the run on a faster disk."
    yield first_of(
        "disk speed",
        f"write {disk.write_mib_s:.0f} MiB/s, read {disk.read_mib_s:.0f} MiB/s, force 4 KiB {disk.force_ms:.1f} ms",
        (disk.write_mib_s < 50 or disk.force_ms > 100, "warning", slow),
    )
    promises = {"rename": disk.renames, "force": True, "file locking": disk.locks}
    memory = "Put the run on a disk: what is here is memory, and gone after a reboot."
    yield first_of(
        "disk promises",
        ", ".join(f"{name} {'works' if works else 'does not work'}" for name, works in promises.items()),
        (not disk.renames, "problem", "Put the run on another file system: a checkpoint is committed by a rename."),
        (disk.kind in ("tmpfs", "ramfs"), "warning", memory),
        (not disk.locks, "warning", "Put data.cache_dir on a local disk: ranks share its downloads by locks."),
    )


def _corpus(facts: Facts) -> Iterator[Finding]:
    corpus = facts.corpus
    if corpus is None:
        return
    speed = f", read {corpus.read_mib_s:.0f} MiB/s" if corpus.read_mib_s else ""
    yield first_of(
        "corpus",
        corpus.error or f"{corpus.location}: {corpus.tokens:,} tokens{speed}",
        (corpus.error, "problem", "Name what txl prepare wrote, as this machine sees it."),
        (0 < corpus.read_mib_s < 20, "warning", "Copy it to a local disk, or raise data.prefetch_depth."),
    )


HARMFUL: dict[str, tuple[tuple[str, ...], Verdict, str]] = {
    "CUDA_LAUNCH_BLOCKING": (("", "0"), "warning", "the host waits for every kernel"),
    "NCCL_IB_DISABLE": (("", "0"), "warning", "NCCL does not use InfiniBand"),
    "NCCL_P2P_DISABLE": (("", "0"), "warning", "GPUs do not talk to each other directly"),
    "NCCL_SHM_DISABLE": (("", "0"), "warning", "NCCL does not use shared memory"),
    "LD_PRELOAD": (("",), "warning", "libraries are replaced in every process"),
    "TORCH_DISTRIBUTED_DEBUG": (("", "OFF", "INFO"), "warning", "every collective is checked"),
    "NCCL_DEBUG": (("", "VERSION", "WARN", "INFO"), "warning", "every collective is logged"),
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": (("", "0"), "problem", "torch.load runs code that files hold"),
    "TXL_FAULT": (("",), "problem", "faults are made to happen on purpose, as in tests"),
}
"""Variables that slow a run down or endanger it: (the values that do not, verdict on others, what those do)."""


def _environment(facts: Facts) -> Iterator[Finding]:
    found = [
        Finding(name, verdict, f"is {value}: {effect}", f"Unset {name} if that is not meant.")
        for name, (harmless, verdict, effect) in HARMFUL.items()
        if (value := facts.environment.get(name, "")).upper() not in harmless
    ]
    yield from found or [Finding("environment", "ok", "no variable that slows a run down or endangers it")]


def _programs(facts: Facts) -> Iterator[Finding]:
    launcher = facts.programs.get("deepspeed")
    tools = ", ".join(name for name in ("pdsh", "ssh") if name in facts.programs)
    found = f"{launcher}; for several nodes: {tools or 'neither pdsh nor ssh, so --no_ssh'}"
    remedy = "Activate the environment that has it, also in shells without login; or start with torchrun or srun."
    missing = "there is no program deepspeed on PATH"
    yield first_of("launcher", found if launcher else missing, (not launcher, "warning", remedy))
    if facts.devices:
        remedy = "Install gcc and the headers of Python (Debian: gcc python3-dev), or use --engine.attention fused."
        found = facts.lacks_compiler or "Triton finds what it needs, and DeepSpeed needs none"
        yield first_of("compiler", found, (facts.lacks_compiler, "problem", remedy))
    else:
        yield Finding("compiler", "ok", "none is needed on a CPU: no operator of DeepSpeed is compiled")
    if facts.hostfile:
        remedy = "Remove it, or give --hostfile (or --num_gpus for this machine only)."
        found = f"{facts.hostfile} exists: the deepspeed launcher takes its nodes without being asked"
        yield Finding("hostfile", "warning", found, remedy)
    for path, lines in facts.deepspeed_env.items():
        is_broken = any(not line.strip().endswith("=") for line in lines)
        names = ", ".join(line.rstrip("=") for line in lines)
        found = "has a line without an equals sign" if is_broken else f"sets on every node: {names or 'nothing'}"
        remedy = "Write NAME=VALUE in every line, without blank lines: the deepspeed launcher fails on others."
        yield first_of(".deepspeed_env", f"{path} {found}", (is_broken, "problem", remedy))
    if facts.busy_port:
        remedy = "Give --master_port to deepspeed, or use txl launch, which finds a free one."
        yield Finding("port", "warning", f"something listens at {facts.busy_port}, where ranks would meet", remedy)
    pids = ", ".join(map(str, facts.orphans[:10]))
    found = f"txl_dist runs without a parent: pid {pids}" if pids else "none of ours is left behind"
    remedy = "See what they are (ps -fp PID); a rank that hangs holds its GPU and its run directory."
    yield first_of("processes", found, (pids, "warning", remedy))


def _host_name(facts: Facts, *, hurts: bool) -> Finding:
    """gloo listens at the address that the host name has, unless it is told an interface."""
    is_local = not facts.host_address or facts.host_address.startswith("127.")
    note = "; several nodes may need GLOO_SOCKET_IFNAME then" if is_local else ""
    remedy = "Set GLOO_SOCKET_IFNAME to the interface between the nodes, or mend /etc/hosts."
    return first_of(
        "host name",
        f"{facts.host} resolves to {facts.host_address or 'nothing'}{note}",
        (is_local and hurts and "GLOO_SOCKET_IFNAME" not in facts.environment, "problem", remedy),
    )


def _interfaces(facts: Facts, *, is_several: bool) -> Iterator[Finding]:
    real = [interface for interface in facts.interfaces if interface.name != "lo" and interface.addresses]
    listed = ", ".join(
        f"{one.name} {' '.join(one.addresses)}" + (f" {one.speed_mbit / 1000:g} Gbit/s" if one.speed_mbit > 0 else "")
        for one in real
    )
    is_slow = 0 < max((one.speed_mbit for one in real), default=0) < 10_000
    slow = "Use a faster network, or fewer, larger steps: gradients go over it at every step."
    yield first_of(
        "interfaces",
        listed or "none but lo is up with an IPv4 address",
        (is_several and not real, "problem", "Bring up the network between nodes."),
        (is_several and is_slow, "warning", slow),
    )
    up = {interface.name for interface in facts.interfaces}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = facts.environment.get(variable, "")
        names = [name.partition(":")[0] for name in value.removeprefix("=").split(",")]
        if not value or value.startswith("^"):  # ^ names those that NCCL leaves out
            continue
        is_prefix = variable.startswith("NCCL") and not value.startswith("=")
        unknown = [name for name in names if not any(one.startswith(name) if is_prefix else one == name for one in up)]
        found = f"names {', '.join(unknown)}, which is not up here" if unknown else value
        remedy = f"Set {variable} to one of {', '.join(sorted(up))}; names may differ between nodes."
        yield first_of(variable, found, (unknown, "problem", remedy))


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    *(_versions, _devices, _backends, _processors, _memory, _limits),
    *(_disk, _corpus, _environment, _programs),
)
