"""Verdicts of `txl doctor` on several machines: how they differ, and how they reach each other. Pure functions.

Facts and figures come from `machine` and `fabric`; each function gives a finding at least.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from txl_dist.ops.doctor.checks import Finding, Verdict
from txl_dist.ops.doctor.fabric import Peer, Reduce
from txl_dist.ops.doctor.machine import WATCHED, Facts
from txl_dist.tables import size

SLOWER_PCT = 30
"""A rank that computes so much slower than the median is named."""


def differences(nodes: Mapping[str, Facts]) -> Iterator[Finding]:
    """What nodes have different that should be equal."""
    same = "Make the nodes equal: the same image, or the same constraints.txt."
    found = [_compare(nodes, "Python", {node: facts.python for node, facts in nodes.items()}, remedy=same)]
    for name in WATCHED:
        versions = {node: facts.versions.get(name, "none") for node, facts in nodes.items()}
        found.append(_compare(nodes, name, versions, remedy=same))
    cuda = {node: facts.torch_cuda or "none" for node, facts in nodes.items()}
    nccl = {node: facts.backends.get("nccl", "none") for node, facts in nodes.items()}
    driver = {node: facts.driver or "none" for node, facts in nodes.items()}
    gpus = {node: ", ".join(device.name for device in facts.devices) or "none" for node, facts in nodes.items()}
    ranks = {node: str(facts.num_local_ranks) for node, facts in nodes.items()}
    names = {node: " ".join(sorted(one.name for one in facts.interfaces)) for node, facts in nodes.items()}
    by_hand = "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME per node (not in .deepspeed_env, which sets all alike)."
    slowest = "Every step waits for the slowest; leave it out, or live with that."
    found += [
        _compare(nodes, "CUDA of torch", cuda, remedy=same),
        _compare(nodes, "NCCL", nccl, remedy=same),
        _compare(nodes, "driver", driver, remedy="Update the older one.", verdict="warning"),
        _compare(nodes, "GPUs", gpus, remedy=slowest, verdict="warning"),
        _compare(
            nodes, "ranks", ranks, remedy="See the slots in the hostfile, if that is not meant.", verdict="warning"
        ),
        _compare(nodes, "interfaces", names, remedy=by_hand, verdict="warning"),
    ]
    differing = [finding for finding in found if finding is not None]
    yield from differing
    if not differing:
        yield Finding("differences", "ok", f"none between {len(nodes)} nodes in versions, GPUs, ranks and interfaces")


def _compare(
    nodes: Mapping[str, Facts], name: str, values: Mapping[str, str], *, remedy: str, verdict: Verdict = "problem"
) -> Finding | None:
    where: dict[str, list[str]] = {}
    for node in nodes:
        where.setdefault(values[node], []).append(node)
    if len(where) == 1:
        return None
    listed = "; ".join(f"{value} on {', '.join(those)}" for value, those in where.items())
    return Finding("differences", verdict, f"{name}: {listed}", remedy)


def judge_reduce(figures: Sequence[Reduce], *, num_nodes: int, on_gpu: bool) -> Iterator[Finding]:
    """Latency and bandwidth between all ranks."""
    listed = ", ".join(f"{size(one.num_bytes)} {one.ms:.3g} ms ({one.bus_gb_s:.3g} GB/s)" for one in figures)
    best = max(figure.bus_gb_s for figure in figures)
    if on_gpu and num_nodes == 1 and best < 5:
        remedy = (
            "See nvidia-smi topo -m, and NCCL_DEBUG=INFO: GPUs that do not reach each other directly go by the host."
        )
    elif num_nodes > 1 and best < (1.0 if on_gpu else 0.1):
        remedy = "See that *_SOCKET_IFNAME names the fast network (NCCL_DEBUG=INFO says what NCCL uses)."
    else:
        yield Finding("all-reduce", "ok", listed)
        return
    yield Finding("all-reduce", "warning", listed, remedy)


def judge_peers(peers: Sequence[Peer], *, node_of: Mapping[int, str]) -> Iterator[Finding]:
    """Links from rank 0, and clocks."""
    if not peers:
        return
    slow = min(peers, key=lambda peer: peer.mib_s)
    typical = statistics.median(peer.mib_s for peer in peers)
    found = (
        f"from rank 0: {typical:.0f} MiB/s; slowest {slow.mib_s:.0f} MiB/s, {slow.round_trip_ms:.2f} ms round trip, to "
        f"rank {slow.rank} on {node_of[slow.rank]}"
    )
    if len(peers) > 1 and slow.mib_s < typical / 3:
        yield Finding("links", "warning", found, f"Look at cable, port and load of {node_of[slow.rank]}.")
    else:
        yield Finding("links", "ok", found)
    off = max(peers, key=lambda peer: abs(peer.ahead_s))
    found = (
        f"{node_of[off.rank]} is {abs(off.ahead_s):.3f} s {'ahead of' if off.ahead_s > 0 else 'behind'} {node_of[0]}"
    )
    remedy = "Start chrony or systemd-timesyncd on every node."
    if abs(off.ahead_s) > 30:
        yield Finding("clocks", "problem", found, remedy)
    elif abs(off.ahead_s) > 1:
        yield Finding("clocks", "warning", found, remedy)
    else:
        yield Finding("clocks", "ok", f"at most {abs(off.ahead_s):.3f} s apart")


def judge_speed(tflops: Sequence[float], *, node_of: Mapping[int, str]) -> Iterator[Finding]:
    """Matrix products of each rank, all at once."""
    slow = min(range(len(tflops)), key=lambda rank: tflops[rank])
    typical = statistics.median(tflops)
    slower_pct = 100 * (1 - tflops[slow] / typical)
    found = f"{typical:.3g} TFLOP/s per rank; slowest {tflops[slow]:.3g}, rank {slow} on {node_of[slow]}"
    if slower_pct > SLOWER_PCT:
        remedy = f"Every step waits for it: look at clocks, temperature and other processes of {node_of[slow]}."
        yield Finding("speed", "warning", found, remedy)
    else:
        yield Finding("speed", "ok", found)
