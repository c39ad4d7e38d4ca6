"""Verdicts of `txl doctor` on several machines: how they differ, and how they reach each other. Pure functions.

Facts and figures come from `machine` and `fabric`; each function gives a finding at least.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from txl_dist.ops.doctor.checks import Finding, Verdict, first_of
from txl_dist.ops.doctor.fabric import Peer, Reduce
from txl_dist.ops.doctor.machine import WATCHED, Facts
from txl_dist.tables import size

WARNINGS = {
    "driver": "Update the older one.",
    "GPUs": "Every step waits for the slowest; leave it out, or live with that.",
    "ranks": "See the slots in the hostfile, if that is not meant.",
    "interfaces": "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME per node (.deepspeed_env sets all alike).",
}
"""What may differ, with what to do about it. Everything else that is compared must be equal."""


def differences(nodes: Mapping[str, Facts]) -> Iterator[Finding]:
    """What nodes have different that should be equal."""
    values = {node: _compared(facts) for node, facts in nodes.items()}
    are_equal = True
    for name in next(iter(values.values())):
        where: dict[str, list[str]] = {}
        for node, of_node in values.items():
            where.setdefault(of_node[name] or "none", []).append(node)
        if len(where) > 1:
            are_equal = False
            listed = "; ".join(f"{value} on {', '.join(those)}" for value, those in where.items())
            same = "Make the nodes equal: the same image, or the same constraints.txt."
            verdict: Verdict = "warning" if name in WARNINGS else "problem"
            yield Finding("differences", verdict, f"{name}: {listed}", WARNINGS.get(name, same))
    if are_equal:
        yield Finding("differences", "ok", f"none between {len(nodes)} nodes in versions, GPUs, ranks and interfaces")


def _compared(facts: Facts) -> dict[str, str]:
    return {
        "Python": facts.python,
        **{name: facts.versions.get(name, "") for name in WATCHED},
        "CUDA of torch": facts.torch_cuda,
        "NCCL": facts.backends.get("nccl", ""),
        "driver": facts.driver,
        "GPUs": ", ".join(device.name for device in facts.devices),
        "ranks": str(facts.num_local_ranks),
        "interfaces": " ".join(sorted(one.name for one in facts.interfaces)),
    }


def judge_reduce(figures: Sequence[Reduce], *, num_nodes: int, on_gpu: bool) -> Finding:
    """Latency and bandwidth between all ranks."""
    best = max(figure.bus_gb_s for figure in figures)
    direct = "See nvidia-smi topo -m, and NCCL_DEBUG=INFO: GPUs that do not reach each other directly go by the host."
    network = "See that *_SOCKET_IFNAME names the fast network (NCCL_DEBUG=INFO says what NCCL uses)."
    return first_of(
        "all-reduce",
        ", ".join(f"{size(one.num_bytes)} {one.ms:.3g} ms ({one.bus_gb_s:.3g} GB/s)" for one in figures),
        (on_gpu and num_nodes == 1 and best < 5, "warning", direct),
        (num_nodes > 1 and best < (1.0 if on_gpu else 0.1), "warning", network),
    )


def judge_peers(peers: Sequence[Peer], *, node_of: Mapping[int, str]) -> Finding:
    """Links from rank 0 to some peers."""
    slow = min(peers, key=lambda peer: peer.mib_s)
    typical, node = statistics.median(peer.mib_s for peer in peers), node_of[slow.rank]
    return first_of(
        "links",
        f"from rank 0: {typical:.0f} MiB/s; slowest {slow.mib_s:.0f} MiB/s, {slow.round_trip_ms:.2f} ms round trip, to "
        f"rank {slow.rank} on {node}",
        (len(peers) > 1 and slow.mib_s < typical / 3, "warning", f"Look at cable, port and load of {node}."),
    )
